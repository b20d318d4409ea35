"""Data that turns bad under a run, a learning rate that breaks it, and programs in the compile cache that are damaged."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from jaxmeg.faults.disk import cut_short
from jaxmeg.faults.start import EVERY, LENGTH, ONE, ROOT, TINY, Bench, Place
from jaxmeg.faults.table import Fault, NotTried, Outcome, outcome, went_on

TASK = '''
import numpy as np
from flax import nnx


class Rows:
    rows = np.load("rows.npy")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"x": self.rows[index, :-1], "y": self.rows[index, -1]}


ROWS = Rows()


def make(rngs):
    return nnx.Linear(7, 1, rngs=rngs)


def loss(module, batch):
    return (module(batch["x"])[:, 0] - batch["y"]) ** 2
'''
OWN = ("--model.module", "own_task:make", "--model.loss", "own_task:loss", "--data.source", "own_task:ROWS", "--global_batch", "4",
       "--mesh", "dp=2", "--zero", "2", "--emulate", "2", *LENGTH)


def nan_rows(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    """The file that a source of rows of the user's own reads is NaN from update 10 on, and then good again."""
    import numpy as np  # the only fault that needs it

    def place_of(name: str) -> Place:
        place = bench.place(bench.folder / name)
        place.folder.mkdir()
        (place.folder / "own_task.py").write_text(TASK)
        np.save(place.folder / "rows.npy", np.random.default_rng(0).normal(size=(400, 8)).astype(np.float32))
        return place

    whole = place_of("nan-straight")
    whole.begin(*OWN)
    for number in range(times):
        place = place_of(f"nan-{number}")
        place.begin(*OWN, "--train.stop_after", str(3 * EVERY))
        good = (place.folder / "rows.npy").read_bytes()
        np.save(place.folder / "rows.npy", np.full((400, 8), np.nan, np.float32))
        ended = place.resume()
        lost = place.lost
        (place.folder / "rows.npy").write_bytes(good)
        same, problem = went_on(place, place.resume(), whole.records)
        yield outcome(place, ended, code=1, lost=lost, same=same, wrong=problem,
                      note="the lost updates had been skipped; goes on with good data")


def wild_rate(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    """A learning rate that breaks the weights at the first update."""
    for _ in range(times):
        place = bench.place()
        ended = place.train(*TINY, *ONE, "--lr", "1e30", "--optim.warmup", "0")
        yield outcome(place, ended, code=1, wrong="weights that are not finite were saved" if place.steps else "")


def changed(bench: Bench, times: int, chance: random.Random, *, make: Callable[[Place], list[str]], file: str,
            change: Callable[[Path], None]) -> Iterator[Outcome]:
    """A file that the run reads changes between two starts, and is put back. make: writes it, and gives the run's arguments."""
    whole = bench.place()
    whole.begin(*make(whole))
    for _ in range(times):
        place = bench.place()
        place.begin(*make(place), "--train.stop_after", str(3 * EVERY))
        path = place.folder / file
        good = path.read_bytes()
        change(path)
        ended = place.resume()
        path.write_bytes(good)
        same, problem = went_on(place, place.resume(), whole.records)
        yield outcome(place, ended, code=2, lost=0, same=same, wrong=problem, note="goes on once the file is put back")


def write_text(place: Place) -> list[str]:
    place.folder.mkdir(parents=True, exist_ok=True)
    (place.folder / "text.txt").write_text("".join(f"{number} is {number * number % 1009}\n" for number in range(2000)))
    return [*TINY, *ONE, "--data", "text.txt"]


def write_store(place: Place) -> list[str]:
    arguments = write_text(place)
    _prepare(place, "text.txt", "--out", "corpus")
    return [*arguments[:-1], "corpus"]


def write_tokenizer(place: Place) -> list[str]:
    arguments = write_text(place)
    _prepare(place, "text.txt", "--out", "corpus", "--train_bpe", "300")
    return [*arguments, "--data.tokenizer", "corpus.tokenizer.json", "--model.vocab_size", "300"]


def _prepare(place: Place, *arguments: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "prepare_data.py"), *arguments]
    subprocess.run(command, cwd=place.folder, env=place.environment, capture_output=True, check=True)


def add_a_line(path: Path) -> None:
    path.write_text(path.read_text() + "one line more\n")


def swap_two_tokens(path: Path) -> None:
    content = json.loads(path.read_text())
    ids = content["model"]["vocab"]
    first, second = list(ids)[-2:]
    ids[first], ids[second] = ids[second], ids[first]
    path.write_text(json.dumps(content))


def damaged_cache(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    """Every program in jax's compile cache is cut short, as by a kill while it is written."""
    for number in range(times):
        _ = bench.one  # fills the cache
        cache = bench.folder / f"cache-{number}"
        shutil.copytree(bench.folder / "cache", cache)
        for path in cache.iterdir():
            cut_short(path)
        place = Place(bench.folder / f"cached-{number}", cache)
        ended = place.train(*TINY, *ONE)
        yield outcome(place, ended, code=0, lost=place.lost, same=place.records == bench.one, note="compiled again")


def memory(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    raise NotTried("emulated devices share the host's memory and have no limit of their own")
    yield


FAULTS = [
    Fault("nan", "rows of the user's own that are not finite", 1, nan_rows),
    Fault("wild_rate", "a learning rate that breaks the weights (`--lr 1e30`)", 1, wild_rate),
    Fault("cut_bin", "token store: the `.bin` is shorter than the `.idx` says", 1,
          partial(changed, make=write_store, file="corpus.bin", change=cut_short)),
    Fault("other_text", "the text has one line more when the run goes on", 1,
          partial(changed, make=write_text, file="text.txt", change=add_a_line)),
    Fault("other_tokenizer", "the tokenizer has two tokens swapped when the run goes on", 1,
          partial(changed, make=write_tokenizer, file="corpus.tokenizer.json", change=swap_two_tokens)),
    Fault("cut_cache", "all programs in the compile cache are cut short", 1, damaged_cache),
    Fault("memory", "out of device memory", 1, memory),
]
