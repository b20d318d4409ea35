"""Three updates of the real train step on one layout, and on one device: what a certificate compares.

In fp32 with matmuls in full precision, where layouts agree to rounding, and on random tokens. SGD with momentum and a clip that
always bites: after the first update its momentum is the clipped gradient. Weights of one value (norms, biases) are moved off it,
or a fault behind a zero would not show.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import numpy as np
import optax

from jaxmeg.cli import ConfigError
from jaxmeg.config import Config, DataConfig, OptimConfig, PrecisionConfig, TrainConfig
from jaxmeg.data.source import open_rows
from jaxmeg.engine import Microbatches, import_object, own_setup, own_state
from jaxmeg.own_step import own_gradients
from jaxmeg.setup import Setup, build
from jaxmeg.state import TrainState, canonical, from_canonical, init_state
from jaxmeg.step import Rows, make_train_step, place_rows
from jaxmeg.verify.certificate import UPDATES, Certificate, Leaves, Outcome, certify
from jaxmeg.verify.layouts import layout_name, num_devices, one_device
from jaxmeg.verify.shrink import documents_apart

CLIP, LR, MOMENTUM = 0.01, 20.0, 0.9
LEAST_LR = {"sgd": 0.3, "other": 0.01}
LOW = re.compile(r"\b(bf16|f16|f8_\w+)\[")
"""How a jaxpr writes an array with fewer than 32 bits a number."""


def verify(config: Config, own_optimizer: bool = False) -> Certificate:
    """One layout against one device. The mesh names every axis; own_optimizer: compare three updates of the config's optimizer too."""
    layout, plain = compared(config), one_device(compared(config))
    want = reference(plain)
    outcome = want.outcome
    got = outcome if layout == plain else run(layout, want.start)
    if own_optimizer:
        optim = at_its_peak(config.optim)
        (mine, skipped), (true, true_skipped) = updated(replace(layout, optim=optim), want.start), _updated_reference(plain, optim)
        got = replace(got, own_params=mine, own_skipped=skipped)
        outcome = replace(outcome, own_params=true, own_skipped=true_skipped)
    return certify(layout_name(config), got, outcome, want.start, config.optim.name)


def compared(config: Config) -> Config:
    """The config as it is run here: its model, layout and batch, with the arithmetic and the optimizer of the comparison."""
    if config.model.module:  # fp32 but for what its layers say themselves
        data = DataConfig(global_batch=config.data.global_batch, source=config.data.source)
        compute = "auto"
    else:
        packing = "concat" if documents_apart(config.data) else "none"
        data = DataConfig(seq_len=config.data.seq_len, global_batch=config.data.global_batch, packing=packing)
        compute = "fp32"
    return Config(
        model=config.model, mesh=config.mesh, layout=config.layout, pipeline=config.pipeline, data=data,
        optim=OptimConfig(name="sgd", lr=LR, momentum=MOMENTUM, warmup=0, schedule="constant", weight_decay=0.0, clip_norm=CLIP),
        precision=PrecisionConfig(compute=compute, matmul="highest"),
        train=TrainConfig(steps=UPDATES, seed=config.train.seed, dropout=config.train.dropout))


def at_its_peak(optim: OptimConfig) -> OptimConfig:
    """The optimizer with its peak learning rate from the first update on, or with a larger one, by which three updates change the weights
    far more than rounding them does (SGD's updates are smaller than a parameter: `LEAST_LR`). And an eps that rounding can't swamp."""
    eps = max(optim.eps, 1e-5) if optim.name in ("adamw", "muon") else optim.eps
    default = OptimConfig()
    lr = max(optim.lr, LEAST_LR["sgd" if optim.name == "sgd" else "other"])
    return replace(optim, eps=eps, lr=lr, warmup=0, schedule="constant", final_lr_ratio=default.final_lr_ratio, wsd_decay=default.wsd_decay)


# ---------------------------------------------------------------- runs
@dataclass(frozen=True, kw_only=True)
class Reference:
    """One device."""

    outcome: Outcome
    start: Leaves
    """The weights that every layout's updates start from."""


@cache
def reference(config: Config) -> Reference:
    """config: of one device, as `compared` makes it."""
    program, rng = program_of(config), np.random.default_rng(3)
    state = program.init()
    start = {path: x if np.ptp(x) else np.asarray(x + 0.1 * rng.standard_normal(x.shape), np.float32)
             for path, x in leaves(program.setup, state.params).items()}
    if config.model.module and (low := LOW.search(str(program.step.trace(state, program.place(program.batches[0])).jaxpr))):
        raise ConfigError([f"model.module={config.model.module} computes in {low[1]}, in which layouts differ by rounding: make its layers "
                           "dtype=float32 to compare"])
    outcome = run(config, start)
    if outcome.grad_norm == 0:
        raise ConfigError(["the loss has no gradient on one device: nothing can be compared"])
    return Reference(outcome=outcome, start=start)


@cache
def _updated_reference(config: Config, optim: OptimConfig) -> tuple[Leaves, tuple[int, ...]]:
    return updated(replace(config, optim=optim), reference(config).start)


def run(config: Config, start: Leaves) -> Outcome:
    """config: as `compared` makes it."""
    program = program_of(config)
    setup, state = program.setup, program.init()
    initial, placed = leaves(setup, state.params), [program.place(batch) for batch in program.batches]
    misplaced = sum(misplaced_rows(setup, *pair) for pair in zip(placed, program.batches, strict=True))
    state, metrics = program.step(_begin(setup, state, start), placed[0])
    loss, norm, finite = float(metrics.loss), float(metrics.grad_norm), [metrics.finite]
    clipped = leaves(setup, optax.tree.get(state.opt_state, "trace"))
    for batch in placed[1:]:
        state, metrics = program.step(state, batch)
        finite.append(metrics.finite)
    ranks, copies = setup.data_ranks, setup.mesh.devices.size // setup.data_ranks
    return Outcome(
        initial=initial, misplaced_rows=misplaced, loss=loss, grad_norm=norm, params=leaves(setup, state.params), skipped=_skipped(finite),
        grads={path: leaf * (max(norm, CLIP) / CLIP) for path, leaf in clipped.items()},
        rows=f"{config.data.global_batch} rows an update, each on one of {ranks} data ranks with {copies} devices")


def updated(config: Config, start: Leaves) -> tuple[Leaves, tuple[int, ...]]:
    """The parameters after three updates, and which of these, from 1, were skipped."""
    program, finite = program_of(config), []
    state = _begin(program.setup, program.init(), start)
    for batch in program.batches:
        state, metrics = program.step(state, program.place(batch))
        finite.append(metrics.finite)
    return leaves(program.setup, state.params), _skipped(finite)


def _skipped(finite: list[jax.Array]) -> tuple[int, ...]:
    return tuple(n for n, applied in enumerate(finite, 1) if not applied)


def _begin(setup: Setup, state: TrainState, start: Leaves) -> TrainState:
    """Fresh state with other weights."""
    tree = jax.tree.unflatten(jax.tree.structure(state.params), [start[path] for path in leaves(setup, state.params)])
    return state._replace(params=from_canonical(setup, tree))


def leaves(setup: Setup, tree: Any) -> dict[str, np.ndarray]:
    """A tree like the parameters in canonical order, by path."""
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(canonical(setup, tree))}


def misplaced_rows(setup: Setup, placed: Any, host: Any) -> int:
    """Rows that a device does not hold as the host has them, all devices together. Data rank r of R works on the r-th part of
    every microbatch, so with none misplaced each row is worked on once.

    placed: arrays [M, n, ...]; host: the same tree of [M * n, ...].
    """
    index = {device: place for place, device in np.ndenumerate(setup.mesh.devices)}
    _, _, num_dp, num_ep, *_ = setup.mesh.devices.shape
    wrong = dict.fromkeys(index, 0)
    for array, rows in zip(jax.tree.leaves(placed), jax.tree.leaves(host), strict=True):
        want, part = rows.astype(array.dtype).reshape(array.shape), array.shape[1] // setup.data_ranks
        for shard in array.addressable_shards:
            _, rep, dp, ep, *_ = index[shard.device]
            rank = (rep * num_dp + dp) * num_ep + ep
            differs = np.asarray(shard.data) != want[:, rank * part : (rank + 1) * part]
            wrong[shard.device] |= differs.reshape(*differs.shape[:2], -1).any(-1)
    return int(sum(np.sum(rows) for rows in wrong.values()))


# ---------------------------------------------------------------- what is run: text on the decoder, or a module of the user's
@dataclass(frozen=True, kw_only=True)
class Program:
    """A layout with what its updates need."""

    setup: Setup
    init: Callable[[], TrainState]
    step: Any
    place: Callable[[Any], Any]
    """A batch on the devices."""
    batches: list[Any]
    """Of every update, as host arrays: trees of [rows, ...]."""


def program_of(config: Config) -> Program:
    devices = jax.devices()[: num_devices(config)]
    return _own(config, devices) if config.model.module else _text(config, devices)


def _text(config: Config, devices: list[Any]) -> Program:
    setup = build(config, devices)
    num = setup.resolved.num_microbatches
    return Program(
        setup=setup, init=lambda: init_state(setup, config.train.seed), step=make_train_step(setup),
        place=lambda rows: place_rows(setup, rows.inputs, rows.labels, rows.mask, num, rows.segments),
        batches=_random_rows(setup.resolved.arch.vocab_size, config.data))


def _random_rows(vocab_size: int, data: DataConfig) -> list[Any]:
    """Random ids and, where documents are kept apart, borders. From one to all tokens of a row are trained, and one row not at all."""
    rng, shape, made = np.random.default_rng(7), (data.global_batch, data.seq_len), []
    for _ in range(UPDATES):
        ids = rng.integers(0, vocab_size, (shape[0], shape[1] + 1), dtype=np.int32)
        mask = rng.random(shape) < rng.random((shape[0], 1))
        mask[:, 0] = True
        mask[shape[0] // 2] = shape[0] == 1
        borders = (rng.random(shape) < 0.2).cumsum(1).astype(np.int32) if data.packing != "none" else None
        made.append(Rows(*(np.asarray(x) for x in (ids[:, :-1], ids[:, 1:], mask)), borders))  # type: ignore[arg-type]
    return made


def _own(config: Config, devices: list[Any]) -> Program:
    paths = {"model.module": config.model.module, "model.loss": config.model.loss, "data.source": config.data.source}
    if missing := [f"{key} is missing: give package.module:name" for key, path in paths.items() if path is None]:
        raise ConfigError(missing)
    module, loss, source = (import_object(str(path), key) for key, path in paths.items())
    setup, rows = own_setup(module, config, devices), config.data.global_batch
    stream, place = open_rows(source, config.train.seed, 0.0), Microbatches(setup)
    return Program(
        setup=setup, init=lambda: own_state(setup), step=make_train_step(setup, own_gradients(setup, loss)),
        place=lambda batch: place(batch[0]),
        batches=[(stream.training(n * rows + np.arange(rows)), np.ones(rows, bool)) for n in range(UPDATES)])
