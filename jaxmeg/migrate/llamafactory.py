"""LLaMA-Factory's YAML: its own keys, those of the Hugging Face Trainer, and a DeepSpeed JSON that it names.

Absent keys have the defaults of LLaMA-Factory and the Trainer. Most runs there fine-tune a model that is loaded, which is
not built here yet: what is carried over is layout, batch, schedule and optimizer. Reference: src/llamafactory/hparams.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from jaxmeg.files import ContentError, load_yaml
from jaxmeg.migrate import deepspeed
from jaxmeg.migrate.core import (
    ABSENT,
    Migration,
    SourceError,
    apply_table,
    differs,
    never,
    not_needed,
    number,
    part,
    report_rest,
    whole,
    without_null,
)
from jaxmeg.migrate.llamafactory_table import TABLE
from jaxmeg.migrate.shared import Found, amount, find, lack, put, put_batch, put_optimizer, size, switch

NAME = "LLaMA-Factory"
BATCH = ("rows an update", "per_device_train_batch_size", "gradient_accumulation_steps")
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw", "adamw_apex_fused": "adamw",
              "adafactor": "adafactor", "lion_32bit": "lion", "sgd": "sgd", "muon": "muon"}
SCHEDULES = {"linear": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine", "constant": "constant",
             "constant_with_warmup": "constant", "warmup_stable_decay": "wsd"}
MIN_LR = ("min_lr", "min_lr_rate", "min_lr_ratio")
FSDP = {"full_shard": 3, "shard_grad_op": 2, "hybrid_shard": 3, "hybrid_shard_zero2": 2, "no_shard": 0}


def read(text: str, path: str) -> dict[str, Any]:
    """The top-level keys. Raises SourceError."""
    if text.lstrip().startswith("{"):
        return deepspeed.read(text, path)
    try:
        content = load_yaml(text)
    except ContentError as error:
        raise SourceError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise SourceError(f"{path} holds no keys: a LLaMA-Factory config is a list of `key: value`")
    return {str(key): value for key, value in content.items()}


def devices(given: Mapping[str, Any]) -> int:
    """One: a LLaMA-Factory config names none."""
    return 1


def migrate(content: Mapping[str, Any], out: Migration, path: str) -> None:
    """Fill `out` from a config; a DeepSpeed file is looked for beside it, then in the working folder."""
    content = without_null(out, content)
    apply_table(out, TABLE, content, defaults=True)
    micro, steps = size(out, content, BATCH[1], 8) or 8, size(out, content, BATCH[2], 1) or 1
    _put_precision(content, out)
    ranks, own_ranks = _put_layout(content, out, Path(path).parent, (micro, steps))
    put_batch(out, BATCH, (None, micro, steps), ranks, own_ranks)
    _put_length(content, out)
    _put_optimizer(content, out)
    _put_schedule(content, out)
    _put_packing(content, out)
    _put_saves(content, out)
    _put_evaluation(content, out)
    report_rest(out, TABLE, content)
    out.remarks.append(f"the model is {out.get('model.preset')} from random weights, on {out.get('data.train') or 'the text that ships'}: "
                       "--set model.preset=NAME, --set data.train=PATH")


# ---------------------------------------------------------------- layout
def _put_layout(given: Mapping[str, Any], out: Migration, folder: Path, sizes: tuple[int, int]) -> tuple[int, int]:
    """ZeRO and mesh, from the DeepSpeed config or from fsdp. Returns data-parallel ranks there and here."""
    source, words = find(given, "deepspeed"), str(given.get("fsdp") or "").split()
    if source is not None:
        content = _read_deepspeed(source, out, folder)
        if content is not None:
            return _put_deepspeed(source, content, out, sizes)
    elif words:
        out.put("fsdp", given["fsdp"], "layout.zero", next((FSDP[word] for word in words if word in FSDP), 3))
    else:
        out.put("deepspeed", ABSENT, "layout.zero", 0, "no deepspeed and no fsdp: state is whole on every rank")
    return deepspeed.put_mesh({}, out)


def _read_deepspeed(source: Found, out: Migration, folder: Path) -> dict[str, Any] | None:
    if isinstance(source.value, Mapping):
        return dict(source.value)
    places = [folder / str(source.value), Path(str(source.value))]
    file = next((place for place in places if place.is_file()), None)
    if file is None:
        lack(out, source, differs(f"no such file: nothing of it is carried over, layout.zero is {out.get('layout.zero')}", off=never))
        return None
    try:
        return deepspeed.read(file.read_text(encoding="utf-8"), str(file))
    except (SourceError, OSError, UnicodeDecodeError) as error:
        out.problems.append(str(error))
        return None


def _put_deepspeed(source: Found, content: Mapping[str, Any], out: Migration, sizes: tuple[int, int]) -> tuple[int, int]:
    """What the DeepSpeed config says, its name before each key. Its batch sizes must be "auto", or those of the YAML."""
    inner = Migration(source=deepspeed.NAME, devices=out.devices, settings=out.settings, values=dict(out.values))
    flat = deepspeed.fill(content, inner, defaults=False)
    if "zero_optimization.stage" not in flat:
        inner.put("zero_optimization.stage", ABSENT, "layout.zero", 0, f"the default of {deepspeed.NAME}")
    ranks, own_ranks = deepspeed.put_mesh(flat, inner)
    micro, steps = sizes
    for key, ours in zip(deepspeed.BATCH, (micro * steps * ranks, micro, steps)):
        theirs = size(inner, flat, key)
        if theirs == ours:
            inner.lack(key, theirs, not_needed("the YAML says the same"))
        elif theirs is not None:
            inner.problems.append(f'{key}={theirs} is not the {ours} of the YAML: write "auto"')
    report_rest(inner, deepspeed.TABLE, flat)
    name = "deepspeed" if isinstance(source.value, Mapping) else Path(str(source.value)).name
    out.rows += [replace(row, source=row.source if row.source == "--devices" else f"{name}: {row.source}") for row in inner.rows]
    out.lacks += [replace(entry, source=f"{name}: {entry.source}") for entry in inner.lacks]
    out.problems += [f"{name}: {problem}" for problem in inner.problems]
    out.values |= inner.values
    lack(out, source, not_needed("its keys are listed one by one"))
    return ranks, own_ranks


# ---------------------------------------------------------------- training
def _put_precision(given: Mapping[str, Any], out: Migration) -> None:
    formats = {"bf16": "bf16", "pure_bf16": "bf16", "fp16": "fp16"}
    on = [key for key in formats if switch(out, given, key)]
    if len({formats[key] for key in on}) > 1:
        out.problems.append(f"{' and '.join(on)} are both true: keep one")
        return
    for key in on:
        out.put(key, True, "precision.compute", formats[key], "with fp32 masters" if key == "pure_bf16" else "")
    for key in formats:
        if key in given and key not in on:
            out.lack(key, given[key], not_needed("precision.compute says it"))
    if not on:
        out.put("bf16", ABSENT, "precision.compute", "fp32", "neither bf16 nor fp16")


def _put_length(given: Mapping[str, Any], out: Migration) -> None:
    """train.steps from max_steps; epochs need the number of rows, which no file says."""
    epochs, steps = find(given, "num_train_epochs", 3.0), find(given, "max_steps")
    if steps is not None and str(steps.value) != "-1":
        put(out, steps, "train.steps", whole)
        lack(out, epochs, not_needed("max_steps is given"))
        return
    lack(out, steps, not_needed("num_train_epochs counts"))
    if epochs is not None:
        value = epochs.value if epochs.given else f"{epochs.value} (absent)"
        out.lack(epochs.key, value, differs("the number of rows is in no file: --set train.steps=epochs x rows / data.global_batch",
                                            off=lambda _: not out.leaves("train.steps")))
    if out.leaves("train.steps"):
        out.remarks.append(f"no number of updates: train.steps is {out.get('train.steps')}")


def _put_optimizer(given: Mapping[str, Any], out: Migration) -> None:
    kind = Found("use_muon", "muon") if switch(out, given, "use_muon") else find(given, "optim", "adamw_torch")
    assert kind is not None
    put_optimizer(out, kind, OPTIMIZERS, {
        "weight_decay": find(given, "weight_decay", 0.0), "beta1": find(given, "adam_beta1", 0.9),
        "beta2": find(given, "adam_beta2", 0.999), "eps": find(given, "adam_epsilon", 1e-8),
        "momentum": Found("use_muon", 0.95, given=False) if kind.key == "use_muon" else None})
    if kind.key == "use_muon":
        lack(out, find(given, "optim"), not_needed("use_muon is the optimizer"))
    else:
        lack(out, find(given, "use_muon"), not_needed("optim is the optimizer"))


def _put_schedule(given: Mapping[str, Any], out: Migration) -> None:
    kind = find(given, "lr_scheduler_type", "linear")
    assert kind is not None
    schedule = SCHEDULES.get(str(kind.value))
    options = given.get("lr_scheduler_kwargs") or {}
    options = options if isinstance(options, Mapping) else {}
    if schedule is None:
        lack(out, kind, differs(f"no such schedule here: optim.schedule is {out.get('optim.schedule')}", off=never))
    else:
        out.put(kind.key, kind.shown, "optim.schedule", schedule)
    steps, rate = out.get("train.steps"), out.get("optim.lr")
    if schedule in ("linear", "cosine", "wsd"):
        named = next((_option(options, name) for name in MIN_LR if name in options), None)
        out.put(kind.key, kind.shown, "optim.final_lr_ratio", 0.0)
        put(out, named, "optim.final_lr_ratio", lambda value: part(number(value), rate if named and named.key.endswith("min_lr") else 1))
    if schedule == "wsd":
        last = _option(options, "num_decay_steps")
        put(out, last, "optim.wsd_decay", lambda updates: part(number(updates), steps), f"of {steps} updates")
    for name in options:
        if not out.has_row(f"lr_scheduler_kwargs.{name}"):
            out.lack(f"lr_scheduler_kwargs.{name}", options[name], differs("the schedule here has no such option", off=never))
    if kind.value == "constant":
        out.put(kind.key, kind.value, "optim.warmup", 0, "constant has no warm-up")
        return
    warmup, ratio = find(given, "warmup_steps"), find(given, "warmup_ratio", 0.0)
    if warmup is not None and amount(out, given, "warmup_steps") > 0:
        put(out, warmup, "optim.warmup", whole)
        lack(out, find(given, "warmup_ratio"), not_needed("warmup_steps is given"))
    else:
        put(out, ratio, "optim.warmup", lambda share: ceil(number(share) * steps), f"of {steps} updates")
        lack(out, warmup, not_needed("warmup_ratio counts"))


def _option(options: Mapping[str, Any], name: str) -> Found | None:
    return Found(f"lr_scheduler_kwargs.{name}", options[name]) if name in options else None


# ---------------------------------------------------------------- data, saves, evaluation
def _put_packing(given: Mapping[str, Any], out: Migration) -> None:
    """How documents fill rows. Stage pt cuts one after the other, the others put whole ones together."""
    pretraining = given.get("stage") == "pt"
    neat, packing = switch(out, given, "neat_packing"), switch(out, given, "packing", pretraining)
    source = next((Found(key, given[key]) for key in ("packing", "neat_packing") if key in given), Found("packing", None, given=False))
    if not (packing or neat):
        out.put(source.key, source.shown, "data.packing", "none", "a document a row")
        out.put(source.key, source.shown, "data.long_documents", "truncate")
    elif pretraining:
        out.put(source.key, source.shown, "data.packing", "concat")
    else:
        out.put(source.key, source.shown, "data.packing", "fit")
        out.put(source.key, source.shown, "data.long_documents", "drop")
    if packing or neat:
        apart = find(given, "neat_packing", False)
        assert apart is not None
        out.put(apart.key, apart.shown, "data.separate", neat, "" if neat else "documents of a row see each other")
    else:
        lack(out, find(given, "neat_packing"), not_needed("a document a row"))


def _put_saves(given: Mapping[str, Any], out: Migration) -> None:
    strategy, every = find(given, "save_strategy", "steps"), find(given, "save_steps", 500)
    assert strategy is not None
    if strategy.value == "steps":
        put(out, every, "checkpoint.every", whole)
        lack(out, strategy, not_needed("checkpoint.every says it"))
        return
    lack(out, every, not_needed(f"save_strategy is {strategy.value}"))
    if str(strategy.value) in ("no", "False"):
        out.put(strategy.key, strategy.value, "checkpoint.every", 0, "only after the last update")
    else:
        lack(out, strategy, differs("epochs are not counted: --set checkpoint.every=N", off=never))


def _put_evaluation(given: Mapping[str, Any], out: Migration) -> None:
    """Share for validation and how often; every validation row counts."""
    share = find(given, "val_size", 0.0)
    assert share is not None
    if share.given and amount(out, given, "val_size") >= 1:
        lack(out, share, differs("a number of rows: --set data.validation_fraction=SHARE", off=never))
    else:
        put(out, share, "data.validation_fraction", number)
    key = next((name for name in ("eval_strategy", "evaluation_strategy") if name in given), "eval_strategy")
    strategy = find(given, key, "no")
    assert strategy is not None
    every = find(given, "eval_steps", out.get("train.log_every"))
    if strategy.value == "steps":
        put(out, every, "train.eval_every", whole)
        out.put(strategy.key, strategy.value, "train.eval_rows", 0, "all validation rows")
    elif str(strategy.value) in ("no", "False"):
        out.put(strategy.key, strategy.shown, "train.eval_every", 0, "only at the end")
        lack(out, find(given, "eval_steps"), not_needed(f"{key} is no"))
    else:
        lack(out, strategy, differs("epochs are not counted: --set train.eval_every=N", off=never))
        lack(out, find(given, "eval_steps"), not_needed(f"{key} is {strategy.value}"))
    lack(out, find(given, "do_eval"), not_needed(f"{key} and val_size say it"))
