"""What the processes of a run find out together. With one process everything here is immediate.

With several, every process must make the same calls in the same order. Set JAXMEG_CHECK_PROCESSES=1 to find the one that
does not: it then fails within a minute, by name, instead of hanging.
"""

from __future__ import annotations

import os
from collections import Counter

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

CHECK = "JAXMEG_CHECK_PROCESSES"
SECONDS = 60
PATIENCE = 86400  # seconds: a process that has ended is seen by the watchdog
_visits: Counter[str] = Counter()


class ProcessError(RuntimeError):
    """Processes that are not at the same place; one line."""


def any_process(flag: bool) -> bool:
    """Whether any process says so."""
    return flag if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.array(flag)).any())


def wait_for_all(place: str) -> None:
    """Until every process is here, however long it takes: they compile at their own speed, and a collective waits for half a minute only.

    Raises ProcessError where one has ended.
    """
    if jax.process_count() > 1:
        _barrier(place, PATIENCE, f"process {jax.process_index()} waited for the others before {place}, and they did not come")


def together(section: str) -> None:
    """All processes are about to do `section`. Looked at only if JAXMEG_CHECK_PROCESSES is set.

    Raises ProcessError after a minute without the others.
    """
    if jax.process_count() == 1 or not os.environ.get(CHECK):
        return
    _barrier(section, SECONDS, f"process {jax.process_index()} waited {SECONDS} s for the others at {section} number "
             f"{_visits[section] + 1}: every process must save, restore, evaluate and export at the same steps")


def _barrier(name: str, seconds: int, failure: str) -> None:
    _visits[name] += 1
    try:
        ocp.multihost.get_barrier_sync_fn()(key=f"jaxmeg:{name}:{_visits[name]}", timeout_ms=1000 * seconds)
    except jax.errors.JaxRuntimeError as error:
        raise ProcessError(failure) from error
