"""SIGTERM and Ctrl-C as a request: the run saves and stops after the current step, on all processes at the same one."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from jaxmeg.processes.agree import any_process


class StopSignal:
    """Context in which the first SIGTERM or SIGINT is a request; the second acts as it would without this."""

    def __init__(self) -> None:
        self.name = "a signal to another process"
        """What asked for it, once it is requested."""
        self._received = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python has no signals
            self._previous = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._uninstall()

    def requested(self) -> bool:
        """Whether to stop now, the same on all processes. Every process asks once a step."""
        return any_process(self._received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._uninstall()
        self._received, self.name = True, signal.Signals(number).name
        line = f"\n{self.name}: the run saves and stops after this step; once more stops it at once\n"
        os.write(2, line.encode())  # print could be what this signal has interrupted

    def _uninstall(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
