"""When a schedule does its work, and which slots of a buffer are taken when.

Arithmetic on (virtual stage, microbatch) pairs; `pipeline/schedules.py` explains the words and makes tables of it.
"""

from bisect import bisect_right
from collections.abc import Iterable
from enum import IntEnum
from operator import itemgetter
from typing import NamedTuple

KINDS = "EFHBG"  # embedding, forward, head and loss, backward, embedding gradient
Cell = tuple[int, int]  # (virtual stage, microbatch)


class Plan(NamedTuple):
    """Ticks of forward and backward by (virtual stage, microbatch), of E, H and G by microbatch."""

    forward: dict[Cell, int]
    backward: dict[Cell, int]
    embed: dict[int, int]
    head: dict[int, int]
    embed_grad: dict[int, int]


def group_sizes(num_stages: int, num_microbatches: int) -> list[int]:
    """Microbatches visit the chunks in floor(M/P) balanced groups of at least P (one if M < P), larger groups first."""
    num_groups = max(num_microbatches // num_stages, 1)
    size, larger = divmod(num_microbatches, num_groups)
    return [size + (i < larger) for i in range(num_groups)]


def make_plan(name: str, P: int, V: int, M: int) -> Plan:
    sizes = group_sizes(P, M)
    if name == "gpipe":  # the last stage's first backward: after its last forward ...
        start = P + V * sum(sizes[:-1]) + (V - 1) * max(sizes[-1], P) + sizes[-1]
    else:  # ... or in the tick of its first forward of the last chunk
        start = P + (V - 1) * max(sizes[0], P)
    forward, backward, base = {}, {}, 0
    for size in sizes:
        width = max(size, P)  # ticks from one chunk of this group to the next
        for v, r in ((v, r) for v in range(P * V) for r in range(size)):
            c, s = divmod(v, P)
            forward[v, base + r] = 1 + s + V * base + c * width + r
            backward[v, base + r] = start + (P - 1 - s) + V * base + (V - 1 - c) * width + r
        base += size
    head = {m: forward[P * V - 1, m] for m in range(M)}
    if name == "forward":
        return Plan(forward, {}, _embed_ticks(forward, head), head, {})
    return Plan(forward, backward, _embed_ticks(forward, head), head, _embed_grad_ticks(backward, head))


def _embed_ticks(forward: dict[Cell, int], head: dict[int, int]) -> dict[int, int]:
    """A tick before stage 0 needs it; once there are heads, in a tick with a head: there E, H, G go together."""
    first, head_ticks, ticks = min(head.values()), set(head.values()), {}
    for m in reversed(head):
        tick = forward[0, m] - 1
        while tick in ticks.values() or (tick >= first and tick not in head_ticks):
            tick -= 1
        ticks[m] = tick
    return ticks


def _embed_grad_ticks(backward: dict[Cell, int], head: dict[int, int]) -> dict[int, int]:
    """A tick after stage 0's backward; while there are heads, in a tick with a head."""
    last, head_ticks, ticks = max(head.values()), set(head.values()), {}
    for m in head:
        tick = backward[0, m] + 1
        while tick in ticks.values() or (tick <= last and tick not in head_ticks):
            tick += 1
        ticks[m] = tick
    return ticks


def tick_kinds(plan: Plan, alternating: bool) -> tuple[str, ...]:
    """What runs in each tick. E and G run idle in some, so that few kinds of tick have to be compiled.

    Args:
        alternating: ticks of one direction with and without vocabulary work take turns, many times: leave them so.
    """
    by_kind = (plan.embed, plan.forward, plan.head, plan.backward, plan.embed_grad)
    E, F, H, B, G = (set(ticks.values()) for ticks in by_kind)
    E |= H if alternating else H | (F - B)
    G |= (H & B) if alternating else (H & B) | (B - F)
    ticks_of = dict(zip(KINDS, (E, F, H, B, G), strict=True))
    return tuple("".join(k for k in KINDS if tick in ticks_of[k]) for tick in range(max(E | F | H | B | G) + 1))


class Phase(IntEnum):
    FORWARD = 0
    VOCABULARY = 1
    BACKWARD = 2
    EXCHANGE = 3

    def of(self, tick: int) -> int:
        """The moment of this phase of a tick."""
        return 4 * tick + self


class Slots:
    """One buffer of one stage. `of[key]` is the slot for a closed interval of moments: first fit, ordered by start."""

    def __init__(self, intervals: Iterable[tuple[int, int, Cell]]) -> None:
        self.of: dict[Cell, int] = {}
        self.uses: list[list[tuple[int, int]]] = []  # [slot]: intervals that follow each other
        for start, end, key in sorted(intervals):
            self.of[key] = self.free(start)
            self.uses[self.of[key]].append((start, end))

    def free(self, moment: int) -> int:
        """A slot that holds nothing of use at this moment; a new one if there is none."""
        for slot, uses in enumerate(self.uses):
            started = bisect_right(uses, moment, key=itemgetter(0))
            if not started or uses[started - 1][1] < moment:
                return slot
        self.uses.append([])
        return len(self.uses) - 1
