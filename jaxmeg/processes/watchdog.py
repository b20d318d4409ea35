"""Ends a run that stands still, on every process, with a line that says who is behind and where.

Each process has one thread that looks every few seconds: it leaves where this process is in the store of `store`, reads where the
others are, and ends the process with code STUCK where one place takes longer than guard.step_seconds, or where a process is silent for
guard.silent_seconds; of process 0, which holds the store, that is for how long the store gives no answer. Compiling, of any process,
stops the clock, and so does a stop of this process itself (SIGSTOP, Ctrl-Z, a suspended job). With one process there is no store, and the
same limit. What is said is in `verdict`.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType

import jax

from jaxmeg._compat import stage_of
from jaxmeg.config import GuardConfig
from jaxmeg.processes import verdict
from jaxmeg.processes.leave import WAIT, before_abort, in_time, leave
from jaxmeg.processes.store import Store, open_store
from jaxmeg.processes.variables import explain
from jaxmeg.processes.verdict import Beat, beat_of

STUCK = 75
"""Exit code of a run that was ended for standing still or for a process that is gone (EX_TEMPFAIL: the same may work when tried again)."""
PERIOD = 5.0  # seconds between looks, at most
PATIENCE = 10.0  # seconds for stacks to arrive
GAP = 3  # periods between two looks that only a process that was stopped has
NO_CHECKPOINT = (None, None)


class Watchdog:
    """A context around a run. `at` says where the run is; the thread does the rest."""

    def __init__(self, guard: GuardConfig, *, store: Store | None = None, index: int | None = None,
                 clock: Callable[[], float] = time.monotonic, end: Callable[[int, set[int]], object] | None = None):
        """store: that all processes share; None opens one. index: of this process. end: called instead of leaving, with the exit code and
        the processes that are gone."""
        self.guard, self.clock, self._end = guard, clock, end or _exit
        self.store = store or open_store("watch")
        self.index = jax.process_index() if index is None else index
        self.period = min([PERIOD, *(limit / 4 for limit in (guard.step_seconds, guard.silent_seconds) if limit)])
        self.checkpoint: Callable[[], tuple[int | None, str | None]] = lambda: NO_CHECKPOINT
        """(newest complete step, run folder), asked when the run is ended."""
        self._thread_id = threading.get_ident()
        self._where = (0, "start", 0, clock())
        self._resumed = clock()  # when somebody last compiled, or this process went on
        self._looked = self._answered = clock()  # when the last look began, and the last one that had an answer of the store
        self._count = 0
        self._news: dict[int, tuple[int, float]] = {}  # process -> its last count, and when that came
        self._left: dict[int, float] = {}  # process -> when its notice was first seen
        self._last: dict[int, Beat] = {}
        self._unreachable = 0  # looks in a row that the store refused
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self.store:
            with suppress(RuntimeError, TimeoutError):  # the thread will say it
                self._exchange(self.clock())  # from here on the others know of this process
            before_abort(self._aborting)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.store and error and (_from_outside(error) or not self._answers()):
            # The cause is another process: give the thread the time to find it.
            self.at("end", self._where[2])
            self._closed.wait(self.guard.silent_seconds + 3 * self.period)
        self._closed.set()
        self._thread.join(PATIENCE)
        if self.store:
            store, lines = self.store, str(error).splitlines() or [kind.__name__] if kind else [""]
            with suppress(RuntimeError, TimeoutError):  # the coordinator has ended before: nobody is there to be told
                in_time(lambda: store.put(f"left/{self.index}", lines[0]), WAIT)

    def at(self, phase: str, step: int = 0) -> None:
        """The run enters a phase, one of `verdict.DOES`, of a step. Costs nothing."""
        self._where = (self._where[0] + 1, phase, step, self.clock())

    def look(self) -> bool:
        """One look around: ends the process where it has to, and returns whether it had."""
        now, before = self.clock(), self._looked
        self._looked = now
        found = None
        if now - before > GAP * self.period:
            self._go_on(now)
        try:
            mine, others, texts = self._exchange(now)
            self._unreachable = 0
            found = self._judge(mine, others, texts, now)
        except RuntimeError as error:  # the store is the coordinator's
            self._unreachable += 1
            found = (verdict.no_store(str(error), self._last), []) if self._unreachable > 1 else None
        except TimeoutError:  # a coordinator that is stopped takes what is sent, and does not answer
            if now - self._answered > self.guard.silent_seconds:
                found = verdict.silent_store(self._last.get(0), now - self._answered, self.guard.silent_seconds), []
        return found is not None and self._finish(*found)

    # ---------------------------------------------------------------- looking
    def _watch(self) -> None:
        while not self._closed.wait(1.0 if self._unreachable or not self._last else self.period):  # who the others are is needed early
            if self.look():
                return

    def _go_on(self, now: float) -> None:
        """After a time in which this process, or process 0, was stopped: nobody is blamed for it."""
        self._resumed = self._answered = now
        self._news = {index: (count, now) for index, (count, _) in self._news.items()}

    def _exchange(self, now: float) -> tuple[Beat, list[Beat], dict[str, dict[str, str]]]:
        """(where this process is, the others, what was read). Raises RuntimeError or TimeoutError without the coordinator."""
        place, phase, step, since = self._where
        store, stage = self.store, stage_of(self._frame())
        texts = in_time(lambda: {folder: store.read(folder) for folder in ("beat", "end", "left")}, self.period) if store else {}
        if now - self._answered > GAP * self.period:  # nobody could be heard
            self._go_on(now)
        self._answered = now
        others = [beat_of(text) for index, text in texts.get("beat", {}).items() if int(index) != self.index]
        if stage == "compiling" or any(beat.stage == "compiling" for beat in others):
            self._resumed = now
        self._count += 1
        mine = Beat(index=self.index, host=socket.gethostname(), pid=os.getpid(), place=place, phase=phase, step=step,
                    seconds=now - max(since, self._resumed), stage=stage, count=self._count)
        if store:
            in_time(lambda: store.put(f"beat/{self.index}", mine.to_json()), self.period)
        self._last |= {beat.index: beat for beat in others}
        return mine, others, texts

    def _judge(self, mine: Beat, others: list[Beat], texts: dict[str, dict[str, str]], now: float) -> tuple[str, list[int]] | None:
        """(what to say, whose stacks to show), or None while all is well."""
        guard = self.guard
        if self.store is None:
            return verdict.stuck(mine, [], guard.step_seconds) if verdict.is_overdue(mine, [], guard.step_seconds) else None
        if "all" in texts["end"]:
            line, *indices = texts["end"]["all"].split("\n")
            return line, [int(index) for index in indices]
        left = {int(index): reason for index, reason in texts["left"].items()}
        for beat in others:
            count, since = self._news.get(beat.index, (0, now))
            self._news[beat.index] = (beat.count, now if beat.count != count else since)
            if beat.index in left:
                first = self._left.setdefault(beat.index, now)
                if left[beat.index] and now - first > self.period:  # the same error may be on its way here
                    return verdict.ended(beat, left[beat.index]), []
            elif now - self._news[beat.index][1] > guard.silent_seconds:
                return verdict.silent(beat, now - self._news[beat.index][1], guard.silent_seconds), []
        if verdict.is_overdue(mine, others, guard.step_seconds):
            gone = next((beat for beat in others if beat.index in left), None)
            return (verdict.ended(gone, ""), [self.index]) if gone else verdict.stuck(mine, others, guard.step_seconds)
        return None

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread_id)

    # ---------------------------------------------------------------- ending
    def _finish(self, line: str, indices: list[int]) -> bool:
        """Say it and leave. The first verdict of any process holds for all; process 0 shows all stacks, and leaves last."""
        texts = {str(self.index): self._stacks()}
        if store := self.store:
            try:
                mine = "\n".join([line, *map(str, indices)])
                line, *told = in_time(lambda: store.put_first("end/all", mine), WAIT).split("\n")
                indices = [int(index) for index in told]
                in_time(lambda: store.put(f"stack/{self.index}", texts[str(self.index)]), WAIT)
                if indices:
                    there = {self.index, *self._last} - self._gone() - self._left.keys()
                    texts = self._gather(store, {str(index) for index in there})
            except (RuntimeError, TimeoutError):
                pass  # without the coordinator each process says what it knows
        shown = sorted(map(int, texts)) if self.index == 0 else indices
        self._say(line, verdict.stacks(texts, shown) if indices else "")
        self._end(STUCK, self._gone())
        return True

    def _aborting(self) -> None:
        """jax aborts this process. If that is because its coordinator is gone, the store does not answer any more."""
        if not self._closed.is_set() and not self._answers():
            self._say(verdict.no_store("", self._last), "")
            os._exit(STUCK)

    def _answers(self) -> bool:
        """Whether the store, which is the coordinator's, can be read."""
        store = self.store
        return store is None or bool(_patiently(lambda: f"{len(store.read('beat'))} beats", ""))

    def _say(self, line: str, stacks: str) -> None:
        safe = _patiently(lambda: verdict.resume_line(*self.checkpoint()), "the run folder can't be read")
        os.write(2, f"\nerror: {line}\n{stacks}{safe}\n".encode())  # print could be what the main thread is stuck in

    def _stacks(self) -> str:
        """The stack of the thread that runs, and of others that are not merely waiting for work."""
        frames = sys._current_frames()
        text = "".join(traceback.format_stack(frames[self._thread_id])) if self._thread_id in frames else ""
        for number, frame in frames.items():
            idle = os.path.basename(frame.f_code.co_filename) in ("threading.py", "queue.py", "selectors.py", "thread.py")
            if number not in (self._thread_id, threading.get_ident()) and not idle:
                text += f"  and its thread {number}:\n{''.join(traceback.format_stack(frame))}"
        return text

    def _gone(self) -> set[int]:
        """Processes that have not been heard for two periods."""
        return {index for index, (_, when) in self._news.items() if self.clock() - when > PATIENCE + 2 * self.period}

    def _gather(self, store: Store, wanted: set[str]) -> dict[str, str]:
        """The stacks that are there, once all of `wanted` are or patience is at its end."""
        for _ in range(int(PATIENCE / 0.2)):
            if wanted <= (texts := in_time(lambda: store.read("stack"), WAIT)).keys():
                return texts
            self._closed.wait(0.2)
        return texts


def _exit(code: int, gone: set[int]) -> None:
    os._exit(leave(code, gone))


def _from_outside(error: BaseException) -> bool:
    """Whether an error may be the echo of another process's end."""
    found = explain(str(error))
    return found is not None and found.concerns_others


def _patiently(ask: Callable[[], str], otherwise: str) -> str:
    """What `ask` says, or `otherwise` where it fails or hangs, as file systems and networks do."""
    try:
        return in_time(ask, WAIT)
    except Exception:
        return otherwise
