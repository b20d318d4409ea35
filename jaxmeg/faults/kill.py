"""Runs that are killed or told to stop: at any moment, several times in a row, between any two changes of a file."""

from __future__ import annotations

import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

from jaxmeg.faults.start import EVERY, ONE, STEPS, TINY, Bench, Ended, Place, Training
from jaxmeg.faults.table import Fault, Outcome, outcome, shorten, went_on

IN_A_ROW = 5  # kills that one run survives
KILLED = -signal.SIGKILL

Kill = Callable[[Place, list[str], random.Random, int], tuple[Ended, str]]
"""(place, arguments, chance, number of this kill) -> how the process ended, and at what."""


def at_a_moment(place: Place, arguments: list[str], chance: random.Random, number: int) -> tuple[Ended, str]:
    """In turn: while a save is going on, shortly after a step, any time after the start."""
    with Training(arguments, place) as training:
        if number % 3 == 2:
            time.sleep(chance.uniform(0, 6))
        elif training.until_step(min(STEPS - 1, max(place.steps, default=0) + chance.randint(1, 8))):
            if number % 3 == 0:
                training.until(lambda: place.in_a_save)
            time.sleep(chance.uniform(0, 0.05))
        training.send(signal.SIGKILL)
        return training.end(), "while a checkpoint was written" if place.in_a_save else "at other moments"


def before_a_change(place: Place, arguments: list[str], chance: random.Random, number: int) -> tuple[Ended, str]:
    """Right before one of the next changes of a file in the run folder; there are about 26 to a checkpoint."""
    with Training(arguments, place, change=chance.randint(1, 110)) as training:
        return training.end(), ""


def before_the_next_change(place: Place, arguments: list[str], chance: random.Random, number: int) -> tuple[Ended, str]:
    """Before change 1 of the first start, change 2 of the next, ...: what a run that goes on rewrites before it trains."""
    with Training(arguments, place, change=number + 1) as training:
        return training.end(), ""


def killed(bench: Bench, times: int, chance: random.Random, *, kill: Kill, in_a_row: int = IN_A_ROW,
           begun: bool = False) -> Iterator[Outcome]:
    """Starts that are killed and gone on with, some in a row, and then to the end. What has been written down is compared after
    each kill, and everything at the end. begun: the first start has been well."""
    number = 0
    for _ in range(2 * times):
        if number >= times:
            return
        place, deaths = bench.place(), []
        if begun:
            place.begin(*TINY, *ONE, "--train.stop_after", "6")
        while len(deaths) < in_a_row and number < times:
            ended, when = kill(place, go_on(place), chance, number)
            if ended.code != KILLED:
                break
            number += 1
            wrong = [step for step, record in place.records.items() if bench.one.get(step) != record]
            deaths.append((ended, place.lost, f"other losses at update {min(wrong)}" if wrong else "", when))
        ended = place.train(*go_on(place))
        done = ended.code == 2 and f"has done {STEPS} updates already" in ended.err  # killed after the last save
        same, problem = (place.records == bench.one, "") if done else went_on(place, ended, bench.one)
        for death, lost, wrong, when in deaths:
            is_last = death is deaths[-1][0]
            what = f"{shorten(death.line, place)}: {problem}" if problem and is_last else ""
            yield outcome(place, death, said="", code=KILLED, lost=lost, same=same or bool(problem and not is_last), wrong=wrong or what,
                          note=when)


def go_on(place: Place) -> list[str]:
    """With the latest checkpoint; from the start, in the same folder, where there is none yet."""
    if place.steps:
        return ["--resume", "runs/demo"]
    shutil.rmtree(place.run, ignore_errors=True)
    return [*TINY, *ONE]


def told(bench: Bench, times: int, chance: random.Random, *, number: int) -> Iterator[Outcome]:
    """SIGTERM or Ctrl-C at any step."""
    for _ in range(times):
        place = bench.place()
        with Training([*TINY, *ONE], place) as training:
            training.reach(chance.randint(1, STEPS - 5))
            training.send(number)
            ended = training.end()
        lost = place.lost
        same, problem = went_on(place, place.resume(), bench.one)
        yield outcome(place, ended, code=128 + number, lost=lost, same=same, wrong=problem)


def told_twice(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    """SIGTERM, and again before the run has stopped: at once."""
    for _ in range(times):
        place = bench.place()
        with Training([*TINY, *ONE], place) as training:
            training.reach(chance.randint(EVERY + 1, STEPS - 5))
            training.send(signal.SIGTERM)
            training.until(lambda: training.said("once more stops it at once"))
            training.send(signal.SIGTERM)
            ended = training.end()
        lost = place.lost
        same, problem = went_on(place, place.resume(), bench.one)
        yield outcome(place, ended, code=(-signal.SIGTERM, 128 + signal.SIGTERM), lost=lost, same=same, wrong=problem)


FAULTS = [
    Fault("kill", "`kill -9` at any moment: in a save, between saves, at the start", 20, partial(killed, kill=at_a_moment)),
    Fault("kill_at_change", "`kill -9` right before a random change of a file in the run folder", 20,
          partial(killed, kill=before_a_change)),
    Fault("kill_at_resume", "`kill -9` before each of the first changes of files when a run goes on", 16,
          partial(killed, kill=before_the_next_change, in_a_row=16, begun=True)),
    Fault("sigterm", "SIGTERM", 3, partial(told, number=signal.SIGTERM)),
    Fault("ctrl_c", "Ctrl-C", 1, partial(told, number=signal.SIGINT)),
    Fault("sigterm_twice", "SIGTERM twice", 1, told_twice),
]
