"""The decoder as the three functions a pipeline runs: embed, one block, head. Families differ by `Arch` alone.

Parameters are a tree {"embed", "layers", "head"} of arrays; the leaves of "layers" are stacked [rows, ...] in the
order of a `Placement`. `init` and `dims` describe that tree; nothing here knows a mesh or an optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxmeg import parallel
from jaxmeg.arch import Arch
from jaxmeg.models.layers import MLP, Attention, Context, Norm, Options, drop, parameter
from jaxmeg.ops.vocab import logits, lookup, token_loss

# Named values a forward pass keeps for its backward pass. Never kept: gathered tokens, norms, activations (cheap to
# redo), and anything that depends on weights alone but its FP8 scale, a scalar.
REMAT: dict[str, tuple[str, ...]] = {
    "full": ("scale",),
    "selective": ("scale", "gate_up", "attention", "lse"),
    "none": ("scale", "gate_up", "attention", "lse", "qkv", "middle"),
}


class Embed(nnx.Module):
    """Token table, and a position table where positions are learned."""

    def __init__(self, arch: Arch, vocab_rows: int, rngs: nnx.Rngs):
        table = parameter(rngs, (arch.vocab_size, arch.embed_dim), ("vocab", "embed"), arch.embed_dim)
        self.tokens = nnx.Param(_pad_rows(table[...], vocab_rows), dims=("vocab", "embed"))
        learned = arch.positions == "learned"
        shape = (arch.max_seq_len, arch.embed_dim)
        self.positions = parameter(rngs, shape, ("positions", "embed"), arch.embed_dim) if learned else None

    def __call__(self, ids_BT: jax.Array, axes: tuple[str, ...], options: Options, context: Context) -> jax.Array:
        x_BtD = lookup(self.tokens[...], ids_BT, axes, options.dtype)
        if self.positions is not None:
            rows = self.positions[...][context.positions(x_BtD.shape[1], gathered=False)]
            x_BtD = x_BtD + jnp.broadcast_to(rows, x_BtD.shape).astype(options.dtype)  # summed over rows in fp32
        return drop(x_BtD, options, context, 0)


class Block(nnx.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, arch: Arch, options: Options, rngs: nnx.Rngs):
        self.options = options
        self.attention_norm = Norm(arch, arch.embed_dim, "embed", arch.norm)
        self.attention = Attention(arch, options, rngs)
        self.mlp_norm = Norm(arch, arch.embed_dim, "embed", arch.norm)
        self.mlp = MLP(arch, options, rngs)

    def __call__(self, x_BtD: jax.Array, layer: jax.Array, context: Context) -> jax.Array:
        """layer: index of this block in the whole model, int32 []."""
        a = drop(self.attention(self.attention_norm(x_BtD), context), self.options, context, 2 * layer + 1)
        x_BtD = checkpoint_name(x_BtD + a, "middle")
        return x_BtD + drop(self.mlp(self.mlp_norm(x_BtD)), self.options, context, 2 * layer + 2)


class Head(nnx.Module):
    """Final norm, and an output table unless the embedding's is used."""

    def __init__(self, arch: Arch, vocab_rows: int, rngs: nnx.Rngs):
        self.norm = Norm(arch, arch.embed_dim, "embed", arch.norm)
        table = None if arch.tied else parameter(rngs, (arch.vocab_size, arch.embed_dim), ("vocab", "embed"), arch.embed_dim)
        self.tokens = None if table is None else nnx.Param(_pad_rows(table[...], vocab_rows), dims=("vocab", "embed"))


def _pad_rows(table: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(table, ((0, rows - table.shape[0]), (0, 0)))


class _Part:
    """A module taken apart once: how to make its parameters, their dims, and how to run it on given arrays."""

    def __init__(self, make: Callable[[nnx.Rngs], nnx.Module]):
        self.make = make
        self.graph, self.state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))

    @property
    def dims(self) -> Any:
        flat = {path: variable.get_metadata()["dims"] for path, variable in nnx.to_flat_state(self.state)}
        return nnx.traversals.unflatten_mapping(flat)

    def init(self, key: jax.Array) -> Any:
        return nnx.to_pure_dict(nnx.state(self.make(nnx.Rngs(params=key))))

    def bind(self, arrays: Any) -> Any:
        state = jax.tree.map(lambda x: x, self.state)
        nnx.replace_by_pure_dict(state, arrays)
        return nnx.merge(self.graph, state)


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """One decoder-only transformer, ready to be run by a pipeline inside `shard_map`."""

    arch: Arch
    options: Options
    remat: str
    scan_layers: bool
    """Whether layers run in a loop; written out, the compiler must be kept from keeping what `remat` says to redo."""
    vocab_rows: int
    """Rows of the token tables: vocab_size, padded until the mesh divides it."""
    vocab_axes: tuple[str, ...]
    """Opaque: the axes the vocabulary is sharded over, handed on to ops.vocab."""

    @cached_property
    def parts(self) -> dict[str, _Part]:
        return {
            "embed": _Part(lambda rngs: Embed(self.arch, self.vocab_rows, rngs)),
            "layers": _Part(lambda rngs: Block(self.arch, self.options, rngs)),
            "head": _Part(lambda rngs: Head(self.arch, self.vocab_rows, rngs)),
        }

    def without_dropout(self) -> Decoder:
        return replace(self, options=self.options._replace(dropout=0.0))

    @property
    def dims(self) -> Any:
        """The parameter tree with a tuple of dim names a leaf."""
        tree = {name: part.dims for name, part in self.parts.items()}
        stacked = jax.tree.map(lambda dims: ("layers", *dims), tree["layers"], is_leaf=lambda x: isinstance(x, tuple))
        return tree | {"layers": stacked}

    def init(self, key: jax.Array, layer_of_row: jax.Array) -> Any:
        """Initial parameters, fp32. Row i of "layers" is layer layer_of_row[i], or zeros where that is negative.

        Each layer has its own key, so weights depend on the seed and the model alone, not on where rows are placed.
        """
        keys = jax.random.split(key, 3)
        row_keys = jax.vmap(lambda layer: jax.random.fold_in(keys[1], layer))(jnp.maximum(layer_of_row, 0))
        layers = jax.vmap(self.parts["layers"].init)(row_keys)
        real = layer_of_row >= 0
        layers = jax.tree.map(lambda x: jnp.where(real.reshape((-1,) + (1,) * (x.ndim - 1)), x, jnp.zeros_like(x)), layers)
        return {"embed": self.parts["embed"].init(keys[0]), "layers": layers, "head": self.parts["head"].init(keys[2])}

    # ---------------------------------------------------------------- the three functions; inside shard_map
    def embed(self, params: Any, ids_BT: jax.Array, context: Context) -> jax.Array:
        """Token ids -> residual stream [B, T/tp, D]. params: the "embed" part."""
        return self.parts["embed"].bind(params)(ids_BT, self.vocab_axes, self.options, context)

    def block(self, params: Any, x_BtD: jax.Array, layer: jax.Array, context: Context) -> jax.Array:
        """One layer, keeping what `remat` names for its derivative. params: one row of "layers"."""
        def run(params: Any, x: jax.Array, layer: jax.Array, context: Context) -> jax.Array:
            return self.parts["layers"].bind(params)(x, layer, context)
        policy = jax.checkpoint_policies.save_only_these_names(*REMAT[self.remat])
        # Written out, the compiler would merge what is redone with the forward pass: a barrier on all but the weights, which it would copy.
        barrier = False if self.scan_layers else (False, True, True, True)
        return jax.checkpoint(run, policy=policy, prevent_cse=barrier)(params, x_BtD, layer, context)

    def head_params(self, params: Any) -> Any:
        """The parts that `loss` and `next_token_logits` read: a tied head brings the embedding."""
        return {name: params[name] for name in (("head", "embed") if self.arch.tied else ("head",))}

    def _hidden(self, params: Any, x_BtD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Normed hidden states of this rank's tokens, and the output table."""
        head = self.parts["head"].bind(params["head"])
        return head.norm(x_BtD), params["embed"]["tokens"] if self.arch.tied else head.tokens[...]

    def loss(self, params: Any, x_BtD: jax.Array, labels_BT: jax.Array, weights_BT: jax.Array,
             num_chunks: int | None = None) -> jax.Array:
        """Sum of weight * cross-entropy of one microbatch, fp32 []: the value counts where `parallel.reports_loss`, the
        gradient in x is on the last stage."""
        h_BtD, table = self._hidden(params, x_BtD)
        weights_BT = parallel.only_on(parallel.computes_loss(self.vocab_axes), weights_BT)
        return token_loss(h_BtD, table, labels_BT, weights_BT, self.vocab_axes, self.arch.vocab_size, num_chunks, self.options.fp8_head)

    def next_token_logits(self, params: Any, x_BtD: jax.Array, position: jax.Array) -> jax.Array:
        """fp32 logits [B, vocab_size] of the token after `position`, int32 []."""
        h_BtD, table = self._hidden(params, x_BtD)
        h_BD = jax.lax.dynamic_index_in_dim(parallel.gather_tokens(h_BtD), position, axis=1, keepdims=False)
        z = logits(h_BD, table, self.vocab_axes, self.arch.vocab_size)
        return parallel.all_gather(z, self.vocab_axes, dim=1)[:, : self.arch.vocab_size]
