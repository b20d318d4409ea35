"""When each operation of a user's order runs: the earliest ticks of the four-phase executor.

An order is a list of operations a stage. A stage does one forward and one backward in a tick, the forward first; what it
sends arrives in the next tick, and the head's gradient in the same. The ticks are longest paths in the graph of these rules.
Knows nothing of files, tables and costs.
"""

from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from typing import NamedTuple

from jaxmeg.pipeline.notation import Op

Orders = Sequence[Sequence[Op]]  # [stage]


def needs(op: Op, last: int) -> tuple[Op, int] | None:
    """The operation whose result `op` reads, and how many ticks later it can. `last`: the last virtual stage."""
    if op.kind == "F":
        return (Op("F", op.v - 1, op.m), 1) if op.v else None
    return (Op("B", op.v + 1, op.m), 1) if op.v < last else (Op("F", last, op.m), 0)


def last_virtual_stage(orders: Orders) -> int:
    return max(op.v for op in orders[-1])


def earliest_ticks(orders: Orders, ahead: int = 0) -> dict[Op, int]:
    """The first tick, from 1, in which each operation can run, forwards in their order and backwards in theirs.

    Args:
        ahead: a forward may run before that many of the backwards that are listed before it; 0 keeps the listed order.
            No backward runs before a forward that is listed before it.

    Raises:
        graphlib.CycleError: the orders wait for each other; `deadlock` says how.
    """
    after = {op: rules for stage in orders for op, rules in _rules(stage, last_virtual_stage(orders), ahead)}
    ticks: dict[Op, int] = {}
    for op in TopologicalSorter({op: [before for before, _ in rules] for op, rules in after.items()}).static_order():
        ticks[op] = max((ticks[before] + delay for before, delay in after[op]), default=1)
    return ticks


def _rules(stage: Sequence[Op], last: int, ahead: int) -> Iterator[tuple[Op, list[tuple[Op, int]]]]:
    """Each operation with those it comes after, and by how many ticks."""
    forwards: list[Op] = []
    backwards: list[Op] = []
    for op in stage:
        rules = [rule] if (rule := needs(op, last)) else []
        mine = forwards if op.kind == "F" else backwards
        rules += [(mine[-1], 1)] if mine else []
        if op.kind == "B" and forwards:
            rules.append((forwards[-1], 0))
        if op.kind == "F" and len(backwards) > ahead:
            rules.append((backwards[-1 - ahead], 1))
        mine.append(op)
        yield op, rules


class Wait(NamedTuple):
    """A stage stands before `op`, which reads the result of `needed`."""

    op: Op
    needed: Op


def deadlock(orders: Orders) -> list[Wait]:
    """Operations that wait for each other in a circle, each for one behind the next; empty if all operations can run in order."""
    last, done = last_virtual_stage(orders), set()
    left = [list(reversed(stage)) for stage in orders]
    waiting: dict[int, Wait] = {}
    todo = list(range(len(orders)))
    while todo:  # stages that may be able to go on
        stage = todo.pop()
        while left[stage]:
            op = left[stage][-1]
            need = needs(op, last)
            if need and need[0] not in done:
                waiting[stage] = Wait(op, need[0])
                break
            done.add(left[stage].pop())
            todo += [other for other, wait in waiting.items() if wait.needed == op]
        else:
            waiting.pop(stage, None)
    if not any(left):
        return []
    stage, path = next(s for s, stage in enumerate(left) if stage), []
    while stage not in path:
        path.append(stage)
        stage = waiting[stage].needed.v % len(orders)
    return [waiting[s] for s in path[path.index(stage) :]]
