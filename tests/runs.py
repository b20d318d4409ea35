"""Short runs that are saved and go on, shared by the checkpoint tests: layouts, compiled steps, random batches."""

import functools
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmeg.checkpoint.canonical import flatten
from jaxmeg.checkpoint.restore import restore
from jaxmeg.checkpoint.save import Checkpoints
from jaxmeg.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LayoutConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    PrecisionConfig,
)
from jaxmeg.setup import Setup, build
from jaxmeg.state import TrainState, init_state
from jaxmeg.step import make_train_step, place_rows

LAYERS, VOCAB, ROWS, TOKENS = 6, 250, 16, 8  # four stages are uneven; four ranks do not divide the vocabulary

LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "tp=2": {"mesh": {"tp": 2}},
    "tp=4": {"mesh": {"tp": 4}, "zero": 0},
    "pp=2": {"mesh": {"pp": 2}, "microbatch": 2},
    "uneven pp=4": {"mesh": {"pp": 4}},
    "dp=8": {"mesh": {"dp": 8}, "zero": 0},
    "dp=8, zero 3": {"mesh": {"dp": 8}, "zero": 3},
    "dp=4, zero 1": {"mesh": {"dp": 4}, "zero": 1},
    "dp=4, zero 2": {"mesh": {"dp": 4}, "zero": 2, "microbatch": 2},
    "dp=4, zero 3": {"mesh": {"dp": 4}, "zero": 3},
    "tp=2,pp=2": {"mesh": {"tp": 2, "pp": 2}},
    "tp=2,pp=2,dp=2, zero 3": {"mesh": {"tp": 2, "pp": 2, "dp": 2}, "zero": 3},
    "tp=4,pp=2": {"mesh": {"tp": 4, "pp": 2}},
    "interleaved": {"mesh": {"pp": 2, "dp": 2}, "zero": 2, "schedule": "interleaved"},
    "pp=3,tp=2": {"mesh": {"pp": 3, "tp": 2}},
}


def config_of(name: str, num_layers: int = LAYERS, **sections: Any) -> Config:
    layout = LAYOUTS[name]
    parts: dict[str, Any] = {
        "model": ModelConfig(preset="toy", vocab_size=VOCAB, num_layers=num_layers, embed_dim=16, mlp_dim=32, num_heads=4, num_kv_heads=2,
                             head_dim=4),
        "mesh": MeshConfig(**{"dp": 1, **layout.get("mesh", {})}), "layout": LayoutConfig(zero=layout.get("zero", 1)),
        "pipeline": PipelineConfig(schedule=layout.get("schedule"), microbatch=layout.get("microbatch")),
        "optim": OptimConfig(lr=1e-3, eps=1e-6, warmup=2), "precision": PrecisionConfig(compute="fp32", matmul="highest"),
        "data": DataConfig(seq_len=TOKENS, global_batch=ROWS)}
    return Config(**(parts | sections))


def make_setup(name: str, **sections: Any) -> Setup:
    """sections, and num_layers: what differs from the config of this file."""
    return build(config_of(name, **sections), jax.devices()[: math.prod(LAYOUTS[name].get("mesh", {}).values())])


@functools.cache
def setup_of(name: str) -> Setup:
    return make_setup(name)


@functools.cache
def step_of(name: str) -> Any:
    return make_train_step(setup_of(name))


def batch(setup: Setup, n: int) -> Any:
    """The batch of update n: the same rows on every layout."""
    ids = np.random.default_rng(n).integers(0, VOCAB, (ROWS, TOKENS + 1), dtype=np.int32)
    mask = np.random.default_rng(n).random((ROWS, TOKENS)) < 0.8
    return place_rows(setup, ids[:, :-1], ids[:, 1:], mask, setup.resolved.num_microbatches)


def train(name: str, state: TrainState, first: int, last: int) -> tuple[TrainState, list[float]]:
    """Updates first+1 .. last and their losses. The state that is passed in is consumed."""
    losses = []
    for n in range(first, last):
        state, metrics = step_of(name)(state, batch(setup_of(name), n))
        losses.append(float(metrics.loss))
    return state, losses


def model_order(setup: Setup, state: TrainState) -> dict[str, np.ndarray]:
    """Every leaf on the host, in the order a checkpoint must have, written out with numpy from what each memory row is."""
    layer_of_row = setup.layer_of_row.reshape(-1)
    memory_row = [int(np.flatnonzero(layer_of_row == layer)[0]) for layer in range(setup.model.arch.num_layers)]

    def one(path: str, x: np.ndarray) -> np.ndarray:
        if ".layers." in path:
            return x[memory_row]
        return x[: setup.model.arch.vocab_size] if path.endswith(".tokens") else x

    return {path: one(path, np.array(x)) for path, x in flatten(state).items()}


def same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for path, x in a.items():
        assert (x.shape, x.dtype, x.tobytes()) == (b[path].shape, b[path].dtype, b[path].tobytes()), path


def write(setup: Setup, state: TrainState, folder: Path, step: int, **options: Any) -> Path:
    """One checkpoint, and its run folder."""
    with Checkpoints(setup, folder, CheckpointConfig(**options), {"made by": "a test"}) as checkpoints:
        checkpoints.save(state, step, step * ROWS)
    return folder


class Part(NamedTuple):
    """Five updates, and what was saved after them."""

    folder: Path
    leaves: dict[str, np.ndarray]
    losses: list[float]


@functools.cache
def start() -> Path:
    """Initial state, saved on one device."""
    setup = setup_of("one device")
    return write(setup, init_state(setup, 0), Path(tempfile.mkdtemp()), 0)


@functools.cache
def five(name: str) -> Part:
    """Updates 1 to 5 on this layout."""
    setup = setup_of(name)
    state, losses = train(name, restore(setup, start())[0], 0, 5)
    leaves = model_order(setup, state)
    return Part(write(setup, state, Path(tempfile.mkdtemp()), 5), leaves, losses)


@functools.cache
def ten(name: str) -> Part:
    """Updates 1 to 10 on this layout in one go."""
    state, losses = train(name, restore(setup_of(name), start())[0], 0, 10)
    return Part(Path(), model_order(setup_of(name), state), losses)
