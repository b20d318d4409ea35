"""What a check answers: one line, a status, details for who asks, and the fix. Needs nothing but Python.

A check is a function that returns a `Finding`. It may fail itself: `attempt` turns that into a finding as well, so that no
check keeps the ones after it from being made.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Status = Literal["ok", "warn", "FAIL", "skipped"]
ERROR = re.compile(r"error|exception|fatal|check failed|abort|signal|denied|killed", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The answer of one check."""

    name: str
    status: Status
    line: str
    """What was found, in one line."""
    details: tuple[str, ...] = ()
    """What --verbose adds."""
    fix: str | None = None
    """What to do, if the status is warn or FAIL."""

    def text(self, verbose: bool = False) -> str:
        """The line that a person reads and, if verbose, the details below it."""
        fix = f": {self.fix}" if self.fix else ""
        lines = [f"{self.status:<8}{self.name:<15}{self.line}{fix}"]
        return "\n".join(lines + ([f"{'':23}{detail}" for detail in self.details] if verbose else []))


class Problem(NamedTuple):
    """One thing that is not as it should be."""

    status: Status
    line: str
    fix: str


def problem_of(status: Status, line: str) -> Problem:
    """From a line of the house, "value, rule: fix"."""
    what, colon, fix = line.rpartition(": ")
    return Problem(status, what, fix) if colon else Problem(status, line, "change it")


def conclude(name: str, fine: str, problems: Iterable[Problem] = (), details: Iterable[str] = ()) -> Finding:
    """The finding of a check that may meet several problems: the worst is its line, the others are details."""
    ordered = sorted(problems, key=lambda problem: problem.status != "FAIL")
    if not ordered:
        return Finding(name=name, status="ok", line=fine, details=tuple(details))
    worst, others = ordered[0], ordered[1:]
    more = f" (and {len(others)} more: --verbose)" if others else ""
    listed = [f"{problem.status}: {problem.line}: {problem.fix}" for problem in others]
    return Finding(name=name, status=worst.status, line=worst.line, fix=worst.fix + more, details=(*listed, fine, *details))


def attempt(name: str, check: Callable[[], Finding], explain: Callable[[str], str | None] = lambda _: None) -> Finding:
    """The check's finding; if it raises, a FAIL with the error in one line. explain: the fix for an error's text, or None."""
    try:
        return check()
    except Exception as error:
        fix = explain(str(error)) or "this check could not be made; --verbose shows where it ended"
        return Finding(name=name, status="FAIL", line=one_line(error), fix=fix, details=tuple(traceback.format_exc().splitlines()))


def one_line(error: BaseException) -> str:
    """An exception as one line: its type and the first line of what it says."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def last_error_line(text: str) -> str | None:
    """Of what a process wrote before it ended: the last line at the margin that speaks of an error, else the last line."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if not line.startswith((" ", "\t", "Traceback")) and ERROR.search(line)]
    return (errors or lines or [None])[-1]
