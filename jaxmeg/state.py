"""Training state: shapes, then shardings, then arrays. And the canonical order in which state is compared and stored.

In memory the layer leaves are stage-major with padding rows where stages are uneven, and token tables have padding
rows; canonical is [layer, ...] and [vocab_size, ...], the same for every layout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmeg.layout import LeafLayout
from jaxmeg.optim.moments import moment_layouts
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
    return _around(setup, setup.model.init(key, jnp.asarray(setup.layer_of_row.reshape(-1), jnp.int32)))


def _around(setup: Setup, params: Any) -> TrainState:
    scale = init_loss_scale(setup.compute, setup.config.precision.loss_scale_init)
    zero = jnp.int32(0)
    return TrainState(zero, zero, zero, params, setup.optimizer.init(params), scale)


def abstract_state(setup: Setup) -> TrainState:
    """The state as ShapeDtypeStructs with shardings: what planner, checkpoints and ahead-of-time compilation start from."""
    shapes = jax.eval_shape(lambda key: _fresh(setup, key), jax.random.key(0))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, state_shardings(setup))


def moments(setup: Setup) -> Any:
    """A tree like `opt_state` with a LeafLayout for every moment and None for the rest, see `optim.moments`."""
    shapes = setup.layout.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32))
    return moment_layouts(setup.optimizer, shapes, setup.layout)


def state_shardings(setup: Setup) -> TrainState:
    """Parameters by the layout, moments like their parameters, counters on every device."""
    everywhere = NamedSharding(setup.mesh, PartitionSpec())
    shapes = jax.eval_shape(lambda key: _fresh(setup, key), jax.random.key(0))
    counters: TrainState = jax.tree.map(lambda _: everywhere, shapes)
    placed = jax.tree.map(lambda _, leaf: _sharding(setup, leaf), shapes.opt_state, moments(setup))
    return counters._replace(params=setup.layout.shardings, opt_state=placed)


def _sharding(setup: Setup, leaf: LeafLayout | None) -> NamedSharding:
    return NamedSharding(setup.mesh, PartitionSpec() if leaf is None else leaf.spec())


def init_state(setup: Setup, seed: int) -> TrainState:
    """Fresh state, each device making its own shards. The values depend on the seed and the model alone."""
    return jax.jit(lambda key: _fresh(setup, key), out_shardings=state_shardings(setup))(jax.random.key(seed))


def fresh_state(setup: Setup, params: Any) -> TrainState:
    """Fresh state around given parameters, which are copied; memory order, in the layout's shardings."""
    return jax.jit(lambda params: _around(setup, params), out_shardings=state_shardings(setup))(params)


def canonical(setup: Setup, tree: Any, leaves: Any = None) -> Any:
    """Any part of the state as host arrays: layers in model order, no padding.

    leaves: tree like `tree` with each leaf's LeafLayout or None; by default the parameters' (for gradients too), and
    `moments(setup)` for `opt_state`.
    """
    def one(x: jax.Array, leaf: LeafLayout | None) -> np.ndarray:
        host = np.asarray(x)
        real = _real_rows(setup, leaf)
        return host if real is None else host[real]

    return jax.tree.map(one, tree, setup.layout.leaves if leaves is None else leaves)


def from_canonical(setup: Setup, tree: Any, leaves: Any = None) -> Any:
    """The inverse of `canonical`: host arrays placed in the layout's shardings, padding filled with zeros."""
    def one(host: np.ndarray, leaf: LeafLayout | None) -> jax.Array:
        real = _real_rows(setup, leaf)
        if leaf is not None and real is not None:
            memory = np.zeros(leaf.shape, host.dtype)
            memory[real] = host
            host = memory
        return jax.device_put(host, _sharding(setup, leaf))

    return jax.tree.map(one, tree, setup.layout.leaves if leaves is None else leaves)


def _real_rows(setup: Setup, leaf: LeafLayout | None) -> Any:
    """Where the first dim in memory holds the canonical rows; None for a leaf without padding or order."""
    match leaf.dims[:1] if leaf else ():
        case ("layers",):
            return np.asarray(setup.placement.rows)
        case ("vocab",):
            return slice(setup.resolved.arch.vocab_size)
        case _:
            return None
