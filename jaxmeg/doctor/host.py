"""The machine around the devices: memory, disks, limits of this user, ports. Without jax.

The functions named `read_...` probe; those named like their check judge plain values. References: proc(5), cgroups(7)
and getrlimit(2).
"""

from __future__ import annotations

import os
import re
import resource
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxmeg.doctor.finding import Finding, Problem, Status, conclude

GIB = 2**30
LEAST_MEMORY = 2 * GIB
LEAST_DISK = GIB
LEAST_INODES = 1000
LEAST_SHARED = GIB  # of /dev/shm: NCCL's buffers between the GPUs of a host; Docker gives 64 MiB
LEAST_FILES, LEAST_PROCESSES = 4096, 4096
TRIAL = bytes(2**20)


# ------------------------------------------------------------------ memory
@dataclass(frozen=True, kw_only=True)
class Memory:
    """In bytes."""

    total: int
    available: int
    """What can be had without swapping."""
    limit: int | None
    """Of the cgroup, if that is less than the whole."""
    used: int
    """By the cgroup; 0 without a limit."""

    @property
    def left(self) -> int:
        return self.available if self.limit is None else min(self.available, self.limit - self.used)


def read_memory(root: Path = Path("/")) -> Memory:
    """From /proc/meminfo and the memory cgroup, version 1 or 2, and those above it."""
    table = dict(re.findall(r"^(\w+):\s+(\d+) kB", (root / "proc/meminfo").read_text(), re.MULTILINE))
    total = int(table["MemTotal"]) * 1024
    limits = [(limit, used) for limit, used in _cgroup_limits(root) if limit < total]
    limit, used = min(limits, default=(None, 0))
    return Memory(total=total, available=int(table["MemAvailable"]) * 1024, limit=limit, used=used)


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of every cgroup that this process is in and that has a limit."""
    file = root / "proc/self/cgroup"
    for line in file.read_text().splitlines() if file.is_file() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):  # ends with the mount itself, which is all that a container sees
            values = [_read(mount / folder / name) for name in names]
            if values[0].isdigit() and values[1].isdigit():
                yield int(values[0]), int(values[1])


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def memory(found: Memory, state: int | None) -> Finding:
    """state: bytes that a checkpoint brings through the host's memory, if known."""
    limit = f", this container may have {found.limit / GIB:.1f}" if found.limit is not None else ""
    fine = f"{found.left / GIB:.1f} of {found.total / GIB:.1f} GiB free{limit}"
    problems = []
    if found.left < LEAST_MEMORY:
        problems.append(Problem("FAIL", f"only {fine}", "end what uses it, or give the container more"))
    elif state is not None and found.left < state:
        problems.append(Problem("warn", f"a checkpoint brings about {state / GIB:.1f} GiB through host memory, and only {fine}",
                                "free memory, or use more hosts"))
    return conclude("host memory", fine, problems)


# ------------------------------------------------------------------ disks
@dataclass(frozen=True, kw_only=True)
class Space:
    """What a folder's disk has."""

    where: str
    """The folder, or the nearest one above it that is there."""
    free: int
    size: int
    files_left: int | None
    """Inodes; None where the file system does not count them."""
    error: str | None
    """Why nothing can be written."""


def read_space(folder: Path) -> Space:
    """Ask the file system, and write a little file."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    stats = os.statvfs(there)
    error = None
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".jaxmeg-doctor-") as file:
            file.write(TRIAL)
            file.flush()
            os.fsync(file.fileno())
    except OSError as refused:
        error = refused.strerror
    return Space(where=str(there), free=stats.f_bavail * stats.f_frsize, size=stats.f_blocks * stats.f_frsize,
                 files_left=stats.f_favail if stats.f_files else None, error=error)


def run_folder(found: Space, option: str, state: int | None, keep: int) -> Finding:
    """Where checkpoints go. option: what was asked for, such as train.out=runs/demo; state: bytes of a checkpoint, if known."""
    fine = f"{option}: {found.free / GIB:.1f} GiB free, writable"
    problems = _space_problems(found, option, "FAIL")
    size = "" if state is None else f"{state / GIB:.2f} GiB"
    if not problems and state is not None and found.free < state:
        problems.append(Problem("FAIL", f"{option}: {found.free / GIB:.1f} GiB free, and a checkpoint has about {size}",
                                "free space, or give --out a folder on another disk"))
    elif not problems and state is not None and found.free < state * (keep + 1):
        problems.append(Problem("warn", f"{option}: {found.free / GIB:.1f} GiB free, and {keep + 1} checkpoints of about {size} are there "
                                "while the next is written", "free space, or keep fewer (checkpoint.keep)"))
    details = () if state is None else (f"a checkpoint has about {size}",)
    return conclude("run folder", fine, problems, details)


def compile_cache(found: Space | None, option: str) -> Finding:
    """Where compiled programs are kept: a run starts without it, only slower."""
    if found is None:
        return Finding(name="compile cache", status="skipped", line=option)
    return conclude("compile cache", f"{option}: {found.free / GIB:.1f} GiB free, writable", _space_problems(found, option, "warn"))


def shared_memory(found: Space | None, num_gpus: int) -> Finding:
    """NCCL moves data between the GPUs of a host through /dev/shm where they have no direct link."""
    if found is None:
        return Finding(name="shared memory", status="skipped", line="this system has no /dev/shm")
    fine = f"/dev/shm: {found.free / GIB:.2f} of {found.size / GIB:.2f} GiB free"
    problems = []
    if num_gpus > 1 and (found.error or found.free < LEAST_SHARED):
        problems.append(Problem("warn", f"{fine}{f' ({found.error})' if found.error else ''}, and {num_gpus} GPUs may talk through it",
                                "start the container with --shm-size=16g or --ipc=host"))
    return conclude("shared memory", fine, problems)


def _space_problems(found: Space, option: str, severity: Status) -> list[Problem]:
    fix = "free space or delete files there, or give another folder"
    if found.error:
        return [Problem(severity, f"{option}: nothing can be written in {found.where} ({found.error})", fix)]
    if found.files_left is not None and found.files_left < LEAST_INODES:
        return [Problem(severity, f"{option}: the disk has room for {found.files_left} more files", fix)]
    if found.free < LEAST_DISK:
        return [Problem("warn", f"{option}: only {found.free / GIB:.2f} GiB free", fix)]
    return []


# ------------------------------------------------------------------ limits
@dataclass(frozen=True, kw_only=True)
class Limits:
    """What this process may have; None is no limit."""

    files: int | None
    files_most: int | None
    """What `ulimit -n` can raise `files` to."""
    processes: int | None
    """Processes and threads of this user, or of the container if that is less."""
    locked: int | None
    """Bytes of memory that cannot be swapped: network cards ask for it."""
    cores: int


def read_limits(root: Path = Path("/")) -> Limits:
    def limit(kind: int, hard: bool = False) -> int | None:
        value = resource.getrlimit(kind)[hard]
        return None if value == resource.RLIM_INFINITY else value

    pids = [_read(root / path) for path in ("sys/fs/cgroup/pids.max", "sys/fs/cgroup/pids/pids.max")]
    processes = [value for value in (limit(resource.RLIMIT_NPROC), *(int(text) for text in pids if text.isdigit())) if value is not None]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Limits(files=limit(resource.RLIMIT_NOFILE), files_most=limit(resource.RLIMIT_NOFILE, hard=True),
                  processes=min(processes, default=None), locked=limit(resource.RLIMIT_MEMLOCK), cores=cores)


def limits(found: Limits, num_accelerators: int) -> Finding:
    """Open files, processes, cores."""
    def say(value: int | None) -> str:
        return "unlimited" if value is None else f"{value:,}"

    fine = f"{say(found.files)} open files, {say(found.processes)} processes, {found.cores} cores"
    problems = []
    if found.files is not None and found.files < LEAST_FILES:
        enough = found.files_most is None or found.files_most >= LEAST_FILES
        fix = f"ulimit -n {min(65536, found.files_most or 65536)}" if enough else "have the administrator raise nofile in limits.conf"
        problems.append(Problem("warn", f"{found.files:,} open files are few for checkpoints and data", fix))
    if found.processes is not None and found.processes < LEAST_PROCESSES:
        problems.append(Problem("warn", f"{found.processes:,} processes and threads are few",
                                "ulimit -u 65536, or --pids-limit of the container"))
    if found.cores < num_accelerators:
        problems.append(Problem("warn", f"{found.cores} cores for {num_accelerators} accelerators: data and dispatch will be slow",
                                "give the job more cores"))
    return conclude("limits", fine, problems, [f"locked memory: {say(found.locked)}"])


# ------------------------------------------------------------------ ports
@dataclass(frozen=True, kw_only=True)
class Ports:
    """What the network of this machine answered."""

    free_port_error: str | None
    """Why no port could be opened."""
    host: str
    host_error: str | None
    """Why this machine's own name has no address."""
    coordinator: str | None
    coordinator_error: str | None
    """Why the coordinator's port cannot be opened here, or, on other processes, why its name has no address."""


def read_ports(coordinator: str | None, is_first: bool) -> Ports:
    """coordinator: host:port, if the config names one; is_first: this is the process that will listen there."""
    host, found = socket.gethostname(), None
    if coordinator is not None:
        name, _, port = coordinator.rpartition(":")
        if not port.isdigit() or not name:
            found = "is not host:port"
        else:
            found = _cannot_listen(int(port)) if is_first else _has_no_address(name.strip("[]"))
    return Ports(free_port_error=_cannot_listen(0), host=host, host_error=_has_no_address(host), coordinator=coordinator,
                 coordinator_error=found)


def _cannot_listen(port: int) -> str | None:
    try:
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", port))
            listener.listen(1)
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def _has_no_address(name: str) -> str | None:
    try:
        socket.getaddrinfo(name, None)
    except (OSError, UnicodeError) as error:
        return f"{name} has no address: {getattr(error, 'strerror', None) or error}"
    return None


def ports(found: Ports) -> Finding:
    """Can processes find and reach each other through this machine's network?"""
    fine = f"ports can be opened, {found.host} has an address" + (f", {found.coordinator} is free" if found.coordinator else "")
    problems = []
    if found.free_port_error:
        problems.append(Problem("FAIL", f"no port can be opened ({found.free_port_error})", "look at the container's network"))
    if found.coordinator_error:
        problems.append(Problem("FAIL", f"coordinator {found.coordinator}: {found.coordinator_error}",
                                "end what listens there, or use another port or name on all processes"))
    if found.host_error:
        problems.append(Problem("warn", found.host_error, "add it to /etc/hosts: processes of several hosts find each other by name"))
    return conclude("ports", fine, problems)
