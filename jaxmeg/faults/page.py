"""docs/reliability.md from what docs/reliability.json holds. Plain values only."""

from __future__ import annotations

from typing import Any

from jaxmeg.faults.table import Row

HEAD = """\
# What happens when something breaks

Each fault was done to real runs of `scripts/train.py` on emulated CPU devices: {updates} updates, a checkpoint every {every}. *Lost* are
updates after the last complete checkpoint, which the run that goes on does again. *The same* are trials after which every loss and
gradient norm, from the first update to the last, equals in every digit those of a run that nothing happened to.

Made by `{command}` at commit {commits} on {date}: {cores} cores, {system}, {versions}.

| fault | tried | what the user reads | exit code | updates lost | the same |
|---|---|---|---|---|---|
"""
SHOWN = 2  # lines of one fault, where they differ


def render(page: dict[str, Any]) -> str:
    """Markdown. page: {"head": values of `HEAD`, "rows": [Row as JSON]}."""
    rows = [Row(**row) for row in page["rows"]]
    wrong = [f"- {row.words}: {text}\n" for row in rows for text in row.wrong]
    commits = ", ".join(dict.fromkeys(row.commit for row in rows))
    head = HEAD.format(**page["head"], commits=commits)
    return head + "".join(map(_line, rows)) + ("\nNot as it should be yet:\n\n" + "".join(wrong) if wrong else "")


def _line(row: Row) -> str:
    if row.not_tried:
        return f"| {row.words} | 0 | not tried here: {row.not_tried} | | | |\n"
    said = [f"`{_cell(text)}`" for text in row.said[:SHOWN] if text] or ["nothing"]
    codes = ", ".join(" and ".join("none" if code is None else str(code) for code in codes) for codes in row.codes)
    lost = "" if not row.lost else str(row.lost[0]) if len(set(row.lost)) == 1 else f"{min(row.lost)} to {max(row.lost)}"
    same, compared = row.same
    went = "" if not compared else "yes" if same == compared == 1 else f"{same} of {compared}"
    return f"| {row.words} | {row.tried} | {'<br>'.join([*said, *map(_cell, row.note)])} | {codes} | {lost} | {went} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("`", "'")
