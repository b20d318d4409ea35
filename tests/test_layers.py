"""What the step asks of the compiler, read before it is compiled: dtypes of products, casts of weights, buffers nobody fills.

What a compiler for GPUs makes of it is in test_aot.py; values and gradients are in test_parity.py, test_ops.py and test_vocab.py.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from parity import TOKENS, Row, config_of, run

from jaxmeg.setup import build
from jaxmeg.state import abstract_state
from jaxmeg.step import abstract_rows, make_train_step

LAYERS, D, F = 4, 64, 128  # of the toy model
SCANNED, WRITTEN_OUT = Row(compute="bf16", optimizer="adamw"), Row(compute="bf16", optimizer="adamw", scan_layers=False)


@functools.cache
def traced(row: Row):
    setup = build(config_of(row), jax.devices()[:1])
    return make_train_step(setup).trace(abstract_state(setup), abstract_rows(setup, setup.resolved.num_microbatches, TOKENS))


@functools.cache
def lowered(row: Row) -> str:
    return traced(row).lower().as_text()


def products(jaxpr):
    """Dtypes of the two factors of every matrix product, and of the result."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield tuple(str(x.aval.dtype) for x in (*equation.invars, *equation.outvars))
        for inner in jaxprs_in_params(equation.params):
            yield from products(inner)


@pytest.mark.parametrize("row", [SCANNED, WRITTEN_OUT, Row(compute="bf16", arch="gpt2", remat="full", microbatch=8)],
                         ids=lambda row: row.name)
def test_a_step_in_bf16_multiplies_nothing_that_a_gpu_would_do_in_tf32(row: Row) -> None:
    assert set(products(traced(row).jaxpr.jaxpr)) == {("bfloat16", "bfloat16", "bfloat16"), ("bfloat16", "bfloat16", "float32")}


def test_a_step_in_fp32_is_seen_to_multiply_fp32() -> None:
    assert ("float32",) * 3 in set(products(traced(Row()).jaxpr.jaxpr))


def test_a_layer_written_out_is_picked_before_it_is_cast() -> None:
    stack = f"tensor<{LAYERS}x{D}x{F}xbf16>"
    assert stack in lowered(SCANNED)
    assert stack not in lowered(WRITTEN_OUT)


def test_barriers_between_forward_and_backward_hold_no_weights() -> None:
    """A weight behind a barrier is copied, as fp32. In a loop there are no barriers: nothing could be merged there."""
    barriers = re.findall(r"optimization_barrier .*", lowered(WRITTEN_OUT))
    assert len(barriers) >= LAYERS
    assert not [line for line in barriers if re.search(rf"tensor<({D}x{F}|{F}x{D})x", line)]
    assert "optimization_barrier" not in lowered(SCANNED)


@pytest.mark.parametrize("row", [Row(remat="full"), Row(scan_layers=False, microbatch=8)], ids=lambda row: row.name)
def test_no_slot_of_one_stage_is_read_before_it_is_written(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that nobody fills may hold anything, such as values that are not finite. `run` sees that every update is."""
    made = []

    def poisoned(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        made.append(shape)
        return jnp.full(shape, jnp.nan, dtype)

    monkeypatch.setattr(jax.lax, "empty", poisoned)
    run(row)
    assert made
