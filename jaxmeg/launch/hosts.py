"""Which hosts and GPUs a launch uses: from a hostfile or this machine, then what --include, --exclude and the limits leave.

The forms are DeepSpeed's (https://www.deepspeed.ai/getting-started/): lines `worker-1 slots=8`, filters `worker-1@worker-2:0,1`. Starts
nothing and must not know processes or jax.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxmeg.hardware import accelerators
from jaxmeg.wording import any_of, did_you_mean

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class LaunchError(ValueError):
    """A launch that can't be; one line of value, rule and fix."""


@dataclass(frozen=True)
class Host:
    """A machine and the GPUs to use there."""

    name: str
    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names them."""


def read_hostfile(path: str) -> list[Host]:
    """The hosts of a file of lines `NAME slots=N`; `#` starts a comment. Raises LaunchError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise LaunchError(f"--hostfile={path} cannot be read ({reason}): give a file of lines such as 'worker-1 slots=8'") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate((line.partition("#")[0].split() for line in lines), 1):
        if not line:
            continue
        where, slots = f"{path}:{number}", re.fullmatch(r"slots=(\d+)", line[-1])
        if len(line) != 2 or not slots or not _NAME.fullmatch(line[0]):
            raise LaunchError(f"{where}: {' '.join(line)!r} is not a host with its slots: write for example 'worker-1 slots=8'")
        name, count = line[0], int(slots[1])
        if count == 0:
            raise LaunchError(f"{where}: {name} slots=0 has no GPU to use: give 1 or more, or leave the line out")
        if name in hosts:
            raise LaunchError(f"{where}: host {name} is there already: name every host once, with all its slots")
        hosts[name] = Host(name, tuple(map(str, range(count))))
    if not hosts:
        raise LaunchError(f"--hostfile={path} names no hosts: write lines such as 'worker-1 slots=8'")
    return list(hosts.values())


def this_machine(environ: Mapping[str, str], root: Path = Path("/")) -> Host:
    """localhost with the NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves. Raises LaunchError where there is none."""
    found = [name.partition(":")[2] for name in accelerators(environ, root) if name.startswith("nvidia:")]
    if not found:
        raise LaunchError("this machine has no NVIDIA GPU to use: give --hostfile, or --emulate N with --num_processes P to run on the CPU")
    if "CUDA_VISIBLE_DEVICES" not in environ:  # CUDA counts the GPUs it sees, whatever their device files are called
        found = [str(number) for number in range(len(found))]
    return Host("localhost", tuple(found))


def select(hosts: Sequence[Host], include: str | None, exclude: str | None) -> list[Host]:
    """The hosts that --include names or --exclude leaves, in their order. Raises LaunchError."""
    if include is not None and exclude is not None:
        raise LaunchError(f"--include={include} and --exclude={exclude} say the same in two ways: give one of them")
    if include is not None:
        chosen = _read_filter("--include", include, hosts)
        return [replace(host, gpus=chosen[host.name]) for host in hosts if host.name in chosen]
    if exclude is None:
        return list(hosts)
    dropped = _read_filter("--exclude", exclude, hosts)
    left = [replace(host, gpus=tuple(gpu for gpu in host.gpus if gpu not in dropped.get(host.name, ()))) for host in hosts]
    if not any(host.gpus for host in left):
        raise LaunchError(f"--exclude={exclude} leaves no hosts: exclude fewer")
    return [host for host in left if host.gpus]


def limit(hosts: Sequence[Host], num_nodes: int | None, num_gpus: int | None) -> list[Host]:
    """The first `num_nodes` hosts with their first `num_gpus` GPUs each. Raises LaunchError."""
    for option, value in (("--num_nodes", num_nodes), ("--num_gpus", num_gpus)):
        if value is not None and value < 1:
            raise LaunchError(f"{option}={value} is no number of them: use 1 or more")
    if num_nodes is not None and num_nodes > len(hosts):
        raise LaunchError(f"--num_nodes={num_nodes} is more than the {len(hosts)} there are ({', '.join(host.name for host in hosts)}): "
                          f"use 1 to {len(hosts)}, or name more hosts in --hostfile")
    hosts = hosts[:num_nodes]
    for host in hosts:
        if num_gpus is not None and num_gpus > len(host.gpus):
            raise LaunchError(f"--num_gpus={num_gpus} is more than the {len(host.gpus)} of {host.name}: use 1 to {len(host.gpus)}")
    return [replace(host, gpus=host.gpus[:num_gpus]) for host in hosts]


def _read_filter(option: str, text: str, hosts: Sequence[Host]) -> dict[str, tuple[str, ...]]:
    """Host -> the GPUs that "worker-1@worker-2:0,1" names; all where it names none."""
    known = {host.name: host.gpus for host in hosts}
    named: dict[str, tuple[str, ...]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        if name not in known:
            raise LaunchError(f"{option}={text}: unknown host {name!r}: {did_you_mean(name, known)}use {any_of(known)}")
        if name in named:
            raise LaunchError(f"{option}={text}: host {name} is named twice: name it once, such as {name}:0,1")
        wanted = [number.strip() for number in numbers.split(",")] if colon else known[name]
        unknown = [gpu for gpu in wanted if gpu not in known[name]]
        if unknown:
            raise LaunchError(f"{option}={text}: {name} has no GPU {unknown[0]!r}: use {any_of(known[name])}")
        named[name] = tuple(gpu for gpu in known[name] if gpu in wanted)
    return named
