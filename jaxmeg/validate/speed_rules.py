"""Rules on options that make a step faster or smaller: what they need, and where they have no effect. One function a topic.

Nothing here needs jax. Each function yields finished messages.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxmeg.config import Config, DataConfig, Resolved

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
