"""How many processes are one run, known before jax is imported: from the config, else from SLURM or Open MPI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxmeg.config import DistributedConfig

LAUNCHERS = {
    "SLURM": ("SLURM_NTASKS", "SLURM_PROCID"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}


@dataclass(frozen=True, kw_only=True)
class Processes:
    """Processes of a run."""

    count: int
    index: int
    origin: str
    """Where count and index come from."""


def find_processes(config: DistributedConfig, environ: Mapping[str, str]) -> Processes:
    """What the config says, else what a launcher's environment says, else one process."""
    if config.num_processes is not None:
        return Processes(count=config.num_processes, index=config.process_id or 0, origin="distributed.*")
    for name, (count, index) in LAUNCHERS.items():
        if index in environ and environ.get(count, "").isdigit() and int(environ[count]) > 1:
            return Processes(count=int(environ[count]), index=int(environ[index]), origin=name)
    return Processes(count=1, index=0, origin="one process")
