"""The planner's rates, measured on the devices at hand in a minute: the model's own matmuls and attention, memory, links, the host.

What can't be measured here (attention kernels of a chip, links of one device) keeps its published share. The result is a YAML file
that `scripts/plan.py --rates` reads. Large transfers give a link's rate, small ones a collective's latency.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxmeg import parallel
from jaxmeg.bench import roof
from jaxmeg.bench.work import AttentionWork, pieces
from jaxmeg.config import Axis
from jaxmeg.doctor import rates as devices_alone
from jaxmeg.files import ContentError, read_yaml
from jaxmeg.hardware import peak_tflops
from jaxmeg.mesh import build_mesh
from jaxmeg.planner.rates import Rates
from jaxmeg.setup import Setup
from jaxmeg.wording import shown

LARGE, SMALL = 2**28, 2**12  # bytes of a collective's whole tensor
RUNS = 10
KEYS = tuple(field.name for field in fields(Rates) if field.name not in ("measured", "network_gb_s", "fp8_tflops"))


class RatesError(ValueError):
    """A file of rates that can't be used: one line of value, rule and fix."""


def measure(setup: Setup, tell: Callable[[str], object] = lambda _: None) -> dict[str, float]:
    """Fields of `Rates` by name, on the setup's devices. tell: is told what comes next."""
    devices = list(setup.mesh.devices.flat)
    emulated = devices[0].platform == "cpu"
    tell("matrices and attention")
    work = pieces(setup.resolved, setup.config.data.seq_len)
    peak = peak_tflops(devices[0].device_kind) or 0.01
    timed = roof.measure(work, setup.compute, setup.model.options.kernel, peak)
    tell("memory")
    alone = devices_alone.measure(devices[:1], emulated)[0]
    tell("the host")
    found = {"matmul_tflops": _tflops(timed, attention=False), "attention_tflops": _tflops(timed, attention=True),
             "memory_gb_s": alone.gbytes, "host_gb_s": _host(devices[0])}
    if len(devices) > 1:
        tell("links")
        found |= _links(devices)
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def _tflops(timed: list[roof.Timed], attention: bool) -> float:
    """Over all pieces of one kind, each as often as a step has it."""
    own = [one for one in timed if isinstance(one.piece, AttentionWork) == attention]
    return sum(one.piece.flops * float(one.piece.times) for one in own) / roof.total(own) / 1e12


def _host(device: Any) -> float:
    """GB/s from the host's memory to a device."""
    host = np.ones(LARGE // 4, np.float32)
    seconds = _best(lambda: jax.device_put(host, device))
    return host.nbytes / seconds / 1e9


def _links(devices: list[Any]) -> dict[str, float]:
    """An all-gather over all devices: of a large tensor for the links, of a small one for what it costs besides."""
    n = len(devices)
    mesh = build_mesh({Axis.DP: n}, devices)
    spec = PartitionSpec(parallel.AXES)
    gather = jax.jit(jax.shard_map(lambda x: lax.all_gather(x, Axis.DP, tiled=True), mesh=mesh, in_specs=spec, out_specs=spec))

    def seconds(size: int) -> float:
        x = jax.device_put(jnp.zeros(size // 4 // n * n, jnp.float32), NamedSharding(mesh, spec))
        return _best(lambda: gather(x))

    small, large = seconds(SMALL), seconds(LARGE)
    return {"node_gb_s": LARGE * (n - 1) / n / max(large - small, 1e-9) / 1e9, "latency": small, "hop": 0.0}


def _best(run: Callable[[], Any]) -> float:
    jax.block_until_ready(run())  # compiles
    found = []
    for _ in range(RUNS):
        started = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - started)
    return min(found)


# ------------------------------------------------------------------ the file
def read_rates(path: str) -> Mapping[str, float]:
    """The rates of a file that scripts/calibrate.py wrote. Raises RatesError."""
    try:
        content = read_yaml(path)
    except OSError as error:
        raise RatesError(f"--rates {shown(path)}: cannot be read ({error.strerror}): give a file of scripts/calibrate.py") from None
    except ContentError as error:
        raise RatesError(f"--rates {shown(path)}: is not valid YAML: {error}") from None
    rates = content.get("rates") if isinstance(content, dict) else None
    if not isinstance(rates, dict) or not rates:
        raise RatesError(f"--rates {shown(path)}: holds no rates: give a file of scripts/calibrate.py")
    for name, value in rates.items():
        if name not in KEYS:
            raise RatesError(f"--rates {shown(path)}: unknown rate {shown(name)}: it may hold {', '.join(KEYS)}")
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e12 or (not value and name != "hop"):
            raise RatesError(f"--rates {shown(path)}: {name}={shown(value)} is not a positive number: measure it again")
    return rates
