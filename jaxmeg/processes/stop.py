"""SIGTERM and Ctrl-C as a request: the run saves and stops after a step, all processes at the same one.

With several processes the one that is asked names a step two ahead. None can be further by then: whoever has the metrics of a step
knows that every process has dispatched it. So one look at a text a step is enough, and no device waits.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from jaxmeg.processes.store import Store, open_store

AHEAD = 2  # steps; see above


class StopSignal:
    """Context in which the first SIGTERM or SIGINT is a request; the second acts as it would without this."""

    def __init__(self, store: Store | None = None) -> None:
        """store: that all processes share; None opens one."""
        self.name = "a signal to another process"
        """What asked for it, once it is requested."""
        self._store = store or open_store("stop")
        self._received = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python has no signals
            self._previous = {number: signal.signal(number, self._receive) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._uninstall()

    def requested(self, step: int) -> bool:
        """Whether to stop after `step`, which has been dispatched. Every process asks at every step, once it has the metrics of the
        step before; all get the same answer."""
        if self._store is None:
            return self._received
        if self._received:
            return step >= int(self._store.put_first("at/step", str(step + AHEAD)))
        return step >= int(self._store.read("at").get("step", step + 1))

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._uninstall()
        self._received, self.name = True, signal.Signals(number).name
        when = "within three steps" if self._store else "after this step"
        line = f"\n{self.name}: the run saves and stops {when}; once more stops it at once\n"
        os.write(2, line.encode())  # print could be what this signal has interrupted

    def _uninstall(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
