"""What is computed in which dtype: the compute dtype, the one matmul, and dynamic loss scaling.

Masters, moments and gradient accumulators are fp32. Weights reach a layer as fp32-typed arrays whose values were
rounded to the compute dtype before they were gathered (the compiler drops the round trip), so that `dot` can return
the weight's gradient in fp32: a bf16 gradient would round once a microbatch and rank, and make the result depend on the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxmeg._compat import own_vjp

DTYPES: dict[str, Any] = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}


def compute_dtype(name: str, device: Any) -> str:
    """Resolve `auto`: bf16 where the chip has it (NVIDIA compute capability 8.0 and newer), fp16 on older GPUs, fp32 on a CPU."""
    if name != "auto":
        return name
    if device.platform == "cpu":
        return "fp32"
    capability = getattr(device, "compute_capability", None)
    return "fp16" if capability is not None and float(capability) < 8.0 else "bf16"


@own_vjp(2)
def dot(x: jax.Array, w: jax.Array, num_contract: int = 1) -> jax.Array:
    """Contract the last `num_contract` dims of x with the first of w, in x's dtype with fp32 accumulation.

    The gradient of w has w's dtype (fp32) and is never rounded to x's.
    """
    return jnp.tensordot(x, w.astype(x.dtype), num_contract)


def _dot_fwd(x: jax.Array, w: jax.Array, num_contract: int) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return dot(x, w, num_contract), (x, w)


def _dot_bwd(num_contract: int, residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    batch, out = tuple(range(x.ndim - num_contract)), w.ndim - num_contract
    last = tuple(range(dy.ndim - out, dy.ndim))
    dx = lax.dot_general(dy, w.astype(dy.dtype), ((last, tuple(range(num_contract, w.ndim))), ((), ())))
    dw = lax.dot_general(x, dy, ((batch, batch), ((), ())), preferred_element_type=w.dtype)
    return dx, dw


dot.defvjp(_dot_fwd, _dot_bwd)

Dots = Callable[[jax.Array, tuple[jax.Array, ...], int], list[jax.Array]]
"""(x, weights, num_contract) -> x times each weight: `dots`, or ops.fp8's."""


def dots(x: jax.Array, weights: tuple[jax.Array, ...], num_contract: int) -> list[jax.Array]:
    """`dot` of x with each weight."""
    return [dot(x, w, num_contract) for w in weights]


@own_vjp()
def add_bias(x: jax.Array, b: jax.Array) -> jax.Array:
    """x + b over x's last dims; the gradient of b is summed in b's dtype (fp32)."""
    return x + b.astype(x.dtype).reshape((1,) * (x.ndim - b.ndim) + b.shape)


def _bias_fwd(x: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    return add_bias(x, b), b


def _bias_bwd(b: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    return dy, jnp.sum(dy.astype(b.dtype), axis=tuple(range(dy.ndim - b.ndim)))


add_bias.defvjp(_bias_fwd, _bias_bwd)


class LossScale(NamedTuple):
    """Dynamic loss scaling for fp16; a constant 1 otherwise. scale f32 [], good_steps i32 []."""

    scale: jax.Array
    good_steps: jax.Array


def init_loss_scale(compute: str, initial: float) -> LossScale:
    return LossScale(jnp.float32(initial if compute == "fp16" else 1.0), jnp.int32(0))


def next_loss_scale(state: LossScale, finite: jax.Array, compute: str, growth_interval: int) -> LossScale:
    """Halve after an overflow, double after `growth_interval` good steps in a row; never below 1 or above 2**24."""
    if compute != "fp16":
        return state
    good = jnp.where(finite, state.good_steps + 1, 0)
    grow = good >= growth_interval
    scale = jnp.where(finite, jnp.where(grow, state.scale * 2, state.scale), state.scale / 2)
    return LossScale(jnp.clip(scale, 1.0, 2.0**24), jnp.where(grow, 0, good))
