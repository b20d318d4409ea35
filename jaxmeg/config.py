"""Every option of a training run: frozen, nested dataclasses of plain values, and the sizes that follow from them.

No rule is checked here; `validate` does that, in one pass. `resolve` fills in what was left to the program and may
only be called on a config without problems. Must not know jax, the command line or any file format.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction

from jaxmeg.arch import Arch, resolve_arch
from jaxmeg.pipeline.notation import UserSchedule
from jaxmeg.pipeline.user import is_schedule_file, read_schedule, user_table
from jaxmeg.rules import load_rules


class Axis(StrEnum):
    """Mesh axes in device order, outermost first: neighbours on tp sit on the fastest links."""

    PP = "pp"
    REP = "rep"
    DP = "dp"
    EP = "ep"
    CP = "cp"
    TP = "tp"


AXES: tuple[Axis, ...] = tuple(Axis)

SCHEDULES = ("gpipe", "1f1b", "interleaved")
REMATS = ("none", "selective", "full")
ATTENTIONS = ("auto", "xla", "cudnn", "cudnn_packed")
OPTIMIZERS = ("adamw", "lion", "adafactor", "muon", "sgd")
LR_SCHEDULES = ("cosine", "linear", "wsd", "constant")
COMPUTE_DTYPES = ("auto", "fp32", "bf16", "fp16")
REDUCE_DTYPES = ("fp32", "bf16")
MATMULS = ("default", "highest")
PACKINGS = ("concat", "fit", "none")
LONG_DOCUMENTS = ("split", "truncate", "drop")
SAVE_FAILURES = ("stop", "continue")
GUARD_ACTIONS = ("off", "warn", "stop")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What is trained: a preset, and any of its fields overridden (null keeps the preset's value)."""

    preset: str = "demo"
    """Name of a model shape: toy, toy-gpt2, demo, gpt2, smollm2-135m, llama3.2-1b, llama3.1-8b, -70b or -405b."""
    vocab_size: int | None = None
    """Number of token ids, without padding."""
    num_layers: int | None = None
    """Number of transformer blocks."""
    embed_dim: int | None = None
    """Width of the residual stream."""
    mlp_dim: int | None = None
    """Hidden width of the MLP."""
    num_heads: int | None = None
    """Number of query heads."""
    num_kv_heads: int | None = None
    """Number of key/value heads; must divide num_heads."""
    head_dim: int | None = None
    """Width of one head."""
    max_seq_len: int | None = None
    """Size of the position table with learned positions."""
    norm: str | None = None
    """rms or layer."""
    norm_eps: float | None = None
    """Added to the variance inside the norms."""
    positions: str | None = None
    """rope or learned."""
    rope_theta: float | None = None
    """Base of the rotary frequencies."""
    activation: str | None = None
    """swiglu or gelu."""
    attn_bias: bool | None = None
    """Bias on the query, key and value projections."""
    out_bias: bool | None = None
    """Bias on the attention output projection."""
    mlp_bias: bool | None = None
    """Bias on the MLP projections."""
    qk_norm: bool | None = None
    """RMS norm on queries and keys."""
    tied: bool | None = None
    """The head is the transpose of the embedding table."""
    sliding_window: int | None = None
    """A token attends to itself and the sliding_window - 1 tokens before it (as in Hugging Face's configs), not to all before it."""
    module: str | None = None
    """Import path package.module:name of a Flax NNX module of your own, or of a function of rngs that makes one."""
    loss: str | None = None
    """Import path of its loss: (module, batch) -> losses, or (losses, weights)."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each mesh axis has, outermost axis first."""

    pp: int = 1
    """Pipeline stages."""
    rep: int = 1
    """Replicas of a ZeRO group (hybrid sharding)."""
    dp: int | None = None
    """Data-parallel ranks; ZeRO shards over them. Null takes the devices that are left."""
    ep: int = 1
    """Expert parallelism (not built yet)."""
    cp: int = 1
    """Context parallelism (not built yet)."""
    tp: int = 1
    """Tensor parallelism, with the sequence sharded between blocks."""


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Where parameters, optimizer state and activations live."""

    zero: int = 1
    """ZeRO stage 0-3: 0 keeps all state whole, 1 shards masters and moments, 2 also gradients, 3 also weights."""
    rules: str | None = None
    """YAML file that maps a dim to mesh axes, for example "heads: []"; overrides entries of the default rule table."""
    remat: str = "none"
    """What the backward pass recomputes: none, selective (all but named tensors) or full (whole layers)."""
    attention: str = "auto"
    """Kernel of attention: auto (cudnn where it can, else xla), xla, cudnn or cudnn_packed. cudnn also takes head dims up to 256 on Hopper.
    cudnn_packed works on each document of a row alone, where cudnn reads a mask of all pairs of tokens; it needs data.max_documents, and
    Hopper or newer. Neither of these two has been run: no speed is known."""
    scan_layers: bool = True
    """Run the layers in a loop of the compiled program. false writes each layer out: with one stage and one microbatch less is copied
    and held, with more of them more is; compiling takes longer with every layer."""


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a pipeline is run. All null: chosen from the mesh."""

    schedule: str | None = None
    """gpipe, 1f1b, interleaved, or the path of a schedule of your own (.csv or .txt). Null is 1f1b when mesh.pp > 1."""
    chunks: int | None = None
    """Model pieces per stage. Null is 1, or 2 for interleaved, or what a schedule of your own has."""
    microbatch: int | None = None
    """Rows per data-parallel rank per pipeline slot. Null is the largest that gives at least 2 * pp microbatches (or as
    many as a schedule of your own has), or all local rows when mesh.pp = 1."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """Optimizer and learning rate. All counts are in updates."""

    name: str = "adamw"
    """adamw, lion, adafactor, muon or sgd."""
    lr: float = 3e-3
    """Peak learning rate. What suits AdamW suits Muon; Lion wants a third to a tenth of it, and Adafactor's is relative to
    the size of a parameter."""
    warmup: int = 10
    """Updates over which the learning rate rises from 0 to its peak."""
    schedule: str = "cosine"
    """After the warm-up: cosine, linear, wsd (warm-up, stable, decay) or constant."""
    final_lr_ratio: float = 0.1
    """Learning rate that the schedule ends at, reached after the last update, as a fraction of the peak."""
    wsd_decay: float = 0.2
    """Fraction of all updates in which wsd decays."""
    beta1: float = 0.9
    """AdamW, Lion and Muon's AdamW: decay of the first moment."""
    beta2: float = 0.95
    """AdamW, Lion (there of the one moment) and Muon's AdamW: decay of the second moment."""
    eps: float = 1e-8
    """AdamW and Muon's AdamW: added to the root of the second moment."""
    momentum: float = 0.9
    """SGD and Muon: momentum."""
    factored_dim: int = 128
    """Adafactor: matrices with at least so many rows and columns keep statistics of these only."""
    newton_schulz_steps: int = 5
    """Muon: iterations that bring a momentum matrix near an orthogonal one."""
    weight_decay: float = 0.1
    """Decoupled weight decay on matrices; norms and biases have none."""
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    max_skipped_updates: int = 5
    """The run stops after so many updates in a row with a gradient that is not finite."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats. Masters, moments, norms, softmax and loss are always fp32."""

    compute: str = "auto"
    """Format of weights and activations in the forward and backward pass: auto, fp32, bf16 or fp16. auto is bf16 on
    GPUs that have it, fp16 on older ones, fp32 on a CPU."""
    reduce: str = "fp32"
    """Format in which ZeRO 2 and 3 reduce-scatter gradients: fp32 or bf16."""
    matmul: str = "default"
    """Precision of fp32 matrix multiplications: default (the chip's, may be TF32) or highest."""
    fp8: bool = False
    """Multiply the layers' matrices in FP8 (e4m3 forward, e5m2 for gradients, one scale a tensor, fp32 sums). Needs compute bf16,
    which auto is then. Faster on GPUs of compute capability 8.9 and newer; elsewhere the same numbers are multiplied in bf16."""
    fp8_head: bool = False
    """With fp8: those of the output head too."""
    loss_scale_init: float = 65536.0
    """fp16: first loss scale."""
    loss_scale_growth_interval: int = 2000
    """fp16: updates without overflow after which the loss scale doubles."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and how documents become rows of tokens."""

    train: str | dict[str, float] | None = None
    """Path of a .txt, .jsonl or .parquet file or of a token store (a .bin with its .idx), or paths with weights. Null is
    the text that ships with the project."""
    validation: str | dict[str, float] | None = None
    """The same for validation. Null keeps the last validation_fraction of the training tokens."""
    validation_fraction: float = 0.05
    """Share of the tokens kept for validation; 0 keeps none."""
    source: str | None = None
    """Import path package.module:name of rows for a module of your own: len() and [i] -> a dict of arrays."""
    tokenizer: str = "bytes"
    """bytes, or the path of a tokenizer.json."""
    end_token: str | None = None
    """Token put after every document, for example <|endoftext|>; null puts none."""
    text_key: str = "text"
    """Name of the field of a JSONL or Parquet record that holds the text."""
    packing: str = "concat"
    """How documents fill rows: concat (one after the other, cut at row ends), fit (whole documents, best fit) or none
    (one a row)."""
    separate: bool = True
    """Documents that share a row do not see each other, and positions start again at each."""
    max_documents: int | None = None
    """Most documents in a row: one that would hold more becomes several rows. Null sets no bound. The table of the data says what the
    largest number is."""
    long_documents: str = "split"
    """fit and none: a document longer than a row is split, truncated (truncate) or left out (drop)."""
    max_rows: int | None = None
    """Rows of an epoch; null is all."""
    seq_len: int = 128
    """Tokens per row."""
    global_batch: int = 32
    """Rows per update, over all devices and microbatches."""
    prefetch: int = 4
    """Batches that are read ahead."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length of the run and what it reports."""

    steps: int = 180
    """Updates."""
    stop_after: int | None = None
    """Save and stop after this update, to go on later; the learning rate still counts train.steps."""
    seed: int = 0
    """Seeds initial weights, data order and dropout."""
    dropout: float = 0.0
    """Probability of dropping an activation, in [0, 1)."""
    eval_every: int = 100
    """Updates between evaluations; 0 evaluates only at the end."""
    eval_rows: int = 64
    """Validation rows per evaluation; 0 is all."""
    log_every: int = 10
    """Updates between log lines."""
    sample_tokens: int = 200
    """Tokens sampled at the end of the run; 0 samples nothing."""
    sample_prompt: str = "ROSALIND.\n"
    """Text that the sample continues."""
    out: str = "runs/demo"
    """Folder of the run; the next free NAME-2, NAME-3, ... if it holds another run."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved, and where a run starts from."""

    every: int = 0
    """Updates between checkpoints; 0 saves only after the last update and when the run is told to stop."""
    keep: int = 2
    """Latest checkpoints kept."""
    keep_best: int = 0
    """Checkpoints with the lowest validation loss kept besides."""
    on_failure: str = "stop"
    """After a failed save: stop, or continue and try again at the next."""
    resume: str | None = None
    """Run folder to go on with, on this or another layout; its config is the start of this one."""
    init_from: str | None = None
    """Run folder, or one of its checkpoints, to take weights from, and nothing else."""
    allow_changes: bool = False
    """Resume although the data, batch, seed, optimizer or length of the run has changed."""


@dataclass(frozen=True, kw_only=True)
class RecordConfig:
    """What a run writes down about itself, besides config.yaml, versions.json and metrics.jsonl."""

    tensorboard: bool = True
    """Write TensorBoard events."""
    profile: str | None = None
    """Updates to trace, for example 10:13 for 10, 11 and 12; in quotes in a file, as YAML reads 10:13 as 613."""
    compile_cache: str | None = "~/.cache/jaxmeg/xla"
    """Folder in which compiled programs are kept between runs on accelerators; null keeps none."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What watches over a run while it goes on."""

    replicas_every: int = 100
    """Updates between looks whether values that several devices hold are the same on all of them, besides one at the start and
    before every save; 0 never looks."""
    loss_spike: str = "warn"
    """When the loss jumps up: off, warn or stop."""
    spike_deviations: float = 8.0
    """A jump is a loss so many standard deviations of the 100 losses before it above their mean."""
    unplanned: str = "warn"
    """When the compiled program moves data that the layout did not ask for: off, warn or stop."""
    step_seconds: int = 600
    """The run ends when a step, an evaluation or the wait for data takes longer; compiling may, and a process that was stopped (Ctrl-Z)
    starts to count anew. 0 waits for ever."""
    silent_seconds: int = 60
    """With several processes, the run ends when one has given no sign of life for so long, or when process 0, through which they hear
    of each other, has not answered for so long."""


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """Several processes as one run. All null: one process, or what SLURM or Open MPI says."""

    coordinator: str | None = None
    """host:port of process 0."""
    num_processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """This process, from 0."""
    timeout: int = 300
    """Seconds to wait for the other processes at the start."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """The device mesh."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    """ZeRO, rule table, rematerialisation."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Schedule and microbatches."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """Optimizer and learning rate."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Number formats."""
    data: DataConfig = field(default_factory=DataConfig)
    """Documents, rows and batch."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Length of the run and its reports."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and starting points."""
    record: RecordConfig = field(default_factory=RecordConfig)
    """The run record."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """What watches over the run."""
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    """Several processes."""
    emulate: int | None = None
    """Number of devices to emulate on the CPU, over all processes."""
    show_layout: bool = False
    """Print where every parameter lives, then stop."""


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The sizes a config leaves to the program, computed for one number of devices."""

    arch: Arch
    """The model's shape."""
    num_devices: int
    """Devices of the mesh."""
    mesh: dict[Axis, int]
    """Size of every axis, in device order."""
    rules: dict[str, tuple[str, ...]]
    """The complete rule table: dim -> mesh axes."""
    schedule: str | None
    """Pipeline schedule; None when pp = 1."""
    user_schedule: UserSchedule | None
    """What the file holds, where the schedule is one."""
    chunks: int
    """Model pieces per stage."""
    local_rows: int
    """Rows per data-parallel rank per update."""
    microbatch: int
    """Rows per data-parallel rank per pipeline slot."""
    num_microbatches: int
    """Microbatches per update."""
    padded_vocab: int
    """Vocabulary rounded up to a multiple of the ranks it is sharded over."""
    layer_split: tuple[int, ...]
    """Layers of each (chunk, stage), in model order: entry chunk * pp + stage."""

    @property
    def bubble(self) -> Fraction:
        """Predicted share of the pipeline's time in which a stage idles; of a schedule of the user's, simulated."""
        if self.user_schedule:
            return user_table(self.user_schedule)[1].bubble
        return bubble_fraction(self.mesh[Axis.PP], self.num_microbatches, self.chunks)


def bubble_fraction(pp: int, num_microbatches: int, chunks: int = 1) -> Fraction:
    """Idle share of a lockstep pipeline; (pp-1)/(pp-1+M) with one chunk.

    In units of one microbatch on a whole stage, M are worked and (pp-1)/chunks idled; with fewer microbatches than
    stages, all pp*chunks-1+M slots of 1/chunks are needed.
    """
    if num_microbatches >= pp:
        idle = Fraction(pp - 1, chunks)
    else:
        idle = Fraction(pp * chunks - 1 + num_microbatches, chunks) - num_microbatches
    return idle / (idle + num_microbatches)


def split_layers(num_layers: int, parts: int) -> tuple[int, ...]:
    """Layers of each part; sizes differ by at most one, longer parts first, and sum to num_layers."""
    base, longer = divmod(num_layers, parts)
    return tuple(base + (part < longer) for part in range(parts))


def default_microbatch(local_rows: int, pp: int) -> int:
    """The largest divisor of local_rows that gives at least 2 * pp microbatches, else 1; all rows when pp = 1."""
    if pp == 1:
        return local_rows
    sizes = [rows for rows in range(1, local_rows + 1) if local_rows % rows == 0 and local_rows // rows >= 2 * pp]
    return max(sizes, default=1)


def mesh_sizes(mesh: MeshConfig, num_devices: int) -> dict[Axis, int]:
    """Size of every axis in device order; a dp of None takes the devices that are left."""
    others = mesh.pp * mesh.rep * mesh.ep * mesh.cp * mesh.tp
    dp = num_devices // others if mesh.dp is None else mesh.dp
    return {Axis.PP: mesh.pp, Axis.REP: mesh.rep, Axis.DP: dp, Axis.EP: mesh.ep, Axis.CP: mesh.cp, Axis.TP: mesh.tp}


def resolve(config: Config, num_devices: int) -> Resolved:
    """Fill in everything left to the program. Only for a config for which `validate.problems` is empty."""
    arch = resolve_arch(config.model)
    mesh = mesh_sizes(config.mesh, num_devices)
    rules = load_rules(config.layout.rules)
    pp = mesh[Axis.PP]
    schedule = (config.pipeline.schedule or "1f1b") if pp > 1 else None
    user = read_schedule(schedule) if schedule and is_schedule_file(schedule) else None
    chunks = user.num_chunks if user else config.pipeline.chunks or (2 if schedule == "interleaved" else 1)
    local_rows = config.data.global_batch // (mesh[Axis.REP] * mesh[Axis.DP] * mesh[Axis.EP])
    default = local_rows // user.num_microbatches if user else default_microbatch(local_rows, pp)
    microbatch = config.pipeline.microbatch or default
    vocab_ranks = 1
    for axis in rules["vocab"]:
        vocab_ranks *= mesh[Axis(axis)]
    return Resolved(
        arch=arch,
        num_devices=num_devices,
        mesh=mesh,
        rules=rules,
        schedule=schedule,
        user_schedule=user,
        chunks=chunks,
        local_rows=local_rows,
        microbatch=microbatch,
        num_microbatches=local_rows // microbatch,
        padded_vocab=-(-arch.vocab_size // vocab_ranks) * vocab_ranks,
        layer_split=split_layers(arch.num_layers, pp * chunks),
    )
