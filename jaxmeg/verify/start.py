"""On which devices a comparison runs, decided before jax is imported: real ones where there are enough, else emulated ones.

One process, whatever the config or a launcher says. Needs no jax.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from importlib.metadata import version

from jaxmeg.cli import fail
from jaxmeg.config import Axis, CheckpointConfig, Config, DistributedConfig, GuardConfig, MeshConfig, RecordConfig, mesh_sizes
from jaxmeg.devices import plan_devices
from jaxmeg.validate.check import problems
from jaxmeg.validate.mesh_rules import is_sized, num_named
from jaxmeg.verify.layouts import all_layouts

QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Small programs that run three times: half the time. jax 0.10 only, as newer ones round elsewhere with it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What runs where."""

    configs: list[Config]
    """Without problems, every mesh axis named: one, or every layout of `count` devices."""
    count: int
    emulated: bool


def plan(config: Config, all_of: int | None = None) -> Plan:
    """The config on its mesh, or with all_of on every layout of so many devices. Exits with 2 where it has problems."""
    config = replace(config, checkpoint=CheckpointConfig(), distributed=DistributedConfig(), record=RecordConfig(), guard=GuardConfig(),
                     show_layout=False)
    devices = plan_devices(config)
    real = 0 if devices.emulated or devices.problem else devices.count
    count = all_of or config.emulate or _count(config.mesh, real)
    if all_of:
        config = replace(config, mesh=MeshConfig(dp=count), emulate=None)
        configs = all_layouts(config, count)
        if not configs:
            fail(problems(config, count))
    else:
        if found := problems(config, count):
            fail(found)
        configs = [replace(config, mesh=replace(config.mesh, dp=mesh_sizes(config.mesh, count)[Axis.DP]), emulate=None)]
    return Plan(configs=configs, count=count, emulated=config.emulate is not None or count > real)


def _count(mesh: MeshConfig, real: int) -> int:
    """Devices of a mesh; a dp of None takes the real devices that are left, if there are enough."""
    named = num_named(mesh) if is_sized(mesh) else 1
    return real if mesh.dp is None and real >= named else named


def emulate(count: int, quick: bool) -> None:
    """Set the environment that jax reads when it is first imported. quick: compile fast rather than well."""
    flags = [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={count}"]
    if quick and version("jax").startswith("0.10."):
        flags.append(QUICK_COMPILE)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
