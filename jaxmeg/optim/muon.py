"""Muon: the momentum of every matrix is brought near an orthogonal one before it is applied.

Newton-Schulz needs whole matrices, and ZeRO and tensor parallelism cut them. So the ranks that hold parts of the same
matrices trade: each gets some of the matrices whole, orthogonalises these, and trades back. None repeats another's work
or holds more than its share, and `traffic.gathered` says what is moved. Tables, norms and biases are AdamW's.
References: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; Liu et al. 2025 (arXiv 2502.16982) for the scale.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxmeg import parallel
from jaxmeg.layout import Layout, LeafLayout, is_leaf_layout
from jaxmeg.optim.matrices import Matrix, cuts, multiplied_matrix

UPDATE_SIZE = 0.2  # root mean square of an orthogonal update, about AdamW's: one learning rate serves both


def scale_by_muon(layout: Layout, momentum: float, steps: int, adam: optax.GradientTransformation) -> optax.GradientTransformation:
    """Updates before decay and learning rate: Nesterov momentum, orthogonalised in `steps` iterations, and `adam` for the
    leaves that are no matrices."""
    labels = layout.map(lambda leaf: "muon" if multiplied_matrix(leaf.dims) else "adam")
    muon = optax.chain(optax.trace(momentum, nesterov=True), _orthogonalize(layout, steps))
    return optax.partition({"muon": muon, "adam": adam}, labels)


def _orthogonalize(layout: Layout, steps: int) -> optax.GradientTransformation:
    every = jax.tree.leaves(layout.leaves, is_leaf=is_leaf_layout)
    leaves = [(leaf, matrix) for leaf in every if (matrix := multiplied_matrix(leaf.dims))]
    specs = [leaf.spec() for leaf, _ in leaves]

    def body(updates: list[jax.Array]) -> list[jax.Array]:
        return [_orthogonal(leaf, matrix, x, steps) for (leaf, matrix), x in zip(leaves, updates, strict=True)]

    run = jax.shard_map(body, mesh=layout.mesh, in_specs=(specs,), out_specs=specs, check_vma=True)

    def update(updates: Any, _: Any) -> Any:
        arrays, structure = jax.tree.flatten(updates)
        return jax.tree.unflatten(structure, run(arrays))

    return optax.stateless(update)


def _orthogonal(leaf: LeafLayout, matrix: Matrix, x: jax.Array, steps: int) -> jax.Array:
    """One leaf, inside shard_map. x: this rank's part."""
    shape, own = x.shape, len(matrix.batch)
    cut = [(axes, 1 + dim - own) for dim, axes in cuts(leaf, matrix.rows + matrix.columns).items()]
    ranks = prod(jax.lax.axis_size(axis) for axes, _ in cut for axis in axes)
    x = x.reshape(-1, *shape[own:])  # [matrices, rows..., columns...]
    count = len(x)
    x = jnp.pad(x, [(0, -count % ranks), *[(0, 0)] * (len(shape) - own)])
    for axes, dim in cut:
        x = parallel.all_to_all(x, axes, 0, dim)
    num_rows = prod(x.shape[1 : 1 + len(matrix.rows)])
    x = newton_schulz(x.reshape(len(x), num_rows, -1), steps).reshape(x.shape)
    for axes, dim in reversed(cut):
        x = parallel.all_to_all(x, axes, dim, 0)
    return x[:count].reshape(shape)


def newton_schulz(x: jax.Array, steps: int) -> jax.Array:
    """Matrices [n, rows, columns] with their singular values brought near 1, scaled so that the root mean square of a full
    one is about `UPDATE_SIZE`. A zero matrix stays zero."""
    whole = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    # optax has the iteration inside its Muon only: without momentum that is all it does
    rule = optax.contrib.scale_by_muon(beta=0.0, nesterov=False, ns_steps=steps, weight_dimension_numbers=whole)
    return UPDATE_SIZE * max(x.shape[1:]) ** 0.5 * rule.update(x, rule.init(x))[0]
