"""Where a run starts from, and where it is written: fresh weights, a checkpoint or those of another run; its folder.

What keeps it from starting is said before anything is changed: ConfigError, RestoreError.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from jaxmeg.checkpoint.manifest import Manifest, run_of
from jaxmeg.checkpoint.restore import restore, restore_weights
from jaxmeg.checkpoint.resume import config_changes, data_problems
from jaxmeg.cli import ConfigError
from jaxmeg.config import Config
from jaxmeg.processes.agree import wait_for_all
from jaxmeg.processes.connect import from_first_process
from jaxmeg.record.folder import cannot_write, new_folder, reopen_folder, unwritable
from jaxmeg.record.window import window
from jaxmeg.report import console
from jaxmeg.setup import Setup
from jaxmeg.state import TrainState, fresh_state
from jaxmeg.task import Task


def first_state(task: Task, extra: dict[str, Any]) -> tuple[TrainState, int]:
    """(state, rows of the data it has consumed): fresh, with weights of another run, or a checkpoint's. extra: what this start reads."""
    setup, checkpoint = task.setup, task.setup.config.checkpoint
    if checkpoint.resume:
        state, manifest = restore(setup, Path(checkpoint.resume))
        _refuse_start(setup.config, manifest, extra)
        console.print(f"resumed     {checkpoint.resume} after update {manifest.step}, {manifest.rows:,} rows of the data read",
                      soft_wrap=True)
        for change in config_changes(manifest.config, asdict(setup.config)):
            console.print(f"            {change}", soft_wrap=True)
        return state, manifest.rows
    if checkpoint.init_from:
        params = restore_weights(setup, Path(checkpoint.init_from))
        console.print(f"weights     from {checkpoint.init_from}", soft_wrap=True)
        return fresh_state(setup, params), 0
    return task.init(), 0


def _refuse_start(config: Config, manifest: Manifest, extra: dict[str, Any]) -> None:
    """ConfigError where a checkpoint leaves nothing to do, or where the data is no longer what it was."""
    resume, stop_after, found = config.checkpoint.resume, config.train.stop_after, []
    if manifest.step >= config.train.steps:
        found.append(f"train.steps={config.train.steps}: {resume} has done {manifest.step} updates already: use more steps, with "
                     "--checkpoint.allow_changes true")
    elif stop_after is not None and stop_after <= manifest.step:
        found.append(f"train.stop_after={stop_after}: {resume} has done {manifest.step} updates already: use {manifest.step + 1} or more")
    if config.record.profile and (updates := window(config.record.profile)) and updates[-1] <= manifest.step:
        found.append(f"record.profile={config.record.profile}: {resume} has done {manifest.step} updates already: profile later ones")
    if not config.checkpoint.allow_changes:
        found += data_problems(manifest.extra, extra)
    if found:
        raise ConfigError(found)


def refuse_unwritable(config: Config) -> None:
    """ConfigError where nothing can be written to the run's folder, as far as that can be told without trying."""
    if problem := unwritable(wanted_folder(config)):
        raise ConfigError([problem])


def wanted_folder(config: Config) -> Path:
    """The folder that the config names."""
    resume = config.checkpoint.resume
    return run_of(Path(resume)) if resume else Path(config.train.out)


def run_folder(setup: Setup) -> Path:
    """The run folder, made or reopened by process 0; the others are told its name."""
    config, error = setup.config, ""
    wanted = folder = wanted_folder(config)
    if jax.process_index() == 0:
        try:
            if config.checkpoint.resume:
                reopen_folder(wanted, setup)
            else:
                folder = new_folder(wanted, setup)
        except OSError as problem:
            error = cannot_write(wanted, problem)
    wait_for_all("the run folder")
    answer = from_first_process(error or f"={folder}")
    if not answer.startswith("="):
        raise ConfigError([answer])
    folder = Path(answer[1:])
    if folder != wanted:
        console.print(f"run folder  {wanted} holds an earlier run: this one goes to {folder}", soft_wrap=True)
    return folder
