"""How many devices a run has, decided before jax is imported: real accelerators, or emulated ones on the CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxmeg.config import Config
from jaxmeg.hardware import accelerators, jax_lacks
from jaxmeg.validate.mesh_rules import is_sized, num_named


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of a run."""

    count: int
    """Devices of the mesh, over all processes."""
    emulated: bool
    """Whether jax must be told to emulate `count` devices on the CPU."""
    message: str | None
    """One line for the user, or None."""
    problem: str | None = None
    """Why no run can start on this machine, with the fix, or None."""


def plan_devices(
    config: Config, environ: Mapping[str, str] | None = None, root: Path = Path("/"), num_processes: int = 1
) -> Devices:
    """Count the devices without jax. A mesh that does not fit them is refused by `validate.problems`.

    Emulation is automatic only on a machine without an accelerator: then the mesh gets the devices it names. On a
    machine with some that jax cannot use, it has to be asked for. `num_processes` processes are taken to have the same
    number of accelerators each.
    """
    if config.emulate is not None:
        plural = "" if config.emulate == 1 else "s"
        return Devices(
            count=config.emulate, emulated=True, message=f"emulating {config.emulate} device{plural} on the CPU"
        )
    found = accelerators(os.environ if environ is None else environ, root)
    missing = jax_lacks(found)
    if found and missing is None:
        return Devices(count=len(found) * num_processes, emulated=False, message=None)
    count = num_named(config.mesh) if is_sized(config.mesh) else 1
    if found:
        kind = found[0].split(":")[0]
        problem = (
            f"{len(found)} {kind} accelerators found, but jax cannot use them: {missing}, or run on the CPU with --emulate {count}"
        )
        return Devices(count=count, emulated=False, message=None, problem=problem)
    if count == 1:
        return Devices(count=1, emulated=True, message="no accelerator found: running on one CPU device")
    return Devices(count=count, emulated=True, message=f"no accelerator found: emulating {count} devices on the CPU")
