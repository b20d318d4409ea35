"""The modules of a transformer block, annotated with named dims. They run on local shards and name no mesh axis.

Shapes: B rows, T tokens, t tokens of one rank, D embed, H query heads, G kv heads, K head_dim, F mlp.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxmeg import parallel
from jaxmeg._compat import own_vjp
from jaxmeg.arch import Arch
from jaxmeg.ops.attention import causal_attention
from jaxmeg.ops.dropout import dropout
from jaxmeg.ops.norm import layer_norm, rms_norm
from jaxmeg.ops.rope import rope
from jaxmeg.precision import Dots, add_bias, dots


class Options(NamedTuple):
    """What a run decides about the model's arithmetic. Static."""

    dtype: jnp.dtype
    kernel: str
    """Attention kernel, see ops.attention.choose_kernel."""
    dropout: float = 0.0
    max_documents: int | None = None
    """No row holds more documents; None: not known."""
    dots: Dots = dots
    """The matrix products of the layers: precision.dots, or ops.fp8.dots."""
    fp8_head: bool = False
    """Whether those of the loss are FP8 too."""


class Context(NamedTuple):
    """What a layer knows of the rows it works on, besides their activations."""

    key: jax.Array
    """Raw key data uint32 [2] of (seed, step), for dropout."""
    rows_B: jax.Array
    """Global row indices, int32, for dropout."""
    segments_BT: jax.Array | None = None
    """Documents that share a row, int32: a token attends to its own. None: each row is one document."""
    positions_BT: jax.Array | None = None
    """Positions inside the document, int32; None: inside the row."""

    def positions(self, num_tokens: int, gathered: bool) -> jax.Array:
        """Of this rank's `num_tokens` tokens, or of all after `gather_tokens`: int32 [B or 1, num_tokens]."""
        if self.positions_BT is None:
            return parallel.token_positions(num_tokens, gathered)[None]
        return self.positions_BT if gathered else parallel.scatter_tokens(self.positions_BT, partial=False)


def parameter(rngs: nnx.Rngs, shape: tuple[int, ...], dims: tuple[str, ...], fan_in: int, scale: float = 1.0) -> nnx.Param:
    """Normal with standard deviation scale / sqrt(fan_in): a product keeps the size of its input at any width."""
    return nnx.Param(scale / fan_in**0.5 * jax.random.normal(rngs.params(), shape, jnp.float32), dims=dims)


def residual_scale(arch: Arch) -> float:
    """Of projections back into the residual stream, so that its size does not grow with depth (GPT-2)."""
    return (2 * arch.num_layers) ** -0.5


def constant(value: float, shape: tuple[int, ...], dims: tuple[str, ...]) -> nnx.Param:
    return nnx.Param(jnp.full(shape, value, jnp.float32), dims=dims)


def drop(x_BtD: jax.Array, options: Options, context: Context, site: jax.Array | int) -> jax.Array:
    """Dropout on a residual-stream value. site: which place of the model this is, unique over layers."""
    if options.dropout == 0:
        return x_BtD
    key = jax.random.fold_in(jax.random.wrap_key_data(context.key, impl="threefry2x32"), site)
    positions = parallel.token_positions(x_BtD.shape[1], gathered=False)
    return dropout(x_BtD, jax.random.key_data(key), context.rows_B, positions, options.dropout)


class Norm(nnx.Module):
    """RMSNorm or LayerNorm over the last dim."""

    def __init__(self, arch: Arch, size: int, dim: str, kind: str):
        self.eps = arch.norm_eps
        self.weight = constant(1.0, (size,), (dim,))
        self.bias = constant(0.0, (size,), (dim,)) if kind == "layer" else None

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        if self.bias is None:
            return rms_norm(x, self.weight[...], self.eps)
        return layer_norm(x, self.weight[...], self.bias[...], self.eps)


class Attention(nnx.Module):
    """Causal grouped-query attention; query heads are sharded, kv heads too where there are enough of them."""

    def __init__(self, arch: Arch, options: Options, rngs: nnx.Rngs):
        D, H, G, K = arch.embed_dim, arch.num_heads, arch.num_kv_heads, arch.head_dim
        self.arch, self.options = arch, options
        self.query = parameter(rngs, (D, H, K), ("embed", "heads", "head_dim"), D)
        self.key = parameter(rngs, (D, G, K), ("embed", "kv_heads", "head_dim"), D)
        self.value = parameter(rngs, (D, G, K), ("embed", "kv_heads", "head_dim"), D)
        self.out = parameter(rngs, (H, K, D), ("heads", "head_dim", "embed"), H * K, residual_scale(arch))
        bias = arch.attn_bias
        self.query_bias = constant(0.0, (H, K), ("heads", "head_dim")) if bias else None
        self.key_bias = constant(0.0, (G, K), ("kv_heads", "head_dim")) if bias else None
        self.value_bias = constant(0.0, (G, K), ("kv_heads", "head_dim")) if bias else None
        self.out_bias = constant(0.0, (D,), ("embed",)) if arch.out_bias else None
        self.query_norm = Norm(arch, K, "head_dim", "rms") if arch.qk_norm else None
        self.key_norm = Norm(arch, K, "head_dim", "rms") if arch.qk_norm else None

    def __call__(self, x_BtD: jax.Array, context: Context) -> jax.Array:
        arch, heads = self.arch, self.query.shape[1]

        def mine(w: jax.Array, dim: int) -> jax.Array:
            return parallel.local_kv_heads(w, dim, heads, arch.num_heads, arch.num_kv_heads)

        q, k, v = parallel.gather_matmul(
            x_BtD, self.query[...], mine(self.key[...], 1), mine(self.value[...], 1), dots=self.options.dots)
        if self.query_bias is not None and self.key_bias is not None and self.value_bias is not None:
            q = add_bias(q, self.query_bias[...])
            k, v = add_bias(k, mine(self.key_bias[...], 0)), add_bias(v, mine(self.value_bias[...], 0))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if arch.positions == "rope":
            positions = context.positions(q.shape[1], gathered=True)
            q, k = rope(q, positions, arch.rope_theta), rope(k, positions, arch.rope_theta)
        with jax.named_scope("attention"):
            a_BTHK = causal_attention(q, k, v, context.segments_BT, self.options.kernel, arch.sliding_window, self.options.max_documents)
        y_BtD = parallel.matmul_scatter(a_BTHK, self.out[...], 2, arch.num_heads, self.options.dots)
        return y_BtD if self.out_bias is None else add_bias(y_BtD, self.out_bias[...])


class MLP(nnx.Module):
    """SwiGLU (gate, up, down) or GELU (up, down), hidden width sharded."""

    def __init__(self, arch: Arch, options: Options, rngs: nnx.Rngs):
        D, F = arch.embed_dim, arch.mlp_dim
        self.arch, self.options = arch, options
        gated = arch.activation == "swiglu"
        self.gate = parameter(rngs, (D, F), ("embed", "mlp"), D) if gated else None
        self.up = parameter(rngs, (D, F), ("embed", "mlp"), D)
        self.down = parameter(rngs, (F, D), ("mlp", "embed"), F, residual_scale(arch))
        self.gate_bias = constant(0.0, (F,), ("mlp",)) if gated and arch.mlp_bias else None
        self.up_bias = constant(0.0, (F,), ("mlp",)) if arch.mlp_bias else None
        self.down_bias = constant(0.0, (D,), ("embed",)) if arch.mlp_bias else None

    def __call__(self, x_BtD: jax.Array) -> jax.Array:
        weights = [self.up[...]] if self.gate is None else [self.up[...], self.gate[...]]
        biases = [self.up_bias, self.gate_bias]
        hidden = [h if b is None else add_bias(h, b[...])
                  for h, b in zip(parallel.gather_matmul(x_BtD, *weights, dots=self.options.dots), biases, strict=False)]
        up, *gate = (checkpoint_name(h, "gate_up") for h in hidden)
        a_BTF = swiglu(gate[0], up) if gate else gelu(up)
        y_BtD = parallel.matmul_scatter(a_BTF, self.down[...], 1, self.arch.mlp_dim, self.options.dots)
        return y_BtD if self.down_bias is None else add_bias(y_BtD, self.down_bias[...])


@own_vjp()
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """silu(gate) * up, in fp32, returned in the input's dtype; the derivative saves the two inputs only."""
    g = gate.astype(jnp.float32)
    return (g * jax.nn.sigmoid(g) * up.astype(jnp.float32)).astype(gate.dtype)


def _swiglu_bwd(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    g, u, dy32 = (x.astype(jnp.float32) for x in (*saved, dy))
    s = jax.nn.sigmoid(g)
    dtype = saved[0].dtype
    return (dy32 * u * s * (1 + g * (1 - s))).astype(dtype), (dy32 * g * s).astype(dtype)


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_bwd)


def gelu(x: jax.Array) -> jax.Array:
    """GPT-2's tanh approximation, in fp32."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)
