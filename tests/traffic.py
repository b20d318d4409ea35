"""Closed forms of a training step, per device: what it sends over each mesh axis, and what it keeps in memory.

They follow from the numbers of a `Case` alone, not from the package's layout or tables: `test_collectives.py` holds programs
compiled for a CPU to them, `test_aot.py` programs compiled for GPUs. Counts are runs of a collective in one step, bytes
are of the gathered (unscattered) tensor, as in `hlo.Collective`. One stage has P = pp, V = chunks, M = microbatches.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from jaxmeg import config, hlo

AXES = ("pp", "rep", "dp", "tp")
F32 = 4
Traffic = dict[tuple[str, tuple[str, ...]], tuple[int, int]]
"""(op, axes) -> (runs, bytes)."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameter leaves that are placed and moved alike."""

    leaves: int
    elements: int
    """On one device, without ZeRO; of one layer if they belong to layers."""
    axes: tuple[str, ...]
    """Mesh axes they are sharded over, without ZeRO's."""
    part: str
    norm: bool = False
    """Norm weights stay fp32 in the forward and backward pass."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A Llama, a layout of it, and the batch. Layers and microbatches are multiples of stages x chunks and of stages."""

    layers: int = 8
    embed: int = 48
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 80
    vocab: int = 112
    seq: int = 16
    rows: int = 2
    """Of a microbatch on one data-parallel rank."""
    pp: int = 1
    rep: int = 1
    dp: int = 1
    tp: int = 1
    zero: int = 0
    microbatches: int = 4
    schedule: str | None = None
    chunks: int = 1
    remat: str = "none"
    bf16: bool = False
    fp8: bool = False
    scan_layers: bool = True
    vocab_axes: tuple[str, ...] = ("pp", "tp")

    def __str__(self) -> str:
        """What differs from the defaults, as a test's name."""
        fields = {name: value for name, value in vars(self).items() if value != getattr(Case, name)}
        return "-".join(f"{name}={'+'.join(value) if name == 'vocab_axes' else value}" for name, value in fields.items())

    def config(self, rules: str | None = None) -> config.Config:
        return config.Config(
            model=config.ModelConfig(
                preset="llama3.1-8b", vocab_size=self.vocab, num_layers=self.layers, embed_dim=self.embed, mlp_dim=self.mlp,
                num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim),
            mesh=config.MeshConfig(pp=self.pp, rep=self.rep, dp=self.dp, tp=self.tp),
            layout=config.LayoutConfig(zero=self.zero, remat=self.remat, rules=rules, scan_layers=self.scan_layers),
            pipeline=config.PipelineConfig(
                schedule=self.schedule, chunks=self.chunks if self.chunks > 1 else None, microbatch=self.rows),
            data=config.DataConfig(seq_len=self.seq, global_batch=self.microbatches * self.rows * self.rep * self.dp),
            precision=config.PrecisionConfig(compute="bf16" if self.bf16 else "fp32", fp8=self.fp8, fp8_head=self.fp8))

    @property
    def mesh_shape(self) -> dict[str, int]:
        return {"pp": self.pp, "rep": self.rep, "dp": self.dp, "ep": 1, "cp": 1, "tp": self.tp}

    @property
    def devices(self) -> int:
        return self.pp * self.rep * self.dp * self.tp

    @property
    def itemsize(self) -> int:
        return 2 if self.bf16 else 4

    @property
    def ticks(self) -> int:
        """Ticks with a forward, bubbles included; as many have a backward."""
        return self.microbatches * self.chunks + self.pp - 1

    @property
    def embeds(self) -> int:
        """Ticks that embed; as many take the embedding's gradient. In a pipeline PV of them are idle."""
        return self.microbatches + self.pp * self.chunks if self.pp > 1 else self.microbatches

    @property
    def layer_runs(self) -> int:
        """Forwards of a layer on one device; as many backwards."""
        return self.ticks * self.layers // (self.pp * self.chunks)

    @property
    def activation(self) -> int:
        """Bytes of the residual stream of a microbatch with all its tokens, [B, T, D]."""
        return self.rows * self.seq * self.embed * self.itemsize

    def groups(self) -> list[Group]:
        D, H, G, K, F = self.embed, self.heads, self.kv_heads, self.head_dim, self.mlp
        whole = G % self.tp != 0  # fewer kv heads than ranks are held whole
        cut = 1 if whole else self.tp
        axes = ("pp",) if whole else ("pp", "tp")
        table = self.vocab * D // prod(self.mesh_shape[axis] for axis in self.vocab_axes)
        return [
            Group(leaves=2, elements=2 * D * G * K // cut, axes=axes, part="layers"),
            Group(leaves=5, elements=(2 * D * H * K + 3 * D * F) // self.tp, axes=("pp", "tp"), part="layers"),
            Group(leaves=2, elements=2 * D, axes=("pp",), part="layers", norm=True),
            Group(leaves=1, elements=D, axes=(), part="head", norm=True),
            Group(leaves=1, elements=table, axes=self.vocab_axes, part="head"),
            Group(leaves=1, elements=table, axes=self.vocab_axes, part="embed"),
        ]

    def layers_of(self, group: Group) -> int:
        return self.layers // self.pp if group.part == "layers" else 1

    def parameters(self, *, norms: bool = True) -> int:
        """Elements on one device, without ZeRO."""
        return sum(g.elements * self.layers_of(g) for g in self.groups() if norms or not g.norm)


def traffic(c: Case, embed_gathers: int = 1, head_gathers: int = 1, update: bool = False) -> Traffic:
    """All collectives of a step's loss and gradients, and of the optimizer's update if that is asked for.

    embed_gathers, head_gathers: at ZeRO 3, how often a table is put together. Its weights are the same in every tick, so
    the compiler may do it once for all of them.
    """
    sums: Traffic = {}

    def add(op: str, axes: Iterable[str], runs: int, total: int) -> None:
        spanned = tuple(axis for axis in AXES if axis in set(axes) and c.mesh_shape[axis] > 1)
        if spanned and runs:
            before = sums.get((op, spanned), (0, 0))
            sums[op, spanned] = (before[0] + runs, before[1] + total)

    def activations(op: str, axis: str, runs: int) -> None:
        """On one tp rank a part of the tokens, together all."""
        add(op, (axis,), runs, runs * (c.activation if axis == "tp" else c.activation // c.tp))

    M = c.microbatches
    # Layers. Forward: tokens are gathered for attention and MLP, whose partial sums are scattered. Backward: the two
    # gathers again (never kept), then the transposes of all four. Where the middle of a block is not kept, the
    # attention's output is summed again to get it.
    activations("all-gather", "tp", 2 * c.layer_runs + 4 * c.layer_runs)
    activations("reduce-scatter", "tp", 2 * c.layer_runs + (2 if c.remat == "none" else 3) * c.layer_runs)
    # Stages: one permute per direction and tick.
    activations("collective-permute", "pp", 2 * c.ticks)
    # Embedding: a rank has the rows of its ids, so tokens are summed. Its gradient goes from one stage to all.
    activations("reduce-scatter", "tp", c.embeds)
    activations("all-gather", "tp", c.embeds)
    if "pp" in c.vocab_axes:
        activations("all-reduce", "pp", 2 * c.embeds)
    # Head: the last stage's output to all stages, tokens together; maximum, sum and target of the softmax; then the ranks'
    # parts of the gradient, which are added in fp32.
    fp32 = F32 * c.activation // c.itemsize
    activations("all-reduce", "pp", M)
    activations("all-gather", "tp", M)
    add("all-reduce", c.vocab_axes, 3 * M, 3 * M * c.rows * c.seq * F32)
    add("reduce-scatter", ("tp",), M, M * fp32)
    if "pp" in c.vocab_axes:
        add("all-reduce", ("pp",), M, M * fp32 // c.tp)
    # Weights and gradients, by ZeRO stage.
    for g in c.groups():
        layers, itemsize = c.layers_of(g), F32 if g.norm else c.itemsize
        forwards, gathers = {
            "layers": (c.layer_runs, 2 * c.layer_runs), "embed": (c.embeds, embed_gathers), "head": (M, head_gathers)}[g.part]
        if c.zero in (1, 2):
            add("all-gather", ("dp",), g.leaves, layers * g.elements * itemsize)
        if c.zero == 3:
            add("all-gather", ("dp",), gathers * g.leaves, gathers * g.elements * itemsize)
        if c.zero == 1:
            add("reduce-scatter", ("dp",), g.leaves, layers * g.elements * F32)
        if c.zero in (2, 3):
            add("reduce-scatter", ("dp",), forwards * g.leaves, forwards * g.elements * F32)
        done = {*g.axes, "dp"} if c.zero else set(g.axes)
        add("all-reduce", set(AXES) - done, g.leaves, layers * g.elements * F32 // (c.dp if c.zero else 1))
        if update:  # the gradient's norm: a sum of squares per leaf
            add("all-reduce", done, g.leaves, g.leaves * F32)
    add("all-reduce", AXES, 1, F32)  # loss
    add("all-reduce", ("rep", "dp"), 1, F32)  # trained tokens
    return sums


def comparable(traffic: Traffic) -> dict[tuple[str, tuple[str, ...]], tuple[int | None, int]]:
    """Without the number of all-reduces: compilers put several into one, which moves the same bytes."""
    return {(op, axes): (None if op == "all-reduce" else runs, total) for (op, axes), (runs, total) in traffic.items()}


def found(program: hlo.Program) -> Traffic:
    """What a compiled program moves. A group of one device moves nothing: it is left out."""
    sums: Traffic = {}
    for c in program.collectives:
        if c.axes:
            runs, total = sums.get((c.op, c.axes), (0, 0))
            sums[c.op, c.axes] = (runs + c.count, total + c.count * c.bytes)
    return sums


def kept_elements(c: Case) -> dict[str, int]:
    """Elements per token and layer that a forward keeps for its backward on one device, by name."""
    D, H, G, K, F = c.embed, c.heads, c.kv_heads, c.head_dim, c.mlp
    kept = {"input": D // c.tp}
    if c.remat != "full":
        kept |= {"gate_up": 2 * F // c.tp, "attention": H * K // c.tp, "lse": H // c.tp}  # lse is fp32
    if c.remat == "none":
        kept |= {"qkv": (H // c.tp + 2 * max(G // c.tp, 1)) * K, "middle": D // c.tp}
    return kept


def memory(c: Case) -> dict[str, int]:
    """Bytes of what lives for the whole step."""
    shard = c.parameters() // (c.dp if c.zero else 1)
    compute = c.parameters(norms=False)
    slots = min(c.pp * c.chunks + c.pp - 1, c.microbatches * c.chunks) if c.pp > 1 else 1
    kept = sum(n * (F32 if name == "lse" else c.itemsize) for name, n in kept_elements(c).items())
    return {
        "state": 3 * F32 * shard + 7 * F32,  # masters, two moments; 3 counters, 2 of the optimizer, 2 of the loss scale
        "batch": c.microbatches * c.rows * c.seq * (4 + 4 + 1),  # ids, labels, mask
        "gradients": F32 * (shard if c.zero >= 2 else c.parameters()),
        "weights": c.itemsize * (compute // c.dp if c.zero == 3 else compute),
        "ring": slots * c.layers // (c.pp * c.chunks) * c.rows * c.seq * kept,
        "inboxes": (2 + 2) * c.activation // c.tp if c.pp > 1 else 0,
    }
