"""Processes as one: their lines go through, the first failure ends all, a signal reaches all, and none is left behind.

Every process leads a session of its own. What is left in it is killed when the process ends; all are killed when this one ends, on Linux
even when it is killed itself (PR_SET_PDEATHSIG, prctl(2)). What a process has started in yet another session is beyond reach then.
Must not know hosts, ssh or jax.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from selectors import EVENT_READ, DefaultSelector
from typing import IO, BinaryIO

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_PR_SET_PDEATHSIG = 1
_REQUESTS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A process to start."""

    argv: Sequence[str]
    env: Mapping[str, str]
    """Its whole environment."""
    name: str = ""
    """What messages call it."""
    prefix: str = ""
    """Stands before each line of its output; with none the output is left alone."""
    takes_orders: bool = False
    """Reads the names of signals from its standard input, as `jaxmeg.launch.keep` does."""


def supervise(jobs: Sequence[Job], grace: float, orders: int | None = None) -> int:
    """Run all until they have ended; the exit code of the first that failed, else 0.

    After a failure the others have `grace` seconds to end by themselves, and as many again after SIGTERM. SIGINT and SIGTERM to this
    process are passed on once, and then there is no limit; the second kills. The same comes as lines from the file descriptor `orders`,
    whose end kills at once. Raises OSError if a process cannot be started.
    """
    children: list[_Child] = []
    with _wake_up() as wake, DefaultSelector() as selector:
        selector.register(wake, EVENT_READ, lambda: list(wake.recv(4096)))
        if orders is not None:
            selector.register(orders, EVENT_READ, lambda: _read_orders(orders, selector))
        try:
            for job in jobs:
                children.append(_Child(job))
                for stream in children[-1].streams:
                    selector.register(stream.source, EVENT_READ, lambda stream=stream: stream.forward(selector))
            return _watch(children, grace, selector)
        finally:
            for child in children:
                child.kill()


def _watch(children: Sequence[_Child], grace: float, selector: DefaultSelector) -> int:
    code, requested, ending = 0, False, False
    due: list[tuple[float, signal.Signals]] = []  # what the others get after a failure, and when
    while True:
        running = [child for child in children if child.code is None]
        if not running:
            timeout = 0.0
        else:
            timeout = max(due[0][0] - time.monotonic(), 0.0) if due else None
        ready = selector.select(timeout)
        if not running and not ready:
            return code
        for number in [number for key, _ in ready for number in key.data()]:
            if number in _REQUESTS and not requested:
                requested = True
                _send(children, signal.Signals(number))
            elif number in (*_REQUESTS, signal.SIGKILL):
                ending = True
                _send(children, signal.SIGKILL)
        # Of several that have ended since the last look, one that was killed is the cause, and an exit the answer to it.
        for child in sorted((child for child in running if child.has_ended()), key=lambda child: (child.code or 0) <= 128):
            code = code or child.code or 0
            as_requested = requested and child.code in [128 + number for number in _REQUESTS]
            if child.code and not as_requested and not ending and any(other.code is None for other in children):
                ending = True
                due = [(time.monotonic() + times * grace, number) for times, number in ((1, signal.SIGTERM), (2, signal.SIGKILL))]
                print(f"error: {child.job.name} ended with exit code {child.code}: the others get SIGTERM after {grace:g} s",
                      file=sys.stderr, flush=True)
        while due and due[0][0] <= time.monotonic():
            _send(children, due.pop(0)[1])


def _send(children: Sequence[_Child], number: signal.Signals) -> None:
    for child in children:
        child.send(number)


class _Child:
    """A process that was started."""

    def __init__(self, job: Job):
        pipe = subprocess.PIPE if job.prefix else None
        self.job = job
        self.code: int | None = None
        """Its exit code once it has ended, 128 + N for signal N."""
        self._process = subprocess.Popen(
            job.argv, env=job.env, stdin=subprocess.PIPE if job.takes_orders else subprocess.DEVNULL, stdout=pipe, stderr=pipe,
            bufsize=0, start_new_session=True, preexec_fn=_dies_with(os.getpid()))
        pairs = ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
        self.streams = [_Stream(source, target.buffer, job.prefix.encode()) for source, target in pairs if source is not None]

    def send(self, number: signal.Signals) -> None:
        """A request to the process itself, which tells its own; a kill to all of its session."""
        if self.code is not None:
            return
        with suppress(ProcessLookupError, BrokenPipeError):
            if number == signal.SIGKILL:
                os.killpg(self._process.pid, number)
            elif self._process.stdin is not None:
                self._process.stdin.write(f"{number.name}\n".encode())
            else:
                self._process.send_signal(number)

    def has_ended(self) -> bool:
        """Whether it has; then what it left behind is killed too."""
        if self._process.poll() is None:
            return False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.returncode
        self.code = code if code >= 0 else 128 - code
        return True

    def kill(self) -> None:
        """At once, if it still runs; closes its pipes."""
        self.send(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


class _Stream:
    """Whole lines from one pipe of a process to one of ours, with a prefix."""

    def __init__(self, source: IO[bytes], target: BinaryIO, prefix: bytes):
        self.source = source
        self._target, self._prefix, self._rest = target, prefix, b""

    def forward(self, selector: DefaultSelector) -> list[int]:
        chunk = os.read(self.source.fileno(), 65536)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if not chunk:
            selector.unregister(self.source)
            lines = [self._rest] if self._rest else []
        self._target.write(b"".join(self._prefix + line + b"\n" for line in lines))
        self._target.flush()
        return []


def _read_orders(orders: int, selector: DefaultSelector) -> list[int]:
    """The signals that lines such as SIGTERM name; SIGKILL at the end."""
    text = os.read(orders, 4096).decode()
    if not text:
        selector.unregister(orders)
        return [signal.SIGKILL]
    return [signal.Signals[name] for name in text.split()]


def _dies_with(parent: int) -> Callable[[], None]:
    """What a child does before its program starts: it asks to be killed with its parent, or ends if that is gone already."""
    def ask() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return ask


@contextmanager
def _wake_up() -> Iterator[socket.socket]:
    """A socket that gets the number of each request and of SIGCHLD as a byte, so that one `select` waits for everything."""
    numbers = (*_REQUESTS, signal.SIGCHLD)
    wake, sender = socket.socketpair()
    with wake, sender:
        wake.setblocking(False)
        sender.setblocking(False)
        before = {number: signal.signal(number, lambda *_: None) for number in numbers}
        descriptor = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:
            yield wake
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)
