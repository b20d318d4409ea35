"""What in a parameter leaf is a matrix: which dims count matrices, which are its rows, which its columns, and who holds them.

Optimizers that look at a whole matrix read it here, so that a stack of layers is never taken for one matrix and the
heads of a projection never for several. Dims are known by name; it must not know optimizers.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxmeg.layout import LeafLayout

COUNTING = ("layers", "experts")  # leading dims with one matrix for each index
TABLES = ("vocab", "positions", "table")  # rows of a table are looked up, not multiplied; "table" is one of a module of the user's
VECTOR = "vector"  # every dim of a norm's or bias's leaf in a module of the user's, where dims that count are not known by name
HEADS = ("heads", "kv_heads")


class Matrix(NamedTuple):
    """Positions of a leaf's dims; batch comes first, then rows, then columns."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


def batch_dims(dims: tuple[str, ...]) -> tuple[int, ...]:
    """Positions of the leading dims that count layers or experts."""
    count = next((i for i, dim in enumerate(dims) if dim not in COUNTING), len(dims))
    return tuple(range(count))


def matrix_of(dims: tuple[str, ...]) -> Matrix | None:
    """The matrix that a leaf holds, once or stacked; None for vectors and for what is no matrix.

    [layers, embed, heads, head_dim] is [embed, heads * head_dim] for each layer; [vocab, embed] is itself.
    """
    if VECTOR in dims:
        return None
    batch, groups = batch_dims(dims), list[tuple[int, ...]]()
    for i in range(len(batch), len(dims)):
        if dims[i] == "head_dim" and dims[i - 1] in HEADS:
            groups[-1] = (*groups[-1], i)
        else:
            groups.append((i,))
    return Matrix(batch, *groups) if len(groups) == 2 else None


def multiplied_matrix(dims: tuple[str, ...]) -> Matrix | None:
    """The same, but None for tables too."""
    return None if set(TABLES) & set(dims) else matrix_of(dims)


def cuts(leaf: LeafLayout, dims: tuple[int, ...]) -> dict[int, tuple[str, ...]]:
    """Mesh axes, ZeRO's included, of those of the dims (positions) that are sharded at rest."""
    axes = [leaf.zero_axes if i == leaf.zero_dim else axes for i, axes in enumerate(leaf.axes)]
    return {i: axes[i] for i in dims if axes[i]}
