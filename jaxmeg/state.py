"""Training state: shapes, then shardings, then arrays. And the canonical order in which state is compared and stored.

In memory the layer leaves are stage-major with padding rows where stages are uneven, and token tables have padding
rows; canonical is [layer, ...] and [vocab_size, ...], the same for every layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmeg.layout import is_leaf_layout
from jaxmeg.precision import LossScale, init_loss_scale
from jaxmeg.setup import Setup


class TrainState(NamedTuple):
    """All that a step changes. params and moments fp32, in the layout's shardings; the counters are i32 []."""

    step: jax.Array
    """Batches consumed: the data position."""
    updates: jax.Array
    """Updates applied: what the learning rate counts."""
    skipped: jax.Array
    """Updates skipped in a row because the gradient was not finite."""
    params: Any
    opt_state: Any
    loss_scale: LossScale


def _fresh(setup: Setup, key: jax.Array) -> TrainState:
    params = setup.model.init(key, jnp.asarray(setup.layer_of_row.reshape(-1), jnp.int32))
    scale = init_loss_scale(setup.compute, setup.config.precision.loss_scale_init)
    zero = jnp.int32(0)
    return TrainState(zero, zero, zero, params, setup.optimizer.init(params), scale)


def abstract_state(setup: Setup) -> TrainState:
    """The state as ShapeDtypeStructs with shardings: what planner, checkpoints and ahead-of-time compilation start from."""
    shapes = jax.eval_shape(lambda key: _fresh(setup, key), jax.random.key(0))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, state_shardings(setup))


def state_shardings(setup: Setup) -> TrainState:
    """Parameters by the layout, moments like their parameters, counters on every device."""
    everywhere = NamedSharding(setup.mesh, PartitionSpec())
    shapes = jax.eval_shape(lambda key: _fresh(setup, key), jax.random.key(0))
    moments = optax.tree.map_params(
        setup.optimizer, lambda _, sharding: sharding, shapes.opt_state, setup.layout.shardings,
        transform_non_params=lambda _: everywhere)
    counters: TrainState = jax.tree.map(lambda _: everywhere, shapes)
    return counters._replace(params=setup.layout.shardings, opt_state=moments)


def init_state(setup: Setup, seed: int) -> TrainState:
    """Fresh state, each device making its own shards. The values depend on the seed and the model alone."""
    return jax.jit(lambda key: _fresh(setup, key), out_shardings=state_shardings(setup))(jax.random.key(seed))


def canonical(setup: Setup, params: Any) -> Any:
    """A parameter-shaped tree (parameters, gradients, a moment) as host arrays: layers in model order, no padding."""
    rows = np.asarray(setup.placement.rows)

    def one(leaf: Any, x: jax.Array) -> np.ndarray:
        host = np.asarray(x)
        if leaf.dims[0] == "layers":
            host = host[rows]
        return host[: setup.model.arch.vocab_size] if leaf.dims[0] == "vocab" else host

    return jax.tree.map(one, setup.layout.leaves, params, is_leaf=is_leaf_layout)


def from_canonical(setup: Setup, tree: Any) -> Any:
    """The inverse of `canonical`: host arrays placed in the layout's shardings, padding filled with zeros."""
    rows = np.asarray(setup.placement.rows)

    def one(leaf: Any, host: np.ndarray, sharding: NamedSharding) -> jax.Array:
        if leaf.dims[0] in ("layers", "vocab"):
            memory = np.zeros(leaf.shape, host.dtype)
            memory[rows if leaf.dims[0] == "layers" else slice(len(host))] = host
            host = memory
        return jax.device_put(host, sharding)

    return jax.tree.map(one, setup.layout.leaves, tree, setup.layout.shardings, is_leaf=is_leaf_layout)
