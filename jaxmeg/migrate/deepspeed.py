"""DeepSpeed's JSON configuration (https://www.deepspeed.ai/docs/config-json, as of 2026).

It says nothing of model, data and, without a scheduler, of the length of the run: those keep our defaults, and the
report says so. "auto" is what the Hugging Face Trainer fills in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

from jaxmeg.migrate.core import (
    ABSENT,
    JOINT,
    Migration,
    SourceError,
    To,
    apply_table,
    differs,
    equals,
    lookup,
    never,
    not_built,
    not_needed,
    number,
    report_rest,
    shown,
    whole,
    without_null,
)
from jaxmeg.migrate.deepspeed_table import BATCH, TABLE
from jaxmeg.migrate.shared import (
    Found,
    find,
    lack,
    num_ranks,
    put,
    put_batch,
    put_dp,
    put_optimizer,
    put_replicas,
    size,
    switch,
)

NAME = "DeepSpeed"
AUTO = not_needed("the Hugging Face Trainer fills it in; our default stays")
OPTIMIZERS = {"adam": "adamw", "adamw": "adamw", "lion": "lion", "muon": "muon", "sgd": "sgd", "adafactor": "adafactor"}
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "adam": {"lr": 1e-3, "weight_decay": 0.0, **ADAM},
    "adamw": {"lr": 1e-3, "weight_decay": 0.0, **ADAM},
    "lion": {"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.99)},
    "muon": {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.95, **ADAM},
    "sgd": {"lr": 1e-3, "weight_decay": 0.0, "momentum": 0.0},
}
"""What DeepSpeed's optimizers take where params says nothing."""
SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
COMPUTE = {"fp16.enabled": "fp16", "bf16.enabled": "bf16", "bfloat16.enabled": "bf16"}
DTYPES = {"bfloat16": "bf16", "bf16": "bf16", "torch.bfloat16": "bf16", "float16": "fp16", "fp16": "fp16", "torch.float16": "fp16"}
LOSS_SCALE = {
    "fp16.initial_scale_power": To("precision.loss_scale_init", lambda power: 2.0 ** whole(power), "2 to this power", default=16),
    "fp16.loss_scale_window": To("precision.loss_scale_growth_interval", whole, default=1000),
}
MODEL_AXES = {"pipeline.stages": "pp", "tensor_parallel.autotp_size": "tp", "tensor_parallel.tp_size": "tp",
              "tensor_parallel.tp.tp_size": "tp"}


def read(text: str, path: str) -> dict[str, Any]:
    """The top-level object of the JSON. Raises SourceError with the place of a mistake."""
    try:
        content = json.loads(text, object_pairs_hook=_no_twins)
    except json.JSONDecodeError as error:
        raise SourceError(f"{path} is not valid JSON: {error.msg} in line {error.lineno}, column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not valid JSON: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise SourceError(f"{path} holds no JSON object: a DeepSpeed config is {{...}}")
    return content


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise SourceError(f"key {twice[0]} is given twice: keep one")
    return dict(pairs)


def flatten(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys, down to those that the table knows: a section with an entry of its own stays whole."""
    flat: dict[str, Any] = {}
    for name, value in content.items():
        key = prefix + name
        is_section = isinstance(value, Mapping) and value and lookup(TABLE, key) is None
        flat |= flatten(value, f"{key}.") if is_section else {key: value}
    return flat


def migrate(content: Mapping[str, Any], out: Migration, path: str) -> None:
    """Fill `out` from a config that stands alone."""
    flat = fill(content, out, defaults=True)
    ranks, own_ranks = put_mesh(flat, out)
    put_batch(out, BATCH, batch_sizes(flat, out), ranks, own_ranks)
    report_rest(out, TABLE, flat)
    if not out.batch and not out.problems:
        out.remarks.append(f"no batch sizes: data.global_batch is {out.get('data.global_batch')}")
    out.remarks.append(
        f"a DeepSpeed config names no model, data and sequence length: model.preset is {out.get('model.preset')}, the text is the one "
        f"that ships, data.seq_len is {out.get('data.seq_len')}"
    )
    if out.leaves("optim.clip_norm"):
        out.remarks.append(f"no gradient_clipping: optim.clip_norm is {out.get('optim.clip_norm'):g}, as in DeepSpeed since June 2026; "
                           "before, nothing was clipped")
    if out.leaves("optim.name"):
        out.remarks.append(f"no optimizer: {out.get('optim.name')} with optim.lr {out.get('optim.lr'):g}, optim.schedule "
                           f"{out.get('optim.schedule')}")
    if out.leaves("train.steps"):
        out.remarks.append(f"no number of updates: train.steps is {out.get('train.steps')}")


def fill(content: Mapping[str, Any], out: Migration, defaults: bool) -> dict[str, Any]:
    """Everything but mesh and batch; `defaults` says whether absent keys count. Returns the flat keys."""
    flat = without_null(out, flatten(content))
    given = _given(flat)
    for key in flat:
        if key not in given:
            out.lack(key, "auto", AUTO)
    apply_table(out, TABLE, given, defaults)
    _put_precision(flat, out, defaults)
    _put_optimizer(flat, out)
    _put_schedule(flat, out)
    return flat


def devices(content: Mapping[str, Any]) -> int:
    """What the three batch sizes say, else the fewest devices that the axes need."""
    flat, scratch = flatten(content), Migration(source=NAME, devices=1)
    model = prod(size(scratch, flat, key, 1) or 1 for key in (*MODEL_AXES, "sequence_parallel_size"))
    total, micro, steps = batch_sizes(flat, scratch)
    return model * max(total // (micro * steps), 1) if total and micro and steps else model


def _find(flat: Mapping[str, Any], key: str, default: Any = ABSENT) -> Found | None:
    """As `find`; "auto" is nothing, whatever the default."""
    return None if flat.get(key) == "auto" else find(flat, key, default)


def _given(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What the file itself decides."""
    return {key: value for key, value in flat.items() if value != "auto"}


def batch_sizes(flat: Mapping[str, Any], out: Migration) -> tuple[int | None, int | None, int | None]:
    total, micro, steps = (size(out, flat, name) for name in BATCH)
    return total, micro, steps


def put_mesh(flat: Mapping[str, Any], out: Migration) -> tuple[int, int]:
    """mesh.pp, tp, rep and dp. Returns data-parallel ranks as DeepSpeed counts them, and ours: the ranks of sequence
    parallelism, which is not built, are data-parallel here."""
    sizes = {"pp": 1, "tp": 1}
    for key, axis in MODEL_AXES.items():
        if flat.get(key, 0) not in (0, "auto"):
            sizes[axis] = size(out, flat, key, 1) or 1
            out.put(key, flat[key], f"mesh.{axis}", sizes[axis])
        elif key in flat:
            out.lack(key, flat[key], not_needed(f"mesh.{axis} is 1"))
    own = ranks = num_ranks(out, sizes)
    if "sequence_parallel_size" in flat:
        sequence = size(out, flat, "sequence_parallel_size", 1) or 1
        out.lack("sequence_parallel_size", sequence, not_built("context parallelism; mesh.cp stays 1", off=equals(1)))
        ranks = num_ranks(out, {**sizes, "sequence_parallel_size": sequence})
    for name, off, note in (
        ("mics_shard_size", -1, "ZeRO groups of that size"),
        ("zero_hpz_partition_size", 1, "ZeRO groups of that size; optimizer state too is whole in each group: more memory"),
    ):
        found = _find(flat, f"zero_optimization.{name}")
        if found is not None and found.value == off:
            out.lack(found.key, off, not_needed("one ZeRO group over all ranks"))
        elif found is not None and (shard := size(out, flat, found.key)):
            put_replicas(out, found, shard, own, note)
    put_dp(out, own)
    return ranks, own


def _put_precision(flat: Mapping[str, Any], out: Migration, defaults: bool) -> None:
    given = _given(flat)
    formats = {**COMPUTE, "torch_autocast.enabled": DTYPES.get(str(given.get("torch_autocast.dtype", "bfloat16")))}
    on = [key for key in formats if switch(out, given, key)]
    off = [key for key in formats if key in given and key not in on]
    if len({formats[key] for key in on}) > 1:
        out.problems.append(f"{' and '.join(on)} are all true: keep one")
    elif on and formats[on[0]] is not None:
        out.put(on[0], True, "precision.compute", formats[on[0]])
    elif off:
        out.put(off[0], False, "precision.compute", "fp32", "neither fp16 nor bf16")
    elif defaults and not flat.keys() & formats.keys():
        out.put("fp16.enabled", ABSENT, "precision.compute", "fp32", "neither fp16 nor bf16")
    for key in (*formats, "torch_autocast.dtype"):
        if key in given and not out.has_row(key):
            out.lack(key, given[key], not_needed("precision.compute says it"))
    scale = {key: given[key] for key in LOSS_SCALE if key in given}
    if out.get("precision.compute") == "fp16":
        apply_table(out, LOSS_SCALE, scale, defaults)
    else:
        for key, value in scale.items():
            out.lack(key, value, not_needed("the loss is scaled with fp16 only"))
    reduce = given.get("communication_data_type")
    if reduce in ("fp32", "bf16") and out.get("layout.zero") >= 2:
        out.put("communication_data_type", reduce, "precision.reduce", reduce)
    elif reduce is not None:
        out.lack("communication_data_type", reduce, differs("gradients are reduced in fp32, with ZeRO 2 and 3 also in bf16",
                                                            off=equals("fp32")))


def _put_optimizer(flat: Mapping[str, Any], out: Migration) -> None:
    kind = _find(flat, "optimizer.type")
    if kind is None:
        return
    name = str(kind.value).lower()
    defaults = DEFAULTS.get(name, {})

    def param(leaf: str) -> Found | None:
        return _find(flat, f"optimizer.params.{leaf}", defaults.get(leaf, ABSENT))

    betas = param("betas")
    if betas is not None and (not isinstance(betas.value, list | tuple) or len(betas.value) != 2):
        out.problems.append(f"{betas.key}={shown(betas.value)} is not a pair: give [0.9, 0.95]")
        betas = None
    first, second = (betas and betas._replace(value=betas.value[i], key=f"{betas.key}[{i}]") for i in (0, 1))
    rate = param("muon_lr") if "optimizer.params.muon_lr" in flat else param("lr")
    put_optimizer(out, kind, OPTIMIZERS, {
        "lr": rate, "beta1": first, "beta2": second, "eps": param("eps"), "weight_decay": param("weight_decay"),
        "momentum": param("momentum")})
    if "optimizer.params.muon_lr" in flat and "optimizer.params.lr" in flat:
        out.lack("optimizer.params.lr", flat["optimizer.params.lr"], not_needed("muon_lr is the learning rate"))
    mode = _find(flat, "optimizer.params.adam_w_mode")
    if mode is not None:
        coupled = name == "adam" and not mode.value and out.get("optim.weight_decay") > 0
        out.lack(mode.key, mode.value, differs("weight decay is decoupled, as in AdamW", off=lambda value: not coupled))


def _put_schedule(flat: Mapping[str, Any], out: Migration) -> None:
    kind = _find(flat, "scheduler.type")
    if kind is None:
        if "optimizer.type" in flat:
            out.put("scheduler.type", ABSENT, "optim.schedule", "constant", "no scheduler: the learning rate stays")
            out.put("scheduler.type", ABSENT, "optim.warmup", 0)
        return
    schedule = SCHEDULES.get(str(kind.value).lower())
    if schedule is None:
        out.lack(kind.key, kind.value, differs(f"no such schedule here: optim.schedule stays {out.get('optim.schedule')}", off=never))
        params = [key for key in flat if key.startswith("scheduler.params.") and lookup(TABLE, key) is JOINT]
        for key in params:
            out.lack(key, flat[key], differs("it belongs to a schedule that is not here", off=never))
        return
    out.put(kind.key, kind.value, "optim.schedule", schedule)

    def param(leaf: str, default: Any = ABSENT) -> Found | None:
        return _find(flat, f"scheduler.params.{leaf}", default)

    linear = param("warmup_type")
    lack(out, linear, differs("the warm-up is linear", off=equals("linear")))
    put(out, param("warmup_max_lr", 1e-3 if schedule == "linear" else ABSENT), "optim.lr", number, "instead of the optimizer's")
    logarithmic = linear is None or linear.value != "linear"
    put(out, param("warmup_num_steps", 1000), "optim.warmup", whole, "linear here, logarithmic in DeepSpeed" if logarithmic else "")
    put(out, param("total_num_steps"), "train.steps", whole, "the schedule ends with the run")
    if schedule == "linear":
        out.put(kind.key, kind.value, "optim.final_lr_ratio", 0.0)
    if schedule == "cosine":
        put(out, param("cos_min_ratio", 1e-4), "optim.final_lr_ratio", number)
    else:
        lack(out, param("cos_min_ratio"), not_needed("WarmupCosineLR reads it"))
