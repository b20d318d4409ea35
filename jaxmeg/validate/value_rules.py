"""Rules on single values: ranges, choices, files, and options that have no effect beside the others.

Nothing here needs the number of devices. Each function yields finished messages.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from math import isfinite

from jaxmeg import arch as shapes
from jaxmeg import config as options
from jaxmeg.arch import Arch
from jaxmeg.config import Config, OptimConfig, PrecisionConfig
from jaxmeg.keys import KEYS
from jaxmeg.pipeline.user import is_schedule_file, schedule_problems
from jaxmeg.record.window import window_problem
from jaxmeg.rules import read_rules
from jaxmeg.wording import any_of, divisors, is_unicode, nearest, shown, unknown_choice

CHOICES: dict[str, tuple[str, ...]] = {
    "layout.remat": options.REMATS,
    "layout.attention": options.ATTENTIONS,
    "pipeline.schedule": options.SCHEDULES,
    "optim.name": options.OPTIMIZERS,
    "optim.schedule": options.LR_SCHEDULES,
    "data.packing": options.PACKINGS,
    "data.long_documents": options.LONG_DOCUMENTS,
    "checkpoint.on_failure": options.SAVE_FAILURES,
    "guard.loss_spike": options.GUARD_ACTIONS,
    "guard.unplanned": options.GUARD_ACTIONS,
    "precision.compute": options.COMPUTE_DTYPES,
    "precision.reduce": options.REDUCE_DTYPES,
    "precision.matmul": options.MATMULS,
    "model.norm": shapes.NORMS,
    "model.positions": shapes.POSITIONS,
    "model.activation": shapes.ACTIVATIONS,
}

Range = tuple[Callable[[float], bool], str]


COUNT = 2**31 - 1  # what the program counts in int32
SIZE = 2**24  # of a dim; more than any model has
MESH = 2**20
ROWS = 2**20  # of an update
LAYERS = 100_000


def _at_least(low: int, most: int = COUNT) -> Range:
    return (lambda value: low <= value <= most), f"use {low} or more" + (f", up to {most:,}" if most != COUNT else "")


def _float(low: float) -> Range:
    return (lambda value: low <= value <= 3e38), "use a number above 0" if low else "use 0 or more"


_POSITIVE: Range = _float(1e-37)  # 0 in fp32 below
_FRACTION: Range = (lambda value: 0 <= value < 1), "use a number in [0, 1)"
_SHARE: Range = (lambda value: 0 <= value <= 1), "use a number in [0, 1]"

RANGES: dict[str, Range] = {
    "model.vocab_size": _at_least(1, SIZE),
    "model.num_layers": _at_least(1, LAYERS),
    "model.embed_dim": _at_least(1, SIZE),
    "model.mlp_dim": _at_least(1, SIZE),
    "model.num_heads": _at_least(1, SIZE),
    "model.num_kv_heads": _at_least(1, SIZE),
    "model.head_dim": _at_least(1, SIZE),
    "model.max_seq_len": _at_least(1, SIZE),
    "model.sliding_window": _at_least(1, SIZE),
    "model.norm_eps": _POSITIVE,
    "model.rope_theta": _POSITIVE,
    "mesh.pp": _at_least(1, MESH),
    "mesh.rep": _at_least(1, MESH),
    "mesh.dp": _at_least(1, MESH),
    "mesh.ep": _at_least(1, MESH),
    "mesh.cp": _at_least(1, MESH),
    "mesh.tp": _at_least(1, MESH),
    "layout.zero": ((lambda value: value in (0, 1, 2, 3)), "use 0, 1, 2 or 3"),
    "pipeline.chunks": _at_least(1, LAYERS),
    "pipeline.microbatch": _at_least(1, ROWS),
    "optim.lr": _POSITIVE,
    "optim.warmup": _at_least(0),
    "optim.final_lr_ratio": _SHARE,
    "optim.wsd_decay": _SHARE,
    "optim.beta1": _FRACTION,
    "optim.beta2": _FRACTION,
    "optim.eps": _POSITIVE,
    "optim.momentum": _FRACTION,
    "optim.factored_dim": _at_least(1),
    "optim.newton_schulz_steps": _at_least(1, 100),
    "optim.weight_decay": _float(0),
    "optim.clip_norm": _float(0),
    "optim.max_skipped_updates": _at_least(1),
    "precision.loss_scale_init": _POSITIVE,
    "precision.loss_scale_growth_interval": _at_least(1),
    "data.seq_len": _at_least(1, SIZE),
    "data.global_batch": _at_least(1, ROWS),
    "data.validation_fraction": _FRACTION,
    "data.max_documents": _at_least(1, SIZE),
    "data.max_rows": _at_least(1),
    "data.prefetch": _at_least(1, 1024),
    "train.steps": _at_least(1),
    "train.stop_after": _at_least(1),
    "train.seed": _at_least(0, 2**32 - 1),
    "train.dropout": _FRACTION,
    "train.eval_every": _at_least(0),
    "train.eval_rows": _at_least(0),
    "train.log_every": _at_least(1),
    "train.sample_tokens": _at_least(0, SIZE),
    "checkpoint.every": _at_least(0),
    "checkpoint.keep": _at_least(1),
    "checkpoint.keep_best": _at_least(0),
    "guard.replicas_every": _at_least(0),
    "guard.spike_deviations": _POSITIVE,
    "guard.step_seconds": _at_least(0),
    "guard.silent_seconds": _at_least(10),
    "distributed.num_processes": _at_least(1, MESH),
    "distributed.process_id": _at_least(0),
    "distributed.timeout": _at_least(1),
    "emulate": _at_least(1, MESH),
}


def value_of(config: Config, key: str) -> object:
    """The value at a dotted key."""
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def ranges(config: Config) -> Iterator[str]:
    """Numbers outside their range; None is never out of range."""
    for key, (inside, fix) in RANGES.items():
        value = value_of(config, key)
        if isinstance(value, int | float) and not inside(value):
            yield f"{key}={value} is out of range: {fix}"


def texts(config: Config) -> Iterator[str]:
    """Texts that are none: with NUL, or from bytes that are not UTF-8."""
    for key in KEYS:
        value = value_of(config, key)
        for text in value if isinstance(value, dict) else (value,):
            if isinstance(text, str) and ("\0" in text or not is_unicode(text)):
                yield f"{key}={shown(text)} holds NUL or bytes that are not UTF-8: leave them out, or rename the file"


def choices(config: Config) -> Iterator[str]:
    """Names that are none of a fixed set, and everything wrong with a file that stands for one."""
    for key, names in CHOICES.items():
        value = value_of(config, key)
        if key == "pipeline.schedule" and is_schedule_file(value):
            yield from (f"{key}={value}: {problem}" for problem in schedule_problems(str(value)))
        elif key == "pipeline.schedule" and value is not None and value not in names:
            yield unknown_choice(key, value, (*names, "a .csv or .txt file"))
        elif value is not None and value not in names:
            yield unknown_choice(key, value, names)


def model(config: Config, arch: Arch | None) -> Iterator[str]:
    """A preset that exists, and shapes that fit each other."""
    if arch is None:
        yield unknown_choice("model.preset", config.model.preset, shapes.PRESETS)
        return
    if all(1 <= heads <= SIZE for heads in (arch.num_heads, arch.num_kv_heads)) and arch.num_heads % arch.num_kv_heads:
        fits = nearest(divisors(arch.num_heads), arch.num_kv_heads)
        yield (
            f"model.num_kv_heads={arch.num_kv_heads} does not divide model.num_heads={arch.num_heads}: "
            f"use num_kv_heads {any_of(fits)}"
        )
    if arch.positions == "rope" and arch.head_dim >= 1 and arch.head_dim % 2:
        near = any_of(width for width in (arch.head_dim - 1, arch.head_dim + 1) if width > 0)
        yield f"model.head_dim={arch.head_dim} is odd and rope rotates pairs: use head_dim {near}"
    if arch.positions == "learned" and config.model.rope_theta is not None:
        yield _no_effect("model.rope_theta", config.model.rope_theta, "model.positions=learned", "use positions rope")
    if arch.positions == "learned" and config.data.seq_len > arch.max_seq_len:
        yield (
            f"data.seq_len={config.data.seq_len} is longer than the position table, "
            f"model.max_seq_len={arch.max_seq_len}: use seq_len {arch.max_seq_len} or less, or a larger max_seq_len"
        )


def schedule_lengths(config: Config) -> Iterator[str]:
    """Warm-up, decay and the updates to profile fit into the run."""
    optim, steps = config.optim, config.train.steps
    if optim.warmup > steps >= 1 and optim.warmup != OptimConfig.warmup:  # a short run need not name the default
        yield f"optim.warmup={optim.warmup} is more than train.steps={steps}: use warmup {steps} or less, or more steps"
    elif (
        steps >= optim.warmup
        and optim.schedule == "wsd"
        and optim.wsd_decay <= 1
        and optim.warmup + optim.wsd_decay * steps > steps
    ):
        most = (steps - optim.warmup) / steps
        yield (
            f"optim.wsd_decay={optim.wsd_decay} of train.steps={steps} starts inside optim.warmup={optim.warmup}: "
            f"use wsd_decay {most:.3g} or less"
        )
    if config.record.profile is not None and (problem := window_problem(config.record.profile, steps, config.train.stop_after)):
        yield problem


def files(config: Config) -> Iterator[str]:
    """Files that are named exist and can be read; a rule table is valid."""
    rules = config.layout.rules
    yield from _data_files(config)
    if rules is not None:
        for problem in read_rules(rules)[1]:
            yield f"layout.rules={shown(rules)}: {problem}"
    if not config.train.out:
        yield "train.out is empty: give a folder, for example runs/demo"


def _data_files(config: Config) -> Iterator[str]:
    for key in ("train", "validation"):
        value: str | dict[str, float] | None = getattr(config.data, key)
        weights = value if isinstance(value, dict) else {value: 1.0} if value is not None else {}
        if value is not None and not weights:
            yield f"data.{key} is an empty table: give a path, or paths with weights"
        for name, weight in weights.items():
            path = os.path.expanduser(name)
            is_there = os.path.isfile(path) or os.path.isdir(path) or (os.path.isfile(f"{path}.bin") and os.path.isfile(f"{path}.idx"))
            if not is_there:
                what = "is no file or folder" if os.path.exists(path) else "does not exist"
                yield (f"data.{key}={name} {what}: give a .txt, .jsonl or .parquet file, a folder of them, or a token store "
                       f"({name}.bin and .idx)")
            if not weight > 0 or not isfinite(weight):
                yield f"data.{key}: the weight {weight} of {name} is out of range: use a number above 0"
    tokenizer = config.data.tokenizer
    if tokenizer != "bytes" and not os.path.isfile(os.path.expanduser(tokenizer)):
        yield f"data.tokenizer={tokenizer} is not a file: give a tokenizer.json, or bytes"


# key -> (holds when the option is used, what stands in the way, how to make it count)
_USED: dict[str, tuple[Callable[[Config], bool], str, str]] = {
    "optim.wsd_decay": (lambda c: c.optim.schedule == "wsd", "optim.schedule", "use schedule wsd"),
    "optim.final_lr_ratio": (
        lambda c: c.optim.schedule != "constant",
        "optim.schedule",
        "use schedule cosine, linear or wsd",
    ),
    "optim.beta1": (lambda c: c.optim.name in ("adamw", "lion", "muon"), "optim.name", "use name adamw, lion or muon"),
    "optim.beta2": (lambda c: c.optim.name in ("adamw", "lion", "muon"), "optim.name", "use name adamw, lion or muon"),
    "optim.eps": (lambda c: c.optim.name in ("adamw", "muon"), "optim.name", "use name adamw or muon"),
    "optim.momentum": (lambda c: c.optim.name in ("sgd", "muon"), "optim.name", "use name sgd or muon"),
    "optim.factored_dim": (lambda c: c.optim.name == "adafactor", "optim.name", "use name adafactor"),
    "optim.newton_schulz_steps": (lambda c: c.optim.name == "muon", "optim.name", "use name muon"),
    "precision.reduce": (lambda c: c.layout.zero >= 2, "layout.zero", "use zero 2 or 3"),
    "precision.loss_scale_init": (
        lambda c: c.precision.compute in ("fp16", "auto"),
        "precision.compute",
        "use compute fp16 or auto",
    ),
    "precision.loss_scale_growth_interval": (
        lambda c: c.precision.compute in ("fp16", "auto"),
        "precision.compute",
        "use compute fp16 or auto",
    ),
}


def _no_effect(key: str, value: object, beside: str, fix: str) -> str:
    return f"{key}={value} has no effect with {beside}: leave {key.split('.')[-1]} out, or {fix}"


def without_effect(config: Config) -> Iterator[str]:
    """Options changed from their default that nothing reads in this run."""
    defaults = {f"optim.{field.name}": field.default for field in fields(OptimConfig)}
    defaults |= {f"precision.{field.name}": field.default for field in fields(PrecisionConfig)}
    for key, (is_used, beside, fix) in _USED.items():
        value = value_of(config, key)
        beside_value = value_of(config, beside)
        names = CHOICES.get(beside)
        if value != defaults[key] and not is_used(config) and (names is None or beside_value in names):
            yield _no_effect(key, value, f"{beside}={beside_value}", fix)
    if config.mesh.pp == 1 and config.pipeline.schedule is not None:
        yield _no_effect("pipeline.schedule", config.pipeline.schedule, "mesh.pp=1", "use pp 2 or more (over a file: --schedule null)")
    if config.mesh.pp == 1 and config.pipeline.chunks not in (None, 1):
        yield _no_effect("pipeline.chunks", config.pipeline.chunks, "mesh.pp=1", "use pp 2 or more (over a file: --chunks null)")
    if config.mesh.rep > 1 and config.layout.zero == 0:
        rep, dp = config.mesh.rep, config.mesh.dp
        instead = f"use dp {rep * (dp or 1)} and rep 1" if dp else "leave rep out and let dp take the devices"
        yield f"mesh.rep={rep} has no effect with layout.zero=0, which has no ZeRO groups: {instead}, or zero 1, 2 or 3"
