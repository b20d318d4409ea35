"""What a comparison is asked for: smaller configs, all layouts, the search, command lines, options, devices. Compiles nothing."""

import contextlib
import shlex
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_verify import ROOT, tiny

from jaxmeg.arch import PRESETS, num_params
from jaxmeg.cli import read
from jaxmeg.config import Axis, Config, MeshConfig, Resolved, resolve
from jaxmeg.validate.check import problems
from jaxmeg.verify import run
from jaxmeg.verify.layouts import all_layouts, command, is_legal, layout_name, num_devices, smaller, switched_off
from jaxmeg.verify.measure import at_its_peak, compared
from jaxmeg.verify.search import at_fault, smallest_failing
from jaxmeg.verify.shrink import documents_apart, shrink
from jaxmeg.verify.start import check_options, check_writable, plan

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


@pytest.mark.parametrize(("window", "small"), [(1024, 8), (4096, 4096), (5, 5)])
def test_a_window_stays_shorter_than_a_row_or_not(window, small):
    config = read([f"--model.sliding_window={window}", "--seq_len=2048"])
    shrunk = shrink([config], 1)[0][0]
    assert (resolve(shrunk, 1).arch.sliding_window, shrunk.data.seq_len) == (small, 16)


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
                                     "--mesh tp=2 --model.attn_bias true --train.dropout 0.5 --train.seed 3",
                                     "--steps 10000 --optim.warmup 2000 --optim.final_lr_ratio 0 --train.stop_after 5000 --lr 1e-5",
                                     "--steps 10000 --optim.schedule wsd --optim.warmup 150 --optim.wsd_decay 0.9 --train.eval_every 0",
                                     "--data {\"it's.jsonl\":0.5,\"$b.txt\":2} --data.text_key body --data.packing fit",
                                     "--data a&b.txt --data.packing none --precision bf16 --data.validation_fraction 0"])
def test_a_command_line_makes_the_config_again(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("it's.jsonl", "$b.txt", "a&b.txt"):
        Path(name).touch()
    config = tiny(options)
    words = shlex.split(command(config))
    assert words[:3] == ["python", "scripts/verify.py", "--full"]
    again = read(words[3:])
    again = replace(again, mesh=replace(again.mesh, dp=again.mesh.dp or 1))
    assert not problems(again, num_devices(again)) and compared(again) == compared(config)
    assert at_its_peak(again.optim) == at_its_peak(config.optim)
    assert (again.data.train, again.data.packing) == (config.data.train, config.data.packing)


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
    assert found.real == (real if emulated else 0)
    assert ("(this machine has 4)" in run.devices_line(found.real)) == (options == "--mesh tp=8")


@pytest.mark.parametrize(("options", "all_of", "message"), [
    ("--al 8", None, "error: --al is unknown: did you mean --all?"),
    ("--mesh dp=2 --lr 1", 8, "error: --mesh has no effect with --all, which takes every mesh and ZeRO stage: leave one of them out"),
    ("--zero=2", 8, "error: --zero has no effect with --all, which takes every mesh and ZeRO stage: leave one of them out"),
    ("--mesh dp=2 --zero 2 --lr 1 --train.seed 3 --emulate 2 --config x.yaml --mesh.tp 2", None, ""),
    ("--model toy --model.module a:b --data.source c:d --chunks 2", 8, ""),
    ("--init_from runs/a", None, "warning: checkpoint.init_from has no effect on a comparison"),
    ("--profile 3:5 --steps 10 --precision bf16", None,
     "warning: record.profile, train.steps, precision.compute have no effect on a comparison"),
    ("--resume runs/a", None,
     "warning: checkpoint.resume gives the config of its run: weights and optimizer state of the checkpoint are not compared"),
])
def test_no_option_is_passed_over_in_silence(capsys, options, all_of, message):
    with contextlib.suppress(SystemExit) if not message.startswith("error") else pytest.raises(SystemExit, match="2"):
        check_options(options.split(), ("full", "all", "jobs", "out"), all_of)
    assert capsys.readouterr().err.strip() == message


@pytest.mark.parametrize(("options", "all_of", "message"), [
    ("--emulate 4", 8, "--emulate=4 is not the number of devices of --all=8: leave --emulate out"),
    ("--distributed.num_processes 2", None,
     "verify.py runs in one process: leave the distributed.* options out, and start it without launch.py"),
])
def test_options_that_contradict_are_refused(capsys, options, all_of, message):
    with pytest.raises(SystemExit, match="2"):
        plan(read(["--model=toy", *options.split()]), all_of)
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize(("out", "named"), [("file/a", "file: Not a directory"), ("file/b/c", "file: Not a directory"),
                                            ("taken", "taken.json: Is a directory")])
def test_out_is_looked_at_before_anything_runs(tmp_path, capsys, out, named):
    (tmp_path / "file").touch()
    (tmp_path / "taken.json").mkdir()
    with pytest.raises(SystemExit, match="2"):
        check_writable(tmp_path / out)
    assert capsys.readouterr().err == f"error: --out {tmp_path / out} cannot be written ({tmp_path}/{named}): give another --out\n"
    check_writable(tmp_path / "new" / "folder" / "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "taken.json"]
