"""A module of the user's in the user's own loop: `jaxmeg.initialize(module, loss, config)`, then `engine.step(batch)`.

The engine is a compiled step with its state; the mesh, ZeRO stage, optimizer and microbatch come from the config, as in
`jaxmeg.train.run`, which brings data, checkpoints and a record besides.
"""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxmeg.cli import ConfigError, config_of
from jaxmeg.config import Config
from jaxmeg.models.own import OwnModel
from jaxmeg.own_step import Loss, make_own_eval_step, own_gradients
from jaxmeg.setup import Setup, build
from jaxmeg.state import TrainState, fresh_state, init_state
from jaxmeg.step import Metrics, local_rows, make_train_step, place
from jaxmeg.validate.module_rules import problems, unread_by_engine

Batch = Any
"""A tree of arrays whose first dim is the row."""


class BatchError(ValueError):
    """A batch that does not fit the config; the message names the leaf, both sizes and the key."""


def import_object(path: str, key: str) -> Any:
    """The object at "package.module:name", also from the working directory. Raises ConfigError that names the key, and where in the
    user's files it went wrong."""
    module, _, name = path.partition(":")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        value = import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (Exception, SystemExit) as error:  # whatever a file of the user's raises
        what, where = " ".join(str(error).split()), _place_of(error)
        why = f"{type(error).__name__} at {where}: {what}" if where else what
        fix = "put that right" if where else "give package.module:name"
        raise ConfigError([f"{key}={path} can't be imported ({why}): {fix}"]) from error
    return value


def _place_of(error: BaseException) -> str | None:
    """"file, line n" where the user's code raised this, behind which only libraries are; None where none of it ran."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    paths = sysconfig.get_paths()
    others = ("<", str(Path(__file__).parent), *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(others)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else None


def own_setup(module: Any, config: Config, devices: Sequence[Any]) -> Setup:
    """What is decided before an array exists, for a module of the user's. Raises ConfigError, OwnModuleError."""
    if found := problems(config, len(devices)):
        raise ConfigError(found)
    return build(config, devices, own=OwnModel(module))


def own_state(setup: Setup) -> TrainState:
    """Fresh state: the weights of the instance that was given, or new ones from `train.seed`."""
    if setup.model.make is None:
        return fresh_state(setup, jax.tree.map(jax.device_put, setup.model.params, setup.layout.shardings))
    return init_state(setup, setup.config.train.seed)


class Microbatches:
    """Batches of rows as the step takes them: (arrays [M, n, ...], valid [M, n]) on the devices."""

    def __init__(self, setup: Setup):
        self.setup, self.rows, self.num = setup, setup.config.data.global_batch, setup.resolved.num_microbatches
        self.mine = local_rows(setup, self.rows, self.num)

    def __call__(self, batch: Batch, fill: bool = False) -> tuple[Batch, jax.Array]:
        """fill: fewer rows than data.global_batch are filled up with rows that do not count."""
        sizes = {jax.tree_util.keystr(path, simple=True, separator="."): np.shape(x)[0] if np.ndim(x) else 0
                 for path, x in jax.tree_util.tree_leaves_with_path(batch)}
        num_rows = next(iter(sizes.values()), 0)
        for path, size in sizes.items():
            if size != num_rows or size > self.rows or not size or (size < self.rows and not fill):
                raise BatchError(f"batch leaf {path or 'array'} has {size} rows, and data.global_batch={self.rows}: "
                                 f"give each step {self.rows} rows in every leaf")
        missing = self.rows - num_rows

        def one(x: Any) -> jax.Array:
            x = np.asarray(x)
            return place(self.setup, np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))[self.mine], self.num)

        return jax.tree.map(one, batch), one(np.ones(num_rows, bool))


class Engine:
    """A module, its optimizer state, and the compiled step of one layout."""

    def __init__(self, setup: Setup, loss: Loss):
        self.setup = setup
        self.state = own_state(setup)
        self._step = make_train_step(setup, own_gradients(setup, loss))
        self._evaluate = make_own_eval_step(setup, loss)
        self._place = Microbatches(setup)

    def step(self, batch: Batch) -> Metrics:
        """One update from a batch of data.global_batch rows. The metrics are device scalars: reading one waits for the step."""
        self.state, metrics = self._step(self.state, self._place(batch))
        return metrics

    def evaluate(self, batch: Batch) -> tuple[float, float]:
        """(mean loss, sum of weights) of at most data.global_batch rows; nothing is updated."""
        total, count = self._evaluate(self.state.params, self._place(batch, fill=True))
        return float(total) / max(float(count), 1e-12), float(count)

    @property
    def module(self) -> nnx.Module:
        """A module with the current weights, as global arrays in the layout's shardings; it lives until the next step, which
        reuses their memory."""
        return self.setup.model.bind(self.state.params)


def initialize(module: nnx.Module | Callable[[nnx.Rngs], nnx.Module], loss: Loss,
               config: Config | Mapping[str, Any] | str | Path | None = None, devices: Sequence[Any] | None = None) -> Engine:
    """An engine that trains `module` on the mesh of `config`.

    Args:
        module: an NNX module, whose parameters are the initial weights, or a function of rngs that makes one (then each
            device makes only its own shards, from train.seed).
        loss: (module, batch of some rows) -> losses, one or more a row, or (losses, weights). The step's loss is the weighted
            mean over the whole batch, over all microbatches and ranks.
        config: a `Config`, dotted keys such as {"mesh.dp": 4, "layout.zero": 2}, or a YAML file.
        devices: by default all that jax sees.

    Raises:
        ConfigError: with every mistake of the config, among them tp and pp, which a module of one's own can't have, and options
            that only `jaxmeg.train.run` reads.
        OwnModuleError: a module with state besides float32 parameters.
    """
    config = config if isinstance(config, Config) else config_of(config or {})
    if found := list(unread_by_engine(config, draws_weights=not isinstance(module, nnx.Module))):
        raise ConfigError(found)
    setup = own_setup(module, config, jax.devices() if devices is None else devices)
    return Engine(setup, loss)
