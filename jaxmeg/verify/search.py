"""Where a layout differs from one device: which part of it is at fault, and the smallest layout that differs still.

Both ask a function whether a config fails, which runs it; nothing here does. Needs no jax.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxmeg.config import Config
from jaxmeg.verify.layouts import smaller, switched_off

Fails = Callable[[Config], bool]


def at_fault(config: Config, fails: Fails) -> list[str]:
    """The parts of a failing layout without which it passes, one switched off at a time; empty where it takes more than one."""
    return [name for name, without in switched_off(config).items() if not fails(without)]


def smallest_failing(config: Config, fails: Fails) -> Config:
    """A failing config made smaller step by step. A step after which it passes is not tried again: each asks for one run."""
    needed: set[str] = set()
    while steps := [(name, step) for name, step in smaller(config).items() if name not in needed]:
        name, step = steps[0]
        if fails(step):
            config = step
        else:
            needed.add(name)
    return config
