"""A Flax NNX module of the user's, taken apart: its parameters as a tree of arrays, and how to run it on given arrays.

It names no dims of ours, so nothing but ZeRO shards it: data parallelism at any stage works, tensor and pipeline
parallelism don't (they need the verbs of `parallel`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

ANY_DIM = "any"
RULES: dict[str, tuple[str, ...]] = {ANY_DIM: ()}


class OwnModuleError(ValueError):
    """A module that can't be trained; the message names what stands in the way."""


class OwnModel:
    """What a `Setup` needs of a model, around a module of the user's."""

    def __init__(self, module: nnx.Module | Callable[[nnx.Rngs], nnx.Module]):
        """module: an instance, whose parameters are the initial weights, or a function of rngs that makes one."""
        self.make = None if isinstance(module, nnx.Module) else module
        example = module if isinstance(module, nnx.Module) else nnx.eval_shape(lambda: module(nnx.Rngs(0)))
        self.graph, state, other = nnx.split(example, nnx.Param, ...)
        if left := [(path, variable) for path, variable in nnx.to_flat_state(other)]:
            path, variable = left[0]
            raise OwnModuleError(
                f"{type(example).__name__} holds {len(left)} values besides parameters, the first is {'.'.join(map(str, path))} "
                f"({type(variable).__name__}): only nnx.Param is trained; build it without dropout rngs and batch statistics")
        self.state = state
        self.name = type(example).__name__
        self.params = nnx.to_pure_dict(state)
        """Initial weights, or their shapes where a function makes them."""
        wrong = [f"{jax.tree_util.keystr(path, simple=True, separator='.')} is {x.dtype}"
                 for path, x in jax.tree_util.tree_leaves_with_path(self.params) if x.dtype != jnp.float32]
        if wrong:
            raise OwnModuleError(f"{self.name}: {wrong[0]}, and masters are float32: use param_dtype=float32 (dtype decides what it "
                                 "computes in)")

    @property
    def dims(self) -> Any:
        return jax.tree.map(lambda x: (ANY_DIM,) * x.ndim, self.params)

    def init(self, key: jax.Array, layer_of_row: jax.Array) -> Any:
        """Initial parameters, fp32; an instance brings its own."""
        del layer_of_row
        return self.params if self.make is None else nnx.to_pure_dict(nnx.state(self.make(nnx.Rngs(key)), nnx.Param))

    def bind(self, arrays: Any) -> Any:
        """The module with these parameters."""
        state = jax.tree.map(lambda x: x, self.state)
        nnx.replace_by_pure_dict(state, arrays)
        return nnx.merge(self.graph, state)
