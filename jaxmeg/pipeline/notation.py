"""Pipeline schedules as text: rows of ticks, or one list of operations a rank, read with everything that is wrong with them.

Knows names and numbers, not time: whether an order can run, and when, is decided in `packing`. A problem is one line that
names the line of the file, the stage and the operation. The format is described in docs/schedules.md.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jaxmeg.wording import shown

_OP = re.compile(r"([FB])([0-9]{1,9})(?:\.([0-9]{1,9}))?")
_RANK = re.compile(r"rank\s*([0-9]{1,9})\s*[:,](.*)", re.IGNORECASE)
_HEADER = re.compile(r"stage\s*([0-9]{1,9})", re.IGNORECASE)
_SHOWN = 10  # problems of one file


class Op(NamedTuple):
    """F or B of one microbatch on one virtual stage."""

    kind: str
    v: int
    m: int


class Entry(NamedTuple):
    """An operation where it stands: line of the file, and tick from 1 (rows without any work are not counted; 0 in a list)."""

    op: Op
    line: int
    tick: int


@dataclass(frozen=True, kw_only=True)
class UserSchedule:
    """What a file says: every stage's operations in order."""

    name: str
    num_stages: int
    num_chunks: int
    num_microbatches: int
    entries: tuple[tuple[Entry, ...], ...]  # [stage]
    has_ticks: bool  # rows of ticks, not lists

    @property
    def orders(self) -> tuple[tuple[Op, ...], ...]:
        return tuple(tuple(entry.op for entry in stage) for stage in self.entries)

    def show(self, op: Op) -> str:
        return show_op(op.kind, op.m, op.v // self.num_stages, self.num_chunks)


class ScheduleFileError(ValueError):
    """A schedule of a user that cannot be run. `problems`: one line each."""

    def __init__(self, problems: list[str]) -> None:
        more = len(problems) - _SHOWN
        self.problems = problems[:_SHOWN] + ([f"and {more} more problems"] if more > 0 else [])
        super().__init__("\n".join(self.problems))


class _Word(NamedTuple):
    """An operation as it is written; its chunk may be left out."""

    kind: str
    microbatch: int
    chunk: int | None
    line: int
    tick: int


def show_op(kind: str, microbatch: int, chunk: int, num_chunks: int) -> str:
    return f"{kind}{microbatch}.{chunk}" if num_chunks > 1 else f"{kind}{microbatch}"


def parse(text: str, name: str) -> UserSchedule:
    """Read a file's text. Lines that start with # and empty lines are left out.

    Raises:
        ScheduleFileError: an unknown operation, a microbatch or chunk out of range, an operation that is there twice or
            not at all, a forward after its backward, rows of unequal length, ranks that are missing.
    """
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, line) for number, line in lines if line and not line.startswith("#")]
    if not lines:
        raise ScheduleFileError(["holds no operation: write one row a tick and one cell a stage, for example F1,B0"])
    has_ticks = not _RANK.fullmatch(lines[0][1])
    problems: list[str] = []
    words = (_read_ticks if has_ticks else _read_lists)(lines, problems)
    if not problems and not any(words):
        problems.append("holds no operation: write F<microbatch>.<chunk> and B<microbatch>.<chunk>")
    if problems:
        raise ScheduleFileError(problems)
    num_chunks, num_microbatches = _sizes(words)
    ends = [stage[-1].line if stage and not has_ticks else lines[-1][0] for stage in words]
    entries = tuple(
        tuple(_check_stage(stage, words[stage], len(words), num_chunks, num_microbatches, ends[stage], problems))
        for stage in range(len(words))
    )
    if problems:
        raise ScheduleFileError(problems)
    return UserSchedule(name=name, num_stages=len(words), num_chunks=num_chunks, num_microbatches=num_microbatches,
                        entries=entries, has_ticks=has_ticks)


# ---------------------------------------------------------------- the two forms
def _read_ticks(lines: list[tuple[int, str]], problems: list[str]) -> list[list[_Word]]:
    """[stage]: words in order; within a cell the forward comes first, as in a tick."""
    rows = [(number, [cell.strip(' \t"') for cell in line.split(",")]) for number, line in lines]
    header = [_HEADER.fullmatch(cell) for cell in rows[0][1]]
    if all(header):
        number, names = rows.pop(0)
        if [int(match[1]) for match in header if match] != list(range(len(names))):
            problems.append(f"line {number}: the header {','.join(names)} is out of order: columns are stage 0, stage 1, ...")
    words: list[list[_Word]] = [[] for _ in header]
    tick = 0
    for number, cells in rows:
        if len(cells) != len(words):
            cells_of = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
            problems.append(f"line {number}: {cells_of} after rows of {len(words)}: write one cell a stage, also if it is empty")
            continue
        tick += any(cells)
        for stage, cell in enumerate(cells):
            found = list(_read_words(cell.split(), stage, number, tick, problems))
            for kind, work in (("F", "forward"), ("B", "backward")):
                if len(same := [word for word in found if word.kind == kind]) > 1:
                    names = " and ".join(show_op(kind, w.microbatch, w.chunk or 0, 1 if w.chunk is None else 2) for w in same[:3])
                    problems.append(f"line {number}, stage {stage}: {names} in one cell: a tick has one {work} of a stage at most")
            words[stage] += sorted(found, key=lambda word: word.kind, reverse=True)
    return words


def _read_lists(lines: list[tuple[int, str]], problems: list[str]) -> list[list[_Word]]:
    """[stage]: words in order."""
    words: dict[int, list[_Word]] = {}
    for number, line in lines:
        match = _RANK.fullmatch(line)
        if not match:
            problems.append(f"line {number}: does not start with a rank: write for example rank {len(words)}: F0 F1 B0 B1")
        elif (rank := int(match[1])) in words:
            problems.append(f"line {number}, stage {rank}: rank {rank} is listed twice: write all its operations in one line")
        else:
            words[rank] = list(_read_words(match[2].replace(",", " ").split(), rank, number, 0, problems))
    missing = next(rank for rank in range(len(words) + 1) if rank not in words)
    if missing < len(words):
        problems.append(f"rank {missing} has no line, but rank {max(words)} has: number ranks 0, 1, ...")
    return [words.get(rank, []) for rank in range(len(words))]


def _read_words(texts: list[str], stage: int, line: int, tick: int, problems: list[str]) -> Iterator[_Word]:
    for text in texts:
        if match := _OP.fullmatch(text):
            yield _Word(match[1], int(match[2]), None if match[3] is None else int(match[3]), line, tick)
        else:
            problems.append(f"line {line}, stage {stage}: {shown(text)} is no operation: write F<microbatch>.<chunk> or "
                            "B<microbatch>.<chunk>, such as F2.0; B is the whole backward")


# ---------------------------------------------------------------- what the words say
def _sizes(words: list[list[_Word]]) -> tuple[int, int]:
    """(chunks a stage, microbatches): what most stages have in forwards and in backwards, so that one slip is named as such."""
    groups = [[word for word in stage if word.kind == kind] for stage in words for kind in "FB"]

    def most(numbers: list[int]) -> int:
        return max(Counter(numbers).items(), key=lambda item: (item[1], item[0]))[0]

    named = most([max((word.chunk or 0 for word in group), default=0) + 1 for group in groups])
    num_chunks = min(named, max(map(len, groups)))  # no stage does fewer forwards than it has chunks
    return num_chunks, max(-(-most([len(group) for group in groups]) // num_chunks), 1)


def _check_stage(stage: int, words: list[_Word], num_stages: int, num_chunks: int, num_microbatches: int, end: int,
                 problems: list[str]) -> Iterator[Entry]:
    """The entries of one stage; `end`: the line that a missing operation should have come before."""
    seen: dict[Op, int] = {}
    for kind, m, chunk, line, tick in words:
        at = f"line {line}, stage {stage}"
        written = f"{kind}{m}" if chunk is None else f"{kind}{m}.{chunk}"
        if chunk is None and num_chunks > 1:
            problems.append(f"{at}: {written} names no chunk of {num_chunks}: write {written}.0 to {written}.{num_chunks - 1}")
            continue
        op = Op(kind, (chunk or 0) * num_stages + stage, m)
        if m >= num_microbatches:
            problems.append(f"{at}: {written} is out of range: the microbatches of most stages are 0 to {num_microbatches - 1}")
        elif (chunk or 0) >= num_chunks:
            problems.append(f"{at}: {written} is out of range: the chunks of most stages are 0 to {num_chunks - 1}")
        elif op in seen:
            problems.append(f"{at}: {written} a second time, after line {seen[op]}: leave one out")
        elif kind == "F" and (backward := seen.get(op._replace(kind="B"))):
            problems.append(f"{at}: {written} after its backward in line {backward}: a forward comes first")
        seen.setdefault(op, line)
        yield Entry(op, line, tick)
    for kind, m, chunk in ((k, m, c) for k in "FB" for m in range(num_microbatches) for c in range(num_chunks)):
        if Op(kind, chunk * num_stages + stage, m) not in seen:
            problems.append(f"line {end}, stage {stage}: the stage ends without {show_op(kind, m, chunk, num_chunks)}: add it")
