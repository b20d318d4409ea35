"""Does what one device sends reach the others unchanged? Every pair of devices, then every collective on every mesh axis.

Whole numbers that any float holds exactly go in, so that what comes out is compared bit for bit with numpy's answer, in
fp32 and in bf16. Each process checks what its own devices hold. The collectives are jaxmeg's own verbs (`parallel`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmeg import parallel
from jaxmeg.config import Axis
from jaxmeg.doctor.finding import Finding, Problem, conclude
from jaxmeg.doctor.rates import EMULATED
from jaxmeg.mesh import build_mesh
from jaxmeg.parallel import AXES

ELEMENTS, FEW = 2**22, 2**12  # of the whole tensor on a device; on emulated devices
RUNS, FEW_RUNS = 10, 1  # that are timed
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}
SIDE_BY_SIDE = PartitionSpec(AXES)  # one dim: what each device holds, one after the other
HOW_COUNTED = "GB/s: bytes of the whole (gathered, not scattered) tensor on a device, by seconds; then what a ring sends of it"
FIX = "run again with NCCL_DEBUG=INFO; NCCL_P2P_DISABLE=1 or NCCL_ALGO=Ring tell whether a link or a method is at fault"
FIX_EMULATED = "report it with the versions of jax and jaxlib: devices on a CPU share its memory"

Tell = Callable[[str], object]


def pairs(devices: Sequence[Any], emulated: bool, tell: Tell = lambda _: None) -> Finding:
    """Each device sends to every other, all at once to the one `shift` further, for every shift."""
    n, size = len(devices), FEW if emulated else ELEMENTS
    if n == 1:
        return Finding(name="pairs", status="skipped", line="one device")
    mesh = build_mesh({Axis.DP: n}, devices)
    sent = _numbers(n, size)
    x = _place(mesh, sent.astype(np.float32))
    problems, details, gbytes = [], [EMULATED] if emulated else [], []
    for shift in range(1, n):
        routes = [(i, (i + shift) % n) for i in range(n)]
        tell(f"device 0 to {shift}, 1 to {(1 + shift) % n} and so on")
        body = lambda x, routes=routes: lax.ppermute(x, Axis.DP, routes)
        received, seconds = _run(mesh, body, x, emulated)
        for here, wrong in _wrong(mesh, received, np.roll(sent, shift, axis=0)):
            there = (here - shift) % n
            problems.append(Problem("FAIL", f"device {devices[there].id} to {devices[here].id}: {wrong} of {size} values arrive wrong",
                                    _fix(emulated)))
        gbytes.append(4 * size / seconds / 1e9)
        details.append(f"to the device {shift} further: {gbytes[-1]:.3g} GB/s each, all at once")
    processes = len({device.process_index for device in devices})
    over = f" in {processes} processes" if processes > 1 else ""
    rate = "" if emulated else f", {min(gbytes):.3g} GB/s or more each way"
    fine = f"{n * (n - 1)} pairs of {n} devices{over}: all values arrive{rate}"
    return conclude("pairs", fine, problems, details)


class Verb(NamedTuple):
    """A collective over one axis, here and in numpy."""

    run: Callable[[Any, str], Any]
    """(what this rank holds [E], axis) -> what it holds then. A rank holds a part of E at first if `takes_part`."""
    expected: Callable[[np.ndarray], np.ndarray]
    """The same for a whole group: [ranks, E] -> [ranks, E']."""
    passes: Callable[[int], float]
    """Times the whole tensor that a device sends, by a ring of n ranks."""
    takes_part: bool = False


def _parts(x_RE: np.ndarray) -> np.ndarray:
    """[ranks, E] -> [ranks, ranks, E / ranks]"""
    return x_RE.reshape(len(x_RE), len(x_RE), -1)


def _next(x: Any, axis: str) -> Any:
    n = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


VERBS: Mapping[str, Verb] = {
    "all-reduce": Verb(
        lambda x, axis: parallel.all_sum(x, (axis,)),
        lambda x: np.broadcast_to(x.sum(0), x.shape), lambda n: 2 * (n - 1) / n),
    "all-gather": Verb(
        lambda x, axis: parallel.all_gather(x, (axis,), 0),
        lambda x: np.broadcast_to(x.reshape(-1), (len(x), x.size)), lambda n: (n - 1) / n, takes_part=True),
    "reduce-scatter": Verb(
        lambda x, axis: parallel.reduce_scatter(x, (axis,), 0),
        lambda x: x.sum(0).reshape(len(x), -1), lambda n: (n - 1) / n),
    "all-to-all": Verb(
        lambda x, axis: parallel.all_to_all(x, (axis,), 0, 0),
        lambda x: _parts(x).swapaxes(0, 1).reshape(x.shape), lambda n: (n - 1) / n),
    "permute": Verb(_next, lambda x: np.roll(x, 1, axis=0), lambda n: 1),
    "broadcast": Verb(  # as the step does it: the others add zeros
        lambda x, axis: parallel.all_sum(parallel.only_on(lax.axis_index(axis) == 0, x), (axis,)),
        lambda x: np.broadcast_to(x[0], x.shape), lambda n: 2 * (n - 1) / n),
}


def collectives(sizes: Mapping[str, int], devices: Sequence[Any], emulated: bool, tell: Tell = lambda _: None) -> Finding:
    """sizes: axis -> devices. Every verb on every axis of more than one device, in every dtype."""
    mesh = build_mesh(sizes, devices)
    axes = [axis for axis in AXES if mesh.shape[axis] > 1]
    if not axes:
        return Finding(name="collectives", status="skipped", line="one device")
    problems, details, reduced = [], [EMULATED if emulated else HOW_COUNTED], {}
    for axis in axes:
        n = mesh.shape[axis]
        size = -(-(FEW if emulated else ELEMENTS) // n) * n
        numbers = _numbers(mesh.size, size)
        for name, verb in VERBS.items():
            given = numbers[:, : size // n] if verb.takes_part else numbers
            expected = _grouped(mesh, axis, given, verb.expected)
            for dtype, kind in DTYPES.items():
                where = f"{name} over {axis} in {dtype}"
                tell(where)
                x = _place(mesh, given.astype(kind))
                received, seconds = _run(mesh, lambda x, verb=verb, axis=axis: verb.run(x, axis), x, emulated)
                for here, wrong in _wrong(mesh, received, expected):
                    problems.append(Problem("FAIL", f"{where} is wrong on device {mesh.devices.flat[here].id}: {wrong} of "
                                            f"{expected.shape[1]} values", _fix(emulated)))
                rate = size * np.dtype(kind).itemsize / seconds / 1e9
                details.append(f"{where:<32} {rate:8.3g} GB/s, {rate * verb.passes(n):8.3g} sent by each device")
                reduced.setdefault(axis, rate)
    shown = ", ".join(f"{axis}={mesh.shape[axis]}" + ("" if emulated else f" (all-reduce {reduced[axis]:.3g} GB/s)") for axis in axes)
    fine = f"{len(VERBS)} collectives in {' and '.join(DTYPES)} agree with numpy over {shown}"
    return conclude("collectives", fine, problems, details)


def _fix(emulated: bool) -> str:
    return FIX_EMULATED if emulated else FIX


def _numbers(num_devices: int, size: int) -> np.ndarray:
    """-1, 0 or 1, int16 [devices, size]: sums over up to 256 devices are exact in bf16."""
    return np.random.default_rng(0).integers(-1, 2, (num_devices, size), np.int16)


def _place(mesh: Mesh, host: np.ndarray) -> jax.Array:
    """Row d of [devices, ...] on device d of the mesh; in several processes each places the rows of its own devices."""
    flat = host.reshape(-1)
    return jax.make_array_from_callback(flat.shape, NamedSharding(mesh, SIDE_BY_SIDE), lambda index: flat[index])


def _run(mesh: Mesh, body: Callable[[Any], Any], x: jax.Array, emulated: bool) -> tuple[jax.Array, float]:
    """(what each device holds afterwards, side by side; seconds of a run)."""
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=SIDE_BY_SIDE, out_specs=SIDE_BY_SIDE))
    result = jax.block_until_ready(program(x))
    runs = FEW_RUNS if emulated else RUNS
    started = time.perf_counter()
    for _ in range(runs):
        again = program(x)
    jax.block_until_ready(again)
    return result, (time.perf_counter() - started) / runs


def _grouped(mesh: Mesh, axis: str, rows: np.ndarray, expected: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Numpy's answer for each group of the axis: [devices, E] -> [devices, E']."""
    at = AXES.index(axis)
    groups = np.moveaxis(np.arange(mesh.size).reshape(mesh.devices.shape), at, -1).reshape(-1, mesh.shape[axis])
    answers = {int(device): row for group in groups for device, row in zip(group, expected(rows[group]), strict=True)}
    return np.stack([answers[device] for device in range(mesh.size)])


def _wrong(mesh: Mesh, received: jax.Array, expected: np.ndarray) -> list[tuple[int, int]]:
    """(position in the mesh, values that differ) of this process's devices that hold something else than expected."""
    position = {device: index for index, device in enumerate(mesh.devices.flat)}
    found = []
    for shard in received.addressable_shards:
        here = position[shard.device]
        wrong = int(np.sum(np.asarray(shard.data).astype(np.float32) != expected[here]))
        if wrong:
            found.append((here, wrong))
    return sorted(found)
