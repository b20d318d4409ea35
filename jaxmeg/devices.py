"""How many devices a run has, decided before jax is imported: real accelerators, or emulated ones on the CPU.

Several processes on a host share its accelerators evenly; with one process a host it takes them all. jax alone would give each
process that SLURM or Open MPI started one GPU.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxmeg.config import Config
from jaxmeg.hardware import accelerators, jax_lacks
from jaxmeg.processes.find import Processes
from jaxmeg.validate.mesh_rules import is_sized, num_named
from jaxmeg.wording import any_of, divisors

ONE = Processes(count=1, index=0, origin="one process")
LOCAL_IDS = "JAX_LOCAL_DEVICE_IDS"


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
    local: tuple[int, ...] | None = None
    """Which of the host's visible accelerators this process takes; None is all of them."""
    origin: str = ""
    """What decided how many this process has."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """This process's part of the accelerators that it can see."""

    ids: tuple[int, ...] | None
    """Their numbers; None is all."""
    count: int
    origin: str
    problem: str | None = None


def share_of(processes: Processes, num_visible: int, environ: Mapping[str, str]) -> Share:
    """Which of `num_visible` accelerators this process takes, by how many processes of the run share the host.

    JAX_LOCAL_DEVICE_IDS, jax's own variable, comes first; jax reads it for several processes only. A launcher that has already given
    each process accelerators of its own (one visible, or fewer than SLURM says the node has) is left alone.
    """
    asked = environ.get(LOCAL_IDS)
    if asked and processes.count > 1:
        parts = [part.strip() for part in asked.split(",")]
        if not all(part.isdecimal() and int(part) < num_visible for part in parts) or len({*parts}) < len(parts):
            return Share(ids=None, count=num_visible, origin="", problem=(
                f"{LOCAL_IDS}={asked} is not a list of accelerators, each from 0 to {num_visible - 1} and named once: give for example "
                "0,1, or unset it"))
        return Share(ids=tuple(map(int, parts)), count=len(parts), origin=LOCAL_IDS)
    here = processes.on_host or 1
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    given = num_visible == 1 or (processes.host_origin.startswith("SLURM") and on_node.isdigit() and num_visible < int(on_node))
    if here == 1 or given:
        return Share(ids=None, count=num_visible, origin="all that this process sees")
    if num_visible % here:
        sizes = any_of(divisors(num_visible))
        return Share(ids=None, count=num_visible, origin="", problem=(
            f"{here} processes on this host ({processes.host_origin}) do not divide its {num_visible} accelerators: start {sizes} a host"))
    count, rank = num_visible // here, processes.rank_on_host or 0
    return Share(ids=tuple(range(rank * count, (rank + 1) * count)), count=count, origin=f"{processes.host_origin}={here}")


def plan_devices(
    config: Config, environ: Mapping[str, str] | None = None, root: Path = Path("/"), processes: Processes = ONE
) -> Devices:
    """Count the devices without jax. A mesh that does not fit them is refused by `validate.problems`.

    Emulation is automatic only on a machine without an accelerator: then the mesh gets the devices it names. On a
    machine with some that jax cannot use, it has to be asked for. All processes are taken to have as many as this one.
    """
    environ = os.environ if environ is None else environ
    if config.emulate is not None:
        plural = "" if config.emulate == 1 else "s"
        return Devices(
            count=config.emulate, emulated=True, message=f"emulating {config.emulate} device{plural} on the CPU", origin="emulated"
        )
    found = accelerators(environ, root)
    missing = jax_lacks(found)
    if found and missing is None:
        share, asked = share_of(processes, len(found), environ), environ.get(LOCAL_IDS)
        message = (f"warning: {LOCAL_IDS}={asked} has no effect with one process: to use only some of the {len(found)} accelerators set "
                   "CUDA_VISIBLE_DEVICES") if asked and processes.count == 1 else None
        return Devices(count=share.count * processes.count, emulated=False, message=message, problem=share.problem, local=share.ids,
                       origin=share.origin)
    count = num_named(config.mesh) if is_sized(config.mesh) else 1
    if found:
        kind = found[0].split(":")[0]
        problem = (
            f"{len(found)} {kind} accelerators found, but jax cannot use them: {missing}, or run on the CPU with --emulate {count}"
        )
        return Devices(count=count, emulated=False, message=None, problem=problem)
    if config.mesh.dp is None:  # dp takes what is there: at least one device a process
        count = math.lcm(count, processes.count)
    if count == 1:
        return Devices(count=1, emulated=True, message="no accelerator found: running on one CPU device", origin="emulated")
    return Devices(count=count, emulated=True, message=f"no accelerator found: emulating {count} devices on the CPU", origin="emulated")
