"""Reading checkpoints into any layout: canonical arrays straight into this mesh's shards, then into memory order.

What is stored is compared with what this run needs by name, shape and dtype before an array is read, and with the
checksums of the manifest before one is used. Nothing is needed of the layout that saved it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from jaxmeg.checkpoint.canonical import CanonicalLeaf, Leaves, canonical_leaves, checksums, flatten, from_canonical, unflatten
from jaxmeg.checkpoint.manifest import CheckpointError, Leaf, Manifest, another_step, find_step, leaf_problems, read_manifest, step_folder
from jaxmeg.checkpoint.resume import arch_changes, problems
from jaxmeg.checkpoint.save import array_handler, by_item
from jaxmeg.optim.build import learning_rate
from jaxmeg.precision import init_loss_scale
from jaxmeg.processes.agree import together
from jaxmeg.processes.connect import from_first_process
from jaxmeg.setup import Setup
from jaxmeg.state import TrainState, abstract_state
from jaxmeg.wording import shown

MOST_NAMED = 6  # problems in one message


class RestoreError(CheckpointError):
    """A checkpoint that does not fit this run, or is damaged; nothing was restored."""


def restore(setup: Setup, path: Path) -> tuple[TrainState, Manifest]:
    """The whole state in this setup's shardings, and what the checkpoint says of itself, `rows` among it.

    path: a run folder, for its latest complete step, or a step folder. Where another compute dtype was saved, the loss
    scale starts afresh. Raises CheckpointError where there is no checkpoint, RestoreError where it does not fit or the
    config changes what it may not (`resume.problems`).
    """
    folder, manifest = _open(path)
    found = problems(manifest, setup.config, setup.resolved.arch, learning_rate)
    if manifest.compute != setup.compute and not found and not setup.config.checkpoint.allow_changes:  # auto, on another chip
        found = [f"resume: precision.compute={setup.config.precision.compute} is {setup.compute} here and was {manifest.compute}: use "
                 f"--precision {manifest.compute}, or add --checkpoint.allow_changes true"]
    if found:
        raise RestoreError("\n".join(found))
    leaves = _read(folder, manifest, canonical_leaves(setup), "resume with its model and optimizer, or take its weights with --init_from")
    state: TrainState = unflatten(abstract_state(setup), leaves)
    if manifest.compute != setup.compute:
        fresh = init_loss_scale(setup.compute, setup.config.precision.loss_scale_init)
        state = state._replace(loss_scale=jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), fresh, state.loss_scale))
    return state, manifest


def restore_weights(setup: Setup, path: Path) -> Any:
    """Parameters alone, in this setup's shardings: the start of another run. Raises like `restore`."""
    folder, manifest = _open(path)
    wanted = by_item(canonical_leaves(setup))["params"]
    changes = ", ".join(map(str, arch_changes(manifest.arch, setup.resolved.arch))) or "its own"
    leaves = _read(folder, manifest, wanted, f"take the checkpoint's model ({changes})")
    return unflatten({"params": abstract_state(setup).params}, leaves)["params"]


def _open(path: Path) -> tuple[Path, Manifest]:
    """The step that all processes read, and its manifest."""
    together("restore")
    folder = find_step(Path(os.path.realpath(path)))
    folder = step_folder(folder.parent.parent, int(from_first_process(folder.name)))
    return folder, read_manifest(folder)


def _read(folder: Path, manifest: Manifest, leaves: Mapping[str, CanonicalLeaf], fix: str) -> Leaves:
    """These leaves in memory order. Compared with the arrays on disk before, and with the manifest before and after."""
    wanted = {name: Leaf(shape=leaf.shape, dtype=str(leaf.dtype)) for name, leaf in leaves.items()}
    items = by_item(leaves)
    stored = {name: leaf for item in items for name, leaf in _stored_leaves(folder / item).items()}
    listed = {name: leaf for item in items for name, leaf in by_item(manifest.leaves).get(item, {}).items()}
    _refuse(folder, leaf_problems(stored, wanted), fix)
    _refuse(folder, leaf_problems(listed, wanted), f"the manifest does not describe the arrays: {another_step(folder)}")
    for item, part in items.items():
        _check_size(folder / item, part)
    arrays = {name: x for item, part in items.items() for name, x in _read_arrays(folder / item, part).items()}
    sums = checksums(arrays)
    damaged = [f"{name} does not have its checksum" for name, leaf in listed.items() if sums[name] != leaf.checksum]
    _refuse(folder, damaged, f"it is damaged: {another_step(folder)}")
    return from_canonical(leaves)(arrays)


def _stored_leaves(folder: Path) -> dict[str, Leaf]:
    """What is on disk, whatever the manifest says."""
    try:
        handler: Any = array_handler()
        tree = handler.metadata(folder).tree
    except Exception as error:  # Orbax raises what it meets, also plain Exception
        raise RestoreError(f"{folder} cannot be read ({_line(error)}): {another_step(folder)}") from error
    return {name: Leaf(shape=tuple(x.shape), dtype=str(np.dtype(x.dtype))) for name, x in flatten(tree).items()}


def _check_size(folder: Path, leaves: Mapping[str, CanonicalLeaf]) -> None:
    """Files hold arrays uncompressed, so that missing or shortened ones are seen before they are read."""
    held, needed = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()), sum(leaf.num_bytes for leaf in leaves.values())
    if held < needed:
        reason = f"its files have {held:,} bytes for arrays of {needed:,}: some are gone or cut short"
        raise RestoreError(f"{folder} cannot be read ({_which(folder, leaves)}{reason}): {another_step(folder)}")


def _read_arrays(folder: Path, leaves: Mapping[str, CanonicalLeaf]) -> dict[str, jax.Array]:
    target = {name: leaf.abstract for name, leaf in leaves.items()}
    args = ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
    try:
        with ocp.Checkpointer(array_handler()) as reader:
            return reader.restore(folder, args=args)
    except Exception as error:  # Orbax raises what it meets, also plain Exception
        raise RestoreError(f"{folder} cannot be read ({_which(folder, leaves)}{_line(error)}): {another_step(folder)}") from error


def _which(folder: Path, names: Iterable[str]) -> str:
    """The leaves that cannot be read one by one, as the start of a sentence; nothing if there are none."""
    found = [name for name in names if not _is_readable(folder, name)]
    return f"{_some(found)}: " if found else ""


def _is_readable(folder: Path, name: str) -> bool:
    store = {"driver": "ocdbt", "base": f"file://{folder}"}
    try:
        ts.open({"driver": "zarr", "kvstore": store, "path": f"{name}/"}).result().read().result()
    except ValueError:  # all that tensorstore raises
        return False
    return True


def _refuse(folder: Path, found: list[str], fix: str) -> None:
    if found:
        raise RestoreError(f"{folder} does not fit: {_some(found)}: {fix}")


def _some(found: list[str]) -> str:
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return ", ".join(found[:MOST_NAMED]) + more


def _line(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0].partition(". See full TensorStore details")[0]
    files = re.findall(r'local file "([^"]*[^/"])"', text)  # tensorstore names the file far into a long line
    return f"{type(error).__name__}: {f'{Path(files[-1]).name}: ' if files else ''}{shown(text)}"
