"""The comparison of a layout with one device: right layouts pass, every fault of `faults.py` is caught and named.

Bounds and text are checked without compiling anything, and so is what is compared, in test_verify_options.py.
"""

import functools
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import faults
import jax
import numpy as np
import pytest
from rich.console import Console
from test_train import user_environment

from jaxmeg.cli import ConfigError, read
from jaxmeg.config import Config
from jaxmeg.validate.check import problems
from jaxmeg.verify import run
from jaxmeg.verify.certificate import Certificate, Check, Outcome, certify
from jaxmeg.verify.layouts import all_layouts, is_legal, layout_name, num_devices, one_device
from jaxmeg.verify.measure import compared, misplaced_rows, reference, verify
from jaxmeg.verify.run import arithmetic_line
from jaxmeg.verify.search import at_fault
from jaxmeg.verify.shrink import shrink
from jaxmeg.verify.text import Report, show

ROOT = Path(__file__).parent.parent
TINY = ["--model=toy", "--model.num_layers=2", "--model.vocab_size=30", "--model.embed_dim=16", "--model.mlp_dim=32",
        "--model.num_heads=2", "--model.num_kv_heads=2", "--seq_len=8", "--global_batch=8"]


def tiny(options: str) -> Config:
    """A config of the smallest model; its mesh names every axis."""
    config = read([*TINY, *options.split()])
    config = config if config.mesh.dp else replace(config, mesh=replace(config.mesh, dp=1))
    assert is_legal(config), problems(config, num_devices(config))
    return config


# ---------------------------------------------------------------- layouts that are right
def test_a_layout_passes_with_the_optimizer_of_the_config():
    """Uneven stages, a padded vocabulary, fewer kv heads than tp, and a key bias whose gradient is zero but for rounding."""
    config = tiny("--mesh pp=2,tp=2,dp=2 --zero 3 --remat selective --model.num_layers 3 --model.num_kv_heads 1 --model.positions learned "
                  "--model.attn_bias true --train.dropout 0.1")
    certificate = verify(config, own_optimizer=True)
    assert certificate.passed, certificate.reason
    checks = {check.name: check for check in certificate.checks}
    assert list(checks) == ["initial weights", "placement of rows", "loss", "gradients", "gradient norm", "parameters", "parameters, adamw"]
    assert set(checks["gradients"].leaves) == set(checks["parameters"].leaves) > set(checks["parameters, adamw"].leaves)
    assert "layers.attention.key_bias against zero" in checks["gradients"].note
    assert all(check.error > 0 for check in certificate.checks[3:])  # something was compared


@pytest.mark.parametrize("name", [
    "pp=8, ZeRO 0, gpipe", "pp=4,rep=2, ZeRO 1, 1f1b", "dp=4,tp=2, ZeRO 2", "pp=2,dp=2,tp=2, ZeRO 3, interleaved",
    "rep=2,dp=2,tp=2, ZeRO 3", "pp=2,tp=4, ZeRO 0, interleaved"])
def test_some_of_all_layouts_pass(name):
    """Of a Llama of 18 layers; all of them by `scripts/verify.py --all 8`."""
    small, _ = eight()
    certificate = verify(next(config for config in small if layout_name(config) == name))
    assert certificate.passed, certificate.reason


@functools.cache
def eight() -> tuple[list[Config], list[str]]:
    return shrink(all_layouts(read(["--model=llama3.1-8b", "--model.num_layers=34", "--mesh=dp=8"]), 8), 8)


def test_layouts_share_references():
    small, _ = eight()
    assert len({one_device(compared(config)) for config in small}) <= 2


# ---------------------------------------------------------------- faults
class Case(NamedTuple):
    """A fault on a layout, and what must be named: the checks that fail, the gradient leaves that are off, the parts at fault."""

    fault: Callable[[], Any]
    options: str
    checks: str
    leaves: str
    """A pattern of their paths."""
    parts: set[str]


UPDATE, BACKWARD, FORWARD = "parameters", "gradients, gradient norm, parameters", "loss, gradients, gradient norm, parameters"
FAULTS = [
    Case(faults.missing_dp_sum, "--mesh dp=2 --zero 0", BACKWARD, r"\.mlp\.", {"mesh.dp"}),
    Case(faults.doubled_tp_sum, "--mesh tp=2 --zero 0", BACKWARD, "norm", {"mesh.tp"}),
    Case(faults.shifted_positions, "--mesh pp=2 --zero 0", FORWARD, "", {"mesh.pp"}),
    Case(faults.dropped_layer, "--mesh pp=2 --zero 0 --schedule gpipe", FORWARD, "", {"mesh.pp"}),
    Case(faults.stale_ring_slot, "--mesh pp=2 --zero 0", BACKWARD, "^(embed|layers)", {"mesh.pp", "pipeline.schedule"}),
    Case(faults.mean_of_means, "--mesh dp=2 --zero 0", FORWARD, "", {"mesh.dp"}),
    Case(faults.head_without_the_last_stage, "--mesh pp=2 --zero 0 --schedule gpipe", FORWARD, "", {"mesh.pp"}),
    Case(faults.clip_by_stage, "--mesh pp=2 --zero 0 --schedule gpipe", "gradients, parameters", "^layers", {"mesh.pp"}),
    Case(faults.rows_of_another_rank, "--mesh dp=2 --zero 0", "placement of rows", "^$", {"mesh.dp"}),
    Case(faults.stale_shard, "--mesh dp=2 --zero 3", FORWARD, "", {"mesh.dp", "layout.zero"}),
    Case(faults.masks_by_local_row, "--mesh dp=2 --zero 0 --train.dropout 0.3", FORWARD, "", {"mesh.dp", "train.dropout"}),
]


@pytest.mark.parametrize("case", FAULTS, ids=lambda case: case.fault.__name__)
def test_a_fault_is_caught_and_named(case):
    config = tiny(case.options)
    reference(one_device(compared(config)))  # of the right code
    with case.fault():
        certificate = verify(config)
        assert [check.name for check in certificate.checks if not check.passed] == case.checks.split(", ")
        gradients = next(check for check in certificate.checks if check.name == "gradients")
        assert gradients.off == [path for path in gradients.leaves if re.search(case.leaves, path)]
        assert set(at_fault(config, lambda less: not verify(less).passed)) == case.parts


def test_an_optimizer_without_decay_is_caught_at_a_small_learning_rate():
    """It changes a weight by a hundred-thousandth: less than the bound, of the weight."""
    config = tiny("--mesh dp=2 --zero 0 --lr 1e-4")
    verify(config, own_optimizer=True)  # of the right code
    with faults.no_weight_decay():
        certificate = verify(config, own_optimizer=True)
    assert [check.name for check in certificate.checks if not check.passed] == ["parameters, adamw"]
    assert {path for path in certificate.checks[-1].leaves if "norm" not in path} <= set(certificate.checks[-1].off)


def test_updates_that_are_skipped_are_no_pass():
    certificate = verify(tiny("--mesh dp=2 --zero 0 --optim.name sgd --lr 1e25"), own_optimizer=True)
    where = "update 2 on the layout and update 2 on one device"
    assert certificate.reason == f"parameters, sgd: {where} was skipped: the loss or a gradient is not finite"


# ---------------------------------------------------------------- a module of the user's
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, loss: str) -> Config:
    (tmp_path / "task_to_verify.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return read([f"--model.module=task_to_verify:{model}", f"--model.loss=task_to_verify:{loss}", "--data.source=task_to_verify:ROWS",
                 "--mesh=rep=2,dp=2", "--zero=3", "--global_batch=64", "--microbatch=2"])


def test_a_module_of_the_users(tmp_path, monkeypatch):
    config = own(tmp_path, monkeypatch, "Model", "loss")
    (small,), lines = shrink([config], 4)
    assert (small.data.global_batch, small.pipeline.microbatch) == (16, 2) and len(lines) == 1
    certificate = verify(small, own_optimizer=True)
    assert certificate.passed, certificate.reason
    assert len(certificate.checks[3].leaves) == 5
    assert arithmetic_line(small, None).startswith("the module's own dtypes, none below fp32, with matmuls")


@pytest.mark.parametrize(("model", "loss", "message"), [
    ("low", "loss", "model.module=task_to_verify:low computes in bf16, in which layouts differ by rounding: make its layers dtype=float32 "
     "to compare"),
    ("Model", "flat", "the loss has no gradient on one device: nothing can be compared"),
])
def test_modules_that_cannot_be_compared_are_refused(tmp_path, monkeypatch, model, loss, message):
    (small,), _ = shrink([own(tmp_path, monkeypatch, model, loss)], 4)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        verify(small)


OWN = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
class Model(nnx.Module):
    def __init__(self, rngs, dtype=None):
        self.inner, self.outer = nnx.Linear(4, 8, dtype=dtype, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.gain = nnx.Param(jnp.ones(()))
    def __call__(self, x):
        return self.outer(jnp.tanh(self.inner(x)).astype(jnp.float32)) * self.gain[...]
def low(rngs):
    return Model(rngs, jnp.bfloat16)
def flat(model, batch):
    return 0 * loss(model, batch)
def loss(model, batch):
    return -jnp.take_along_axis(jax.nn.log_softmax(model(batch["x"])), batch["y"][:, None], axis=1)[:, 0]
rng = np.random.default_rng(0)
ROWS = [{"x": rng.standard_normal(4).astype(np.float32), "y": np.int32(i % 3)} for i in range(50)]
"""


# ---------------------------------------------------------------- what is compared, without a device
def outcome(**changed: Any) -> Outcome:
    leaf, zero = np.linspace(1, 2, 8, dtype=np.float32), np.zeros(8, np.float32)
    values: dict[str, Any] = dict(initial={"a": leaf, "b": zero}, misplaced_rows=0, rows="", loss=2.0, grads={"a": leaf, "b": zero},
                                  grad_norm=4.0, params={"a": leaf, "b": leaf}, own_params={"a": leaf, "b": leaf})
    return Outcome(**(values | changed))


def failed_checks(got: Outcome, want: Outcome, start: dict[str, np.ndarray]) -> list[str]:
    certificate = certify("layout", got, want, start, "lion")
    json.dumps(certificate.as_dict(), allow_nan=False)
    failed = [check.name for check in certificate.checks if not check.passed]
    assert certificate.passed == (not failed)
    return failed


A = np.linspace(1, 2, 8, dtype=np.float32)  # its norm is 4.31


@pytest.mark.parametrize(("changed", "failed"), [
    ({}, ""),
    ({"initial": {"a": A, "b": -np.zeros(8, np.float32)}}, "initial weights"),  # equal, but not to the bit
    ({"misplaced_rows": 1}, "placement of rows"),
    ({"loss": 2 + 0.9e-5}, ""),
    ({"loss": 2 + 1.1e-5}, "loss"),
    ({"loss": float("nan")}, "loss"),
    ({"grads": {"a": A * np.float32(1 + 0.9e-4), "b": 0 * A}}, ""),
    ({"grads": {"a": A * np.float32(1 + 1.1e-4), "b": 0 * A}}, "gradients"),
    ({"grads": {"a": A, "b": A * np.float32(0.9e-6 * 4 / 4.31)}}, ""),  # a gradient of zero: against 1e-6 of the whole norm, 4
    ({"grads": {"a": A, "b": A * np.float32(1.1e-6 * 4 / 4.31)}}, "gradients"),
    ({"grads": {"a": A, "b": A * np.float32("nan")}}, "gradients"),
    ({"grad_norm": 4 * (1 + 0.9e-5)}, ""),
    ({"grad_norm": 4 * (1 + 1.1e-5)}, "gradient norm"),
    ({"params": {"a": A, "b": A * np.float32(1 + 1.1e-4)}}, "parameters"),
    ({"own_params": {"a": A * np.float32(1 + 1.1e-4), "b": A}}, "parameters, lion"),
    ({"own_params": {"a": A, "b": 2 * A}}, ""),  # Lion makes an update of any rounding
    ({"skipped": (2,)}, "parameters"),
    ({"own_skipped": (1, 2)}, "parameters, lion"),
])
def test_bounds(changed, failed):
    assert failed_checks(outcome(**changed), outcome(), {"a": 0 * A, "b": 0 * A}) == ([failed] if failed else [])


@pytest.mark.parametrize(("change", "off", "passes"), [
    (1e-2, 0.9e-6, True), (1e-2, 1.1e-6, False),  # of the weight: a ten-thousandth of its change
    (1e-4, 3e-7, True), (1e-4, 4e-7, False),  # six roundings of 6e-8
    (0.0, 3e-7, True), (0.0, 4e-7, False)])
def test_it_is_the_change_of_a_parameter_that_is_compared(change, off, passes):
    start = {"a": A.astype(np.float64), "b": A}
    want = outcome(params={"a": start["a"] * (1 + change), "b": A}, own_params=None)
    got = outcome(params={"a": start["a"] * (1 + change + off), "b": A}, own_params=None)
    assert failed_checks(got, want, start) == ([] if passes else ["parameters"])


@pytest.mark.parametrize(("wrong", "failed"), [(2, ["parameters"]), (3, ["parameters", "parameters, lion"])])
def test_of_the_configs_optimizer_one_entry_in_a_thousand_may_be_off(wrong, failed):
    """Whose gradient is zero by chance: here of 2000."""
    right = np.ones(2000, np.float32)
    other = np.where(np.arange(2000) < wrong, -1, right)
    values: dict[str, Any] = {"initial": {"a": right}, "grads": {"a": right}}
    start = {"a": 0 * right}
    assert failed_checks(outcome(**values, params={"a": other}, own_params={"a": other}),
                         outcome(**values, params={"a": right}, own_params={"a": right}), start) == failed


def test_a_scalar_has_bits_too():
    one, start = {"a": np.array(1, np.float32)}, {"a": np.array(0, np.float32)}
    same = outcome(initial=one, grads=one, params=one, own_params=one)
    assert failed_checks(same, same, start) == []
    assert failed_checks(replace(same, initial={"a": np.nextafter(one["a"], np.float32(2))}), same, start) == ["initial weights"]


def test_each_row_is_expected_once_on_its_data_rank():
    from jaxmeg.setup import build
    from jaxmeg.step import place
    config = tiny("--mesh pp=2,rep=2,dp=2 --zero 1")
    setup, host = build(config, jax.devices()), np.arange(8 * 3).reshape(8, 3)
    assert misplaced_rows(setup, place(setup, host, 2), host) == 0
    assert misplaced_rows(setup, place(setup, host, 2), np.roll(host, 1, 0)) == 8 * 2  # each of 8 devices holds 2 rows
    one_wrong = host.copy()
    one_wrong[5, 1] = 99
    assert misplaced_rows(setup, place(setup, host, 2), one_wrong) == 2  # row 5 is on both stages


def test_the_text_of_a_failure_names_what_failed_and_how_to_see_it_again():
    certificate = Certificate(layout="dp=2, ZeRO 0", checks=(
        Check(name="loss", error=0.0, bound=1e-5), Check(name="gradients", error=0.5, bound=1e-4, leaves={"a": 5e3, "b": 0.1, "c": 2.0})))
    report = Report(command="verify", devices="2", arithmetic="fp32", shrunk=["x 2 -> 1"], certificates=[certificate], minutes=1.0,
                    at_fault=["mesh.dp", "layout.zero"], smallest="python scripts/verify.py --full --mesh dp=2")
    file = io.StringIO()
    show(report, Console(width=140, file=file))
    text = file.getvalue()
    assert "FAIL: gradients off by 5.0e-01 in a, and 1 leaves more" in text
    assert "at fault    most likely mesh.dp or layout.zero: the layout passes without any one of them" in text
    assert text.rstrip().endswith("smallest    python scripts/verify.py --full --mesh dp=2")
    left_out = report.as_dict()["not_compared"]
    assert f"not compared  {left_out}" in text and "several processes" in left_out and "16-bit arithmetic" in left_out


def test_the_search_says_how_long_it_takes(monkeypatch):
    """Of a fault that takes pp: mesh.pp, mesh.tp, ZeRO (nothing to shard, so gone with dp), the schedule and remat are switched off."""
    config, told = tiny("--mesh pp=2,tp=2 --zero 0 --schedule 1f1b --remat full"), []
    check = Check(name="loss", error=1.0, bound=1e-5)

    def certified(candidate: Config, own_optimizer: bool) -> Certificate:
        return Certificate(layout="", checks=(check,) if candidate.mesh.pp > 1 else ())

    monkeypatch.setattr(run, "certify", certified)
    begun = Report(command="", devices="", arithmetic="", shrunk=[], minutes=0.0, certificates=[certified(config, False)])
    report = run.explain(config, begun, told.append)
    assert report.at_fault == ["mesh.pp"] and report.certificates == begun.certificates and "pp=2" in report.smallest
    assert told[0].endswith("at most 4 tries first")
    assert [line.split("  ")[0] for line in told[1:6]] == ["(1 of 4)", "(2 of 4)", "(3 of 4)", "(4 of 4)", told[5]]
    assert told[6].startswith("(5)")


# ---------------------------------------------------------------- the script
def script(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = user_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(cwd), environment["PYTHONPATH"]])
    return subprocess.run([sys.executable, str(ROOT / "scripts" / "verify.py"), *arguments], cwd=cwd, env=environment,
                          capture_output=True, text=True, check=False)


def test_the_script_writes_two_files_and_nothing_else(tmp_path):
    done = script(*TINY, "--mesh", "dp=2", "--zero", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "PASS" in done.stdout.splitlines() and "2 emulated on the CPU" in done.stdout
    files = [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(files) == ["runs/verify.json", "runs/verify.txt"]
    record = json.loads((tmp_path / "runs" / "verify.json").read_text())
    assert record["passed"] and record["certificates"][0]["layout"] == "dp=2, ZeRO 2"
    text = (tmp_path / "runs" / "verify.txt").read_text()
    assert all(path in text for path in record["certificates"][0]["checks"][3]["leaves"])


def test_the_script_lists_all_layouts_and_fails_where_one_does(tmp_path):
    """A file that Python reads at its start doubles the gradients of GPipe's stages, and ends a process that runs 1F1B's."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    done = script(*TINY, "--global_batch=1", "--all=2", "--jobs=2", "--out=out", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    lines = sorted(line[:23] for line in done.stdout.splitlines() if line.startswith(("PASS", "FAIL")))
    assert lines == ["FAIL  pp=2, ZeRO 0, 1f1", "FAIL  pp=2, ZeRO 0, gpi", "PASS  tp=2, ZeRO 0     "]
    assert "3 layouts: 1 PASS, 2 FAIL" in done.stdout
    assert [line for line in done.stdout.splitlines() if "1f1b" in line and "its process died twice" in line]


BROKEN = """
import os
from jax import lax
from jaxmeg.layout import Layout
from jaxmeg.verify import measure
right, build = Layout.reduce, measure.build
Layout.reduce = lambda self, grads: right(self, self.map(lambda leaf, g: g * lax.axis_size("pp"), grads))
measure.build = lambda config, *rest: os._exit(3) if config.pipeline.schedule == "1f1b" else build(config, *rest)
"""


@pytest.mark.parametrize(("arguments", "message"), [
    ("--mesh tp=3 --model toy", "error: mesh.tp=3 does not divide model.num_heads=8"),
    ("--jobs 2", "error: --jobs=2 has no effect without --all: leave it out"),
    ("--al 8", "error: --al is unknown: did you mean --all?"),
    ("--out /dev/null/x", "error: --out /dev/null/x cannot be written (/dev/null: Not a directory): give another --out"),
    ("--all 0", "error: --all=0 is out of range: use 1 or more"),
    ("--all 3 --model toy --model.num_layers 2 --global_batch 1", "error: mesh.dp=3 does not divide data.global_batch=1"),
])
def test_mistakes_end_with_2(tmp_path, arguments, message):
    done = script(*arguments.split(), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(message), done.stderr
    assert not list(tmp_path.iterdir())
