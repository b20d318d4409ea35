"""Rotary position embedding (Su et al. 2021), half-rotation layout as in Hugging Face's Llama; phases in fp32.

The derivative is the rotation back, so nothing but the integer positions is saved.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxmeg._compat import own_vjp


def _rotate(x_BTHK: jax.Array, positions_BT: jax.Array, theta: float, sign: float) -> jax.Array:
    half = x_BTHK.shape[-1] // 2
    frequency = 1.0 / theta ** (jnp.arange(half, dtype=jnp.float32) / half)
    phase = positions_BT.astype(jnp.float32)[..., None] * frequency[None, None, :]
    cos, sin = jnp.cos(phase)[:, :, None, :], sign * jnp.sin(phase)[:, :, None, :]
    a, b = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTHK.dtype)


@own_vjp(2)
def rope(x_BTHK: jax.Array, positions_BT: jax.Array, theta: float) -> jax.Array:
    """Rotate x [B, T, heads, head_dim] by its positions, int32 [B or 1, T]."""
    return _rotate(x_BTHK, positions_BT, theta, 1.0)


rope.defvjp(
    lambda x, positions, theta: (rope(x, positions, theta), positions),
    lambda theta, positions, dy: (_rotate(dy, positions, theta, -1.0), None))
