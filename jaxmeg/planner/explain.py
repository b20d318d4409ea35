"""Every collective of a compiled step: what it is, where in the step, over which axis, how often, how many bytes, overlapped or not.

Reads a `hlo.Program` and draws the process groups of a mesh; compiles nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from rich.console import Console
from rich.table import Table

from jaxmeg.hlo import Program
from jaxmeg.planner.chips import Chip

PLACES = ("embed", "embed.backward", "head", "forward.stage", "backward.stage", "layer", "attention", "norm", "update", "clip")
"""Named scopes of the step that tell a reader where he is."""
GROUPS_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Row:
    """Collectives that are alike."""

    where: str
    op: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int
    """Of one run, the whole tensor, on one device."""
    runs: int
    overlapped: int
    """Runs with a matmul or attention between start and done."""


def rows_of(program: Program) -> list[Row]:
    """In the order of the program; groups of one device are left out."""
    found: dict[tuple, list[int]] = {}
    for c in program.collectives:
        if c.axes:
            runs = found.setdefault((place_of(c.source), c.op, c.axes, c.dtype, c.bytes), [0, 0])
            runs[0] += c.count
            runs[1] += c.count * bool(c.overlapped)
    return [Row(where=where, op=op, axes=axes, dtype=dtype, bytes=size, runs=runs, overlapped=beside)
            for (where, op, axes, dtype, size), (runs, beside) in found.items()]


def place_of(source: str) -> str:
    """`jit(step)/.../tick.FB/backward.stage/.../layer/.../rematted_computation/...` -> "tick FB, backward.stage, layer, again"."""
    words = []
    for part in source.split("/"):
        name = re.sub(r"^(?:transpose|jvp)\((.*)\)$", r"\1", part)
        if name in PLACES or name.startswith("tick."):
            words.append(name.replace("tick.", "tick "))
        elif name == "rematted_computation":
            words.append("again")
    return ", ".join(dict.fromkeys(words)) or "once a step"


def show_rows(program: Program, console: Console, least_bytes: int = 0) -> None:
    """least_bytes: of all runs together; what sends less is added up in one line."""
    rows = rows_of(program)
    table = _table("where", "collective", "axes", "format", right=("MB a run", "runs", "GB a step", "overlapped"))
    small = [row for row in rows if row.runs * row.bytes < least_bytes]
    for row in rows:
        if row not in small:
            table.add_row(row.where, row.op, ",".join(row.axes), row.dtype, f"{row.bytes / 1e6:,.2f}", f"{row.runs:,}",
                          f"{row.runs * row.bytes / 1e9:,.3f}", f"{row.overlapped / row.runs:.0%}")
    if small:
        total = sum(row.runs * row.bytes for row in small)
        table.add_row(f"{len(small)} smaller ones", "", "", "", "", f"{sum(row.runs for row in small):,}", f"{total / 1e9:,.3f}", "")
    console.print(table)


def sums(program: Program) -> dict[tuple[tuple[str, ...], str], tuple[int, int]]:
    """(axes, op) -> (runs, bytes) of one step."""
    found: dict[tuple[tuple[str, ...], str], tuple[int, int]] = {}
    for row in rows_of(program):
        runs, total = found.get((row.axes, row.op), (0, 0))
        found[row.axes, row.op] = (runs + row.runs, total + row.runs * row.bytes)
    return found


def show_difference(first: tuple[str, Program, int], second: tuple[str, Program, int], console: Console) -> None:
    """Two programs, each (name, program, bytes of memory), by axes and collective."""
    table = _table("axes", "collective", right=(f"{first[0]}: runs", "GB", f"{second[0]}: runs", "GB", "times the bytes"))
    one, other = sums(first[1]), sums(second[1])
    for key in sorted(one.keys() | other.keys()):
        (runs, size), (runs2, size2) = one.get(key, (0, 0)), other.get(key, (0, 0))
        ratio = f"{size2 / size:.2f}" if size else "-"
        table.add_row(",".join(key[0]), key[1], f"{runs:,}", f"{size / 1e9:,.3f}", f"{runs2:,}", f"{size2 / 1e9:,.3f}", ratio)
    table.add_row("memory", "", "", f"{first[2] / 1e9:,.3f}", "", f"{second[2] / 1e9:,.3f}", f"{second[2] / first[2]:.2f}")
    console.print(table)


def _table(*left: str, right: tuple[str, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right")
    return table


# ------------------------------------------------------------------ process groups
def groups(mesh: Mapping[str, int], axis: str) -> Iterator[list[int]]:
    """Devices that talk along an axis, group by group; numbers are positions in the mesh, the last axis fastest."""
    names = list(mesh)
    inner = prod(mesh[name] for name in names[names.index(axis) + 1 :])
    for first in range(prod(mesh.values())):
        if first // inner % mesh[axis] == 0:
            yield [first + i * inner for i in range(mesh[axis])]


def show_topology(mesh: Mapping[str, int], chip: Chip | None, console: Console) -> None:
    """The groups of each axis; of a known chip also its hosts, and the links that the groups use."""
    count = prod(mesh.values())
    if chip:
        hosts = -(-count // chip.node_gpus)
        inside = f"{chip.node_link.kind}, {chip.node_link.gb_s} GB/s"
        between = f"; between hosts {chip.network.kind}, {chip.network.gb_s} GB/s" if hosts > 1 else ""
        console.print(f"{count} {chip.name} on {hosts} host{'s' if hosts > 1 else ''} of {chip.node_gpus}; inside {inside}{between}")
    for axis in (name for name in mesh if mesh[name] > 1):
        every = list(groups(mesh, axis))
        shown = " | ".join(_short(group) for group in every[:GROUPS_SHOWN]) + (" | ..." if len(every) > GROUPS_SHOWN else "")
        over = _links(every, chip) if chip else ""
        console.print(f"{axis}={mesh[axis]}: {len(every)} group{'s' if len(every) > 1 else ''}{over}: {shown}", soft_wrap=True)


def _links(every: list[list[int]], chip: Chip) -> str:
    spans = max(len({device // chip.node_gpus for device in group}) for group in every)
    return f" over {chip.node_link.kind}" if spans == 1 else f" over {chip.network.kind}, each on {spans} hosts"


def _short(group: list[int]) -> str:
    return " ".join(map(str, group if len(group) <= 8 else [*group[:3], "...", group[-1]]))
