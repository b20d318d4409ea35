"""Schedules that users bring: read from a file, proved to be runnable, packed into ticks, and what that costs.

A file (docs/schedules.md) says only which F and B a stage does, in which order; ticks, vocabulary work and slots follow. Rows
of ticks run as they are written where they can and nothing cheaper keeps their order; all else is packed anew.
Knows nothing of arrays or configs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

from jaxmeg.files import read_text
from jaxmeg.pipeline.notation import Op, ScheduleFileError, UserSchedule, parse, show_op
from jaxmeg.pipeline.packing import deadlock, earliest_ticks, last_virtual_stage, needs
from jaxmeg.pipeline.schedules import Table, expected_bubble, fill_table, segments, simulate
from jaxmeg.pipeline.ticks import add_vocabulary

ENDINGS = (".csv", ".txt")
MOST_BYTES = 200_000
"""Of a file, which packing reads again and again."""
MOST_LOOPS = 100
"""Loops of equal ticks in a compiled program; each takes a large model about a second to compile. Named schedules have 5 to 20."""
FORWARD, BACKWARD = 1, 2  # time of one microbatch on one stage, in every figure here


def is_schedule_file(value: object) -> bool:
    """Whether a value of pipeline.schedule is the path of a file and not a name."""
    return isinstance(value, str) and value.lower().endswith(ENDINGS)


def read_schedule(path: str | Path) -> UserSchedule:
    """Read a schedule and check that every stage gets through its operations.

    Raises:
        ScheduleFileError: the file cannot be read, or what `notation.parse` lists, or operations that wait for each other.
    """
    try:
        text = read_text(path, MOST_BYTES)
    except OSError as error:
        raise ScheduleFileError([f"cannot be read ({error.strerror}): give an existing file"]) from None
    except UnicodeDecodeError:
        raise ScheduleFileError(["is not text in UTF-8: export it as CSV in UTF-8"]) from None
    return _checked(text, Path(path).name)


@lru_cache(maxsize=8)
def _checked(text: str, name: str) -> UserSchedule:
    schedule = parse(text, name)
    if waits := deadlock(schedule.orders):
        lines = {entry.op: entry.line for stage in schedule.entries for entry in stage}

        def place(op: Op) -> str:
            return f"stage {op.v % schedule.num_stages}'s {schedule.show(op)} (line {lines[op]})"

        at = waits[0].op
        behind = [*waits[1:], waits[0]]
        chain = ", and ".join(f"{place(wait.op)} waits for {place(wait.needed)} behind {place(next_one.op)}"
                              for wait, next_one in zip(waits, behind))
        raise ScheduleFileError([f"line {lines[at]}, stage {at.v % schedule.num_stages}: {schedule.show(at)} can never run: {chain}"])
    return schedule


def schedule_problems(path: str | Path) -> list[str]:
    """Why a file can't be run on any mesh, one line each; empty if it can."""
    try:
        user_table(read_schedule(path))
    except ScheduleFileError as error:
        return error.problems
    return []


def write_schedule(table: Table, path: Path) -> None:
    """Write a training table as rows of ticks, such as a user's file has. Raises OSError."""
    rows = [",".join(f"stage {stage}" for stage in range(table.num_stages))]
    for tick, kind in enumerate(table.kinds):
        at = {column: table.rows[column][tick] for column in table.rows}
        cells = [
            " ".join(show_op(k, at[f"{k.lower()}_mb"][stage], at[f"{k.lower()}_chunk"][stage], table.num_chunks)
                     for k in "FB" if k in kind and at[f"{k.lower()}_ok"][stage])
            for stage in range(table.num_stages)
        ]
        rows += [",".join(cells)] if any(cells) else []
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")


# ---------------------------------------------------------------- ticks and costs
@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a user's schedule costs. Times: forward 1 and backward 2 of one microbatch on one stage, all stages in lockstep."""

    packing: str
    """What was done with the file, in words."""
    ticks: int
    """Ticks with forwards or backwards."""
    time: Fraction
    named: str
    """The named schedule to compare with: 1f1b, or interleaved with more than one chunk."""
    named_time: Fraction
    bubble: Fraction
    """Part of the time in which a stage does no real work."""
    peak_live: int
    """Most (chunk, microbatch) pairs whose residuals a stage holds."""
    ring_slots: int
    inbox_slots: tuple[int, int]
    """Of activations, and of their gradients."""
    loops: int
    """Loops in the compiled program; its size does not grow with anything else."""

    def lines(self) -> dict[str, str]:
        """The figures in words, by label."""
        named = f"{float(self.time / self.named_time):.2f} times that of {self.named}"
        pairs = f"at most {self.peak_live} live (chunk, microbatch) pairs a stage"
        return {
            "packing": self.packing,
            "time": f"{_show(self.time)} (a stage's forward of a microbatch 1, its backward 2), {named}; bubble {float(self.bubble):.1%}",
            "memory": f"{pairs}, ring {self.ring_slots} slots, inboxes {self.inbox_slots[0]} and {self.inbox_slots[1]}",
            "program": f"{self.ticks} ticks in {self.loops} loops",
        }


Ticks = Mapping[Op, int]


@lru_cache(maxsize=8)
def user_table(schedule: UserSchedule) -> tuple[Table, Cost]:
    """The table of a schedule that `read_schedule` returned, replayed, and what it costs.

    Raises:
        ScheduleFileError: ticks that follow each other are unequal so often that the program would have too many loops.
    """
    P, V, M = schedule.num_stages, schedule.num_chunks, schedule.num_microbatches
    ticks, packing = _choose_ticks(schedule)
    table = _fill(schedule, ticks)
    if (loops := _num_loops(table)) > MOST_LOOPS:
        table = _fill(schedule, ticks, unbroken=True)
        if (fewer := _num_loops(table)) > MOST_LOOPS:
            raise ScheduleFileError([f"the ticks are so irregular that the program has {fewer} loops: repeat a pattern of up to 8 runs of "
                                     f"equal ticks, or use fewer microbatches; at most {MOST_LOOPS} loops are compiled"])
        packing += f"; {loops} loops became {fewer} by running F and B in every tick from their first to their last, idle where need be"
    report, named = simulate(table, FORWARD, BACKWARD), "1f1b" if V == 1 else "interleaved"
    time, work = Fraction(round(report.time * V), V), M * (FORWARD + BACKWARD)
    cost = Cost(
        packing=packing, ticks=sum("F" in kind or "B" in kind for kind in table.kinds), time=time, named=named,
        named_time=work + Fraction(round(expected_bubble(named, P, V, M, FORWARD, BACKWARD) * V), V), bubble=1 - work / time,
        peak_live=report.peak_live, ring_slots=table.ring_slots, inbox_slots=(table.forward_slots, table.backward_slots),
        loops=_num_loops(table))
    return table, cost


def _choose_ticks(schedule: UserSchedule) -> tuple[Ticks, str]:
    """Ticks of every operation, from 1, and what was done, in words.

    Rows in which some cell holds F and B are written for ticks: every stage keeps their order, and so its number of live pairs.
    Lists, and rows of single operations, are written for a stage that runs F or B at a time: there forwards may overtake
    backwards, because a tick without one of both costs the same.
    """
    in_order = earliest_ticks(schedule.orders)
    written = {entry.op: entry.tick for stage in schedule.entries for entry in stage}
    for_ticks = schedule.has_ticks and any(len({entry.tick for entry in stage}) < len(stage) for stage in schedule.entries)
    ahead = 0 if for_ticks else _ahead(schedule)
    packed = earliest_ticks(schedule.orders, ahead)
    done = f"re-packed into {max(packed.values())} ticks, every stage in the order of the file"
    if ahead:
        pairs, before = (_fill(schedule, ticks) for ticks in (packed, in_order))
        done += (f", but forwards before at most {ahead} of the backwards listed before them: time {_show(_time(schedule, packed))} "
                 f"instead of {_show(_time(schedule, in_order))}, live pairs {simulate(pairs).peak_live} instead of "
                 f"{simulate(before).peak_live}")
    if not schedule.has_ticks:
        return packed, f"lists {done}"
    rows = f"{max(written.values())} rows"
    if missing := _missing_input(schedule, written):
        return packed, f"{rows} {done}; they can't run as they are written: {missing}"
    if _time(schedule, written) <= _time(schedule, packed):
        return written, f"{rows} run as they are written"
    return packed, f"{rows} that take {_show(_time(schedule, written))} as they are written, {done}"


def _ahead(schedule: UserSchedule) -> int:
    """The fewest backwards that forwards overtake for the shortest time. More of them never makes an operation later."""
    most = schedule.num_stages * (schedule.num_chunks + 1) - 1  # the live pairs of 1f1b and interleaved: a full pipeline
    shortest = _time(schedule, earliest_ticks(schedule.orders, most))

    def suffices(ahead: int) -> bool:
        return _time(schedule, earliest_ticks(schedule.orders, ahead)) <= shortest

    return 0 if suffices(0) else bisect_left(range(most), True, key=suffices)


def _time(schedule: UserSchedule, ticks: Ticks) -> Fraction:
    """A tick takes the time of what any stage does in it."""
    forwards, backwards = ({tick for op, tick in ticks.items() if op.kind == kind} for kind in "FB")
    return Fraction(FORWARD * len(forwards) + BACKWARD * len(backwards), schedule.num_chunks)


def _missing_input(schedule: UserSchedule, written: Ticks) -> str:
    """The first operation whose input isn't there in the tick it is written in, in words; or an empty text."""
    last = last_virtual_stage(schedule.orders)
    for entry in sorted((entry for stage in schedule.entries for entry in stage), key=lambda entry: entry.line):
        need = needs(entry.op, last)
        if need and written[need[0]] + need[1] > entry.tick:
            at = f"line {entry.line}, stage {entry.op.v % schedule.num_stages}"
            needed = f"stage {need[0].v % schedule.num_stages}'s {schedule.show(need[0])}"
            return f"{at}: {schedule.show(entry.op)} needs {needed} in an earlier row"
    return ""


def _fill(schedule: UserSchedule, ticks: Ticks, unbroken: bool = False) -> Table:
    forward, backward = ({(op.v, op.m): tick for op, tick in ticks.items() if op.kind == kind} for kind in "FB")
    plan = add_vocabulary(forward, backward, unbroken=unbroken)
    return fill_table(schedule.name, plan, schedule.num_stages, schedule.num_chunks, schedule.num_microbatches)


def _num_loops(table: Table) -> int:
    return sum(len(segment.runs) for segment in segments(table.kinds))


def _show(time: Fraction) -> str:
    return f"{float(time):g}"
