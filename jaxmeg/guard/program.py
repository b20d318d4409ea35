"""The compiled train step is read back: what does it move between devices that the layout did not ask for?

Everything that is meant to move goes through a verb of `parallel` (or `Layout.reduce`), which names itself and its mesh
axes in the program: all_gather(dp). What the compiler adds by itself has another name: to add up the gradient's norm it
moves scalars, and Adafactor's means over cut layers are counted by `optim.traffic`. Anything else is an array that the compiler puts
together or moves because two layouts don't agree (jax-ml/jax#21562, openxla/xla#15402).

What the compiler adds for two layouts that differ often has no name. Nor have small all-reduces of different origin that a GPU's
compiler has put into one: so all-reduces without a name are not judged. Offload is not built; what it moves to the host and back
will have to be read here too.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import jax

from jaxmeg import hlo
from jaxmeg.layout import is_leaf_layout
from jaxmeg.optim.traffic import reduced
from jaxmeg.parallel import AXES
from jaxmeg.setup import Setup

SMALL = 2**16  # bytes: what a link carries in about a microsecond, less than the start of any collective takes
SHOWN = 3
_AXIS = "|".join(AXES)
_SCOPE = re.compile(rf"[a-z_]+\(((?:{_AXIS})(?:,(?:{_AXIS}))*)\)")  # as `parallel.scope` writes it


class ReadBack(NamedTuple):
    """What the program moves, in words."""

    traffic: str
    """By mesh axes; empty if nothing moves, or nobody knows."""
    unplanned: str
    """What no verb asked for, or why that can't be said; empty if there is none."""


def read_back(setup: Setup, compiled: jax.stages.Compiled) -> ReadBack:
    """Read the train step of a setup with more than one device."""
    try:
        program = hlo.read(compiled.as_text(), setup.layout.sizes, unknown_trips=1)
    except ValueError as error:
        return ReadBack("", f"the compiled step can't be read, so what it moves is unknown ({error}); to go without: guard.unplanned off")
    found = unplanned(program, optimizer_bytes(setup))
    wholes = {4 * math.prod(leaf.shape): leaf.path for leaf in jax.tree.leaves(setup.layout.leaves, is_leaf=is_leaf_layout)}
    return ReadBack(traffic(program), describe(found, wholes) if found else "")


def optimizer_bytes(setup: Setup) -> int:
    """What the optimizer sums up between devices outside of any verb, per device and update."""
    optim = setup.config.optim
    if optim.name != "adafactor":
        return 0
    return sum(leaf.bytes for leaf in reduced(setup.layout, setup.resolved.arch.vocab_size, optim.factored_dim))


def unplanned(program: hlo.Program, optimizer_bytes: int = 0) -> list[hlo.Collective]:
    """Collectives above SMALL that no verb asked for, or over other axes than the verb's; the largest first.

    optimizer_bytes: all-reduces of the update, together no larger than this, are the optimizer's own.
    """
    found = [c for c in program.collectives if c.axes and c.bytes > SMALL and not _asked_for(c) and (c.source or c.op != "all-reduce")]
    means = [c for c in found if c.op == "all-reduce" and re.search(r"\bupdate/", c.source)]
    if sum(_bytes(c) for c in means) <= optimizer_bytes:
        found = [c for c in found if c not in means]
    return sorted(found, key=_bytes, reverse=True)


def _asked_for(c: hlo.Collective) -> bool:
    """Whether one of the verbs that it comes from works over these axes."""
    return any(set(scope.split(",")) == set(c.axes) for scope in _SCOPE.findall(c.source))


def _bytes(c: hlo.Collective) -> int:
    return c.count * c.bytes


def describe(found: list[hlo.Collective], wholes: Mapping[int, str]) -> str:
    """The largest of them in one line: what, over which axes, how much an update, from where. wholes: bytes of a whole fp32 leaf
    -> its path."""
    def one(c: hlo.Collective) -> str:
        runs = f", {c.count} times, in a loop" if c.loops else ""
        scopes = dict.fromkeys(_SCOPE.findall(c.source))
        asked = f", asked for over {' and over '.join(scopes)}" if scopes else ""
        size = f" (the size of {wholes[c.bytes]})" if c.bytes in wholes else ""
        origin = f"from {c.source}" if c.source else f"put in by the compiler as {c.name}"
        return f"{c.op} over {','.join(c.axes)} of {_mb(_bytes(c))} {c.dtype} an update{size}{runs}{asked}, {origin}"

    more = found[SHOWN:]
    rest = f"; and {len(more)} more of {_mb(sum(map(_bytes, more)))}" if more else ""
    return f"the compiled step moves what the layout did not ask for: {'; '.join(one(c) for c in found[:SHOWN])}{rest}"


def traffic(program: hlo.Program) -> str:
    """What one device sends in an update with ring algorithms, by mesh axes."""
    sent: Counter[tuple[str, ...]] = Counter()
    for c in program.collectives:
        sent[c.axes] += c.count * c.wire_bytes
    parts = [f"{_mb(size)} over {','.join(axes)}" for axes, size in sent.most_common() if size > SMALL]
    return f"a device sends {', '.join(parts)} an update" if parts else ""


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
