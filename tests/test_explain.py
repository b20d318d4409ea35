"""What a compiled step sends, listed: places from real metadata, groups against numpy, the script against closed forms."""

from pathlib import Path

import jax
import numpy as np
import pytest
from traffic import Case, traffic

from jaxmeg.planner.explain import groups, place_of

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(("source", "place"), [
    ("jit(step)/shard_map/while/body/eval_jaxpr/tick.EF/forward.stage/while/body/eval_jaxpr/layer/jvp(all_gather(tp))/all_gather",
     "tick EF, forward.stage, layer"),
    ("jit(step)/shard_map/while/body/tick.BG/backward.stage/while/body/layer/transpose(jvp(jvp()))/checkpoint/rematted_computation/"
     "all_gather(tp)/all_gather", "tick BG, backward.stage, layer, again"),
    ("jit(step)/shard_map/while/body/eval_jaxpr/tick.G/embed.backward/transpose(tick.G)/embed.backward/jvp(all_sum(pp))/psum_invariant",
     "tick G, embed.backward"),
    ("jit(step)/shard_map/psum_invariant", "once a step"),
    ("", "once a step"),
])
def test_where_a_collective_is(source, place):
    assert place_of(source) == place


def test_groups_are_the_lines_of_the_mesh():
    mesh = {"pp": 2, "rep": 1, "dp": 3, "ep": 1, "cp": 1, "tp": 4}
    devices = np.arange(24).reshape(tuple(mesh.values()))
    for number, axis in enumerate(mesh):
        assert sorted(groups(mesh, axis)) == sorted(np.moveaxis(devices, number, -1).reshape(-1, mesh[axis]).tolist())


def test_the_script_on_this_machine(capsys, monkeypatch):
    """tp=2, pp=2: activations of [2 rows, 32 tokens, 64] in fp32; counts by the closed forms of traffic.py."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import explain

    case = Case(layers=4, embed=64, heads=8, kv_heads=2, head_dim=8, mlp=128, vocab=256, seq=32, rows=2, pp=2, tp=2, zero=1, microbatches=4)
    monkeypatch.setattr(explain, "prepare", lambda configs, cluster: jax.devices()[:4])
    line = "--model toy --seq_len 32 --global_batch 8 --mesh tp=2,pp=2 --microbatch 2 --all --topology"
    explain.main(line.split())
    out = capsys.readouterr().out
    assert "tp=2: 2 groups: 0 1 | 2 3" in out and "pp=2: 2 groups: 0 2 | 1 3" in out
    rows = [line.split() for line in out.splitlines() if " collective-permute " in line and " pp " in line]
    moved = sum(float(row[-2]) for row in rows)
    runs, total = traffic(case)["collective-permute", ("pp",)]
    assert sum(int(row[-3]) for row in rows) == runs and moved == pytest.approx(total / 1e9, abs=5e-4 * len(rows))


@pytest.mark.parametrize(("line", "says"), [
    ("--gpus 3xH900", "unknown chip H900"),
    ("--gpus 8xH200 --remat some", "layout.remat=some is not a choice"), ("--gpus 8xV100-32G", "no description of a V100-32G")])
def test_mistakes_are_one_line(line, says, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    import explain

    with pytest.raises(SystemExit) as stop:
        explain.main(f"--model toy {line}".split())
    err = capsys.readouterr().err
    assert stop.value.code == 2 and says in err and err.count("\n") == 1
