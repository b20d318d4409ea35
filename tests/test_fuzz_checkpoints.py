"""Checkpoints with any damage: the very same state, or one line that says which leaf or file is damaged, and nothing was used."""

import copy
import functools
import json
import os
import runpy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from fuzz import JSON, assert_one_line, bounded, damaged, fuzz, listing
from hypothesis import given
from hypothesis import strategies as st

from jaxmeg.arch import resolve_arch
from jaxmeg.checkpoint.canonical import flatten
from jaxmeg.checkpoint.manifest import CheckpointError, Manifest, complete_steps, find_step, left_over, read_manifest
from jaxmeg.checkpoint.restore import RestoreError, restore
from jaxmeg.checkpoint.resume import config_changes, data_problems, problems
from jaxmeg.optim.build import learning_rate
from jaxmeg.record.log import METRICS, keep_until, logged_losses

# Orbax leaves the reads of the other arrays behind when one fails; Python ends them later, in whichever test that happens.
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in. <coroutine:pytest.PytestUnraisableExceptionWarning")
NAME = "one device"
INSPECT = runpy.run_path(str(Path(__file__).resolve().parents[1] / "scripts" / "inspect_checkpoint.py"))["main"]


@functools.cache
def saved() -> Path:
    """A step folder."""
    return find_step(runs.start())


def manifest_of(folder: Path) -> Path:
    return folder / "manifest" / "manifest.json"


@functools.cache
def leaves() -> dict[str, np.ndarray]:
    return {name: np.array(x) for name, x in flatten(restore(runs.setup_of(NAME), saved())[0]).items()}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the run, to be damaged and mended."""
    run = shutil.copytree(runs.start(), tmp_path_factory.mktemp("copy") / "run")
    return find_step(run)


# ---------------------------------------------------------------- manifests
def readable(folder: Path) -> Manifest | None:
    """What a changed manifest becomes: values that everything which reads them can use, or one line."""
    with bounded():
        try:
            found = read_manifest(folder)
        except CheckpointError as error:
            assert_one_line(str(error))
            assert "manifest.json" in str(error)
            return None
        setup = runs.setup_of(NAME)
        for line in problems(found, setup.config, setup.resolved.arch, learning_rate):
            assert line
        config_changes(found.config, {})
        data_problems(found.extra, {"tokenizer": "bytes", "data": {"training": 5}})
        data_problems({}, found.extra)
        assert found.num_bytes >= 0
    return found


def inspected(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bounded():
        try:
            INSPECT([str(folder)])
        except SystemExit as stop:
            error = capsys.readouterr().err
            assert stop.code == 2 and error.startswith("error: ") and error.count("\n") == 1, error
    capsys.readouterr()


def without_checksum(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != "checksum"}


@fuzz(100)
@given(st.data())
def test_a_damaged_manifest(copied: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject) -> None:
    """Only white space may differ unseen: the file has a checksum of its own."""
    good = manifest_of(saved()).read_bytes()
    content = data.draw(damaged(good))
    manifest_of(copied).write_bytes(content)
    found = readable(copied)
    assert found is None or without_checksum(json.loads(content)) == without_checksum(json.loads(good))
    inspected(copied, capsys)


@fuzz(150)
@given(st.data(), JSON, st.booleans())
def test_a_manifest_with_another_entry(
    copied: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject, value: Any, remove: bool
) -> None:
    """Of checkpoints that are older than the checksum."""
    content = without_checksum(json.loads(manifest_of(saved()).read_text()))
    at: Any = content
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not at[key] or not isinstance(at[key], dict | list) or data.draw(st.booleans()):
            break
        at = at[key]
    if remove:
        del at[key]
    else:
        at[key] = value
    manifest_of(copied).write_text(json.dumps(content))
    readable(copied)
    inspected(copied, capsys)


# ---------------------------------------------------------------- arrays



@fuzz(25)
@given(st.data(), st.integers(0, 999))
def test_a_damaged_file(copied: Path, data: st.DataObject, number: int) -> None:
    """Any file of a step but its manifest: the state is the saved one to the bit, or is refused by name."""
    names = sorted(path.relative_to(saved()) for path in saved().rglob("*") if path.is_file() and path.name != "manifest.json")
    name = names[number % len(names)]
    good = (saved() / name).read_bytes()
    (copied / name).write_bytes(data.draw(damaged(good)))
    manifest_of(copied).write_bytes(manifest_of(saved()).read_bytes())
    before = listing(copied)
    try:
        with bounded():
            got, _ = restore(runs.setup_of(NAME), copied)
    except RestoreError as error:
        assert_one_line(str(error))
        there = [leaf for leaf in leaves() if leaf.startswith("params.") == (name.parts[0] == "params")]
        assert any(where in str(error) for where in (name.parts[0], *there))
    else:
        runs.same_bits({leaf: np.array(x) for leaf, x in flatten(got).items()}, leaves())
    finally:
        assert listing(copied) == before
        (copied / name).write_bytes(good)


# ---------------------------------------------------------------- metrics.jsonl
RECORDS = st.one_of(st.binary(max_size=20), JSON.map(lambda value: json.dumps(value).encode()),
                    st.builds(lambda step, loss: json.dumps({"step": step, "loss": loss}).encode(), JSON, JSON),
                    st.sampled_from([b"[" * 20_000, b'{"step": 3', b'{"step": 3, "loss": 1.5}', b'{"step": NaN}']))


@fuzz(150)
@given(st.lists(RECORDS, max_size=6), st.integers(0, 9))
def test_any_metrics(tmp_path: Path, lines: list[bytes], step: int) -> None:
    good = [json.dumps({"step": n, "loss": n / 2}).encode() for n in range(1, 10)]
    mixed = [line for pair in zip(good, [*lines, *[b""] * 9], strict=False) for line in pair]
    (tmp_path / METRICS).write_bytes(b"\n".join(mixed))
    with bounded():
        losses = logged_losses(tmp_path, step)
        keep_until(tmp_path / METRICS, step)
    assert all(isinstance(loss, float) for loss in losses) and {n / 2 for n in range(1, step + 1)} <= set(losses)
    kept = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert all(isinstance(record["step"], int) and record["step"] <= step for record in kept)
    assert all(json.loads(line) in kept for line in good[:step])


# ---------------------------------------------------------------- what was found
@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shutil.copytree(runs.start(), tmp_path / "run")


def largest(folder: Path) -> Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: os.truncate(path, 5000)], ids=["gone", "cut"])
def test_the_leaves_of_a_file_that_is_gone_or_cut_are_named(harm: Any, run: Path) -> None:
    """Those whose bytes are in the file are among them, and none that can be read."""
    path = largest(find_step(run) / "params")
    content = path.read_bytes()
    held = {name for name, x in leaves().items() if name.startswith("params.") and x.size > 99 and x.tobytes() in content}
    intact = {name for name, x in leaves().items() if name.startswith("params.") and x.size > 99} - held
    assert held  # how many leaves share a file is a matter of timing: at times all of them
    harm(path)
    with bounded(), pytest.raises(RestoreError) as error:
        restore(runs.setup_of(NAME), run)
    assert_one_line(str(error.value))
    named = str(error.value).partition("cannot be read (")[2].partition(":")[0]
    assert any(name in named for name in held) and not any(name in named for name in intact), str(error.value)


def test_a_damaged_index_is_named(run: Path) -> None:
    (find_step(run) / "training" / "manifest.ocdbt").write_bytes(b"x")
    with bounded(), pytest.raises(RestoreError, match=r"training cannot be read \(\w+: manifest.ocdbt: .*\): give another step$"):
        restore(runs.setup_of(NAME), run)


def test_a_flipped_bit_is_named_by_its_leaf(run: Path) -> None:
    name = "params.layers.mlp.up"
    pattern = leaves()[name].tobytes()
    [path] = [path for path in (find_step(run) / "params").rglob("*") if path.is_file() and pattern in path.read_bytes()]
    content = bytearray(path.read_bytes())
    content[content.find(pattern) + 100] ^= 4
    path.write_bytes(content)
    with pytest.raises(RestoreError, match=f"does not fit: {name} does not have its checksum: it is damaged"):
        restore(runs.setup_of(NAME), run)


def test_a_number_in_the_manifest_is_not_changed_unseen(run: Path) -> None:
    """A position in the data that is another one: the run would read other rows and say nothing."""
    path = manifest_of(find_step(run))
    path.write_text(path.read_text().replace('"rows": 0', '"rows": 8'))
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged \(it does not have its checksum\): give another step"):
        restore(runs.setup_of(NAME), run)


@pytest.mark.parametrize(("key", "value", "wrong"), [
    ("leaves", {}, "leaves"), ("leaves", {"w": {"shape": [-1], "dtype": "float32"}}, "the leaf w"),
    ("leaves", {"../x\n": {"shape": [2], "dtype": "bool"}}, r"the leaf ../x\\n"), ("rows", -1, "rows"), ("rows", 10**30, "rows"),
    ("step", True, "step"), ("validation_loss", "low", "validation_loss"), ("layout", {}, "layout.mesh"),
    ("layout", {"mesh": {}, "zero": 1, "chunks": 1}, "layout.schedule"), ("config", {"optim": 5}, "optim"),
    ("config", {"optim": {"lr": "fast"}}, "optim.lr"), ("config", {"train": {"steps": 1.5}}, "train.steps"), ("compute", None, "compute"),
])
def test_entries_of_wrong_types_are_named(key: str, value: Any, wrong: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = find_step(run)
    values = without_checksum(json.loads(manifest_of(folder).read_text()))
    manifest_of(folder).write_text(json.dumps(copy.deepcopy(values) | {key: value}))
    with pytest.raises(CheckpointError, match=rf"manifest.json is damaged \({wrong} is missing or of a wrong type\): give another step"):
        read_manifest(folder)
    inspected(folder, capsys)


def test_a_config_that_lacks_sections_had_their_defaults(run: Path) -> None:
    folder, setup = find_step(run), runs.setup_of(NAME)
    values = without_checksum(json.loads(manifest_of(folder).read_text()))
    manifest_of(folder).write_text(json.dumps(values | {"config": {}}))
    lines = problems(read_manifest(folder), setup.config, resolve_arch(setup.config.model), learning_rate)
    assert any("optim.lr 0.003 -> 0.001" in line for line in lines)


@pytest.mark.parametrize("name", ["²", "007", "-1", "9" * 30, "1.orbax-checkpoint-tmp", "x"])
def test_folders_that_are_no_steps(name: str, run: Path) -> None:
    shutil.copytree(find_step(run), run / "checkpoints" / name)
    assert complete_steps(run) == [0] and find_step(run).name == "0"
    assert [path.name for path in left_over(run)] == [name] * name.startswith("1.")


def test_a_run_that_is_a_loop_a_file_or_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    for name in ("loop", "file", "pipe", "a" * 5000):
        with bounded(), pytest.raises(CheckpointError, match="give the folder of a run"):
            restore(runs.setup_of(NAME), tmp_path / name)
