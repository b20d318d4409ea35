"""The compiled programs of a run: train step, evaluation, next-token logits. Each is one `jit` around one `shard_map`.

`make_train_step` is the whole path from a batch to new state: weights are cast and put together as the ZeRO stage says, the
pipeline (or plain accumulation) runs, every gradient leaf is reduced once, and the optimizer updates the sharded leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmeg import parallel
from jaxmeg.layout import LeafLayout
from jaxmeg.parallel import AXES, DATA_AXES
from jaxmeg.pipeline.scan import Batch, Work, loss_and_grads, outputs
from jaxmeg.precision import DTYPES, next_loss_scale
from jaxmeg.setup import Setup
from jaxmeg.state import TrainState, state_shardings

ROWS = PartitionSpec(None, DATA_AXES)  # [microbatch, row, ...]: rows are split over the data-parallel ranks


class Rows(NamedTuple):
    """A global batch, microbatch-major: the row with global index g is [g // n, g % n] of [M, n, ...]."""

    inputs: jax.Array
    """Token ids, int32 [M, n, T]."""
    labels: jax.Array
    """The token after each input, int32 [M, n, T]."""
    mask: jax.Array
    """Whether the label is trained (or evaluated), bool [M, n, T]."""
    segments: jax.Array | None = None
    """Documents that share a row, int32 [M, n, T]: tokens see their own. None: each row is one document."""


class Metrics(NamedTuple):
    """What a step reports; scalars, the same on every device."""

    loss: jax.Array
    """Mean over the trained tokens, nats a token."""
    grad_norm: jax.Array
    """Global, before clipping; each leaf counted once."""
    learning_rate: jax.Array
    tokens: jax.Array
    """Trained tokens."""
    finite: jax.Array
    """Whether the update was applied."""
    leaf_finite: jax.Array
    """The same per gradient leaf, bool [leaves], in tree order."""
    loss_scale: jax.Array
    """The scale this step used."""
    skipped: jax.Array
    """Updates skipped in a row, this one included."""


def place_rows(setup: Setup, inputs: np.ndarray, labels: np.ndarray, mask: np.ndarray, num_microbatches: int,
               segments: np.ndarray | None = None) -> Rows:
    """Put a host batch of [rows, T] arrays on the devices. With several processes each passes the rows of `local_rows`."""
    M = num_microbatches
    return Rows(place(setup, inputs, M), place(setup, labels, M), place(setup, mask, M),
                None if segments is None else place(setup, segments, M))


def place(setup: Setup, local: np.ndarray, num_microbatches: int) -> jax.Array:
    """[rows of this process, ...] -> [M, n, ...], rows split over the data-parallel ranks."""
    local = local.reshape(num_microbatches, -1, *local.shape[1:])
    sharding = NamedSharding(setup.mesh, ROWS)
    if jax.process_count() == 1:
        return jax.device_put(local, sharding)
    return jax.make_array_from_process_local_data(sharding, local)


def local_rows(setup: Setup, num_rows: int, num_microbatches: int) -> np.ndarray:
    """Which rows of a batch of `num_rows` this process reads, int64, in the order that `place_rows` takes them."""
    per_microbatch = num_rows // num_microbatches
    sharding = NamedSharding(setup.mesh, ROWS)
    slices = sharding.addressable_devices_indices_map((num_microbatches, per_microbatch)).values()
    mine = {i for index in slices if index is not None for i in range(*index[1].indices(per_microbatch))}
    return (np.arange(num_microbatches)[:, None] * per_microbatch + np.array(sorted(mine))[None]).reshape(-1)


def abstract_rows(setup: Setup, num_microbatches: int, seq_len: int, packed: bool = False) -> Rows:
    """The train step's batch as ShapeDtypeStructs."""
    shape = (num_microbatches, setup.config.data.global_batch // num_microbatches, seq_len)
    sharding = NamedSharding(setup.mesh, ROWS)
    ids: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    mask: Any = jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=sharding)
    return Rows(ids, ids, mask, ids if packed else None)


# ------------------------------------------------------------------ inside shard_map
def _compute_weights(setup: Setup, params: Any) -> Any:
    """Parameters in the compute dtype (norms and biases of the width stay fp32), put together if that is once a step.

    Layers written out, in one chunk a stage, come as a list of one tree a layer: picked before they are cast, none is copied.
    """
    dtype, layout = DTYPES[setup.compute], setup.layout

    def cast(leaf: LeafLayout, x: jax.Array) -> jax.Array:
        return x.astype(dtype) if sum(dim != "layers" for dim in leaf.dims) > 1 else x

    def ready(tree: Any, leaves: Any) -> Any:
        return layout.gather(layout.map(cast, tree, leaves=leaves), leaves, "step")

    params = parallel.vary(params)
    weights = {name: ready(part, layout.leaves[name]) for name, part in params.items() if name != "layers"}
    layers = params["layers"]
    if setup.config.layout.scan_layers or setup.resolved.chunks > 1:
        return weights | {"layers": ready(layers, layout.leaves["layers"])}
    rows = range(jax.tree.leaves(layers)[0].shape[0])
    return weights | {"layers": [ready(jax.tree.map(lambda x, i=i: x[i], layers), layout.leaves["layers"]) for i in rows]}


def work_of(setup: Setup, params: Any, rows: Rows, weights: jax.Array, key: jax.Array | None) -> Work:
    """One rank's work on its rows, inside `on_mesh`. key: raw key data for dropout; None leaves dropout out."""
    num_microbatches, num_rows = rows.inputs.shape[:2]  # of this rank
    first = parallel.rank(DATA_AXES) * num_rows
    per_microbatch = num_rows * math.prod(jax.lax.axis_size(axis) for axis in DATA_AXES)
    index = jnp.arange(num_microbatches)[:, None] * per_microbatch + first + jnp.arange(num_rows)[None]
    model = setup.model if key is not None else setup.model.without_dropout()
    key = jnp.zeros(2, jnp.uint32) if key is None else key
    batch = parallel.vary(Batch(rows.inputs, rows.labels, weights, index.astype(jnp.int32), key, rows.segments))
    return Work(model, setup.layout, _compute_weights(setup, params), batch, setup.layer_of_row,
                setup.resolved.chunks, DTYPES[setup.config.precision.reduce], setup.config.layout.scan_layers)


def _grads_body(setup: Setup, params: Any, rows: Rows, key: jax.Array, scale: jax.Array):
    """(mean loss, gradients in the layout's specs, trained tokens) of this rank's rows."""
    tokens = jax.lax.psum(jnp.sum(rows.mask.astype(jnp.float32)), DATA_AXES)
    weights = rows.mask.astype(jnp.float32) * (scale / jnp.maximum(tokens, 1.0))
    loss, grads = loss_and_grads(work_of(setup, params, rows, weights, key), setup.table)
    grads = setup.layout.reduce(setup.layout.scatter(grads, setup.layout.leaves, "step", jnp.float32))
    return jax.lax.psum(loss, AXES) / scale, jax.tree.map(lambda g: g / scale, grads), tokens


def on_mesh(setup: Setup, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`body` on every rank of the mesh, all axes manual."""
    @wraps(body)
    def with_precision(*args: Any) -> Any:
        precision = setup.config.precision.matmul
        with jax.default_matmul_precision(None if precision == "default" else precision):
            return body(*args)
    return jax.shard_map(with_precision, mesh=setup.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)


def loss_and_gradients(setup: Setup) -> Callable[..., Any]:
    """(params, rows, key data, loss scale) -> (loss, gradients, trained tokens), to be jitted by the caller."""
    return on_mesh(setup, lambda *args: _grads_body(setup, *args),
                      in_specs=(setup.layout.specs, ROWS, PartitionSpec(), PartitionSpec()),
                      out_specs=(PartitionSpec(), setup.layout.specs, PartitionSpec()))


def dropout_key(seed: int, step: jax.Array) -> jax.Array:
    return jax.random.key_data(jax.random.fold_in(jax.random.key(seed), step))


def make_train_step(setup: Setup, gradients: Callable[..., Any] | None = None) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
    """The train step, jitted; the state is donated. A gradient that is not finite changes nothing but the counters
    and the loss scale. gradients: as `loss_and_gradients` makes it, which is the default."""
    gradients = gradients or loss_and_gradients(setup)
    optim, precision = setup.config.optim, setup.config.precision

    def step(state: TrainState, rows: Any) -> tuple[TrainState, Metrics]:
        scale = state.loss_scale.scale
        loss, grads, tokens = gradients(state.params, rows, dropout_key(setup.config.train.seed, state.step), scale)
        squares = jnp.stack([jnp.sum(g * g) for g in jax.tree.leaves(grads)])
        norm = jnp.sqrt(jnp.sum(squares))
        finite = jnp.isfinite(norm) & jnp.isfinite(loss)
        if optim.clip_norm:
            with jax.named_scope("clip"):
                factor = jnp.minimum(1.0, optim.clip_norm / jnp.maximum(norm, 1e-12))
                grads = jax.tree.map(lambda g: g * factor, grads)
        matmul = jax.default_matmul_precision(None if precision.matmul == "default" else precision.matmul)  # of Muon
        with jax.named_scope("update"), matmul, jax.numpy_dtype_promotion("standard"):  # optax multiplies float by int
            changes, opt_state = setup.optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, changes)
            lr = jnp.asarray(setup.learning_rate(state.updates), jnp.float32)

        def keep(new: Any, old: Any) -> Any:
            return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

        skipped = jnp.where(finite, 0, state.skipped + 1)
        new = TrainState(
            step=state.step + 1,
            updates=state.updates + finite.astype(jnp.int32),
            skipped=skipped,
            params=keep(params, state.params),
            opt_state=keep(opt_state, state.opt_state),
            loss_scale=next_loss_scale(state.loss_scale, finite, setup.compute, precision.loss_scale_growth_interval))
        return new, Metrics(loss, norm, lr, tokens, finite, jnp.isfinite(squares), scale, skipped)

    shardings = state_shardings(setup)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, NamedSharding(setup.mesh, PartitionSpec())),
                   compiler_options=setup.compiler_options)


def make_eval_step(setup: Setup, num_microbatches: int) -> Callable[[Any, Rows], tuple[jax.Array, jax.Array]]:
    """(params, rows) -> (sum of the losses of the tokens in the mask, their number), each token counted once."""
    table = setup.forward_table(num_microbatches)

    def evaluate(params: Any, rows: Rows) -> tuple[jax.Array, jax.Array]:
        work = work_of(setup, params, rows, rows.mask.astype(jnp.float32), None)
        head = work.model.head_params({name: work.whole(name) for name in ("head", "embed")})

        def read(y: jax.Array, m: jax.Array) -> jax.Array:
            loss = work.model.loss(head, y, work.batch.labels_MBT[m], work.batch.weights_MBT[m])
            return parallel.only_on(parallel.reports_loss(), loss)

        total = jax.lax.psum(jnp.sum(outputs(work, table, read)), AXES)
        return total, jax.lax.psum(jnp.sum(rows.mask.astype(jnp.float32)), DATA_AXES)

    return jax.jit(on_mesh(setup, evaluate, (setup.layout.specs, ROWS), (PartitionSpec(), PartitionSpec())),
                   compiler_options=setup.compiler_options)


def make_next_logits(setup: Setup) -> Callable[[Any, Rows, Any], jax.Array]:
    """(params, rows [1, n, T], position) -> fp32 logits [n, vocab_size] of the token after `position`."""
    table = setup.forward_table(1)

    def next_logits(params: Any, rows: Rows, position: jax.Array) -> jax.Array:
        work = work_of(setup, params, rows, rows.mask.astype(jnp.float32), None)
        head = work.model.head_params({name: work.whole(name) for name in ("head", "embed")})
        z = outputs(work, table, lambda y, _: setup.model.next_token_logits(head, y, position))[0]
        same = tuple(axis for axis in AXES if axis not in DATA_AXES)
        return jax.lax.pmax(z, same)  # equal on these ranks; the maximum tells the compiler so

    specs = (setup.layout.specs, ROWS, PartitionSpec())
    return jax.jit(on_mesh(setup, next_logits, specs, PartitionSpec(DATA_AXES)), compiler_options=setup.compiler_options)
