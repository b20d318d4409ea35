"""The run record: folder, JSON lines and TensorBoard events read back, metrics one step late, seconds that add up, speed."""

import dataclasses
import json
import random
import re
import struct
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx

from jaxmeg.arch import PRESETS
from jaxmeg.config import Config, DataConfig, MeshConfig, ModelConfig, PipelineConfig
from jaxmeg.models.own import OwnModel
from jaxmeg.record.folder import git_state, new_folder, reopen_folder
from jaxmeg.record.late import Late
from jaxmeg.record.log import Log
from jaxmeg.record.speed import Speed, speed_of
from jaxmeg.setup import build

CONFIG = Config(model=ModelConfig(preset="toy"), mesh=MeshConfig(pp=2, dp=1, tp=2), pipeline=PipelineConfig(microbatch=8))


# ------------------------------------------------------------------ the folder
@pytest.fixture(scope="module")
def setup():
    return build(CONFIG, jax.devices()[:4])


def test_a_new_folder_holds_config_sizes_and_versions(setup, tmp_path):
    folder = new_folder(tmp_path / "runs" / "a", setup)
    assert folder == tmp_path / "runs" / "a"
    assert yaml.safe_load((folder / "config.yaml").read_text()) == json.loads(json.dumps(dataclasses.asdict(CONFIG)))
    resolved = json.loads((folder / "resolved.json").read_text())
    assert resolved["mesh"] == {"pp": 2, "rep": 1, "dp": 1, "ep": 1, "cp": 1, "tp": 2}
    assert (resolved["num_microbatches"], resolved["schedule"], resolved["layer_split"]) == (4, "1f1b", [2, 2])
    assert (resolved["num_params"], resolved["compute"], resolved["bubble"]) == (172_608, "fp32", 0.2)  # (P-1)/(P-1+M)
    versions = json.loads((folder / "versions.json").read_text())
    assert versions["packages"]["jax"] == jax.__version__ and versions["packages"]["numpy"] == np.__version__
    assert versions["devices"] == {"cpu": 4} and versions["platform"] == "cpu" and versions["environment"]["JAX_PLATFORMS"] == "cpu"
    assert versions["started"].endswith("+00:00") and versions["command"]
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "resolved.json", "versions.json"]


def test_a_schedule_of_the_users_is_written_down(tmp_path):
    orders = ["F0 F1 F2 F3 B0 B1 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]
    (tmp_path / "mine.csv").write_text("".join(f"rank {rank}: {order}\n" for rank, order in enumerate(orders)))
    pipeline = PipelineConfig(schedule=str(tmp_path / "mine.csv"), microbatch=8)
    setup = build(dataclasses.replace(CONFIG, pipeline=pipeline), jax.devices()[:4])
    record = json.loads((new_folder(tmp_path / "run", setup) / "resolved.json").read_text())
    assert record["user_schedule"] == orders and record["num_microbatches"] == 4


def test_sizes_of_a_module_of_the_users(tmp_path):
    config = Config(mesh=MeshConfig(dp=2), data=DataConfig(global_batch=8))
    setup = build(config, jax.devices()[:2], own=OwnModel(nnx.Linear(3, 5, rngs=nnx.Rngs(0))))
    record = json.loads((new_folder(tmp_path / "run", setup) / "resolved.json").read_text())
    assert record == {"num_devices": 2, "mesh": {"pp": 1, "rep": 1, "dp": 2, "ep": 1, "cp": 1, "tp": 1}, "local_rows": 4, "microbatch": 4,
                      "num_microbatches": 1, "compute": "fp32", "num_params": 3 * 5 + 5}
    assert speed_of(setup).rates(2.0) == {"samples_per_s": 4.0}


def test_a_folder_that_holds_a_run_is_left_alone(setup, tmp_path):
    names = [new_folder(tmp_path / "a", setup).name for _ in range(3)]
    assert names == ["a", "a-2", "a-3"]
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.txt").write_text("mine")
    assert new_folder(tmp_path / "b", setup) == tmp_path / "b"  # a folder without a run is used, with what is in it


def test_going_on_with_a_run_keeps_the_files_of_its_earlier_starts(setup, tmp_path):
    folder = new_folder(tmp_path / "a", setup)
    first = (folder / "config.yaml").read_text()
    longer = dataclasses.replace(setup, config=dataclasses.replace(CONFIG, emulate=4))
    reopen_folder(folder, longer)
    reopen_folder(folder, longer)
    assert (folder / "config.1.yaml").read_text() == first
    assert yaml.safe_load((folder / "config.yaml").read_text())["emulate"] == 4
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        f"{stem}{number}.{end}" for stem, end in (("config", "yaml"), ("resolved", "json"), ("versions", "json"))
        for number in ("", ".1", ".2"))


def test_the_commit_of_a_checkout_and_whether_it_was_changed(tmp_path):
    def git(*arguments: str) -> str:
        name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(["git", "-C", str(tmp_path), *name, *arguments], check=True, capture_output=True, text=True).stdout.strip()

    assert git_state(tmp_path) is None
    git("init")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-m", "first")
    (tmp_path / "not tracked").write_text("1")
    assert git_state(tmp_path) == {"commit": git("log", "-1", "--format=%H"), "dirty": False}
    (tmp_path / "a").write_text("2")
    assert git_state(tmp_path) == {"commit": git("log", "-1", "--format=%H"), "dirty": True}


# ------------------------------------------------------------------ a reader of event files that shares nothing with the writer
def crc32c(data: bytes) -> int:
    """Castagnoli's, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def tfrecords(data: bytes) -> list[bytes]:
    records = []
    while data:
        length, crc = struct.unpack("<QI", data[:12])
        body, end = data[12 : 12 + length], data[12 + length : 16 + length]
        assert (crc, struct.unpack("<I", end)[0]) == (masked(data[:8]), masked(body))
        records.append(body)
        data = data[16 + length :]
    return records


def message(data: bytes) -> dict[int, list[Any]]:
    """A protobuf message: field number -> values; bytes for strings and messages."""
    at, fields = 0, {}

    def varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            value |= (data[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 128:
                return value

    while at < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            value: Any = varint()
        else:
            size = varint() if kind == 2 else {1: 8, 5: 4}[kind]
            value, at = data[at : at + size], at + size
            value = value if kind == 2 else struct.unpack("<d" if kind == 1 else "<f", value)[0]
        fields.setdefault(number, []).append(value)
    return fields


def events(folder: Path) -> dict[str, dict[int, float]]:
    """tag -> step -> value as TensorBoard shows them: a session start hides what earlier files hold from its step on."""
    series: dict[str, dict[int, float]] = {}
    for path in sorted(folder.iterdir()):
        for record in tfrecords(path.read_bytes()):
            event = message(record)
            step = event.get(2, [0])[0]
            if 7 in event:  # SessionLog
                assert message(event[7][0])[1] == [1]  # START
                series = {tag: {s: v for s, v in points.items() if s < step} for tag, points in series.items()}
            for summary in event.get(5, []):
                for value in message(summary)[1]:
                    fields = message(value)
                    series.setdefault(fields[1][0].decode(), {})[step] = fields[2][0]
    return series


def lines(folder: Path) -> list[dict[str, Any]]:
    def constant(name: str):
        raise AssertionError(f"{name} is no JSON")
    return [json.loads(line, parse_constant=constant) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ------------------------------------------------------------------ the series
def test_records_are_lines_and_events(tmp_path):
    with Log(tmp_path) as log:
        log.write({"step": 1, "loss": 5.5, "lr": 0.25, "mfu": 0.5, "applied": True, "memory_peak": [3, 2**40], "memory_limit": [None, 8]})
        assert lines(tmp_path)[0]["loss"] == 5.5  # on disk before the log is closed
        log.write({"step": 2, "loss": float("nan"), "grad_norm": float("inf"), "data_wait_s": 0.125})
        log.write({"step": 2, "validation_loss": 4.5, "validation_tokens": 320})
    assert lines(tmp_path) == [
        {"step": 1, "loss": 5.5, "lr": 0.25, "mfu": 0.5, "applied": True, "memory_peak": [3, 2**40], "memory_limit": [None, 8]},
        {"step": 2, "loss": None, "grad_norm": None, "data_wait_s": 0.125},
        {"step": 2, "validation_loss": 4.5, "validation_tokens": 320}]
    series = events(tmp_path / "tensorboard")
    assert np.isnan(series["train/loss"].pop(2))
    assert series == {
        "train/loss": {1: 5.5}, "train/lr": {1: 0.25}, "speed/mfu": {1: 0.5}, "memory/peak/0": {1: 3.0}, "memory/peak/1": {1: 2.0**40},
        "memory/limit/1": {1: 8.0}, "train/grad_norm": {2: float("inf")}, "time/data_wait_s": {2: 0.125},
        "validation/loss": {2: 4.5}, "validation/tokens": {2: 320.0}}


def test_resume_puts_aside_what_came_after_the_checkpoint(tmp_path):
    with Log(tmp_path) as log:
        for step in (1, 2, 3, 4, 5):
            log.write({"step": step, "loss": float(step)})
        log.write({"step": 5, "validation_loss": 9.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # the crash came while this was written
    with Log(tmp_path, resume_step=3) as log:
        assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
        log.write({"step": 4, "loss": 40.0})
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    series = events(tmp_path / "tensorboard")
    assert series["train/loss"] == {1: 1.0, 2: 2.0, 3: 3.0, 4: 40.0} and series["validation/loss"] == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.1.jsonl", "metrics.jsonl", "tensorboard"]
    assert [json.loads(line).get("step") for line in (tmp_path / "metrics.1.jsonl").read_text().splitlines()[:-1]] == [4, 5, 5]


def test_resume_into_a_folder_without_a_series_starts_one(tmp_path):
    with Log(tmp_path, resume_step=3, tensorboard=False) as log:
        log.write({"step": 4, "loss": 1.0})
    assert lines(tmp_path) == [{"step": 4, "loss": 1.0}] and not (tmp_path / "tensorboard").exists()


def test_one_process_writes(tmp_path):
    with Log(tmp_path, enabled=False) as log:
        log.write({"step": 1, "loss": 1.0})
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ one step late
class Value:
    """A metric on a device that tells when it is asked for."""

    def __init__(self, name: str, told: list[str]):
        self.name, self.told = name, told

    def copy_to_host_async(self) -> None:
        self.told.append(f"copy {self.name}")

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        self.told.append(f"wait {self.name}")
        return np.asarray(self.name)


def test_a_step_is_waited_for_once_the_next_is_dispatched():
    told: list[str] = []
    late = Late()
    steps = []
    for n in (1, 2, 3):
        told.append(f"dispatch {n}")
        steps += [arrival.step for arrival in late.push(n, {"loss": Value(f"{n}", told)})]
    told.append("end")
    steps += [arrival.step for arrival in late.flush()]
    assert steps == [1, 2, 3] and not late.flush()
    told = list(dict.fromkeys(told))  # device_get asks for a copy again
    assert told == ["dispatch 1", "copy 1", "dispatch 2", "copy 2", "wait 1", "dispatch 3", "copy 3", "wait 2", "end", "wait 3"]


def test_a_flush_in_the_middle_loses_and_repeats_nothing():
    late, steps = Late(), []
    for n in range(1, 7):
        steps += [arrival.step for arrival in late.push(n, Value(str(n), []))]
        if n in (2, 3):
            steps += [arrival.step for arrival in late.flush()]
            assert steps[-1] == n
    assert steps + [arrival.step for arrival in late.flush()] == [1, 2, 3, 4, 5, 6]


def test_metrics_arrive_as_host_values_and_move_nothing_unasked():
    add = jax.jit(lambda x: {"loss": x + 1, "leaves": jnp.stack([x, 2 * x])})
    late, x = Late(), jax.device_put(np.float32(1))
    add(x)
    with jax.transfer_guard("disallow"):
        first, second = add(x), add(x)
        assert late.push(1, first) == []
        (arrival,) = late.push(2, second)
    assert isinstance(arrival.metrics["loss"], np.ndarray | np.generic)
    assert float(arrival.metrics["loss"]) == 2 and arrival.metrics["leaves"].tolist() == [1, 2]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_where_the_seconds_of_a_step_went():
    """The device takes 4 s a step; the loop waits 1 s for the rows of step 2, and evaluates for 7 s before step 3."""
    clock, told = Clock(), []
    late = Late(clock)

    class Done(Value):
        """A metric that is ready at a given time."""

        def __array__(self, dtype=None, copy=None) -> np.ndarray:
            clock.now = max(clock.now, float(self.name))
            return super().__array__()

    arrivals = late.push(1, Done("104", told))
    with late.apart("data_wait"):
        clock.now += 1
    arrivals += late.push(2, Done("108", told))  # waits for step 1 until 104
    arrivals += late.flush()
    with late.apart("evaluate"):
        clock.now += 7
    arrivals += late.push(3, Done("119", told))
    arrivals += late.flush()
    assert [tuple(a.seconds) for a in arrivals] == [(3, 0, 0, 0, 0), (4, 1, 0, 0, 0), (4, 0, 7, 0, 0)]  # the wait hid work of step 1
    assert arrivals[1].seconds.training == 5


@pytest.mark.parametrize("seed", range(20))
def test_every_second_is_counted_once(seed):
    rng, clock = random.Random(seed), Clock()
    late, arrivals, apart = Late(clock), [], dict.fromkeys(("data_wait", "evaluate", "save", "profile"), 0.0)
    for n in range(1, 30):
        clock.now += rng.random()
        for what in apart:
            if rng.random() < 0.5:
                spent = rng.random()
                with late.apart(what):
                    clock.now += spent
                apart[what] += spent
        arrivals += late.push(n, Value("", []))
        clock.now += rng.random()
        if rng.random() < 0.3:
            arrivals += late.flush()
    arrivals += late.flush()
    assert [a.step for a in arrivals] == list(range(1, 30))
    for what, spent in apart.items():
        assert sum(getattr(a.seconds, what) for a in arrivals) == pytest.approx(spent)
    assert sum(sum(a.seconds) for a in arrivals) == pytest.approx(clock.now - 100)


# ------------------------------------------------------------------ speed
def test_model_flops_of_the_toy_model():
    """P81: 933,888 of weights and 196,608 of causal attention; a layout changes neither."""
    speed = Speed(arch=PRESETS["toy"], seq_len=128, rows=32, num_devices=8, peak=989.0)
    rates = speed.rates(0.25)
    assert rates == pytest.approx({"tokens_per_s": 16_384, "samples_per_s": 128, "mfu": 1_130_496 * 16_384 / (8 * 989e12)})
    text = speed.formula()
    assert [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]{5,}", text)] == [1_130_496, 933_888, 196_608]
    assert "/ (8 x 989 TFLOP/s" in text and "(causal: half)" in text and "no recompute" in text and "lookup not" in text


def test_a_tied_table_counts_as_a_head():
    tied = dataclasses.replace(PRESETS["toy"], tied=True)
    rates = [Speed(arch=arch, seq_len=128, rows=1, num_devices=1, peak=1.0).rates(1.0)["mfu"] for arch in (PRESETS["toy"], tied)]
    assert rates[0] == rates[1] == pytest.approx(1_130_496 * 128 / 1e12)


def test_no_mfu_without_a_known_peak():
    speed = Speed(arch=PRESETS["toy"], seq_len=128, rows=32, num_devices=1, peak=None)
    assert set(speed.rates(1.0)) == {"tokens_per_s", "samples_per_s"}
    own = dataclasses.replace(speed, arch=None, peak=989.0)  # a module of the user's
    assert own.rates(0.5) == {"samples_per_s": 64.0} and own.formula().startswith("no MFU: ")
    assert speed.formula().startswith("no MFU: ") and "1,130,496" in speed.formula()
