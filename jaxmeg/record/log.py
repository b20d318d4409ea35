"""The series of a run: one JSON object a line in metrics.jsonl, and the same numbers as TensorBoard events.

A record is a flat dict with "step", the update it belongs to, counted from 1; its keys are the columns of the JSON and
`TAGS` gives each its TensorBoard name. Lists are values of several devices. A record without a TAG stays in the JSON alone.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

METRICS, TENSORBOARD = "metrics.jsonl", "tensorboard"
TAGS: Mapping[str, str] = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens": "train/tokens",
    "loss_scale": "train/loss_scale",
    "tokens_per_s": "speed/tokens_per_s",
    "samples_per_s": "speed/samples_per_s",
    "mfu": "speed/mfu",
    "step_s": "time/step_s",
    "data_wait_s": "time/data_wait_s",
    "evaluate_s": "time/evaluate_s",
    "save_s": "time/save_s",
    "profile_s": "time/profile_s",
    "memory_in_use": "memory/in_use",
    "memory_peak": "memory/peak",
    "memory_limit": "memory/limit",
    "memory_spread": "memory/spread",
    "validation_loss": "validation/loss",
    "validation_tokens": "validation/tokens",
}


class LogError(RuntimeError):
    """The record of a run that can't be written; one line."""


class Log:
    """Writes records; a context manager. With `enabled` false (all processes but one) it writes nothing.

    resume_step: updates that the resumed checkpoint holds. Later lines of metrics.jsonl go to metrics.1.jsonl (or .2, ...), and
    TensorBoard is told to hide its later events. None starts afresh. Raises LogError where nothing can be written.
    """

    def __init__(self, folder: Path, *, tensorboard: bool = True, resume_step: int | None = None, enabled: bool = True):
        self.file = self.board = None
        if not enabled:
            return
        path = folder / METRICS
        try:
            if resume_step is not None and path.exists():
                keep_until(path, resume_step)
            self.file = path.open("a" if resume_step is not None else "w", encoding="utf-8")
        except OSError as error:
            raise LogError(f"{path} cannot be written ({error.strerror}): see that it can, or make room") from error
        if tensorboard:
            first = (resume_step or 0) + 1
            self.board = SummaryWriter(
                str(folder / TENSORBOARD), purge_step=first if resume_step is not None else None, max_queue=1000, flush_secs=10,
                filename_suffix=f".{first}.{os.getpid()}")  # the library's own names differ by the second alone

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            for end in (self.file, self.board):
                if end:
                    end.close()
        except OSError as error:
            if kind is None:
                raise LogError(f"the end of the run's record cannot be written ({error.strerror}): make room") from error

    def write(self, record: Mapping[str, Any]) -> None:
        """Write one record, whose line is on disk when this returns. A float that is not finite is null in the JSON."""
        if self.file:
            line = json.dumps({key: _json(value) for key, value in record.items()}, allow_nan=False) + "\n"
            try:
                self.file.write(line)
                self.file.flush()
            except OSError as error:
                with suppress(OSError):  # closing would try to write it again
                    self.file.close()
                raise LogError(f"stopped after update {record['step']}: {self.file.name} cannot be written ({error.strerror}): see that it "
                               "can, or make room, then --resume") from error
        if self.board:
            for key, tag in TAGS.items():
                value = record.get(key)
                for name, number in enumerate(value) if isinstance(value, list) else [(None, value)]:
                    if number is not None:
                        self.board.add_scalar(tag if name is None else f"{tag}/{name}", number, record["step"])


def _json(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def logged_losses(folder: Path, step: int) -> list[float]:
    """The losses that were written down for updates up to `step`, in order."""
    losses = [_record(line).get("loss") for line in _lines(folder / METRICS) if _step(line) <= step]
    return [float(loss) for loss in losses if isinstance(loss, int | float)]


def keep_until(path: Path, step: int) -> None:
    """Move the lines after update `step`, and what is no record, such as a last line that a crash cut short, to a file of their own.
    The file is replaced in one move."""
    lines = [line for line in _lines(path) if line]
    kept = [line for line in lines if _step(line) <= step]
    if len(kept) < len(lines):
        aside = next(file for n in range(1, sys.maxsize) if not (file := path.with_suffix(f".{n}{path.suffix}")).exists())
        aside.write_text("".join(line + "\n" for line in lines if _step(line) > step), encoding="utf-8")
    fresh = path.with_suffix(".tmp")
    fresh.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    fresh.replace(path)


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").split("\n") if path.is_file() else []


def _step(line: str) -> float:
    step = _record(line).get("step")
    return step if isinstance(step, int) else math.inf


def _record(line: str) -> dict[str, Any]:
    """The record of a line; an empty one where it is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}
