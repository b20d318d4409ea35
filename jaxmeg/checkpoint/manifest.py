"""What a checkpoint says of itself, and which checkpoints a run folder holds. Files and plain values only, no jax.

A run keeps step N in RUN/checkpoints/N: `params` and `training` (arrays, written by Orbax) and `manifest/manifest.json`.
The step folder appears at once, complete, when the last byte is written: one with a manifest is a checkpoint, anything
else is left over from a save that did not end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

FOLDER = "checkpoints"
ITEM, FILE = "manifest", "manifest.json"
FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; one line that says which, why, and what to do."""


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """One stored array."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int = 0
    """`canonical.checksum` of the array when it was saved."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * int("".join(filter(str.isdigit, self.dtype))) // 8

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """manifest.json."""

    format: int = FORMAT
    step: int
    """Batches consumed."""
    updates: int
    """Updates applied."""
    rows: int
    """Rows of the data consumed: the data position."""
    validation_loss: float | None
    """Nats a token, if this step was evaluated."""
    compute: str
    """fp32, bf16 or fp16: what the loss scale is for."""
    arch: dict[str, Any]
    """The model's shape, by field of `Arch`."""
    layout: dict[str, Any]
    """Mesh, ZeRO stage, schedule and chunks that it was saved from. For the reader: nothing stored depends on them."""
    config: dict[str, Any]
    extra: dict[str, Any]
    """What the run adds: tokenizer, versions."""
    leaves: dict[str, Leaf]

    @property
    def num_bytes(self) -> int:
        return sum(leaf.num_bytes for leaf in self.leaves.values())

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_manifest(step_folder: Path) -> Manifest:
    """Raises CheckpointError for a file that is missing, damaged or of another format."""
    path = step_folder / ITEM / FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {values['format']}, and this version reads {FORMAT}: use the version that wrote it")
        leaves = {name: Leaf(**(leaf | {"shape": tuple(leaf["shape"])})) for name, leaf in values["leaves"].items()}
        return Manifest(**(values | {"leaves": leaves}))
    except OSError as error:
        raise CheckpointError(f"{step_folder} is not a complete checkpoint ({path.name}: {error.strerror}): give another step") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {error}): give another step") from error


def step_folder(run: Path, step: int) -> Path:
    return run / FOLDER / str(step)


def complete_steps(run: Path) -> list[int]:
    """Steps of the complete checkpoints of a run folder, ascending."""
    return sorted(int(entry.name) for entry in _entries(run) if entry.name.isdigit() and _is_complete(entry))


def steps_to_keep(run: Path, keep: int, keep_best: int) -> set[int]:
    """The latest `keep` complete steps and, besides, the `keep_best` with the lowest validation loss."""
    steps = complete_steps(run)
    losses = [(read_manifest(step_folder(run, step)).validation_loss, step) for step in steps] if keep_best else []
    best = sorted((loss, step) for loss, step in losses if loss is not None and isfinite(loss))
    return set(steps[-keep:]) | {step for _, step in best[:keep_best]}


def left_over(run: Path) -> list[Path]:
    """Step folders that are not complete, and temporary ones such as 7.orbax-checkpoint-tmp."""
    return sorted(entry for entry in _entries(run) if entry.name.split(".")[0].isdigit()
                  and not (entry.name.isdigit() and _is_complete(entry)))


def find_step(path: Path) -> Path:
    """The step folder that a path means: a step folder itself, or the latest complete step of a run folder.

    Raises CheckpointError if there is none.
    """
    if path.name.isdigit() and path.parent.name == FOLDER:
        if _is_complete(path):
            return path
        have = ", ".join(map(str, complete_steps(path.parent.parent))) or "none"
        raise CheckpointError(f"{path} is not a complete checkpoint: the steps this run has are {have}")
    run = path.parent if path.name == FOLDER else path
    steps = complete_steps(run)
    if not steps:
        what = "holds no complete checkpoint" if run.is_dir() else "does not exist"
        raise CheckpointError(f"{run} {what}: give the folder of a run that saved one")
    return step_folder(run, steps[-1])


def leaf_problems(stored: Mapping[str, Leaf], wanted: Mapping[str, Leaf]) -> list[str]:
    """How stored arrays differ from those that are wanted: missing and unexpected names, other shapes, other dtypes."""
    missing = [f"{name} is missing" for name in wanted if name not in stored]
    unexpected = [f"{name} is unexpected" for name in stored if name not in wanted]
    other = [f"{name} is {stored[name]} and should be {leaf}" for name, leaf in wanted.items()
             if name in stored and (stored[name].shape, stored[name].dtype) != (leaf.shape, leaf.dtype)]
    return missing + unexpected + other


def _is_complete(entry: Path) -> bool:
    return (entry / ITEM / FILE).is_file()


def _entries(run: Path) -> list[Path]:
    folder = run / FOLDER
    return [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
