"""The updates that `record.profile` names: "10:13" is updates 10, 11 and 12, counted from 1 as they are printed.

Shared by the rules, which must not know jax, and by the profiler.
"""

from __future__ import annotations

import re


def window(text: str) -> range | None:
    """The updates of "first:end", end left out; None if the text has another form."""
    found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text)
    return range(int(found[1]), int(found[2])) if found else None


def window_problem(text: str, steps: int, stop_after: int | None = None) -> str | None:
    """What is wrong with `record.profile` in a run of `steps` updates that stops after `stop_after`, in one line, or None."""
    updates = window(text)
    if updates is None:
        return f'record.profile={text} is not a range of updates: use first:end, for example "10:13" for 10, 11 and 12'
    if updates.start < 1:
        return f"record.profile={text} starts before the first update: use 1:{max(updates.stop, 2)}"
    if not updates:
        return f"record.profile={text} holds no update, its end is left out: use {updates.start}:{updates.start + 1} or a later end"
    if updates.stop > steps + 1:
        near = f"{updates.start}:{steps + 1}, or " if updates.start <= steps else ""
        return f"record.profile={text} goes beyond train.steps={steps}: use {near}more steps"
    if stop_after is not None and updates.stop > stop_after + 1:
        return f"record.profile={text} goes beyond train.stop_after={stop_after}: profile earlier updates, or stop later"
    return None
