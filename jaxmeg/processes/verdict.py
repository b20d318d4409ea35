"""Who is behind when a run stands still, and how it is said. Pure functions of what the processes have told each other.

All processes go through the same places in the same order (rows, step, evaluation, save, ...), so the one that has entered the
fewest is the one the others wait for. Must not know jax, threads or the store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

DOES = {
    "data": "reads the rows of step {}",
    "step": "runs step {}",
    "evaluate": "evaluates after step {}",
    "save": "saves step {}",
    "start": "prepares the run or compiles it",
    "end": "ends the run after step {}",
}
SLOW = {"start": float("inf"), "save": 3600.0, "end": 3600.0}
"""Seconds that these phases may take, if a step may not take longer: compiling and reading a checkpoint take what they take, and a save
may wait for the one before."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Where a process is."""

    index: int
    host: str
    pid: int
    place: int
    """How many phases it has entered."""
    phase: str
    step: int
    """The step that the phase is about."""
    seconds: float
    """In this phase, without the time in which any process compiled."""
    stage: str
    """Of its main thread: "compiling", "in jax" (where it waits for devices) or "in Python"."""
    count: int = 0
    """Beats so far: a process whose count grows is alive."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def who(self) -> str:
        return f"process {self.index} ({self.host}, pid {self.pid})"

    @property
    def does(self) -> str:
        return DOES[self.phase].format(self.step)


def beat_of(text: str) -> Beat:
    return Beat(**json.loads(text))


def behind(beats: Sequence[Beat]) -> list[Beat]:
    """The processes that the others wait for; empty where all are at the same place.

    At the same place it is those that are in Python code of their own while others wait inside jax.
    """
    lowest = min(beat.place for beat in beats)
    for late in ([beat for beat in beats if beat.place == lowest], [beat for beat in beats if beat.stage == "in Python"]):
        if 0 < len(late) < len(beats):
            return late
    return []


def is_overdue(mine: Beat, others: Sequence[Beat], limit: float) -> bool:
    """Whether this process has stood at one place for longer than `limit` seconds (0: no limit), while nobody compiled."""
    compiling = any(beat.stage == "compiling" for beat in (mine, *others))
    return limit > 0 and mine.seconds > max(limit, SLOW.get(mine.phase, 0.0)) and not compiling


def stuck(mine: Beat, others: Sequence[Beat], limit: float) -> tuple[str, list[int]]:
    """The line for a run that stands still, and the processes whose stacks tell why."""
    rule = f"guard.step_seconds={limit:g}"
    if not others:
        return f"stuck: this process {mine.does} for {mine.seconds:.0f} s ({rule})", [mine.index]
    beats = sorted((mine, *others), key=lambda beat: beat.index)
    late = behind(beats)
    if not late:
        hint = ": a collective or a device hangs" if mine.phase != "data" else ""
        where = f"every one {mine.does} for {mine.seconds:.0f} s"
        return f"stuck: none of the {len(beats)} processes is behind, {where} ({rule}){hint}", [beat.index for beat in beats]
    ahead = max((beat for beat in beats if beat not in late), key=lambda beat: beat.place)
    more = f" (and {len(late) - 1} more)" if len(late) > 1 else ""
    return (f"stuck: {late[0].who} is behind{more}: it {late[0].does} for {late[0].seconds:.0f} s, while process {ahead.index} "
            f"{ahead.does} ({rule})"), [beat.index for beat in late]


def silent(beat: Beat, seconds: float, limit: float) -> str:
    return (f"{beat.who} is gone: no sign of life for {seconds:.0f} s (guard.silent_seconds={limit:g}); when last heard it {beat.does}: "
            "see its own output, and its host")


def no_store(error: str, last: Mapping[int, Beat]) -> str:
    """The line where jax's coordination gives no answer: it has found a process dead, or its own process is."""
    dead = re.search(r"stopped sending heartbeats\):\s*([\d, /a-z:_]+)", error)
    index = int(re.findall(r"\d+", dead[1])[-1]) if dead and re.search(r"\d", dead[1]) else 0
    beat = last.get(index)
    who = (beat.who if beat else f"process {index}") + (", the coordinator," if index == 0 else "")
    return f"{who} is gone{f'; when last heard it {beat.does}' if beat else ''}: see its own output, and its host"


def silent_store(beat: Beat | None, seconds: float, limit: float) -> str:
    """The line where process 0, which is at `beat` when last heard, holds the store and does not answer."""
    who, at = (beat.who, f"; when last heard it {beat.does}") if beat else ("process 0", "")
    return (f"{who}, the coordinator, does not answer for {seconds:.0f} s (guard.silent_seconds={limit:g}){at}: see its own output, and "
            "its host")


def ended(beat: Beat, reason: str) -> str:
    how = f"with an error: {reason}" if reason else "its run while others go on"
    return f"{beat.who} has ended {how} (when last heard it {beat.does})"


def resume_line(step: int | None, folder: str | None) -> str:
    """What is safe, and how to go on."""
    if folder is None or step is None:
        return "no checkpoint of this run is complete"
    return f"the checkpoint of step {step} is complete: go on with --resume {folder}"


def stacks(texts: Mapping[str, str], indices: Sequence[int]) -> str:
    """The stacks of the processes `indices`, as far as they have come."""
    return "".join(f"process {index}, innermost call last:\n{texts[str(index)]}" for index in indices if str(index) in texts)
