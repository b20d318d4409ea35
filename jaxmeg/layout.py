"""Where each leaf lives: named dims -> mesh axes (rule table) -> PartitionSpec, with ZeRO as a second, four-row table.

The only place that turns a dim into a mesh axis. It knows leaf shapes and dims, not models. References: Rajbhandari
et al. 2020 (ZeRO), Zhang et al. 2022 (hybrid sharding, here the axis `rep`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmeg import parallel
from jaxmeg.parallel import AXES, ZERO_AXES

When = Literal["step", "use"]


class LayoutError(ValueError):
    """A leaf that the rule table cannot place; the message names leaf, dim, sizes and fix."""


class ZeroStage(NamedTuple):
    """When state is put together and taken apart. "step": once a step; "use": per layer, each time it runs."""

    shard_state: bool
    gather_weights: When | None
    scatter_grads: When | None


ZERO: dict[int, ZeroStage] = {
    0: ZeroStage(shard_state=False, gather_weights=None, scatter_grads=None),
    1: ZeroStage(shard_state=True, gather_weights="step", scatter_grads="step"),
    2: ZeroStage(shard_state=True, gather_weights="step", scatter_grads="use"),
    3: ZeroStage(shard_state=True, gather_weights="use", scatter_grads="use"),
}


@dataclass(frozen=True, kw_only=True)
class LeafLayout:
    """One parameter leaf: its global shape in memory, its dims, and the mesh axes of each dim."""

    path: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    """Mesh axes of each dim by the rule table, without ZeRO; axes of size 1 are left out."""
    zero_dim: int | None
    """The dim that ZeRO shards on top, or None where no free dim divides."""
    zero_axes: tuple[str, ...]

    @property
    def model_axes(self) -> set[str]:
        return {axis for entry in self.axes for axis in entry}

    def spec(self, *, sharded_by_zero: bool = True) -> PartitionSpec:
        entries = list(self.axes)
        if sharded_by_zero and self.zero_dim is not None:
            entries[self.zero_dim] = self.zero_axes
        return PartitionSpec(*(entry if len(entry) != 1 else entry[0] for entry in (e or (None,) for e in entries)))


def place_leaf(path: str, shape: tuple[int, ...], dims: tuple[str, ...], rules: Mapping[str, tuple[str, ...]],
           sizes: Mapping[str, int], zero: ZeroStage) -> LeafLayout:
    if len(dims) != len(shape):
        raise LayoutError(f"{path}: {len(dims)} dims {dims} for shape {shape}: name every dim")
    used: dict[str, str] = {}
    entries = []
    for dim, size in zip(dims, shape, strict=True):
        if dim not in rules:
            raise LayoutError(f'{path}: unknown dim "{dim}": the rule table has {", ".join(rules)}')
        axes = tuple(axis for axis in rules[dim] if sizes[axis] > 1)
        for axis in axes:
            if axis in used:
                raise LayoutError(f"{path}: mesh axis {axis} is used for {used[axis]} and for {dim}: a leaf uses an axis once")
            used[axis] = dim
        ranks = math.prod(sizes[axis] for axis in axes)
        if dim == "kv_heads" and ranks % size == 0:
            axes, ranks = (axes, ranks) if ranks == size else ((), 1)  # fewer kv heads than ranks: held whole
        if size % ranks:
            raise LayoutError(f"{path}: {'*'.join(axes)}={ranks} does not divide {dim}={size}")
        entries.append(axes)
    zero_axes = tuple(axis for axis in ZERO_AXES if sizes[axis] > 1 and axis not in used)
    ranks = math.prod(sizes[axis] for axis in zero_axes)
    free = [i for i, dim in enumerate(dims) if not entries[i] and dim != "layers" and shape[i] % ranks == 0]
    zero_dim = max(free, key=lambda i: shape[i], default=None) if zero.shard_state and zero_axes else None
    return LeafLayout(path=path, shape=shape, dims=dims, axes=tuple(entries), zero_dim=zero_dim, zero_axes=zero_axes)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The layout of a whole parameter tree on a mesh. `leaves` is a tree of LeafLayout with the parameters' structure."""

    mesh: Mesh
    rules: Mapping[str, tuple[str, ...]]
    zero: ZeroStage
    leaves: Any

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.mesh.shape)

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.rules["vocab"] if self.sizes[axis] > 1)

    @property
    def specs(self) -> Any:
        """PartitionSpec of every leaf at rest: masters, moments, and gradients when they reach the optimizer."""
        return self.map(lambda leaf: leaf.spec())

    @property
    def shardings(self) -> Any:
        return self.map(lambda leaf: NamedSharding(self.mesh, leaf.spec()))

    def map(self, fn: Callable[..., Any], *trees: Any, leaves: Any = None) -> Any:
        """fn(LeafLayout, *corresponding leaves) over the tree, or over the part of it that `leaves` names."""
        return jax.tree.map(fn, self.leaves if leaves is None else leaves, *trees, is_leaf=is_leaf_layout)

    # ---------------------------------------------------------------- inside shard_map
    def gather(self, tree: Any, leaves: Any, when: When) -> Any:
        """Weights put together along their ZeRO dim, if this is when the stage does that. A tree without the layers
        dim (one layer, picked) is recognised by its rank."""
        def one(leaf: LeafLayout, x: jax.Array) -> jax.Array:
            if self.zero.gather_weights != when or leaf.zero_dim is None:
                return x
            return parallel.all_gather(x, leaf.zero_axes, leaf.zero_dim - len(leaf.shape) + x.ndim)
        return self.map(one, tree, leaves=leaves)

    def scatter(self, tree: Any, leaves: Any, when: When, dtype: Any) -> Any:
        """Gradients summed over the ZeRO axes in `dtype` and scattered along the ZeRO dim, if this is when the stage does that."""
        def one(leaf: LeafLayout, x: jax.Array) -> jax.Array:
            if self.zero.scatter_grads != when or leaf.zero_dim is None:
                return x
            dim = leaf.zero_dim - len(leaf.shape) + x.ndim
            return parallel.reduce_scatter(x.astype(dtype), leaf.zero_axes, dim).astype(x.dtype)
        return self.map(one, tree, leaves=leaves)

    def reduce(self, grads: Any) -> Any:
        """After the last tick: sum every leaf once, over exactly the axes it is not sharded on."""
        def one(leaf: LeafLayout, x: jax.Array) -> jax.Array:
            done = leaf.model_axes | (set(leaf.zero_axes) if leaf.zero_dim is not None else set())
            axes = tuple(axis for axis in AXES if axis not in done)
            with parallel.scope("all_sum", parallel.active(axes)):
                return jax.lax.psum(x, axes)
        return self.map(one, grads)

    def grad_shape(self, leaf: LeafLayout) -> tuple[int, ...]:
        """Local shape of the leaf's gradient accumulator."""
        sharded = self.zero.scatter_grads == "use" and leaf.zero_dim is not None
        return self.local_shape(leaf, leaf.spec(sharded_by_zero=sharded))

    def local_shape(self, leaf: LeafLayout, spec: PartitionSpec) -> tuple[int, ...]:
        return NamedSharding(self.mesh, spec).shard_shape(leaf.shape)


def is_leaf_layout(x: Any) -> bool:
    return isinstance(x, LeafLayout)


def make_layout(mesh: Mesh, rules: Mapping[str, tuple[str, ...]], zero: int, shapes: Any, dims: Any) -> Layout:
    """Place every leaf. shapes: tree of arrays or ShapeDtypeStructs; dims: the same tree with a tuple of names a leaf.

    Raises LayoutError for an unknown dim, a mesh axis used twice in a leaf, or a dim that its axes do not divide.
    """
    paths = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path, simple=True, separator="."), shapes)
    leaves = jax.tree.map(
        lambda path, x, names: place_leaf(path, tuple(x.shape), names, rules, dict(mesh.shape), ZERO[zero]),
        paths, shapes, dims)
    return Layout(mesh=mesh, rules=rules, zero=ZERO[zero], leaves=leaves)


class LayoutRow(NamedTuple):
    """One line of the layout table. bytes_per_device counts the fp32 master alone."""

    path: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    spec: str
    bytes_per_device: int
    note: str


def layout_rows(layout: Layout) -> list[LayoutRow]:
    """The layout as a table, with what ZeRO could not shard noted."""
    rows = []
    for leaf in jax.tree.leaves(layout.leaves, is_leaf=is_leaf_layout):
        local = layout.local_shape(leaf, leaf.spec())
        whole = layout.zero.shard_state and leaf.zero_dim is None and bool(leaf.zero_axes)
        entries = [",".join(leaf.zero_axes if i == leaf.zero_dim else axes) or "-" for i, axes in enumerate(leaf.axes)]
        rows.append(LayoutRow(leaf.path, leaf.shape, leaf.dims, f"({', '.join(entries)})", 4 * math.prod(local),
                              "whole: ZeRO divides no dim" if whole else ""))
    return rows
