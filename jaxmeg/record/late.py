"""Metrics are read one step late, so that logging never stalls the device; and where the loop's wall time went.

    with late.apart("data_wait"): rows = next(batches)
    state, metrics = step(state, rows)          # queued, not waited for
    for arrival in late.push(n, metrics): ...   # waits for step n - 1, while the device works on n
    for arrival in late.flush(): ...            # waits for the newest: before an evaluation or a save, and at the end

Step n is charged with the time from the arrival of step n-1's metrics to that of its own, less what was spent apart; what
was spent apart between the push of step n-1 and the push of step n is listed beside it. So over a run
`sum(step + data_wait + evaluate + save + profile)` is the time from the start to the last arrival, each second once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax

Metrics = TypeVar("Metrics")
Apart = Literal["data_wait", "evaluate", "save", "profile"]


class Seconds(NamedTuple):
    """Where the wall time of one step went, in seconds."""

    step: float
    """Everything else: the device's work, and what hides behind it."""
    data_wait: float = 0.0
    """The loop stood still for the rows of this step."""
    evaluate: float = 0.0
    """Evaluation between the step before and this one."""
    save: float = 0.0
    """Saving between the step before and this one, as far as the loop stood still."""
    profile: float = 0.0
    """Starting and writing a profiler trace."""

    @property
    def training(self) -> float:
        """What a step costs: its own time and that for its rows. What speeds are made of."""
        return self.step + self.data_wait


class Arrival(NamedTuple, Generic[Metrics]):
    """A step whose metrics are on the host: numpy values in the tree that was pushed."""

    step: int
    metrics: Metrics
    seconds: Seconds


@dataclass
class _Waiting(Generic[Metrics]):
    step: int
    metrics: Metrics
    apart: dict[Apart, float]


class Late(Generic[Metrics]):
    """Holds the metrics of the newest step, and reads them when the next has been dispatched. The clock starts here."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self.clock = clock
        self.last = clock()
        self.since_arrival = 0.0
        self.since_push: dict[Apart, float] = {}
        self.waiting: _Waiting[Metrics] | None = None

    @contextmanager
    def apart(self, what: Apart) -> Iterator[None]:
        """Time that is not the step's own. Does not nest."""
        started = self.clock()
        try:
            yield
        finally:
            spent = self.clock() - started
            self.since_arrival += spent
            self.since_push[what] = self.since_push.get(what, 0.0) + spent

    def push(self, step: int, metrics: Metrics) -> list[Arrival[Metrics]]:
        """Hand over the metrics of a step just dispatched. Returns the step before, if it has not been read yet."""
        for leaf in jax.tree.leaves(metrics):
            leaf.copy_to_host_async()
        newest = _Waiting(step, metrics, self.since_push)
        self.since_push = {}
        arrived = self.flush()
        self.waiting = newest
        return arrived

    def flush(self) -> list[Arrival[Metrics]]:
        """Wait for what has been pushed and not been returned: one step or none."""
        if self.waiting is None:
            return []
        waiting, self.waiting = self.waiting, None
        host: Any = jax.device_get(waiting.metrics)
        now = self.clock()
        own = now - self.last - self.since_arrival
        self.last, self.since_arrival = now, 0.0
        return [Arrival(waiting.step, host, Seconds(own, **waiting.apart))]
