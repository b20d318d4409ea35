"""Memory order <-> canonical order, on the devices: what a checkpoint stores is the same for every layout.

Canonical is [layer, ...] and [vocab_size, ...]. In memory stages lie one after the other, with padding rows where they
are uneven, and token tables have padding rows. Leaves without such a dim, or whose rows are in model order already
(even stages of one chunk, a vocabulary that divides), pass through and are not copied. Knows no file.

Memory: leaves that do change exist twice while they are saved or restored, both copies sharded. Rows are never put
together on a device: the mesh axes of their dim move to another dim, where all rows can be picked locally. Only axes
that divide no other dim are dropped, and the leaf is then whole along them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmeg.layout import LeafLayout
from jaxmeg.optim.moments import moment_layouts
from jaxmeg.setup import Setup
from jaxmeg.state import abstract_state

Leaves = Mapping[str, jax.Array]
"""Leaves of a TrainState by path: "params.embed.tokens", "opt_state.0.mu.embed.tokens", "step"."""

_BITS = {4: jnp.uint32, 2: jnp.uint16, 1: jnp.uint8}


class Rows(NamedTuple):
    """How the rows of one dim lie in memory."""

    dim: int
    of: tuple[int, ...]
    """The memory row of every canonical row."""
    num_memory: int
    """Rows in memory, padding included."""


class CanonicalLeaf(NamedTuple):
    """How one leaf of the state is stored."""

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    """Of the canonical array. For a leaf whose rows move it does not shard their dim."""
    in_memory: NamedSharding
    rows: Rows | None = None
    """None where memory order is canonical."""
    between: tuple[NamedSharding, ...] = ()
    """The way from `in_memory` to `sharding`: every step moves one mesh axis, by an all-to-all of its ranks."""

    @property
    def abstract(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def flatten(tree: Any) -> dict[str, Any]:
    """Leaves by path, in tree order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, CanonicalLeaf))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def unflatten(like: Any, leaves: Mapping[str, Any]) -> Any:
    """The tree with the structure of `like` and these leaves."""
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[path] for path in flatten(like)])


def canonical_leaves(setup: Setup) -> dict[str, CanonicalLeaf]:
    """The stored form of every leaf of the state, by path."""
    state = abstract_state(setup)
    layouts: Any = jax.tree.map(lambda _: None, state)._replace(
        params=setup.layout.leaves, opt_state=moment_layouts(setup.optimizer, state.params, setup.layout))
    return flatten(jax.tree.map(lambda x, leaf: _canonical_leaf(setup, x, leaf), state, layouts))


def to_canonical(leaves: Mapping[str, CanonicalLeaf]) -> Callable[[Leaves], Leaves]:
    """A program from memory order to canonical order. What does not change is in the result as the very same array."""
    return _program(leaves, _pick, {path: leaf.sharding for path, leaf in leaves.items() if leaf.rows})


def from_canonical(leaves: Mapping[str, CanonicalLeaf]) -> Callable[[Leaves], Leaves]:
    """The inverse, into the layout's shardings; padding rows are zeros."""
    return _program(leaves, _put, {path: leaf.in_memory for path, leaf in leaves.items() if leaf.rows})


def _program(leaves: Mapping[str, CanonicalLeaf], move: Callable[[CanonicalLeaf, jax.Array], jax.Array],
             shardings: Mapping[str, NamedSharding]) -> Callable[[Leaves], Leaves]:
    """One jit for all leaves whose rows move."""
    jitted = jax.jit(lambda xs: {path: move(leaves[path], x) for path, x in xs.items()}, out_shardings=dict(shardings))
    return lambda xs: {**xs, **jitted({path: xs[path] for path in shardings})} if shardings else dict(xs)


def checksums(leaves: Leaves) -> dict[str, int]:
    """Of every leaf, one after the other: a CPU holds the hashes of a whole leaf, and in one program of all leaves would hold all."""
    return {path: int(checksum(x)) for path, x in leaves.items()}


@jax.jit
def checksum(x: jax.Array) -> jax.Array:
    """uint32 []: the sum of a hash of every element's bits and index. Sums wrap, so sharding changes nothing."""
    index = jnp.zeros(x.shape, jnp.uint32)
    for dim in range(x.ndim):
        index = index * jnp.uint32(x.shape[dim]) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, dim)
    h = jax.lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize]).astype(jnp.uint32) ^ (index * jnp.uint32(0x9E3779B1))
    h = (h ^ (h >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(h ^ (h >> jnp.uint32(16)), dtype=jnp.uint32)


def _canonical_leaf(setup: Setup, x: jax.ShapeDtypeStruct, leaf: LeafLayout | None) -> CanonicalLeaf:
    in_memory = x.sharding
    assert isinstance(in_memory, NamedSharding)
    rows = None if leaf is None else _rows(setup, leaf)
    if leaf is None or rows is None:
        return CanonicalLeaf(x.shape, np.dtype(x.dtype), in_memory, in_memory)
    shape = (*x.shape[: rows.dim], len(rows.of), *x.shape[rows.dim + 1 :])
    way = [NamedSharding(setup.mesh, spec) for spec in _moved_axes(leaf.spec(), shape, rows.dim, setup.layout.sizes)]
    return CanonicalLeaf(shape, np.dtype(x.dtype), way[-1], in_memory, rows, tuple(way[:-1]))


def _rows(setup: Setup, leaf: LeafLayout) -> Rows | None:
    """The layers or vocabulary rows of a leaf, if memory order is not canonical."""
    orders = {"layers": tuple(setup.placement.rows), "vocab": tuple(range(setup.resolved.arch.vocab_size))}
    for dim, name in enumerate(leaf.dims):
        if name in orders and orders[name] != tuple(range(leaf.shape[dim])):
            return Rows(dim, orders[name], leaf.shape[dim])
    return None


def _moved_axes(spec: PartitionSpec, shape: tuple[int, ...], dim: int, sizes: Mapping[str, int]) -> list[PartitionSpec]:
    """The spec after each move of an axis off `dim`, innermost first: to the largest other dim that it divides, free dims
    first; else it is dropped."""
    axes = [entry if isinstance(entry, tuple) else (entry,) if entry else () for entry in spec]
    way = [spec]
    for axis in reversed(axes[dim]):
        axes[dim] = axes[dim][:-1]
        fits = [i for i, entry in enumerate(axes) if i != dim and shape[i] % math.prod(sizes[a] for a in (*entry, axis)) == 0]
        best = max(fits, key=lambda i: (not axes[i], shape[i]), default=None)
        if best is not None:
            axes[best] = (*axes[best], axis)
        way.append(PartitionSpec(*(entry or None for entry in axes)))
    return way[1:] or way


def _pick(leaf: CanonicalLeaf, x: jax.Array) -> jax.Array:
    assert leaf.rows
    for sharding in (*leaf.between, leaf.sharding):
        x = jax.lax.with_sharding_constraint(x, sharding)
    return jnp.take(x, np.asarray(leaf.rows.of, np.int32), leaf.rows.dim, unique_indices=True)


def _put(leaf: CanonicalLeaf, x: jax.Array) -> jax.Array:
    """Zeros in padding rows."""
    assert leaf.rows
    source = np.full(leaf.rows.num_memory, len(leaf.rows.of), np.int32)  # one past the end: filled
    source[list(leaf.rows.of)] = np.arange(len(leaf.rows.of))
    x = jnp.take(x, source, leaf.rows.dim, mode="fill", fill_value=0)
    for sharding in (leaf.sharding, *reversed(leaf.between)):
        x = jax.lax.with_sharding_constraint(x, sharding)
    return x
