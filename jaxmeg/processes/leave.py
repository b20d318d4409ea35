"""How a process of several leaves a run that has failed: at once, and not after the others have left too, as jax would (5 minutes);
and what is said before jax aborts it from C++, which it does when it loses the coordinator.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from jaxmeg import _compat
from jaxmeg.processes.store import CoordinationStore

T = TypeVar("T")
WAIT = 3.0  # seconds for an answer of the file system or the store, at the end
_kept: list[Any] = []  # handlers that C may call as long as the process lives
LINGER = 20.0  # seconds that process 0, which holds the store, stays for the others to read it


def leave(code: int, without: Collection[int] = ()) -> int:
    """The exit code; with several processes and a code that is not 0, ends this process. Call once its error is printed.

    without: processes that are gone already.
    """
    client, index, count = _compat.coordination()
    if not code or client is None or count == 1:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    store = CoordinationStore(client, "jaxmeg")
    try:
        in_time(lambda: store.put(f"gone/{index}", ""), WAIT)
        until = time.monotonic() + LINGER
        while index == 0 and len({*store.read("gone"), *map(str, without)}) < count and time.monotonic() < until:
            time.sleep(0.1)
    except (RuntimeError, TimeoutError):
        pass  # the coordinator has left before, or is frozen
    os._exit(code)


def in_time(ask: Callable[[], T], seconds: float) -> T:
    """What `ask` returns or raises; TimeoutError where it takes longer, as file systems and a frozen coordinator do. Its thread stays."""
    answers: list[T] = []
    errors: list[Exception] = []

    def answer() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]


def before_abort(act: Callable[[], None]) -> None:
    """Have `act` called when C or C++ code aborts the process, in the thread that does; then the abort goes on.

    Python's own handlers would be too late: they run in the main thread, after the abort.
    """
    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: act())
    _kept.append(handler)
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))
