"""What a checkpoint says of itself, and which checkpoints a run folder holds. Files and plain values only, no jax.

A run keeps step N in RUN/checkpoints/N: `params` and `training` (arrays, written by Orbax) and `manifest/manifest.json`.
The step folder appears at once, complete, when the last byte is written: one with a manifest is a checkpoint, anything
else is left over from a save that did not end.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

from jaxmeg.keys import KEYS, SECTIONS
from jaxmeg.typed import fits, is_typed, unfit
from jaxmeg.wording import shown

FOLDER = "checkpoints"
ITEM, FILE = "manifest", "manifest.json"
FORMAT = 1
DIGEST = "checksum"  # of all other entries of the file; older checkpoints have none
_LAYOUT = {"mesh": dict[str, int], "zero": int, "schedule": str | None, "chunks": int}
_STEP = re.compile("0|[1-9][0-9]{0,17}")


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
        values = asdict(self)
        return values | {DIGEST: _digest(values)}


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError for a file that is missing, damaged or of another format."""
    path = folder / ITEM / FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {shown(values['format'])}, and this version reads {FORMAT}: use the version that wrote it")
        digest = values.pop(DIGEST, None)
        if digest not in (None, _digest(values)):
            raise CheckpointError(f"{path} is damaged (it does not have its checksum): {another_step(folder)}")
        leaves = {name: Leaf(**(leaf | {"shape": tuple(leaf["shape"])})) for name, leaf in values["leaves"].items()}
        manifest = Manifest(**(values | {"leaves": leaves}))
    except OSError as error:
        raise CheckpointError(f"{folder} is not a complete checkpoint ({path.name}: {error.strerror}): {another_step(folder)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}: {shown(error)}): {another_step(folder)}") from error
    if wrong := _wrong(manifest):
        raise CheckpointError(f"{path} is damaged ({wrong} is missing or of a wrong type): {another_step(folder)}")
    return manifest


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def _wrong(manifest: Manifest) -> str | None:
    """The first entry that no run can have written."""
    if wrong := unfit(manifest):
        return wrong[0]
    wrong = [name for name in ("step", "updates", "rows") if getattr(manifest, name) < 0]
    wrong += [f"the leaf {shown(name)}" for name, leaf in manifest.leaves.items() if not is_typed(leaf) or not _is_array(leaf)]
    wrong += [f"layout.{name}" for name, hint in _LAYOUT.items()
              if name not in manifest.layout or not fits(manifest.layout[name], hint)]
    config: dict[str, Any] = {}
    for section, entries in manifest.config.items():
        config |= {f"{section}.{name}": entry for name, entry in entries.items()} if isinstance(entries, dict) else {section: entries}
    wrong += [key for key, value in config.items() if key in SECTIONS or (key in KEYS and not fits(value, KEYS[key].type))]
    return next(iter(wrong), None if manifest.leaves else "leaves")


def _is_array(leaf: Leaf) -> bool:
    return min(leaf.shape, default=0) >= 0 and re.fullmatch("[a-z]+[0-9]{1,3}", leaf.dtype) is not None


def readable(run: Path, step: int) -> Manifest | None:
    """The manifest of a step; None where it is damaged, which matters to nobody who does not read that step."""
    try:
        return read_manifest(step_folder(run, step))
    except CheckpointError:
        return None


def another_step(folder: Path) -> str:
    """What to do about a step that can't be read; folder: the step's, or one in it."""
    step = next((path for path in (folder, *folder.parents) if path.parent.name == FOLDER), folder)
    others = [number for number in complete_steps(step.parent.parent) if str(number) != step.name]
    return f"give another step, for example --resume {step.parent / str(others[-1])}" if others else "give another step"


def step_folder(run: Path, step: int) -> Path:
    return run / FOLDER / str(step)


def complete_steps(run: Path) -> list[int]:
    """Steps of the complete checkpoints of a run folder, ascending."""
    return sorted(int(entry.name) for entry in _entries(run) if _STEP.fullmatch(entry.name) and _is_complete(entry))


def run_of(path: Path) -> Path:
    """The run folder of a path that `find_step` takes."""
    if path.name.isdigit() and path.parent.name == FOLDER:
        return path.parent.parent
    return path.parent if path.name == FOLDER else path


def steps_to_keep(run: Path, keep: int, keep_best: int) -> set[int]:
    """The latest `keep` complete steps and, besides, the `keep_best` with the lowest validation loss."""
    steps = complete_steps(run)
    found = [manifest for step in steps if (manifest := readable(run, step))] if keep_best else []
    best = sorted((one.validation_loss, one.step) for one in found if one.validation_loss is not None and isfinite(one.validation_loss))
    return set(steps[-keep:]) | {step for _, step in best[:keep_best]}


def left_over(run: Path) -> list[Path]:
    """Step folders that are not complete, and temporary ones such as 7.orbax-checkpoint-tmp."""
    return sorted(entry for entry in _entries(run) if _STEP.fullmatch(entry.name.split(".")[0])
                  and not (_STEP.fullmatch(entry.name) and _is_complete(entry)))


def find_step(path: Path) -> Path:
    """The step folder that a path means: a step folder itself, or the latest complete step of a run folder.

    Raises CheckpointError if there is none.
    """
    try:
        if _STEP.fullmatch(path.name) and path.parent.name == FOLDER:
            if _is_complete(path):
                return path
            have = ", ".join(map(str, complete_steps(path.parent.parent))) or "none"
            raise CheckpointError(f"{path} is not a complete checkpoint: the steps this run has are {have}")
        run = run_of(path)
        steps = complete_steps(run)
    except OSError as error:
        raise CheckpointError(f"{error.filename or path} cannot be read ({error.strerror}): give the folder of a run that can") from error
    if not steps:
        what = "holds no complete checkpoint" if os.path.isdir(run) else "does not exist"
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
    return os.path.isfile(entry / ITEM / FILE)


def _entries(run: Path) -> list[Path]:
    folder = run / FOLDER
    return [entry for entry in folder.iterdir() if entry.is_dir()] if os.path.isdir(folder) else []
