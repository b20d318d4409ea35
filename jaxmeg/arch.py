"""What a model is: shapes and switches of one decoder-only transformer, and a table of presets.

Nothing here concerns training, devices or precision. One decoder (`models/`) reads an `Arch`; model families are rows
of `PRESETS`. The Llama 3.1 and 3.2 rows give the published shapes; their rope frequency scaling is not represented.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Protocol

NORMS = ("rms", "layer")
POSITIONS = ("rope", "learned")
ACTIVATIONS = ("swiglu", "gelu")


@dataclass(frozen=True, kw_only=True)
class Arch:
    """Shape of one decoder-only transformer (pre-norm, causal)."""

    vocab_size: int
    """Number of token ids the model knows, without padding."""
    num_layers: int
    """Number of transformer blocks."""
    embed_dim: int
    """Width of the residual stream."""
    mlp_dim: int
    """Hidden width of the MLP."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key/value heads. Fewer than num_heads is grouped-query attention."""
    head_dim: int
    """Width of one head. num_heads * head_dim need not equal embed_dim."""
    max_seq_len: int
    """Longest sequence. Size of the position table with learned positions."""
    norm: str = "rms"
    """Either "rms" (scale only) or "layer" (scale and bias)."""
    norm_eps: float = 1e-5
    """Added to the variance inside the norms."""
    positions: str = "rope"
    """Either "rope" (rotary) or "learned" (a table added to the embedding)."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    activation: str = "swiglu"
    """Either "swiglu" (gated, three matrices) or "gelu" (two matrices)."""
    attn_bias: bool = False
    """Bias on the query, key and value projections."""
    out_bias: bool = False
    """Bias on the attention output projection."""
    mlp_bias: bool = False
    """Bias on the MLP projections."""
    qk_norm: bool = False
    """RMS norm over head_dim on queries and keys, one scale per layer."""
    tied: bool = False
    """The head is the transpose of the embedding table."""
    sliding_window: int | None = None
    """Tokens that a token attends to: itself and the ones before it. None: all of them."""


def _llama(num_layers: int, embed_dim: int, mlp_dim: int, num_heads: int, head_dim: int, tied: bool = False) -> Arch:
    """A Llama 3.1 or 3.2 text model: 8 KV heads and a vocabulary of 128,256."""
    return Arch(
        vocab_size=128_256,
        num_layers=num_layers,
        embed_dim=embed_dim,
        mlp_dim=mlp_dim,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=head_dim,
        max_seq_len=131_072,
        rope_theta=500_000.0,
        tied=tied,
    )


def _gpt2(vocab_size: int, num_layers: int, embed_dim: int, num_heads: int, max_seq_len: int) -> Arch:
    """The GPT-2 family: layer norm, learned positions, GELU, biases everywhere, tied head."""
    return Arch(
        vocab_size=vocab_size,
        num_layers=num_layers,
        embed_dim=embed_dim,
        mlp_dim=4 * embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=embed_dim // num_heads,
        max_seq_len=max_seq_len,
        norm="layer",
        positions="learned",
        activation="gelu",
        attn_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=True,
    )


_TOY = Arch(
    vocab_size=256,
    num_layers=4,
    embed_dim=64,
    mlp_dim=128,
    num_heads=8,
    num_kv_heads=2,
    head_dim=8,
    max_seq_len=128,
)

_DEMO = Arch(
    vocab_size=256,
    num_layers=8,
    embed_dim=96,
    mlp_dim=288,
    num_heads=8,
    num_kv_heads=4,
    head_dim=12,
    max_seq_len=1024,
)

_SMOLLM2_135M = Arch(
    vocab_size=49_152,
    num_layers=30,
    embed_dim=576,
    mlp_dim=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_seq_len=8192,
    rope_theta=100_000.0,
    tied=True,
)

PRESETS: Mapping[str, Arch] = MappingProxyType(
    {
        "toy": _TOY,  # the model of the parity tests, 172,608 parameters
        "toy-gpt2": _gpt2(vocab_size=256, num_layers=4, embed_dim=64, num_heads=8, max_seq_len=128),
        "demo": _DEMO,  # byte-level, 0.94M parameters; shards over tp=4 pp=2 and pp=4 with 2 chunks
        "gpt2": _gpt2(vocab_size=50_257, num_layers=12, embed_dim=768, num_heads=12, max_seq_len=1024),
        "smollm2-135m": _SMOLLM2_135M,
        "llama3.2-1b": _llama(16, 2048, 8192, num_heads=32, head_dim=64, tied=True),
        "llama3.1-8b": _llama(32, 4096, 14_336, num_heads=32, head_dim=128),
        "llama3.1-70b": _llama(80, 8192, 28_672, num_heads=64, head_dim=128),
        "llama3.1-405b": _llama(126, 16_384, 53_248, num_heads=128, head_dim=128),
    }
)


class ArchChoice(Protocol):
    """A preset name, plus any fields of `Arch` under their own names; None keeps the preset's value."""

    @property
    def preset(self) -> str:
        """A key of `PRESETS`."""
        ...


def resolve_arch(model: ArchChoice) -> Arch:
    """The preset with the overrides of a `config.ModelConfig` applied. Raises KeyError for an unknown preset."""
    overrides = {field.name: getattr(model, field.name, None) for field in fields(Arch)}
    return replace(PRESETS[model.preset], **{name: value for name, value in overrides.items() if value is not None})


def matmul_params(arch: Arch) -> int:
    """Weights that take part in a matrix multiplication for every token: all layers and the head, not the lookup."""
    query, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    attention = arch.embed_dim * (2 * query + 2 * kv)
    mlp = (3 if arch.activation == "swiglu" else 2) * arch.embed_dim * arch.mlp_dim
    return arch.num_layers * (attention + mlp) + arch.embed_dim * arch.vocab_size


def num_params(arch: Arch) -> int:
    """Exact number of parameters, without padding; a tied table counts once."""
    query, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    norm = arch.embed_dim * (2 if arch.norm == "layer" else 1)
    layer = 2 * norm
    if arch.attn_bias:
        layer += query + 2 * kv
    if arch.out_bias:
        layer += arch.embed_dim
    if arch.mlp_bias:
        layer += arch.embed_dim + arch.mlp_dim * (2 if arch.activation == "swiglu" else 1)
    if arch.qk_norm:
        layer += 2 * arch.head_dim
    table = arch.vocab_size * arch.embed_dim
    total = matmul_params(arch) + arch.num_layers * layer + norm
    if not arch.tied:
        total += table
    if arch.positions == "learned":
        total += arch.max_seq_len * arch.embed_dim
    return total
