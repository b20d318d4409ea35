"""Megatron-LM's command-line arguments, from a shell script, a command or a list of arguments: layout, batch, training.

A command with a shape (--num-layers, --hidden-size, --num-attention-heads) is taken as a whole: what it leaves out gets
Megatron's default, so that the config builds the model that Megatron would. Without one, only what is named is carried
over, to our default model. Model and data are in modules of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from jaxmeg.migrate.core import (
    ABSENT,
    Migration,
    Reason,
    To,
    apply_table,
    choice,
    differs,
    equals,
    lookup,
    never,
    not_built,
    not_needed,
    number,
    part,
    report_rest,
    shown,
    whole,
)
from jaxmeg.migrate.megatron_data import PATHS, UNREAD, put_data, put_evaluation
from jaxmeg.migrate.megatron_model import put_model
from jaxmeg.migrate.megatron_table import SEVERAL_VALUES, SHAPE, TABLE
from jaxmeg.migrate.shared import Found, amount, find, lack, num_ranks, put, put_batch, put_dp, put_optimizer, put_replicas, size
from jaxmeg.migrate.shell import is_open, read_arguments
from jaxmeg.wording import any_of

NAME = "Megatron-LM"
BATCH = ("--global-batch-size", "--micro-batch-size", "microbatches")
MODEL_AXES = {"--pipeline-model-parallel-size": "pp", "--tensor-model-parallel-size": "tp"}
FSDP = ("--use-megatron-fsdp", "--use-custom-fsdp", "--use-torch-fsdp2")
STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "wsd": "wsd"}
OPTIMIZERS = {"adam": "adamw", "sgd": "sgd", "lion": "lion", "muon": "muon", "dist_muon": "muon"}
_ADAM = {"beta1": ("--adam-beta1", 0.9), "beta2": ("--adam-beta2", 0.999), "eps": ("--adam-eps", 1e-8)}
OPTIONS = {
    "adam": _ADAM,
    "sgd": {"momentum": ("--sgd-momentum", 0.9)},
    "lion": {"beta1": ("--lion-beta1", 0.95), "beta2": ("--lion-beta2", 0.98)},
    "muon": {**_ADAM, "momentum": ("--muon-momentum", 0.9), "newton_schulz_steps": ("--muon-num-ns-steps", 5)},
}
"""What each of Megatron's optimizers reads: our key of optim -> (argument, default)."""
LOSS_SCALE = {
    "--initial-loss-scale": To("precision.loss_scale_init", number, default=2.0**32),
    "--loss-scale-window": To("precision.loss_scale_growth_interval", whole, default=1000),
}


def read(text: str, path: str) -> dict[str, Any]:
    """Arguments by name, with dashes. Raises SourceError for open quotes."""
    found, _ = read_arguments(text)
    return {name: value[0] if isinstance(value, list) and name not in SEVERAL_VALUES else value for name, value in found.items()}


def devices(given: Mapping[str, Any]) -> int:
    """What the launcher starts; else the fewest devices that the mesh needs."""
    names = ("--nproc-per-node", "--nnodes") if "--nproc-per-node" in given else (*MODEL_AXES, "--context-parallel-size")
    scratch = Migration(source=NAME, devices=1)
    return prod(size(scratch, given, name, 1) or 1 for name in names)


def migrate(content: Mapping[str, Any], out: Migration, path: str) -> None:
    """Fill `out` from the arguments."""
    given = _without_open(content, out)
    is_whole = any(name in given for name in SHAPE)
    apply_table(out, TABLE, given, defaults=is_whole)
    ranks, own_ranks = _put_mesh(given, out)
    _put_zero(given, out, is_whole)
    _put_replicas(given, out, own_ranks)
    _put_batch(given, out, is_whole, ranks, own_ranks)
    _put_length(given, out)
    put_model(given, out, is_whole)
    _put_precision(given, out, is_whole)
    _put_optimizer(given, out, is_whole)
    _put_schedule(given, out, is_whole)
    put_data(given, out, is_whole)
    put_evaluation(given, out, is_whole)
    _put_profile(given, out)
    report_rest(out, TABLE, given)
    if not is_whole:
        out.remarks.insert(0, f"no {', '.join(SHAPE)}: model.preset is {out.get('model.preset')}; what is not named has our default, "
                              "not Megatron's")


def _without_open(content: Mapping[str, Any], out: Migration) -> dict[str, Any]:
    """The arguments whose value stands in the text. A size that does not is a problem, a path is only reported."""
    given = dict(content)
    for name, value in content.items():
        if not is_open(value) or name in UNREAD or isinstance(lookup(TABLE, name), Reason | None):
            continue
        del given[name]
        if name in PATHS:
            out.lack(name, value, differs(f"the text does not set this variable: --set {PATHS[name]}=PATH", off=never))
        else:
            out.problems.append(f"{name} {shown(value)}: the text does not set this variable: put its value in its place")
    return given


# ---------------------------------------------------------------- layout
def _put_mesh(given: Mapping[str, Any], out: Migration) -> tuple[int, int]:
    """mesh.pp, mesh.tp and chunks. Returns data-parallel ranks as Megatron counts them, and ours: the ranks of context
    parallelism, which is not built, are data-parallel here."""
    sizes = {axis: size(out, given, name, 1) or 1 for name, axis in MODEL_AXES.items()}
    for name, axis in MODEL_AXES.items():
        if name in given:
            out.put(name, given[name], f"mesh.{axis}", sizes[axis])
    _put_chunks(given, out, sizes["pp"])
    own = ranks = num_ranks(out, sizes)
    context = size(out, given, "--context-parallel-size", 1) or 1
    if "--context-parallel-size" in given:
        out.lack("--context-parallel-size", context, not_built("context parallelism; mesh.cp stays 1", off=equals(1)))
        ranks = num_ranks(out, {**sizes, "cp": context})
    return ranks, own


def _put_chunks(given: Mapping[str, Any], out: Migration, pp: int) -> None:
    """Virtual pipeline stages: as a number, or as layers in each."""
    stages, layers = find(given, "--num-virtual-stages-per-pipeline-rank"), find(given, "--num-layers-per-virtual-pipeline-stage")
    source = stages or layers
    if source is None:
        return
    chunks = size(out, given, source.key, 1) or 1
    if stages is None:
        total, each = size(out, given, "--num-layers"), chunks
        if total is None:
            lack(out, source, differs("it needs --num-layers: --set pipeline.schedule=interleaved --set pipeline.chunks=N", off=never))
            return
        if total % (pp * each):
            out.problems.append(f"{source.key}={each} x {pp} stages does not divide --num-layers={total}")
            return
        chunks = total // pp // each
    if chunks == 1:
        lack(out, source, not_needed("one chunk a stage"))
    else:
        out.put(source.key, source.value, "pipeline.schedule", "interleaved")
        out.put(source.key, source.value, "pipeline.chunks", chunks)


def _put_zero(given: Mapping[str, Any], out: Migration, is_whole: bool) -> None:
    strategy = find(given, "--data-parallel-sharding-strategy")
    fsdp = next((Found(name, True) for name in FSDP if name in given), None)
    optimizer = find(given, "--use-distributed-optimizer")
    if strategy is not None:
        put(out, strategy, "layout.zero", choice(STRATEGIES, f"use {any_of(STRATEGIES)}"))
    elif fsdp is not None:
        out.put(fsdp.key, True, "layout.zero", 3)
    elif optimizer is not None:
        out.put(optimizer.key, True, "layout.zero", 1)
    elif is_whole:
        out.put("--use-distributed-optimizer", ABSENT, "layout.zero", 0, "state is whole on every rank")
    for found in (fsdp, optimizer):
        if found is not None and not out.has_row(found.key):
            lack(out, found, not_needed("layout.zero says it"))
    reduce = find(given, "--grad-reduce-in-bf16")
    if out.get("layout.zero") >= 2:
        put(out, reduce, "precision.reduce", lambda _: "bf16")
    else:
        lack(out, reduce, differs("with ZeRO 0 and 1 gradients are reduced in fp32"))


def _put_replicas(given: Mapping[str, Any], out: Migration, ranks: int) -> None:
    """mesh.rep from the number of optimizer instances, then mesh.dp."""
    instances = find(given, "--num-distributed-optimizer-instances")
    copies = size(out, given, "--num-distributed-optimizer-instances", 1) or 1
    if instances is not None and copies == 1:
        lack(out, instances, not_needed("one ZeRO group over all ranks"))
    elif instances is not None:
        put_replicas(out, instances, ranks // copies if ranks % copies == 0 else copies, ranks, "")
    put_dp(out, ranks)


def _put_batch(given: Mapping[str, Any], out: Migration, is_whole: bool, ranks: int, own_ranks: int) -> None:
    total, micro = (size(out, given, name) for name in BATCH[:2])
    if is_whole and micro is None:
        out.problems.append("--micro-batch-size is missing: Megatron needs it")
    if total is None and micro is None:
        out.remarks.append(f"no batch sizes: data.global_batch is {out.get('data.global_batch')}")
    put_batch(out, BATCH, (total, micro, None), ranks, own_ranks)


# ---------------------------------------------------------------- training
def _put_length(given: Mapping[str, Any], out: Migration) -> None:
    if "--train-iters" in given and "--train-samples" in given:
        out.problems.append("--train-iters and --train-samples are both given: keep one")
    put(out, find(given, "--train-iters"), "train.steps", whole)
    rows = out.get("data.global_batch")
    put(out, find(given, "--train-samples"), "train.steps", lambda samples: max(whole(samples) // rows, 1), f"of {rows} rows")
    if out.leaves("train.steps"):
        out.remarks.append(f"no number of updates: train.steps is {out.get('train.steps')}")


def _put_precision(given: Mapping[str, Any], out: Migration, is_whole: bool) -> None:
    on = [name for name in ("--bf16", "--fp16") if name in given]
    if len(on) == 2:
        out.problems.append("--bf16 and --fp16 are both given: keep one")
    elif on:
        out.put(on[0], True, "precision.compute", on[0].removeprefix("--"))
    elif is_whole:
        out.put("--bf16", ABSENT, "precision.compute", "fp32", "neither --bf16 nor --fp16")
    scale = {name: given[name] for name in LOSS_SCALE if name in given}
    if out.get("precision.compute") == "fp16":
        apply_table(out, LOSS_SCALE, scale, is_whole)
    else:
        for name, value in scale.items():
            out.lack(name, value, not_needed("the loss is scaled with fp16 only"))


def _put_optimizer(given: Mapping[str, Any], out: Migration, is_whole: bool) -> None:
    kind = find(given, "--optimizer") or Found("--optimizer", "adam", given=False)
    named = OPTIONS.get(str(kind.value), {})
    options = {leaf: find(given, name, default if is_whole else ABSENT) for leaf, (name, default) in named.items()}
    options |= {"lr": find(given, "--lr"), "weight_decay": find(given, "--weight-decay", 0.01 if is_whole else ABSENT)}
    put_optimizer(out, kind, OPTIMIZERS, options)
    for name in {name for options in OPTIONS.values() for name, _ in options.values()} & given.keys():
        if not out.has_row(name):
            out.lack(name, given[name], not_needed(f"optim.name={out.get('optim.name')} does not read it"))
    if is_whole and "--lr" not in given:
        out.remarks.append(f"no --lr: optim.lr is {out.get('optim.lr'):g}")


def _put_schedule(given: Mapping[str, Any], out: Migration, is_whole: bool) -> None:
    """Warm-up and decay, in updates; Megatron's lengths are in iterations or in samples."""
    style = find(given, "--lr-decay-style", "linear" if is_whole else ABSENT)
    put(out, style, "optim.schedule", choice(SCHEDULES, f"optim.schedule stays {out.get('optim.schedule')}"))
    schedule, steps, rows, rate = (out.get(key) for key in ("optim.schedule", "train.steps", "data.global_batch", "optim.lr"))
    smallest = find(given, "--min-lr", 0.0 if is_whole else ABSENT)
    if schedule == "constant":
        lack(out, smallest, not_needed("the learning rate stays"))
    else:
        put(out, smallest, "optim.final_lr_ratio", lambda value: part(number(value), rate), "as a fraction of optim.lr")

    def length(what: str) -> Found | None:
        return find(given, f"--lr-{what}-samples") or find(given, f"--lr-{what}-iters")

    def updates(found: Found) -> Callable[[Any], int]:
        return (lambda samples: round(number(samples) / rows)) if found.key.endswith("samples") else whole

    decay, end = length("decay"), steps
    if decay is not None and size(out, given, decay.key):
        end = updates(decay)(decay.value)
        lack(out, decay, not_needed("the schedule ends with the run") if end == steps else differs(
            f"the schedule ends with the run, after train.steps={steps} updates", off=never))
    if (warmup := length("warmup")) is not None:
        put(out, warmup, "optim.warmup", updates(warmup), f"of {rows} rows" if warmup.key.endswith("samples") else "")
    put(out, find(given, "--lr-warmup-fraction"), "optim.warmup", lambda share: round(number(share) * end), f"of {end} updates")
    if is_whole and "optim.warmup" not in out.values:
        out.put("--lr-warmup-iters", ABSENT, "optim.warmup", 0, f"the default of {out.source}")
    last, curve = length("wsd-decay"), find(given, "--lr-wsd-decay-style")
    if schedule == "wsd":
        if last is not None:
            put(out, last, "optim.wsd_decay", lambda value: part(updates(last)(value), steps), f"of {steps} updates")
        out.lack("--lr-wsd-decay-style", curve.value if curve else "exponential (absent)",
                 differs("the decay of wsd is linear", off=equals("linear")))
    else:
        for found in (last, curve):
            lack(out, found, not_needed("the schedule is not WSD"))


def _put_profile(given: Mapping[str, Any], out: Migration) -> None:
    """record.profile: Megatron names the updates that are done when tracing starts and ends."""
    first, last = (int(amount(out, given, f"--profile-step-{end}", default)) + 1 for end, default in (("start", 10), ("end", 12)))
    for name in ("--profile", "--profile-step-start", "--profile-step-end"):
        if name in given and "--profile" in given:
            out.put(name, given[name], "record.profile", f"{first}:{last}")
        elif name in given:
            out.lack(name, given[name], not_needed("it belongs to --profile"))
