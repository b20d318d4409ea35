"""How many processes are one run, and which share a host, known before jax is imported: from the config, else from a launcher.

The coordinator's address is left to jax's own detection (`connect`); this names only the variables that jax reads, so that
devices can be counted first. Pure functions of a config and an environment. Must not know jax.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jaxmeg.config import DistributedConfig


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """The variables in which a launcher tells a process its place."""

    name: str
    count: str
    index: str
    rank_on_host: str


LAUNCHERS = (
    # In jax's order: under mpirun inside a SLURM job every process has the SLURM variables of the first.
    Launcher(name="Open MPI", count="OMPI_COMM_WORLD_SIZE", index="OMPI_COMM_WORLD_RANK", rank_on_host="OMPI_COMM_WORLD_LOCAL_RANK"),
    Launcher(name="SLURM", count="SLURM_NTASKS", index="SLURM_PROCID", rank_on_host="SLURM_LOCALID"),
)


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Processes of a run."""

    count: int
    index: int
    origin: str
    """Where count and index come from."""
    on_host: int | None = None
    """Processes of the run on this host, if a launcher says."""
    rank_on_host: int | None = None
    """This one's place among them, from 0."""
    host_origin: str = ""
    """The variable that says how many share the host."""
    problem: str | None = None
    """Why no run can start, with the fix, or None."""
    note: str | None = None
    """What the user should know, in one line, or None."""

    @property
    def several_hosts(self) -> bool:
        """Whether more than one host is known to take part."""
        return self.on_host is not None and self.count > self.on_host


def find_processes(config: DistributedConfig, environ: Mapping[str, str]) -> Processes:
    """What the config says, else what a launcher's environment says, else one process."""
    launcher = next((one for one in LAUNCHERS if one.index in environ and (_number(environ, one.count) or 1) > 1), None)
    if config.num_processes is not None:
        same = launcher is not None and _number(environ, launcher.count) == config.num_processes
        found = Processes(count=config.num_processes, index=config.process_id or 0, origin="distributed.*")
        return _on_host(found, launcher, environ) if launcher and same else found
    if launcher is None:
        return Processes(count=1, index=0, origin="one process", note=_unused(environ))
    count, index = int(environ[launcher.count]), int(environ[launcher.index])
    if launcher.name == "SLURM" and not any(name in environ for name in ("SLURM_STEP_ID", "SLURM_STEP_NODELIST")):
        return Processes(count=count, index=index, origin=launcher.count, problem=(
            f"SLURM_NTASKS={count}, but srun did not start this process, so the others will not come: write srun before python, or ask "
            "SLURM for one task"))
    found = Processes(count=count, index=index, origin=f"{launcher.name}: {launcher.count}, {launcher.index}")
    return _on_host(found, launcher, environ)


def tasks_per_node(text: str) -> list[int]:
    """SLURM's short form of one number a node: "2(x3),1" -> [2, 2, 2, 1]. Empty where it is not of this form."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            return []
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _on_host(found: Processes, launcher: Launcher, environ: Mapping[str, str]) -> Processes:
    """The same with what the launcher says of this host."""
    rank = _number(environ, launcher.rank_on_host)
    if launcher.name == "Open MPI":
        size, origin = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"), "OMPI_COMM_WORLD_LOCAL_SIZE"
    else:
        origin = "SLURM_STEP_TASKS_PER_NODE"
        nodes, node = tasks_per_node(environ.get(origin, "")), _number(environ, "SLURM_NODEID") or 0
        size = nodes[node] if node < len(nodes) else None
        if size is None:
            size, origin = _number(environ, "SLURM_NTASKS_PER_NODE"), "SLURM_NTASKS_PER_NODE"
    return found if rank is None or size is None else replace(found, on_host=size, rank_on_host=rank, host_origin=origin)


def _unused(environ: Mapping[str, str]) -> str | None:
    """What looks like the start of several processes, and is not taken for it."""
    if (_number(environ, "SLURM_NTASKS") or 1) > 1:
        return f"SLURM_NTASKS={environ['SLURM_NTASKS']}, but srun did not start this process: running as one process"
    if "JOB_COMPLETION_INDEX" in environ and "KUBERNETES_SERVICE_HOST" in environ:
        return (f"JOB_COMPLETION_INDEX={environ['JOB_COMPLETION_INDEX']}: this pod runs as one process; for one run over all pods of the "
                "job give --distributed.coordinator, --distributed.num_processes and --distributed.process_id $JOB_COMPLETION_INDEX")
    return None


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdigit() else None
