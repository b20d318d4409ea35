"""How fast a GPU and its links are in practice: shares of the published peaks, or what `scripts/calibrate.py` measured.

The shares are those of one H200 (jax 0.11.2): matmuls of an 8B model's shapes 683 of 989 TFLOP/s, cuDNN attention forward and
backward 513 at head dim 128 and 356 at 64, memory 4,090 of 4,800 GB/s. For other chips they are assumed to be the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxmeg.planner.chips import Chip

MATMUL_SHARE = 683 / 989
FP8_SHARE = 1300 / 1979
"""An assumption: a forward product alone reaches 1,400 of 1,979 on an H200."""
ATTENTION_SHARES = ((128, 513 / 989), (64, 356 / 989))
"""By head dim: the first that is not larger."""
XLA_ATTENTION = 0.08
"""Of the peak, where cuDNN does not take the shape: an assumption from XLA's attention being 3.3 times slower end to end."""
MEMORY_SHARE = 4090 / 4800
LINK_SHARE = 0.75
"""Of a link's published figure that a large collective reaches. An assumption."""
LATENCY_SECONDS, HOP_SECONDS = 15e-6, 3e-6
"""Of a collective, and of each further GPU in its ring, besides its bytes. Assumptions."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one GPU reaches."""

    matmul_tflops: float
    fp8_tflops: float
    """Of matmuls in FP8; those in the compute dtype's where the chip has none."""
    attention_tflops: float
    """Model FLOPs of causal attention (half of all pairs) a second, forward and backward together."""
    memory_gb_s: float
    node_gb_s: float
    """Of one GPU in one direction, inside a host."""
    network_gb_s: float
    host_gb_s: float
    latency: float
    """Seconds of a collective besides its bytes."""
    hop: float
    """The same of each further GPU in its ring."""
    measured: bool
    """Whether these were measured on the machine, not taken from published peaks."""


def rates_of(chip: Chip, head_dim: int, measured: Mapping[str, float] | None = None) -> Rates:
    """measured: any of the fields, which then take the place of the published ones."""
    peak = chip.tflops[chip.compute]
    share = next((share for dim, share in ATTENTION_SHARES if head_dim >= dim), ATTENTION_SHARES[-1][1] / 2)
    matmul = peak * MATMUL_SHARE
    fp8 = chip.tflops["fp8"] * FP8_SHARE if "fp8" in chip.tflops else matmul
    figures = {
        "matmul_tflops": matmul, "fp8_tflops": fp8, "attention_tflops": peak * (share if head_dim <= 128 else XLA_ATTENTION),
        "memory_gb_s": chip.memory_gb_s * MEMORY_SHARE, "node_gb_s": chip.node_link.gb_s * LINK_SHARE,
        "network_gb_s": chip.network.gb_s * LINK_SHARE, "host_gb_s": chip.host_link_gb_s, "latency": LATENCY_SECONDS,
        "hop": HOP_SECONDS,
    }
    return Rates(**{**figures, **(measured or {})}, measured=measured is not None)
