"""Guards of a running run: copies that differ are named with leaf and axis, jumps of the loss with their rows; nothing else is.

Faults are put into the arrays of single devices, or into what a compiled step returns.
"""

import functools
import importlib.util
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import runs
from flax import nnx

from jaxmeg import train as train_module
from jaxmeg.checkpoint.canonical import flatten, unflatten
from jaxmeg.checkpoint.manifest import complete_steps
from jaxmeg.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    GuardConfig,
    LayoutConfig,
    MeshConfig,
    ModelConfig,
    RecordConfig,
    TrainConfig,
)
from jaxmeg.engine import own_setup, own_state
from jaxmeg.guard.replicas import Replicas
from jaxmeg.guard.spikes import Spikes
from jaxmeg.journal import RunError
from jaxmeg.state import init_state
from jaxmeg.task import text_task
from jaxmeg.train import run


# ------------------------------------------------------------------ copies on several devices
def with_fault(state: Any, path: str, device: int, change: Any) -> Any:
    """The state with `change` applied to the copy of one leaf that one device holds."""
    leaves = flatten(state)
    x = leaves[path]
    shards = [shard.data for shard in x.addressable_shards]
    [at] = [i for i, shard in enumerate(shards) if shard.device.id == device]
    shards[at] = jax.device_put(change(np.array(shards[at])).astype(x.dtype), shards[at].device)
    return unflatten(state, leaves | {path: jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)})


@functools.cache
def start(layout: str) -> tuple[Any, Replicas]:
    """A fresh state, never changed, and what looks at it: one program a layout."""
    setup = runs.setup_of(layout)
    return init_state(setup, 0), Replicas(setup)


def found_in(replicas: Replicas, state: Any) -> str | None:
    replicas.look(7, state)
    found = replicas.late()
    assert replicas.late() is None  # said once
    assert found is None or found.step == 7
    return found and found.text


def flip_last_bit(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32).copy()
    bits.flat[-1] ^= 1
    return bits.view(x.dtype)


def swap_first_two(x: np.ndarray) -> np.ndarray:
    assert x.flat[0] != x.flat[1]
    x.flat[0], x.flat[1] = x.flat[1], x.flat[0]
    return x


def scale(x: np.ndarray) -> np.ndarray:
    return 1.001 * x


HEAD, QUERY, NORM = "params.head.tokens", "params.layers.attention.query", "params.layers.attention_norm.weight"
FAULTS = [  # layout, leaf, device, fault, what is said
    ("dp=8", QUERY, 3, scale, f"{QUERY} over dp (8 copies, wrong on cpu:3 of process 0)"),
    ("dp=8", "opt_state.0.mu." + HEAD.removeprefix("params."), 7, lambda x: x + 1, "over dp (8 copies, wrong on cpu:7 of process 0)"),
    ("dp=8", HEAD, 0, flip_last_bit, f"{HEAD} over dp (8 copies, wrong on cpu:0 of process 0)"),
    ("dp=8", HEAD, 5, swap_first_two, f"{HEAD} over dp (8 copies, wrong on cpu:5 of process 0)"),
    ("dp=8", "step", 2, lambda x: x + 1, "step over dp (8 copies, wrong on cpu:2 of process 0)"),
    ("tp=4", NORM, 2, scale, f"{NORM} over tp (4 copies, wrong on cpu:2 of process 0)"),
    ("pp=2", "params.head.norm.weight", 1, scale, "params.head.norm.weight over pp (2 copies, no value has a majority)"),
    ("pp=2,rep=2,dp=2", QUERY, 6, scale, f"{QUERY} over rep (2 copies, no value has a majority)"),
    ("pp=2,rep=2,dp=2", "loss_scale.scale", 5, scale, "loss_scale.scale over pp, rep, dp (8 copies, wrong on cpu:5 of process 0)"),
]
runs.LAYOUTS["pp=2,rep=2,dp=2"] = {"mesh": {"pp": 2, "rep": 2, "dp": 2}}


@pytest.mark.parametrize(("layout", "path", "device", "fault", "text"), FAULTS, ids=[f"{row[0]} {row[1]}" for row in FAULTS])
def test_a_copy_that_differs_is_named_with_leaf_axis_and_device(layout, path, device, fault, text):
    state, replicas = start(layout)
    assert found_in(replicas, state) is None
    said = found_in(replicas, with_fault(state, path, device, fault))
    assert said is not None and said.endswith(text) and said.count(";") == 0


def test_many_differences_are_counted():
    state, replicas = start("dp=8")
    for path in [path for path in flatten(state) if path.startswith("params.")]:
        state = with_fault(state, path, 1, lambda x: x + 1)
    said = found_in(replicas, state)
    assert said is not None and said.count("wrong on cpu:1") == 3 and said.endswith("and 9 more")  # 12 leaves


def test_the_same_nan_everywhere_is_no_difference():
    state, replicas = start("dp=8")
    assert found_in(replicas, state._replace(params=jax.tree.map(lambda x: x * float("nan"), state.params))) is None


def test_after_updates_of_a_layout_all_copies_agree():
    name = "interleaved"
    setup = runs.setup_of(name)
    state, _ = runs.train(name, init_state(setup, 0), 0, 2)
    assert found_in(Replicas(setup), state) is None


@pytest.mark.parametrize("layout", ["one device", "dp=8", "dp=8, zero 3", "tp=2,pp=2,dp=2, zero 3", "pp=2,rep=2,dp=2"])
def test_what_is_read_is_what_several_devices_hold(layout):
    """From the arrays: the same part of the same leaf on more than one device."""
    state, replicas = start(layout)
    leaves = flatten(state)
    held = {path for path, x in leaves.items() if max(Counter(str(shard.index) for shard in x.addressable_shards).values()) > 1}
    assert {leaf.path for leaf in replicas.watched} == held
    size = sum(leaves[path].addressable_shards[0].data.nbytes for path in held)
    said = f"{size / 2**20:.2f} MiB" if size > 2**14 else f"{size} bytes"
    line = f"{len(held)} of {len(leaves)} leaves of the state are held by several devices, {said} on each: compared every 100 updates"
    assert replicas.line == "" if layout == "one device" else replicas.line.startswith(line)


def test_nothing_is_looked_at_where_there_is_nothing_or_nobody_wants_it():
    state, one_device = start("one device")
    never = Replicas(runs.make_setup("dp=8", guard=GuardConfig(replicas_every=0)))
    for replicas in (one_device, never):
        replicas.look(1, state)
        assert replicas.late() is None and replicas.line == ""
    assert not never.due(100)


def test_a_module_of_the_users():
    config = Config(mesh=MeshConfig(dp=4), layout=LayoutConfig(zero=1), data=DataConfig(global_batch=8))
    setup = own_setup(nnx.Linear(8, 3, rngs=nnx.Rngs(0)), config, jax.devices()[:4])
    state, replicas = own_state(setup), Replicas(setup)
    assert found_in(replicas, state) is None
    assert found_in(replicas, with_fault(state, "params.bias", 2, lambda x: x + 1)) == (
        "params.bias over dp (4 copies, wrong on cpu:2 of process 0)")  # 3 entries: ZeRO leaves it whole


# ------------------------------------------------------------------ in a run
class Tampered:
    """A jitted step whose compiled form passes what it returns through `change`: (update, state, metrics) -> (state, metrics)."""

    def __init__(self, step: Any, change: Any):
        self.step, self.change, self.update = step, change, 0

    def lower(self, *args: Any) -> Any:
        self.lowered = self.step.lower(*args)
        return self

    def compile(self, **options: Any) -> Any:
        self.compiled = self.lowered.compile(**options)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)

    def __call__(self, state: Any, rows: Any) -> Any:
        self.update += 1
        return self.change(self.update, *self.compiled(state, rows))


def run_tampered(config: Config, change: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run it; the folder. The step is the config's, tampered with."""
    def task(config: Config, devices: Any) -> Any:
        made = text_task(config, devices)
        return replace(made, step=Tampered(made.step, change))

    monkeypatch.setattr(train_module, "text_task", task)
    run(config, jax.devices()[: config.mesh.dp])
    return Path(config.train.out)


def tiny(out: Path, dp: int, steps: int, **sections: Any) -> Config:
    return Config(model=ModelConfig(preset="toy", num_layers=1), mesh=MeshConfig(dp=dp), layout=LayoutConfig(zero=0),
                  data=DataConfig(seq_len=16, global_batch=4), record=RecordConfig(tensorboard=False),
                  train=TrainConfig(steps=steps, eval_every=0, eval_rows=4, sample_tokens=0, out=str(out)), **sections)


def test_a_run_with_a_faulty_device_stops_within_an_interval_and_saves_nothing(tmp_path, monkeypatch):
    def fault(update: int, state: Any, metrics: Any) -> Any:
        return (with_fault(state, NORM, 1, scale) if update == 4 else state), metrics

    config = tiny(tmp_path / "run", 4, 20, guard=GuardConfig(replicas_every=5), checkpoint=CheckpointConfig(every=3))
    with pytest.raises(RunError) as stopped:
        run_tampered(config, fault, monkeypatch)
    message = str(stopped.value)
    assert message.startswith("stopped after update 5: devices that hold the same values don't agree: "
                              f"{NORM} over dp (4 copies, wrong on cpu:1 of process 0): a device or link is faulty, or ")
    assert message.endswith(f"nothing more is saved; go on from the checkpoint after update 3 with --resume {tmp_path / 'run'}")
    assert "\n" not in message and complete_steps(tmp_path / "run") == [3]


def test_a_difference_is_found_before_the_next_save(tmp_path, monkeypatch):
    config = tiny(tmp_path / "run", 2, 3, guard=GuardConfig(replicas_every=100))
    with pytest.raises(RunError, match=r"stopped after update 3: .* over dp \(2 copies, .*; there is no checkpoint to go on from$"):
        run_tampered(config, lambda n, state, metrics: (with_fault(state, NORM, 1, scale) if n == 2 else state, metrics), monkeypatch)
    assert not complete_steps(tmp_path / "run")


@pytest.fixture(scope="module")
def preview() -> Any:
    path = Path(__file__).parents[1] / "scripts" / "preview_data.py"
    spec = importlib.util.spec_from_file_location("preview_data", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def high(update: int, state: Any, metrics: Any) -> Any:
    return state, metrics._replace(loss=metrics.loss + 30) if update == 23 else metrics


def test_a_jump_of_the_loss_is_a_warning_with_the_rows_to_look_at(tmp_path, monkeypatch, capsys, preview):
    folder = run_tampered(tiny(tmp_path / "run", 1, 25), high, monkeypatch)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: step")]
    assert len(lines) == 1 and lines[0].startswith("warning: step 23: the loss jumped to 3")
    assert "the mean of the 22 losses before it; gradient norm " in lines[0] and "it read rows 88 to 91 (python" in lines[0]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == 25
    [spike] = [record for record in records if "loss_spike" in record]
    assert spike["step"] == 23 and spike["loss_spike"] == pytest.approx((losses[22] - np.mean(losses[:22])) / np.std(losses[:22]))
    [command] = re.findall(r"python scripts/preview_data.py ([^)]*)\)", lines[0])
    preview.main(command.split())
    shown = capsys.readouterr().out
    assert "row 88: " in shown and "row 91: " in shown and "row 92: " not in shown


def test_a_jump_of_the_loss_stops_the_run_before_it_is_saved(tmp_path, monkeypatch):
    config = tiny(tmp_path / "run", 1, 25, guard=GuardConfig(loss_spike="stop"), checkpoint=CheckpointConfig(every=20))
    with pytest.raises(RunError, match=r"^stopped at step 23: the loss jumped .*go on from the checkpoint after update 20 with --resume"):
        run_tampered(config, high, monkeypatch)
    assert complete_steps(tmp_path / "run") == [20]


# ------------------------------------------------------------------ jumps of a curve
def curve(seed: int, steps: int = 2000, noise: float = 0.05) -> np.ndarray:
    """Like a loss: from ln(50,000) by a power law to about 3.4, with noise."""
    n = np.arange(steps)
    return 3 + 7.8 * (1 + n / 10) ** -0.5 + noise * np.random.default_rng(seed).standard_normal(steps)


def jumps(losses: Any, limit: float = 8.0) -> list[int]:
    spikes = Spikes(limit)
    return [n for n, loss in enumerate(losses) if spikes.see(float(loss))]


@pytest.mark.parametrize("noise", [0.0, 0.002, 0.05, 0.3])
def test_a_loss_that_falls_with_noise_never_jumps(noise):
    assert [jumps(curve(seed, noise=noise)) for seed in range(10)] == [[]] * 10


def test_a_jump_is_measured_by_the_losses_before_it():
    losses = curve(0)
    losses[1500] += 1
    spikes = Spikes(8)
    found = {n: spike for n, loss in enumerate(losses) if (spike := spikes.see(float(loss)))}
    before = losses[1400:1500]
    assert list(found) == [1500] and found[1500].num_losses == 100
    assert (found[1500].mean, found[1500].deviation) == pytest.approx((before.mean(), before.std()))
    assert found[1500].deviations == pytest.approx((losses[1500] - before.mean()) / before.std())
    assert jumps(losses, limit=1.1 * found[1500].deviations) == []


def test_jumps_in_a_row_are_all_seen():
    losses = curve(1)
    losses[[900, 901, 910]] += 3
    assert jumps(losses) == [900, 901, 910]


def test_a_loss_that_stays_high_is_soon_the_new_normal():
    """Each loss at the limit of 8 deviations widens the deviation by sqrt(1 + 64/100): 60 deviations are reached after about 8."""
    losses = curve(2)
    losses[1000:] += 3
    found = jumps(losses)
    assert found == list(range(1000, 1000 + len(found))) and 4 <= len(found) <= 12


def test_nothing_is_said_before_twenty_losses():
    assert jumps([2.0] * 19 + [50.0] * 2) == []
    assert jumps([2.0] * 20 + [50.0]) == [20]


def test_losses_that_are_not_finite_are_as_if_they_were_not_there():
    losses = curve(3)
    losses[1200] += 3
    holes = losses.copy()
    holes[[0, 5, 1100, 1199]] = np.nan, np.inf, -np.inf, np.nan
    assert jumps(holes) == jumps(losses) == [1200]


def test_a_flat_curve_does_not_jump_by_rounding():
    assert jumps([2.0 + 1e-6 * (n % 7 == 0) + 0.05 * (n == 300) for n in range(400)]) == []  # 0.05 is 5 times the least deviation
    assert jumps([0.0] * 30 + [1.0]) == [30]
