"""What a planned step sends over each mesh axis, and over which links, per GPU.

Counted like the compiled program's collectives (`hlo`): `bytes` is of the gathered, unscattered tensor, `runs` how often one
step does it. Small sums (softmax, norms, loss) are left out: their time is their number, not their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxmeg.config import Axis, Config, Resolved
from jaxmeg.models.decoder import REMAT
from jaxmeg.planner.chips import Chip
from jaxmeg.planner.leaves import Leaf
from jaxmeg.planner.memory import F32, Sizes
from jaxmeg.planner.rates import Rates

WIRE = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "collective-permute": 1}
"""How often a ring sends (n - 1) / n of a tensor; a permute sends all of it."""


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One kind of collective."""

    what: str
    op: str
    axis: Axis
    runs: int
    bytes: int
    """Of one run, the whole tensor."""
    beside: str
    """What it can run beside: "nothing", "layer" (the matmuls of one layer) or "step"."""


def ticks(s: Sizes) -> int:
    """Ticks with a forward, bubbles included; as many have a backward."""
    M, P, V = s.num_microbatches, s.pp, s.chunks
    return M * V + P - 1 if M >= P else P * V + M - 1


def vocabulary_ticks(s: Sizes) -> int:
    """Ticks that embed; as many take the embedding's gradient."""
    return s.num_microbatches + (s.pp * s.chunks if s.pp > 1 else 0)


def layer_runs(s: Sizes) -> int:
    """Forwards of a layer on one GPU, bubbles included; as many backwards."""
    return ticks(s) * s.layers_per_chunk


def table_gathers(s: Sizes) -> int:
    """At ZeRO 3, how often the embedding is put together: in the ticks that embed, of which the last to warm up shares the next one's.
    Its gradient needs no table."""
    return vocabulary_ticks(s) - (s.pp > 1)


def transfers(s: Sizes, config: Config, resolved: Resolved, leaves: list[Leaf]) -> list[Transfer]:
    """Of one step, those that move something."""
    every = [*_tensor(s, config), *_pipeline(s, resolved), *_zero(s, config, leaves), *_replicas(s, config, leaves)]
    return [t for t in every if resolved.mesh[t.axis] > 1 and t.runs and t.bytes]


def _tensor(s: Sizes, config: Config) -> Iterator[Transfer]:
    """Tokens are gathered for attention and MLP and their sums scattered; backward again, and the gathers a second time."""
    activation, runs = s.all_tokens * s.arch.embed_dim * s.itemsize, layer_runs(s)
    scatters = 4 if "middle" in REMAT[config.layout.remat] else 5
    embeds = vocabulary_ticks(s)
    def send(what: str, op: str, count: int, size: int = activation) -> Transfer:
        return Transfer(what=what, op=op, axis=Axis.TP, runs=count, bytes=size, beside="nothing")
    yield send("tokens of layers", "all-gather", 6 * runs)
    yield send("partial sums of layers", "reduce-scatter", scatters * runs)
    yield send("tokens of embedding and head", "all-gather", embeds + s.num_microbatches)
    yield send("embedding", "reduce-scatter", embeds)
    yield send("gradient of the head", "reduce-scatter", s.num_microbatches, activation // s.itemsize * F32)


def _pipeline(s: Sizes, resolved: Resolved) -> Iterator[Transfer]:
    part = s.all_tokens // s.tp * s.arch.embed_dim
    yield Transfer(what="between stages", op="collective-permute", axis=Axis.PP, runs=2 * ticks(s), bytes=part * s.itemsize, beside="layer")
    shared = "pp" in resolved.rules["vocab"]
    embeds = 2 * vocabulary_ticks(s) if shared else 0
    yield Transfer(what="embedding and head on all stages", op="all-reduce", axis=Axis.PP, runs=embeds + s.num_microbatches,
                   bytes=part * s.itemsize, beside="nothing")
    if shared:
        yield Transfer(what="gradient of the head", op="all-reduce", axis=Axis.PP, runs=s.num_microbatches, bytes=part * F32,
                       beside="nothing")


def _zero(s: Sizes, config: Config, leaves: list[Leaf]) -> Iterator[Transfer]:
    """Weights put together and gradients scattered, once a step or each time they are used."""
    zero, M = config.layout.zero, s.num_microbatches
    reduced = F32 if config.precision.reduce == "fp32" or zero == 1 else 2
    for part in ("layers", "embed", "head"):
        cut = [leaf for leaf in leaves if leaf.part == part and leaf.zero_ranks > 1]
        weights = sum((s.itemsize if leaf.is_matrix else F32) * leaf.whole for leaf in cut)
        grads, rows = sum(leaf.whole for leaf in cut), max((leaf.rows for leaf in cut), default=1)
        forward = {"layers": layer_runs(s), "embed": vocabulary_ticks(s), "head": M}[part]
        gathers = {"layers": 2 * layer_runs(s), "embed": table_gathers(s), "head": M}[part]
        often, beside = zero == 3, "layer" if part == "layers" else "nothing"
        if zero:
            yield Transfer(what=f"weights of {part}", op="all-gather", axis=Axis.DP, runs=gathers if often else 1,
                           bytes=weights // rows if often else weights, beside=beside if often else "nothing")
            each = zero >= 2
            yield Transfer(what=f"gradients of {part}", op="reduce-scatter", axis=Axis.DP, runs=forward if each else 1,
                           bytes=(reduced if each else F32) * (grads // rows if each else grads), beside=beside if each else "nothing")


def _replicas(s: Sizes, config: Config, leaves: list[Leaf]) -> Iterator[Transfer]:
    """Gradients of what is held whole, once a step."""
    dp = F32 * sum(leaf.whole for leaf in leaves if leaf.zero_ranks == 1)
    yield Transfer(what="gradients held whole", op="all-reduce", axis=Axis.DP, runs=1, bytes=dp, beside="nothing")
    rep = F32 * sum(leaf.shard for leaf in leaves)
    yield Transfer(what="gradients over replicas", op="all-reduce", axis=Axis.REP, runs=1, bytes=rep, beside="nothing")


# ------------------------------------------------------------------ links
def link_gb_s(chip: Chip, rates: Rates, resolved: Resolved, axis: Axis) -> tuple[str, float]:
    """(kind, GB/s a GPU) of the slowest link of an axis. Where a group crosses hosts, each host's members share its cards."""
    inner = 1
    for other in reversed(list(Axis)):
        if other == axis:
            break
        inner *= resolved.mesh[other]
    if inner * resolved.mesh[axis] <= chip.node_gpus:
        return chip.node_link.kind, rates.node_gb_s
    return chip.network.kind, min(rates.node_gb_s, rates.network_gb_s * max(chip.node_gpus // inner, 1))


def seconds(transfer: Transfer, gb_s: float, ranks: int, rates: Rates) -> float:
    """Of all its runs. A permute is one hop."""
    permute = transfer.op == "collective-permute"
    share, hops = (1.0, 0) if permute else ((ranks - 1) / ranks, ranks - 1)
    once = rates.latency + hops * rates.hop + WIRE[transfer.op] * share * transfer.bytes / (gb_s * 1e9)
    return transfer.runs * once
