"""All processes of a run tell the first one that they are there, before jax's coordination starts on the same port.

jax aborts the process, after twice its time limit and without a reason, where one is missing, two have the same id, or the port
is taken. So process 0 listens on the coordinator's port for a moment, hears from each who it is, and tells all of them
the same: go, or what is wrong. One line of JSON each way. Must not know jax.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from jaxmeg.processes.find import Processes

LINE = 65536  # bytes at most
RETRY = 0.2  # seconds between attempts to reach process 0


class StartError(RuntimeError):
    """The processes can't become one run; one line."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """Who a process is."""

    index: int
    count: int
    host: str
    pid: int
    versions: str
    """Of Python and jax; all processes need the same."""
    devices: str
    """CUDA_VISIBLE_DEVICES and the numbers of the accelerators it takes; empty where no two can be the same (`connect.taken`)."""

    def __str__(self) -> str:
        return f"process {self.index} ({self.host}, pid {self.pid})"


def this_member(processes: Processes, versions: str, devices: str) -> Member:
    return Member(index=processes.index, count=processes.count, host=socket.gethostname(), pid=os.getpid(), versions=versions,
                  devices=devices)


def split_address(address: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[ipv6]:port". Raises StartError."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536 or (":" in host and not host.startswith("[")):
        raise StartError(f"distributed.coordinator={address} is not host:port: give for example {host or address or 'node1'}:1234, the "
                         "same to all processes")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def resolve(host: str, port: int, several_hosts: bool) -> list[str]:
    """IP addresses of the coordinator. Raises StartError where there are none, or where they mean each host itself."""
    try:
        found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except socket.gaierror as error:
        raise StartError(f"distributed.coordinator={host}:{port}: the name {host} is not known on {socket.gethostname()} "
                         f"({error.strerror}): give a name or an IP address that all hosts know") from None
    if several_hosts and all(is_loopback(address) for address in found):
        raise StartError(f"distributed.coordinator={host}:{port} is {found[0]}, which is each host itself, and the run has several hosts: "
                         "give the name or the IP address of process 0's host as the others know it")
    return found


def call(me: Member, host: str, port: int, seconds: float) -> list[Member]:
    """All processes of the run, in order of their ids; returns when all are there. Raises StartError within `seconds`."""
    deadline = time.monotonic() + seconds
    answer = _listen(me, port, deadline, seconds) if me.index == 0 else _report(me, host, port, deadline, seconds)
    if "problem" in answer:
        raise StartError(answer["problem"])
    return [Member(**member) for member in answer["members"]]


def mismatch(members: Sequence[Member], new: Member) -> str | None:
    """Why `new` can't be one of the run, or None."""
    first = members[0]
    if new.count != first.count:
        return (f"{first} says that there are {first.count} processes, and {new} says {new.count}: give all the same "
                "distributed.num_processes")
    twin = next((member for member in members if member.index == new.index), None)
    if twin:
        return (f"two processes have the id {new.index}: one on {twin.host} (pid {twin.pid}) and one on {new.host} (pid {new.pid}): give "
                "each its own distributed.process_id")
    if new.versions != first.versions:
        return f"{first} has {first.versions}, and {new} has {new.versions}: install the same on all hosts"
    shared = next((member for member in members if new.devices and (member.host, member.devices) == (new.host, new.devices)), None)
    if shared:
        return (f"{shared} and {new} are on one host and would use the same accelerators: give each its own with CUDA_VISIBLE_DEVICES, "
                "start one process a host, or use srun or mpirun")
    return None


def missing(count: int, here: Mapping[int, Member], seconds: float) -> str:
    absent = [str(index) for index in range(count) if index not in here]
    came = ", ".join(f"{member.index} on {member.host}" for _, member in sorted(here.items()))
    named = ", ".join(absent[:8]) + (", ..." if len(absent) > 8 else "")
    return (f"{len(absent)} of {count} processes did not come within {seconds:g} s (distributed.timeout): {named} "
            f"{'is' if len(absent) == 1 else 'are'} missing, and these came: {came}: see what the missing say, or give another "
            "distributed.num_processes")


def _listen(me: Member, port: int, deadline: float, seconds: float) -> dict[str, Any]:
    """Process 0: collect all others, then tell them the outcome."""
    here: dict[int, Member] = {0: me}
    lines: list[socket.socket] = []
    problem = None
    with _bind(port) as server:
        while len(here) < me.count and problem is None:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                line, _ = server.accept()
            except TimeoutError:
                problem = missing(me.count, here, seconds)
                break
            new = _read_member(line)
            if new is None:  # not one of ours: a port scanner, a health check
                line.close()
                continue
            lines.append(line)
            problem = mismatch(list(here.values()), new)
            here.setdefault(new.index, new)
    answer = {"problem": problem} if problem else {"members": [asdict(here[index]) for index in sorted(here)]}
    for line in lines:
        with line:
            _send(line, answer)
    return answer


def _bind(port: int) -> socket.socket:
    """A listening socket on all addresses, as jax's service will have it. Raises StartError."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=family == socket.AF_INET6, backlog=1024)
    except OSError as error:
        host = socket.gethostname()
        if error.errno == errno.EADDRINUSE:
            raise StartError(f"port {port} of distributed.coordinator is in use on {host}, by another program or by a second process 0: "
                             "give another port to all processes, or end what uses it") from None
        raise StartError(f"port {port} of distributed.coordinator can't be opened on {host} ({error.strerror}): give another port to all "
                         "processes") from None


def _read_member(line: socket.socket) -> Member | None:
    line.settimeout(5)
    try:
        return Member(**json.loads(line.makefile("rb").readline(LINE)))
    except (OSError, ValueError, TypeError):
        return None


def _report(me: Member, host: str, port: int, deadline: float, seconds: float) -> dict[str, Any]:
    """Any other process: reach process 0, say who this is, and wait for the outcome."""
    reason = ""
    while time.monotonic() < deadline:
        try:
            with socket.create_connection((host, port), timeout=max(deadline - time.monotonic(), 0.01)) as line:
                _send(line, asdict(me))
                line.settimeout(max(deadline - time.monotonic(), 0) + 5)  # process 0 says who is missing when its own time is up
                answer = json.loads(line.makefile("rb").readline(LINE * 64) or b"null")
            if isinstance(answer, dict):
                return answer
            reason = "it has ended"
        except TimeoutError:
            reason = reason or "no answer"
        except OSError as error:
            reason = error.strerror or str(error)
        except ValueError:
            reason = f"what listens there takes no more processes: another program, or the run has begun with another process {me.index}"
        time.sleep(RETRY)
    raise StartError(f"process {me.index} on {me.host} did not reach process 0 at {host}:{port} within {seconds:g} s "
                     f"(distributed.timeout): {reason}: see that process 0 runs on that host, and that the port is open between the hosts")


def _send(line: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # it has ended: the others are told all the same
        line.sendall(json.dumps(message).encode() + b"\n")
