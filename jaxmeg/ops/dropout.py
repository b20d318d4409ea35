"""Dropout whose mask is a function of (seed, step, layer, site, global row, global position), never of the layout.

The mask is drawn again in the backward pass; nothing is saved but a key and integers.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxmeg._compat import own_vjp


def _mask(shape_BtD: tuple[int, ...], rate: float, key: jax.Array, rows_B: jax.Array, positions_t: jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(key, impl="threefry2x32")
    threshold = jnp.uint32(round(rate * (2**32 - 1)))

    def token(row_key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.bits(jax.random.fold_in(row_key, position), (shape_BtD[-1],), jnp.uint32) >= threshold

    def row(index: jax.Array) -> jax.Array:
        return jax.vmap(partial(token, jax.random.fold_in(key, index)))(positions_t)

    return jax.vmap(row)(rows_B)


@own_vjp(4)
def dropout(x_BtD: jax.Array, key: jax.Array, rows_B: jax.Array, positions_t: jax.Array, rate: float) -> jax.Array:
    """Zero each element with probability `rate`, scale the others by 1 / (1 - rate).

    key: raw threefry key data, uint32 [2], already folded with step, layer and site; rows, positions: global indices, int32.
    """
    keep = _mask(x_BtD.shape, rate, key, rows_B, positions_t)
    return jnp.where(keep, x_BtD * jnp.asarray(1 / (1 - rate), x_BtD.dtype), jnp.zeros((), x_BtD.dtype))


dropout.defvjp(
    lambda x, key, rows, positions, rate: (dropout(x, key, rows, positions, rate), (key, rows, positions)),
    lambda rate, saved, dy: (dropout(dy, *saved, rate), None, None, None))
