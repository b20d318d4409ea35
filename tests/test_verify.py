"""The comparison of a layout with one device: right layouts pass, every fault of `faults.py` is caught and named.

Shrinking, enumeration, the search for what is at fault and the text are checked without compiling anything.
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
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import faults
import jax
import numpy as np
import pytest
from rich.console import Console
from test_train import user_environment

from jaxmeg.arch import PRESETS, num_params
from jaxmeg.cli import read
from jaxmeg.config import Axis, Config, MeshConfig, Resolved, resolve
from jaxmeg.validate.check import problems
from jaxmeg.verify.certificate import Certificate, Check, Outcome, certify
from jaxmeg.verify.layouts import all_layouts, command, is_legal, layout_name, num_devices, one_device, smaller, switched_off
from jaxmeg.verify.measure import compared, misplaced_rows, reference, verify
from jaxmeg.verify.search import at_fault, smallest_failing
from jaxmeg.verify.shrink import documents_apart, shrink
from jaxmeg.verify.start import plan
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
    assert list(checks) == ["initial weights", "data rows", "loss", "gradients", "gradient norm", "parameters", "parameters, adamw"]
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
    Case(faults.rows_of_another_rank, "--mesh dp=2 --zero 0", "data rows", "^$", {"mesh.dp"}),
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


# ---------------------------------------------------------------- a module of the user's
def test_a_module_of_the_users(tmp_path, monkeypatch):
    (tmp_path / "task_to_verify.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = read(["--model.module=task_to_verify:Model", "--model.loss=task_to_verify:loss", "--data.source=task_to_verify:ROWS",
                   "--mesh=rep=2,dp=2", "--zero=3", "--global_batch=64", "--microbatch=2"])
    (small,), lines = shrink([config], 4)
    assert (small.data.global_batch, small.pipeline.microbatch) == (16, 2) and len(lines) == 1
    certificate = verify(small, own_optimizer=True)
    assert certificate.passed, certificate.reason
    assert len(certificate.checks[3].leaves) == 4


OWN = """
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
class Model(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.outer = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
    def __call__(self, x):
        return self.outer(jnp.tanh(self.inner(x)))
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


A = np.linspace(1, 2, 8, dtype=np.float32)  # its norm is 4.31


@pytest.mark.parametrize(("changed", "failed"), [
    ({}, ""),
    ({"initial": {"a": A, "b": -np.zeros(8, np.float32)}}, "initial weights"),  # equal, but not to the bit
    ({"misplaced_rows": 1}, "data rows"),
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
])
def test_bounds(changed, failed):
    certificate = certify("layout", outcome(**changed), outcome(), "lion")
    assert [check.name for check in certificate.checks if not check.passed] == ([failed] if failed else [])
    assert certificate.passed == (not failed)
    json.dumps(certificate.as_dict(), allow_nan=False)


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


# ---------------------------------------------------------------- smaller configs
SHAPES = [f"--model={name}" for name in PRESETS] + [f"--config={path}" for path in sorted((ROOT / "configs").glob("*.yaml"))]
LAYOUTS = [
    "--mesh dp=1", "--mesh dp=8 --zero 3", "--mesh rep=2,dp=4 --zero 2", "--mesh tp=2 --zero 0", "--mesh pp=2,tp=2 --zero 0",
    "--mesh pp=3 --zero 0 --microbatch 1", "--mesh pp=4,dp=2,tp=2 --schedule interleaved --zero 2", "--mesh tp=8,dp=3 --global_batch 96",
    "--mesh pp=2 --schedule interleaved --chunks 3 --microbatch 2", "--mesh pp=8,tp=4 --zero 1 --schedule gpipe --microbatch 16",
    "--mesh pp=4,dp=4,tp=8 --zero 3 --global_batch 512", "--mesh dp=64 --zero 1 --global_batch 64"]


def relations(config: Config, r: Resolved) -> dict[str, Any]:
    """What makes the layout of a leaf, a stage or a batch differ: must stay. Written without looking at `shrink`."""
    arch, mesh, pieces = r.arch, r.mesh, len(r.layer_split)
    tp, zero = mesh[Axis.TP], mesh[Axis.DP]
    return {
        "switches": [getattr(arch, name) for name in ("norm", "norm_eps", "activation", "positions", "attn_bias", "out_bias", "mlp_bias",
                                                      "qk_norm", "tied", "rope_theta")],
        "layers": [size - min(r.layer_split) for size in r.layer_split],
        "padding": r.padded_vocab - arch.vocab_size,
        "heads": (arch.num_heads // arch.num_kv_heads, np.sign(arch.num_kv_heads - tp), arch.num_kv_heads % tp == 0),
        "zero": [size % zero == 0 for size in (arch.embed_dim, arch.mlp_dim, arch.head_dim)],
        "microbatches": (r.num_microbatches % mesh[Axis.PP], r.num_microbatches < mesh[Axis.PP], r.num_microbatches > 1),
        "pipeline": (r.schedule, r.chunks, pieces), "mesh": mesh, "layout": config.layout,
        "rest": (config.train.dropout, config.train.seed, documents_apart(config.data)),
    }


@pytest.mark.parametrize("options", LAYOUTS)
def test_small_configs_keep_what_their_layout_depends_on(options):
    checked = 0
    for shape in SHAPES:
        config = read([shape, "--remat=full", "--train.dropout=0.1", *options.split()])
        mesh = replace(config.mesh, dp=config.mesh.dp or 1)
        pipeline = config.pipeline if mesh.pp > 1 else replace(config.pipeline, schedule=None, chunks=None)
        config = replace(config, mesh=mesh, pipeline=pipeline)
        if is_legal(config):
            checked += 1
            keeps_what_its_layout_depends_on(config)
    assert checked >= 5


def keeps_what_its_layout_depends_on(config: Config) -> None:
    (small,), lines = shrink([config], num_devices(config))
    assert not problems(small, num_devices(small))
    before, after = resolve(config, num_devices(config)), resolve(small, num_devices(small))
    assert relations(small, after) == relations(config, before)
    assert all(getattr(after.arch, name) <= getattr(before.arch, name) for name in ("num_layers", "embed_dim", "vocab_size", "num_heads"))
    assert min(after.arch.num_layers, 2) == min(before.arch.num_layers, 2)
    assert small.data.global_batch <= config.data.global_batch and small.data.seq_len <= config.data.seq_len
    assert num_params(after.arch) < 2e6 and small.data.global_batch * small.data.seq_len <= 64 * 64 * before.mesh[Axis.DP]
    assert bool(lines) == (small != config)
    assert shrink([small], num_devices(small)) == ([small], [])


def test_a_schedule_of_the_users_keeps_its_microbatches(tmp_path):
    path = tmp_path / "my.csv"
    path.write_text("rank 0,F0,F1,F2,B0,B1,B2\nrank 1,F0,B0,F1,B1,F2,B2\n")
    config = read(f"--mesh pp=2,dp=1 --zero 0 --schedule {path} --global_batch 48 --model demo".split())
    (small,), _ = shrink([config], 2)
    assert resolve(small, 2).num_microbatches == 3 and small.data.global_batch == 18 and not problems(small, 2)
    assert f"ZeRO 0, {path}" in layout_name(small)


def test_factored_statistics_stay_factored():
    config = read(["--model=gpt2", "--optim.name=adafactor", "--optim.lr=0.1", "--mesh=dp=2"])
    assert shrink([config], 2)[0][0].optim.factored_dim == 16


# ---------------------------------------------------------------- all layouts, and less than a layout
def test_all_layouts_of_eight_devices_are_counted_by_hand():
    """Three factors of 2 over four axes. Without stages, 10 meshes: dp of 1 has one ZeRO stage, 4 meshes; dp and rep above 1 have
    ZeRO 1 to 3, 3 meshes; dp alone has 0 to 3, 3 meshes. With stages, 10 meshes x 3 schedules: 6, 1 and 3 of them."""
    found = all_layouts(read(["--model=llama3.1-8b"]), 8)
    assert len(found) == (4 + 3 * 3 + 3 * 4) + 3 * (6 + 1 * 3 + 3 * 4)
    assert len({layout_name(config) for config in found}) == len(found)
    assert all(prod(resolve(config, 8).mesh.values()) == 8 and not problems(config, 8) for config in found)


def test_only_what_fits_is_a_layout():
    found = all_layouts(read(["--model=toy", "--model.num_layers=2"]), 4)
    assert {config.mesh.pp for config in found} == {1, 2}
    assert not any(config.pipeline.schedule == "interleaved" for config in found)


def test_switching_off_leaves_legal_layouts_of_the_same_batch():
    config = tiny("--mesh pp=2,rep=2,dp=2 --zero 3 --schedule interleaved --model.num_layers 4 --remat full --train.dropout 0.1")
    off = switched_off(config)
    assert set(off) == {"mesh.pp", "mesh.rep", "mesh.dp", "pipeline.schedule", "pipeline.chunks", "layout.remat", "train.dropout"}
    assert all(is_legal(without) and without.data == config.data and without.model == config.model for without in off.values())
    assert off["mesh.pp"].pipeline.schedule is None and off["pipeline.chunks"].pipeline.schedule == "1f1b"


def test_what_is_at_fault_and_the_smallest_that_fails():
    """A fault that takes a pipeline of at least 2 stages and a ZeRO stage of 2 or 3 over dp, and at least 4 rows."""
    config = tiny("--mesh pp=4,dp=2,tp=2 --zero 3 --schedule interleaved --model.num_layers 8 --remat full --global_batch 16")
    asked = []

    def fails(c: Config) -> bool:
        asked.append(c)
        return c.mesh.pp >= 2 and (c.mesh.dp or 1) >= 2 and c.layout.zero >= 2 and c.data.global_batch >= 4

    assert at_fault(config, fails) == ["mesh.pp", "mesh.dp", "layout.zero"]
    smallest = smallest_failing(config, fails)
    assert layout_name(smallest) == "pp=2,dp=2, ZeRO 2, gpipe"
    assert (smallest.data.global_batch, smallest.data.seq_len, resolve(smallest, 4).arch.num_layers) == (4, 1, 2)
    assert len(asked) < 40 and not any(fails(step) for step in smaller(smallest).values())


@pytest.mark.parametrize("options", ["--mesh pp=2,tp=2 --zero 3 --schedule interleaved --model.num_layers 4", "--mesh dp=2 --optim.lr 0.1",
                                     "--mesh tp=2 --model.attn_bias true --train.dropout 0.5 --train.seed 3"])
def test_a_command_line_makes_the_config_again(options):
    config = tiny(options)
    words = command(config).split()
    assert words[:3] == ["python", "scripts/verify.py", "--full"]
    again = read(words[3:])
    assert compared(replace(again, mesh=replace(again.mesh, dp=again.mesh.dp or 1))) == compared(config) and again.optim == config.optim


# ---------------------------------------------------------------- where it runs
@pytest.mark.parametrize(("options", "visible", "mesh", "count", "emulated"), [
    ("--mesh tp=2,pp=2", "", MeshConfig(pp=2, tp=2, dp=1), 4, True),
    ("--mesh tp=2 --emulate 8", "", MeshConfig(tp=2, dp=4), 8, True),
    ("--mesh tp=2", "0,1,2,3", MeshConfig(tp=2, dp=2), 4, False),  # as scripts/train.py takes it
    ("--mesh tp=2,dp=1", "0,1,2,3", MeshConfig(tp=2, dp=1), 2, False),
    ("--mesh tp=8", "0,1,2,3", MeshConfig(tp=8, dp=1), 8, True),
])
def test_real_devices_where_there_are_enough(monkeypatch, options, visible, mesh, count, emulated):
    from jaxmeg.devices import Devices
    real = len(visible.split(",")) if visible else 0

    def plan_devices(config: Config) -> Devices:
        return Devices(count=config.emulate or real or 1, emulated=config.emulate is not None or not real, message=None)

    monkeypatch.setattr("jaxmeg.verify.start.plan_devices", plan_devices)
    found = plan(read(["--model=llama3.1-8b", *options.split()]))
    assert (found.configs[0].mesh, found.count, found.emulated) == (mesh, count, emulated)


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
    ("--all 0", "error: --all=0 is out of range: use 1 or more"),
    ("--all 3 --model toy --model.num_layers 2 --global_batch 1", "error: mesh.dp=3 does not divide data.global_batch=1"),
])
def test_mistakes_end_with_2(tmp_path, arguments, message):
    done = script(*arguments.split(), cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(message), done.stderr
    assert not list(tmp_path.iterdir())
