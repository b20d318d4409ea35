"""Memory of one GPU by line, from closed formulas: what is at rest, what lives for the whole step, and its largest workspace.

"This program" is counted as it is built: fp32 masters, moments and gradient sums, weights cast once a step, a ring of
residuals with the slots of the schedule, a chunked loss. `planner.paper` counts as papers do. Nothing is compiled.
Shapes: B rows and T tokens of a microbatch on one data-parallel rank, t = T / tp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from jaxmeg.arch import Arch
from jaxmeg.config import Axis, Config, Resolved
from jaxmeg.models.decoder import REMAT
from jaxmeg.ops.vocab import CHUNK_LOGITS
from jaxmeg.pipeline.ticks import group_sizes
from jaxmeg.planner.leaves import Leaf, moment_elements

F32 = 4

GATHERED_COPIES = 7
"""Values of the residual stream's width for all tokens, alive at once in the backward pass of a layer under tensor parallelism: counted in
compiled programs."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of memory."""

    name: str
    bytes: int
    formula: str
    """With the numbers in it."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one GPU. State is at rest; held lives through a step; workspace is the largest of the phases, which take turns."""

    state: tuple[Line, ...]
    held: tuple[Line, ...]
    phases: tuple[Line, ...]

    @property
    def workspace(self) -> Line:
        return max(self.phases, key=lambda line: line.bytes)

    @property
    def temporaries(self) -> int:
        """What a compiled program calls temporaries."""
        return sum(line.bytes for line in self.held) + self.workspace.bytes

    @property
    def total(self) -> int:
        """State and temporaries: what a compiled program asks for."""
        return sum(line.bytes for line in self.state) + self.temporaries

    @property
    def lines(self) -> tuple[Line, ...]:
        """What adds up to `total`; lines of nothing are left out."""
        return tuple(line for line in (*self.state, *self.held, self.workspace) if line.bytes)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The numbers that the formulas are made of."""

    arch: Arch
    mesh: Mapping[Axis, int]
    itemsize: int
    """Bytes of an element of the compute dtype."""
    rows: int
    """B."""
    tokens: int
    """T."""
    chunks: int
    num_microbatches: int
    layers_per_chunk: int
    """Memory rows, the longest stage's."""
    vocab_rows: int
    """Of a token table on one GPU."""

    @property
    def pp(self) -> int:
        return self.mesh[Axis.PP]

    @property
    def tp(self) -> int:
        return self.mesh[Axis.TP]

    @property
    def all_tokens(self) -> int:
        """B * T."""
        return self.rows * self.tokens

    @property
    def heads(self) -> int:
        return -(-self.arch.num_heads // self.tp)

    @property
    def kv_heads(self) -> int:
        return max(self.arch.num_kv_heads // self.tp, 1)

    @property
    def mlp(self) -> int:
        return self.arch.mlp_dim // self.tp


def sizes_of(config: Config, resolved: Resolved, compute: str) -> Sizes:
    ranks = prod(resolved.mesh[Axis(axis)] for axis in resolved.rules["vocab"])
    return Sizes(
        arch=resolved.arch, mesh=resolved.mesh, itemsize=4 if compute == "fp32" else 2, rows=resolved.microbatch,
        tokens=config.data.seq_len, chunks=resolved.chunks, num_microbatches=resolved.num_microbatches,
        layers_per_chunk=max(resolved.layer_split), vocab_rows=resolved.padded_vocab // ranks)


# ------------------------------------------------------------------ activations
def kept_bytes(s: Sizes, remat: str) -> dict[str, int]:
    """Bytes that one layer keeps of one token (of T) for its backward pass, by name; `models.decoder.REMAT` says what is kept.
    FP8's scales are left out: a scalar a matrix."""
    arch, size = s.arch, s.itemsize
    gated = 2 if arch.activation == "swiglu" else 1
    named = {
        "gate_up": gated * s.mlp * size,
        "attention": s.heads * arch.head_dim * size,
        "lse": s.heads * F32,
        "qkv": (s.heads + 2 * s.kv_heads) * arch.head_dim * size,
        "middle": arch.embed_dim * size // s.tp,
    }
    return {"input": arch.embed_dim * size // s.tp} | {name: size for name, size in named.items() if name in REMAT[remat]}


def ring_slots(schedule: str | None, stages: int, chunks: int, num_microbatches: int) -> int:
    """Residuals of (chunk, microbatch) pairs that a stage holds at once, by a named schedule's closed form.

    One slot more where stages idle before a slot is free again: a bubble's forward writes it.
    """
    P, V, M = stages, chunks, num_microbatches
    if P == 1:
        return 1
    if schedule == "gpipe":
        return M * V + 1
    largest = max(group_sizes(P, M))
    return min(P * V + P - 1 + (V - 1) * max(largest - P, 0), M * V + 1)


def inbox_slots(schedule: str | None, stages: int, num_microbatches: int) -> int:
    """Activations and their gradients that wait between stages; gpipe's gradients all wait."""
    if stages == 1:
        return 0
    return 2 + (num_microbatches if schedule == "gpipe" else 2)


# ------------------------------------------------------------------ all of it
def plan_memory(config: Config, resolved: Resolved, leaves: list[Leaf], compute: str = "bf16") -> Memory:
    """Of one GPU of the largest stage. compute: fp32, bf16 or fp16."""
    s = sizes_of(config, resolved, compute)
    return Memory(state=_state(config, leaves), held=_held(s, config, resolved, leaves),
                  phases=(_head(s, config, leaves), _layer(s, config, leaves)))


def _state(config: Config, leaves: list[Leaf]) -> tuple[Line, ...]:
    shard, moments = sum(leaf.shard for leaf in leaves), sum(moment_elements(leaf, config) for leaf in leaves)
    cut = f", ZeRO {config.layout.zero} over {max(leaf.zero_ranks for leaf in leaves)}" if config.layout.zero else ""
    return (Line(name="masters", bytes=F32 * shard, formula=f"4 x {shard:,} parameters on this GPU{cut}"),
            Line(name="moments", bytes=F32 * moments, formula=f"4 x {moments:,} ({config.optim.name}){cut}"))


def _held(s: Sizes, config: Config, resolved: Resolved, leaves: list[Leaf]) -> tuple[Line, ...]:
    zero, M = config.layout.zero, s.num_microbatches
    sums = sum(_sum_elements(leaf, zero) for leaf in leaves if not (_made_late(s) and leaf.part == "embed" and not s.arch.tied))
    kept = kept_bytes(s, config.layout.remat)
    slots = ring_slots(resolved.schedule, s.pp, s.chunks, M)
    ring = slots * s.layers_per_chunk * s.all_tokens * sum(kept.values())
    inbox = inbox_slots(resolved.schedule, s.pp, M)
    one = s.all_tokens // s.tp * s.arch.embed_dim * s.itemsize
    what = " + ".join(f"{size:,} {name}" for name, size in kept.items())
    return (
        Line(name="gradients", bytes=F32 * sums, formula=f"4 x {sums:,}, summed in fp32" + (", sharded" if zero >= 2 else "")
             + (", without the embedding's, which is made last" if _made_late(s) and not s.arch.tied else "")),
        Line(name="weights", bytes=_weights(s, zero, leaves),
             formula=f"compute copy, {s.itemsize} bytes each" + (", sharded" if zero == 3 else ", whole")),
        Line(name="activations", bytes=ring, formula=f"{slots} microbatches of a chunk in flight x {s.layers_per_chunk} layers x "
             f"{s.all_tokens:,} tokens x ({what}) bytes; remat {config.layout.remat}"),
        Line(name="inboxes", bytes=inbox * one, formula=f"{inbox} slots x {one:,} bytes between stages"),
    )


def _made_late(s: Sizes) -> bool:
    """One microbatch, one stage: there are no sums, each gradient takes its place when it is made."""
    return s.pp == 1 and s.num_microbatches == 1


def _sum_elements(leaf: Leaf, zero: int) -> int:
    return leaf.shard if zero >= 2 else leaf.whole


def _weights(s: Sizes, zero: int, leaves: list[Leaf]) -> int:
    """Weights as the forward and backward pass read them. fp32 ones are the masters, unless ZeRO 1 or 2 puts them together."""
    gathered = zero in (1, 2)
    def one(leaf: Leaf) -> int:
        elements = leaf.shard if zero == 3 else leaf.whole
        if leaf.is_matrix and s.itemsize == 2:
            return 2 * elements
        return F32 * elements if gathered and leaf.zero_ranks > 1 else 0
    return sum(map(one, leaves))


def _head(s: Sizes, config: Config, leaves: list[Leaf]) -> Line:
    """Logits of a chunk and their gradient, and the table's gradient before it is added or scattered."""
    N, D = s.all_tokens, s.arch.embed_dim
    logits = min(N * s.vocab_rows, max(CHUNK_LOGITS, s.vocab_rows))
    table, zero = s.vocab_rows * D, config.layout.zero
    gathered = s.itemsize * table if zero == 3 else 0
    hidden = N * D * (s.itemsize + F32)
    late = F32 * sum(_sum_elements(leaf, zero) for leaf in leaves if leaf.part == "layers") if _made_late(s) else 0
    scattered, several = zero >= 2, N * s.vocab_rows > CHUNK_LOGITS
    copies = 1 + several if scattered else int(not _made_late(s))  # scattered: a chunk's, and the sum of those before it
    return Line(name="loss", bytes=max(logits * (F32 + s.itemsize) + copies * F32 * table + gathered + hidden - late, 0),
                formula=f"{logits:,} logits x (4 + {s.itemsize}) + hidden states {hidden:,}"
                + (f" + {copies} x 4 x {table:,} of the table's gradient" if copies else "")
                + (f" + table gathered {gathered:,}" if gathered else "")
                + (f" - gradients of layers, made later, {late:,}" if late else ""))


def _layer(s: Sizes, config: Config, leaves: list[Leaf]) -> Line:
    """Inside the backward pass of one layer: the MLP's hidden values and their gradients, its weights gathered, a gradient to be added."""
    N, gated, zero = s.all_tokens, 2 if s.arch.activation == "swiglu" else 1, config.layout.zero
    inside = s.itemsize * ((gated + 2) * s.mlp + (GATHERED_COPIES if s.tp > 1 else 1) * s.arch.embed_dim)
    layers = [leaf for leaf in leaves if leaf.part == "layers"]
    gathered = sum((s.itemsize if leaf.is_matrix else F32) * leaf.whole // leaf.rows for leaf in layers) if zero == 3 else 0
    grads = 0 if _made_late(s) and zero < 2 else F32 * max(leaf.whole // leaf.rows for leaf in layers)
    return Line(name="one layer", bytes=N * inside + gathered + grads,
                formula=f"{N:,} tokens x {inside:,} bytes inside it" + (f" + {gathered:,} of weights gathered" if gathered else "")
                + (f" + {grads:,} of a gradient" if grads else ""))
