"""A run that stands still is ended on every process, with the name of the one that is behind (P90).

What decides is tried with a clock of the test and a store in memory; runs of two real processes show that it reaches the user.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from test_processes import MemoryStore
from test_train import ROOT, user_environment

from jaxmeg import _compat
from jaxmeg.config import GuardConfig
from jaxmeg.processes import leave, verdict, watchdog
from jaxmeg.processes.verdict import Beat, behind
from jaxmeg.processes.watchdog import STUCK, Watchdog

GUARD = GuardConfig(step_seconds=20, silent_seconds=60)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Group:
    """Watchdogs of several processes on one clock; none has a thread. `codes` are the exit codes of those that ended."""

    def __init__(self, count: int, guard: GuardConfig = GUARD):
        self.clock, self.store = Clock(), MemoryStore() if count > 1 else None
        self.codes: dict[int, int] = {}
        self.dogs = [Watchdog(guard, store=self.store, index=index, clock=self.clock,
                              end=lambda code, gone, index=index: self.codes.setdefault(index, code)) for index in range(count)]

    def at(self, phase: str, step: int, *indices: int) -> None:
        for index in indices or range(len(self.dogs)):
            self.dogs[index].at(phase, step)

    def pass_time(self, seconds: float, *alive: int) -> None:
        """Everybody looks every 5 s, as its thread would, until it has ended."""
        for _ in range(int(seconds / 5)):
            self.clock.now += 5
            for index in alive or range(len(self.dogs)):
                if index not in self.codes:
                    self.dogs[index].look()


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(watchdog, "PATIENCE", 0.2)


def test_a_run_that_goes_on_is_left_alone(capfd):
    group = Group(3)
    for step in range(1, 20):
        for phase in ("step", "evaluate", "save", "data"):
            group.at(phase, step)
            group.pass_time(20)
    assert group.codes == {} and capfd.readouterr().err == ""


def test_the_one_behind_is_named_and_all_end(capfd):
    """Process 1 does not get the rows of step 5; the others have dispatched it and wait."""
    group = Group(3)
    for phase, step in (("step", 4), ("data", 5)):
        group.at(phase, step)
    group.pass_time(15)
    group.at("step", 5, 0, 2)
    group.pass_time(30)
    assert group.codes == {0: STUCK, 1: STUCK, 2: STUCK}
    said = capfd.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(lines) == 3 and len(set(lines)) == 1  # all say the same
    assert lines[0].startswith(f"error: stuck: process 1 ({socket.gethostname()}, pid {os.getpid()}) is behind: it reads the rows of "
                               "step 5 for 25 s, while process 0 runs step 5 (guard.step_seconds=20)")
    assert "test_the_one_behind_is_named_and_all_end" in said  # its stack
    assert said.count("no checkpoint of this run is complete") == 3


def test_nobody_behind_is_said(capfd):
    group = Group(2)
    group.at("step", 7)
    group.pass_time(30)
    assert set(group.codes) == {0, 1}
    assert ("stuck: none of the 2 processes is behind, every one runs step 7 for 25 s (guard.step_seconds=20): a collective or a device "
            "hangs") in capfd.readouterr().err


def beat(index: int, place: int, stage: str = "in jax", phase: str = "step") -> Beat:
    return Beat(index=index, host="h", pid=1, place=place, phase=phase, step=5, seconds=1.0, stage=stage)


@pytest.mark.parametrize(("beats", "late"), [
    ([beat(0, 9), beat(1, 7), beat(2, 9)], [1]),
    ([beat(0, 9), beat(1, 9), beat(2, 9)], []),
    ([beat(0, 9), beat(1, 9, "in Python"), beat(2, 9)], [1]),  # at the same place, but not waiting for a device
    ([beat(0, 9, "in Python"), beat(1, 9, "in Python")], []),
    ([beat(0, 8), beat(1, 9, "in Python"), beat(2, 8)], [0, 2]),
])
def test_who_is_behind(beats, late):
    assert [found.index for found in behind(beats)] == late


def test_a_single_process_is_watched_too(capfd):
    group = Group(1)
    group.dogs[0].checkpoint = lambda: (40, "runs/demo")
    group.at("data", 41)
    group.pass_time(20)
    assert group.codes == {}
    group.pass_time(5)
    assert group.codes == {0: STUCK}
    said = capfd.readouterr().err
    assert "error: stuck: this process reads the rows of step 41 for 25 s (guard.step_seconds=20)" in said
    assert said.endswith("the checkpoint of step 40 is complete: go on with --resume runs/demo\n") and "in pass_time" in said


@pytest.mark.parametrize("phase", ["start", "end"])
def test_what_has_no_limit(phase):
    group = Group(2)
    group.at(phase, 1)
    group.pass_time(3600)
    assert group.codes == {}


def test_no_limit_at_all():
    group = Group(1, GuardConfig(step_seconds=0))
    group.at("step", 1)
    group.pass_time(3600)
    assert group.codes == {}


def test_compiling_stops_every_clock(monkeypatch):
    """Process 1 compiles its evaluation for half an hour, and process 0 waits for it in a collective."""
    group, stages = Group(2), {0: "in jax", 1: "compiling"}
    looking = [0]
    monkeypatch.setattr(watchdog, "stage_of", lambda frame: stages[looking[0]])
    group.at("evaluate", 5)

    def pass_time(seconds: int) -> None:
        for _ in range(seconds // 5):
            group.clock.now += 5
            for looking[0] in (1, 0):
                if looking[0] not in group.codes:
                    group.dogs[looking[0]].look()

    pass_time(1800)
    assert group.codes == {}
    stages[1] = "in jax"
    pass_time(20)
    assert group.codes == {}
    pass_time(15)
    assert set(group.codes) == {0, 1}


def test_a_process_that_gives_no_sign_of_life(capfd):
    group = Group(3)
    group.at("step", 5)
    group.pass_time(5)
    for step in range(6, 80):
        group.at("step", step, 0, 1)
        group.pass_time(5, 0, 1)
    assert group.codes == {0: STUCK, 1: STUCK}
    said = capfd.readouterr().err
    assert said.count("error: process 2 (") == 2 and "is gone: no sign of life for 65 s (guard.silent_seconds=60)" in said
    assert "when last heard it runs step 5: see its own output, and its host" in said


def test_a_process_that_fails_tells_the_others_why(capfd):
    group = Group(2)
    group.at("step", 3)
    group.pass_time(5)
    failed = ValueError("row 17 is not a number\nand more")
    group.dogs[1]._thread.start()
    group.dogs[1].__exit__(ValueError, failed, None)
    group.pass_time(5, 0)
    assert group.codes == {}  # it may be about to fail in the same way
    group.pass_time(10, 0)
    assert group.codes == {0: STUCK}
    assert "has ended with an error: row 17 is not a number (when last heard it runs step 3)" in capfd.readouterr().err


def test_a_process_that_ends_well_is_not_missed():
    group = Group(2)
    group.at("end", 9)
    group.pass_time(5)
    group.dogs[1]._thread.start()
    group.dogs[1].__exit__(None, None, None)
    group.pass_time(600, 0)
    assert group.codes == {}


def test_the_coordinator_is_gone(capfd, monkeypatch):
    group = Group(2)
    group.at("step", 4)
    group.pass_time(5)

    def refuse(*_: object) -> None:
        raise RuntimeError("UNAVAILABLE: Socket closed")

    for name in ("put", "put_first", "read"):
        monkeypatch.setattr(group.store, name, refuse)
    group.pass_time(5, 1)
    assert group.codes == {}  # one more try
    group.pass_time(5, 1)
    assert group.codes == {1: STUCK} and ", the coordinator, is gone; when last heard it runs step 4" in capfd.readouterr().err


@contextmanager
def frozen(store: MemoryStore) -> Iterator[None]:
    """Process 0 is stopped, as by SIGSTOP: what is sent to it is taken, and gets no answer."""
    wake = threading.Event()

    def hang(*_: object) -> None:
        wake.wait()

    with pytest.MonkeyPatch.context() as patch:
        for name in ("put", "put_first", "read"):
            patch.setattr(store, name, hang)
        patch.setattr(watchdog, "in_time", lambda ask, seconds: leave.in_time(ask, 0.01))
        yield
    wake.set()


def test_the_coordinator_is_stopped(capfd):
    group = Group(3)
    group.at("step", 4)
    group.pass_time(5)
    with frozen(group.store):
        group.pass_time(60, 1, 2)
        assert group.codes == {}
        group.pass_time(5, 1, 2)
    assert group.codes == {1: STUCK, 2: STUCK}
    said = capfd.readouterr().err
    assert said.count(f"error: process 0 ({socket.gethostname()}, pid {os.getpid()}), the coordinator, does not answer for 65 s "
                      "(guard.silent_seconds=60); when last heard it runs step 4: see its own output, and its host") == 2


def test_a_coordinator_that_goes_on_in_time_is_not_blamed_and_blames_nobody():
    group = Group(3)
    group.at("step", 4)
    group.pass_time(5)
    with frozen(group.store):
        group.pass_time(55, 1, 2)
    for step in range(5, 9):
        group.pass_time(15, 2, 1, 0)
        group.at("step", step)
    assert group.codes == {}


def test_leaving_does_not_wait_for_a_coordinator_that_is_stopped(monkeypatch):
    wake, codes = threading.Event(), []

    class Client:
        def key_value_set(self, key: str, text: str, allow_overwrite: bool = False) -> None:
            wake.wait()

    monkeypatch.setattr(_compat, "coordination", lambda: (Client(), 1, 2))
    monkeypatch.setattr(leave, "WAIT", 0.01)
    monkeypatch.setattr(os, "_exit", codes.append)
    leave.leave(STUCK)
    wake.set()
    assert codes == [STUCK]


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_that_was_stopped_goes_on(count):
    """Ctrl-Z and fg, or a job that is suspended, for longer than every limit."""
    group = Group(count)
    group.at("step", 5)
    group.pass_time(15)
    group.dogs[0].look()  # it has the newest of the other, and hears no more of it until that looks again
    group.clock.now += 1000
    group.pass_time(20)
    assert group.codes == {}
    group.pass_time(15)
    assert set(group.codes) == set(range(count))  # and it is watched as before


def test_a_run_that_was_stopped_goes_on_before_its_coordinator():
    group = Group(3)
    group.at("step", 5)
    group.pass_time(10)
    group.clock.now += 1000
    with frozen(group.store):
        group.pass_time(10, 1, 2)
    group.pass_time(15)
    assert group.codes == {}


def test_a_run_that_was_stopped_in_the_middle_of_a_look(monkeypatch):
    group = Group(2)
    group.at("step", 5)
    group.pass_time(10)
    read = group.store.read

    def slow(folder: str) -> dict[str, str]:
        if group.clock.now < 1000:
            group.clock.now += 1000
        return read(folder)

    monkeypatch.setattr(group.store, "read", slow)
    group.pass_time(15)
    assert group.codes == {}


def test_an_abort_after_the_run_is_not_the_coordinators(monkeypatch):
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    dog = Group(2).dogs[1]
    monkeypatch.setattr(dog, "_answers", lambda: False)
    dog._aborting()
    assert codes == [STUCK]
    dog._thread.start()
    dog.__exit__(None, None, None)
    dog._aborting()
    assert codes == [STUCK]


def test_nobody_waits_for_the_stack_of_a_process_that_has_left(monkeypatch):
    """Process 0 is gone by the time that somebody has waited for it."""
    wanted = []
    monkeypatch.setattr(watchdog, "PATIENCE", 10)
    monkeypatch.setattr(Watchdog, "_gather", lambda dog, store, indices: wanted.append(indices) or {})
    for reason in ("row 17 is not a number", ""):  # it failed; or it has ended well, and the others go on
        group = Group(3)
        group.at("step", 3)
        group.pass_time(5)
        group.store.put("left/0", reason)
        group.pass_time(30, 1, 2)
        assert group.codes == {1: STUCK, 2: STUCK}
    assert wanted == [{"1", "2"}] * 2


def test_jax_says_who_is_dead():
    text = "UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n3\nThe tasks have crashed."
    assert verdict.no_store(text, {3: beat(3, 1)}).startswith("process 3 (h, pid 1) is gone; when last heard it runs step 5")


def test_a_thread_that_compiles_is_seen():
    """From inside a trace, and from inside a callback of a program that runs."""
    seen = []

    def traced(x: jax.Array) -> jax.Array:
        seen.append(_compat.stage_of(sys._getframe()))
        return x + 1

    jax.jit(traced)(jnp.zeros(()))
    assert seen == ["compiling"] and _compat.stage_of(sys._getframe()) == "in Python" and _compat.stage_of(None) == "in Python"


def test_the_thread_ends_with_the_run():
    with Watchdog(GUARD) as dog:
        assert dog._thread.is_alive() and dog.store is None
    assert not dog._thread.is_alive()


# ------------------------------------------------------------------------------------------------ two processes

TASK = '''
import os, time
from dataclasses import replace
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxmeg import train

class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 1, rngs=rngs)
    def __call__(self, x):
        return self.linear(x)

def loss(module, batch):
    return jnp.square(module(batch["x"])[:, 0] - batch["y"])

ROWS = [{"x": np.full(4, i % 7, np.float32), "y": np.float32(i % 3)} for i in range(4096)]

def own_task(*arguments, made=train.own_task):
    task = made(*arguments)
    def read(first, consumed):
        for n, rows in task.read(first, consumed):
            if n + 1 == int(os.environ.get("STICKS_AT", 0)):
                time.sleep(10_000)
            yield n, rows
    return replace(task, read=read)

train.own_task = own_task
'''


def two_processes(folder: Path, **of_process_1: str) -> list[subprocess.Popen[str]]:
    (folder / "task.py").write_text(TASK)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-u", str(ROOT / "scripts" / "train.py"), "--model.module", "task:Net", "--model.loss", "task:loss",
               "--data.source", "task:ROWS", "--mesh", "dp=2", "--emulate", "2", "--global_batch", "2", "--steps", "1000000",
               "--train.eval_every", "0", "--train.log_every", "1", "--record.tensorboard", "false", "--checkpoint.every", "2",
               "--guard.step_seconds", "20", "--guard.silent_seconds", "10", "--guard.replicas_every", "0",
               "--distributed.coordinator", f"localhost:{port}", "--distributed.num_processes", "2", "--distributed.process_id"]
    env = user_environment()
    env["PYTHONPATH"] = os.pathsep.join([str(folder), env["PYTHONPATH"]])
    return [subprocess.Popen([*command, str(index)], cwd=folder, env=env | more, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True) for index, more in ((0, {}), (1, of_process_1))]


def errors(running: list[subprocess.Popen[str]]) -> list[str]:
    return [process.communicate(timeout=300)[1] for process in running]


def test_a_stuck_process_ends_both(tmp_path):
    """Process 1 never gets its row of step 5."""
    running = two_processes(tmp_path, STICKS_AT="5")
    both = errors(running)
    assert [process.returncode for process in running] == [STUCK, STUCK], both
    for said in both:
        assert f"error: stuck: process 1 ({socket.gethostname()}, pid {running[1].pid}) is behind: it reads the rows of step 5 for " in said
        assert "while process 0 runs step 5 (guard.step_seconds=20)" in said and "absl" not in said
        assert "time.sleep(10_000)" in said and "go on with --resume runs/demo" in said
    assert "process 0, innermost call last" in both[0]  # all stacks, on process 0


@pytest.mark.parametrize("killed", [1, 0])
def test_a_killed_process_ends_the_other(tmp_path, killed):
    """The coordinator too, where jax would abort with C++ text alone."""
    running = two_processes(tmp_path)
    assert running[0].stdout
    for line in running[0].stdout:
        if line.startswith("step    10/"):
            break
    time.sleep(3)  # looks are 2.5 s apart: each has heard the other
    running[killed].send_signal(signal.SIGKILL)
    said = errors(running)[1 - killed]
    assert (running[killed].returncode, running[1 - killed].returncode) == (-signal.SIGKILL, STUCK), said
    coordinator = ", the coordinator," if killed == 0 else ""
    assert f"error: process {killed} ({socket.gethostname()}, pid {running[killed].pid}){coordinator} is gone" in said
    assert "when last heard it " in said and "is complete: go on with --resume runs/demo" in said and "Traceback" not in said


@pytest.mark.slow
def test_a_coordinator_that_is_stopped_ends_the_other(tmp_path):
    """jax itself would see it after a minute and more, from C++."""
    running = two_processes(tmp_path)
    assert running[0].stdout
    for line in running[0].stdout:
        if line.startswith("step    10/"):
            break
    running[0].send_signal(signal.SIGSTOP)
    try:
        said = running[1].communicate(timeout=300)[1]
    finally:
        running[0].kill()
    assert running[1].returncode == STUCK, said
    assert f"error: process 0 ({socket.gethostname()}, pid {running[0].pid}), the coordinator, does not answer for 1" in said
    assert "(guard.silent_seconds=10)" in said and "is complete: go on with --resume runs/demo" in said and "Traceback" not in said
    running[0].communicate()
