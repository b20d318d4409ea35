"""When a schedule does its work, and which slots of a buffer are taken when.

Arithmetic on (virtual stage, microbatch) pairs; `pipeline/schedules.py` explains the words and makes tables of it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from enum import IntEnum
from operator import itemgetter
from typing import NamedTuple

KINDS = "EFHBG"  # embedding, forward, head and loss, backward, embedding gradient
Cell = tuple[int, int]  # (virtual stage, microbatch)


Ticks = dict[Cell, int]


class Plan(NamedTuple):
    """Ticks of F and B by (virtual stage, microbatch), of E, H and G by microbatch; and the kinds of work of every tick."""

    forward: Ticks
    backward: Ticks
    embed: dict[int, int]
    head: dict[int, int]
    embed_grad: dict[int, int]
    kinds: tuple[str, ...]


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
    return add_vocabulary(forward, {} if name == "forward" else backward, sparse=name in ("gpipe", "forward") and V > 1)


def add_vocabulary(forward: Ticks, backward: Ticks, sparse: bool = False, unbroken: bool = False) -> Plan:
    """Adds H to the forwards of the last virtual stage, E before and G after the work of virtual stage 0.

    E and G go together with H where there is room, and run idle in other ticks, so that few kinds have to be compiled:
    what a tick has of F, H and B decides whether it has E and G. Where there is no room, they run with every F, every B.

    Args:
        forward, backward: no forward before tick 1; a stage has at most one of each in a tick.
        sparse: F with H and F without take turns, many times: only those with H get an idle E.
        unbroken: F, and B, run idle in ticks between their first and their last.
    """
    last = max(v for v, _ in forward)
    head = {m: tick for (v, m), tick in forward.items() if v == last}
    enter = {m: forward[0, m] - 1 for m in head}
    leave = {m: backward[0, m] + 1 for m in head} if backward else {}
    F, H, B = set(forward.values()), set(head.values()), set(backward.values())
    if unbroken:
        F, B = (set(range(min(ticks), max(ticks) + 1)) for ticks in (F, B))
    end = max(F | B)
    together = (H | (set(range(min(H))) if sparse else F - B), (H & B) | (B - F))
    for E, G in (together, (F, B)):
        embed = _spread(enter, -1, lambda tick, E=E: tick in E or tick <= 0)
        embed_grad = _spread(leave, 1, lambda tick, G=G: tick in G or tick > end)
        if min(embed.values()) >= 0 and max(embed_grad.values(), default=0) <= end + 1:
            break
    idle = (H, H & B) if sparse else (E, G)
    by_kind = (idle[0] | set(embed.values()), F, H, B, idle[1] | set(embed_grad.values()))
    num_ticks = max(set().union(*by_kind)) + 1
    kinds = tuple("".join(k for k, ticks in zip(KINDS, by_kind) if tick in ticks) for tick in range(num_ticks))
    return Plan(forward, backward, embed, head, embed_grad, kinds)


def _spread(wanted: dict[int, int], step: int, allowed: Callable[[int], bool]) -> dict[int, int]:
    """One microbatch a tick: each goes from the tick it wants in steps of +1 or -1 to the first that is allowed and free."""
    taken: dict[int, int] = {}
    for m in sorted(wanted, key=lambda m: step * wanted[m]):
        tick = wanted[m]
        while tick in taken or not allowed(tick):
            tick += step
        taken[tick] = m
    return {m: tick for tick, m in taken.items()}


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

    def free(self, moment: int, besides: int = -1) -> int:
        """A slot that holds nothing of use at this moment, and is not `besides`; a new one if there is none."""
        for slot, uses in enumerate(self.uses):
            started = bisect_right(uses, moment, key=itemgetter(0))
            if slot != besides and (not started or uses[started - 1][1] < moment):
                return slot
        self.uses.append([])
        return len(self.uses) - 1
