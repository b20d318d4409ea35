"""Rules on how a run reads, saves and starts: options that need each other, or have no effect beside others.

Nothing here needs the number of devices or jax. Each function yields finished messages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from jaxmeg.arch import resolve_arch
from jaxmeg.config import Config, DataConfig, GuardConfig, TrainConfig
from jaxmeg.keys import KEYS
from jaxmeg.validate.value_rules import value_of
from jaxmeg.wording import shown


def problems(config: Config) -> Iterator[str]:
    """Rules for text on the decoder."""
    yield from _text(config)
    yield from any_run(config)
    for key, value in (("data.source", config.data.source), ("model.loss", config.model.loss)):
        if value is not None:
            yield f"{key}={shown(value)} has no effect without model.module: give the module too, or leave {key.split('.')[1]} out"


def any_run(config: Config) -> Iterator[str]:
    """Rules that also hold with a module of the user's."""
    yield from _checkpoints(config)
    yield from _validation(config)
    yield from _processes(config)
    if config.guard.loss_spike == "off" and config.guard.spike_deviations != GuardConfig.spike_deviations:
        yield f"guard.spike_deviations={config.guard.spike_deviations} has no effect with guard.loss_spike=off: leave one of them out"
    if config.train.stop_after is not None and config.train.stop_after > config.train.steps:
        yield (f"train.stop_after={config.train.stop_after} has no effect with train.steps={config.train.steps}: leave stop_after out, or "
               f"use a smaller one")


def _text(config: Config) -> Iterator[str]:
    data, train = config.data, config.train
    if data.packing == "concat" and data.long_documents != DataConfig.long_documents:
        yield (f"data.long_documents={data.long_documents} has no effect with data.packing=concat, which cuts documents at row ends: leave "
               f"long_documents out, or use packing fit or none")
    if data.packing == "none" and not data.separate:
        yield "data.separate=False has no effect with data.packing=none, where no row has two documents: leave separate out"
    if data.validation is not None and data.validation_fraction not in (DataConfig.validation_fraction, 0):
        yield (f"data.validation_fraction={data.validation_fraction} has no effect with data.validation={data.validation}: leave one of "
               f"them out")
    if data.text_key != DataConfig.text_key and not any(map(_may_have_records, (data.train, data.validation))):
        yield (f"data.text_key={shown(data.text_key)} has no effect without JSONL or Parquet files in data.train or data.validation: leave "
               f"text_key out")
    if train.sample_tokens == 0 and train.sample_prompt != TrainConfig.sample_prompt:
        yield (f"train.sample_prompt={shown(train.sample_prompt)} has no effect with train.sample_tokens=0: leave sample_prompt out, or "
               f"use sample_tokens 1 or more")


def _may_have_records(paths: str | dict[str, float] | None) -> bool:
    """Whether files with fields may be among what a data key names; the shipped text, text files and token stores have none."""
    names = paths if isinstance(paths, dict) else [paths] if paths is not None else []
    return any(not name.endswith((".txt", ".txt.gz", ".bin", ".idx")) and not os.path.isfile(f"{name}.bin") for name in names)


def _validation(config: Config) -> Iterator[str]:
    if config.data.validation is not None or config.data.validation_fraction > 0:
        return
    if config.checkpoint.keep_best:
        yield (f"checkpoint.keep_best={config.checkpoint.keep_best} has no effect with data.validation_fraction=0, which keeps no rows for "
               f"validation: leave keep_best out, or keep some")


def _checkpoints(config: Config) -> Iterator[str]:
    checkpoint, eval_every = config.checkpoint, config.train.eval_every
    if checkpoint.resume is not None and checkpoint.init_from is not None:
        yield (f"checkpoint.init_from={checkpoint.init_from} has no effect with checkpoint.resume={checkpoint.resume}, which restores the "
               f"whole state: leave one of them out")
    if checkpoint.allow_changes and checkpoint.resume is None:
        yield "checkpoint.allow_changes=True has no effect without checkpoint.resume: leave allow_changes out"
    if checkpoint.keep_best and (checkpoint.every == 0 or eval_every == 0 or checkpoint.every % eval_every):
        yield (f"checkpoint.keep_best={checkpoint.keep_best} needs every saved step evaluated, and checkpoint.every={checkpoint.every} is "
               f"not a multiple of train.eval_every={eval_every}: use for example checkpoint.every {max(eval_every, 1)} and "
               f"train.eval_every {max(eval_every, 1)}")


def _processes(config: Config) -> Iterator[str]:
    distributed = config.distributed
    count, index = distributed.num_processes, distributed.process_id
    given = {f"distributed.{name}": getattr(distributed, name) for name in ("coordinator", "num_processes", "process_id")}
    missing = [key for key, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        named = next(key for key, value in given.items() if value is not None)
        yield f"{named}={given[named]} needs {' and '.join(missing)} too: give all three, or none and let SLURM or Open MPI say them"
    elif count is not None and index is not None and index >= count:
        yield f"distributed.process_id={index} is out of range: use 0 to {count - 1} for distributed.num_processes={count}"
    if count and config.emulate and config.emulate % count:
        near = count * max(config.emulate // count, 1)
        yield f"distributed.num_processes={count} does not divide emulate={config.emulate}: use emulate {near}"


def unread(config: Config, *, own: bool, compute: str, platform: str, num_devices: int, num_processes: int) -> Iterator[str]:
    """Warnings of options that nothing reads in this run, as is known once jax runs; elsewhere the same config may need them.

    own: whether a module of the user's is trained. compute: what precision.compute stands for here. platform: of the devices.
    """
    rope = not own and resolve_arch(config.model).positions == "rope"
    resume, no_rows = config.checkpoint.resume, config.data.validation is None and config.data.validation_fraction == 0
    scaled = f"precision.compute={config.precision.compute}, which is {compute} here"
    found = {  # key -> (whether nothing reads it, what stands in the way)
        "model.max_seq_len": (rope, "model.positions=rope, which needs no table"),
        "precision.loss_scale_init": (compute != "fp16", scaled),
        "precision.loss_scale_growth_interval": (compute != "fp16", scaled),
        "train.out": (resume not in (None, config.train.out), f"checkpoint.resume={shown(resume)}, which goes on in the run's own folder"),
        "train.eval_rows": (no_rows, "data.validation_fraction=0"),
        "train.eval_every": (no_rows and config.train.eval_every > 0, "data.validation_fraction=0"),
        "record.compile_cache": (platform == "cpu" and config.record.compile_cache is not None, "devices on the CPU"),
        "guard.replicas_every": (num_devices == 1 and config.guard.replicas_every > 0, "one device"),
        "guard.silent_seconds": (num_processes == 1, "one process"),
        "distributed.timeout": (num_processes == 1, "one process"),
    }
    for key, (is_unread, beside) in found.items():
        value = value_of(config, key)
        if is_unread and value != KEYS[key].default:
            yield f"{key}={shown(value)} has no effect with {beside}"
