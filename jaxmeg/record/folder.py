"""The run folder: a name of its own, the config, the sizes that follow from it, and what it ran on.

    config.yaml    every option, ready for --config
    resolved.json  mesh, batch, pipeline and model sizes that the config left to the program
    versions.json  packages, devices, driver, commit, command line, start

One process writes these. Nothing is overwritten: a new run takes the next free name, a resumed one numbers the old files.
"""

from __future__ import annotations

import errno
import json
import math
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import yaml

from jaxmeg.arch import num_params
from jaxmeg.layout import is_leaf_layout
from jaxmeg.setup import Setup

CONFIG, RESOLVED, VERSIONS = "config.yaml", "resolved.json", "versions.json"
PACKAGES = ("jaxmeg", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain", "tensorboardX")
ACCELERATOR_PACKAGES = ("nvidia-", "jax-cuda", "libtpu")
ENVIRONMENT = ("JAX_", "XLA_", "NCCL_", "CUDA_VISIBLE_DEVICES", "TPU_")


def new_folder(wanted: Path, setup: Setup) -> Path:
    """Make the folder of a new run and write its three files: `wanted`, or the next free NAME-2, NAME-3, ... if that holds
    a run. Of two runs that start at once, the one that comes second to config.yaml goes on to the next name.

    Raises OSError where nothing can be written.
    """
    text, folder, count = _files(setup), wanted, 1
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with (folder / CONFIG).open("x") as file:
                file.write(text.pop(CONFIG))
            break
        except FileExistsError:
            count += 1
            folder = wanted.with_name(f"{wanted.name}-{count}")
    for name in text:
        (folder / name).write_text(text[name])
    return folder


def reopen_folder(folder: Path, setup: Setup) -> None:
    """Write the three files of a start that goes on with the run in `folder`; those of the starts before it are kept as
    config.1.yaml, config.2.yaml, ..."""
    text = _files(setup)
    number = next(n for n in range(1, sys.maxsize) if not any(_numbered(folder / name, n).exists() for name in text))
    for name in text:
        fresh = folder / f"{name}.tmp"
        fresh.write_text(text[name])
        if (folder / name).exists():
            shutil.copy2(folder / name, _numbered(folder / name, number))  # at no moment is there none: without config.yaml it is no run
        fresh.replace(folder / name)


def unwritable(folder: Path) -> str | None:
    """Why no run can be written to `folder`, which need not exist yet, in one line; None if it seems to be possible."""
    first = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists() or path.is_symlink())
    if not first.is_dir():
        return cannot_write(folder, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(first)))
    if not os.access(first, os.W_OK | os.X_OK):
        return cannot_write(folder, PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(first)))
    return None


def cannot_write(folder: Path, error: OSError) -> str:
    """The line for a folder that can't be made or written."""
    where = "" if str(error.filename or folder) == str(folder) else f"{error.filename}: "
    if (folder / CONFIG).exists():
        return (f"the run in {folder} cannot be written ({where}{error.strerror}): see that it can, or start a new one with "
                f"--init_from {folder}")
    return f"train.out={folder} cannot be written ({where}{error.strerror}): give another --out"


def _files(setup: Setup) -> dict[str, str]:
    # without what belongs to this start, or --config with this file would go on with the run
    again = replace(setup.config.checkpoint, resume=None, allow_changes=False)
    return {
        CONFIG: yaml.safe_dump(asdict(replace(setup.config, checkpoint=again)), sort_keys=False),
        RESOLVED: json.dumps(resolved_record(setup), indent=2) + "\n",
        VERSIONS: json.dumps(versions_record(list(setup.mesh.devices.flat)), indent=2) + "\n",
    }


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


def resolved_record(setup: Setup) -> dict[str, Any]:
    """Everything the config left to the program, as plain values. Of a module of the user's: what is true of it."""
    resolved, user = setup.resolved, setup.user_schedule
    sizes = asdict(replace(resolved, user_schedule=None)) | {"compute": setup.compute}
    if setup.own:
        leaves = jax.tree.leaves(setup.layout.leaves, is_leaf=is_leaf_layout)
        kept = ("num_devices", "mesh", "local_rows", "microbatch", "num_microbatches", "compute")
        return {name: sizes[name] for name in kept} | {"num_params": sum(math.prod(leaf.shape) for leaf in leaves)}
    return sizes | {
        "user_schedule": user and [" ".join(user.show(op) for op in stage) for stage in user.orders],
        "num_params": num_params(resolved.arch),
        "attention": setup.model.options.kernel,
        "attention_why": setup.kernel_reason,
        "bubble": float(resolved.bubble),
        "ring_slots": setup.table.ring_slots,
    }


def versions_record(devices: list[Any]) -> dict[str, Any]:
    """What the run runs on. Values that this machine does not tell are null."""
    client = devices[0].client
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "host": platform.node(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES} | _accelerator_packages(),
        "platform": client.platform,
        "platform_version": client.platform_version,
        "driver": _driver(),
        "devices": dict(Counter(device.device_kind for device in devices)),
        "processes": jax.process_count(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(ENVIRONMENT)},
        "git": git_state(Path(__file__).parents[2]),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _accelerator_packages() -> dict[str, str]:
    """CUDA, cuDNN, NCCL and the plugins, where they are installed as packages."""
    found = {dist.name.lower().replace("_", "-"): dist.version for dist in metadata.distributions()}
    return {name: version for name, version in sorted(found.items()) if name.startswith(ACCELERATOR_PACKAGES)}


def _driver() -> str | None:
    """The NVIDIA driver's own line."""
    file = Path("/proc/driver/nvidia/version")
    return file.read_text().splitlines()[0] if file.is_file() else None


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit, and whether tracked files differ from it, if `root` is a checkout that git can read; else None."""
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None
