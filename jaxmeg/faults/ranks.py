"""Runs of several processes of which one dies, hangs, or never comes."""

from __future__ import annotations

import random
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from jaxmeg.faults.start import TINY, TWO, Bench, Ended, Place, Training, several
from jaxmeg.faults.table import Fault, Outcome, outcome, went_on

STUCK = 75  # exit code of a run that the watchdog has ended
LIMITS = ("--guard.step_seconds", "20", "--guard.silent_seconds", "12")

Break = Callable[[list[Training]], None]


def kill(process: int) -> Break:
    return lambda trainings: trainings[process].send(signal.SIGKILL)


def freeze(process: int) -> Break:
    """The whole process stands still, with every thread."""
    return lambda trainings: trainings[process].send(signal.SIGSTOP)


def hang(trainings: list[Training]) -> None:
    """Its main thread sleeps for good; the others go on."""
    trainings[1].send(signal.SIGUSR1)


def broken(bench: Bench, times: int, chance: random.Random, *, what: Break, survivors: Sequence[int], code: int | tuple[int, ...] = STUCK,
           change: int | None = None) -> Iterator[Outcome]:
    """Something happens to one of two processes after a step; `survivors` must end with one line."""
    for _ in range(times):
        place = bench.place()
        trainings = several(place, 2, *TINY, *TWO, *LIMITS, change=change)
        with trainings[0], trainings[1]:
            trainings[0].reach(chance.randint(8, 20))
            what(trainings)
            ended = [trainings[index].end() for index in survivors]
        lost = place.lost
        same, problem = went_on(place, resume_in_two(place), bench.two)
        yield outcome(place, ended, code=code, lost=lost, same=same, wrong=problem)


def resume_in_two(place: Place) -> Ended:
    trainings = several(place, 2, "--resume", "runs/demo")
    with trainings[0], trainings[1]:
        ended = [training.end() for training in trainings]
    return next((one for one in ended if one.code), ended[0])


# ---------------------------------------------------------------- at the start
def busy_port(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    for _ in range(times):
        with socket.create_server(("", 0)) as other:
            yield _refused(bench, 2, range(2), f"localhost:{other.getsockname()[1]}")


def one_missing(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    """Three are to come, and two do."""
    for _ in range(times):
        yield _refused(bench, 3, range(2))


def other_counts(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    """One of two processes has been told that there are three."""
    for _ in range(times):
        yield _refused(bench, 2, range(2), own={1: ["--distributed.num_processes", "3"]})


def one_twice(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    for _ in range(times):
        yield _refused(bench, 3, (0, 1, 1))


def nobody_there(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    """Process 1 is told a port that nobody listens on."""
    for _ in range(times):
        yield _refused(bench, 2, (1,))


def _refused(bench: Bench, count: int, ids: Sequence[int], coordinator: str = "",
             own: Mapping[int, Sequence[str]] | None = None) -> Outcome:
    """These processes of a run of `count` end with one line, and leave nothing."""
    place = bench.place()
    mesh = ("--mesh", "dp=6", "--emulate", "6", "--global_batch", "6")  # for two processes and for three
    trainings = several(place, count, *TINY, *mesh, "--distributed.timeout", "15", ids=ids, own=own, coordinator=coordinator)
    ended = [training.end() for training in trainings]
    return outcome(place, ended, code=2, wrong="a run folder is left" if place.run.exists() else "")


FAULTS = [
    Fault("dead_rank", "`kill -9` of process 1 of 2", 2, partial(broken, what=kill(1), survivors=[0], code=(STUCK,))),
    Fault("dead_coordinator", "`kill -9` of process 0 of 2, the coordinator", 2, partial(broken, what=kill(0), survivors=[1])),
    Fault("frozen_rank", "process 1 of 2 stands still (SIGSTOP)", 1, partial(broken, what=freeze(1), survivors=[0])),
    Fault("frozen_coordinator", "process 0 of 2, the coordinator, stands still (SIGSTOP)", 1,
          partial(broken, what=freeze(0), survivors=[1])),
    Fault("stuck_rank", "process 1 of 2 is alive, and its main thread hangs", 1, partial(broken, what=hang, survivors=[0, 1], change=0)),
    Fault("busy_port", "the coordinator's port is in use", 1, busy_port),
    Fault("missing_rank", "two of three processes come (`distributed.timeout=15`)", 1, one_missing),
    Fault("other_counts", "processes that are told different numbers of processes", 1, other_counts),
    Fault("same_id", "two processes with the same id", 1, one_twice),
    Fault("no_coordinator", "nobody listens at the coordinator's address (`distributed.timeout=15`)", 1, nobody_there),
]
