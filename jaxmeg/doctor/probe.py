"""The process that `child.Session` talks to: joins the other processes, looks at the devices, computes on them.

`python -P -m jaxmeg.doctor.probe [options of a run]`, in an environment made by `child.child_environment`. Says each
finding as a line of JSON on what was its standard output; whatever else is printed goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from jaxmeg.cli import ConfigError, read
from jaxmeg.config import Axis, Config, resolve
from jaxmeg.devices import Devices, plan_devices
from jaxmeg.doctor.finding import Finding, Problem, attempt, conclude, one_line, problem_of
from jaxmeg.doctor.forward import forward
from jaxmeg.doctor.links import collectives, pairs
from jaxmeg.doctor.rates import EMULATED, measure, rates
from jaxmeg.processes.connect import connect
from jaxmeg.processes.find import Processes, find_processes
from jaxmeg.processes.roll_call import StartError
from jaxmeg.processes.variables import explain
from jaxmeg.record.memory import device_memory, gib
from jaxmeg.validate.check import problems

NO_BACKEND = "see the checks above; unset JAX_PLATFORMS, or install the driver and jax's plugin (tpu_gpu_setup)"


def main(words: list[str]) -> int:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=out, flush=True)

    def tell(at: str) -> None:
        say({"at": at})

    def say_finding(finding: Finding) -> Finding:
        say({"finding": asdict(finding)})
        return finding

    def found(name: str, check: Callable[[], Finding]) -> Finding:
        return say_finding(attempt(name, check, fix_of))

    try:
        config = read(words)
    except ConfigError:  # said by the check of the config
        config = Config()
    processes = find_processes(config.distributed, os.environ)
    planned = plan_devices(config, processes=processes)
    emulated = planned.emulated
    found("jax", imported)
    if found("processes", lambda: joined(config, processes, planned)).status == "FAIL":
        return 0
    try:
        every, mine = jax.devices(), jax.local_devices()
    except RuntimeError as error:
        say_finding(Finding(name="devices", status="FAIL", line=one_line(error), fix=NO_BACKEND))
        return 0
    found("devices", lambda: devices(every, planned))
    found("forward", lambda: forward(mine[0]))
    found("rates", lambda: rates(measure(mine, emulated, tell), emulated))
    found("pairs", lambda: pairs(every, emulated, tell))
    found("collectives", lambda: collectives(mesh_of(config, len(every)), every, emulated, tell))
    return 0


def imported() -> Finding:
    """That this process runs at all says that jax could be imported."""
    return Finding(name="jax", status="ok", line=f"{jax.__version__} from {Path(jax.__file__ or '').parent}")


def fix_of(error: str) -> str | None:
    known = explain(error)
    return known.line if known else None


def joined(config: Config, processes: Processes, planned: Devices) -> Finding:
    """Join the other processes of the run."""
    if processes.count == 1:
        return Finding(name="processes", status="ok", line="one process")
    try:
        connect(config.distributed, planned, config.guard.silent_seconds)
    except StartError as error:
        return conclude("processes", "", [problem_of("FAIL", str(error))])
    return Finding(name="processes", status="ok", line=f"{jax.process_count()} processes have met ({processes.origin})")


def devices(every: Sequence[Any], planned: Devices) -> Finding:
    """Are all of them there? planned: what the machines have, as counted without jax."""
    kinds = ", ".join(f"{count} x {kind}" for kind, count in Counter(device.device_kind for device in every).items())
    usage = device_memory([device for device in every if device.process_index == jax.process_index()]) or []
    limits = [use.limit for use in usage if use.limit]
    fine = f"{kinds}" + (f" ({EMULATED})" if planned.emulated else "") + (f", {gib(min(limits))} each for jax" if limits else "")
    details = [f"{device.platform}:{device.id} {device.device_kind}, process {device.process_index}" for device in every]
    problems = []
    if not planned.emulated and every[0].platform == "cpu":
        problems.append(Problem("FAIL", f"jax sees no accelerator, only {kinds}", NO_BACKEND))
    elif len(every) != planned.count:
        problems.append(Problem("FAIL", f"jax sees {len(every)} devices ({kinds}), and the run has {planned.count}", NO_BACKEND))
    return conclude("devices", fine, problems, details)


def mesh_of(config: Config, num_devices: int) -> dict[str, int]:
    """Axis -> size: the config's mesh if it can run, else all devices along dp."""
    if problems(config, num_devices):
        return {Axis.DP: num_devices}
    return {str(axis): size for axis, size in resolve(config, num_devices).mesh.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
