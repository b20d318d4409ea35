"""The layout contract as code: run a row on its layout, and how far two results may be apart."""

import functools
import math
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import yaml
from jax.sharding import NamedSharding, PartitionSpec

from jaxmeg.arch import Arch
from jaxmeg.config import (
    Config,
    DataConfig,
    LayoutConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    PrecisionConfig,
    TrainConfig,
)
from jaxmeg.precision import init_loss_scale
from jaxmeg.setup import build
from jaxmeg.state import TrainState, canonical, from_canonical, init_state, state_shardings
from jaxmeg.step import make_train_step, place_rows
from jaxmeg.validate.check import problems

ROWS, TOKENS, UPDATES, LR, MOMENTUM = 16, 16, 3, 0.05, 0.9
LOSS, LEAF, NORM = 1e-5, 1e-4, 1e-5  # the contract in fp32
FLOOR = 1e-6  # of the global gradient norm: leaves with smaller gradients are compared with this
KEY_BIAS = "layers.attention.key_bias"


class Row(NamedTuple):
    """One row of the table. mesh: `pp=2,tp=2`; rows that name no microbatch run as the config's default has it."""

    mesh: str = ""
    zero: int = 1
    schedule: str | None = None
    chunks: int | None = None
    microbatch: int | None = None
    remat: str = "none"
    arch: str = "llama"
    compute: str = "fp32"
    dropout: float = 0.0
    rules: str = ""
    rows: int = ROWS
    optimizer: str = "sgd"
    packed: bool = False
    scan_layers: bool = True
    fp8: str = ""
    """What is multiplied in FP8: nothing, layers or all."""

    @property
    def name(self) -> str:
        fields = self._asdict()
        default = Row()._asdict()
        return ",".join([self.mesh or "one device"] + [f"{k}={v}".replace(" ", "") for k, v in fields.items()
                                                         if k != "mesh" and v != default[k]]).replace("\n", ";")

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: int(size) for axis, size in (part.split("=") for part in self.mesh.split(",") if part)}


ARCHS: dict[str, dict[str, Any]] = {
    "llama": {"preset": "toy"},
    "llama6": {"preset": "toy", "num_layers": 6},
    "llama8": {"preset": "toy", "num_layers": 8},
    "tied": {"preset": "toy", "tied": True},
    "vocab250": {"preset": "toy", "vocab_size": 250},
    "tied250": {"preset": "toy", "vocab_size": 250, "tied": True},
    "qk_norm": {"preset": "toy", "qk_norm": True, "attn_bias": True},
    "biases": {"preset": "toy", "attn_bias": True, "out_bias": True, "mlp_bias": True, "norm": "layer"},
    "gpt2": {"preset": "toy-gpt2"},
    "gpt2_untied5": {"preset": "toy-gpt2", "tied": False, "num_layers": 5},
    "odd_heads": {"preset": "toy", "num_heads": 9, "num_kv_heads": 3},
    "window": {"preset": "toy", "sliding_window": 5},
    "kv1": {"preset": "toy", "num_kv_heads": 1},
}


class Outcome(NamedTuple):
    """What is compared: canonical trees as host arrays."""

    loss: float
    grads: Any
    grad_norm: float
    params: Any


def config_of(row: Row) -> Config:
    rules = None
    if row.rules:
        rules = str(Path(tempfile.mkdtemp()) / "rules.yaml")
        Path(rules).write_text(row.rules)
        assert yaml.safe_load(row.rules)
    if row.optimizer == "sgd":
        optim = OptimConfig(name="sgd", lr=LR, momentum=MOMENTUM, warmup=0, schedule="constant", weight_decay=0.0, clip_norm=0.0)
    else:
        optim = OptimConfig(lr=1e-3, eps=1e-6, warmup=0, schedule="constant", weight_decay=0.1, clip_norm=0.0)
    precision = PrecisionConfig(compute=row.compute, **({"matmul": "highest"} if row.compute == "fp32" else {}),
                                **({"loss_scale_init": 2.0**12} if row.compute == "fp16" else {}),
                                fp8=row.fp8 != "", fp8_head=row.fp8 == "all")
    return Config(
        model=ModelConfig(**ARCHS[row.arch]), mesh=MeshConfig(**{"dp": 1, **row.sizes}),
        layout=LayoutConfig(zero=row.zero, remat=row.remat, rules=rules, scan_layers=row.scan_layers),
        pipeline=PipelineConfig(schedule=row.schedule, chunks=row.chunks, microbatch=row.microbatch), optim=optim, precision=precision,
        data=DataConfig(seq_len=TOKENS, global_batch=row.rows), train=TrainConfig(steps=UPDATES, dropout=row.dropout))


@functools.cache
def batches(vocab_size: int, num_rows: int, packed: bool = False) -> list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]]:
    """Random ids, masks and, where packed, documents: from 1 to all tokens of a row are trained, and one row not at all."""
    rng = np.random.default_rng(7)
    made = []
    for _ in range(UPDATES):
        ids = rng.integers(0, vocab_size, (num_rows, TOKENS + 1), dtype=np.int32)
        mask = rng.random((num_rows, TOKENS)) < rng.random((num_rows, 1))
        mask[:, 3], mask[num_rows // 2] = True, False
        borders = (rng.random((num_rows, TOKENS)) < 0.2).cumsum(1).astype(np.int32) if packed else None
        made.append((ids[:, :-1], ids[:, 1:], mask, borders))
    return made


@functools.cache
def weights(arch: str) -> tuple[Arch, Any]:
    """Initial weights with every leaf moved off its special value (norms off 1, biases off 0)."""
    setup = build(config_of(Row(arch=arch)), jax.devices()[:1])
    rng = np.random.default_rng(3)
    params = canonical(setup, init_state(setup, 0).params)
    return setup.model.arch, jax.tree.map(lambda x: (x + 0.1 * rng.standard_normal(x.shape)).astype(np.float32), params)


def run(row: Row) -> Outcome:
    """Three updates of the real train step. The gradient is read from SGD's momentum after the first update, where it is exactly that."""
    config, count = config_of(row), math.prod(row.sizes.values())
    found = problems(config, count)
    assert not found, found
    setup = build(config, jax.devices()[:count])
    params = from_canonical(setup, weights(row.arch)[1])
    counter = jax.device_put(np.int32(0), NamedSharding(setup.mesh, PartitionSpec()))
    moments = jax.jit(setup.optimizer.init, out_shardings=state_shardings(setup).opt_state)(params)
    scale = jax.device_put(init_loss_scale(row.compute, config.precision.loss_scale_init), counter.sharding)
    state = TrainState(counter, counter.copy(), counter.copy(), params, moments, scale)
    step = make_train_step(setup)
    loss, norm, grads = 0.0, 0.0, None
    for n, batch in enumerate(batches(setup.model.arch.vocab_size, row.rows, row.packed)):
        state, metrics = step(state, place_rows(setup, *batch[:3], setup.resolved.num_microbatches, batch[3]))
        assert bool(metrics.finite), "an update was skipped"
        if n == 0:
            loss, norm = float(metrics.loss), float(metrics.grad_norm)
            if row.optimizer == "sgd":
                grads = canonical(setup, optax.tree.get(state.opt_state, "trace"))
    return Outcome(loss, grads, norm, canonical(setup, state.params))


@functools.cache
def cached_run(row: Row) -> Outcome:
    return run(row)


def distances(a: Any, b: Any, floor: float) -> dict[str, float]:
    """||a - b|| / max(||b||, floor) of every leaf, by path."""
    def one(x: np.ndarray, y: np.ndarray) -> float:
        assert x.shape == y.shape
        return float(np.linalg.norm((x - y).ravel()) / max(np.linalg.norm(y.ravel()), floor))
    errors = jax.tree_util.tree_leaves_with_path(jax.tree.map(one, a, b))
    return {jax.tree_util.keystr(path, simple=True, separator="."): error for path, error in errors}


def worst(errors: dict[str, float]) -> tuple[float, str]:
    return max((error, path) for path, error in errors.items())


def assert_same(got: Outcome, want: Outcome, loss: float = LOSS, leaf: float = LEAF, norm: float = NORM) -> None:
    """The contract: loss, every gradient leaf, gradient norm, every parameter leaf after three updates."""
    assert abs(got.loss - want.loss) <= loss, f"loss {got.loss} instead of {want.loss}"
    if want.grads is not None:
        errors = distances(got.grads, want.grads, FLOOR * want.grad_norm)
        if "positions" in want.grads["embed"] and errors.pop(KEY_BIAS, None) is not None:
            # softmax does not see a shift of all keys: without rope the true gradient is zero, and what is left is rounding
            noise = float(np.linalg.norm(got.grads["layers"]["attention"]["key_bias"]))
            assert noise <= 1e-7 * want.grad_norm, f"{KEY_BIAS} has a gradient of {noise:.1e}, and its true gradient is zero"
        error, path = worst(errors)
        assert error <= leaf, f"gradient of {path} is off by {error:.1e}"
    assert abs(got.grad_norm - want.grad_norm) <= norm * want.grad_norm, f"gradient norm {got.grad_norm} instead of {want.grad_norm}"
    error, path = worst(distances(got.params, want.params, 1e-6))
    assert error <= leaf, f"{path} is off by {error:.1e} after {UPDATES} updates"
