"""Runs of scripts/train.py as a user starts them: in processes of their own, one or several, watched from outside.

Everything is read from what a run leaves: its output, its exit code, metrics.jsonl and the checkpoint folders. Must not import jax
or what the runs are made of, so that a mistake there can't hide here.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "scripts" / "train.py"
STEPS, EVERY = 30, 3
SECONDS = 180.0  # a run that has not ended by then hangs
MODEL = ("--model", "toy", "--model.num_layers", "1", "--model.embed_dim", "16", "--model.mlp_dim", "32", "--model.num_heads", "2",
         "--model.num_kv_heads", "2", "--model.head_dim", "8", "--seq_len", "16", "--global_batch", "4", "--train.sample_tokens", "0")
LENGTH = ("--steps", str(STEPS), "--checkpoint.every", str(EVERY), "--optim.warmup", "2", "--train.log_every", "1",
          "--train.eval_every", "0", "--train.eval_rows", "4", "--record.tensorboard", "false")
TINY = (*MODEL, *LENGTH)
ONE = ("--mesh", "dp=2", "--zero", "3", "--emulate", "2")
"""One process."""
TWO = ("--mesh", "dp=4", "--zero", "3", "--emulate", "4")
"""Two processes of two devices."""

Records = dict[int, tuple[float, float]]
"""Update -> (loss, gradient norm), every digit."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A process that has ended."""

    code: int | None
    """None: it hung and was killed."""
    out: str
    err: str

    @property
    def line(self) -> str:
        """What a user reads: the last line on stderr that is an error or a message of the run, else the very last."""
        lines = [line for line in self.err.splitlines() if line.strip()]
        said = [line for line in lines if line.startswith(("error:", "stopped", "interrupted"))]
        return (said or lines or [""])[-1].strip()

    @property
    def has_traceback(self) -> bool:
        return "Traceback (most recent call last)" in self.err


class Early(RuntimeError):
    """A run that ended before anything was done to it."""


class Training:
    """One process that trains, with its output in files. As a context it is gone at the end, whatever happens."""

    def __init__(self, arguments: Sequence[str], place: Place, *, name: str = "train", prefix: Sequence[str] = (),
                 change: int | None = None):
        """prefix: a command that runs the command. change: under `interpose`, which kills it before this change of a file; 0: never."""
        place.folder.mkdir(parents=True, exist_ok=True)
        script = [str(TRAIN)] if change is None else ["-m", "jaxmeg.faults.interpose", str(place.run), str(change), str(TRAIN)]
        self._files = [place.folder / f"{name}.{stream}" for stream in ("out", "err")]
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self.process = subprocess.Popen([*prefix, sys.executable, *script, *arguments], cwd=place.folder,
                                            env=place.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self._signal_all(signal.SIGKILL)
        self.process.wait()

    def until(self, seen: Callable[[], bool], seconds: float = SECONDS) -> bool:
        """Wait until `seen`; False if the process ends before, or takes too long."""
        end = time.monotonic() + seconds
        while not seen():
            if self.process.poll() is not None or time.monotonic() > end:
                return seen()
            time.sleep(0.002)
        return True

    def said(self, text: str) -> bool:
        return any(text in file.read_text(errors="replace") for file in self._files)

    def reach(self, step: int) -> None:
        """Wait until the run has reported a step. Raises Early."""
        if not self.until_step(step):
            raise Early(f"a run that nothing has happened to ends before update {step}: {self.end().line}")

    def until_step(self, step: int) -> bool:
        return self.until(lambda: any(line.startswith("step ") and line[5:].split("/")[0].strip() == str(step)
                                      for line in self._files[0].read_text().splitlines()))

    def send(self, number: int) -> None:
        """A signal to the training process alone."""
        self.process.send_signal(number)

    def end(self, seconds: float = SECONDS) -> Ended:
        """Wait for the end; what takes longer is killed."""
        try:
            code: int | None = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            self._signal_all(signal.SIGKILL)
            self.process.wait()
        return Ended(code=code, out=self._files[0].read_text(errors="replace"), err=self._files[1].read_text(errors="replace"))

    def _signal_all(self, number: int) -> None:
        """To the process and what it started: they are a group of their own."""
        os.killpg(self.process.pid, number)


@dataclass(frozen=True)
class Place:
    """A folder in which runs are started; the run itself is `run`."""

    folder: Path
    cache: Path
    """Compiled programs, shared by all runs that are tried: they are the same programs."""

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "demo"

    @property
    def environment(self) -> dict[str, str]:
        """A user's, with nothing set for jax but the cache."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX"))}
        path = os.pathsep.join([str(ROOT), str(self.folder), *filter(None, [env.get("PYTHONPATH")])])
        return env | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "JAX_COMPILATION_CACHE_DIR": str(self.cache),
                      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}

    def train(self, *arguments: str, prefix: Sequence[str] = (), seconds: float = SECONDS) -> Ended:
        """From start to end."""
        with Training(arguments, self, prefix=prefix) as training:
            return training.end(seconds)

    def begin(self, *arguments: str) -> None:
        """A run that nothing happens to. Raises Early."""
        ended = self.train(*arguments)
        if ended.code != 0:
            raise Early(f"a run that nothing has happened to ends with {ended.code}: {ended.line}")

    def resume(self, *arguments: str) -> Ended:
        return self.train("--resume", "runs/demo", *arguments)

    @property
    def records(self) -> Records:
        """Of the updates in metrics.jsonl; a last line that was cut short counts for nothing."""
        path, found = self.run / "metrics.jsonl", {}
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            if "grad_norm" in record:
                found[record["step"]] = record["loss"], record["grad_norm"]
        return found

    @property
    def steps(self) -> list[int]:
        """Of the complete checkpoints, ascending."""
        return sorted(int(path.parents[1].name) for path in self.run.glob("checkpoints/*/manifest/manifest.json")
                      if path.parents[1].name.isdigit())

    @property
    def in_a_save(self) -> bool:
        """Whether a save has begun and not ended."""
        return any(self.run.glob("checkpoints/*tmp*"))

    @property
    def lost(self) -> int:
        """Updates that were written down after the last complete checkpoint."""
        return max(0, max(self.records, default=0) - max(self.steps, default=0))


class Bench:
    """Where faults are tried: a folder for each, and the run that nothing happens to."""

    def __init__(self, folder: Path):
        self.folder, self._count = folder, 0

    def place(self, folder: Path | None = None) -> Place:
        """A new folder, or this one."""
        self._count += 1
        return Place(folder or self.folder / str(self._count), self.folder / "cache")

    def straight(self, *arguments: str) -> Records:
        """A run in one go."""
        place = self.place()
        place.begin(*arguments)
        return place.records

    @cached_property
    def one(self) -> Records:
        """What `TINY` on `ONE` gives in one go."""
        return self.straight(*TINY, *ONE)

    @cached_property
    def two(self) -> Records:
        """What `TINY` on `TWO` gives in two processes in one go."""
        place = self.place()
        ended = [training.end() for training in several(place, 2, *TINY, *TWO)]
        if [one.code for one in ended] != [0, 0]:
            raise Early(f"two processes that nothing has happened to end with {ended}")
        return place.records


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def several(place: Place, count: int, *arguments: str, ids: Sequence[int] | None = None, own: Mapping[int, Sequence[str]] | None = None,
            coordinator: str = "", change: int | None = None, prefixes: Sequence[Sequence[str]] = ()) -> list[Training]:
    """Start the processes of one run. ids: of those that are started, all when None. own: arguments of one of them alone. prefixes:
    of each one's command."""
    shared = ["--distributed.coordinator", coordinator or f"localhost:{free_port()}", "--distributed.num_processes", str(count)]
    return [Training([*arguments, *shared, "--distributed.process_id", str(index), *(own or {}).get(index, ())], place,
                     name=f"process{number}", prefix=prefixes[number] if prefixes else (), change=change)
            for number, index in enumerate(range(count) if ids is None else ids)]
