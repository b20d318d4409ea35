"""The compiled step is read back: stock layouts move nothing that was not asked for, and what is broken on purpose is named.

Leaves are larger here than what is passed over (`program.SMALL`), or nothing could be found.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from traffic import Case

from jaxmeg import hlo, parallel
from jaxmeg import step as step_module
from jaxmeg import train as train_module
from jaxmeg.config import Config, DataConfig, GuardConfig, LayoutConfig, MeshConfig, ModelConfig, OptimConfig, RecordConfig, TrainConfig
from jaxmeg.guard.program import SMALL, describe, optimizer_bytes, read_back, traffic, unplanned
from jaxmeg.journal import RunError
from jaxmeg.optim.traffic import reduced
from jaxmeg.setup import Setup, build
from jaxmeg.state import abstract_state, state_shardings
from jaxmeg.step import abstract_rows, loss_and_gradients, make_train_step
from jaxmeg.task import text_task
from jaxmeg.train import run

FAST: dict[str, Any] = {"xla_backend_optimization_level": 0}  # of the machine code, which nobody runs: the HLO stays the same
WIDE = Case(layers=2, embed=192, mlp=384, vocab=512, microbatches=2)  # every matrix is cut into parts of more than SMALL bytes


def setup_of(case: Case, optimizer: str = "adamw") -> Setup:
    optim = OptimConfig(name=optimizer, factored_dim=16) if optimizer == "adafactor" else OptimConfig(name=optimizer)
    return build(replace(case.config(), optim=optim), jax.devices()[: case.devices])


def compiled_step(setup: Setup, gradients: Any = None, state: Any = None) -> Any:
    rows = abstract_rows(setup, setup.resolved.num_microbatches, setup.config.data.seq_len)
    return make_train_step(setup, gradients).lower(state or abstract_state(setup), rows).compile(compiler_options=FAST)


# ---------------------------------------------------------------- nothing to find
STOCK = [
    (replace(WIDE, pp=2, dp=2, tp=2, zero=1), "adamw"),
    (replace(WIDE, pp=2, dp=2, tp=2, zero=3, remat="selective"), "lion"),
    (replace(WIDE, dp=4, tp=2, zero=2), "muon"),
    (replace(WIDE, rep=2, dp=2, tp=2, zero=3), "adafactor"),
    (replace(WIDE, pp=2, dp=2, zero=1), "adafactor"),
    (replace(WIDE, dp=8, zero=0, microbatches=1), "adamw"),
    (replace(WIDE, rep=2, dp=4, zero=1, microbatches=1), "muon"),
    (replace(WIDE, layers=4, pp=2, tp=4, kv_heads=2, schedule="interleaved", chunks=2, remat="full"), "adamw"),
]


@pytest.mark.parametrize(("case", "optimizer"), STOCK, ids=[f"{case}-{optimizer}" for case, optimizer in STOCK])
def test_a_stock_layout_moves_nothing_that_was_not_asked_for(case, optimizer):
    setup = setup_of(case, optimizer)
    found = read_back(setup, compiled_step(setup))
    assert found.unplanned == ""
    axes = ",".join(axis for axis in ("dp", "tp") if getattr(case, axis) > 1).split(",")
    assert all(f" MB over {axis}" in found.traffic for axis in axes)


# ---------------------------------------------------------------- broken on purpose
CUT = replace(WIDE, dp=2, tp=2, zero=1)


def test_a_parameter_that_is_put_together_outside_of_the_verbs_is_named():
    setup = setup_of(CUT)
    inner, everywhere = loss_and_gradients(setup), NamedSharding(setup.mesh, PartitionSpec())

    def gradients(params: Any, *args: Any) -> Any:
        head = jax.lax.with_sharding_constraint(params["head"]["tokens"], everywhere)
        return inner(params | {"head": params["head"] | {"tokens": head}}, *args)

    said = read_back(setup, compiled_step(setup, gradients)).unplanned
    assert said.startswith("the compiled step moves what the layout did not ask for: all-gather over ")
    assert " of 0.4 MB f32 an update (the size of head.tokens), from " in said  # 512 x 192 x 4 bytes


def test_optimizer_state_that_is_whole_on_every_device_is_named(monkeypatch):
    """The moments of all leaves: each is gathered as it is updated."""
    setup = setup_of(CUT)
    everywhere, state, shardings = NamedSharding(setup.mesh, PartitionSpec()), abstract_state(setup), state_shardings(setup)
    shardings = shardings._replace(opt_state=jax.tree.map(lambda _: everywhere, shardings.opt_state))
    state = jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, shardings)
    monkeypatch.setattr(step_module, "state_shardings", lambda _: shardings)
    said = read_back(setup, compiled_step(setup, state=state)).unplanned
    assert said.count("all-gather over ") == 3 and said.count("(the size of layers.mlp.") == 3  # of 2 x 192 x 384 entries, the largest
    assert said.count("put in by the compiler as all-gather") + said.count(", from jit(step)/") == 3 and " more of " in said


def test_what_has_no_name_inside_of_a_loop_is_named_with_how_often_it_runs(monkeypatch):
    """No verb says what it is, as if all were called by hand: weights outside of loops and activations inside of them."""
    monkeypatch.setattr(parallel, "scope", lambda verb, axes: nullcontext())
    setup = setup_of(replace(WIDE, tp=2, rows=8))
    compiled = compiled_step(setup)
    found = unplanned(hlo.read(compiled.as_text(), setup.layout.sizes))
    inside = [c for c in found if c.loops]
    assert {c.op for c in inside} >= {"all-gather", "reduce-scatter"} and {c.axes for c in inside} == {("tp",)}
    assert {c.bytes for c in inside} == {8 * 16 * 192 * 4}  # activations [B, T, D]
    assert ", 4 times, in a loop, from jit(step)/shard_map/" in read_back(setup, compiled).unplanned  # 2 microbatches x 2 layers


def test_a_run_says_so_or_stops_before_the_first_update(tmp_path, monkeypatch, capsys):
    def broken(config: Config, devices: Any) -> Any:
        task = text_task(config, devices)
        inner, everywhere = loss_and_gradients(task.setup), NamedSharding(task.setup.mesh, PartitionSpec())
        return replace(task, step=make_train_step(
            task.setup, lambda params, *args: inner(jax.lax.with_sharding_constraint(params, everywhere), *args)))

    monkeypatch.setattr(train_module, "text_task", broken)
    config = Config(model=ModelConfig(preset="toy", num_layers=1, mlp_dim=512), mesh=MeshConfig(dp=2), layout=LayoutConfig(zero=3),
                    data=DataConfig(seq_len=16, global_batch=4), record=RecordConfig(tensorboard=False),
                    guard=GuardConfig(unplanned="stop"),
                    train=TrainConfig(steps=1, eval_rows=4, sample_tokens=0, out=str(tmp_path / "run")))
    with pytest.raises(RunError, match=r"^stopped before the first update: the compiled step moves what .*\(guard.unplanned=stop\)$"):
        run(config, jax.devices()[:2])
    assert not (tmp_path / "run").exists()
    capsys.readouterr()
    run(replace(config, guard=GuardConfig(unplanned="warn")), jax.devices()[:2])
    said = capsys.readouterr()
    assert said.err.count("warning: the compiled step moves what the layout did not ask for: all-gather over dp of 0.1 MB f32 an up") == 1
    assert "traffic     a device sends " in said.out


# ---------------------------------------------------------------- the rule
def collective(source: str, axes: tuple[str, ...] = ("dp",), op: str = "all-reduce", size: int = 2**20, count: int = 1) -> hlo.Collective:
    return hlo.Collective(op=op, axes=axes, dtype="f32", bytes=size, wire_bytes=size, group_size=2, count=count,
                          loops=(count,) if count > 1 else (), overlapped=None, name="x", source=source)


def program(*collectives: hlo.Collective) -> hlo.Program:
    return hlo.Program(collectives=collectives, custom_calls={}, conditionals=0, dots={}, instructions=0, loops=())


ASKED_FOR = [
    collective("jit(step)/shard_map/all_sum(dp)/psum_invariant"),
    collective("jit(step)/shard_map/layer/transpose(jvp(all_gather(tp)))/reduce_scatter", ("tp",)),
    collective("jit(step)/shard_map/all_sum(tp,pp)/psum", ("pp", "tp")),  # in whatever order
    collective("jit(step)/(shard_map/all_sum(tp)/psum_invariant:reduce_sum:reduce_sum)", ("tp",)),  # several in one
    collective("jit(step)/reduce_sum", size=SMALL),  # scalars of the norm
    collective("jit(step)/shard_map/all_sum()/psum", ()),  # groups of one device move nothing
    collective(""),  # several in one without a name
    collective("", op="all-gather", size=SMALL),
]
NOT_ASKED_FOR = [
    collective("jit(step)/reduce_sum"),
    collective("jit(step)/shard_map/layer/all_gather", op="all-gather"),
    collective("jit(step)/shard_map/all_gather(dp)/all_gather", ("tp",), "all-gather"),  # over another axis than it says
    collective("jit(step)/shard_map/all_sum(dp)/psum", ("dp", "tp")),
    collective("jit(step)/transpose(dp2)/mul"),
    collective("", op="all-gather"),
]


def test_what_is_asked_for():
    assert unplanned(program(*ASKED_FOR)) == []
    assert unplanned(program(*NOT_ASKED_FOR)) == NOT_ASKED_FOR


def test_means_of_the_update_may_be_as_large_as_the_optimizer_says():
    means = [collective("jit(step)/update/reduce_sum"), collective("jit(step)/(reduce_sum:update/reduce_sum)", ("tp",))]
    assert unplanned(program(*means), 2**21) == []
    assert unplanned(program(*means), 2**21 - 1) == means
    gather = collective("jit(step)/update/mul", op="all-gather")
    assert unplanned(program(*means, gather), 2**22) == [gather]
    adafactor = setup_of(replace(WIDE, dp=2, tp=2, zero=1), "adafactor")
    assert optimizer_bytes(adafactor) == sum(leaf.bytes for leaf in reduced(adafactor.layout, 512, 16)) > 0
    assert optimizer_bytes(setup_of(CUT)) == 0


def test_the_words():
    loop = collective("jit(step)/shard_map/all_gather(dp)/all_gather", ("tp",), "all-gather", 2_000_000, 8)
    what = "the compiled step moves what the layout did not ask for: "
    assert describe([loop], {}) == (
        what + "all-gather over tp of 16.0 MB f32 an update, 8 times, in a loop, asked for over dp, from " + loop.source)
    assert describe([collective("", size=500_000)], {500_000: "head.tokens"}) == (
        what + "all-reduce over dp of 0.5 MB f32 an update (the size of head.tokens), put in by the compiler as x")
    many = [collective(f"jit(step)/{n}", size=1_000_000 * n) for n in (1, 5, 3, 4, 2)]
    said = describe(unplanned(program(*many)), {})
    assert [said.index(f"of {n}.0 MB") for n in (5, 4, 3)] == sorted(said.index(f"of {n}.0 MB") for n in (3, 4, 5))
    assert said.endswith("; and 2 more of 3.0 MB")
    sent = traffic(program(loop, *many, collective("", size=10, axes=("pp",))))
    assert sent == "a device sends 16.0 MB over tp, 15.0 MB over dp an update"
    assert traffic(program()) == ""


def test_a_program_that_cannot_be_read_is_no_program_without_findings():
    class Unreadable:
        def as_text(self) -> str:
            return "nonsense"

    found: Any = read_back(setup_of(CUT), Unreadable())  # pyright: ignore[reportArgumentType]
    assert found.traffic == "" and "can't be read" in found.unplanned and "guard.unplanned off" in found.unplanned
