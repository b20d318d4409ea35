"""Rules on how a run reads, saves and starts: options that need each other, or have no effect beside others.

Nothing here needs the number of devices or jax. Each function yields finished messages.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxmeg.config import Config, DataConfig, GuardConfig


def problems(config: Config) -> Iterator[str]:
    yield from _data(config)
    yield from _checkpoints(config)
    yield from _processes(config)
    if config.guard.loss_spike == "off" and config.guard.spike_deviations != GuardConfig.spike_deviations:
        yield f"guard.spike_deviations={config.guard.spike_deviations} has no effect with guard.loss_spike=off: leave one of them out"
    if config.train.stop_after is not None and config.train.stop_after >= config.train.steps:
        yield (f"train.stop_after={config.train.stop_after} has no effect with train.steps={config.train.steps}: leave stop_after out, or "
               f"use a smaller one")


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.packing == "concat" and data.long_documents != DataConfig.long_documents:
        yield (f"data.long_documents={data.long_documents} has no effect with data.packing=concat, which cuts documents at row ends: leave "
               f"long_documents out, or use packing fit or none")
    if data.packing == "none" and not data.separate:
        yield "data.separate=False has no effect with data.packing=none, where no row has two documents: leave separate out"
    if data.validation is not None and data.validation_fraction != DataConfig.validation_fraction:
        yield (f"data.validation_fraction={data.validation_fraction} has no effect with data.validation={data.validation}: leave one of "
               f"them out")
    for key, value in (("data.source", data.source), ("model.loss", config.model.loss)):
        if value is not None and config.model.module is None:
            yield f"{key}={value} has no effect without model.module: give the module too, or leave {key.split('.')[1]} out"


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
