"""Adafactor: second moments of matrices kept as row and column means, steps in proportion to the size of a parameter.

The formulas are those of `optax.adafactor`, which takes means over whole leaves. There a stack of layers would be one
matrix and padding rows would count, and both depend on the layout. Here every mean is over one layer and over real
rows. The only state beside the statistics is the number of updates. Reference: Shazeer and Stern 2018.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmeg.optim.matrices import Matrix, batch_dims, matrix_of

DECAY = 0.8  # update t averages with weight t**-DECAY
EPS = 1e-30  # added to squared gradients
CLIP = 1.0  # largest root mean square of an update, before it is scaled by the parameter's
MIN_SCALE = 1e-3  # a parameter smaller than this moves as if it were this large


class AdafactorState(NamedTuple):
    """Trees with the parameters' structure; None where a leaf has no such statistic."""

    count: jax.Array
    """Updates, int32 []."""
    v_row: Any
    """Mean square gradient of each row of a factored matrix: the leaf's dims without the columns."""
    v_col: Any
    """The same of each column: the leaf's dims without the rows."""
    v: Any
    """Mean square gradient of each entry of the other leaves."""


class Block(NamedTuple):
    """How one leaf is looked at."""

    real: tuple[int, ...]
    """Its shape without padding rows of the vocabulary."""
    own: tuple[int, ...]
    """Positions of the dims of one layer."""
    matrix: Matrix | None
    """The matrix whose rows and columns are averaged; None if every entry has its own statistic."""

    def mean(self, x: jax.Array, over: tuple[int, ...]) -> jax.Array:
        """Mean over some dims, which stay with size 1. Padding holds zeros: it adds nothing and is not counted."""
        return jnp.sum(x, over, keepdims=True) / prod(self.real[dim] for dim in over)

    def root_mean_square(self, x: jax.Array) -> jax.Array:
        """Of each layer: the leaf's shape with size 1 in its own dims."""
        return jnp.sqrt(self.mean(x * x, self.own))


def block_of(dims: tuple[str, ...], shape: tuple[int, ...], vocab_size: int | None, factored_dim: int) -> Block:
    """A matrix is factored if it has at least `factored_dim` rows and columns."""
    real = tuple(vocab_size or size if dim == "vocab" else size for dim, size in zip(dims, shape, strict=True))
    matrix = matrix_of(dims)
    if matrix and min(prod(real[i] for i in side) for side in (matrix.rows, matrix.columns)) < factored_dim:
        matrix = None
    return Block(real, tuple(range(len(batch_dims(dims)), len(dims))), matrix)


def scale_by_adafactor(dims: Any, vocab_size: int | None, factored_dim: int) -> optax.GradientTransformation:
    """Updates before decay and learning rate.

    dims: the parameter tree with a tuple of dim names a leaf. vocab_size: rows of the vocabulary that are no padding.
    """
    def over_leaves(fn: Any, *trees: Any) -> Any:
        """fn(Block, *corresponding leaves)."""
        def one(names: tuple[str, ...], x: jax.Array, *rest: Any) -> Any:
            return fn(block_of(names, x.shape, vocab_size, factored_dim), x, *rest)
        return jax.tree.map(one, dims, *trees, is_leaf=lambda x: isinstance(x, tuple))

    def init(params: Any) -> AdafactorState:
        def fresh(b: Block, x: jax.Array) -> _Leaf:
            zeros = jnp.zeros_like(x)
            return _Leaf(v=zeros) if b.matrix is None else _Leaf(jnp.sum(zeros, b.matrix.columns), jnp.sum(zeros, b.matrix.rows))
        return _state(jnp.zeros([], jnp.int32), over_leaves(fresh, params))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, AdafactorState]:
        count = state.count + 1
        new = count.astype(jnp.float32) ** -DECAY

        def one(b: Block, p: jax.Array, g: jax.Array, v_row: Any, v_col: Any, v: Any) -> _Leaf:
            square = g * g + EPS
            if b.matrix:
                _, rows, columns = b.matrix
                row = (1 - new) * jnp.expand_dims(v_row, columns) + new * b.mean(square, columns)
                column = (1 - new) * jnp.expand_dims(v_col, rows) + new * b.mean(square, rows)
                change = g * jax.lax.rsqrt(row / b.mean(row, rows)) * jax.lax.rsqrt(column)
                v_row, v_col = jnp.squeeze(row, columns), jnp.squeeze(column, rows)
            else:
                v = (1 - new) * v + new * square
                change = g * jax.lax.rsqrt(v)
            change = change / jnp.maximum(1.0, b.root_mean_square(change) / CLIP)
            return _Leaf(v_row, v_col, v, change * jnp.maximum(b.root_mean_square(p), MIN_SCALE))

        leaves = over_leaves(one, params, grads, state.v_row, state.v_col, state.v)
        return _field(leaves, "change"), _state(count, leaves)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]  # optax types a state as arrays


class _Leaf(NamedTuple):
    """State of one leaf, and its change."""

    v_row: Any = None
    v_col: Any = None
    v: Any = None
    change: Any = None


def _field(leaves: Any, name: str) -> Any:
    return jax.tree.map(lambda leaf: getattr(leaf, name), leaves, is_leaf=lambda x: isinstance(x, _Leaf))


def _state(count: jax.Array, leaves: Any) -> AdafactorState:
    return AdafactorState(count, _field(leaves, "v_row"), _field(leaves, "v_col"), _field(leaves, "v"))
