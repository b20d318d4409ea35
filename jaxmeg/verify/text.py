"""A comparison as people read it: what was compared, every check with error and bound, every leaf, PASS or FAIL; and as JSON.

The one place that words a certificate. Needs no jax.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxmeg.verify.certificate import Certificate, Check
from jaxmeg.wording import any_of

WIDTH = 140  # of tables, also on a narrower terminal
NOT_COMPARED = ("16-bit arithmetic and loss scaling, cuDNN attention (where it ran on CPUs), evaluation, sampling, saving and resuming, "
                "the order of the data, several processes")


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a call of scripts/verify.py found."""

    command: str
    devices: str
    arithmetic: str
    shrunk: list[str]
    """What was made smaller, a line each."""
    certificates: list[Certificate]
    """One, or one a layout."""
    minutes: float
    at_fault: list[str] | None = None
    """Parts without which a failing layout passes; None where it was not looked for."""
    smallest: str = ""
    """Command line of the smallest config that fails."""

    @property
    def passed(self) -> bool:
        return all(certificate.passed for certificate in self.certificates)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"passed": self.passed, "command": self.command, "devices": self.devices, "arithmetic": self.arithmetic,
                "not_compared": NOT_COMPARED, "shrunk": self.shrunk, "at_fault": self.at_fault, "smallest": self.smallest,
                "minutes": round(self.minutes, 2), "certificates": [certificate.as_dict() for certificate in self.certificates]}


def write(report: Report, out: Path) -> list[Path]:
    """Write OUT.txt and OUT.json, over what was there. Raises OSError."""
    text, data = Path(f"{out}.txt"), Path(f"{out}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    with text.open("w", encoding="utf-8") as file:
        show(report, Console(file=file, highlight=False, width=WIDTH))
    data.write_text(json.dumps(report.as_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    return [text, data]


def show(report: Report, console: Console) -> None:
    head(report, console)
    if len(report.certificates) == 1:
        body(report.certificates[0], console)
    else:
        for certificate in report.certificates:
            line(certificate, console)
    foot(report, console)


def head(report: Report, console: Console) -> None:
    rows = [("verify", report.command), ("devices", report.devices), ("arithmetic", report.arithmetic), ("not compared", NOT_COMPARED)]
    rows += [("smaller" if n == 0 else "", change) for n, change in enumerate(report.shrunk or ["nothing"])]
    for label, text in rows:
        _print(console, f"{label:<14}{text}")
    console.print()


def body(certificate: Certificate, console: Console) -> None:
    """Every check and every leaf."""
    _print(console, f"{certificate.layout}, against one device of the same code")
    if certificate.crash:
        return
    console = Console(file=console.file, highlight=False, width=max(console.width, WIDTH))
    table = Table("", "error", "bound", "", "worst leaf", "", box=None, pad_edge=False, header_style="")
    for check in certificate.checks:
        table.add_row(check.name, _number(check.error), _number(check.bound), "" if check.passed else "FAIL", check.worst, check.note)
    console.print(table)
    console.print()
    by_leaf = [check for check in certificate.checks if len(check.leaves) > 1 and check.bound]
    table = Table("error / bound of every leaf", *(check.name for check in by_leaf), box=None, pad_edge=False, header_style="")
    for path in by_leaf[0].leaves if by_leaf else ():
        table.add_row(path, *(_share(check, path) for check in by_leaf))
    console.print(table)


def line(certificate: Certificate, console: Console) -> None:
    """One layout of many."""
    verdict = "PASS" if certificate.passed else "FAIL"
    gradients = next((check for check in certificate.checks if check.name == "gradients"), None)
    text = f"gradients {_number(gradients.error)} in {gradients.worst}" if certificate.passed and gradients else certificate.reason
    _print(console, f"{verdict}  {certificate.layout:<52} {text}")


def foot(report: Report, console: Console) -> None:
    """The verdict, and what is known of a failure."""
    console.print()
    failed = [certificate for certificate in report.certificates if not certificate.passed]
    if len(report.certificates) > 1:
        passed = len(report.certificates) - len(failed)
        _print(console, f"{len(report.certificates)} layouts: {passed} PASS, {len(failed)} FAIL, {report.minutes:.1f} minutes")
        return
    if not failed:
        _print(console, "PASS")
        return
    reasons = failed[0].crash or "; ".join(check.reason for check in failed[0].checks if not check.passed)
    _print(console, f"FAIL: {reasons}")
    if report.at_fault is not None:
        _print(console, f"at fault    {_blame(report.at_fault)}")
    if report.smallest:
        _print(console, f"smallest    {report.smallest}")


def _blame(parts: list[str]) -> str:
    if not parts:
        return "no part alone: the layout fails without any one of its parts"
    return f"most likely {any_of(parts)}: the layout passes without {'it' if len(parts) == 1 else 'any one of them'}"


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _number(value: float) -> str:
    return f"{value:.1e}" if value % 1 else f"{value:.0f}"


def _share(check: Check, path: str) -> str:
    return f"{check.leaves[path]:.1e}" if path in check.leaves else "-"
