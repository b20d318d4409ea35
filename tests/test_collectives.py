"""What the compiled step moves, for every kind of layout: every collective and byte is one that a closed form names.

The closed forms are in `traffic.py`. Here the programs are compiled for eight emulated CPU devices, in fp32, and read
through `hlo.read`. Two habits of that compiler matter. All-reduces outside of loops are put into one instruction: so
they are compared by bytes, other collectives also by number. And what does not change from tick to tick leaves the
loops: so at ZeRO 3 the tables are gathered once a step, layers per use. Where axes have size 1 a sum over them may remain, in
groups of one device: it moves nothing and is left out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from traffic import F32, Case, comparable, found, kept_elements, traffic

from jaxmeg import hlo
from jaxmeg.pipeline.scan import Work
from jaxmeg.setup import Setup, build
from jaxmeg.state import abstract_state
from jaxmeg.step import abstract_rows, loss_and_gradients, make_train_step

FAST: dict[str, Any] = {"xla_backend_optimization_level": 0}  # of the machine code, which nobody runs: the HLO stays the same


def arguments(setup: Setup, seq: int):
    rows = abstract_rows(setup, setup.resolved.num_microbatches, seq)
    return abstract_state(setup).params, rows, jax.ShapeDtypeStruct((2,), jnp.uint32), jax.ShapeDtypeStruct((), jnp.float32)


def setup_of(case: Case, rules: str | None = None) -> Setup:
    return build(case.config(rules), jax.devices()[: case.devices])


@cache
def program(case: Case, rules: str | None = None) -> hlo.Program:
    """Loss and gradients of a case, compiled."""
    setup = setup_of(case, rules)
    lowered = jax.jit(loss_and_gradients(setup)).lower(*arguments(setup, case.seq))
    return hlo.read(lowered.compile(compiler_options=FAST).as_text(), case.mesh_shape)


# ---------------------------------------------------------------- every byte
LAYOUTS = [
    *(Case(pp=2, dp=2, tp=2, zero=zero) for zero in (0, 1, 2, 3)),
    Case(dp=2, tp=2, zero=1),
    Case(pp=4, tp=2),
    Case(pp=2, tp=2, schedule="gpipe", remat="full"),
    Case(pp=2, tp=2, schedule="interleaved", chunks=2, remat="selective"),
    Case(tp=2, remat="full", microbatches=1),
    Case(rep=2, dp=2, tp=2, zero=2, microbatches=2),  # scattered over dp, then the shard summed over rep
    Case(dp=2, tp=4, kv_heads=2, zero=1, microbatches=1),  # key and value whole on every tp rank, their gradient summed
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_every_collective_and_byte_is_in_the_closed_form(case):
    compiled = program(case)
    assert comparable(found(compiled)) == comparable(traffic(case))
    assert compiled.conditionals == 0
    if case.zero < 2:  # weights and gradients move before the first and after the last tick
        assert {c.loops for c in compiled.collectives if "dp" in c.axes} <= {()}
        assert max(c.bytes for c in compiled.collectives if c.loops) == case.activation


@pytest.mark.parametrize("zero", [1, 3])
def test_one_microbatch_in_a_pipeline(zero):
    """Each loop over ticks is then one tick, without a loop, and the compiler drops what no later tick reads."""
    case = Case(pp=2, dp=2, tp=2, zero=zero, microbatches=1)
    want, share = traffic(case), case.activation // case.tp
    dropped = {
        ("collective-permute", ("pp",)): (1, share),  # the last stage's output, sent on
        ("reduce-scatter", ("tp",)): (2, 2 * case.activation),  # the two idle embeds
        ("all-reduce", ("pp",)): (2, 2 * share),
    }
    for key, (runs, total) in dropped.items():
        want[key] = want[key][0] - runs, want[key][1] - total
    assert comparable(found(program(case))) == comparable(want)


def test_a_vocabulary_on_tp_alone_is_not_broadcast_over_the_stages(tmp_path):
    case = Case(pp=2, tp=2, vocab_axes=("tp",))
    rules = tmp_path / "rules.yaml"
    rules.write_text("vocab: [tp]\n", encoding="utf-8")
    assert comparable(found(program(case, str(rules)))) == comparable(traffic(case))
    everywhere = traffic(replace(case, vocab_axes=("pp", "tp")))["all-reduce", ("pp",)][1]
    saved = (2 * case.embeds + case.microbatches) * case.activation // case.tp  # E, G, and the head's gradient
    tables = 2 * case.vocab * case.embed // case.tp * F32  # whose gradients are now summed over the stages, once a step
    assert traffic(case)["all-reduce", ("pp",)][1] == everywhere - saved + tables


def test_the_update_adds_the_norm_of_the_gradient_and_nothing_else():
    """State stays where it is: the whole train step moves what loss and gradients move, and a few scalars."""
    case = Case(pp=2, dp=2, tp=2, zero=1)
    setup = setup_of(case)
    rows = abstract_rows(setup, case.microbatches, case.seq)
    text = make_train_step(setup).lower(abstract_state(setup), rows).compile(compiler_options=FAST).as_text()
    moved, want = comparable(found(hlo.read(text, case.mesh_shape))), comparable(traffic(case))
    assert {key: value for key, value in moved.items() if key[0] != "all-reduce"} == {
        key: value for key, value in want.items() if key[0] != "all-reduce"}
    reduced = [sum(total for (op, _), (_, total) in sums.items() if op == "all-reduce") for sums in (moved, want)]
    num_leaves, num_axes = 12, 3  # a square per leaf, summed one axis at a time
    assert 0 <= reduced[0] - reduced[1] <= num_leaves * num_axes * F32


# ---------------------------------------------------------------- ZeRO: how often, and in which loop
LAYER_LEAVES, OTHER_LEAVES, L, M = 9, 3, 8, 4
STEP, MICROBATCH, LAYER = (), (M,), (M, L)  # trip counts of the loops around a collective
WHEN = {  # zero -> (op, loops) -> runs in a step of one stage; all-reduces, at ZeRO 0 of the gradients, are outside
    0: {},
    1: {("all-gather", STEP): LAYER_LEAVES + OTHER_LEAVES, ("reduce-scatter", STEP): LAYER_LEAVES + OTHER_LEAVES},
    2: {
        ("all-gather", STEP): LAYER_LEAVES + OTHER_LEAVES,
        ("reduce-scatter", LAYER): LAYER_LEAVES * L * M,
        ("reduce-scatter", MICROBATCH): OTHER_LEAVES * M,
    },
    3: {
        ("all-gather", LAYER): 2 * LAYER_LEAVES * L * M,  # forward and backward
        ("all-gather", STEP): OTHER_LEAVES,
        ("reduce-scatter", LAYER): LAYER_LEAVES * L * M,
        ("reduce-scatter", MICROBATCH): OTHER_LEAVES * M,
    },
}
# zero -> full tensors moved over dp in a step of m microbatches, in units of the parameters: of the layers, of the rest.
# With m = 1 these are 1, 2, 2 and 3 times the layers; the tables' gradients need no second gather.
MOVED = {0: lambda m: (1, 1), 1: lambda m: (2, 2), 2: lambda m: (1 + m, 1 + m), 3: lambda m: (3 * m, 1 + m)}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_when_a_zero_stage_gathers_and_scatters(zero):
    many = Case(dp=2, zero=zero, layers=L, microbatches=M)
    for case in (many, replace(many, microbatches=1)):
        moved = found(program(case))
        assert comparable(moved) == comparable(traffic(case))
        layers = sum(g.elements * L for g in case.groups() if g.part == "layers")
        of_layers, of_rest = MOVED[zero](case.microbatches)
        tensors = of_layers * layers + of_rest * (case.parameters() - layers)
        scalars = 2  # loss and trained tokens
        assert sum(total for _, total in moved.values()) == F32 * (tensors + scalars)
    when = program(many).totals("op", "loops")
    runs = {(op, loops): None if op == "all-reduce" else total.count for (op, loops), total in when.items()}
    assert runs == WHEN[zero] | {("all-reduce", STEP): None}


# ---------------------------------------------------------------- program size
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)]


def sized(schedule: str, chunks: int, *, microbatches: int = 8, layers: int = 8) -> hlo.Program:
    return program(Case(pp=2, schedule=schedule, chunks=chunks, microbatches=microbatches, layers=layers, rows=1))


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_the_program_does_not_grow_with_microbatches(schedule, chunks):
    few, many = (sized(schedule, chunks, microbatches=m) for m in (8, 64))
    assert 0 < many.instructions <= 1.1 * few.instructions
    assert few.conditionals == many.conditionals == 0
    assert comparable(found(many)) == comparable(traffic(Case(pp=2, schedule=schedule, chunks=chunks, microbatches=64, rows=1)))


def test_the_program_does_not_grow_with_layers():
    few, many = (sized("1f1b", 1, layers=layers) for layers in (4, 32))
    assert 0 < many.instructions <= 1.5 * few.instructions
    assert few.conditionals == many.conditionals == 0


# ---------------------------------------------------------------- what the ring holds
@contextmanager
def recorded_rings() -> Iterator[list[list[jax.Array]]]:
    made, empty_ring = [], Work.empty_ring
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Work, "empty_ring", lambda *args: made.append(empty_ring(*args)) or made[-1])
        yield made


@cache
def ring(case: Case) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Shapes [slots, layers of a chunk, ...] and dtypes of the residuals that the step carries from forward to backward."""
    setup = setup_of(case)
    with recorded_rings() as made:
        jax.eval_shape(loss_and_gradients(setup), *arguments(setup, case.seq))
    (leaves,) = made
    return tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)


def ring_elements(case: Case) -> dict[str, int]:
    """By dtype, of one layer and one slot."""
    sums: dict[str, int] = {}
    for (_, _, *shape), dtype in ring(case):
        sums[dtype] = sums.get(dtype, 0) + prod(shape)
    return sums


RINGS = [*(Case(tp=2, dp=2, zero=3, remat=remat, bf16=True) for remat in ("none", "selective", "full")), Case(bf16=True)]


@pytest.mark.parametrize("case", RINGS, ids=str)
def test_the_ring_holds_the_named_activations_of_the_tokens_and_no_weight(case):
    tokens, kept = case.rows * case.seq, kept_elements(case)
    fp32 = kept.pop("lse", 0)
    assert ring_elements(case) == {"bfloat16": tokens * sum(kept.values())} | ({"float32": tokens * fp32} if fp32 else {})
    # Twice the rows of twice the tokens: four times as much. Other layers, vocabulary, ZeRO stage: the same.
    large = replace(case, rows=2 * case.rows, seq=2 * case.seq)
    assert ring_elements(large) == {dtype: 4 * n for dtype, n in ring_elements(case).items()}
    assert ring_elements(replace(case, layers=4, vocab=1024, zero=1)) == ring_elements(case)
    # A wider MLP: only gate and up grow.
    wide = ring_elements(replace(case, mlp=2 * case.mlp))
    assert wide["bfloat16"] - ring_elements(case)["bfloat16"] == tokens * kept.get("gate_up", 0)


@pytest.mark.parametrize(("schedule", "chunks", "slots"), [("gpipe", 1, 8 + 1), ("1f1b", 1, 2 + 2 - 1), ("interleaved", 2, 2 * 2 + 2 - 1)])
def test_the_ring_has_as_many_slots_as_pairs_are_alive(schedule, chunks, slots):
    """PV+P-1; M for gpipe, and one that bubbles write. Each holds the layers of a chunk."""
    case = Case(pp=2, schedule=schedule, chunks=chunks, microbatches=8)
    assert {shape[:2] for shape, _ in ring(case)} == {(slots, case.layers // (2 * chunks))}
