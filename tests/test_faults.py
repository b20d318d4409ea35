"""The trials of faults: that they see what they should, and that docs/reliability.md is what docs/reliability.json says."""

import json
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from jaxmeg.faults import data, disk, hosts, kill, ranks
from jaxmeg.faults.interpose import killer
from jaxmeg.faults.page import render
from jaxmeg.faults.start import ROOT, Bench, Ended, Place
from jaxmeg.faults.table import Fault, NotTried, Outcome, Row, outcome, shorten, try_fault

FAULTS = [fault for module in (kill, disk, data, ranks, hosts) for fault in module.FAULTS]


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path, tmp_path / "cache")


def test_faults_have_names_of_their_own():
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) == len({fault.words for fault in FAULTS})


# ---------------------------------------------------------------- the page
PAGE, JSON = ROOT / "docs" / "reliability.md", ROOT / "docs" / "reliability.json"


def test_the_page_is_what_the_json_says():
    assert PAGE.read_text() == render(json.loads(JSON.read_text()))


def test_the_page_has_every_fault():
    rows = json.loads(JSON.read_text())["rows"]
    assert [(row["name"], row["words"]) for row in rows] == [(fault.name, fault.words) for fault in FAULTS]


def test_what_is_shown_of_a_row():
    row = Row(name="x", words="a fault", tried=3, said=["a | b", "c", "d"], codes=[[2], [75, 75]], lost=[3, 0, 5], same=[2, 3],
              wrong=["hangs"], note=["so"])
    head = {"updates": 1, "every": 1, "command": "c", "date": "e", "cores": 2, "system": "f", "versions": "g"}
    text = render({"head": head, "rows": [row.to_json(), replace(row, name="y", not_tried="no root", wrong=[]).to_json()]})
    assert "\n| a fault | 3 | `a \\| b`<br>`c`<br>so | 2, 75 and 75 | 0 to 5 | 2 of 3 |\n" in text
    assert "\n| a fault | 0 | not tried here: no root | | | |\n" in text
    assert text.endswith("Not as it should be yet:\n\n- a fault: hangs\n")


# ---------------------------------------------------------------- judging
@pytest.mark.parametrize(("ended", "same", "wrong"), [
    (Ended(code=2, out="", err="error: x"), True, ""),
    (Ended(code=None, out="", err="error: x"), True, "hangs"),
    (Ended(code=1, out="", err="error: x"), True, "exit code 1"),
    (Ended(code=2, out="", err="Traceback (most recent call last):\n  ...\nOSError: x"), True, "traceback"),
    (Ended(code=2, out="", err="error: x"), False, "other losses"),
])
def test_what_is_wrong_is_found(ended, same, wrong, place):
    found = outcome(place, ended, code=2, same=same).wrong
    assert wrong in found and bool(wrong) == bool(found)


def test_the_line_that_a_user_reads(place):
    assert Ended(code=2, out="", err="warning: a\nerror: b\nthe rest\n\n").line == "error: b"
    assert Ended(code=2, out="", err="a\nb\n\n").line == "b" and Ended(code=2, out="", err="").line == ""
    assert shorten(f"error: {place.run}/checkpoints/3 at localhost:4711", place) == "error: RUN/checkpoints/3 at HOST:PORT"
    assert len(shorten("x" * 999, place)) < 300


def test_what_cannot_be_tried_says_why(tmp_path):
    def trial(*_: object) -> list[Outcome]:
        raise NotTried("no root")

    row = try_fault(Fault("x", "a fault", 1, trial), Bench(tmp_path), None, 0)
    assert row.not_tried == "no root" and row.tried == 0 and not row.wrong


def write(place: Place, losses: dict[int, float], steps: list[int], end: str = "") -> None:
    for step in steps:
        (place.run / "checkpoints" / str(step) / "manifest").mkdir(parents=True)
        (place.run / "checkpoints" / str(step) / "manifest" / "manifest.json").write_text("{}")
    (place.run / "metrics.jsonl").write_text("".join(
        json.dumps({"step": step, "loss": loss, "grad_norm": 1.0}) + "\n" for step, loss in losses.items()) + end)


def test_what_a_run_folder_says(place):
    """A last line that was cut, a save that did not end, a checkpoint without a manifest."""
    write(place, {1: 0.1, 2: 0.2, 5: 0.30000000000000004}, [2, 3], '{"step": 6, "lo')
    (place.run / "checkpoints" / "6.orbax-checkpoint-tmp").mkdir()
    (place.run / "checkpoints" / "5").mkdir()
    assert place.records == {1: (0.1, 1.0), 2: (0.2, 1.0), 5: (0.30000000000000004, 1.0)}
    assert (place.steps, place.lost, place.in_a_save) == ([2, 3], 2, True)


# ---------------------------------------------------------------- what does the damage
PROGRAM = """
import os, pathlib
run = pathlib.Path("run"); run.mkdir()
(run / "a").write_text("a")
pathlib.Path("elsewhere").write_text("not counted")
(run / "a").read_text()
(run / "a").rename(run / "b")
(run / "b").unlink()
print("the end")
"""


@pytest.mark.parametrize(("number", "left", "what"), [(1, None, "os.mkdir"), (2, [], "open a"), (3, ["a"], "os.rename a -> b"),
                                                      (4, ["b"], "os.remove b"), (5, [], None), (0, [], None)])
def test_a_program_dies_right_before_a_change_of_a_file(number, left, what, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "jaxmeg.faults.interpose", "run", str(number), "program.py"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == (0 if what is None else -signal.SIGKILL), done.stderr
    assert (what is None) == ("the end" in done.stdout) and (what or "") in done.stderr
    assert (os.listdir(tmp_path / "run") if (tmp_path / "run").exists() else None) == left


def test_what_is_no_change_is_not_counted(tmp_path):
    hook = killer(tmp_path, 1)
    hook("open", (str(tmp_path / "a"), "r", os.O_RDONLY))
    hook("open", (3, "w", os.O_WRONLY))
    hook("os.rename", ("/elsewhere/a", "/elsewhere/b", -1, -1))


def test_damage(tmp_path):
    files = {"small": b"1234", "d/large": bytes(range(100))}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    path = disk.largest(tmp_path)
    assert path == tmp_path / "d" / "large"
    disk.flip(path)
    assert [i for i, (a, b) in enumerate(zip(path.read_bytes(), files["d/large"], strict=True)) if a != b] == [50]
    disk.cut_short(path)
    assert path.stat().st_size == 50


# ---------------------------------------------------------------- on real runs
@pytest.mark.slow
@pytest.mark.parametrize(("name", "times"), [("kill", 2), ("kill_at_change", 2)])
def test_a_fault_on_real_runs(name, times, tmp_path):
    [fault] = [fault for fault in FAULTS if fault.name == name]
    row = try_fault(fault, Bench(tmp_path), times, seed=1)
    assert row.tried == times and row.wrong == []
    assert row.same[0] == row.same[1] > 0


def test_chance_is_the_same_each_time(tmp_path):
    def trial(bench: Bench, times: int, chance: random.Random) -> list[Outcome]:
        return [Outcome(said=str(chance.random()), codes=(0,)) for _ in range(times)]

    fault = Fault("x", "a fault", 3, trial)
    first, again, other = (try_fault(fault, Bench(tmp_path), None, seed) for seed in (0, 0, 1))
    assert len(first.said) == 3 and first == again != other


def test_the_script_names_the_faults():
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "faults.py"), "--only", "nonsense"], capture_output=True, text=True,
                          check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and "invalid choice: 'nonsense'" in done.stderr and "kill_at_change" in done.stderr

