"""What became of the documents: read, kept, dropped and why, tokens, rows. Shown before the first update and kept with the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jaxmeg.wording import printable

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """One source; read = kept + the sum of dropped. Rows, trained tokens and padding are those of an epoch."""

    name: str
    read: int
    """Documents."""
    kept: int
    """Documents that are packed, whole or truncated."""
    dropped: dict[str, int]
    """Reason -> documents."""
    truncated: int
    """Documents of which only the first tokens are kept."""
    tokens: int
    """Tokens of the documents kept."""
    trained_tokens: int
    """Targets."""
    rows: int
    most_documents: int
    """Of a row."""
    rows_left_out: int
    """Rows beyond data.max_rows."""
    padding: float
    """Share of the positions of all rows that hold no token."""
    weight: float
    """Share of this source in the rows of the stream."""
    steps_per_epoch: float
    """Updates in which the source is read once."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """All sources of the training or the validation rows."""

    split: str
    """training or validation"""
    sources: tuple[SourceReport, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for the record of a run."""
        return asdict(self)


# Line -> text of one source.
_LINES: dict[str, Callable[[SourceReport], str]] = {
    "documents read": lambda s: f"{s.read:,}",
    "kept": lambda s: f"{s.kept:,}",
    "truncated": lambda s: f"{s.truncated:,}",
    "tokens kept": lambda s: f"{s.tokens:,}",
    "tokens trained": lambda s: f"{s.trained_tokens:,}",
    "rows": lambda s: f"{s.rows:,}",
    "most documents in a row": lambda s: f"{s.most_documents:,}",
    "beyond data.max_rows": lambda s: f"{s.rows_left_out:,}",
    "padding": lambda s: f"{s.padding:.1%}",
    "share of the rows": lambda s: f"{s.weight:.4g}",
    "steps an epoch": lambda s: f"{s.steps_per_epoch:,.1f}",
}
# A line that says this of every source is left out.
_PLAIN = {"truncated": "0", "most documents in a row": "1", "beyond data.max_rows": "0", "share of the rows": "1"}


def table_lines(*reports: Report) -> list[list[str]]:
    """The reports as text: a list per line, its name first, then a cell for each source."""
    sources = [source for report in reports for source in report.sources]
    lines = [[name, *map(text, sources)] for name, text in _LINES.items()]
    reasons = dict.fromkeys(reason for source in sources for reason in source.dropped)
    lines[2:2] = [[f"dropped: {reason}", *(f"{source.dropped.get(reason, 0):,}" for source in sources)] for reason in reasons]
    return [line for line in lines if set(line[1:]) != {_PLAIN.get(line[0])}]


def print_reports(console: Console, *reports: Report) -> None:
    """A table with a column for each source."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("data")
    for report in reports:
        for source in report.sources:
            table.add_column(Text(f"{report.split}: {printable(source.name)}"), justify="right", overflow="fold")
    for line in table_lines(*reports):
        table.add_row(*map(Text, line))
    before = console.width
    console.width = before if console.is_terminal else 1000  # a file has no margin to wrap at
    console.print(table)
    console.width = before
