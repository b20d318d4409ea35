"""Faults of a layout, one context manager each: what a comparison with one device must catch.

Each replaces a function of jaxmeg by one that is wrong on some mesh and right on one device. Nothing in the product knows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxmeg import parallel, step
from jaxmeg.config import Axis, Config
from jaxmeg.layout import Layout
from jaxmeg.models import layers
from jaxmeg.pipeline import scan
from jaxmeg.pipeline.scan import Work
from jaxmeg.setup import Setup
from jaxmeg.verify import measure


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """owner.name is make(what it was), in programs traced from now on and no longer."""
    jax.clear_caches()
    try:
        with patch.object(owner, name, make(getattr(owner, name))):
            yield
    finally:
        jax.clear_caches()


def _before_reduce(change: Callable[[Any, jax.Array], jax.Array]) -> Any:
    """Every gradient leaf changed before `Layout.reduce` sums it."""
    return _replaced(Layout, "reduce", lambda right: lambda self, grads: right(self, self.map(change, grads)))


def missing_dp_sum() -> Any:
    """The MLP's gradients are those of the first data-parallel rank."""
    def change(leaf: Any, g: jax.Array) -> jax.Array:
        return parallel.only_on(lax.axis_index("dp") == 0, g) if ".mlp." in leaf.path else g
    return _before_reduce(change)


def doubled_tp_sum() -> Any:
    """Norms, which all tp ranks hold, are summed over tp twice."""
    def change(leaf: Any, g: jax.Array) -> jax.Array:
        return g * lax.axis_size("tp") if "norm" in leaf.path else g
    return _before_reduce(change)


def shifted_positions() -> Any:
    """From the second stage on, the second half of a row is one position too far."""
    def make(right: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def wrong(num_tokens: int, gathered: bool) -> jax.Array:
            positions = right(num_tokens, gathered)
            return positions + jnp.where(positions >= num_tokens // 2, parallel.stage(), 0)
        return wrong
    return _replaced(parallel, "token_positions", make)


def dropped_layer() -> Any:
    """The last stage leaves out its last layer."""
    def make(right: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def wrong(self: Work, w: Any, x: jax.Array, layer: jax.Array, context: Any) -> jax.Array:
            last = (layer == self.layer_of_row[-1]) & parallel.on_last_stage() & (lax.axis_size("pp") > 1)
            return jnp.where(last, x, right(self, w, x, layer, context))
        return wrong
    return _replaced(Work, "apply", make)


def stale_ring_slot() -> Any:
    """In 1F1B, backwards read the residuals in the next slot."""
    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(work: Work, table: Any) -> Any:
            slots = (np.asarray(table.rows["b_slot"]) + 1) % table.ring_slots
            return right(work, replace(table, rows={**table.rows, "b_slot": slots}) if table.name == "1f1b" else table)
        return wrong
    return _replaced(scan, "_pipeline", make)


def mean_of_means() -> Any:
    """The loss is the mean over ranks of each rank's mean over its tokens."""
    def wrong(setup: Setup, params: Any, rows: step.Rows, key: jax.Array, scale: jax.Array) -> Any:
        mask = rows.mask.astype(jnp.float32)
        weights = mask * (scale / jnp.maximum(jnp.sum(mask), 1.0) / setup.data_ranks)
        loss, grads = scan.loss_and_grads(step.work_of(setup, params, rows, weights, key), setup.table)
        grads = setup.layout.reduce(setup.layout.scatter(grads, setup.layout.leaves, "step", jnp.float32))
        return lax.psum(loss, parallel.AXES) / scale, grads, lax.psum(jnp.sum(mask), parallel.DATA_AXES)
    return _replaced(step, "_grads_body", lambda right: wrong)


def head_without_the_last_stage() -> Any:
    """Each stage takes the loss of its part of the vocabulary on its own output instead of the last stage's."""
    return _replaced(parallel, "from_last_stage", lambda right: lambda x: x)


def clip_by_stage() -> Any:
    """Layers are clipped by the gradient norm of their own stage."""
    def make(right: Callable[..., Setup]) -> Callable[..., Setup]:
        def wrong(*args: Any, **kwargs: Any) -> Setup:
            setup = right(*args, **kwargs)
            stages, clip, optimizer = setup.resolved.mesh[Axis.PP], setup.config.optim.clip_norm, setup.optimizer

            def update(updates: Any, state: Any, params: Any = None) -> Any:
                split = jax.tree.map(lambda g: g.reshape(stages, -1), updates["layers"])
                norm = jnp.sqrt(sum(jnp.sum(g * g, 1) for g in jax.tree.leaves(split)))
                split = jax.tree.map(lambda g, w: (g * (clip / norm)[:, None]).reshape(w.shape), split, updates["layers"])
                return optimizer.update({**updates, "layers": split}, state, params)

            return replace(setup, optimizer=optax.GradientTransformation(optimizer.init, update)) if stages > 1 else setup
        return wrong
    return _replaced(measure, "build", make)


def no_weight_decay() -> Any:
    """Data-parallel ranks leave out weight decay."""
    def make(right: Callable[..., Setup]) -> Callable[..., Setup]:
        def wrong(config: Config, *args: Any) -> Setup:
            decay = config.optim.weight_decay if config.mesh.dp == 1 else 0.0
            return right(replace(config, optim=replace(config.optim, weight_decay=decay)), *args)
        return wrong
    return _replaced(measure, "build", make)


def rows_of_another_rank() -> Any:
    """Every data-parallel rank gets some rows of its neighbour: a permutation of the batch, which no loss shows."""
    def make(right: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def wrong(setup: Setup, local: np.ndarray, num_microbatches: int) -> jax.Array:
            by_microbatch = local.reshape(num_microbatches, -1, *local.shape[1:])
            return right(setup, np.roll(by_microbatch, setup.data_ranks > 1, axis=1).reshape(local.shape), num_microbatches)
        return wrong
    return _replaced(step, "place", make)


def stale_shard() -> Any:
    """ZeRO 3 puts an MLP's weights together from the shards in the wrong order."""
    def make(right: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(self: Layout, tree: Any, leaves: Any, when: str) -> Any:
            def one(leaf: Any, x: jax.Array) -> jax.Array:
                if when != "use" or self.zero.gather_weights != "use" or leaf.zero_dim is None or "mlp.down" not in leaf.path:
                    return x
                n = lax.axis_size("dp")
                return lax.ppermute(x, "dp", [(i, (i + 1) % n) for i in range(n)])
            return right(self, self.map(one, tree, leaves=leaves), leaves, when)
        return wrong
    return _replaced(Layout, "gather", make)


def masks_by_local_row() -> Any:
    """Dropout masks depend on the row's number on its rank."""
    def make(right: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def wrong(x: jax.Array, key: jax.Array, rows: jax.Array, positions: jax.Array, rate: float) -> jax.Array:
            return right(x, key, rows - parallel.rank(parallel.DATA_AXES) * rows.shape[0], positions, rate)
        return wrong
    return _replaced(layers, "dropout", make)
