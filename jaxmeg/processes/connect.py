"""Several processes as one run: the start of jax's coordination, and what the first process tells the others.

Mesh and data know nothing of processes: an array of the mesh is filled by each process with the rows it holds.
"""

from __future__ import annotations

import os

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxmeg.config import DistributedConfig
from jaxmeg.processes.find import find_processes


def connect(config: DistributedConfig) -> None:
    """Join the other processes; nothing to do for one. Call before jax sees a device."""
    processes = find_processes(config, os.environ)
    if processes.count == 1:
        return
    if config.num_processes is None:  # jax reads the launcher's environment itself
        jax.distributed.initialize()
    else:
        jax.distributed.initialize(config.coordinator, processes.count, processes.index)


def from_first_process(text: str) -> str:
    """The text that process 0 passes, on every process."""
    if jax.process_count() == 1:
        return text
    room = np.zeros(4096, np.uint8)
    data = np.frombuffer(text.encode(), np.uint8)
    room[: len(data)] = data
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(room))).rstrip(b"\0").decode()
