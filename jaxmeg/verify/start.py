"""On which devices a comparison runs, decided before jax is imported: real ones where there are enough, else emulated ones. And
whether the options that were given mean anything, and can be followed.

One process, whatever the config or a launcher says. Needs no jax.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib.metadata import version
from pathlib import Path

from jaxmeg.cli import fail
from jaxmeg.config import Axis, CheckpointConfig, Config, DistributedConfig, GuardConfig, MeshConfig, RecordConfig, mesh_sizes
from jaxmeg.devices import plan_devices
from jaxmeg.keys import KEYS, SHORT_FORMS
from jaxmeg.validate.check import problems
from jaxmeg.validate.mesh_rules import is_sized, num_named
from jaxmeg.verify.layouts import all_layouts, is_read

QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""Small programs that run three times: half the time. jax 0.10 only, as newer ones round elsewhere with it."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What runs where."""

    configs: list[Config]
    """Without problems, every mesh axis named: one, or every layout of `count` devices."""
    count: int
    emulated: bool
    real: int = 0
    """Accelerators of this machine, where they are too few and nobody asked for emulation."""


def plan(config: Config, all_of: int | None = None) -> Plan:
    """The config on its mesh, or with all_of on every layout of so many devices. Exits with 2 where it has problems."""
    d = config.distributed
    if (d.coordinator, d.num_processes, d.process_id) != (None, None, None):
        fail(["verify.py runs in one process: leave the distributed.* options out, and start it without launch.py"])
    if all_of and config.emulate not in (None, all_of):
        fail([f"--emulate={config.emulate} is not the number of devices of --all={all_of}: leave --emulate out"])
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
    return Plan(configs=configs, count=count, emulated=count > real, real=real if count > real else 0)


def check_options(argv: Sequence[str], own: Iterable[str], all_of: int | None) -> None:
    """Exits with 2 where the options of scripts/train.py that are given can't mean anything here; warns of those that do nothing.

    own: names of the options of scripts/verify.py.
    """
    names = [word[2:].partition("=")[0] for word in argv if word.startswith("--")]
    wrong = [f"--{name} is unknown: did you mean --{near[0]}?" for name in names
             if not _is_known(name) and (near := get_close_matches(name, list(own), n=1, cutoff=0.7))]
    if all_of:
        wrong += [f"--{name} has no effect with --all, which takes every mesh and ZeRO stage: leave one of them out" for name in names
                  if name == "mesh" or SHORT_FORMS.get(name, name).startswith(("mesh.", "layout.zero"))]
    if wrong:
        fail(wrong)
    given = dict.fromkeys(SHORT_FORMS.get(name, name) for name in names if _is_known(name))
    if "checkpoint.resume" in given:
        _warn("checkpoint.resume gives the config of its run: weights and optimizer state of the checkpoint are not compared")
    read_here = ("mesh", "config", "help", "print_config", "emulate", "checkpoint.resume")
    if idle := [key for key in given if not (key in read_here or key.startswith("mesh.") or is_read(key))]:
        _warn(f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect on a comparison")


def _is_known(name: str) -> bool:
    return name in KEYS or name in SHORT_FORMS or name in ("mesh", "config", "help", "print_config")


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr)


def check_writable(out: Path) -> None:
    """Exits with 2 where OUT.txt and OUT.json can't be written, as far as that can be told without trying."""
    for path in (Path(f"{out}.txt"), Path(f"{out}.json")):
        first = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists() or place.is_symlink())
        code = 0
        if first == path.absolute():
            code = errno.EISDIR if first.is_dir() else 0 if os.access(first, os.W_OK) else errno.EACCES
        elif not first.is_dir():
            code = errno.ENOTDIR
        elif not os.access(first, os.W_OK | os.X_OK):
            code = errno.EACCES
        if code:
            fail([cannot_write(out, OSError(code, os.strerror(code), str(first)))])


def cannot_write(out: Path, error: OSError) -> str:
    return f"--out {out} cannot be written ({error.filename}: {error.strerror}): give another --out"


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
