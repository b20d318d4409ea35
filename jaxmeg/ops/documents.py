"""Where the documents of packed rows lie, for a kernel that works on each alone instead of on a mask [T, T].

The rows of a batch are taken one behind the other; a document is a run of equal numbers in a row, padding too. How many there are is
data, how many there may be is not: S = B * M for M documents a row, unused ones lying empty behind the last token.
Shapes: segments int32 [B, T]; log-sum-exp [B, H, T] by token, or [S, H, T] by document.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Documents(NamedTuple):
    """Counted over all B * T tokens."""

    starts_S1: jax.Array
    """Tokens before each document, int32 [S + 1]: B * T where there is none."""
    index_BT: jax.Array
    """Document of each token, int32: S or more where there are too many."""

    @property
    def lengths_S(self) -> jax.Array:
        return jnp.diff(self.starts_S1)

    @property
    def fit(self) -> jax.Array:
        """Whether there are no more than S documents, bool []."""
        return self.index_BT[-1, -1] < self.starts_S1.shape[0] - 1


def find_documents(segments_BT: jax.Array, per_row: int) -> Documents:
    """Documents of rows that hold at most `per_row`, on average."""
    B, T = segments_BT.shape
    index = lax.broadcasted_iota(jnp.int32, (B, T), 1)
    begins = (index == 0) | (segments_BT != jnp.roll(segments_BT, 1, axis=1))
    number = jnp.cumsum(begins.reshape(-1), dtype=jnp.int32) - 1
    documents = lax.broadcasted_iota(jnp.int32, (B * per_row + 1, 1), 0)
    starts = jnp.sum(number[None] < documents, axis=1, dtype=jnp.int32)
    return Documents(starts, number.reshape(B, T))


def by_token(lse_SHT: jax.Array, documents: Documents) -> jax.Array:
    """[S, H, T] -> [B, H, T]; NaN where documents don't fit, so that no update comes of them."""
    B, T = documents.index_BT.shape
    number = documents.index_BT.reshape(-1)
    place = jnp.arange(B * T, dtype=jnp.int32) - documents.starts_S1[number]
    lse = lse_SHT[number, :, place].reshape(B, T, -1)
    return jnp.where(documents.fit, lse, jnp.nan).transpose(0, 2, 1)


def by_document(lse_BHT: jax.Array, documents: Documents) -> jax.Array:
    """[B, H, T] -> [S, H, T], the reverse; what lies behind a document is not its own."""
    B, H, T = lse_BHT.shape
    padded = jnp.pad(lse_BHT, ((0, 0), (0, 0), (0, T)))

    def one(start: jax.Array) -> jax.Array:
        row = jnp.minimum(start // T, B - 1)
        return lax.dynamic_slice(padded, (row, jnp.zeros_like(row), start - row * T), (1, H, T))[0]

    return jax.vmap(one)(documents.starts_S1[:-1])
