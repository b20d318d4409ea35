"""Causal attention with its own derivative: one function that takes cuDNN's flash kernel where it can, and plain XLA otherwise.

All kernels save q, k, v, the output and the log-sum-exp, named "qkv", "attention" and "lse" for the remat policy; the
probabilities are never saved. Grouped-query attention reads each kv head in place, without repeating it. Where documents share a row, a
token attends to its own document (`segments`): "xla" and "cudnn" read a mask [B, 1, T, T], "cudnn_packed" works on each document alone.
With a window, a token sees itself and the window - 1 tokens before it, as Hugging Face's `sliding_window` means it.
Shapes: q [B, T, H, K]; k, v [B, T, G, K] with H a multiple of G; segments [B, T] or None; log-sum-exp [B, H, T] in fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmeg import _compat
from jaxmeg.ops.documents import Documents, by_document, by_token, find_documents

MASKED = -1e30  # finite, so that a row's maximum is too

Arrays3 = tuple[jax.Array, jax.Array, jax.Array]


def choose_kernel(platform: str, dtype: str, head_dim: int, seq_len: int, packed: bool, capability: str | None,
                  wanted: str = "auto", max_documents: int | None = None, window: int | None = None) -> tuple[str, str]:
    """(kernel, why): "cudnn" on NVIDIA GPUs from Ampere on for bf16 and fp16 with head dims up to 128 that are multiples of 8, and rows of
    even length where documents share them; else "xla".

    packed: whether `segments` may be given. capability: the GPU's compute capability, such as "9.0"; None where it is not known.
    wanted: layout.attention. "cudnn" and "cudnn_packed" take head dims up to 256 on Hopper and windows, which "auto" does not until they
    have been run (beside documents a window is part of their mask, which has); "cudnn_packed" takes rows of documents, at most
    `max_documents` a row, from Hopper on. A kernel that can't run here is not taken, and the reason says what stands in the way.
    """
    if wanted == "xla":
        return "xla", "as layout.attention says"
    version = None if capability is None else float(capability)
    without_mask, masked = (_cudnn_or_xla(platform, dtype, head_dim, seq_len, mask, version, wanted != "auto") for mask in (False, packed))
    if wanted == "auto" and window is not None and not packed and masked[0] == "cudnn":
        return "xla", "cuDNN was not tried with a window yet: layout.attention cudnn takes it"
    if wanted != "cudnn_packed" or not packed or without_mask[0] == "xla":
        return masked
    if max_documents is None:
        return masked[0], "cudnn_packed needs data.max_documents"
    if version is None or version < 9.0:
        return masked[0], f"cudnn_packed needs compute capability 9.0 (Hopper) or newer, this GPU has {capability}"
    return "cudnn_packed", f"{without_mask[1]}, at most {max_documents} documents a row"


def _cudnn_or_xla(platform: str, dtype: str, head_dim: int, seq_len: int, masked: bool, version: float | None,
                  asked: bool) -> tuple[str, str]:
    widest = 256 if version is not None and int(version) == 9 else 128  # forward and backward; Blackwell's backward ends at 128
    if platform not in ("cuda", "gpu"):
        return "xla", f"cuDNN needs an NVIDIA GPU, this is {platform}"
    if version is not None and version < 8.0:
        return "xla", f"cuDNN's flash attention needs compute capability 8.0 (Ampere) or newer, this GPU has {version}"
    if dtype not in ("bf16", "fp16"):
        return "xla", f"cuDNN's flash attention takes bf16 or fp16, not {dtype}"
    if head_dim > widest or head_dim % 8:
        return "xla", f"cuDNN's flash attention takes head dims up to {widest} in steps of 8, not {head_dim}"
    if head_dim > 128 and not asked:
        return "xla", f"cuDNN was not tried with head dim {head_dim} yet: layout.attention cudnn takes it"
    if masked and seq_len % 2:
        return "xla", f"cuDNN's flash attention keeps documents apart in rows of even length, not of {seq_len} tokens"
    return "cudnn", f"{dtype}, head dim {head_dim}"


def score_bytes(rows: int, heads: int, seq_len: int) -> int:
    """Bytes of the scores [rows, heads, seq_len, seq_len] that "xla" makes in a layer; its backward pass holds several arrays of them."""
    return 4 * rows * heads * seq_len**2


class Seen(NamedTuple):
    """What a query sees besides being causal. Static but for `segments`."""

    segments: jax.Array | None
    window: int | None
    max_documents: int | None


def _mask(seen: Seen, T: int) -> jax.Array:
    """Which keys each query sees, bool [1 or B, T, T]."""
    query, key = (lax.broadcasted_iota(jnp.int32, (T, T), dim) for dim in (0, 1))
    mask = (query >= key)[None]
    if seen.window is not None:
        mask &= (query - key < seen.window)[None]
    if seen.segments is not None:
        mask &= seen.segments[:, :, None] == seen.segments[:, None, :]
    return mask


def _scores(q: jax.Array, k: jax.Array, seen: Seen) -> jax.Array:
    """fp32 masked scores [B, G, H/G, T, T]."""
    B, T, H, K = q.shape
    grouped = q.reshape(B, T, k.shape[2], H // k.shape[2], K)
    scores = jnp.einsum("btgnk,bsgk->bgnts", grouped, k, preferred_element_type=jnp.float32) * K**-0.5
    return jnp.where(_mask(seen, T)[:, None, None], scores, jnp.float32(MASKED))


def _xla(q: jax.Array, k: jax.Array, v: jax.Array, seen: Seen) -> tuple[jax.Array, jax.Array]:
    scores = _scores(q, k, seen)
    lse = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.exp(scores - lse[..., None]).astype(q.dtype)
    out = jnp.einsum("bgnts,bsgk->btgnk", p, v).reshape(q.shape)
    return out, lse.reshape(lse.shape[0], -1, lse.shape[-1])


def _xla_grad(q: jax.Array, k: jax.Array, v: jax.Array, seen: Seen, out: jax.Array, lse: jax.Array, dout: jax.Array) -> Arrays3:
    B, T, H, K = q.shape
    G = k.shape[2]
    group = (B, T, G, H // G, K)
    p = jnp.exp(_scores(q, k, seen) - lse.reshape(B, G, H // G, T)[..., None])
    do = dout.reshape(group)
    dv = jnp.einsum("bgnts,btgnk->bsgk", p.astype(q.dtype), do)
    dp = jnp.einsum("btgnk,bsgk->bgnts", do, v, preferred_element_type=jnp.float32)
    delta = jnp.sum(do.astype(jnp.float32) * out.reshape(group).astype(jnp.float32), -1)
    ds = (p * (dp - delta.transpose(0, 2, 3, 1)[..., None]) * K**-0.5).astype(q.dtype)
    dq = jnp.einsum("bgnts,bsgk->btgnk", ds, k).reshape(q.shape)
    return dq, jnp.einsum("bgnts,btgnk->bsgk", ds, q.reshape(group)), dv


def _bias(q: jax.Array, seen: Seen) -> jax.Array | None:
    """What cuDNN adds to the scores of packed rows: 0 where a query sees, and far below any score elsewhere; [B, 1, T, T]. The window is
    in it, as older cuDNNs take no window beside it."""
    if seen.segments is None:
        return None
    low = jnp.asarray(0.7 * float(jnp.finfo(q.dtype).min), q.dtype)
    return jnp.where(_mask(seen, q.shape[1]), jnp.zeros((), q.dtype), low)[:, None]


def _cudnn(q: jax.Array, k: jax.Array, v: jax.Array, seen: Seen) -> tuple[jax.Array, jax.Array]:
    return _compat.cudnn_attention(q, k, v, bias=_bias(q, seen), window=seen.window if seen.segments is None else None)


def _cudnn_grad(q: jax.Array, k: jax.Array, v: jax.Array, seen: Seen, out: jax.Array, lse: jax.Array, dout: jax.Array) -> Arrays3:
    return _compat.cudnn_attention_grad(q, k, v, out, lse, dout, bias=_bias(q, seen),
                                        window=seen.window if seen.segments is None else None)


def _ragged(q: jax.Array, k: jax.Array, segments: jax.Array, max_documents: int) -> tuple[Documents, _compat.Ragged]:
    """max_documents: without the padding that ends a row, which is computed like a document, so that no output is left unwritten."""
    B, T, H, K = q.shape
    if B * T * H * K >= 2**31:
        raise ValueError(f"{B} rows of {T} tokens with {H} heads of {K} are more than the 2^31 elements that cudnn_packed counts: use a "
                         f"smaller pipeline.microbatch, or layout.attention cudnn")
    documents = find_documents(segments, max_documents + 1)
    starts = jnp.pad(documents.starts_S1, (0, B - 1), mode="edge").reshape(B, -1)
    lengths = documents.lengths_S.reshape(B, -1)
    return documents, _compat.Ragged(lengths, starts * (H * K), starts * (k.shape[2] * K))


def _cudnn_packed(q: jax.Array, k: jax.Array, v: jax.Array, seen: Seen) -> tuple[jax.Array, jax.Array]:
    if seen.segments is None or seen.max_documents is None:
        return _cudnn(q, k, v, seen)
    documents, ragged = _ragged(q, k, seen.segments, seen.max_documents)
    out, lse = _compat.cudnn_attention(q, k, v, ragged=ragged, window=seen.window)
    return out, by_token(lse, documents)


def _cudnn_packed_grad(q: jax.Array, k: jax.Array, v: jax.Array, seen: Seen, out: jax.Array, lse: jax.Array, dout: jax.Array) -> Arrays3:
    if seen.segments is None or seen.max_documents is None:
        return _cudnn_grad(q, k, v, seen, out, lse, dout)
    documents, ragged = _ragged(q, k, seen.segments, seen.max_documents)
    return _compat.cudnn_attention_grad(q, k, v, out, by_document(lse, documents), dout, ragged=ragged, window=seen.window)


KERNELS = {"xla": (_xla, _xla_grad), "cudnn": (_cudnn, _cudnn_grad), "cudnn_packed": (_cudnn_packed, _cudnn_packed_grad)}


def causal_attention(q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segments_BT: jax.Array | None, kernel: str,
                     window: int | None = None, max_documents: int | None = None) -> jax.Array:
    """softmax(q k^T / sqrt(K), causal, inside a segment and a window) v, softmax in fp32 -> [B, T, H, K].

    kernel: see `choose_kernel`. max_documents: no row has more, padding aside; "cudnn_packed" gives gradients of NaN if one has.
    """
    forward, backward = KERNELS[kernel]

    def seen(segments: jax.Array | None) -> Seen:
        return Seen(segments, window, max_documents)

    @_compat.own_vjp()
    def attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
        return forward(q, k, v, seen(segments))[0]

    def attend_fwd(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None):
        out, lse = forward(q, k, v, seen(segments))
        out, lse = checkpoint_name(out, "attention"), checkpoint_name(lse, "lse")
        return out, (q, k, v, segments, out, lse)

    def attend_bwd(saved, dout: jax.Array):
        q, k, v, segments, out, lse = saved
        return *backward(q, k, v, seen(segments), out, lse, dout), None

    attend.defvjp(attend_fwd, attend_bwd)
    return attend(*(checkpoint_name(x, "qkv") for x in (q_BTHK, k_BTGK, v_BTGK)), segments_BT)
