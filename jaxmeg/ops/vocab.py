"""Vocabulary-parallel embedding lookup and cross-entropy over a table [vocabulary, D] whose rows are sharded over `axes`.

Rank r of `axes` holds rows [r*n, (r+1)*n). The loss is taken in chunks of tokens with its gradient in the forward
pass, so that logits exist one chunk at a time; log-softmax and loss are fp32, the logits' gradient has the compute dtype.
Rows of padding (ids >= vocab_size) take no part in the softmax and get gradient exactly 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxmeg import parallel
from jaxmeg._compat import own_vjp
from jaxmeg.ops.fp8 import BACKWARD, FORWARD, Operand, contract, plain, quantise, scale_of

CHUNK_LOGITS = 2**28  # fp32 logits of one chunk on one device: at most 1 GiB; each chunk reads and writes the table's gradient


def _local(table: jax.Array, ids: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Row of each id in this rank's part of the table (clipped into it), and whether it is there."""
    rows = table.shape[0]
    index = ids - parallel.rank(axes) * rows
    return jnp.clip(index, 0, rows - 1), (index >= 0) & (index < rows)


@own_vjp(2, 3)
def lookup(table_VD: jax.Array, ids_BT: jax.Array, axes: tuple[str, ...], dtype: jnp.dtype) -> jax.Array:
    """Rows of the table in `dtype`, tokens scattered over tp: [B, T/tp, D]. Its gradient is a dense fp32 table."""
    index, here = _local(table_VD, ids_BT, axes)
    x = parallel.only_on(here[..., None], table_VD.astype(dtype)[index])
    x = parallel.scatter_tokens(x, partial="tp" in axes)
    return parallel.all_sum(x, (axis for axis in axes if axis != "tp"))


def _lookup_fwd(table: jax.Array, ids: jax.Array, axes: tuple[str, ...], dtype: jnp.dtype):
    return lookup(table, ids, axes, dtype), (table, ids)


def _lookup_bwd(axes: tuple[str, ...], dtype: jnp.dtype, saved: tuple[jax.Array, jax.Array], dx_BtD: jax.Array):
    table, ids = saved
    dx = parallel.all_sum(dx_BtD, (axis for axis in axes if axis != "tp"))
    if "tp" in axes:
        dx = parallel.gather_tokens(dx)
    else:  # this rank embedded only its own tokens
        ids = lax.dynamic_slice_in_dim(ids, parallel.rank(("tp",)) * dx.shape[1], dx.shape[1], axis=1)
    index, here = _local(table, ids, axes)
    zeros = parallel.vary(jnp.zeros(table.shape, table.dtype))
    return zeros.at[index].add(parallel.only_on(here[..., None], dx).astype(table.dtype)), None


lookup.defvjp(_lookup_fwd, _lookup_bwd)


def logits(h_ND: jax.Array, table_VD: jax.Array, axes: tuple[str, ...], vocab_size: int) -> jax.Array:
    """fp32 logits of this rank's part of the vocabulary, [N, V/ranks]; padding holds the most negative float."""
    dtype = h_ND.dtype
    return _logits(plain(h_ND, dtype), plain(table_VD, dtype), dtype, axes, vocab_size)


def _logits(h: Operand, table: Operand, dtype: jnp.dtype, axes: tuple[str, ...], vocab_size: int) -> jax.Array:
    out, rows = contract(h, table, (1, 1), dtype, jnp.float32), table.values.shape[0]
    ids = parallel.rank(axes) * rows + lax.broadcasted_iota(jnp.int32, (1, rows), 1)
    return jnp.where(ids < vocab_size, out, jnp.finfo(jnp.float32).min)


def log_sum_exp_parts(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Largest element of each row, and sum of exp(element - largest), fp32 [N] each, in one pass over the rows (Milakov and
    Gimelshein 2018): a pair of the two is what is reduced."""
    def merge(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        peak = jnp.maximum(a[0], b[0])
        return peak, a[1] * jnp.exp(a[0] - peak) + b[1] * jnp.exp(b[0] - peak)
    lowest = jnp.float32(jnp.finfo(jnp.float32).min)  # not -inf: the difference of two has to be 0
    return lax.reduce((z, jnp.ones_like(z)), (lowest, jnp.float32(0)), merge, (1,))


def _chunk(h: Operand, table: Operand, dtype: jnp.dtype, labels: jax.Array, weights: jax.Array, axes: tuple[str, ...], vocab_size: int):
    """Loss of one chunk of tokens, and what its gradient needs: (loss [], logits, max, sum of exponentials, one-hot rows)."""
    z = _logits(h, table, dtype, axes, vocab_size)
    own_peak, own_total = log_sum_exp_parts(z)
    peak = parallel.all_max(own_peak, axes)
    total = parallel.all_sum(own_total * jnp.exp(own_peak - peak), axes)
    index, here = _local(table.values, labels, axes)
    hit = (lax.broadcasted_iota(jnp.int32, z.shape, 1) == index[:, None]) & here[:, None]
    target = parallel.all_sum(jnp.sum(parallel.only_on(hit, z), -1), axes)
    loss = jnp.sum(weights * (peak + jnp.log(total) - target))
    return loss, (z, peak, total, hit)


def _chunked(h: jax.Array, labels: jax.Array, weights: jax.Array, num_chunks: int):
    """[N, ...] -> [chunks, ceil(N / chunks), ...]; the last chunk is filled up with tokens of weight 0."""
    fill = -h.shape[0] % num_chunks
    def split(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, fill)] + [(0, 0)] * (x.ndim - 1)).reshape(num_chunks, -1, *x.shape[1:])
    return split(h), split(labels), split(weights)


def default_chunks(num_tokens: int, vocab_rows: int) -> int:
    return max(1, -(-num_tokens * vocab_rows // CHUNK_LOGITS))


@own_vjp(4, 5, 6, 7)
def token_loss(h_BtD: jax.Array, table_VD: jax.Array, labels_BT: jax.Array, weights_BT: jax.Array,
               axes: tuple[str, ...], vocab_size: int, num_chunks: int | None, fp8: bool = False) -> jax.Array:
    """Sum over tokens of weight * cross-entropy, in nats: fp32 [], the same value on every rank of `axes`.

    h: this rank's tokens in the compute dtype, gathered here; equal on all stages. weights: fp32, 0 for a token that is
    not trained, and on ranks that do not take part (`parallel.computes_loss`). num_chunks: None for a size that keeps
    logits within CHUNK_LOGITS. The ranks' parts of the gradient of h are added in fp32 and rounded once; the last stage
    holds it, the others hold zero. The table's gradient is of this rank's rows. fp8: multiply in FP8; the gradient of the
    logits is scaled by the largest weight, which bounds it.
    """
    dtype = h_BtD.dtype
    table, chunks = _operands(h_BtD, table_VD, labels_BT, weights_BT, num_chunks, fp8)

    def one(total: jax.Array, chunk: tuple[Operand, jax.Array, jax.Array]):
        h, labels, weights = chunk
        return total + _chunk(h, table, dtype, labels, weights, axes, vocab_size)[0], None

    zero = parallel.vary(jnp.zeros((), jnp.float32))
    return lax.scan(one, zero, chunks)[0]


def _operands(h_BtD, table_VD, labels_BT, weights_BT, num_chunks: int | None, fp8: bool):
    """The table, once and not once a chunk; and chunks of (hidden states of all tokens, labels, weights)."""
    def operand(x: jax.Array) -> Operand:
        return quantise(x, FORWARD) if fp8 else plain(x, h_BtD.dtype)

    h = operand(parallel.gather_tokens(h_BtD).reshape(-1, h_BtD.shape[-1]))
    table = operand(table_VD)
    num_chunks = num_chunks or default_chunks(h.values.shape[0], table_VD.shape[0])
    values, labels, weights = _chunked(h.values, labels_BT.reshape(-1), weights_BT.reshape(-1), num_chunks)
    scales = None if h.scale is None else jnp.broadcast_to(h.scale, (num_chunks,))
    return table, (Operand(values, scales), labels, weights)


def _token_loss_fwd(h_BtD, table_VD, labels_BT, weights_BT, axes, vocab_size, num_chunks, fp8):
    dtype = h_BtD.dtype
    part = jnp.float32 if parallel.active({"tp", *axes}) else dtype  # of the gradient of h: rounded after ranks are added
    table, chunks = _operands(h_BtD, table_VD, labels_BT, weights_BT, num_chunks, fp8)
    bound = scale_of(jnp.max(jnp.abs(weights_BT)), BACKWARD)  # a probability less a one-hot is in [-1, 1]
    columns = (table, 0) if not fp8 else (Operand(table.values.T, table.scale), 1)  # FP8 products want it turned: here, not in each chunk

    def one(chunk):
        h, labels, weights = chunk
        loss, (z, peak, exp_sum, hit) = _chunk(h, table, dtype, labels, weights, axes, vocab_size)
        p = jnp.exp(z - peak[:, None]) / exp_sum[:, None]
        dz = (p - hit.astype(jnp.float32)) * weights[:, None]
        dz = quantise(dz, BACKWARD, bound) if fp8 else plain(dz, dtype)
        dh = contract(dz, columns[0], (1, columns[1]), dtype, jnp.float32).astype(part)
        return (loss, contract(dz, h, (0, 0), dtype, table_VD.dtype)), dh

    def add(sums, chunk):
        more, dh = one(chunk)
        return jax.tree.map(jnp.add, sums, more), dh

    start, first = one(jax.tree.map(lambda x: x[0], chunks))  # the sums start with it: a table of zeros would be copied
    (loss, dtable), rest = lax.scan(add, start, jax.tree.map(lambda x: x[1:], chunks))
    dh = jnp.concatenate([first[None], rest])
    dh_BTD = dh.reshape(-1, dh.shape[-1])[: labels_BT.size].reshape(*labels_BT.shape, dh.shape[-1])
    dh_BtD = parallel.all_sum(parallel.scatter_tokens(dh_BTD, partial=True), (axis for axis in axes if axis != "tp"))
    return loss, (parallel.only_on(parallel.on_last_stage(), dh_BtD).astype(h_BtD.dtype), dtable)


def _token_loss_bwd(axes, vocab_size, num_chunks, fp8, saved, dloss):
    dh, dtable = saved
    return dh * dloss.astype(dh.dtype), dtable * dloss, None, None


token_loss.defvjp(_token_loss_fwd, _token_loss_bwd)
