"""Disks that are full or can't be written, and checkpoints whose files are damaged."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from jaxmeg.faults.start import EVERY, ONE, TINY, Bench, Ended, Place, Training
from jaxmeg.faults.table import Fault, NotTried, Outcome, outcome, went_on

TWO_CHECKPOINTS = 850  # kB: room for two of about 340 kB, and not for the third that is written before the first goes


@contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Callable[[int], None]]:
    """A disk of this size in memory, mounted at `folder`; call what is given to change its size. Raises NotTried."""
    folder.mkdir(parents=True)
    _mount("-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(folder))
    try:
        yield lambda size: _mount("-o", f"remount,size={size}k", str(folder))
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotTried(f"it needs the right to mount ({done.stderr.strip()})")


def full_disk(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    """Room for two checkpoints; a third is to be written before the first is removed."""
    for _ in range(times):
        place = bench.place(Path(tempfile.mkdtemp(dir=bench.folder)) / "disk")
        with small_disk(place.folder, TWO_CHECKPOINTS) as resize:
            ended = place.train(*TINY, *ONE)
            lost = place.lost
            resize(10_000)
            same, problem = went_on(place, place.resume(), bench.one)
        yield outcome(place, ended, code=1, lost=lost, same=same, wrong=problem, note="goes on once there is room")


def full_between_saves(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    """Something else takes the last byte while nothing is saved: metrics.jsonl can't be written."""
    for _ in range(times):
        place = bench.place(Path(tempfile.mkdtemp(dir=bench.folder)) / "disk")
        with small_disk(place.folder, 10_000):
            place.begin(*TINY, *ONE, "--train.stop_after", str(3 * EVERY))
            with Training(["--resume", "runs/demo", "--checkpoint.every", "0"], place) as training:
                training.reach(3 * EVERY + 1)
                with (place.folder / "filler").open("wb", buffering=0) as filler:
                    fill(filler.fileno())
                ended = training.end()
            lost = place.lost
            (place.folder / "filler").unlink()
            same, problem = went_on(place, place.resume(), bench.one)
        yield outcome(place, ended, code=1, lost=lost, same=same, wrong=problem, note="goes on once there is room")


def fill(file: int) -> None:
    """Take all the room that is left on the disk of this file."""
    for size in (4096, 1):
        try:
            while True:
                os.write(file, bytes(size))
        except OSError:
            pass


def quota(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    """Files may not be larger than 32 kB."""
    if not shutil.which("prlimit"):
        raise NotTried("it needs prlimit")
    for _ in range(times):
        place = bench.place()
        place.begin(*TINY, *ONE, "--train.stop_after", str(EVERY))
        with Training(["--resume", "runs/demo"], place, prefix=["prlimit", "--fsize=32768"]) as training:
            ended = training.end()
        lost = place.lost
        same, problem = went_on(place, place.resume(), bench.one)
        yield outcome(place, ended, code=1, lost=lost, same=same, wrong=problem, note="goes on without the limit")


def read_only(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    """The run folder turns read-only after a step: to root by a mount, to others by its permissions."""
    for _ in range(times):
        place = bench.place()
        with Training([*TINY, *ONE], place) as training:
            training.reach(2 * EVERY + 1)
            with unwritable(place.run):
                ended = training.end()
        lost = place.lost
        same, problem = went_on(place, place.resume(), bench.one)
        yield outcome(place, ended, code=1, lost=lost, same=same, wrong=problem, note="goes on once it can be written")


@contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    if os.getuid():
        folders = [path for path in (folder, folder / "checkpoints") if path.is_dir()]
        for path in folders:
            path.chmod(0o555)
        yield
        for path in folders:
            path.chmod(0o755)
        return
    _mount("--bind", str(folder), str(folder))
    try:
        for attempt in range(50):  # busy while a file is being written
            try:
                _mount("-o", "remount,bind,ro", str(folder))
                break
            except NotTried:
                if attempt == 49:
                    raise
                time.sleep(0.02)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


# ---------------------------------------------------------------- damaged checkpoints
def largest(step: Path) -> Path:
    return max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """One bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def manifest(step: Path) -> Path:
    return step / "manifest" / "manifest.json"


def damaged(bench: Bench, times: int, chance: random.Random, *, file: Callable[[Path], Path],
            damage: Callable[[Path], None]) -> Iterator[Outcome]:
    """The newest of two checkpoints is damaged: one line, and the run goes on from the one before."""
    for _ in range(times):
        place = bench.place()
        place.begin(*TINY, *ONE, "--train.stop_after", str(5 * EVERY))
        before, newest = place.steps
        damage(file(place.run / "checkpoints" / str(newest)))
        ended = place.resume()
        if ended.code == 0:
            seen = f"after update {before}," in ended.out
            yield outcome(place, ended, lost=newest - before, same=place.records == bench.one, wrong="" if seen else "damage is not seen")
            continue
        rest, note = go_on_from(place, before, newest)
        same, problem = went_on(place, rest, bench.one)
        yield outcome(place, ended, code=2, lost=newest - before, same=same, wrong=problem, note=note)


def older_damaged(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    """The manifest of a checkpoint that is not needed is cut short."""
    for _ in range(times):
        place = bench.place()
        place.begin(*TINY, *ONE, "--train.stop_after", str(5 * EVERY))
        cut_short(manifest(place.run / "checkpoints" / str(place.steps[0])))
        ended = place.resume()
        same, problem = went_on(place, ended, bench.one)
        yield outcome(place, ended, lost=0, same=same, wrong=problem)


def go_on_from(place: Place, before: int, newest: int) -> tuple[Ended, str]:
    """The way back that the product offers: naming the step; else taking the damaged one away."""
    named = place.train("--resume", f"runs/demo/checkpoints/{before}")
    if named.code == 0:
        return named, f"goes on with `--resume RUN/checkpoints/{before}`"
    shutil.rmtree(place.run / "checkpoints" / str(newest))
    return place.resume(), "goes on once the damaged folder is removed; an older step can't be named"


FAULTS = [
    Fault("disk_full", "disk full while a checkpoint is written", 2, full_disk),
    Fault("disk_full_log", "disk full between two checkpoints", 1, full_between_saves),
    Fault("quota", "a limit on the size of files", 1, quota),
    Fault("read_only", "the run folder turns read-only", 1, read_only),
    Fault("cut_arrays", "newest checkpoint: a file of arrays is cut short", 1, partial(damaged, file=largest, damage=cut_short)),
    Fault("flip_arrays", "newest checkpoint: one bit of an array is flipped", 1, partial(damaged, file=largest, damage=flip)),
    Fault("lose_arrays", "newest checkpoint: a file of arrays is gone", 1, partial(damaged, file=largest, damage=Path.unlink)),
    Fault("cut_manifest", "newest checkpoint: the manifest is cut short", 1, partial(damaged, file=manifest, damage=cut_short)),
    Fault("lose_manifest", "newest checkpoint: the manifest is gone", 1, partial(damaged, file=manifest, damage=Path.unlink)),
    Fault("cut_older_manifest", "older checkpoint: the manifest is cut short", 1, older_damaged),
]
