"""How fast each device multiplies matrices and moves its own memory, a fraction of a second each.

Devices of one kind should be alike: one that is far below its peers is hot, capped or shared. `measure` runs on the
devices of this process, one after the other; `rates` judges plain figures. Must not know models or meshes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmeg.doctor.finding import Finding, Problem, conclude
from jaxmeg.hardware import peak_tflops

SLOW = 0.8  # of the median of the peers
FAR_BELOW_PEAK = 0.5
SECONDS = 0.2  # of each measurement
EMULATED = "emulated: rates mean nothing"


class Sizes(NamedTuple):
    """width: of square bf16 matrices; words: fp32 values that are read and written."""

    width: int
    words: int


REAL, TINY = Sizes(8192, 2**28), Sizes(128, 2**16)


class Rate(NamedTuple):
    """Of one device."""

    device: str
    kind: str
    tflops: float
    """bf16 products, fp32 sums."""
    gbytes: float
    """GB/s, read and written."""


def measure(devices: Sequence[Any], emulated: bool, tell: Callable[[str], object] = lambda _: None) -> list[Rate]:
    """Time each device alone. tell: is told which one it is at."""
    size = TINY if emulated else REAL
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((size.width, size.width), np.float32) / size.width**0.5  # keeps products at the size of what went in
    found = []
    for device in devices:
        tell(f"device {device.id}")
        a = jax.device_put(jnp.asarray(matrix, jnp.bfloat16), device)
        x = jnp.ones(size.words, jnp.float32, device=device)
        products = _per_call(jax.jit(lambda n, a: lax.fori_loop(0, n, lambda _, y: y @ a, a)), a, emulated)
        copies = _per_call(jax.jit(lambda n, x: lax.fori_loop(0, n, lambda _, y: y * np.float32(0.5) + np.float32(1), x)), x, emulated)
        found.append(Rate(str(device.id), device.device_kind, 2 * size.width**3 / products / 1e12, 2 * x.nbytes / copies / 1e9))
    return found


def _per_call(loop: Any, x: jax.Array, emulated: bool) -> float:
    """Seconds of one turn of `loop(turns, x)`: the better of two runs of about SECONDS."""
    def timed(turns: int) -> float:
        started = time.perf_counter()
        jax.block_until_ready(loop(turns, x))
        return time.perf_counter() - started

    timed(1)
    turns = 1 if emulated else min(10_000, max(1, round(4 * SECONDS / timed(4))))
    return min(timed(turns), timed(turns)) / turns


def rates(found: Sequence[Rate], emulated: bool) -> Finding:
    """The slowest and fastest device, and which are far below their peers."""
    tflops, gbytes = [rate.tflops for rate in found], [rate.gbytes for rate in found]
    fine = f"matmul {_span(tflops)} TFLOP/s, memory {_span(gbytes)} GB/s" + (f" ({EMULATED})" if emulated else "")
    details = [f"device {rate.device}: {rate.tflops:.3g} TFLOP/s, {rate.gbytes:.4g} GB/s, {rate.kind}" for rate in found]
    return conclude("rates", fine, [] if emulated else _slow(found), details)


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _slow(found: Sequence[Rate]) -> Iterator[Problem]:
    cause = "look at its clocks, temperature and power limit (nvidia-smi -q), and for other processes on it"
    for what, unit, values in (("multiplies at", "TFLOP/s", [rate.tflops for rate in found]),
                               ("moves memory at", "GB/s", [rate.gbytes for rate in found])):
        usual = median(values)
        for rate, value in zip(found, values, strict=True):
            if value < SLOW * usual:
                yield Problem("warn", f"device {rate.device} {what} {value:.3g} {unit}, its peers at {usual:.3g}", cause)
    for rate in found:
        peak = peak_tflops(rate.kind)
        if peak and rate.tflops < FAR_BELOW_PEAK * peak:
            yield Problem("warn", f"device {rate.device} multiplies at {rate.tflops:.3g} of {peak:.3g} TFLOP/s", cause)
