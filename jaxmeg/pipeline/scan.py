"""The pipeline executor: one compiled program for any schedule table, with no conditionals and a size independent of M.

A table (`pipeline.schedules`) says per tick and stage which chunk and microbatch runs, and which slots it reads and
writes; `lax.scan` runs it in nested segments of equal ticks. Each layer has its own vjp: the forward keeps its residuals in
a ring, the backward rebuilds the vjp from ring and weights and adds the weight gradient in place. Never differentiate
through the scan. This file knows no model: it calls `embed`, `block` and `loss` of one, and a `Layout` for ZeRO.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmeg import parallel
from jaxmeg._compat import vjp_leaves
from jaxmeg.layout import Layout
from jaxmeg.models.layers import Context
from jaxmeg.pipeline.schedules import COLUMNS, Table, segments

Tree = Any
Carry = dict[str, Any]


class Model(Protocol):
    """What a pipeline needs of a model (`models.decoder.Decoder`)."""

    def embed(self, params: Tree, ids: jax.Array, context: Context, /) -> jax.Array: ...
    def block(self, params: Tree, x: jax.Array, layer: jax.Array, context: Context, /) -> jax.Array: ...
    def head_params(self, params: Tree, /) -> Tree: ...
    def loss(self, params: Tree, x: jax.Array, labels: jax.Array, weights: jax.Array, /) -> jax.Array: ...


class Batch(NamedTuple):
    """One rank's rows of a step: M microbatches of B rows of T tokens."""

    inputs_MBT: jax.Array
    labels_MBT: jax.Array
    weights_MBT: jax.Array
    """fp32 weight of each token's loss: 0 where it is not trained."""
    rows_MB: jax.Array
    """Global row indices, for dropout."""
    key: jax.Array
    """Raw key data of (seed, step), for dropout."""
    segments_MBT: jax.Array | None = None
    """Documents that share a row; None: each row is one."""

    def context(self, microbatch: jax.Array) -> Context:
        if self.segments_MBT is None:
            return Context(self.key, self.rows_MB[microbatch])
        segments = self.segments_MBT[microbatch]
        return Context(self.key, self.rows_MB[microbatch], segments, positions_in_segments(segments))


def positions_in_segments(segments_BT: jax.Array) -> jax.Array:
    """Positions that start again at 0 in every segment, int32 [B, T]; a segment is a run of equal numbers."""
    index = lax.broadcasted_iota(jnp.int32, segments_BT.shape, 1)
    before = jnp.concatenate([segments_BT[:, :1], segments_BT[:, :-1]], axis=1)
    return index - lax.cummax(jnp.where(segments_BT != before, index, jnp.zeros_like(index)), axis=1)


def put(x: jax.Array, value: jax.Array, *index: jax.Array) -> jax.Array:
    """x with x[index] = value, in place where the compiler can. A table's index is always inside; `x.at[index].set` also reads and
    selects the old value, for one that may not be."""
    value = value.reshape((1,) * len(index) + value.shape)
    return lax.dynamic_update_slice(x, value, (*index, *[jnp.zeros_like(index[0])] * (x.ndim - len(index))))


def f32(tree: Tree) -> Tree:
    """Compute-dtype weights typed as fp32, so that their gradients come back in fp32 (see precision.dot)."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


class Work:
    """The five kinds of work of one rank, E F H B G, on its local weights and rows."""

    def __init__(self, model: Model, layout: Layout, weights: Tree, batch: Batch, layer_of_row: np.ndarray,
                 num_chunks: int, reduce_dtype: Any, scan_layers: bool):
        """layer_of_row: int [stages, rows of a stage], the layer in each memory row, -1 where a shorter stage has none."""
        self.model, self.layout, self.weights, self.batch, self.reduce_dtype = model, layout, weights, batch, reduce_dtype
        self.scan_layers = scan_layers
        self.layers_per_chunk = layer_of_row.shape[1] // num_chunks
        self.uneven = bool((layer_of_row < 0).any())
        self.layer_of_row = parallel.vary(jnp.asarray(layer_of_row, jnp.int32))[parallel.stage()]
        activation = jax.eval_shape(self.embed, parallel.vary(jnp.int32(0)))
        self.activation = parallel.vary(jnp.zeros(activation.shape, activation.dtype))
        self.kept, self.rebuild = self._probe()

    # ---------------------------------------------------------------- E and G: the microbatch that enters
    def _embed(self, params: Tree, microbatch: jax.Array) -> jax.Array:
        return self.model.embed(params, self.batch.inputs_MBT[microbatch], self.batch.context(microbatch))

    @jax.named_scope("embed")
    def embed(self, microbatch: jax.Array) -> jax.Array:
        return self._embed(self.whole("embed"), microbatch)

    @jax.named_scope("embed.backward")
    def embed_backward(self, grads: Tree, microbatch: jax.Array, dx: jax.Array) -> Tree:
        """dx: on the stage that received it from stage 0, zero elsewhere."""
        _, vjp = jax.vjp(lambda params: self._embed(params, microbatch), self.whole("embed"))
        return self.add(grads, {"embed": vjp(dx)[0]})

    # ---------------------------------------------------------------- H: the microbatch that leaves
    @jax.named_scope("head")
    def head(self, grads: Tree, microbatch: jax.Array, y: jax.Array) -> tuple[Tree, jax.Array, jax.Array]:
        """Gradients with the head's added, loss of the microbatch (each token counted on one rank), dy. y and dy: on the last stage."""
        labels, weights = self.batch.labels_MBT[microbatch], self.batch.weights_MBT[microbatch]
        params = self.model.head_params({name: self.whole(name) for name in ("head", "embed")})
        loss, vjp = jax.vjp(lambda p, y: self.model.loss(p, y, labels, weights), params, parallel.from_last_stage(y))
        dparams, dy = vjp(jnp.ones_like(loss))
        return self.add(grads, dparams), parallel.only_on(parallel.reports_loss(), loss), dy

    # ---------------------------------------------------------------- F and B: one chunk of layers
    def layer(self, chunk: jax.Array, i: Any, after: jax.Array | None = None) -> tuple[jax.Array, jax.Array, Tree]:
        """(memory row, layer index or -1, weights put together) of the chunk's i-th layer.

        after: ZeRO 3 gathers again once this is known. Written-out layers would else gather once, and hold all weights until then.
        """
        row = chunk * self.layers_per_chunk + i
        layers = self.weights["layers"]
        picked = (layers[i] if isinstance(layers, list)
                  else jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, row, 0, keepdims=False), layers))
        if after is not None and not self.scan_layers and self.layout.zero.gather_weights == "use":
            picked, _ = lax.optimization_barrier((picked, after))
        return row, self.layer_of_row[row], f32(self.layout.gather(picked, self.layout.leaves["layers"], "use"))

    def apply(self, w: Tree, x: jax.Array, layer: jax.Array, context: Context) -> jax.Array:
        y = self.model.block(w, x, layer, context)
        return jnp.where(layer >= 0, y, x) if self.uneven else y

    def _layer_vjp(self, w: Tree, x: jax.Array, layer: jax.Array, context: Context):
        """y, the residuals to keep, and how to rebuild the vjp: its tree and, per leaf, whether it is known or kept."""
        y, vjp = jax.vjp(lambda w, x: self.apply(w, x, layer, context), w, x)
        leaves, tree = vjp_leaves(vjp)
        known = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((w, layer, context)))}
        kept = {id(leaf): leaf for leaf in leaves if id(leaf) not in known}
        place = {key: i for i, key in enumerate(kept)}
        recipe = [(True, known[id(leaf)]) if id(leaf) in known else (False, place[id(leaf)]) for leaf in leaves]
        return y, list(kept.values()), (tree, recipe)

    def _probe(self) -> tuple[list[jax.ShapeDtypeStruct], Any]:
        """One layer traced: the shapes of what it keeps, which are the ring's leaves, and how to rebuild its vjp."""
        rebuild = None

        def trace(x: jax.Array) -> list[jax.Array]:
            nonlocal rebuild
            zero = parallel.vary(jnp.int32(0))
            _, layer, w = self.layer(zero, 0)
            _, kept, rebuild = self._layer_vjp(w, x, layer, self.batch.context(zero))
            return kept
        return jax.eval_shape(trace, self.activation), rebuild

    def each_layer(self, one: Callable[[Any, Any], Any], carry: Any, reverse: bool = False) -> Any:
        """carry = one(carry, i) for every layer i of a chunk: in a loop of the program, or written out layer by layer."""
        if self.scan_layers:
            layers = parallel.vary(jnp.arange(self.layers_per_chunk, dtype=jnp.int32))
            return lax.scan(lambda carry, i: (one(carry, i), None), carry, layers, reverse=reverse)[0]
        for i in reversed(range(self.layers_per_chunk)) if reverse else range(self.layers_per_chunk):
            carry = one(carry, i)
        return carry

    def empty_ring(self, slots: int, blank: Callable[..., jax.Array] = jnp.zeros) -> Tree:
        """Residuals of `slots` (chunk, microbatch) pairs: leaves [slots, layers of a chunk, ...], or with layers written out one
        list a layer of leaves [slots, ...]; of one slot the compiler then keeps the values where they were made. blank: zeros where
        a slot may be read before it is written (a bubble multiplies it by zero), jax.lax.empty where none is."""
        def empty(*sizes: int) -> list[jax.Array]:
            return [parallel.vary(blank((*sizes, *k.shape), k.dtype)) for k in self.kept]
        return empty(slots, self.layers_per_chunk) if self.scan_layers else [empty(slots) for _ in range(self.layers_per_chunk)]

    def keep(self, ring: Tree, kept: list[jax.Array], slot: jax.Array, i: Any) -> Tree:
        """The ring with what layer i keeps in a slot."""
        if self.scan_layers:
            return [put(leaf, k, slot, i) for leaf, k in zip(ring, kept, strict=True)]
        return [[put(leaf, k, slot) for leaf, k in zip(own, kept, strict=True)] if j == i else own for j, own in enumerate(ring)]

    def take(self, ring: Tree, slot: jax.Array, i: Any) -> list[jax.Array]:
        return [leaf[slot, i] for leaf in ring] if self.scan_layers else [leaf[slot] for leaf in ring[i]]

    @jax.named_scope("forward.stage")
    def forward(self, ring: Tree, x: jax.Array, microbatch: jax.Array, chunk: jax.Array, slot: jax.Array):
        """(ring with the chunk's residuals in `slot`, output)."""
        context = self.batch.context(microbatch)

        @jax.named_scope("layer")
        def one(carry, i):
            x, ring = carry
            _, layer, w = self.layer(chunk, i)
            y, kept, _ = self._layer_vjp(w, x, layer, context)
            return y, self.keep(ring, kept, slot, i)

        y, ring = self.each_layer(one, (x, ring))
        return ring, y

    @jax.named_scope("forward.stage")
    def forward_only(self, x: jax.Array, microbatch: jax.Array, chunk: jax.Array) -> jax.Array:
        context = self.batch.context(microbatch)

        @jax.named_scope("layer")
        def one(x, i):
            _, layer, w = self.layer(chunk, i)
            return self.apply(w, x, layer, context)

        return self.each_layer(one, x)

    @jax.named_scope("backward.stage")
    def backward(self, ring: Tree, grads: Tree, dy: jax.Array, microbatch: jax.Array, chunk: jax.Array, slot: jax.Array,
                 first: bool = False):
        """(gradients with the chunk's added, dx). With dy = 0 on any finite residuals it adds exact zeros. first: nothing has been
        added to the layers' gradients yet, so that they need not be read."""
        tree, recipe = self.rebuild
        context = self.batch.context(microbatch)

        @jax.named_scope("layer")
        def one(carry, i):
            dy, layers = carry
            row, layer, w = self.layer(chunk, i, after=dy)
            known = jax.tree.leaves((w, layer, context))
            kept = self.take(ring, slot, i)
            vjp = jax.tree.unflatten(tree, [known[j] if is_known else kept[j] for is_known, j in recipe])
            dw, dx = vjp(dy)
            dw = self.layout.scatter(dw, self.layout.leaves["layers"], "use", self.reduce_dtype)
            return dx, jax.tree.map(lambda g, d: put(g, d, row) if first else g.at[row].add(d), layers, dw)

        dx, layers = self.each_layer(one, (dy, grads["layers"]), reverse=True)
        return {**grads, "layers": layers}, dx

    # ---------------------------------------------------------------- weights and gradients
    def whole(self, part: str) -> Tree:
        return f32(self.layout.gather(self.weights[part], self.layout.leaves[part], "use"))

    def add(self, grads: Tree, parts: Tree) -> Tree:
        """Gradients with those of some parts added, scattered first where the ZeRO stage does that per use."""
        leaves = {name: self.layout.leaves[name] for name in parts}
        parts = self.layout.scatter(parts, leaves, "use", self.reduce_dtype)
        return {**grads, **{name: jax.tree.map(jnp.add, grads[name], part) for name, part in parts.items()}}

    def zero_grads(self, layers: Callable[..., jax.Array] = jnp.zeros) -> Tree:
        """Gradients to add to. layers: jax.lax.empty where those of the layers are set before they are read."""
        def start(blank: Callable[..., jax.Array], leaves: Tree) -> Tree:
            return self.layout.map(lambda leaf: parallel.vary(blank(self.layout.grad_shape(leaf), jnp.float32)), leaves=leaves)
        return {name: start(layers if name == "layers" else jnp.zeros, leaves) for name, leaves in self.layout.leaves.items()}


# ------------------------------------------------------------------ one stage: plain gradient accumulation
def _accumulate(work: Work, num_microbatches: int) -> tuple[jax.Array, Tree]:
    zero = parallel.vary(jnp.int32(0))

    @jax.named_scope("microbatch")
    def one(carry, m):
        loss, ring, grads = carry
        ring, y = work.forward(ring, work.embed(m), m, zero, zero)
        grads, microbatch_loss, dy = work.head(grads, m, y)
        grads, dx = work.backward(ring, grads, dy, m, zero, zero, first=once)
        return (loss + microbatch_loss, ring, work.embed_backward(grads, m, dx)), None

    once = num_microbatches == 1
    blank = lax.empty if once and work.scan_layers else jnp.zeros  # written out, zeros are left out anyway, and empty memory is held early
    start = (parallel.vary(jnp.float32(0)), work.empty_ring(1, lax.empty), work.zero_grads(blank))
    (loss, _, grads), _ = lax.scan(one, start, parallel.vary(jnp.arange(num_microbatches, dtype=jnp.int32)))
    return loss, grads


# ------------------------------------------------------------------ several stages: ticks of a table
def _run_table(table: Table, tick: Callable[[str, Carry, dict[str, jax.Array]], Carry], carry: Carry) -> Carry:
    """Scan the table's ticks: runs of equal ticks inside repeated groups, so that the program does not grow with M."""
    columns = np.stack([np.asarray(table.rows[name], np.int32) for name in COLUMNS], axis=1)  # [tick, column, stage]

    def run(kind: str) -> Callable[[Carry, jax.Array], tuple[Carry, None]]:
        @jax.named_scope(f"tick.{kind}")
        def one(carry: Carry, row: jax.Array) -> tuple[Carry, None]:
            mine = parallel.vary(row)[:, parallel.stage()]
            return tick(kind, carry, dict(zip(COLUMNS, mine, strict=True))), None
        return one

    start = 0
    for segment in segments(table.kinds):
        length = sum(ticks for _, ticks in segment.runs)
        rows = columns[start : start + segment.repeats * length].reshape(segment.repeats, length, *columns.shape[1:])
        start += segment.repeats * length

        def group(carry: Carry, rows: jax.Array, runs=segment.runs) -> tuple[Carry, None]:
            at = 0
            for kind, ticks in runs:
                carry, _ = lax.scan(run(kind), carry, rows[at : at + ticks])
                at += ticks
            return carry, None

        carry = lax.scan(group, carry, jnp.asarray(rows))[0] if segment.repeats > 1 else group(carry, jnp.asarray(rows[0]))[0]
    return carry


def _pipeline(work: Work, table: Table) -> tuple[jax.Array, Tree]:
    last = parallel.stage() == table.num_stages - 1

    def tick(kind: str, carry: Carry, r: dict[str, jax.Array]) -> Carry:
        inbox, inbox_dy, ring, grads, loss = (carry[k] for k in ("forward", "backward", "ring", "grads", "loss"))
        y = dx = None
        if "F" in kind:
            ring, y = work.forward(ring, inbox[r["f_src"]], r["f_mb"], r["f_chunk"], r["f_slot"])
        if "H" in kind and y is not None:
            grads, microbatch_loss, dy = work.head(grads, r["h_mb"], y)
            loss, inbox_dy = loss + microbatch_loss, put(inbox_dy, dy, r["h_dst"])
        if "G" in kind:
            arrived = parallel.only_on(last & (r["g_ok"] > 0), inbox_dy[r["g_src"]])
            grads = work.embed_backward(grads, r["g_mb"], arrived)
        if "B" in kind:  # a bubble has dy = 0 and reads residuals of a real forward: it adds zeros
            dy = parallel.only_on(r["b_ok"] > 0, inbox_dy[r["b_src"]])
            grads, dx = work.backward(ring, grads, dy, r["b_mb"], r["b_chunk"], r["b_slot"])
        if y is not None:
            inbox = put(inbox, parallel.send_forward(y), r["xf_dst"])
        if "E" in kind:
            inbox = put(inbox, work.embed(r["e_mb"]), r["e_dst"])
        if dx is not None:
            inbox_dy = put(inbox_dy, parallel.send_backward(dx), r["xb_dst"])
        return {"forward": inbox, "backward": inbox_dy, "ring": ring, "grads": grads, "loss": loss}

    carry = _run_table(table, tick, {
        "forward": _inbox(work, table.forward_slots), "backward": _inbox(work, table.backward_slots),
        "ring": work.empty_ring(table.ring_slots), "grads": work.zero_grads(), "loss": parallel.vary(jnp.float32(0))})
    return carry["loss"], carry["grads"]


def _inbox(work: Work, slots: int) -> jax.Array:
    return parallel.vary(jnp.zeros((slots, *work.activation.shape), work.activation.dtype))


def loss_and_grads(work: Work, table: Table) -> tuple[jax.Array, Tree]:
    """One rank's part of the loss, fp32 [], and its partial gradients, fp32, scattered per use where ZeRO says so."""
    return _accumulate(work, table.num_microbatches) if table.num_stages == 1 else _pipeline(work, table)


def outputs(work: Work, table: Table, read: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Forward only: read(y, microbatch) of every microbatch, stacked [M, ...]. y: [B, T/tp, D], on every stage.

    table: a "forward" table. Evaluation reads losses, sampling reads logits.
    """
    if table.num_stages == 1:
        @jax.named_scope("microbatch")
        def one(_, m):
            return None, read(work.forward_only(work.embed(m), m, parallel.vary(jnp.int32(0))), m)
        return lax.scan(one, None, parallel.vary(jnp.arange(table.num_microbatches, dtype=jnp.int32)))[1]

    def tick(kind: str, carry: Carry, r: dict[str, jax.Array]) -> Carry:
        inbox, out = carry["forward"], carry["out"]
        y = None
        if "F" in kind:
            y = work.forward_only(inbox[r["f_src"]], r["f_mb"], r["f_chunk"])
        if "H" in kind and y is not None:
            value = read(parallel.from_last_stage(y), r["h_mb"])
            out = put(out, value, r["h_mb"])
        if y is not None:
            inbox = put(inbox, parallel.send_forward(y), r["xf_dst"])
        if "E" in kind:
            inbox = put(inbox, work.embed(r["e_mb"]), r["e_dst"])
        return {"forward": inbox, "out": out}

    shape = jax.eval_shape(read, work.activation, parallel.vary(jnp.int32(0)))
    out = parallel.vary(jnp.zeros((table.num_microbatches, *shape.shape), shape.dtype))
    return _run_table(table, tick, {"forward": _inbox(work, table.forward_slots), "out": out})["out"]
