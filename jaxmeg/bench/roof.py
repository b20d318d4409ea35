"""The composite roof: what the step's matmuls and attention take alone, at their own shapes, on one device, added up.

A step cannot be faster without other kernels; `work.py` lists the pieces. Each runs in a loop on the device over random values, since a
chip is faster on zeros. Forward and dX give results in the compute dtype, dW in fp32 as the step keeps it. Exchange between devices,
norms, loss and optimizer are not in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmeg.bench.work import AttentionWork, Matmul, Piece
from jaxmeg.ops.attention import causal_attention
from jaxmeg.precision import DTYPES

SECONDS = 0.15  # of one run of a loop
RUNS = 3

_DIMS = {"forward": ((1,), (0,)), "dx": ((1,), (1,)), "dw": ((0,), (0,))}


class Timed(NamedTuple):
    """One piece, alone."""

    piece: Piece
    seconds: float
    """Of one time, the best of RUNS."""


def measure(work: Sequence[Piece], compute: str, kernel: str, peak_tflops: float) -> list[Timed]:
    """Time every piece on the default device, of which `peak_tflops` says how many turns make a run. Shapes that were timed before in
    this process are not timed again."""
    def turns(piece: Piece) -> int:
        return max(2, round(SECONDS * peak_tflops * 1e12 / piece.flops))
    return [Timed(piece, _seconds(piece._replace(times=0), compute, kernel, turns(piece))) for piece in work]


def total(timed: Sequence[Timed]) -> float:
    """Seconds of one step, if nothing else took any."""
    return float(sum(t.seconds * float(t.piece.times) for t in timed))


@cache
def _seconds(piece: Any, compute: str, kernel: str, turns: int) -> float:
    one, operands = attention(piece, compute, kernel) if isinstance(piece, AttentionWork) else matmul(piece, compute)
    arrays = [jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate(operands)]
    results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, *arrays))
    run, seconds = jax.jit(loop(one, turns), donate_argnums=0), []
    for _ in range(1 + RUNS):  # the first one compiles
        started = time.perf_counter()
        results = jax.block_until_ready(run(results, *arrays))
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:]) / turns


def matmul(piece: Matmul, compute: str) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """The product as a function, and its operands."""
    dtype = DTYPES[compute]
    x, w, dy = ((piece.tokens, piece.inputs), (piece.inputs, piece.outputs), (piece.tokens, piece.outputs))
    shapes = {"forward": (x, w), "dx": (dy, w), "dw": (x, dy)}[piece.form]
    result = jnp.float32 if piece.form == "dw" else dtype

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(a, b, (_DIMS[piece.form], ((), ())), preferred_element_type=result)

    return product, [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def attention(work: AttentionWork, compute: str, kernel: str) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """The same for attention: forward, and the three gradients from a given one of the output."""
    q = jax.ShapeDtypeStruct((work.rows, work.tokens, work.heads, work.head_dim), DTYPES[compute])
    k = jax.ShapeDtypeStruct((work.rows, work.tokens, work.kv_heads, work.head_dim), DTYPES[compute])

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        return jax.vjp(lambda q, k, v: causal_attention(q, k, v, None, kernel, work.window), q, k, v)[1](dout)

    return gradients, [q, k, k, q]


def loop(one: Callable[..., Any], turns: int) -> Callable[..., Any]:
    """(results of before, operands) -> results of the last turn.

    A turn puts one value of the results before it into its first operand: else the compiler may run a single turn for all (it does on a
    CPU, through an optimization barrier too). The number of turns is a constant: with another one the host would be asked after each.
    """
    def run(before: Any, first: jax.Array, *others: jax.Array) -> Any:
        def turn(_: Any, carry: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            before, first = carry
            result = jax.tree.leaves(before)[0]
            value = jnp.sin(lax.slice(result, [0] * result.ndim, [1] * result.ndim).astype(jnp.float32))  # stays small
            first = lax.dynamic_update_slice(first, value.astype(first.dtype).reshape((1,) * first.ndim), [0] * first.ndim)
            return one(first, *others), first

        return lax.fori_loop(0, turns, turn, (before, first))[0]
    return run
