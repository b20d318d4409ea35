"""A Flax NNX module of the user's, taken apart: its parameters as a tree of arrays, and how to run it on given arrays.

It names no dims of ours, so nothing but ZeRO shards it: data parallelism at any stage works, tensor and pipeline
parallelism don't (they need the verbs of `parallel`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

ANY, TABLE, VECTOR = "any", "table", "vector"
"""What optimizers tell apart in place of dims: a leaf of weights, of a table that is looked up, and of norms and biases."""
RULES: dict[str, tuple[str, ...]] = {ANY: (), TABLE: (), VECTOR: ()}


class OwnModuleError(ValueError):
    """A module that can't be trained; the message names what stands in the way."""


class OwnModel:
    """What a `Setup` needs of a model, around a module of the user's."""

    def __init__(self, module: nnx.Module | Callable[[nnx.Rngs], nnx.Module]):
        """module: an instance, whose parameters are the initial weights, or a function of rngs that makes one."""
        self.make = make = None if isinstance(module, nnx.Module) else _maker(module)
        example: Any = nnx.eval_shape(lambda: make(nnx.Rngs(0))) if make else module
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
        modules = dict(nnx.iter_modules(example))
        self.dims = jax.tree_util.tree_map_with_path(
            lambda path, x: (_kind(modules, tuple(entry.key for entry in path)),) * x.ndim, self.params)
        """`ANY`, `TABLE` or `VECTOR` for every dim of a leaf."""

    def init(self, key: jax.Array, layer_of_row: jax.Array) -> Any:
        """Initial parameters, fp32; an instance brings its own."""
        del layer_of_row
        return self.params if self.make is None else nnx.to_pure_dict(nnx.state(self.make(nnx.Rngs(key)), nnx.Param))

    def bind(self, arrays: Any) -> Any:
        """The module with these parameters."""
        state = jax.tree.map(lambda x: x, self.state)
        nnx.replace_by_pure_dict(state, arrays)
        return nnx.merge(self.graph, state)


def _kind(modules: dict[tuple[Any, ...], nnx.Module], path: tuple[Any, ...]) -> str:
    """What the parameter at `path` is, by the innermost module that holds it, and its name. modules: all, by path."""
    holder = next(modules[path[:end]] for end in range(len(path) - 1, -1, -1) if path[:end] in modules)
    if isinstance(holder, nnx.Embed):
        return TABLE
    is_norm = any(base.__name__.endswith("Norm") for base in type(holder).__mro__)
    return VECTOR if is_norm or str(path[-1]).endswith(("bias", "scale")) else ANY


def _maker(make: Any) -> Callable[[nnx.Rngs], nnx.Module]:
    """A function that gives rngs to `make` as it takes them. Raises OwnModuleError where it can't take them, and, when called, where
    no module comes out."""
    by_name = _takes_by_name(make)

    def made(rngs: nnx.Rngs) -> nnx.Module:
        module = make(rngs=rngs) if by_name else make(rngs)
        if not isinstance(module, nnx.Module):
            raise OwnModuleError(f"{_name(make)} makes a {type(module).__name__}: give a function of rngs that returns an nnx.Module")
        return module

    return made


def _takes_by_name(make: Any) -> bool:
    """Whether `make` takes rngs by this name; else they are its first argument. OwnModuleError where neither can be."""
    if not callable(make):
        raise OwnModuleError(f"the module is a {_name(type(make))}: give an nnx.Module, or a function of rngs that makes one")
    try:
        signature = inspect.signature(_plain(make))
    except (TypeError, ValueError):  # some callables have none
        return False
    positional = any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in signature.parameters.values())
    named = "rngs" in signature.parameters and signature.parameters["rngs"].kind != inspect.Parameter.POSITIONAL_ONLY
    by_name = named or not positional
    try:
        signature.bind(*() if by_name else (None,), **{"rngs": None} if by_name else {})
    except TypeError as error:
        raise OwnModuleError(f"{_name(make)} can't be made from rngs alone ({error}): give a function of rngs, for example "
                             f"lambda rngs: {_name(make)}(..., rngs=rngs)") from error
    return by_name


def _plain(make: Any) -> Callable[..., Any]:
    """What has the parameters of `make`: NNX gives a class itself none."""
    if isinstance(make, partial) and isinstance(make.func, type):
        return partial(make.func.__init__, None, *make.args, **make.keywords)
    return partial(make.__init__, None) if isinstance(make, type) else make


def _name(make: Any) -> str:
    return getattr(make, "__name__", None) or type(make).__name__
