"""What may change when a run goes on, which steps a folder holds, and the signal that stops a run. No device is used."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from jaxmeg.arch import resolve_arch
from jaxmeg.checkpoint.manifest import (
    CheckpointError,
    Leaf,
    Manifest,
    complete_steps,
    find_step,
    leaf_problems,
    left_over,
    read_manifest,
    steps_to_keep,
)
from jaxmeg.checkpoint.resume import arch_changes, config_changes, problems
from jaxmeg.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LayoutConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    RecordConfig,
    TrainConfig,
)
from jaxmeg.optim.build import learning_rate
from jaxmeg.processes.stop import StopSignal

ROOT = Path(__file__).parents[1]
SAVED = Config(optim=OptimConfig(lr=1e-3, warmup=10, final_lr_ratio=0.0), train=TrainConfig(steps=100))


def manifest(config: Config = SAVED, step: int = 50, **values: Any) -> Manifest:
    fields: dict[str, Any] = {
        "step": step, "updates": step, "rows": 32 * step, "validation_loss": None, "compute": "fp32", "extra": {},
        "arch": asdict(resolve_arch(config.model)), "config": json.loads(json.dumps(asdict(config))),
        "layout": {"mesh": {"pp": 1, "dp": 4}, "zero": 1, "schedule": None, "chunks": 1},
        "leaves": {"step": Leaf(shape=(), dtype="int32"), "params.w": Leaf(shape=(2, 3), dtype="float32")}}
    return Manifest(**(fields | values))


def found(new: Config, saved: Manifest | None = None) -> list[str]:
    return problems(saved or manifest(), new, resolve_arch(new.model), learning_rate)


def changed(**sections: Any) -> Config:
    return replace(SAVED, **sections)


# ---------------------------------------------------------------- what needs a flag
def cosine(update: int, steps: int) -> float:
    return 1e-3 * 0.5 * (1 + math.cos(math.pi * (update - 10) / (steps - 10)))


def test_more_steps_change_the_learning_rate_and_say_so() -> None:
    new = changed(train=TrainConfig(steps=200))
    assert f"{cosine(50, 100):.3e} {cosine(50, 200):.3e}" == "5.868e-04 8.946e-04"
    assert found(new) == ["resume: train.steps 100 -> 200 changes the learning rate at update 50 from 5.868e-4 to 8.946e-4: "
                          "add --checkpoint.allow_changes true"]
    assert found(replace(new, checkpoint=CheckpointConfig(allow_changes=True))) == []


def test_the_learning_rate_counts_updates_not_batches() -> None:
    skipped = manifest(step=60, updates=50)
    (line,) = found(changed(train=TrainConfig(steps=200)), skipped)
    assert "at update 50 from 5.868e-4" in line


def test_several_keys_are_one_line() -> None:
    new = changed(train=TrainConfig(steps=200), optim=replace(SAVED.optim, lr=2e-3))
    (line,) = found(new)
    assert "optim.lr 0.001 -> 0.002, train.steps 100 -> 200 change the learning rate at update 50 from 5.868e-4 to 1.789e-3:" in line


@pytest.mark.parametrize(("schedule", "extra", "first"), [
    ("constant", {}, None),  # a longer run at a constant rate is just longer
    ("wsd", {"wsd_decay": 0.2}, 81),  # the decay of the last fifth begins after update 80
])
def test_a_longer_run_is_free_where_the_learning_rate_stays(schedule: str, extra: dict[str, Any], first: int | None) -> None:
    old = replace(SAVED, optim=OptimConfig(lr=1e-3, warmup=10, schedule=schedule, **extra))
    lines = found(replace(old, train=TrainConfig(steps=200)), manifest(old))
    assert (lines == []) if first is None else (f"at update {first} from" in lines[0])


FREE = [
    {"mesh": MeshConfig(tp=4, pp=2), "layout": LayoutConfig(zero=3, remat="full")},
    {"pipeline": PipelineConfig(schedule="interleaved", chunks=2, microbatch=1), "record": RecordConfig(tensorboard=False)},
    {"train": TrainConfig(steps=100, eval_every=7, log_every=1, out="runs/other", sample_tokens=0)},
    {"data": DataConfig(prefetch=9), "checkpoint": CheckpointConfig(every=5, keep=9), "emulate": 8},
    {"model": ModelConfig(num_layers=8)},  # written out, it is the preset's own number
]
GUARDED = [
    ({"data": DataConfig(global_batch=64)}, "data.global_batch 32 -> 64 changes the rows that are read"),
    ({"data": DataConfig(train={"a.txt": 1.0})}, "data.train null -> {'a.txt': 1.0} changes the rows that are read"),
    ({"data": DataConfig(validation="held-out.txt")}, "data.validation null -> held-out.txt changes the rows that are read"),
    ({"data": DataConfig(tokenizer="t.json")}, "data.tokenizer bytes -> t.json changes the rows that are read"),
    ({"train": TrainConfig(steps=100, seed=1)}, "train.seed 0 -> 1 changes the order of the rows and the dropout masks"),
    ({"train": TrainConfig(steps=100, dropout=0.1)}, "train.dropout 0.0 -> 0.1 changes the loss"),
    ({"optim": replace(SAVED.optim, name="lion")}, "optim.name adamw -> lion changes the updates"),
    ({"optim": replace(SAVED.optim, weight_decay=0.0)}, "optim.weight_decay 0.1 -> 0.0 changes the updates"),
    ({"precision": replace(SAVED.precision, compute="bf16")}, "precision.compute auto -> bf16 changes the number formats"),
    ({"model": ModelConfig(loss="mine:loss")}, "model.loss null -> mine:loss changes the loss"),
]


@pytest.mark.parametrize("sections", FREE)
def test_layout_and_reports_may_change(sections: dict[str, Any]) -> None:
    assert found(changed(**sections)) == []


@pytest.mark.parametrize(("sections", "line"), GUARDED, ids=[line.split(" ")[0] for _, line in GUARDED])
def test_what_changes_the_run_needs_the_flag(sections: dict[str, Any], line: str) -> None:
    assert found(changed(**sections)) == [f"resume: {line}: add --checkpoint.allow_changes true"]
    assert found(changed(**sections, checkpoint=CheckpointConfig(allow_changes=True))) == []


def test_a_key_that_no_table_names_is_guarded() -> None:
    saved = manifest()
    saved.config["train"]["steps_of_a_kind"] = 1

    @dataclass(frozen=True, kw_only=True)
    class NewTrain(TrainConfig):
        steps_of_a_kind: int = 2

    assert found(changed(train=NewTrain(steps=100)), saved) == [
        "resume: train.steps_of_a_kind 1 -> 2 changes the run: add --checkpoint.allow_changes true"]


@pytest.mark.parametrize("flag", [False, True])
def test_the_model_cannot_change(flag: bool) -> None:
    new = changed(model=ModelConfig(num_layers=5, rope_theta=5e5), checkpoint=CheckpointConfig(allow_changes=flag))
    assert found(new) == [f"resume: model.{change} makes another model: leave it out, or start a new run with --checkpoint.init_from"
                          for change in ("num_layers 8 -> 5", "rope_theta 10000.0 -> 500000.0")]
    assert [str(change) for change in arch_changes(manifest().arch, resolve_arch(new.model))] == [
        "model.num_layers 8 -> 5", "model.rope_theta 10000.0 -> 500000.0"]


def test_a_key_that_was_not_there_had_its_default() -> None:
    """A config saved by an older version, and one with a key that is gone; a model from before there were windows."""
    older = {name: value for name, value in manifest().arch.items() if name not in ("sliding_window", "head_dim")}
    assert arch_changes(older, resolve_arch(SAVED.model)) == []
    windowed = resolve_arch(ModelConfig(**asdict(SAVED.model) | {"sliding_window": 64}))
    assert [str(change) for change in arch_changes(older, windowed)] == ["model.sliding_window null -> 64"]
    saved = manifest().config
    del saved["optim"]["final_lr_ratio"], saved["record"]
    saved["train"]["forgotten"] = 1
    assert [str(change) for change in config_changes(saved, asdict(SAVED))] == ["optim.final_lr_ratio 0.1 -> 0.0"]
    assert "change the learning rate" not in str(found(SAVED, manifest()))


# ---------------------------------------------------------------- what a run folder holds
def put(run: Path, step: int, **values: Any) -> Path:
    folder = run / "checkpoints" / str(step) / "manifest"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(manifest(step=step, **values).to_json()))
    return folder.parent


def test_steps_are_the_complete_ones_in_order(tmp_path: Path) -> None:
    for step in (100, 20, 3):
        put(tmp_path, step)
    for name in ("40", "5.orbax-checkpoint-tmp", "7.removing", "notes"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert complete_steps(tmp_path) == [3, 20, 100]
    assert [path.name for path in left_over(tmp_path)] == ["40", "5.orbax-checkpoint-tmp", "7.removing"]
    assert find_step(tmp_path) == find_step(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "100"
    assert find_step(tmp_path / "checkpoints" / "3").name == "3"
    assert read_manifest(find_step(tmp_path)) == manifest(step=100)


def test_the_latest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, loss in {10: 3.0, 20: 1.0, 30: 2.0, 40: None, 50: math.nan, 60: 2.5, 70: 4.0}.items():
        put(tmp_path, step, validation_loss=loss)
    assert steps_to_keep(tmp_path, 2, 0) == {60, 70}
    assert steps_to_keep(tmp_path, 2, 2) == {20, 30, 60, 70}
    assert steps_to_keep(tmp_path, 1, 9) == {10, 20, 30, 60, 70}


@pytest.mark.parametrize(("path", "line"), [
    ("nowhere", "nowhere does not exist: give the folder of a run that saved one"),
    ("empty", "empty holds no complete checkpoint: give the folder of a run that saved one"),
    ("run/checkpoints/4", "run/checkpoints/4 is not a complete checkpoint: the steps this run has are 3, 20"),
])
def test_a_path_without_a_checkpoint_is_one_line(tmp_path: Path, path: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "run", 3), put(tmp_path / "run", 20)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as error:
        find_step(Path(path))
    assert str(error.value) == line


@pytest.mark.parametrize(("text", "line"), [
    ("{", "is damaged (JSONDecodeError"), ("{}", "is damaged (KeyError: 'format')"), ('{"format": 1}', "is damaged (KeyError: 'leaves')"),
    ('{"format": 9}', "has format 9, and this version reads 1: use the version that wrote it"),
    ('{"format": 1, "leaves": {}, "new": 1}', "is damaged (TypeError"),
])
def test_a_damaged_manifest_is_one_line(tmp_path: Path, text: str, line: str) -> None:
    folder = put(tmp_path, 3)
    (folder / "manifest" / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError) as error:
        read_manifest(folder)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_leaves_are_compared_by_name_shape_and_dtype() -> None:
    stored = {"a": Leaf(shape=(5, 4), dtype="float32"), "b": Leaf(shape=(3,), dtype="int32"), "old": Leaf(shape=(), dtype="int32")}
    wanted = {"a": Leaf(shape=(4, 4), dtype="float32"), "b": Leaf(shape=(3,), dtype="float32"), "new": Leaf(shape=(), dtype="int32")}
    assert leaf_problems(stored, wanted) == ["new is missing", "old is unexpected", "a is float32 [5, 4] and should be float32 [4, 4]",
                                             "b is int32 [3] and should be float32 [3]"]
    assert leaf_problems(stored, stored) == []


# ---------------------------------------------------------------- inspect
def inspect(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", str(ROOT / "scripts" / "inspect_checkpoint.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_inspect_lists_steps_leaves_and_config(tmp_path: Path) -> None:
    put(tmp_path / "run", 50, validation_loss=1.25)
    put(tmp_path / "run", 100)
    (tmp_path / "run" / "checkpoints" / "150.orbax-checkpoint-tmp").mkdir()
    put(tmp_path / "other", 7, config=changed(optim=OptimConfig(lr=3e-4, warmup=10, final_lr_ratio=0.0)))
    done = inspect(tmp_path / "run")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in ("50 1,600 1.2500 0.0 dp=4, zero 1, fp32", "100 3,200 - 0.0 dp=4, zero 1, fp32", "params.w float32 [2, 3] 24", "all 28",
                 "leaves of step 100", "optim.lr 0.003 -> 0.001", "train.steps 180 -> 100"):
        assert line in lines, line
    assert "150.orbax-checkpoint-tmp" in done.stdout
    assert not [line for line in done.stderr.splitlines() if line.split("|")[-1].strip() in ("jax", "orbax")]  # needs no device
    against = inspect(tmp_path / "run" / "checkpoints" / "50", "--against", tmp_path / "other")
    assert "leaves of step 50" in against.stdout and against.stdout.splitlines()[-1] == "  optim.lr 0.0003 -> 0.001"
    wrong = inspect(tmp_path / "nothing")
    assert wrong.returncode == 2 and "nothing does not exist" in wrong.stderr and "Traceback" not in wrong.stderr


# ---------------------------------------------------------------- signals
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_acts(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    acted: list[int] = []
    before = signal.signal(number, lambda *_: acted.append(1))
    try:
        with StopSignal() as stop:
            assert not stop.requested(1)
            os.kill(os.getpid(), number)
            assert stop.requested(2) and stop.name == number.name and not acted
            assert f"{number.name}: the run saves and stops after this step" in capfd.readouterr().err
            os.kill(os.getpid(), number)
            assert acted == [1] and stop.requested(3)
    finally:
        signal.signal(number, before)


def test_without_a_signal_the_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopSignal() as stop:
        assert signal.getsignal(signal.SIGTERM) != before[0]
        assert not stop.requested(1)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
