"""Where optimizer state lives: a `LeafLayout` for every moment, whatever the optimizer.

A leaf of optimizer state belongs to the parameter whose path its own path ends with, as in all optax states. It has the
parameter's dims, or, as a row or column statistic, some of them. What belongs to no parameter (counters) is None.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import jax
import optax

from jaxmeg.layout import Layout, LeafLayout, is_leaf_layout
from jaxmeg.optim.matrices import matrix_of


def moment_layouts(optimizer: optax.GradientTransformation, params: Any, layout: Layout) -> Any:
    """A tree like the optimizer's state with a LeafLayout for every moment, None for what every device holds whole.

    params: the parameters, or their shapes. Raises ValueError for a moment whose dims are not its parameter's.
    """
    of_path = dict(jax.tree_util.tree_leaves_with_path(layout.leaves, is_leaf=is_leaf_layout))

    def one(path: Any, moment: Any) -> LeafLayout | None:
        starts = [start for start in range(len(path)) if path[start:] in of_path]
        return _layout(path[starts[0] - 1], of_path[path[starts[0] :]], moment.shape) if starts else None

    return jax.tree_util.tree_map_with_path(one, jax.eval_shape(optimizer.init, params))


def moment_bytes(layouts: Any, layout: Layout) -> int:
    """Bytes of the moments on one device; they are fp32."""
    leaves = jax.tree.leaves(layouts, is_leaf=is_leaf_layout)
    return sum(4 * prod(layout.local_shape(leaf, leaf.spec())) for leaf in leaves)


def _layout(field: Any, leaf: LeafLayout, shape: tuple[int, ...]) -> LeafLayout:
    """field: key of the state's field that holds the moment."""
    matrix = matrix_of(leaf.dims)
    averaged = {"v_row": matrix.columns, "v_col": matrix.rows} if matrix else {}
    kept = leaf if shape == leaf.shape else _without(leaf, averaged.get(getattr(field, "name", ""), ()))
    if kept.shape != shape:
        raise ValueError(f"{leaf.path}: a moment of shape {shape} in {field} does not follow from the parameter's {leaf.dims} {leaf.shape}")
    return kept


def _without(leaf: LeafLayout, dims: tuple[int, ...]) -> LeafLayout:
    """The leaf without some dims, and without their mesh axes."""
    kept = [i for i in range(len(leaf.dims)) if i not in dims]
    shape, names, axes = (tuple(entry[i] for i in kept) for entry in (leaf.shape, leaf.dims, leaf.axes))
    zero_dim = kept.index(leaf.zero_dim) if leaf.zero_dim in kept else None
    return replace(leaf, shape=shape, dims=names, axes=axes, zero_dim=zero_dim)
