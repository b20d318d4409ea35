"""Draws a schedule: in the terminal with rich, or as a PNG or SVG figure with matplotlib (the extra `plot`).

Reads tables only and must not know how a schedule is made. Forward and backward of a tick stand side by side; a stage
that has nothing to do there shows a bubble.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.text import Text

from jaxmeg.pipeline.schedules import NAMES, Report, Table, expected_bubble, expected_peak_live, segments, simulate

COLOURS = (  # of forward and backward, by chunk; from the fifth chunk on they repeat
    ("#a9cdf0", "#2465a3"),
    ("#fbd3a2", "#c05a12"),
    ("#b7e0b0", "#2f7d3b"),
    ("#dcc6f2", "#7144a8"),
)
FIGURES = (".png", ".svg")
INK = {"F": "#1b1b1b", "B": "#ffffff"}
BUBBLE = "#ececec"


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The forward (work F) or backward (B) of one tick: its place in time, and chunk and microbatch on each stage."""

    work: str
    start: float
    length: float
    cells: tuple[tuple[int, int] | None, ...]  # [stage]: (chunk, microbatch), or None in a bubble


def slots_of(table: Table, forward_cost: float, backward_cost: float) -> Iterator[Slot]:
    """All forwards and backwards in the order of time. Vocabulary work takes no time here."""
    now = 0.0
    for tick, kind in enumerate(table.kinds):
        for work, cost in (("F", forward_cost), ("B", backward_cost)):
            if work in kind:
                ok, chunk, mb = (table.rows[f"{work.lower()}_{name}"][tick] for name in ("ok", "chunk", "mb"))
                cells = tuple((chunk[s], mb[s]) if ok[s] else None for s in range(table.num_stages))
                length = cost / table.num_chunks
                yield Slot(work=work, start=now, length=length, cells=cells)
                now += length


# ---------------------------------------------------------------- words
def counted(number: float, noun: str, plural: str) -> str:
    return f"{number:g} {noun if number == 1 else plural}"


def headline(table: Table) -> str:
    stages = counted(table.num_stages, "stage", "stages")
    chunks = counted(table.num_chunks, "chunk", "chunks")
    return f"{table.name}: {stages}, {chunks} a stage, {counted(table.num_microbatches, 'microbatch', 'microbatches')}"


def costs_line(table: Table, forward_cost: float, backward_cost: float) -> str:
    backward = f", backward {backward_cost:g}" if table.backward_slots else ""
    return f"forward {forward_cost:g}{backward} of one microbatch on one stage"


def formula_of(table: Table) -> str:
    """Whose formulas stand beside simulated figures: the schedule's own, or for one of a user's its nearest relative's."""
    return "formula" if table.name in NAMES else "1f1b" if table.num_chunks == 1 else "interleaved"


def bubble_line(table: Table, report: Report, forward_cost: float, backward_cost: float) -> str:
    """Simulated bubble beside the formula's."""
    sizes = (table.name, table.num_stages, table.num_chunks, table.num_microbatches)
    formula = expected_bubble(*sizes, forward_cost, backward_cost)
    share = f"{report.bubble_fraction:.1%}: {report.bubble:g} of {report.time:g}"
    return f"{share}, {formula_of(table)} {formula:g} (time of {costs_line(table, forward_cost, backward_cost)})"


def live_line(table: Table, report: Report) -> str:
    """Simulated peak of live microbatches."""
    return counted(report.peak_live / table.num_chunks, "microbatch", "microbatches")


def ticks_line(kinds: Iterable[str]) -> str:
    """The program's loops, as `E, 3 EF, 3 x (4 EFHBG, 4 FB), ..`."""
    parts = []
    for segment in segments(kinds):
        runs = ", ".join(f"{ticks} {kind}" if ticks > 1 else kind for kind, ticks in segment.runs)
        parts.append(f"{segment.repeats} x ({runs})" if segment.repeats > 1 else runs)
    return ", ".join(parts)


# ---------------------------------------------------------------- terminal
def print_timeline(table: Table, console: Console, forward_cost: float = 1.0, backward_cost: float = 2.0) -> None:
    """One line a stage, every cell as wide as the others; a timeline wider than the terminal goes on below."""
    report = simulate(table, forward_cost, backward_cost)
    formula = expected_peak_live(table.name, table.num_stages, table.num_chunks, table.num_microbatches)
    inboxes = f"forward inbox {table.forward_slots}"
    lines = {"bubble": bubble_line(table, report, forward_cost, backward_cost)}
    if table.backward_slots:
        lines["live"] = f"{live_line(table, report)} at most on a stage, {formula_of(table)} {formula / table.num_chunks:g}"
        inboxes = f"ring {table.ring_slots}, {inboxes}, backward inbox {table.backward_slots}"
    lines |= {"slots": inboxes, "ticks": ticks_line(table.kinds)}
    console.print(Text(headline(table), style="bold"))
    for label, line in lines.items():
        console.print(Text.assemble((f"{label:<8}", "dim"), line), soft_wrap=True)
    kinds = "E embedding, F forward, H head and loss, B backward, G embedding gradient"
    console.print(Text(f"{'':<8}{kinds}", style="dim"), soft_wrap=True)
    width = len(str(table.num_microbatches - 1)) + 1
    margin = len(f"stage {table.num_stages - 1}  ")
    columns = list(slots_of(table, forward_cost, backward_cost))
    per_block = max((console.width - margin) // width, 1)
    for first in range(0, len(columns), per_block):
        block = columns[first : first + per_block]
        console.print()
        heads = Text.assemble(" " * margin, *((f"{slot.work:>{width}}", "dim") for slot in block))
        console.print(heads, no_wrap=True, crop=False)
        for stage in range(table.num_stages):
            line = Text(f"{f'stage {stage}':<{margin}}")
            for slot in block:
                line.append(*_cell(slot, stage, width))
            console.print(line, no_wrap=True, crop=False)
    console.print()
    console.print(_legend(table))


def _colour(chunk: int, work: str) -> str:
    return COLOURS[chunk % len(COLOURS)]["FB".index(work)]


def _cell(slot: Slot, stage: int, width: int) -> tuple[str, str]:
    """Text and style."""
    if (cell := slot.cells[stage]) is None:
        return f"{'·':>{width}}", "dim"
    chunk, microbatch = cell
    return f"{microbatch:>{width}}", f"{INK[slot.work]} on {_colour(chunk, slot.work)}"


def _works(table: Table) -> dict[str, str]:
    """Kinds of work in the table, with their names."""
    return {"F": "forward", "B": "backward"} if table.backward_slots else {"F": "forward"}


def _legend(table: Table) -> Text:
    legend = Text()
    for chunk in range(table.num_chunks):
        legend.append(f"chunk {chunk} " if table.num_chunks > 1 else "")
        for work, name in _works(table).items():
            legend.append(f" {name} ", f"{INK[work]} on {_colour(chunk, work)}")
        legend.append("  ")
    return legend.append("· bubble", "dim")


# ---------------------------------------------------------------- figure
def save_timeline(table: Table, path: Path, forward_cost: float = 1.0, backward_cost: float = 2.0) -> None:
    """Writes a PNG or SVG in which cells are as long as their work takes.

    Raises:
        ValueError: another kind of file, or matplotlib is not installed.
        OSError: the file cannot be written.
    """
    if path.suffix.lower() not in FIGURES:
        raise ValueError(f"--out={path} is no figure: use a name that ends in {' or '.join(FIGURES)}")
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ValueError('figures need matplotlib: pip install "jaxmeg[plot]"') from error

    report = simulate(table, forward_cost, backward_cost)
    slots = list(slots_of(table, forward_cost, backward_cost))
    inches = min(max(0.3 * report.time * min(table.num_chunks, 2), 8.0), 30.0)
    shortest = inches * min(slot.length for slot in slots) / report.time  # in inches, of a cell
    size = min(9.0, 72 * shortest / (0.75 * len(str(table.num_microbatches - 1)) + 0.4))
    figure = Figure(figsize=(inches + 1.0, 0.4 * table.num_stages + 1.7), layout="constrained")
    axes = figure.add_subplot()
    for slot in slots:
        for stage, cell in enumerate(slot.cells):
            colour = BUBBLE if cell is None else _colour(cell[0], slot.work)
            axes.barh(stage, slot.length, 0.86, slot.start, color=colour, edgecolor="white", linewidth=0.8)
            if cell is not None and size >= 4:
                text = axes.text(slot.start + slot.length / 2, stage, str(cell[1]), color=INK[slot.work], fontsize=size)
                text.set(ha="center", va="center_baseline")
    axes.set_yticks(range(table.num_stages), [f"stage {stage}" for stage in range(table.num_stages)])
    axes.set_ylim(table.num_stages - 0.5, -0.5)
    axes.set_xlim(0, report.time)
    axes.set_xlabel(f"time ({costs_line(table, forward_cost, backward_cost)})", fontsize=9)
    axes.tick_params(length=0, labelsize=9)
    axes.spines[:].set_visible(False)
    live = f", at most {live_line(table, report)} live on a stage" if table.backward_slots else ""
    figure.suptitle(f"{headline(table)}\nbubble {report.bubble_fraction:.1%}{live}", fontsize=11)
    patches = []
    for chunk, (work, name) in product(range(table.num_chunks), _works(table).items()):
        label = f"{name} of chunk {chunk}" if table.num_chunks > 1 else name
        patches.append(Patch(color=_colour(chunk, work), label=label))
    patches.append(Patch(color=BUBBLE, label="bubble"))
    columns = min(len(patches), max(int(inches / 1.6), 1))
    figure.legend(handles=patches, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    figure.savefig(path, dpi=160)
