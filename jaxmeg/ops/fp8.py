"""FP8 matrix products: e4m3 for inputs and weights, e5m2 for what the backward pass brings, one scale a tensor, fp32 sums.

A scale is a power of two from the tensor's largest magnitude at hand (current scaling): scaling is then exact, nothing is clipped,
and another scale changes only values below the format's normal range, so ranks scale their own parts. A tensor with inf or NaN
gets the scale NaN, and so has every product with it: the step's guard sees it. A product is written as the compiler's pattern for
`__cublas$lt$matmul$f8` (convert, times a scalar, dot); elsewhere, as on a CPU, the same numbers are multiplied in the compute
dtype. References: Micikevicius et al. 2022 (the formats); docs/decisions/0014.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmeg._compat import own_vjp

FORWARD, BACKWARD = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
_TOP = {FORWARD: 7, BACKWARD: 14}  # the largest magnitude becomes one in [2**top, 2**(top + 1)), below 448 and 57344
_MOST = 63  # scales are 2**-63 to 2**63: the product of two is a normal fp32 number

GPU_OPTIONS: dict[str, bool | int] = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0}
"""Compiler options of a program with such products on a GPU. Triton would take them first, and small ones that share a factor would be
joined: either way they would be multiplied in the compute dtype."""


class Operand(NamedTuple):
    """A factor of a product: values * scale. scale: f32 [], a power of two or NaN; None in the compute dtype."""

    values: jax.Array
    scale: jax.Array | None


def plain(x: jax.Array, dtype: Any) -> Operand:
    """x in the compute dtype."""
    return Operand(x.astype(dtype), None)


def scale_of(largest: jax.Array, dtype: Any) -> jax.Array:
    """The scale of a tensor whose magnitudes are at most `largest` []: f32 []; NaN where that is not finite."""
    largest = largest.astype(jnp.float32)
    exponent = lax.bitcast_convert_type(largest, jnp.int32) // 2**23 - 127  # of a magnitude: floor(log2)
    exponent = jnp.clip(exponent - _TOP[dtype], -_MOST, _MOST)
    scale = lax.bitcast_convert_type((exponent + 127) * 2**23, jnp.float32)
    return jnp.where(jnp.isfinite(largest), scale, jnp.full_like(scale, jnp.nan))


def quantise(x: jax.Array, dtype: Any, scale: jax.Array | None = None) -> Operand:
    """x rounded to the nearest number of an 8-bit format times `scale`; None is the scale of x's largest magnitude."""
    if scale is None:
        scale = scale_of(jnp.max(jnp.abs(x)), dtype)
    return Operand((x * (1 / scale).astype(x.dtype)).astype(dtype), scale)


def contract(a: Operand, b: Operand, dims: tuple[int, int], compute: Any, out: Any) -> jax.Array:
    """The product of two matrices over dim dims[0] of a and dims[1] of b, in the dtype `out`.

    FP8 values are multiplied as those of the dtype `compute`, which holds them exactly, where the device has no FP8. On Hopper sums
    of forward products stay in the tensor core's registers, those of gradients are promoted to fp32 as they grow (`HIGHEST`).
    """
    def wide(x: Operand) -> jax.Array:
        return x.values if x.scale is None else x.values.astype(compute) * x.scale.astype(compute)

    gradient = BACKWARD in (a.values.dtype, b.values.dtype)
    return lax.dot_general(wide(a), wide(b), (((dims[0],), (dims[1],)), ((), ())), preferred_element_type=out,
                           precision=lax.Precision.HIGHEST if gradient else None)


def _matrix(x: jax.Array, num_rows: int) -> jax.Array:
    """x with its first `num_rows` dims as rows and the others as columns."""
    rows = 1
    for size in x.shape[:num_rows]:
        rows *= size
    return x.reshape(rows, -1)


@own_vjp(2)
def dots(x: jax.Array, weights: tuple[jax.Array, ...], num_contract: int) -> list[jax.Array]:
    """`precision.dots` in FP8: x is quantised once for all weights. Gradients of weights have the weights' dtype (fp32)."""
    return _dots_fwd(x, weights, num_contract)[0]


def _dots_fwd(x: jax.Array, weights: tuple[jax.Array, ...], num_contract: int):
    batch = x.ndim - num_contract
    x_NC = _matrix(x, batch)
    # Scales outlive the forward pass whatever else is redone: a scalar each saves a pass over the tensor.
    x_scale = checkpoint_name(scale_of(jnp.max(jnp.abs(x_NC)), FORWARD), "scale")
    w_scales = [checkpoint_name(scale_of(jnp.max(jnp.abs(w)), FORWARD), "scale") for w in weights]
    x8 = quantise(x_NC, FORWARD, x_scale)
    products = [contract(x8, quantise(_matrix(w, num_contract), FORWARD, scale), (1, 0), x.dtype, x.dtype)
                .reshape(*x.shape[:batch], *w.shape[num_contract:]) for w, scale in zip(weights, w_scales, strict=True)]
    return products, (x, weights, x_scale, w_scales)


def _dots_bwd(num_contract: int, saved: Any, dys: list[jax.Array]):
    x, weights, x_scale, w_scales = saved
    batch, compute = x.ndim - num_contract, x.dtype
    x8 = quantise(_matrix(x, batch), FORWARD, x_scale)
    dx, dweights = [], []
    for w, w_scale, dy in zip(weights, w_scales, dys, strict=True):
        dy8 = quantise(_matrix(dy, batch), BACKWARD)
        dx.append(contract(dy8, quantise(_matrix(w, num_contract), FORWARD, w_scale), (1, 1), compute, compute))
        dweights.append(contract(x8, dy8, (0, 0), compute, w.dtype).reshape(w.shape))
    return sum(dx[1:], dx[0]).reshape(x.shape), tuple(dweights)


dots.defvjp(_dots_fwd, _dots_bwd)
