"""How a run starts, and what keeps it from starting: a folder that can't be written, a checkpoint whose data has changed.

One short run is made and then gone on with in ways that must be refused; what is refused changes no file.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
import runs

from jaxmeg import start
from jaxmeg import train as train_module
from jaxmeg.checkpoint.restore import RestoreError, restore
from jaxmeg.checkpoint.resume import data_problems
from jaxmeg.cli import ConfigError
from jaxmeg.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    PrecisionConfig,
    RecordConfig,
    TrainConfig,
)
from jaxmeg.state import init_state
from jaxmeg.train import run

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
BASE = Config(model=ModelConfig(preset="toy", num_layers=1), mesh=MeshConfig(dp=1), record=RecordConfig(tensorboard=False),
              data=DataConfig(seq_len=16, global_batch=4, validation_fraction=0.0),
              train=TrainConfig(steps=6, stop_after=2, eval_every=0, sample_tokens=0))


def with_parts(config: Config, **parts: dict[str, Any]) -> Config:
    return replace(config, **{name: replace(getattr(config, name), **values) for name, values in parts.items()})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> tuple[Config, Path]:
    """A run of 6 updates that stopped after 2, and the text it reads."""
    folder = tmp_path_factory.mktemp("start")
    text = folder / "text.txt"
    text.write_text(TEXT)
    config = with_parts(BASE, data={"train": str(text)}, train={"out": str(folder / "run")})
    run(config, jax.devices()[:1])
    return with_parts(config, checkpoint={"resume": str(folder / "run")}, train={"stop_after": None}), folder


@pytest.fixture
def copy(stopped, tmp_path) -> tuple[Config, Path]:
    """The same as a copy of the test's own."""
    config, folder = stopped
    shutil.copytree(folder / "run", tmp_path / "run")
    return with_parts(config, checkpoint={"resume": str(tmp_path / "run")}), tmp_path / "run"


def files(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(config: Config, match: str, folder: Path) -> None:
    before = files(folder)
    with pytest.raises(ConfigError, match=match):
        run(config, jax.devices()[:1])
    assert files(folder) == before


@pytest.mark.parametrize(("out", "line"), [
    ("file", r"train\.out=.*file cannot be written \(Not a directory\): give another --out"),
    ("file/below/it", r"train\.out=.*below/it cannot be written \(.*file: Not a directory\)"),
])
def test_a_folder_that_cannot_be_written_is_said_before_anything_is_read(tmp_path, out, line, monkeypatch):
    (tmp_path / "file").write_text("not a run")
    monkeypatch.setattr(train_module, "_make_task", lambda *_: pytest.fail("data was read"))
    refused(with_parts(BASE, train={"out": str(tmp_path / out)}), line, tmp_path)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, monkeypatch):
    """What no look beforehand can tell: the system refuses when the folder is made."""
    def refuse(*_: object) -> Path:
        raise OSError(30, "Read-only file system", str(tmp_path / "run"))

    monkeypatch.setattr(start, "new_folder", refuse)
    refused(with_parts(BASE, train={"out": str(tmp_path / "run")}), r"\(Read-only file system\): give another --out", tmp_path)


def test_a_program_that_cannot_be_compiled_leaves_no_trace(copy, tmp_path, monkeypatch):
    def broken(*_: object) -> None:
        raise ConfigError(["this does not compile"])

    monkeypatch.setattr(train_module, "_compile", broken)
    refused(with_parts(BASE, train={"out": str(tmp_path / "new")}), "does not compile", tmp_path)
    refused(copy[0], "does not compile", tmp_path)


def test_other_data_at_the_same_path_is_refused(copy, stopped):
    config, folder = copy
    text = stopped[1] / "text.txt"
    text.write_text(TEXT + "and one sentence more.")
    try:
        refused(config, r"resume: .*text\.txt is not the data that the run began with: tokens 1,800 -> 1,822: put the old", folder)
        result = run(with_parts(config, checkpoint={"allow_changes": True}), jax.devices()[:1])
        assert result is not None and len(result.losses) == 4
    finally:
        text.write_text(TEXT)


def test_what_counts_as_other_data():
    def extra(tokens: int, tokenizer: str = "a", name: str = "x") -> dict[str, Any]:
        return {"tokenizer": tokenizer, "data": {"training": {"sources": [{"name": name, "tokens": tokens, "rows": 3, "read": tokens}]}}}

    assert data_problems(extra(5), extra(5)) == []
    assert data_problems(extra(5), extra(6, name="y")) == []  # another path is a change of the config
    assert len(data_problems(extra(5), extra(6))) == 1
    [line] = data_problems(extra(5), extra(5, tokenizer="b"))
    assert line.startswith("resume: data.tokenizer is not the tokenizer that the run began with")
    assert data_problems({"data": {"training": 8}}, {"data": {"training": 9}})[0].startswith("resume: data.source is not the data")
    assert data_problems({}, extra(5, tokenizer="a"))[0].startswith("resume: data.tokenizer")


@pytest.mark.parametrize(("parts", "line"), [
    ({"train": {"stop_after": 2}}, r"train\.stop_after=2: .* has done 2 updates already: use 3 or more"),
    ({"record": {"profile": "1:3"}}, r"record\.profile=1:3: .* has done 2 updates already: profile later ones"),
    ({"train": {"steps": 2}, "checkpoint": {"allow_changes": True}}, r"train\.steps=2: .* has done 2 updates already: use more steps"),
])
def test_what_lies_behind_the_checkpoint_is_refused(copy, parts, line):
    config, folder = copy
    parts = {**parts, "checkpoint": {**parts.get("checkpoint", {}), "resume": str(folder)}}
    refused(with_parts(config, **parts), line, folder)


def test_auto_is_not_another_format_on_another_chip(tmp_path):
    setup = runs.make_setup("one device", precision=PrecisionConfig(compute="auto", matmul="highest"))
    assert setup.compute == "fp32"
    folder = runs.write(setup, init_state(setup, 0), tmp_path / "run", 1)
    elsewhere = replace(setup, compute="bf16")
    with pytest.raises(RestoreError, match=r"precision\.compute=auto is bf16 here and was fp32: use --precision fp32, or add"):
        restore(elsewhere, folder)
    allowed = replace(elsewhere.config, checkpoint=CheckpointConfig(allow_changes=True))
    assert int(restore(replace(elsewhere, config=allowed), folder)[0].step) == 0
