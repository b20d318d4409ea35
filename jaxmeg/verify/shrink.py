"""A config made small enough to be compared on a CPU, without what makes its layouts differ.

Norms, activations, biases, tied tables, positions, dropout, documents, remat, schedule and rule table stay. A size becomes the
smallest one that stands to the mesh as it did: the same remainder over stages, ranks and ZeRO groups. Needs no jax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import lcm, prod

from jaxmeg.config import Axis, Config, DataConfig, Resolved, default_microbatch, resolve
from jaxmeg.validate.mesh_rules import num_ranks_zero

LAYERS, VOCAB, EMBED, MLP_RATIO, HEAD_DIM, SEQ_LEN, ROWS, FACTORED_DIM = 2, 64, 32, 2, 8, 16, 16, 16
"""Sizes that a config is brought down to where its mesh allows it."""
COMMON_RANKS = 16  # a vocabulary keeps its remainder over so many ranks at least, so that most layouts share one reference

Keeps = Callable[[int], object]


def shrink(configs: Sequence[Config], num_devices: int) -> tuple[list[Config], list[str]]:
    """Configs without problems that differ in their layout alone -> (the same, small, with one model; what was changed, a line each).

    No size grows. A module of the user's keeps its shape: only its batch shrinks.
    """
    sizes = [resolve(config, num_devices) for config in configs]
    if configs[0].model.module is not None:
        common, lines = configs[0], []
    else:
        common, lines = _shrink_model(configs, sizes)
    small = []
    for config, r in zip(configs, sizes, strict=True):
        data = replace(config.data, seq_len=common.data.seq_len)
        small.append(_shrink_batch(replace(config, model=common.model, optim=common.optim, data=data), r))
    before, after = configs[0].data.global_batch, sorted({config.data.global_batch for config in small})
    if after[0] < before:
        lines.append(f"data.global_batch {before:,} -> {' or '.join(map(str, after))}: up to twice as many microbatches as stages")
    return small, lines


def smallest(low: int, size: int, keeps: Keeps) -> int:
    """The smallest number from `low` up for which `keeps` gives what it gives for `size`; at most `size`."""
    return next((n for n in range(min(low, size), size) if keeps(n) == keeps(size)), size)


def _shrink_model(configs: Sequence[Config], sizes: Sequence[Resolved]) -> tuple[Config, list[str]]:
    """The first config with the small model, row length and factored_dim, and the lines."""
    config, arch = configs[0], sizes[0].arch

    def ranks(dim: str) -> set[int]:
        return {prod(r.mesh[Axis(axis)] for axis in r.rules[dim]) for r in sizes}

    pieces = {len(r.layer_split) for r in sizes}
    zero = {num_ranks_zero(r.mesh) for c, r in zip(configs, sizes, strict=True) if c.layout.zero}
    tp, kv_tp = {r.mesh[Axis.TP] for r in sizes}, ranks("kv_heads")
    group = arch.num_heads // arch.num_kv_heads

    def whole(n: int) -> list[bool]:
        return [n % z == 0 for z in sorted(zero)]

    def kv_keeps(n: int) -> object:
        return [((n > t) - (n < t), n % t == 0, t % n == 0, n * group % t == 0) for t in sorted(kv_tp)]

    num_layers = smallest(LAYERS, arch.num_layers, lambda n: [(n >= p, n % p) for p in sorted(pieces)])
    vocab_size = smallest(VOCAB, arch.vocab_size, lambda n: n % lcm(COMMON_RANKS, *ranks("vocab")))
    num_kv_heads = smallest(1, arch.num_kv_heads, kv_keeps)
    head_dim = smallest(HEAD_DIM, arch.head_dim, lambda n: (n % 2, whole(n)))
    embed_dim = smallest(EMBED, arch.embed_dim, whole)
    mlp_dim = smallest(MLP_RATIO * embed_dim, arch.mlp_dim, lambda n: (whole(n), [n % t for t in sorted(ranks("mlp"))]))
    seq_len = smallest(SEQ_LEN, config.data.seq_len, lambda n: [n % t for t in sorted(tp)])
    new = {"num_layers": num_layers, "vocab_size": vocab_size, "num_heads": num_kv_heads * group, "num_kv_heads": num_kv_heads,
           "head_dim": head_dim, "embed_dim": embed_dim, "mlp_dim": mlp_dim}
    if arch.positions == "learned":
        new["max_seq_len"] = smallest(seq_len + (arch.max_seq_len > config.data.seq_len), arch.max_seq_len, whole)
    if arch.sliding_window is not None and arch.sliding_window > seq_len // 2:  # what hid nothing hides nothing
        new["sliding_window"] = max(seq_len // 2, 1) if arch.sliding_window < config.data.seq_len else arch.sliding_window
    changed = {name: size for name, size in new.items() if size != getattr(arch, name)}
    lines = [f"model.{name} {getattr(arch, name):,} -> {size}: {_KEPT[name]}" for name, size in changed.items()]
    if seq_len != config.data.seq_len:
        lines.append(f"data.seq_len {config.data.seq_len:,} -> {seq_len}: {_KEPT['seq_len']}")
    optim = config.optim
    if optim.name == "adafactor" and FACTORED_DIM < optim.factored_dim <= min(arch.embed_dim, arch.mlp_dim):
        lines.append(f"optim.factored_dim {optim.factored_dim} -> {FACTORED_DIM}: statistics of matrices stay factored")
        optim = replace(optim, factored_dim=FACTORED_DIM)
    small = replace(config, model=replace(config.model, **changed), optim=optim, data=replace(config.data, seq_len=seq_len))
    return small, lines


_KEPT = {
    "num_layers": "the same remainder over stages x chunks",
    "vocab_size": "the same remainder over the ranks that share it",
    "num_heads": "as many a kv head as before",
    "num_kv_heads": "still as many as tp, more or fewer",
    "head_dim": "what ZeRO divides, it divides still",
    "embed_dim": "what ZeRO divides, it divides still",
    "mlp_dim": "still a multiple of tp; what ZeRO divides, it divides still",
    "max_seq_len": "still at least a row; what ZeRO divides, it divides still",
    "sliding_window": "still shorter than a row, or not",
    "seq_len": "still a multiple of tp",
}


def _shrink_batch(config: Config, sizes: Resolved) -> Config:
    """Fewer microbatches (M mod pp stays, and M < pp), with fewer rows each. Those of a schedule of the user's stay."""
    pp, num = sizes.mesh[Axis.PP], sizes.num_microbatches
    ranks = config.data.global_batch // sizes.local_rows
    if not sizes.user_schedule and num > 2 * pp:
        num = 2 * pp + num % pp
    microbatch = min(sizes.microbatch, max(-(-ROWS // (ranks * num)), 1))
    default = num if sizes.user_schedule else num * microbatch // default_microbatch(num * microbatch, pp)
    data = replace(config.data, global_batch=ranks * num * microbatch)
    return replace(config, data=data, pipeline=replace(config.pipeline, microbatch=None if default == num else microbatch))


def documents_apart(data: DataConfig) -> bool:
    """Whether rows hold documents that do not see each other. The text that ships with the project is one document."""
    return data.train is not None and data.separate and data.packing != "none"
