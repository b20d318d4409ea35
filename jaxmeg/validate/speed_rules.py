"""Rules on options that make a step faster or smaller: what they need, and where they have no effect. One function a topic.

Nothing here needs jax. Each function yields finished messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from jaxmeg.config import Axis, Config, DataConfig, Resolved

LONG_ROW = 8192  # tokens from which on scores of all pairs are worth a warning


def attention(config: Config) -> Iterator[str]:
    """Kernels that work on each document, and the number of documents that they need."""
    most, wanted, beside = config.data.max_documents, config.layout.attention, _not_apart(config.data)
    if most is not None and beside:
        yield f"data.max_documents={most} has no effect with {beside}: leave max_documents out"
    if wanted == "cudnn_packed" and beside:
        yield f"layout.attention=cudnn_packed has no effect with {beside}: use attention auto"
    elif wanted == "cudnn_packed" and most is None:
        yield ("layout.attention=cudnn_packed needs data.max_documents, the most documents in a row: use the number that the table of the "
               "data shows, or a smaller one, which fills rows less; or use attention auto")


def _not_apart(data: DataConfig) -> str | None:
    """Why no two documents of a row are kept apart, or None where they may be."""
    if data.packing == "none":
        return "data.packing=none, where no row has two documents"
    return None if data.separate else "data.separate=False, which keeps no documents apart"


def attention_warnings(config: Config, sizes: Resolved) -> Iterator[str]:
    window, seq_len = sizes.arch.sliding_window, config.data.seq_len
    if window is not None and window >= seq_len:
        yield f"model.sliding_window={window} has no effect with data.seq_len={seq_len}: no token has more before it"


def attention_here(config: Config, kernel: str, why: str, scores: int) -> Iterator[str]:
    """What is known once jax runs: the kernel that is taken and why, and the bytes of its scores in a layer."""
    wanted = config.layout.attention
    if wanted not in ("auto", kernel):
        yield f"layout.attention={wanted} has no effect here, where {kernel} is taken: {why}"
    if scores and config.data.seq_len >= LONG_ROW:
        yield (f"the scores of attention take {scores / 2**30:,.1f} GiB a layer on each device at data.seq_len={config.data.seq_len}, as "
               f"the kernel is xla ({why})")


def fp8(config: Config) -> Iterator[str]:
    """FP8 products are made of bf16 values, and the head's come with the layers'."""
    precision = config.precision
    if precision.fp8 and precision.compute in ("fp32", "fp16"):
        yield f"precision.fp8=True does not work with precision.compute={precision.compute}, only with bf16: use compute bf16, or fp8 false"
    if precision.fp8_head and not precision.fp8:
        yield "precision.fp8_head=True has no effect with precision.fp8=False: leave fp8_head out, or use fp8 true"


def fp8_padded(config: Config, sizes: Resolved) -> Iterator[str]:
    """A warning of matrices that the compiler fills up to multiples of 16, copying them. Only for a config without problems."""
    arch = sizes.arch

    def local(dim: str, size: int) -> int:
        return max(size // prod(sizes.mesh[Axis(axis)] for axis in sizes.rules[dim]), 1)

    dims = {
        "the rows of a microbatch x data.seq_len": sizes.microbatch * config.data.seq_len,
        "model.embed_dim": arch.embed_dim,
        "model.mlp_dim": local("mlp", arch.mlp_dim),
        "model.num_heads x head_dim": local("heads", arch.num_heads) * arch.head_dim,
        "model.num_kv_heads x head_dim": local("kv_heads", arch.num_kv_heads) * arch.head_dim,
    }
    if config.precision.fp8_head:
        dims["the padded vocabulary"] = local("vocab", sizes.padded_vocab)
    odd = [f"{name} ({size} on a device)" for name, size in dims.items() if size % 16]
    if config.precision.fp8 and odd:
        yield f"precision.fp8=True copies matrices to fill them up to multiples of 16: {', '.join(odd)}"


def fp8_emulated(config: Config, platform: str, capability: str | None) -> Iterator[str]:
    """A warning of devices that can't multiply in FP8. capability: of an NVIDIA GPU, like "9.0"."""
    if config.precision.fp8 and (platform == "cpu" or (capability is not None and float(capability) < 8.9)):
        here = "a CPU" if platform == "cpu" else f"a GPU of compute capability {capability}"
        yield f"precision.fp8=True makes nothing faster on {here}: the same numbers are rounded to FP8, and multiplied in bf16"
