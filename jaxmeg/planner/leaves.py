"""The parameter leaves of a model as a planned layout places them, per device and without a device.

Shapes and dims come from the model itself, traced once per architecture; where a leaf lives is decided by the same
function that decides it in a run (`layout.place_leaf`), so a plan can't differ from the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxmeg.arch import Arch
from jaxmeg.config import Axis, Config, Resolved
from jaxmeg.layout import ZERO, LeafLayout, place_leaf
from jaxmeg.models.decoder import Decoder
from jaxmeg.models.layers import Options
from jaxmeg.optim.adafactor import block_of
from jaxmeg.optim.matrices import multiplied_matrix
from jaxmeg.pipeline.schedules import place_layers

MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1}
"""Moments a parameter. Muon and Adafactor depend on the leaf, see `moment_elements`."""


class Shape(NamedTuple):
    """One leaf of a model on no layout."""

    path: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]


@lru_cache(maxsize=64)
def model_leaves(arch: Arch) -> tuple[Shape, ...]:
    """All leaves without padding, in tree order."""
    model = Decoder(arch=arch, options=Options(dtype=jnp.dtype("float32"), kernel="xla"), remat="none", scan_layers=True,
                    vocab_rows=arch.vocab_size, vocab_axes=())
    shapes = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((arch.num_layers,), jnp.int32))
    dims = jax.tree.leaves(model.dims, is_leaf=lambda x: isinstance(x, tuple))
    paths = jax.tree_util.tree_leaves_with_path(shapes)
    return tuple(Shape(jax.tree_util.keystr(path, simple=True, separator="."), x.shape, names)
                 for (path, x), names in zip(paths, dims, strict=True))


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One leaf on a layout. Element counts are of one device."""

    placed: LeafLayout
    sizes: Mapping[str, int]

    @property
    def part(self) -> str:
        """embed, layers or head."""
        return self.placed.path.partition(".")[0]

    @property
    def rows(self) -> int:
        """Memory rows of layers on one device; 1 for the other parts."""
        return self.placed.shape[0] // self._ranks(self.placed.axes[0]) if self.placed.dims[0] == "layers" else 1

    @property
    def whole(self) -> int:
        """Elements without ZeRO."""
        return prod(self.placed.shape) // self._ranks(axis for axes in self.placed.axes for axis in axes)

    @property
    def zero_ranks(self) -> int:
        """Devices that ZeRO cuts it over; 1 where it does not."""
        return self._ranks(self.placed.zero_axes) if self.placed.zero_dim is not None else 1

    @property
    def shard(self) -> int:
        """Elements at rest: masters, moments."""
        return self.whole // self.zero_ranks

    @property
    def is_matrix(self) -> bool:
        """Whether the forward and backward pass use it in the compute dtype; norms and biases of the width stay fp32."""
        return sum(dim != "layers" for dim in self.placed.dims) > 1

    def _ranks(self, axes) -> int:
        return prod(self.sizes[axis] for axis in axes)


def placed_leaves(config: Config, resolved: Resolved) -> list[Leaf]:
    """Every leaf of the config's model on its mesh, with the padding rows of uneven stages and of the vocabulary."""
    sizes = {str(axis): size for axis, size in resolved.mesh.items()}
    rows = place_layers(resolved.arch.num_layers, resolved.mesh[Axis.PP], resolved.chunks).num_rows
    padded = {"layers": rows, "vocab": resolved.padded_vocab}
    zero = ZERO[config.layout.zero]
    return [Leaf(placed=place_leaf(path, tuple(padded.get(dim, size) for dim, size in zip(dims, shape, strict=True)), dims,
                                   resolved.rules, sizes, zero), sizes=sizes)
            for path, shape, dims in model_leaves(resolved.arch)]


def moment_elements(leaf: Leaf, config: Config) -> int:
    """Elements of the optimizer's statistics of a leaf on one device."""
    name, dims = config.optim.name, leaf.placed.dims
    if name == "muon":
        return leaf.shard * (1 if multiplied_matrix(dims) else 2)
    if name == "adafactor":
        block = block_of(dims, leaf.placed.shape, None, config.optim.factored_dim)
        if block.matrix is None:
            return leaf.shard
        rows, columns = (prod(leaf.placed.shape[i] for i in side) for side in (block.matrix.rows, block.matrix.columns))
        return leaf.shard // columns + leaf.shard // rows
    return leaf.shard * MOMENTS[name]
