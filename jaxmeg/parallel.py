"""Collective verbs: the only file that moves data between devices inside the step.

Everything here runs inside `shard_map` with every mesh axis manual. All values are kept *varying* over all axes, so
that the derivative of a verb is its plain local transpose and nothing is summed unasked: a value that is equal on
several ranks holds, in the backward pass, one *partial* cotangent a rank, and whoever owns it adds them up
(`layout.Layout.reduce`). Model code calls these verbs and names no mesh axis. A verb over axes of size 1 is the identity.

Shapes: B rows, T tokens of the whole sequence, t = T / tp tokens of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxmeg._compat import varying_axes
from jaxmeg.config import Axis
from jaxmeg.precision import Dots

AXES: tuple[str, ...] = tuple(axis.value for axis in Axis)
DATA_AXES: tuple[str, ...] = (Axis.REP, Axis.DP, Axis.EP)  # rows of the batch are split over these
ZERO_AXES: tuple[str, ...] = (Axis.DP, Axis.EP, Axis.CP)  # ZeRO shards state over these

Tree = TypeVar("Tree")


def vary(tree: Tree) -> Tree:
    """The same values, typed as varying over every mesh axis. Its transpose is a sum: use outside of what is differentiated."""
    def one(x: jax.Array) -> jax.Array:
        missing = tuple(axis for axis in AXES if axis not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x
    return jax.tree.map(one, tree)


def active(axes: Iterable[str]) -> tuple[str, ...]:
    """The axes of more than one device."""
    return tuple(axis for axis in axes if lax.axis_size(axis) > 1)


def rank(axes: Sequence[str]) -> jax.Array:
    """Index of this device along `axes`, the first being the slowest."""
    index = jnp.zeros((), jnp.int32)
    for axis in axes:
        index = index * lax.axis_size(axis) + lax.axis_index(axis)
    return index


def scope(verb: str, axes: Iterable[str]) -> Any:
    """A name in profiles for what a verb does, such as all_gather(dp)."""
    return jax.named_scope(f"{verb}({','.join(axes)})")


def all_sum(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    axes = active(axes)
    with scope("all_sum", axes):
        return vary(lax.psum(x, axes)) if axes else x


def all_max(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    axes = active(axes)
    with scope("all_max", axes):
        return vary(lax.pmax(x, axes)) if axes else x


def all_gather(x: jax.Array, axes: Iterable[str], dim: int) -> jax.Array:
    axes = active(axes)
    with scope("all_gather", axes):
        return lax.all_gather(x, axes, axis=dim, tiled=True) if axes else x


def reduce_scatter(x: jax.Array, axes: Iterable[str], dim: int) -> jax.Array:
    axes = active(axes)
    with scope("reduce_scatter", axes):
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True) if axes else x


def all_to_all(x: jax.Array, axes: Iterable[str], split_dim: int, concat_dim: int) -> jax.Array:
    """Part i of `split_dim` goes to rank i of the axes, and the parts that arrive are put together along `concat_dim`."""
    axes = active(axes)
    with scope("all_to_all", axes):
        return lax.all_to_all(x, axes, split_dim, concat_dim, tiled=True) if axes else x


# ------------------------------------------------------------------ tokens: sequence parallelism over tp
def gather_tokens(x_BtD: jax.Array) -> jax.Array:
    """[B, T/tp, ...] -> [B, T, ...]; its transpose sums the ranks' partial cotangents and scatters them."""
    return all_gather(x_BtD, (Axis.TP,), dim=1)


def scatter_tokens(x_BTD: jax.Array, partial: bool) -> jax.Array:
    """[B, T, ...] -> [B, T/tp, ...]: the ranks' partial values are summed, or, if each holds the whole, a slice is taken."""
    if partial:
        return reduce_scatter(x_BTD, (Axis.TP,), dim=1)
    num_tokens = x_BTD.shape[1] // lax.axis_size(Axis.TP)
    return lax.dynamic_slice_in_dim(x_BTD, lax.axis_index(Axis.TP) * num_tokens, num_tokens, axis=1)


def token_positions(num_tokens: int, gathered: bool) -> jax.Array:
    """Global positions of this rank's `num_tokens` tokens, or of all tokens after `gather_tokens`: int32 [num_tokens]."""
    positions = jnp.arange(num_tokens, dtype=jnp.int32)
    return positions if gathered else positions + lax.axis_index(Axis.TP) * num_tokens


def gather_matmul(x_BtD: jax.Array, *weights: jax.Array, dots: Dots) -> list[jax.Array]:
    """Gather the tokens once, then multiply by each weight [D, ...], whose other dims may be sharded over tp."""
    return dots(checkpoint_name(gather_tokens(x_BtD), "gathered"), weights, 1)


def matmul_scatter(x_BTF: jax.Array, w: jax.Array, num_contract: int, full_size: int, dots: Dots) -> jax.Array:
    """Contract the last `num_contract` dims of x with the first of w, then scatter the tokens: [B, T/tp, D].

    full_size: the unsharded size of w's first dim; where w holds a part of it, the products are partial sums over tp.
    """
    [y_BTD] = dots(x_BTF, (w,), num_contract)
    return scatter_tokens(y_BTD, partial=w.shape[0] != full_size)


def local_kv_heads(w: jax.Array, dim: int, num_heads_local: int, num_heads: int, num_kv_heads: int) -> jax.Array:
    """The part of a key or value weight that this rank's query heads read; kv heads are dim `dim` of w.

    Fewer kv heads than tp ranks are held whole on every rank: query heads [r*n, (r+1)*n) of rank r read a run of
    them, and their gradient is summed over tp like that of any replicated leaf. Otherwise the identity.
    """
    if w.shape[dim] != num_kv_heads or num_heads_local == num_heads:
        return w
    group = num_heads // num_kv_heads
    first = lax.axis_index(Axis.TP) * num_heads_local // group
    return lax.dynamic_slice_in_dim(w, first, max(num_heads_local // group, 1), axis=dim)


# ------------------------------------------------------------------ stages: the pipeline ring
def send_forward(x: jax.Array) -> jax.Array:
    """To the next stage; the last sends to the first."""
    n = lax.axis_size(Axis.PP)
    with scope("send_forward", (Axis.PP,)):
        return lax.ppermute(x, Axis.PP, [(i, (i + 1) % n) for i in range(n)])


def send_backward(x: jax.Array) -> jax.Array:
    """To the previous stage; the first sends to the last."""
    n = lax.axis_size(Axis.PP)
    with scope("send_backward", (Axis.PP,)):
        return lax.ppermute(x, Axis.PP, [((i + 1) % n, i) for i in range(n)])


def stage() -> jax.Array:
    return lax.axis_index(Axis.PP)


def on_last_stage() -> jax.Array:
    return stage() == lax.axis_size(Axis.PP) - 1


def from_last_stage(x: jax.Array) -> jax.Array:
    """The last stage's value, on every stage."""
    return all_sum(only_on(on_last_stage(), x), (Axis.PP,))


def only_on(owner: jax.Array | bool, x: jax.Array) -> jax.Array:
    """x where `owner`, else zero: a select, never a product, so that garbage elsewhere cannot spread as 0 * inf."""
    return jnp.where(owner, x, jnp.zeros_like(x))


def computes_loss(vocab_axes: Sequence[str]) -> jax.Array:
    """Whether this rank takes part in the loss, whose input all stages and tp ranks hold: all ranks that share the
    vocabulary do; along an axis that does not shard it, only the last stage and the first tp rank, so that nothing is added twice."""
    first_tp = lax.axis_index(Axis.TP) == 0
    return (on_last_stage() | (Axis.PP in vocab_axes)) & (first_tp | (Axis.TP in vocab_axes))


def reports_loss() -> jax.Array:
    """The one rank per data-parallel rank whose value of the loss is added up."""
    return on_last_stage() & (lax.axis_index(Axis.TP) == 0)
