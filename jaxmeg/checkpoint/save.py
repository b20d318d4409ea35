"""Writing checkpoints while training goes on: canonical global arrays through Orbax, and which of them are kept.

`save` returns when the state is copied to the host; a background thread writes it, makes the step appear in one rename
and removes steps that are no longer kept. A save that fails is reported by the next `check`, and nothing that was
complete is touched. Every process makes every call; process 0 writes what is written once. Reading is in `restore`.

Host memory: one copy of what this process holds, replicas once; on a CPU the state itself is that copy, and the hashes of a
leaf or two come beside it. Device memory: see `canonical`.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import resource
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from jaxmeg.checkpoint.canonical import Leaves, canonical_leaves, checksums, flatten, to_canonical
from jaxmeg.checkpoint.manifest import (
    FILE,
    FOLDER,
    ITEM,
    CheckpointError,
    Leaf,
    Manifest,
    complete_steps,
    left_over,
    readable,
    step_folder,
    steps_to_keep,
)
from jaxmeg.config import CheckpointConfig
from jaxmeg.processes.agree import any_process, together, wait_for_all
from jaxmeg.setup import Setup
from jaxmeg.state import TrainState

ITEMS = ("params", "training")
CHUNK_BYTES = 2**26  # a reader of a small shard reads no more than this around it
TIMEOUT_SECONDS = 3600
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SaveError(CheckpointError):
    """A save that failed."""


class Saved(NamedTuple):
    """A save that has begun."""

    step: int
    blocked_seconds: float
    """How long training waited: for the save before, and until the state was on the host."""
    num_bytes: int
    """Size of the checkpoint."""


class Committed(NamedTuple):
    """A save that has ended."""

    step: int
    seconds: float
    """From the call of `save` to the last byte."""
    num_bytes: int
    peak_host_bytes: int
    """Most memory that this process has held so far."""


def array_handler() -> ocp.PyTreeCheckpointHandler:
    """How arrays are stored. Uncompressed: fp32 weights would shrink by 8 percent and take four times as long. Whole shards of
    one replica: parts from each replica would be cut out by as many programs (and see google/orbax#2090)."""
    _silence()
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)


class Checkpoints:
    """The checkpoints of one run, as a context. Leaving it waits for the last save; if that one failed, SaveError is
    raised whatever `on_failure` says."""

    def __init__(self, setup: Setup, run: Path, config: CheckpointConfig, extra: Mapping[str, Any], first: int | None = None):
        """Tidy the run folder and see that it can be written. `extra` is stored with every step, as JSON. first: the step that a run goes
        on from; newer ones, which it will make again, are moved out of the way.

        Raises SaveError if the folder cannot be written; too little room is a warning.
        """
        self._setup, self._config, self._extra = setup, config, dict(extra)
        self._run, self._folder = run.resolve(), run.resolve() / FOLDER
        self._leaves = canonical_leaves(setup)
        self._to_canonical = to_canonical(self._leaves)
        self._num_bytes = sum(leaf.num_bytes for leaf in self._leaves.values())
        self._prepare(first)
        self._newest = first  # the last step that was saved or tried
        self._thread: threading.Thread | None = None
        self._failure: SaveError | None = None  # not reported yet
        self._last_failure: SaveError | None = None  # of the newest save, reported or not
        self._committed: deque[Committed] = deque()  # not reported yet
        handlers: dict[str, Any] = {item: array_handler() for item in ITEMS} | {ITEM: ocp.JsonCheckpointHandler(FILE)}
        options = ocp.options.AsyncOptions(timeout_secs=TIMEOUT_SECONDS, create_directories_asynchronously=False)
        self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers), async_options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.wait()
        self._writer.close()
        if kind is None and self._last_failure:
            raise self._last_failure
        if kind is not None and self._failure:
            _warn(str(self._failure))

    @property
    def latest(self) -> int | None:
        """The newest complete step, if there is one."""
        return max(complete_steps(self._run), default=None)

    def save(self, state: TrainState, step: int, rows: int, validation_loss: float | None = None) -> Saved | None:
        """Begin to save the state after batch `step`, unless that was done.

        rows: rows of the data consumed. validation_loss: of this very state, for `keep_best`. Waits for the save before.
        Raises SaveError like `check`.
        """
        if step == self._newest:
            return None
        started = time.perf_counter()
        self.wait()
        self._report_failure()
        together("save")
        self._newest, self._last_failure = step, None
        try:
            if any_process(jax.process_index() == 0 and self._lacks_room()):
                raise OSError(errno.ENOSPC, "")
            stored = self._to_canonical(flatten(state))
            manifest = self._manifest(state, stored, step, rows, validation_loss)
            items: dict[str, Any] = {item: _array_args(leaves) for item, leaves in by_item(stored).items()}
            args = ocp.args.Composite(**items, **{ITEM: ocp.args.JsonSave(manifest.to_json())})
            self._writer.save(step_folder(self._run, step), args=args, force=True)  # over a left-over of this step
            for path, leaf in self._leaves.items():
                if leaf.rows:
                    stored[path].delete()  # on the host by now; the writer would hold the copy until the last byte is written
        except Exception as error:
            self._failed(step, error)
            self._report_failure()
        else:
            self._thread = threading.Thread(target=self._finish, args=(step, started), name=f"checkpoint {step}")
            self._thread.start()
        return Saved(step, time.perf_counter() - started, self._num_bytes)

    def check(self) -> Committed | None:
        """A save that has ended since the last call; the next one if there are several. Once a step, and at the end until None.

        Raises SaveError if a save has failed; with on_failure=continue it is a warning, and later saves are tried.
        """
        self._report_failure()
        return self._committed.popleft() if self._committed else None

    def wait(self) -> None:
        """Until the save that has begun has ended, well or not."""
        if self._thread:
            self._thread.join()
            self._thread = None

    # ---------------------------------------------------------------- one save
    def _report_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure and self._config.on_failure == "stop":
            raise failure
        if failure:
            print(f"warning: {failure}", file=sys.stderr, flush=True)  # of this process: the others' may have succeeded

    def _lacks_room(self) -> bool:
        try:
            return _free_bytes(self._folder) < self._num_bytes
        except OSError:
            return False  # the writer meets it too, on all processes

    def _manifest(self, state: TrainState, stored: Leaves, step: int, rows: int, validation_loss: float | None) -> Manifest:
        setup, resolved = self._setup, self._setup.resolved
        sums = checksums(stored)
        return Manifest(
            step=step, updates=int(state.updates), rows=rows, validation_loss=validation_loss, compute=setup.compute,
            arch=asdict(resolved.arch), config=asdict(setup.config), extra=self._extra,
            layout={"mesh": setup.layout.sizes, "zero": setup.config.layout.zero, "schedule": resolved.schedule,
                    "chunks": resolved.chunks, "processes": jax.process_count()},
            leaves={path: Leaf(shape=x.shape, dtype=str(x.dtype), checksum=sums[path]) for path, x in stored.items()})

    def _finish(self, step: int, started: float) -> None:
        """In the background: see the save to its end."""
        try:
            self._writer.wait_until_finished()
        except Exception as error:
            self._failed(step, error)
            return
        self._committed.append(Committed(step, time.perf_counter() - started, self._num_bytes, peak_host_bytes()))
        if jax.process_index() == 0:
            self._remove_old()

    def _failed(self, step: int, error: Exception) -> None:
        if jax.process_index() == 0:
            for path in left_over(self._run):
                if path.name.startswith(f"{step}."):
                    shutil.rmtree(path, ignore_errors=True)
        number, reason = _reason(error)
        fix = "see that the folder can be written"
        if number in _FULL:
            reason += f" ({_megabytes(self._num_bytes)} needed, {_megabytes(_free_bytes(self._folder))} free)"
            fix = "make room, or lower checkpoint.keep"
        last = "no step is complete" if self.latest is None else f"step {self.latest} is complete"
        self._failure = self._last_failure = SaveError(
            f"the checkpoint of step {step} failed: {reason} in {self._folder}; {last}: {fix}, then --resume")

    def _remove_old(self) -> None:
        try:
            keep = steps_to_keep(self._run, self._config.keep, self._config.keep_best)
            for step in set(complete_steps(self._run)) - keep:
                path = step_folder(self._run, step)
                shutil.rmtree(path.rename(path.with_name(f"{step}.removing")))  # no half of it is taken for a checkpoint
        except (OSError, CheckpointError) as error:
            _warn(f"old checkpoints in {self._folder} cannot be removed: {error}")

    # ---------------------------------------------------------------- before the first step
    def _prepare(self, first: int | None) -> None:
        problem = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                self._tidy()
                if first is not None:
                    self._put_aside(first)
            probe = self._folder / f".probe-{jax.process_index()}"
            probe.write_bytes(bytes(4096))
            probe.unlink()
        except OSError as error:
            problem = f"{self._folder} cannot be written ({error.strerror}): see that it can"
        wait_for_all("the checkpoints")
        if any_process(problem is not None):
            raise SaveError(problem or f"{self._folder} cannot be written by another process: see what it says")
        if jax.process_index() == 0:
            self._check_space()

    def _tidy(self) -> None:
        for path in left_over(self._run):
            if "." in path.name or not any(path.iterdir()):
                shutil.rmtree(path)
                _warn(f"removed {path}, left over from a save that did not end")
            else:
                _warn(f"{path} is not a complete checkpoint: it is not read, and replaced when step {path.name} is saved")

    def _put_aside(self, first: int) -> None:
        for step in (step for step in complete_steps(self._run) if step > first):
            aside = next(path for number in range(1, sys.maxsize) if not (path := self._folder / f"aside-{step}-{number}").exists())
            step_folder(self._run, step).rename(aside)
            _warn(f"the checkpoint of step {step} is newer than the one the run goes on from: moved to {aside}, which nothing removes; "
                  f"named {step} again it can be read")

    def _check_space(self) -> None:
        config, have = self._config, complete_steps(self._run)
        to_come = 1 + (self._setup.config.train.steps // config.every if config.every else 0)
        count = min(config.keep + config.keep_best + 1, len(have) + to_come)
        room = _free_bytes(self._folder) + sum(found.num_bytes for step in have if (found := readable(self._run, step)))
        if room < count * self._num_bytes:
            _warn(f"{self._folder} has room for {_megabytes(room)}, and {count} checkpoints of {_megabytes(self._num_bytes)} need "
                  f"{_megabytes(count * self._num_bytes)} (checkpoint.keep={config.keep}, keep_best={config.keep_best}, one being made): "
                  "make room, or saves will fail")


@functools.cache
def _silence() -> None:
    """What fails is said once, by us: not by Orbax with its stack, and not by TensorStore, whose writes that are left over find
    Orbax's event loop closed."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_without_tracebacks)
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def _without_tracebacks(record: logging.LogRecord) -> bool:
    return record.levelno < logging.ERROR or "orbax" not in record.pathname + record.getMessage()


def peak_host_bytes() -> int:
    """Most memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def by_item(leaves: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Leaves by the folder that stores them: weights, which may be wanted alone, and the rest."""
    items = {item: {path: x for path, x in leaves.items() if path.startswith("params.") == (item == "params")} for item in ITEMS}
    return {item: part for item, part in items.items() if part}


def _array_args(leaves: Mapping[str, jax.Array]) -> ocp.args.PyTreeSave:
    return ocp.args.PyTreeSave(dict(leaves), save_args={path: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for path in leaves})


def _reason(error: BaseException) -> tuple[int | None, str]:
    """The system's error number and words where an error has them, else the first line of its text."""
    cause: BaseException | None = error
    while cause is not None:
        found = re.search(r"os_error_code='(\d+)'", str(cause))  # from tensorstore
        number = cause.errno if isinstance(cause, OSError) else int(found[1]) if found else None
        if number:
            return number, os.strerror(number)
        cause = cause.__cause__ or cause.__context__
    return None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free if folder.exists() else 0


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


def _warn(line: str) -> None:
    if jax.process_index() == 0:
        print(f"warning: {line}", file=sys.stderr, flush=True)
