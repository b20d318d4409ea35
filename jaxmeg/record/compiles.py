"""Counts what XLA compiles, by function, so that a run can say when something is compiled that should not be.

jax reports each compilation to `jax.monitoring`, with the name of the function; a program that came from the persistent
cache is reported too, after a cache hit in the same thread.
"""

from __future__ import annotations

import re
import threading
from types import TracebackType
from typing import Any, NamedTuple

import jax.monitoring

COMPILED = "/jax/core/compile/backend_compile_duration"
CACHE_HIT = "/jax/compilation_cache/cache_hits"


class Compilation(NamedTuple):
    """One program that was compiled, or read from the persistent cache."""

    name: str
    """The Python function's, for example "step"."""
    seconds: float
    from_cache: bool


class Watch:
    """Listens while it is open; a context manager. Several may be open at once, and each sees everything."""

    def __init__(self) -> None:
        self.found: list[Compilation] = []
        self.here = threading.local()

    def __enter__(self) -> Watch:
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

    def new(self) -> list[Compilation]:
        """What has been compiled since this was last asked, in order."""
        found, self.found = self.found, []
        return found

    def _on_event(self, event: str, **_: Any) -> None:
        if event == CACHE_HIT:
            self.here.hit = True

    def _on_duration(self, event: str, duration_secs: float, **details: Any) -> None:
        if event == COMPILED:
            name = re.sub(r"^jit\((.*)\)$", r"\1", str(details.get("fun_name", "?")))
            self.found.append(Compilation(name, duration_secs, getattr(self.here, "hit", False)))
            self.here.hit = False
