"""From what is asked to the commands of all processes, on this machine or over ssh. Starts nothing.

A process gets its place as `--distributed.*` options and its GPUs as CUDA_VISIBLE_DEVICES. A remote one is `ssh HOST 'cd HERE && exec
env ... python -m jaxmeg.launch.keep ...'`: same folder, same Python, and of the environment only what `EXPORTED` and `EXPORTED_PREFIXES`
name.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxmeg.launch.hosts import Host, LaunchError, limit, read_hostfile, select, this_machine

EXPORTED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")
"""Variables that remote processes get."""
EXPORTED_PREFIXES = ("NCCL_", "XLA_", "JAX_", "JAXMEG_")
"""Beginnings of names of the others that they get."""
OTHER_LAUNCHERS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "OMPI_MCA_orte_hnp_uri", "JAX_LOCAL_DEVICE_IDS")
"""What another launcher around this one has said; no process gets it, as it would count for more than this one's."""
DEFAULT_PORT = 29500
SSH_DEFAULTS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=30")
"""No question for a password where nobody answers; a host that is gone is noticed. --ssh_args stand before these and win."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is asked; the fields are the options of scripts/launch.py."""

    script: str
    arguments: Sequence[str] = ()
    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    num_nodes: int | None = None
    num_gpus: int | None = None
    per_host: str = "1"
    master_addr: str | None = None
    master_port: int | None = None
    emulate: int | None = None
    num_processes: int | None = None
    ssh_args: str = ""


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process and what starts it from here."""

    host: str
    argv: tuple[str, ...]
    """The script's command, or the ssh that runs it."""
    env: Mapping[str, str]
    """Set besides this environment."""
    remote: bool

    @property
    def line(self) -> str:
        """The same for a shell."""
        return shlex.join(["env", *_assignments(self.env), *self.argv] if self.env else self.argv)


def plan(options: Options, environ: Mapping[str, str], root: Path = Path("/")) -> list[Process]:
    """The commands of all processes; process 0 first. Raises LaunchError."""
    _check_command(options)
    places = _emulated(options) if options.emulate is not None else _places(options, environ, root)
    command = [sys.executable, options.script, *options.arguments]
    if options.emulate is not None:
        command += ["--emulate", str(options.emulate)]
    if len(places) > 1:
        command += ["--distributed.coordinator", _coordinator(options, places), "--distributed.num_processes", str(len(places))]
    processes = []
    for index, place in enumerate(places):
        place_of = ["--distributed.process_id", str(index)] if len(places) > 1 else []
        env = {"PYTHONUNBUFFERED": "1"} | ({"CUDA_VISIBLE_DEVICES": ",".join(place.gpus)} if place.gpus else {})
        if is_local(place.name):
            processes.append(Process(host=place.name, argv=(*command, *place_of), env=env, remote=False))
        else:
            argv = ("ssh", *shlex.split(options.ssh_args), *SSH_DEFAULTS, place.name, _remote(env, environ, [*command, *place_of]))
            processes.append(Process(host=place.name, argv=argv, env={}, remote=True))
    return processes


def environment(process: Process, environ: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a process that is started here."""
    return {name: value for name, value in environ.items() if name not in OTHER_LAUNCHERS} | dict(process.env)


def is_local(host: str) -> bool:
    """Whether a host of that name is this machine."""
    name = socket.gethostname()
    return _is_loopback(host) or host in (name, name.partition(".")[0])


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _check_command(options: Options) -> None:
    if not Path(options.script).is_file():
        raise LaunchError(f"{options.script} is not a file: give the script to run behind the launcher's own options")
    taken = ["--distributed.coordinator", "--distributed.num_processes", "--distributed.process_id"]
    for word in options.arguments:
        if word.partition("=")[0] in taken:
            raise LaunchError(f"{word.partition('=')[0]} is set by the launcher: leave it out")


def _emulated(options: Options) -> list[Host]:
    """--num_processes times this machine, without GPUs."""
    devices, processes = options.emulate, 1 if options.num_processes is None else options.num_processes
    assert devices is not None
    for name in ("hostfile", "include", "exclude", "num_nodes", "num_gpus"):
        value = getattr(options, name)
        if value is not None:
            raise LaunchError(f"--{name}={value} has no effect with --emulate, which uses this machine's CPU: leave one of them out")
    for name, value in (("--emulate", devices), ("--num_processes", processes)):
        if value < 1:
            raise LaunchError(f"{name}={value} is no number of them: use 1 or more")
    if devices % processes:
        raise LaunchError(f"--num_processes={processes} does not divide --emulate={devices}: use for example "
                          f"--emulate {max(devices // processes, 1) * processes}")
    return [Host("localhost", ())] * processes


def _places(options: Options, environ: Mapping[str, str], root: Path) -> list[Host]:
    """One entry for each process: its host and its GPUs."""
    if options.num_processes is not None:
        raise LaunchError(f"--num_processes={options.num_processes} has no effect without --emulate: give --emulate N before the script, "
                          "or --per_host gpu for a process a GPU")
    hosts = [this_machine(environ, root)] if options.hostfile is None else read_hostfile(options.hostfile)
    hosts = limit(select(hosts, options.include, options.exclude), options.num_nodes, options.num_gpus)
    if options.per_host == "gpu":
        return [Host(host.name, (gpu,)) for host in hosts for gpu in host.gpus]
    fewest, most = (choose(hosts, key=lambda host: len(host.gpus)) for choose in (min, max))
    if len(fewest.gpus) < len(most.gpus):
        raise LaunchError(f"{most.name} has {len(most.gpus)} GPUs and {fewest.name} {len(fewest.gpus)}, but every process must have the "
                          f"same number: use --num_gpus {len(fewest.gpus)}, or --per_host gpu")
    return hosts


def _coordinator(options: Options, places: Sequence[Host]) -> str:
    """host:port of process 0, as every process can reach it."""
    first = places[0].name
    address = options.master_addr or first
    others = [place.name for place in places if place.name != first and not is_local(place.name)]
    if others and _is_loopback(address):
        where = f"--master_addr={address}" if options.master_addr else f"the first host, {address},"
        raise LaunchError(f"{where} is another machine for {others[0]}: give --master_addr the name that the other hosts know "
                          f"{first} by")
    if options.master_port is not None and not 1 <= options.master_port <= 65535:
        raise LaunchError(f"--master_port={options.master_port} is no port: use 1024 to 65535, or leave it out")
    return f"{address}:{options.master_port or (_free_port() if is_local(first) else DEFAULT_PORT)}"


def _free_port() -> int:
    """A port that nobody listens on now; another program could still take it before process 0 does."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _remote(env: Mapping[str, str], environ: Mapping[str, str], command: Sequence[str]) -> str:
    """The line that the remote shell gets."""
    passed = {name: value for name, value in sorted(environ.items())
              if (name in EXPORTED or name.startswith(EXPORTED_PREFIXES)) and name not in OTHER_LAUNCHERS}
    kept = ["env", *_assignments({**passed, **env}), sys.executable, "-m", "jaxmeg.launch.keep", *command]
    return f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(kept)}"


def _assignments(env: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in env.items()]
