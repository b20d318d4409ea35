"""Gradients and evaluation of a module of the user's, with the ZeRO stages of the layout.

`shard_map` runs here without its replication check: the user's code is differentiated whole inside it, on local arrays
and without a collective, so there is nothing for the check to see, and loops in that code need not know of mesh axes.
All sums over ranks stand outside of what is differentiated (docs/decisions/0006).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from jaxmeg.models.own import OwnModuleError
from jaxmeg.parallel import DATA_AXES
from jaxmeg.precision import DTYPES
from jaxmeg.setup import Setup
from jaxmeg.step import ROWS

Loss = Callable[[Any, Any], Any]
"""(module, batch of n rows) -> losses [n, ...], or (losses, weights) of one shape; the run's loss is their weighted mean."""


def _sums(setup: Setup, loss: Loss, params: Any, batch: Any, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(sum of weight * loss, sum of weights) of the rows that are valid, bool [n]; fp32."""
    value = loss(setup.model.bind(params), batch)
    parts = value if isinstance(value, tuple) else (value,)
    if len(parts) > 2 or not parts or not all(isinstance(x, jax.Array | np.ndarray) for x in parts):
        shown = f"({', '.join(type(x).__name__ for x in parts)})" if isinstance(value, tuple) else f"a {type(value).__name__}"
        raise OwnModuleError(f"the loss returned {shown}: return an array of losses, or (losses, weights)")
    losses, weights = parts if len(parts) == 2 else (parts[0], None)
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        raise OwnModuleError(f"the loss returned losses of dtype {losses.dtype}, which have no gradient: return floating-point numbers")
    rows = valid.shape[0]
    if jnp.ndim(losses) < 1 or losses.shape[0] != rows or (weights is not None and jnp.shape(weights) != losses.shape):
        shown = jnp.shape(losses) if weights is None else f"{jnp.shape(losses)} and weights of shape {jnp.shape(weights)}"
        raise OwnModuleError(f"the loss returned losses of shape {shown} for {rows} rows: return one loss a row, [{rows}] or "
                             f"[{rows}, ...], and weights of the same shape; jaxmeg takes the mean over the whole batch")
    counted = jnp.broadcast_to(valid.reshape(-1, *(1,) * (losses.ndim - 1)), losses.shape)
    w = jnp.where(counted, jnp.ones_like(losses) if weights is None else weights, jnp.zeros_like(losses)).astype(jnp.float32)
    return jnp.sum(jnp.where(counted, losses, jnp.zeros_like(losses)).astype(jnp.float32) * w), jnp.sum(w)


def _on_mesh(setup: Setup, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    @wraps(body)
    def with_precision(*args: Any) -> Any:
        precision = setup.config.precision.matmul
        with jax.default_matmul_precision(None if precision == "default" else precision), jax.numpy_dtype_promotion("standard"):
            return body(*args)
    return jax.shard_map(with_precision, mesh=setup.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def own_gradients(setup: Setup, loss: Loss) -> Callable[..., Any]:
    """(params, (batch, valid), key data, loss scale) -> (mean loss, gradients, sum of weights), for `step.make_train_step`."""
    layout, leaves, reduce_dtype = setup.layout, setup.layout.leaves, DTYPES[setup.config.precision.reduce]

    def body(params: Any, batch: Any, key: jax.Array, scale: jax.Array):
        del key, scale
        weights = layout.gather(params, leaves, "step")

        def one(carry: Any, microbatch: Any):
            total, count, grads = carry
            whole = layout.gather(weights, leaves, "use")
            (value, more), dw = jax.value_and_grad(lambda w: _sums(setup, loss, w, *microbatch), has_aux=True)(whole)
            dw = layout.scatter(dw, leaves, "use", reduce_dtype)
            return (total + value, count + more, jax.tree.map(jnp.add, grads, dw)), None

        zeros = layout.map(lambda leaf: jnp.zeros(layout.grad_shape(leaf), jnp.float32))
        (total, count, grads), _ = lax.scan(one, (jnp.float32(0), jnp.float32(0), zeros), batch)
        count = lax.psum(count, DATA_AXES)
        mean = 1 / jnp.maximum(count, 1e-12)
        grads = layout.reduce(layout.scatter(grads, leaves, "step", jnp.float32))
        return lax.psum(total, DATA_AXES) * mean, jax.tree.map(lambda g: g * mean, grads), count

    return _on_mesh(setup, body, (layout.specs, ROWS, PartitionSpec(), PartitionSpec()), (PartitionSpec(), layout.specs, PartitionSpec()))


def make_own_eval_step(setup: Setup, loss: Loss) -> Callable[[Any, Any], tuple[jax.Array, jax.Array]]:
    """(params, (batch, valid)) -> (sum of weight * loss, sum of weights) over all ranks."""
    layout = setup.layout

    def evaluate(params: Any, batch: Any):
        weights = layout.gather(layout.gather(params, layout.leaves, "step"), layout.leaves, "use")

        def one(carry: Any, microbatch: Any):
            return jax.tree.map(jnp.add, carry, _sums(setup, loss, weights, *microbatch)), None

        return lax.psum(lax.scan(one, (jnp.float32(0), jnp.float32(0)), batch)[0], DATA_AXES)

    return jax.jit(_on_mesh(setup, evaluate, (layout.specs, ROWS), (PartitionSpec(), PartitionSpec())))
