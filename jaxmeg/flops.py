"""Model FLOPs per token: what the model needs, whatever the layout, remat policy or kernel.

Counted: two FLOPs per multiply-add of every weight matrix and of attention; the backward pass costs twice the forward.
A causal query attends to half the sequence on average, so attention is halved: its own key counts half. With a sliding
window it attends to that many at most, its own again half. The head is counted, the embedding lookup is not. Nothing
recomputed is counted. Megatron-LM's and PaLM's formula, with the causal half.
"""

from __future__ import annotations

from jaxmeg.arch import Arch, matmul_params


def matmul_flops_per_token(arch: Arch) -> int:
    """Training FLOPs of the weight matrices for one token: 6 per weight (2 forward, 4 backward)."""
    return 6 * matmul_params(arch)


def attention_flops_per_token(arch: Arch, seq_len: int, causal: bool = True) -> int:
    """Training FLOPs of scores and weighted values for one token of a row of seq_len tokens."""
    each = 12 * arch.num_layers * arch.num_heads * arch.head_dim  # for a query and a key
    return each * causal_pairs(seq_len, arch.sliding_window) // (2 * seq_len) if causal else each * seq_len


def causal_pairs(seq_len: int, window: int | None) -> int:
    """Twice the pairs of a query and a key it sees in a row, its own key counted half: seq_len^2 without a window."""
    w = min(window or seq_len, seq_len)
    return w * (2 * seq_len - w + 1) - seq_len


def train_flops_per_token(arch: Arch, seq_len: int) -> int:
    """Model FLOPs of the forward and backward pass for one token."""
    return matmul_flops_per_token(arch) + attention_flops_per_token(arch, seq_len)


def forward_flops_per_token(arch: Arch, seq_len: int) -> int:
    """Model FLOPs of the forward pass alone for one token."""
    return train_flops_per_token(arch, seq_len) // 3


def mfu(arch: Arch, seq_len: int, tokens_per_second: float, num_devices: int, peak_tflops: float) -> float:
    """Model FLOPs utilisation: achieved model FLOP/s over the peak of all devices (peak_tflops is of one device)."""
    return train_flops_per_token(arch, seq_len) * tokens_per_second / (num_devices * peak_tflops * 1e12)


def window(arch: Arch) -> str:
    """" with a window of 4,096", or nothing."""
    return "" if arch.sliding_window is None else f" with a window of {arch.sliding_window:,}"


def formula(arch: Arch, seq_len: int) -> str:
    """The count as one line, for the log beside an MFU."""
    matmul, attention = matmul_flops_per_token(arch), attention_flops_per_token(arch, seq_len)
    return (
        f"model FLOPs per token = 6 x {matmul_params(arch):,} matmul weights (head counted, lookup not)"
        f" + causal attention{window(arch)} {attention:,} = {matmul + attention:,}; no recompute"
    )
