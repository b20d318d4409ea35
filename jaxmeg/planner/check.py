"""A plan against the compiler: the real train step compiled for GPUs that are not there, its memory and its traffic beside the formulas.

Needs the `aot` extra, and `_compat.prepare_gpu_topology` before jax is first used.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from importlib import resources

from jaxmeg import hlo
from jaxmeg.aot import compile_train_step, gpu_devices
from jaxmeg.planner.chips import Chip, Cluster
from jaxmeg.planner.search import Plan, compute_of


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What the compiler says of a plan. Bytes are of one GPU."""

    arguments: int
    """State and batch."""
    temporaries: int
    other: int
    """Results that take no argument's place."""
    moved: dict[tuple[str, tuple[str, ...]], tuple[int, int]]
    """(op, axes) -> (runs, bytes of the gathered tensors) of one step."""
    kernel: str
    """Why attention takes the kernel it takes."""
    seconds: float
    """That compiling took."""

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries + self.other


def target_of(chip: Chip) -> str | None:
    """The name of the chip's description in jaxmeg/targets, or None where there is none."""
    name = chip.name.lower()
    return name if (resources.files("jaxmeg") / "targets" / f"{name}.txt").is_file() else None


def compile_plan(plan: Plan, cluster: Cluster, target: str) -> Checked:
    """target: as `target_of` gives it."""
    config = replace(plan.config, precision=replace(plan.config.precision, compute=compute_of(plan.config, cluster)))
    started = time.perf_counter()
    setup, compiled = compile_train_step(config, gpu_devices(target, cluster.count))
    seconds = time.perf_counter() - started
    sizes = compiled.memory_analysis()
    assert sizes is not None, "the GPU compiler gives an account of its memory"
    program = hlo.read(compiled.as_text(), {str(axis): size for axis, size in plan.resolved.mesh.items()})
    moved: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for c in program.collectives:
        if c.axes:
            runs, total = moved.get((c.op, c.axes), (0, 0))
            moved[c.op, c.axes] = (runs + c.count, total + c.count * c.bytes)
    return Checked(arguments=sizes.argument_size_in_bytes, temporaries=sizes.temp_size_in_bytes,
                   other=sizes.output_size_in_bytes - sizes.alias_size_in_bytes, moved=moved, kernel=setup.kernel_reason, seconds=seconds)
