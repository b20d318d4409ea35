"""The real train step compiled ahead of time for GPUs that are not there: memory, traffic and kernels before a run.

Needs the `aot` extra. References: JAX's ahead-of-time lowering; the target descriptions in jaxmeg/targets.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import jax

from jaxmeg import _compat
from jaxmeg.config import Config
from jaxmeg.setup import Setup, build
from jaxmeg.state import abstract_state
from jaxmeg.step import abstract_rows, make_train_step


def gpu_devices(chip: str, count: int) -> list[Any]:
    """Stand-ins for `count` GPUs of one host. chip: a file of jaxmeg/targets without its ending, e.g. h200."""
    text = (resources.files("jaxmeg") / "targets" / f"{chip}.txt").read_text()
    return _compat.gpu_topology(text, count)


def compile_train_step(config: Config, devices: list[Any], packed: bool = False) -> tuple[Setup, jax.stages.Compiled]:
    """The train step of a config from abstract values alone, for stand-in GPUs or for real devices. packed: rows hold several documents."""
    platform = "cuda" if devices[0].platform in ("cuda", "gpu") else devices[0].platform
    setup = build(config, devices, platform=platform)
    rows = abstract_rows(setup, setup.resolved.num_microbatches, config.data.seq_len, packed)
    lowered = make_train_step(setup).trace(abstract_state(setup), rows).lower(lowering_platforms=(platform,))
    return setup, lowered.compile()
