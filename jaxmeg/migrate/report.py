"""What a migration looks like: the config as YAML, and the table, reasons and sums for the terminal.

Must not know any source format.
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from jaxmeg.keys import KEYS, SECTIONS
from jaxmeg.migrate.core import Migration, shown

HEADING = "# Migrated from "
COLUMNS = ("value", "jaxmeg", "value", "note")
WIDEST = 44


def to_yaml(out: Migration, source: str, made_with: str, target: str) -> str:
    """Header and the values that differ from our defaults, by section, in the order of the config.

    source: what was read. made_with: the command that did. target: the file this will be.
    """
    changed = {key: out.values[key] for key in KEYS if key in out.values and out.values[key] != KEYS[key].default}
    tree: dict[str, Any] = {name: {} for name in SECTIONS}
    for key, value in changed.items():
        section, _, leaf = key.rpartition(".")
        if section:
            tree[section][leaf] = value
        else:
            tree[leaf] = value
    body = yaml.safe_dump({name: value for name, value in tree.items() if value != {}}, sort_keys=False, width=120) if changed else ""
    lines = [f"{HEADING}{source} ({out.source}): {made_with}", f"# Command:  {train_command(target)}", f"# Devices:  {out.devices}"]
    lines += [f"# Batch:    {line}" for line in out.batch]
    return "\n".join(lines) + "\n" + body


def train_command(target: str) -> str:
    return f"python scripts/train.py --config {shlex.quote(target)}"


def to_lines(out: Migration, source: str) -> list[str]:
    """The report: table, keys without counterpart, what the source leaves open, batch arithmetic."""
    lines = [f"{source}: {out.source}, for {out.devices} {'device' if out.devices == 1 else 'devices'}", ""]
    cells = [(row.source, row.value, row.key, shown(row.ours), row.note) for row in out.rows]
    lines += _table([(out.source, *COLUMNS), *cells])
    if out.lacks:
        lines += ["", "no counterpart:"]
        lines += [f"  {line}" for line in warnings(out)]
        harmless: dict[str, list[str]] = {}
        for lack in out.lacks:
            if lack.reason.harmless:
                harmless.setdefault(lack.reason.text, []).append(f"{lack.source} {_short(lack.value)}")
        lines += [f"  {', '.join(keys)}: {reason}" for reason, keys in harmless.items()]
    if out.remarks:
        lines += ["", "from our defaults:", *(f"  {remark}" for remark in out.remarks)]
    if out.batch:
        lines += ["", *out.batch]
    return lines


def warnings(out: Migration) -> list[str]:
    """What was asked for and does not happen, one line a key."""
    return [f"{lack.source} {_short(lack.value)}: {lack.reason.text}" for lack in out.lacks if not lack.reason.harmless]


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    cells = [tuple(_short(cell) for cell in row[:-1]) + row[-1:] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]) - 1)]
    return ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[-1]]).rstrip() for row in cells]


def _short(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
