"""Kernels from a profile of a few steps. On a GPU, one line of the profile is a stream; on a CPU, a thread that runs instructions.

Reference: https://docs.jax.dev/en/latest/profiling.html, jax.profiler.ProfileData.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxmeg.bench.breakdown import Kernel


def kernels_of(run: Callable[[], object]) -> list[Kernel]:
    """Profile `run`, which must wait for the devices, and read its kernels."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        with jax.profiler.trace(folder):
            run()
        return [kernel for file in Path(folder).rglob("*.xplane.pb") for kernel in read(file)]


def read(file: Path) -> list[Kernel]:
    """The kernels in an .xplane.pb."""
    return kernels_in(jax.profiler.ProfileData.from_file(str(file)).planes)


def kernels_in(planes: Iterable[Any]) -> list[Kernel]:
    """The kernels of a profile's planes: those of the GPUs if there are any, else what the host's threads ran."""
    planes = list(planes)
    gpus = [plane for plane in planes if "GPU" in plane.name]
    # other lines of a GPU's plane repeat what its streams have
    lines = [(plane, line) for plane in gpus or planes for line in plane.lines if not gpus or line.name.startswith("Stream")]
    return [kernel for plane, line in lines for kernel in own_time(_events(plane.name if gpus else None, line))]


def _events(gpu: str | None, line: Any) -> Iterator[Kernel]:
    for event in line.events:
        stats = {name: value for name, value in event.stats if name in ("hlo_op", "device_ordinal")}
        if gpu or "hlo_op" in stats:
            device, start = gpu or str(stats.get("device_ordinal", 0)), event.start_ns
            yield Kernel(device, event.name, str(stats.get("hlo_op", "")), start, start + event.duration_ns, event.duration_ns)


def own_time(events: Iterable[Kernel]) -> list[Kernel]:
    """The same with the time of those inside of another taken from that one: a CPU's loops hold the instructions that they run."""
    found: list[Kernel] = []
    around: list[int] = []  # places in found of what runs, outermost first
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        while around and found[around[-1]].end <= event.start:
            around.pop()
        if around:
            outer = found[around[-1]]
            found[around[-1]] = outer._replace(own=max(0.0, outer.own - event.own))
        around.append(len(found))
        found.append(event)
    return found
