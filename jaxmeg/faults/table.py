"""Faults and what became of them: one trial is an `Outcome`, all trials of a fault a `Row`. Knows nothing of any one fault."""

from __future__ import annotations

import platform
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from jaxmeg.faults.start import ROOT, SECONDS, Bench, Early, Ended, Place, Records

_MACHINE = ((r"localhost:\d+|127\.0\.0\.1:\d+", "HOST:PORT"), (r"\bpid \d+", "pid N"), (r"\bport \d+", "port N"), (r'"/[^"]*/', '"'),
            (rf"\b{re.escape(platform.node())}\b", "HOST"), (r"0x[0-9a-f]+", "0x..."))
LONGEST = 230  # characters of a line in the table


class NotTried(Exception):
    """This machine can't do it; the reason."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One trial."""

    said: str
    """The line that the user read, shortened."""
    codes: tuple[int | None, ...]
    """Exit codes, of each process; None is one that hung."""
    lost: int | None = None
    """Updates after the last complete checkpoint."""
    same: bool | None = None
    """Whether losses and gradient norms of the run that went on are those of the run that nothing happened to, every digit."""
    wrong: str = ""
    """What should not be."""
    note: str = ""
    """What the page adds."""


class Fault(NamedTuple):
    """Something that happens to a run."""

    name: str
    words: str
    times: int
    """How often it is tried; one that is random can be tried more often."""
    trial: Callable[[Bench, int, random.Random], Iterable[Outcome]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """All trials of a fault; plain values, as in the JSON file."""

    name: str
    words: str
    tried: int
    said: list[str]
    codes: list[list[int | None]]
    lost: list[int]
    same: list[int]
    """[trials that went on like the run that nothing happened to, trials that were compared]."""
    wrong: list[str]
    note: list[str]
    not_tried: str = ""
    commit: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def outcome(place: Place, ended: Ended | Sequence[Ended], *, code: int | Sequence[int] | None = None, said: str | None = None,
            lost: int | None = None, same: bool | None = None, wrong: str = "", note: str = "") -> Outcome:
    """said: instead of the last line that a process printed. Wrong are: what `wrong` says, a hang, a traceback, an exit code that is
    not one of `code`, other losses."""
    all_ended = [ended] if isinstance(ended, Ended) else list(ended)
    first = next((one for one in all_ended if one.line), all_ended[0])
    wanted = [code] if isinstance(code, int) else code
    found = [wrong] if wrong else []
    found += [f"hangs: still there after {SECONDS:.0f} s"] if any(one.code is None for one in all_ended) else []
    found += [f"the user sees a traceback that ends in: {_last(one.err)}" for one in all_ended if one.has_traceback][:1]
    found += [f"exit code {one.code}" for one in all_ended if wanted and one.code is not None and one.code not in wanted][:1]
    found += ["other losses after the run went on"] if same is False and not wrong else []
    return Outcome(said=shorten(first.line, place) if said is None else said, codes=tuple(one.code for one in all_ended), lost=lost,
                   same=same, wrong="; ".join(found), note=note)


def went_on(place: Place, ended: Ended, straight: Records) -> tuple[bool, str]:
    """(whether a run that went on ended like the run in one go, what is wrong where it did not)."""
    if ended.code != 0:
        return False, f"the run does not go on: {shorten(ended.line, place)}"
    return place.records == straight, ""


def shorten(line: str, place: Place) -> str:
    """Without what is only so on this machine."""
    for path, word in ((str(place.run), "RUN"), ("runs/demo", "RUN"), (str(place.folder), "FOLDER"), (str(ROOT), "")):
        line = line.replace(path, word)
    for pattern, word in _MACHINE:
        line = re.sub(pattern, word, line)
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 4]} ..."


def try_fault(fault: Fault, bench: Bench, times: int | None, seed: int, commit: str = "") -> Row:
    """All trials of one fault; what can't be tried says why."""
    found: list[Outcome] = []
    reason = early = ""
    try:
        for one in fault.trial(bench, times or fault.times, random.Random(f"{seed} {fault.name}")):
            found.append(one)
    except NotTried as error:
        reason = str(error)
    except Early as error:
        early = str(error)
    compared = [one.same for one in found if one.same is not None]
    return Row(name=fault.name, words=fault.words, tried=len(found), said=_distinct(one.said for one in found),
               codes=_distinct(list(one.codes) for one in found), lost=[one.lost for one in found if one.lost is not None],
               same=[sum(compared), len(compared)], wrong=_distinct(filter(None, [*(one.wrong for one in found), early])),
               note=_distinct(one.note for one in found if one.note), not_tried=reason, commit=commit)


def _last(err: str) -> str:
    """The line at the end of the first traceback."""
    lines = err[err.index("Traceback") :].splitlines()[1:]
    return next((line for line in lines if line and not line.startswith(" ")), "")


def _distinct(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found
