"""The gradient check of a user's schedule: a toy decoder in its table and in plain accumulation must have the same gradients.

`schedules.simulate` replays a table with labels; this runs it with the real executor, on the devices that the run will
use, before any of the run's own weights exist. The bounds are those that every layout keeps in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmeg.config import Config, DataConfig, LayoutConfig, MeshConfig, ModelConfig, PipelineConfig, PrecisionConfig
from jaxmeg.journal import RunError
from jaxmeg.layout import is_leaf_layout
from jaxmeg.pipeline.schedules import Table
from jaxmeg.pipeline.user import user_table
from jaxmeg.report import console
from jaxmeg.setup import Setup, build
from jaxmeg.state import canonical, from_canonical
from jaxmeg.step import dropout_key, loss_and_gradients, place_rows

LOSS, LEAF = 1e-5, 1e-4
"""Largest difference of the loss, in nats a token, and of a gradient leaf, as part of its norm."""
FLOOR = 1e-6  # of the global gradient norm: leaves with smaller gradients are compared with this
SEQ_LEN = 8


class Distance(NamedTuple):
    """How far a table's gradients are from those of plain accumulation."""

    loss: float
    leaf: float
    """Of the worst gradient leaf."""
    worst: str

    @property
    def too_far(self) -> bool:
        return not (self.loss <= LOSS and self.leaf <= LEAF)  # nan is too far


def check_schedule(setup: Setup) -> None:
    """Print what the user's schedule of a run costs, and check its gradients. RunError if they are wrong."""
    schedule, table = setup.user_schedule, setup.table
    assert schedule is not None
    for label, line in user_table(schedule)[1].lines().items():
        console.print(f"{'schedule' if label == 'packing' else '':<12}{label:<8} {line}", soft_wrap=True)
    devices = _stage_devices(setup)
    if not devices:
        console.print(f"{'':<12}{'check':<8} replayed, gradients not checked: no process holds {table.num_stages} devices", soft_wrap=True)
        return
    found = distance(table, devices)
    if found.too_far:
        raise RunError(f"pipeline.schedule={setup.config.pipeline.schedule}: on a toy model the loss is off by {found.loss:.1e} (at most "
                       f"{LOSS:g}) and the gradient of {found.worst} by {found.leaf:.1e} of its norm (at most {LEAF:g}), and nothing was "
                       "trained: use another schedule, and report this file, whose table is wrong")
    console.print(f"{'':<12}{'check':<8} gradients of a toy model equal plain accumulation's: the worst leaf, {found.worst}, is off by "
                  f"{found.leaf:.0e} of its norm", soft_wrap=True)


def _stage_devices(setup: Setup) -> list[Any]:
    """One device a stage: the mesh's first of each, or others of this process where it doesn't hold those; or none."""
    P = setup.table.num_stages
    first = list(setup.mesh.devices.reshape(P, -1)[:, 0])
    mine = [device for device in setup.mesh.devices.flat if device.process_index == jax.process_index()]
    return first if set(first) <= set(mine) else mine[:P] if len(mine) >= P else []


def distance(table: Table, devices: Sequence[Any]) -> Distance:
    """Run a toy decoder, one layer a chunk, in a table on one device a stage, and in plain accumulation on the first of them."""
    pipeline, plain = _toy(table, table.num_stages, devices), _toy(table, 1, devices[:1])
    rng = np.random.default_rng(0)
    weights = jax.tree.map(lambda leaf: _weights(rng, leaf.shape, leaf.dims), plain.layout.leaves, is_leaf=is_leaf_layout)
    ids = rng.integers(0, plain.resolved.arch.vocab_size, (table.num_microbatches, SEQ_LEN + 1), dtype=np.int32)
    mask = rng.random((table.num_microbatches, SEQ_LEN)) < 0.7
    mask[:, 0] = True
    (loss, grads), (want, true) = (_run(setup, weights, ids, mask) for setup in (replace(pipeline, table=table), plain))
    norm = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(true)))
    errors = jax.tree.map(lambda a, b: float(np.linalg.norm(a - b) / max(np.linalg.norm(b), FLOOR * norm)), grads, true)
    leaf, worst = max((np.inf if np.isnan(error) else error, jax.tree_util.keystr(path, simple=True, separator="."))
                      for path, error in jax.tree_util.tree_leaves_with_path(errors))
    return Distance(abs(loss - want), leaf, worst)


def _toy(table: Table, num_stages: int, devices: Sequence[Any]) -> Setup:
    """A decoder with one layer a chunk, one row a microbatch, in fp32. With several stages it gets its table later."""
    V = table.num_chunks if num_stages > 1 else 1
    model = ModelConfig(preset="toy", num_layers=table.num_stages * table.num_chunks, vocab_size=32, embed_dim=16, mlp_dim=24,
                        num_heads=2, num_kv_heads=1, head_dim=8)
    return build(
        Config(model=model, mesh=MeshConfig(pp=num_stages, dp=1), layout=LayoutConfig(zero=0),
               pipeline=PipelineConfig(schedule="gpipe" if num_stages > 1 else None, chunks=V, microbatch=1),
               precision=PrecisionConfig(compute="fp32", matmul="highest"),
               data=DataConfig(seq_len=SEQ_LEN, global_batch=table.num_microbatches)),
        devices)


def _weights(rng: np.random.Generator, shape: tuple[int, ...], dims: tuple[str, ...]) -> np.ndarray:
    """Norms near 1, all else such that activations keep their size."""
    noise = rng.standard_normal(shape)
    vector = sum(dim != "layers" for dim in dims) == 1
    return (1 + 0.1 * noise if vector else 0.25 * noise).astype(np.float32)


def _run(setup: Setup, weights: Any, ids: np.ndarray, mask: np.ndarray) -> tuple[float, Any]:
    """(loss, gradients in canonical order)."""
    rows = place_rows(setup, ids[:, :-1], ids[:, 1:], mask, setup.resolved.num_microbatches)
    step = jax.jit(loss_and_gradients(setup))
    loss, grads, _ = step(from_canonical(setup, weights), rows, dropout_key(0, jnp.int32(0)), jnp.float32(1))
    return float(loss), canonical(setup, grads)
