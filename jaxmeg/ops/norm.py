"""RMSNorm and LayerNorm, computed in fp32, with derivatives that save the input in its own dtype and one fp32 per token.

References: Zhang and Sennrich 2019 (RMSNorm), Ba et al. 2016 (LayerNorm).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxmeg._compat import own_vjp


def _normalise(x: jax.Array, eps: float, centre: bool) -> tuple[jax.Array, jax.Array]:
    x32 = x.astype(jnp.float32)
    if centre:
        x32 = x32 - jnp.mean(x32, -1, keepdims=True)
    scale = lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    return x32 * scale, scale


def _row(w: jax.Array, ndim: int) -> jax.Array:
    return w.reshape((1,) * (ndim - 1) + w.shape)


@own_vjp(2)
def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x [..., D] * weight [D] / rms(x), in fp32, returned in x's dtype. The gradient of weight is fp32."""
    return (_normalise(x, eps, centre=False)[0] * _row(weight, x.ndim)).astype(x.dtype)


@own_vjp(3)
def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """(x - mean) / std * weight + bias over the last dim, in fp32, returned in x's dtype."""
    return (_normalise(x, eps, centre=True)[0] * _row(weight, x.ndim) + _row(bias, x.ndim)).astype(x.dtype)


def _grad(x: jax.Array, weight: jax.Array, dy: jax.Array, eps: float, centre: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    normal, scale = _normalise(x, eps, centre)
    dy32 = dy.astype(jnp.float32)
    dn = dy32 * _row(weight, x.ndim)
    dx = dn - normal * jnp.mean(dn * normal, -1, keepdims=True)
    if centre:
        dx = dx - jnp.mean(dn, -1, keepdims=True)
    tokens = tuple(range(x.ndim - 1))
    return (dx * scale).astype(x.dtype), jnp.sum(dy32 * normal, tokens), jnp.sum(dy32, tokens)


def _rms_norm_bwd(eps: float, saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both row sums read x and dy alone, so that the compiler takes them in one pass, and dx and dweight in a second one."""
    x, weight = saved
    x32, dy32 = x.astype(jnp.float32), dy.astype(jnp.float32)
    dn = dy32 * _row(weight, x.ndim)
    scale = lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps)
    along = scale * jnp.mean(dn * x32, -1, keepdims=True)
    normal = x32 * scale
    return (scale * (dn - normal * along)).astype(x.dtype), jnp.sum(dy32 * normal, tuple(range(x.ndim - 1)))


rms_norm.defvjp(lambda x, weight, eps: (rms_norm(x, weight, eps), (x, weight)), _rms_norm_bwd)
layer_norm.defvjp(
    lambda x, weight, bias, eps: (layer_norm(x, weight, bias, eps), (x, weight)),
    lambda eps, saved, dy: _grad(saved[0], saved[1], dy, eps, centre=True))
