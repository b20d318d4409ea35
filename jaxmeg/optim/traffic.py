"""What an update moves between devices, counted before anything is compiled: for matrices that are cut.

Only Muon and Adafactor look at more than one entry of a leaf at a time. The bytes are those of the compiled program,
fp32, of the tensors that collectives work on (`hlo.Collective.bytes`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import jax

from jaxmeg.config import OptimConfig
from jaxmeg.layout import Layout, LeafLayout, is_leaf_layout
from jaxmeg.optim.adafactor import block_of
from jaxmeg.optim.matrices import cuts, multiplied_matrix


class Gathered(NamedTuple):
    """One leaf whose matrices Muon has to see whole."""

    path: str
    axes: tuple[str, ...]
    """Mesh axes over which its matrices are cut."""
    matrices: int
    """How many the devices along these axes hold together."""
    orthogonalised: int
    """How many of them fall to one device, padding included."""
    bytes: int
    """That pass through a device's all-to-alls, there and back."""


class Reduced(NamedTuple):
    """One leaf whose means Adafactor takes over several devices."""

    path: str
    axes: tuple[str, ...]
    """Mesh axes over which one layer of it is cut."""
    bytes: int
    """That pass through a device's all-reduces."""


def gathered(layout: Layout) -> list[Gathered]:
    """Muon: every leaf that is orthogonalised, in tree order."""
    found = []
    for leaf in _leaves(layout):
        if matrix := multiplied_matrix(leaf.dims):
            own = matrix.rows + matrix.columns
            local, cut = layout.local_shape(leaf, leaf.spec()), cuts(leaf, own)
            count, ranks = prod(local[i] for i in matrix.batch), prod(layout.sizes[axis] for axis in _axes(cut))
            share = -(-count // ranks)
            moved = 2 * len(cut) * 4 * share * ranks * prod(local[i] for i in own)
            found.append(Gathered(leaf.path, _axes(cut), count, share, moved))
    return found


def reduced(layout: Layout, vocab_size: int | None, factored_dim: int) -> list[Reduced]:
    """Adafactor: every leaf with a layer that is cut, in tree order. One all-reduce for every cut dim of every mean."""
    found = []
    for leaf in _leaves(layout):
        block, local = block_of(leaf.dims, leaf.shape, vocab_size, factored_dim), layout.local_shape(leaf, leaf.spec())
        every = tuple(range(len(local)))
        means = [(every, block.own)] * 2  # sizes of change and parameter
        if block.matrix:
            _, rows, columns = block.matrix
            means += [(every, columns), (every, rows), (tuple(i for i in every if i not in columns), rows)]
        size = sum(4 * len(cuts(leaf, over)) * prod(local[i] for i in dims if i not in over) for dims, over in means)
        if size:
            found.append(Reduced(leaf.path, _axes(cuts(leaf, block.own)), size))
    return found


def update_lines(config: OptimConfig, layout: Layout, vocab_size: int | None) -> list[str]:
    """For a person: which leaves get what, and what that moves. Empty for optimizers that only look at single entries."""
    every = _leaves(layout)
    if config.name == "muon":
        rows = gathered(layout)
        count, share = sum(row.matrices for row in rows), sum(row.orthogonalised for row in rows)
        return [f"muon on {len(rows)} of {len(every)} leaves, adamw on the others; {share} of a stage's {count} matrices fall to a device"
                + _moved(rows, "matrices", "all-to-alls")]
    if config.name == "adafactor":
        least = config.factored_dim
        factored = [leaf for leaf in every if block_of(leaf.dims, leaf.shape, vocab_size, least).matrix]
        return [f"row and column means for {len(factored)} of {len(every)} leaves, matrices with at least {least} rows and columns"
                + _moved(reduced(layout, vocab_size, least), "layers", "all-reduces")]
    return []


def _moved(rows: Sequence[Gathered | Reduced], what: str, how: str) -> str:
    axes, size = dict.fromkeys(axis for row in rows for axis in row.axes), sum(row.bytes for row in rows)
    return f"; {what} are cut over {', '.join(axes)}: {size:,} bytes a device and update in {how}" if size else ""


def _leaves(layout: Layout) -> list[LeafLayout]:
    return jax.tree.leaves(layout.leaves, is_leaf=is_leaf_layout)


def _axes(cut: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(str(axis) for axes in cut.values() for axis in axes)

