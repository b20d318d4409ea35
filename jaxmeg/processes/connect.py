"""Several processes as one run: the roll call, the start of jax's coordination, and what the first process tells the others.

Mesh and data know nothing of processes: an array of the mesh is filled by each process with the rows it holds.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxmeg import _compat
from jaxmeg.config import DistributedConfig
from jaxmeg.devices import Devices
from jaxmeg.processes.find import Processes, find_processes
from jaxmeg.processes.roll_call import StartError, call, resolve, split_address, this_member

ROOM = 4096  # bytes of a text that go from process to process at once
SPARE = 30  # seconds that jax's own start may take after the roll call, at least


def connect(config: DistributedConfig, devices: Devices, silent_seconds: int = 60) -> None:
    """Join the other processes; nothing to do for one. Call before jax sees a device.

    devices: of `cli.start`. Raises StartError, one line, within config.timeout.
    """
    processes = find_processes(config, os.environ)
    if processes.count == 1:
        return
    address, origin = _coordinator(config, processes)
    if processes.index == 0:
        print("\n".join(describe(processes, devices, address, origin)), flush=True)
    try:
        started = time.monotonic()
        host, port = split_address(address)
        resolve(host, port, processes.several_hosts)
        versions = f"Python {platform.python_version()}, jax {jax.__version__}"
        call(this_member(processes, versions, taken(processes, devices, os.environ)), host, port, config.timeout)
        left = int(max(config.timeout - (time.monotonic() - started), SPARE))
        with _deadline(left, f"jax's coordination at {address} did not start within {left} s, though all {processes.count} processes are "
                       "there: see that nothing but this run uses the port, or give another"):
            # All four are given, so that jax asks no launcher and takes no one GPU a process.
            jax.distributed.initialize(address, processes.count, processes.index, devices.local, cluster_detection_method="deactivate",
                                       initialization_timeout=left, heartbeat_timeout_seconds=2 * silent_seconds + 60)
    except StartError:
        if processes.index:
            print("\n".join(describe(processes, devices, address, origin)), file=sys.stderr)
        raise


def describe(processes: Processes, devices: Devices, address: str, origin: str) -> list[str]:
    """What this process takes the run for, and from where."""
    local = devices.count // processes.count
    which = f", numbers {', '.join(map(str, devices.local))}" if devices.local else ""
    return [f"processes   this is {processes.index} of {processes.count} ({processes.origin}); coordinator {address} ({origin})",
            f"            {local} local device{'' if local == 1 else 's'} ({devices.origin}{which})"]


def taken(processes: Processes, devices: Devices, environ: Mapping[str, str]) -> str:
    """`Member.devices` of this process. Nothing where they are emulated, or where a launcher gave each process its own: behind the
    cgroups of SLURM each finds its GPU under the number 0."""
    if devices.emulated or (devices.local is None and processes.rank_on_host is not None):
        return ""
    return f"{environ.get('CUDA_VISIBLE_DEVICES', 'all')} {devices.local or ''}"


def from_first_process(text: str) -> str:
    """The text that process 0 passes, on every process."""
    if jax.process_count() == 1:
        return text
    data = text.encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(-(-len(data) // ROOM)))) * ROOM
    filled = np.frombuffer(data[:size].ljust(size, b"\0"), np.uint8)  # of one size on all
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(filled))).rstrip(b"\0").decode()


def _coordinator(config: DistributedConfig, processes: Processes) -> tuple[str, str]:
    """(host:port of process 0, where it comes from)."""
    if config.coordinator:
        return config.coordinator, "distributed.coordinator"
    if own := os.environ.get("JAX_COORDINATOR_ADDRESS"):
        return own, "JAX_COORDINATOR_ADDRESS"
    if found := _compat.detected_coordinator(config.timeout):
        return found, "found by jax from the launcher's variables"
    raise StartError(f"{processes.count} processes ({processes.origin}), but jax finds no coordinator in their variables: set "
                     "JAX_COORDINATOR_ADDRESS=HOST:PORT, HOST being where process 0 runs, for all processes")


@contextmanager
def _deadline(seconds: float, line: str) -> Iterator[None]:
    """End the process with one line where jax would abort it from C++, which it does after twice its own limit."""
    def end() -> None:
        print(f"error: {line}", file=sys.stderr, flush=True)
        os._exit(2)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
