"""Memory of the devices: what the allocator says, and what the train step holds by line, before it has run once.

Parameters and optimizer state follow from shapes and shardings; the ring of residuals from tracing one layer; the rest
from the compiled program's own account. Nothing is compiled or allocated here. All figures are bytes of one device.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from jaxmeg.parallel import AXES
from jaxmeg.setup import Setup
from jaxmeg.state import abstract_state
from jaxmeg.step import ROWS, Rows, on_mesh, work_of


class Usage(NamedTuple):
    """What the allocator of one device says, in bytes."""

    in_use: int
    peak: int
    """The largest in_use since the process started."""
    limit: int | None
    """What it may take at most; None if it does not say."""


def device_memory(devices: list[Any]) -> list[Usage] | None:
    """Usage of this process's devices, in their order; None where the backend keeps no account, as a CPU does."""
    stats = [device.memory_stats() for device in devices if device.process_index == jax.process_index()]
    if not all(stats):
        return None
    return [Usage(s["bytes_in_use"], s["peak_bytes_in_use"], s.get("bytes_limit")) for s in stats]


def memory_record(devices: list[Any]) -> dict[str, Any]:
    """Columns of the log: a list over this process's devices each, and the largest difference of in_use between two of
    them. Empty where the backend keeps no account."""
    usage = device_memory(devices)
    if usage is None:
        return {}
    in_use = [u.in_use for u in usage]
    return {"memory_in_use": in_use, "memory_peak": [u.peak for u in usage], "memory_limit": [u.limit for u in usage],
            "memory_spread": max(in_use) - min(in_use)}


class Lines(NamedTuple):
    """Bytes of one device while the train step runs."""

    parameters: int
    """fp32 masters."""
    optimizer: int
    """Moments and whatever else the optimizer keeps."""
    ring: int
    """Residuals of the forward passes whose backward pass is still to come."""
    temporaries: int
    """Everything else that lives during a step: gradients, gathered weights, activations, logits, buffers."""
    rest: int
    """The batch, the counters, the metrics."""

    @property
    def total(self) -> int:
        """What the compiled program asks for: arguments, results that are no arguments, temporaries."""
        return sum(self)


def memory_lines(setup: Setup, rows: Any, compiled: Any) -> Lines:
    """The lines of a compiled train step. rows: its batch, as arrays or ShapeDtypeStructs. A module of the user's has no
    ring: what its forward passes keep is among the temporaries."""
    state, account = abstract_state(setup), compiled.memory_analysis()
    parameters, optimizer = device_bytes(state.params), device_bytes(state.opt_state)
    held = account.argument_size_in_bytes + account.output_size_in_bytes - account.alias_size_in_bytes
    ring = 0 if setup.own else ring_bytes(setup, rows)
    return Lines(parameters=parameters, optimizer=optimizer, ring=ring, temporaries=account.temp_size_in_bytes - ring,
                 rest=held - parameters - optimizer)


def device_bytes(tree: Any) -> int:
    """Bytes that one device holds of a tree of arrays or ShapeDtypeStructs with shardings."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def ring_bytes(setup: Setup, rows: Rows) -> int:
    """Bytes of the pipeline's ring (without a pipeline: of one microbatch's residuals) on one device, traced."""
    def ring(params: Any, rows: Rows, key: jax.Array) -> list[jax.Array]:
        return work_of(setup, params, rows, rows.mask.astype("float32"), key).empty_ring(setup.table.ring_slots)

    everywhere = PartitionSpec(AXES)  # one device's leaves side by side
    traced = on_mesh(setup, ring, (setup.layout.specs, ROWS, PartitionSpec()), everywhere)
    shapes = jax.eval_shape(traced, abstract_state(setup).params, rows, jax.ShapeDtypeStruct((2,), "uint32"))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) // setup.mesh.devices.size


def describe(lines: Lines, devices: list[Any]) -> str:
    """The lines, then what the devices have, in one line of text."""
    parts = ", ".join(f"{name} {gib(size)}" for name, size in lines._asdict().items())
    usage = device_memory(devices)
    limits = [u.limit for u in usage or [] if u.limit]
    has = f"of {gib(min(limits))}" if limits else f"(the {devices[0].platform} backend does not say how much there is or is in use)"
    return f"{gib(lines.total)} a device {has}: {parts}"


def gib(size: int) -> str:
    """Bytes as GiB, or as MiB below 0.1 GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 0.1 * 2**30 else f"{size / 2**20:.2f} MiB"
