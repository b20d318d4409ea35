"""Causal attention with its own derivative: one function that takes cuDNN's flash kernel where it can, and plain XLA otherwise.

Both save q, k, v, the output and the log-sum-exp, named "qkv", "attention" and "lse" for the remat policy; the
probabilities are never saved. Grouped-query attention reads each kv head in place, without repeating it. Where
documents share a row, a token attends to its own document (`segments`): cuDNN then reads a mask [B, 1, T, T].
Shapes: q [B, T, H, K]; k, v [B, T, G, K] with H a multiple of G; segments [B, T] or None; log-sum-exp [B, H, T] in fp32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmeg import _compat

MASKED = -1e30  # finite, so that a row's maximum is too


def choose_kernel(platform: str, dtype: str, head_dim: int, seq_len: int, packed: bool, capability: str | None) -> tuple[str, str]:
    """(kernel, why): "cudnn" on NVIDIA GPUs from Ampere on for bf16 and fp16 with head dims up to 128 that are multiples of 8, and
    rows of even length where documents share them; else "xla".

    packed: whether `segments` may be given. capability: the GPU's compute capability, such as "9.0"; None where it is not known.
    """
    if platform not in ("cuda", "gpu"):
        return "xla", f"cuDNN needs an NVIDIA GPU, this is {platform}"
    if capability is not None and float(capability) < 8.0:
        return "xla", f"cuDNN's flash attention needs compute capability 8.0 (Ampere) or newer, this GPU has {capability}"
    if dtype not in ("bf16", "fp16"):
        return "xla", f"cuDNN's flash attention takes bf16 or fp16, not {dtype}"
    if head_dim > 128 or head_dim % 8:
        return "xla", f"cuDNN's flash attention takes head dims up to 128 in steps of 8, not {head_dim}"
    if packed and seq_len % 2:
        return "xla", f"cuDNN's flash attention keeps documents apart in rows of even length, not of {seq_len} tokens"
    return "cudnn", f"{dtype}, head dim {head_dim}"


def _same_document(segments: jax.Array) -> jax.Array:
    """bool [B, T, T]."""
    return segments[:, :, None] == segments[:, None, :]


def _scores(q: jax.Array, k: jax.Array, segments: jax.Array | None, scale: float) -> jax.Array:
    """fp32 masked scores [B, G, H/G, T, T]."""
    B, T, H, K = q.shape
    grouped = q.reshape(B, T, k.shape[2], H // k.shape[2], K)
    scores = jnp.einsum("btgnk,bsgk->bgnts", grouped, k, preferred_element_type=jnp.float32) * scale
    causal = lax.broadcasted_iota(jnp.int32, (T, T), 0) >= lax.broadcasted_iota(jnp.int32, (T, T), 1)
    seen = causal[None] if segments is None else causal[None] & _same_document(segments)
    return jnp.where(seen[:, None, None], scores, jnp.float32(MASKED))


def _xla(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, scale: float) -> tuple[jax.Array, jax.Array]:
    scores = _scores(q, k, segments, scale)
    lse = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.exp(scores - lse[..., None]).astype(q.dtype)
    out = jnp.einsum("bgnts,bsgk->btgnk", p, v).reshape(q.shape)
    return out, lse.reshape(lse.shape[0], -1, lse.shape[-1])


def _xla_grad(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, out: jax.Array, lse: jax.Array,
              dout: jax.Array, scale: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    B, T, H, K = q.shape
    G = k.shape[2]
    group = (B, T, G, H // G, K)
    p = jnp.exp(_scores(q, k, segments, scale) - lse.reshape(B, G, H // G, T)[..., None])
    do = dout.reshape(group)
    dv = jnp.einsum("bgnts,btgnk->bsgk", p.astype(q.dtype), do)
    dp = jnp.einsum("btgnk,bsgk->bgnts", do, v, preferred_element_type=jnp.float32)
    delta = jnp.sum(do.astype(jnp.float32) * out.reshape(group).astype(jnp.float32), -1)
    ds = (p * (dp - delta.transpose(0, 2, 3, 1)[..., None]) * scale).astype(q.dtype)
    dq = jnp.einsum("bgnts,bsgk->btgnk", ds, k).reshape(q.shape)
    return dq, jnp.einsum("bgnts,btgnk->bsgk", ds, q.reshape(group)), dv


def _bias(segments: jax.Array | None, dtype: jnp.dtype) -> jax.Array | None:
    """What cuDNN adds to the scores: 0 inside a document, and far below any score elsewhere; [B, 1, T, T]."""
    if segments is None:
        return None
    low = jnp.asarray(0.7 * float(jnp.finfo(dtype).min), dtype)
    return jnp.where(_same_document(segments), jnp.zeros((), dtype), low)[:, None]


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, scale: float) -> tuple[jax.Array, jax.Array]:
    return _compat.cudnn_attention(q, k, v, _bias(segments, q.dtype), scale)


def _cudnn_grad(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, out: jax.Array, lse: jax.Array,
                dout: jax.Array, scale: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _compat.cudnn_attention_grad(q, k, v, _bias(segments, q.dtype), out, lse, dout, scale)


KERNELS = {"xla": (_xla, _xla_grad), "cudnn": (_cudnn, _cudnn_grad)}


def causal_attention(q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segments_BT: jax.Array | None, kernel: str) -> jax.Array:
    """softmax(q k^T / sqrt(K), causal and inside a segment) v, softmax in fp32 -> [B, T, H, K]. kernel: see `choose_kernel`."""
    forward, backward = KERNELS[kernel]
    scale = q_BTHK.shape[-1] ** -0.5

    @_compat.own_vjp()
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
        return forward(q, k, v, segments, scale)[0]

    def attend_fwd(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None):
        out, lse = forward(q, k, v, segments, scale)
        out, lse = checkpoint_name(out, "attention"), checkpoint_name(lse, "lse")
        return out, (q, k, v, segments, out, lse)

    def attend_bwd(saved, dout: jax.Array):
        q, k, v, segments, out, lse = saved
        return *backward(q, k, v, segments, out, lse, dout, scale), None

    attend.defvjp(attend_fwd, attend_bwd)
    return attend(*(checkpoint_name(x, "qkv") for x in (q_BTHK, k_BTGK, v_BTGK)), segments_BT)
