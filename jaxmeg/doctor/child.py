"""The checks that need jax run in a process of their own, which may hang or crash: it is asked for one finding at a time.

It writes a line of JSON for each finding, and for each place it has reached in a long check; when it is silent for too
long, or ends, the check it was in is the one that failed. Without jax.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from jaxmeg.devices import Devices
from jaxmeg.doctor.finding import Finding, last_error_line
from jaxmeg.processes.variables import defaults, explain

LAST_LINES = 30
GOODBYE = 60  # seconds: the processes of a run leave together


def child_environment(environ: Mapping[str, str], devices: Devices, num_processes: int, step_seconds: int) -> dict[str, str]:
    """What the process is given: as for a run, but without taking its share of the GPU's memory at once, which may be in use."""
    chosen = dict(environ) | defaults(environ, devices.count, step_seconds, devices.emulated)
    if not devices.emulated:
        return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} | chosen
    flag = f"--xla_force_host_platform_device_count={max(1, devices.count // num_processes)}"
    return chosen | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"{chosen['XLA_FLAGS']} {flag}"}


class Session:
    """A running child. Use as a context: at its end the child and what it started are gone."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._errors,
                                         start_new_session=True)
        assert self._process.stdout is not None
        self._out = self._process.stdout.fileno()
        self._text, self._at, self._silent = b"", "", False
        self._ended_in: str | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None and self._ended_in is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GOODBYE)
        self._kill()
        self._errors.close()

    def finding(self, name: str, seconds: float) -> Finding:
        """The child's next finding, which is that of `name`. seconds: the longest silence that is no fault."""
        if self._ended_in is not None:
            return Finding(name=name, status="skipped", line=f"not tried after {self._ended_in}")
        self._at = ""
        for message in self._messages(seconds):
            if "finding" in message:
                answer = message["finding"]
                return Finding(**answer | {"details": tuple(answer["details"])})
            self._at = message["at"]
        return self._lost(name, seconds)

    def _messages(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Until the child ends or is silent for so long. Lines that are no messages are somebody's own output."""
        while True:
            line, found, rest = self._text.partition(b"\n")
            if found:
                self._text = rest
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                    if isinstance(message, dict) and message.keys() & {"finding", "at"}:
                        yield message
                continue
            ready, _, _ = select.select([self._out], [], [], seconds)
            self._silent = not ready
            chunk = os.read(self._out, 1 << 16) if ready else b""
            if not chunk:
                return
            self._text += chunk

    def _lost(self, name: str, seconds: float) -> Finding:
        self._ended_in = name
        code = self._exit_code()
        self._kill()
        self._errors.seek(0)
        written = self._errors.read().decode(errors="replace")
        details = tuple(written.splitlines()[-LAST_LINES:])
        if code == 0:
            return Finding(name=name, status="skipped", line="not tried after what failed above", details=details)
        at = f" at {self._at}" if self._at else ""
        said = last_error_line(written)
        known = explain(written)
        if code is None:
            return Finding(name=name, status="FAIL", line=f"no answer in {seconds:.0f} s{at}", details=details,
                           fix="a device, a link or another process hangs: run again with NCCL_DEBUG=INFO and --verbose")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return Finding(name=name, status="FAIL", line=said or f"ended with {how}{at}", details=details,
                       fix=known.line if known else f"the process ended there with {how}{at}; --verbose shows its last lines")

    def _exit_code(self) -> int | None:
        """None if it still runs."""
        if self._silent:
            return None
        try:
            return self._process.wait(GOODBYE)  # it has closed its output
        except subprocess.TimeoutExpired:
            return None

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
