"""The arithmetic of one step as a list: every weight matrix forward, dX and dW, and attention, at the shapes that one device has.

Their FLOPs add up to those of `flops.py`, exactly: that is what makes the time they take alone a roof of the step. Projections that
read the same input are one matmul (query, key and value; gate and up). Shapes and counts only; must not know jax.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from math import prod
from typing import NamedTuple

from jaxmeg.config import Axis, Resolved
from jaxmeg.flops import causal_pairs

HEAD_TOKENS = 8192  # the head is taken in pieces of at most so many tokens: more would not be faster, and logits are large


class Matmul(NamedTuple):
    """`form` of a matrix [inputs, outputs] applied to `tokens`: "forward" x w, "dx" dy w^T, or "dw" x^T dy."""

    name: str
    form: str
    tokens: int
    inputs: int
    outputs: int
    times: Fraction
    """In one step on one device; a fraction where stages have unequal shares."""

    @property
    def flops(self) -> int:
        """Of one time."""
        return 2 * self.tokens * self.inputs * self.outputs


class AttentionWork(NamedTuple):
    """Causal attention forward and backward, of [rows, tokens, heads, head_dim]."""

    rows: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    times: Fraction
    window: int | None = None
    name: str = "attention"
    form: str = "forward and backward"

    @property
    def flops(self) -> int:
        """Of one time: two products forward, four backward, half of each by causality; what the kernel computes again is not counted."""
        return 6 * self.rows * self.heads * self.head_dim * causal_pairs(self.tokens, self.window)


Piece = Matmul | AttentionWork


def undivided(resolved: Resolved) -> str | None:
    """Why a device's share is not the whole divided by the devices, in words; None if it is."""
    arch, tp, axes = resolved.arch, resolved.mesh[Axis.TP], resolved.rules
    for what, size in (("heads", arch.num_heads), ("kv_heads", arch.num_kv_heads), ("mlp", arch.mlp_dim)):
        if _ranks(resolved, what) != tp:
            return f"rule {what}: {axes[what]} has tp ranks do the same work"
        if size % tp:
            return f"mesh.tp={tp} does not divide {what} ({size})"
    ranks = _ranks(resolved, "vocab")
    if ranks % tp:
        return f"rule vocab: {axes['vocab']} has tp ranks do the same work"
    return f"{ranks} ranks do not divide the vocabulary ({arch.vocab_size})" if arch.vocab_size % ranks else None


def pieces(resolved: Resolved, seq_len: int) -> list[Piece]:
    """All of it, on average over the devices. Only where `undivided` is None."""
    arch, mesh = resolved.arch, resolved.mesh
    tp, pp = mesh[Axis.TP], mesh[Axis.PP]
    tokens, width = resolved.microbatch * seq_len, arch.head_dim
    layers = Fraction(resolved.num_microbatches * arch.num_layers, pp)
    query, kv, mlp = arch.num_heads * width // tp, arch.num_kv_heads * width // tp, arch.mlp_dim // tp
    up = ("gate and up", 2 * mlp) if arch.activation == "swiglu" else ("up", mlp)
    ranks, parts = _ranks(resolved, "vocab"), _parts(tokens)
    head = Fraction(resolved.num_microbatches * parts * ranks, pp * tp)
    return [
        *_forms("qkv", tokens, arch.embed_dim, query + 2 * kv, layers),
        *_forms("out", tokens, query, arch.embed_dim, layers),
        *_forms(up[0], tokens, arch.embed_dim, up[1], layers),
        *_forms("down", tokens, mlp, arch.embed_dim, layers),
        *_forms("head", tokens // parts, arch.embed_dim, arch.vocab_size // ranks, head),
        AttentionWork(resolved.microbatch, seq_len, arch.num_heads // tp, arch.num_kv_heads // tp, width, layers, arch.sliding_window)]


def _forms(name: str, tokens: int, inputs: int, outputs: int, times: Fraction) -> Iterator[Matmul]:
    return (Matmul(name, form, tokens, inputs, outputs, times) for form in ("forward", "dx", "dw"))


def _parts(tokens: int) -> int:
    """Into how many equal pieces of at most HEAD_TOKENS the tokens can be cut."""
    return next(n for n in range(-(-tokens // HEAD_TOKENS), tokens + 1) if tokens % n == 0)


def _ranks(resolved: Resolved, dim: str) -> int:
    return prod(resolved.mesh[Axis(axis)] for axis in resolved.rules[dim])
