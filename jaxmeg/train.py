"""The training run: from a config to trained weights, read top to bottom.

`scripts/train.py` -> `run(config)` -> `step.make_train_step(setup)`. What is trained on what is a `task.Task`; the loop here reads
rows, dispatches steps, reads metrics one step late, evaluates, saves, and stops where it is told to.
"""

from __future__ import annotations

import signal
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxmeg.checkpoint.manifest import complete_steps
from jaxmeg.checkpoint.save import Checkpoints
from jaxmeg.cli import ConfigError
from jaxmeg.config import Config
from jaxmeg.engine import import_object
from jaxmeg.guard.program import read_back
from jaxmeg.guard.replicas import Replicas
from jaxmeg.journal import Journal, RunError, Start, warn
from jaxmeg.pipeline.check import check_schedule
from jaxmeg.processes.agree import together, wait_for_all
from jaxmeg.processes.stop import StopSignal
from jaxmeg.processes.watchdog import Watchdog
from jaxmeg.record.cache import outcome, set_up_cache
from jaxmeg.record.compiles import Watch
from jaxmeg.record.late import Late
from jaxmeg.record.log import Log, logged_losses
from jaxmeg.record.memory import describe, memory_lines
from jaxmeg.record.profile import Profile, compiler_options
from jaxmeg.record.speed import speed_of
from jaxmeg.report import Progress, Result, console, print_layout, print_setup, print_summary
from jaxmeg.setup import Setup
from jaxmeg.start import first_state, refuse_unwritable, run_folder, wanted_folder
from jaxmeg.state import TrainState
from jaxmeg.step import Metrics
from jaxmeg.task import Task, own_task, text_task
from jaxmeg.wording import shown


class Stopped(RunError):
    """The run was told to stop, and has saved its state; the message says how to go on."""

    def __init__(self, by: str, step: int, steps: int, folder: Path):
        super().__init__(f"stopped by {by} after update {step} of {steps}, with a checkpoint: go on with --resume {folder}")
        self.code = 128 + getattr(signal, by, signal.SIGTERM)
        """Exit code of the process, as a shell reports a signal."""


def run(config: Config, devices: list[Any] | None = None, *, module: Any = None, loss: Any = None, data: Any = None) -> Result | None:
    """Train as the config says, on the given devices or all that jax sees; None if only the layout was to be shown.

    module, loss, data: train a module of one's own, as in `engine.initialize`, on a source of rows; each an object, or an
    import path in the config (model.module, model.loss, data.source).
    Raises RunError, and ConfigError, DataError, OwnModuleError, CheckpointError for what the user can put right.
    """
    with Watchdog(config.guard) as watchdog:
        result = _watched(config, watchdog, devices, module, loss, data)
    if isinstance(result, Stopped):
        raise result
    return result


def _watched(config: Config, watchdog: Watchdog, devices: list[Any] | None, module: Any, loss: Any, data: Any) -> Result | Stopped | None:
    devices = jax.devices() if devices is None else devices
    console.quiet = jax.process_index() != 0
    cache = set_up_cache(config.record.compile_cache, devices[0].platform)
    if not config.show_layout:
        refuse_unwritable(config)
    if config.checkpoint.resume:
        watchdog.checkpoint = partial(_safe, wanted_folder(config))
    task = _make_task(config, devices, module, loss, data)
    setup = task.setup
    print_setup(setup)
    if config.show_layout:
        print_layout(setup)
        return None
    if cache:
        console.print(cache, soft_wrap=True)
    if setup.user_schedule:
        check_schedule(setup)
    task.print_data(console)
    with Watch() as watch:
        return _run(task, watch, watchdog)


def _safe(folder: Path) -> tuple[int | None, str]:
    """(newest complete step, folder): what a run that is ended can go on from."""
    return max(complete_steps(folder), default=None), str(folder)


def _make_task(config: Config, devices: list[Any], module: Any, loss: Any, data: Any) -> Task:
    model, source = config.model, config.data.source
    paths = (("model.module", module, model.module), ("model.loss", loss, model.loss), ("data.source", data, source))
    found = [f"{key}={shown(path)} has no effect beside the {key.split('.')[1]} that run() was given: leave one of them out"
             for key, given, path in paths if given is not None and path is not None]
    if module is None and model.module is None and not (loss is None and data is None):
        found.append("run() was given loss or data without a module: give module too, or model.module")
    if found:
        raise ConfigError(found)
    module = import_object(model.module, "model.module") if module is None and model.module else module
    if module is None:
        return text_task(config, devices)
    loss = import_object(model.loss, "model.loss") if loss is None and model.loss else loss
    data = import_object(source, "data.source") if data is None and source else data
    missing = [f"{key} is missing: give package.module:name of {what}"
               for value, key, what in ((loss, "model.loss", "the loss of your module"), (data, "data.source", "rows for your module"))
               if value is None]
    if missing:
        raise ConfigError(missing)
    return own_task(config, devices, module, loss, data)


def _run(task: Task, watch: Watch, watchdog: Watchdog) -> Result | Stopped:
    setup, config = task.setup, task.setup.config
    extra = {"tokenizer": task.tokenizer.fingerprint if task.tokenizer else None, "data": task.data}
    state, consumed = first_state(task, extra)
    first, steps = int(state.step), config.train.steps
    with closing(task.read(first, consumed)) as batches, StopSignal() as stop:
        n, rows = next(batches)
        compiled, compile_seconds = _compile(task, state, rows, watch)
        wait_for_all("the first step")
        folder = run_folder(setup)  # only now: what can't be compiled leaves no folder, and no config in the run it was to go on
        watchdog.checkpoint = partial(_safe, folder)
        before = Start(folder, first, consumed, logged_losses(folder, first))
        replicas = Replicas(setup)
        if replicas.line:
            console.print(f"replicas    {replicas.line}", soft_wrap=True)
        replicas.look(first, state)
        late = Late[Metrics]()
        with (Progress(setup, first) as progress,
              Checkpoints(setup, folder, config.checkpoint, extra, first or None) as checkpoints,
              Log(folder, tensorboard=config.record.tensorboard, resume_step=first or None, enabled=jax.process_index() == 0) as log,
              Profile(config.record.profile, folder, late) as profile):
            journal = Journal(setup, log, progress, watch, checkpoints, before)

            def settle() -> None:
                journal.steps(late.flush())
                journal.replicas(replicas.late())

            while True:
                watchdog.at("step", n + 1)
                with profile.update(n + 1, settle):
                    state, metrics = compiled(state, rows)
                    journal.dispatched(n + 1)
                    journal.steps(late.push(n + 1, metrics))
                journal.replicas(replicas.late())
                consumed += config.data.global_batch
                last, validation_loss = n + 1 == steps, None
                told = stop.requested(n + 1) or n + 1 == config.train.stop_after
                save = last or told or _due(n + 1, config.checkpoint.every)
                if save or replicas.due(n + 1):
                    replicas.look(n + 1, state)
                journal.committed(checkpoints.check())
                if task.evaluate and (last or _due(n + 1, config.train.eval_every)):
                    settle()
                    together("evaluate")
                    with late.apart("evaluate"), journal.first("evaluate"):
                        validation_loss, count = task.evaluate(state.params, partial(watchdog.at, "evaluate", n + 1))
                    journal.validated(n + 1, validation_loss, count)
                if save:
                    settle()
                    if last or told or journal.applied:
                        watchdog.at("save", n + 1)
                        with late.apart("save"), journal.first("save"):
                            checkpoints.save(state, n + 1, consumed, validation_loss)
                if last or told:
                    break
                watchdog.at("data", n + 2)
                with late.apart("data_wait"):
                    n, rows = next(batches)
            watchdog.at("end", n + 1)
            text = task.sample(state.params) if last else None
            checkpoints.wait()
            while committed := checkpoints.check():
                journal.committed(committed)
    if profile.written:
        console.print(f"trace       {profile.where()}", soft_wrap=True)
    if not last and n + 1 != config.train.stop_after:
        return Stopped(stop.name, n + 1, steps, folder)
    result = Result(
        setup=setup, losses=journal.losses, validation=journal.validation, sample=text, folder=folder, seconds=journal.seconds,
        compile_seconds=compile_seconds, rates=journal.speed.rates(journal.seconds / len(journal.losses)))
    print_summary(result)
    if not last:
        console.print(f"stopped     after update {n + 1} of {steps}: go on with --resume {folder}", soft_wrap=True)
    return result


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _compile(task: Task, state: TrainState, rows: Any, watch: Watch) -> tuple[Any, float]:
    started = time.perf_counter()
    watch.new()
    options = compiler_options(task.setup.config.record.profile, task.setup.mesh.devices.flat[0].platform)
    compiled = task.step.lower(state, rows).compile(compiler_options=options)
    seconds = time.perf_counter() - started
    program = next((found for found in watch.new() if found.name == "step"), None)
    cached = f", {outcome(program)}" if program and program.from_cache else ""
    console.print(f"compiled    in {seconds:.1f} s{cached}", soft_wrap=True)
    lines = memory_lines(task.setup, rows, compiled)
    console.print(f"memory      {describe(lines, list(task.setup.mesh.devices.flat))}", soft_wrap=True)
    console.print(f"speed       {speed_of(task.setup).formula()}", soft_wrap=True)
    _read_back(task.setup, compiled)
    return compiled, seconds


def _read_back(setup: Setup, compiled: Any) -> None:
    """What the step moves between devices, and what it should not. Raises RunError if that is to stop the run."""
    action = setup.config.guard.unplanned
    if action == "off" or setup.mesh.devices.size == 1:
        return
    found = read_back(setup, compiled)
    if found.traffic:
        console.print(f"traffic     {found.traffic}", soft_wrap=True)
    if found.unplanned and action == "stop":
        raise RunError(f"stopped before the first update: {found.unplanned} (guard.unplanned=stop)")
    if found.unplanned:
        warn(f"warning: {found.unplanned}")
