"""Seconds of a step by part, from counted operations and bytes and the rates of the chip and its links.

Lockstep pipeline: every tick costs one forward and one backward of the longest chunk, bubbles included. A collective that can
run beside compute hides behind a share of it (HIDDEN_SHARE); one that can't is exposed whole. Predictions, not measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxmeg.config import Axis, Config, Resolved
from jaxmeg.flops import causal_pairs, train_flops_per_token
from jaxmeg.models.decoder import REMAT
from jaxmeg.ops.vocab import CHUNK_LOGITS
from jaxmeg.planner.chips import Chip
from jaxmeg.planner.leaves import Leaf, moment_elements
from jaxmeg.planner.memory import F32, Sizes
from jaxmeg.planner.rates import Rates
from jaxmeg.planner.traffic import Transfer, layer_runs, link_gb_s, seconds, ticks, transfers

HIDDEN_SHARE = 0.6
"""Of the compute beside a collective that in fact hides it. An assumption."""
ATTENTION_FORWARD = 2 / 7
"""Of attention's time: two of its seven matmuls."""
MLP_PASSES, STREAM_PASSES = 9, 34
"""How often a layer reads or writes a value of its MLP's width, and one of the residual stream's, outside of matmuls and attention:
counted in the program compiled for one H200 (docs/decisions/0011), forward and backward."""
FP8_MLP_PASSES, FP8_STREAM_PASSES = 6, 25
"""The same of rounding to FP8 and measuring scales (docs/decisions/0014: 99 GB more in 8 layers of 32,768 tokens)."""
AGAIN = 0.35
"""Of these passes, those of the forward, done again where a layer is computed again."""
LOSS_PASSES = 5
"""Over fp32 logits."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a step's time."""

    name: str
    seconds: float
    formula: str


@dataclass(frozen=True, kw_only=True)
class Speed:
    """A step, predicted."""

    parts: tuple[Part, ...]
    transfers: tuple[tuple[Transfer, str, float, float], ...]
    """(transfer, link, seconds, of them exposed)."""
    tokens: int
    """Of a step, on all GPUs."""
    num_gpus: int
    model_flops: float
    """Of a step, on all GPUs."""
    peak_tflops: float

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        return self.model_flops / (self.seconds * self.num_gpus * self.peak_tflops * 1e12)

    def part(self, name: str) -> float:
        return sum(part.seconds for part in self.parts if part.name == name)

    @property
    def exposed(self) -> float:
        return sum(left for _, _, _, left in self.transfers)


def plan_speed(config: Config, resolved: Resolved, s: Sizes, leaves: list[Leaf], chip: Chip, rates: Rates) -> Speed:
    matmul, attention, passes = layer_work(s, config.layout.remat, config.precision.fp8)
    of_layers = rates.fp8_tflops if config.precision.fp8 else rates.matmul_tflops
    of_head = rates.fp8_tflops if config.precision.fp8_head else rates.matmul_tflops
    layer = matmul / (of_layers * 1e12) + attention / (rates.attention_tflops * 1e12) + passes / (rates.memory_gb_s * 1e9)
    real = s.num_microbatches * s.chunks * s.layers_per_chunk
    idle = layer_runs(s) - real
    head_flops, head_bytes = _head_work(s)
    update = _update_bytes(config, leaves)
    moved = [(t, *link_gb_s(chip, rates, resolved, t.axis)) for t in transfers(s, config, resolved, leaves)]
    timed = tuple((t, kind, seconds(t, gb_s, resolved.mesh[t.axis], rates)) for t, kind, gb_s in moved)
    sent = tuple((t, kind, took, _exposed(t, took, layer, layer_runs(s))) for t, kind, took in timed)
    parts = [
        Part(name="matmuls", seconds=real * matmul / (of_layers * 1e12) + s.num_microbatches * head_flops / (of_head * 1e12),
             formula=f"{real} runs of a layer x {matmul / 1e12:.2f} TFLOP at {of_layers:.0f} TFLOP/s + {s.num_microbatches} of the head x "
             f"{head_flops / 1e12:.2f} at {of_head:.0f}"),
        Part(name="attention", seconds=real * attention / (rates.attention_tflops * 1e12),
             formula=f"{real} x {attention / 1e12:.2f} TFLOP at {rates.attention_tflops:.0f} TFLOP/s"),
        Part(name="other kernels", seconds=(real * passes + s.num_microbatches * head_bytes) / (rates.memory_gb_s * 1e9),
             formula=f"({real} x {passes / 1e9:.2f} + {s.num_microbatches} x {head_bytes / 1e9:.2f}) GB at {rates.memory_gb_s:.0f} GB/s"),
        Part(name="update", seconds=update / (rates.memory_gb_s * 1e9), formula=f"{update / 1e9:.2f} GB at {rates.memory_gb_s:.0f} GB/s"),
        Part(name="bubble", seconds=idle * layer, formula=f"{ticks(s)} ticks for {s.num_microbatches * s.chunks} of work: "
             f"{idle} idle runs of a layer x {layer * 1e3:.2f} ms"),
    ]
    for axis in Axis:
        own = [(took, left) for t, _, took, left in sent if t.axis == axis]
        if own:
            took, left = (sum(column) for column in zip(*own, strict=True))
            parts.append(Part(name=f"exposed {axis}", seconds=left, formula=f"of {took * 1e3:.1f} ms of collectives over {axis}"))
    tokens = config.data.global_batch * config.data.seq_len
    return Speed(parts=tuple(parts), transfers=sent, tokens=tokens, num_gpus=resolved.num_devices,
                 model_flops=tokens * train_flops_per_token(s.arch, s.tokens), peak_tflops=chip.tflops[chip.compute])


def layer_work(s: Sizes, remat: str, fp8: bool) -> tuple[float, float, float]:
    """(FLOPs of matmuls, model FLOPs of attention, bytes of other kernels) of one layer and microbatch, forward and backward."""
    arch, N, kept = s.arch, s.all_tokens, REMAT[remat]
    D, K = arch.embed_dim, arch.head_dim
    projections = D * K * (2 * s.heads + 2 * s.kv_heads)
    mlp = (3 if arch.activation == "swiglu" else 2) * D * s.mlp
    again = projections * ("middle" not in kept) + (mlp * 2 // 3) * ("gate_up" not in kept)
    attention = 6 * N // s.tokens * causal_pairs(s.tokens, arch.sliding_window) * s.heads * K
    stream = (STREAM_PASSES + FP8_STREAM_PASSES * fp8) * (N * D // s.tp) * s.itemsize
    wide = (MLP_PASSES + FP8_MLP_PASSES * fp8) * N * s.mlp * s.itemsize
    gradients = (3 if s.num_microbatches * s.pp > 1 else 1) * F32 * (projections + mlp)  # read, and the sum read and written
    repeated = 1 + AGAIN * ("middle" not in kept)
    return (N * (6 * (projections + mlp) + 2 * again), attention * (1 + ATTENTION_FORWARD * ("attention" not in kept)),
            (stream + wide) * repeated + gradients)


def _head_work(s: Sizes) -> tuple[float, float]:
    """(FLOPs, bytes) of the head and the loss of one microbatch; each chunk of tokens reads and writes the table's gradient."""
    logits, table = s.all_tokens * s.vocab_rows, s.vocab_rows * s.arch.embed_dim
    chunks = max(1, -(-logits // CHUNK_LOGITS))
    return 6.0 * s.all_tokens * table, LOSS_PASSES * F32 * logits + 3 * F32 * table * chunks


def _update_bytes(config: Config, leaves: list[Leaf]) -> int:
    """The optimizer reads gradient, moments and master and writes moments and master; the norm reads the gradient; the cast reads
    the master and writes 2 bytes."""
    shard, moments = sum(leaf.shard for leaf in leaves), sum(moment_elements(leaf, config) for leaf in leaves)
    return (F32 + 2 * F32 + F32 + F32 + 2) * shard + 2 * F32 * moments


def _exposed(transfer: Transfer, took: float, layer: float, runs: int) -> float:
    """What compute does not hide: forward and backward are two collectives' places in a layer's run."""
    return max(0.0, took - HIDDEN_SHARE * layer * runs / 2) if transfer.beside == "layer" else took
