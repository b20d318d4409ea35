"""All checks in order: what needs no jax first, then what the child process finds out on the devices.

`examine` yields the findings as they come. With several processes each makes all checks; the first says everything, the
others say what is wrong with theirs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path

from jaxmeg.cli import ConfigError, read
from jaxmeg.config import Config
from jaxmeg.devices import Devices, plan_devices
from jaxmeg.doctor import gpus, host, packages, plan
from jaxmeg.doctor.child import Session, child_environment
from jaxmeg.doctor.finding import Finding, attempt
from jaxmeg.processes.find import Processes, find_processes


@dataclass(frozen=True)
class Case:
    """What is examined: a command line on this machine."""

    words: tuple[str, ...]
    """Options of a run; none is a check of the machine alone."""
    environ: Mapping[str, str]
    config: Config
    wrong: tuple[str, ...]
    """Why `words` could not be read; `config` is the default one then."""

    @cached_property
    def processes(self) -> Processes:
        return find_processes(self.config.distributed, self.environ)

    @cached_property
    def devices(self) -> Devices:
        return plan_devices(self.config, self.environ, processes=self.processes)

    @property
    def blocked(self) -> tuple[str, ...]:
        """What would keep a run from starting before its config is looked at."""
        return (*self.wrong, *(problem for problem in (self.processes.problem, self.devices.problem) if problem))

    @cached_property
    def packages(self) -> packages.Facts:
        return packages.facts()

    @cached_property
    def machine(self) -> gpus.Machine:
        return gpus.read_machine(self.environ)

    @cached_property
    def state_bytes(self) -> int | None:
        """Of the config's model, if it is one that can be sized."""
        try:
            return plan.state_bytes(self.config) if self.words and not self.wrong else None
        except (KeyError, ValueError):  # said by the check of the config
            return None


def read_case(words: Sequence[str], environ: Mapping[str, str]) -> Case:
    try:
        return Case(tuple(words), environ, read(words), ())
    except ConfigError as error:
        return Case(tuple(words), environ, Config(), tuple(error.lines))


def _compile_cache(case: Case) -> Finding:
    own, folder = case.environ.get("JAX_COMPILATION_CACHE_DIR"), case.config.record.compile_cache
    if own or folder is None:
        option = f"JAX_COMPILATION_CACHE_DIR={own}" if own else "record.compile_cache is null"
        return host.compile_cache(host.read_space(Path(own)) if own else None, option)
    if case.devices.emulated:
        return host.compile_cache(None, "not used on a CPU")
    return host.compile_cache(host.read_space(Path(folder).expanduser()), f"record.compile_cache={folder}")


def _ports(case: Case) -> Finding:
    coordinator = case.config.distributed.coordinator or case.environ.get("JAX_COORDINATOR_ADDRESS")
    return host.ports(host.read_ports(coordinator if case.processes.count > 1 else None, is_first=case.processes.index == 0))


HOST_CHECKS: tuple[tuple[str, Callable[[Case], Finding]], ...] = (
    ("packages", lambda case: packages.packages(case.packages)),
    ("gpus", lambda case: gpus.driver(case.machine, packages.cuda_major(case.packages))),
    ("gpu memory", lambda case: gpus.memory(case.machine)),
    ("host memory", lambda case: host.memory(host.read_memory(), case.state_bytes)),
    ("run folder", lambda case: host.run_folder(
        host.read_space(Path(case.config.train.out).expanduser()), f"train.out={case.config.train.out}", case.state_bytes,
        case.config.checkpoint.keep)),
    ("compile cache", _compile_cache),
    ("shared memory", lambda case: host.shared_memory(
        host.read_space(Path("/dev/shm")) if Path("/dev/shm").is_dir() else None, len(case.machine.visible))),
    ("limits", lambda case: host.limits(host.read_limits(), len(case.machine.visible))),
    ("ports", _ports),
    ("config", lambda case: plan.config(case.config, case.devices.count, bool(case.words), case.blocked)),
)

# Name -> seconds of silence that are no fault: the first start of a driver, NCCL's first meeting and compiling take their time.
DEVICE_CHECKS: Mapping[str, float] = {
    "jax": 120, "processes": 60, "devices": 180, "forward": 180, "rates": 90, "pairs": 120, "collectives": 120}


def probe_command(case: Case) -> list[str]:
    return [sys.executable, "-P", "-m", "jaxmeg.doctor.probe", *case.words]


def examine(case: Case) -> Iterator[Finding]:
    """One finding a check, in order."""
    for name, check in HOST_CHECKS:
        yield attempt(name, partial(check, case))
    if case.processes.problem:
        yield from (Finding(name=name, status="skipped", line="the processes of the run cannot meet") for name in DEVICE_CHECKS)
        return
    with Session(probe_command(case), child_environment(case.environ, case.devices, case.processes.count,
                                                            case.config.guard.step_seconds)) as session:
        for name, seconds in DEVICE_CHECKS.items():
            waits = case.config.distributed.timeout if name == "processes" else 0
            yield session.finding(name, seconds + waits)


def run(words: Sequence[str], verbose: bool = False, json_file: Path | None = None) -> int:
    """Print every finding. Returns the exit code: 1 if a check failed."""
    if json_file:
        try:
            json_file.open("a").close()
        except OSError as error:
            print(f"error: --json {json_file} cannot be written ({error.strerror}): give another file", file=sys.stderr)
            return 2
    case, findings = read_case(words, os.environ), []
    index = case.processes.index
    for finding in examine(case):
        findings.append(finding)
        if index == 0:
            print(finding.text(verbose), flush=True)
        elif finding.status in ("warn", "FAIL"):
            print(f"process {index}: {finding.text(verbose)}", flush=True)
    failed = [finding.name for finding in findings if finding.status == "FAIL"]
    warned = [finding.name for finding in findings if finding.status == "warn"]
    if index == 0:
        print(_summary(failed, warned))
        if json_file:
            json_file.write_text(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    return 1 if failed else 0


def _summary(failed: list[str], warned: list[str]) -> str:
    if failed:
        return f"{len(failed)} failed: start with {failed[0]}"
    return f"nothing failed, {len(warned)} to look at: {', '.join(warned)}" if warned else "all is well"
