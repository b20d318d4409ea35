"""The training run as a user starts it, and layouts compared over whole runs."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmeg import train as train_module
from jaxmeg.arch import PRESETS, num_params
from jaxmeg.checkpoint.manifest import find_step, read_manifest
from jaxmeg.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    LayoutConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    PrecisionConfig,
    RecordConfig,
    TrainConfig,
)
from jaxmeg.processes.watchdog import Watchdog
from jaxmeg.record.compiles import Watch
from jaxmeg.task import text_task
from jaxmeg.train import RunError, run

ROOT = Path(__file__).parent.parent
TINY = ["--model", "toy", "--seq_len", "32", "--global_batch", "8", "--train.eval_rows", "10", "--train.sample_tokens", "5",
        "--train.log_every", "2"]


def user_environment() -> dict[str, str]:
    """No device count set beforehand."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    return env | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])}


def train(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """scripts/train.py in a fresh process, in the environment of a user."""
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), *arguments]
    return subprocess.run(command, cwd=cwd, env=user_environment(), capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    arguments = [*TINY, "--mesh", "tp=2,pp=2", "--steps", "6", "--train.eval_every", "3", "--optim.warmup", "2"]
    return folder, train(*arguments, cwd=folder), arguments


def test_a_run_says_what_it_does(finished):
    _, done, _ = finished
    assert done.returncode == 0, done.stderr
    assert "no accelerator found: emulating 4 devices on the CPU" in done.stderr
    for part in ("pp=2,tp=2, ZeRO 1", "1f1b, 2 stages x 1 chunks; bubble", "step     6/6  loss", "tokens/s", "s left",
                 "step     6/6  validation loss", "over 320 tokens", "checkpoints, config and metrics in runs"):
        assert part in done.stdout, part


def test_a_run_leaves_metrics_config_and_a_checkpoint(finished):
    folder, done, _ = finished
    assert done.returncode == 0
    records = [json.loads(line) for line in (folder / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert all(record["tokens"] == 8 * 32 and record["applied"] for record in steps)
    np.testing.assert_allclose([record["lr"] for record in steps[:3]], [0, 1.5e-3, 3e-3], rtol=1e-6)
    assert [record["step"] for record in records if "validation_loss" in record] == [3, 6]
    manifest = read_manifest(find_step(folder / "runs" / "demo"))
    weights = {path: leaf.shape for path, leaf in manifest.leaves.items() if path.startswith("params.")}
    assert sum(math.prod(shape) for shape in weights.values()) == num_params(PRESETS["toy"])
    assert weights["params.layers.mlp.up"] == (4, 64, 128) and manifest.rows == 6 * 8
    columns = {"step_s", "data_wait_s", "evaluate_s", "save_s", "tokens_per_s", "samples_per_s", "grad_norm"}
    assert all(columns <= set(record) for record in steps)
    assert list((folder / "runs" / "demo" / "tensorboard").glob("events*"))


def test_nothing_is_overwritten(finished):
    folder, _, arguments = finished
    before = (folder / "runs" / "demo" / "metrics.jsonl").read_bytes()
    again = train(*arguments, cwd=folder)
    assert again.returncode == 0 and "runs/demo-2" in again.stdout
    assert (folder / "runs" / "demo" / "metrics.jsonl").read_bytes() == before


def test_show_layout_lists_every_leaf_and_trains_nothing(tmp_path):
    arguments = ["--model", "toy", "--model.num_kv_heads", "1", "--mesh", "tp=2,dp=3", "--zero", "3", "--global_batch", "6"]
    done = train(*arguments, "--show_layout", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for leaf in ("embed.tokens", "layers.attention.key", "head.norm.weight"):
        assert leaf in done.stdout
    assert done.stdout.count("whole: ZeRO divides no dim") == 12  # no dim of this model divides by 3
    assert not (tmp_path / "runs").exists()


def test_a_short_text_is_one_line(tmp_path):
    (tmp_path / "short.txt").write_text("t")
    done = train(*TINY, "--data", "short.txt", "--seq_len", "512", "--steps", "3", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("error:") == 1 and "Traceback" not in done.stderr
    assert "gives no row of data.seq_len=512" in done.stderr and not (tmp_path / "runs").exists()


def test_skips_in_a_row_stop_the_run(tmp_path, capsys):
    """A learning rate that breaks the weights at update 1: updates 2 to 6 are skipped, then the run stops and says why."""
    config = Config(model=ModelConfig(preset="toy"), mesh=MeshConfig(dp=1), data=DataConfig(seq_len=16, global_batch=2),
                    optim=OptimConfig(lr=1e30, warmup=0, schedule="constant"), train=TrainConfig(steps=20, out=str(tmp_path / "run")))
    with pytest.raises(RunError, match=r"stopped at step 6: 5 updates in a row were skipped .*embed.tokens.*lower optim.lr"):
        run(config, jax.devices()[:1])
    assert capsys.readouterr().err.count("update skipped") == 5


def test_nothing_is_compiled_twice_in_a_run(tmp_path, capsys):
    """One train step and one evaluation, though the last evaluation batch is short, and no report of a late compilation."""
    config = Config(model=ModelConfig(preset="toy", num_layers=1), mesh=MeshConfig(dp=2), data=DataConfig(seq_len=16, global_batch=4),
                    train=TrainConfig(steps=6, eval_every=2, eval_rows=6, sample_tokens=2, out=str(tmp_path / "run")),
                    checkpoint=CheckpointConfig(every=2), record=RecordConfig(tensorboard=False))
    with Watch() as watch:
        run(config, jax.devices()[:2])
        names = Counter(found.name for found in watch.new())
    assert {name: names[name] for name in ("step", "evaluate", "next_logits")} == {"step": 1, "evaluate": 1, "next_logits": 1}
    assert "was compiled in the run" not in capsys.readouterr().err


def test_a_late_compilation_is_reported(tmp_path, capsys):
    """A program that is compiled between steps 4 and 5 is named with its step."""
    config = Config(model=ModelConfig(preset="toy", num_layers=1), mesh=MeshConfig(dp=1), data=DataConfig(seq_len=16, global_batch=4),
                    train=TrainConfig(steps=6, eval_every=0, eval_rows=2, sample_tokens=0, out=str(tmp_path / "run")),
                    record=RecordConfig(tensorboard=False))
    task = text_task(config, jax.devices()[:1])

    def read(first: int, consumed: int) -> Iterator[tuple[int, Any]]:
        for n, rows in task.read(first, consumed):
            if n == 4:
                jax.jit(slow_to_compile)(jnp.arange(7.0))
            yield n, rows

    def slow_to_compile(x: jax.Array) -> jax.Array:
        for i in range(300):
            x = jnp.sort(jnp.sin(x) * np.float32(i))
        return x

    with Watch() as watch:
        train_module._run(replace(task, read=read), watch, Watchdog(config.guard))
    assert "step 5: slow_to_compile was compiled in the run (" in capsys.readouterr().err
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record.get("compiled") == "slow_to_compile"] == [5]


FIFTY = {
    "one device": (1, {}, {}, {}),
    "tp=4,pp=2": (8, {"tp": 4, "pp": 2}, {}, {}),
    "dp=8 --zero 3": (8, {"dp": 8}, {"zero": 3}, {}),
    "pp=4,dp=2 --zero 2 --schedule interleaved": (8, {"pp": 4, "dp": 2}, {"zero": 2}, {"schedule": "interleaved"}),
}


@pytest.mark.slow
def test_fifty_steps_of_the_demo_on_four_layouts(tmp_path, capsys):
    """The demo at lr 1e-3 in fp32: the largest difference of the loss from one device over 50 updates is below 1e-3."""
    losses = {}
    for name, (count, mesh, layout, pipeline) in FIFTY.items():
        config = Config(
            mesh=MeshConfig(**{"dp": 1, **mesh}), layout=LayoutConfig(**layout), pipeline=PipelineConfig(**pipeline),
            optim=OptimConfig(lr=1e-3), precision=PrecisionConfig(compute="fp32", matmul="highest"),
            train=TrainConfig(steps=50, eval_every=0, sample_tokens=0, out=str(tmp_path / name)))
        result = run(config, jax.devices()[:count])
        assert result is not None
        losses[name] = np.array(result.losses)
    with capsys.disabled():
        for name, values in losses.items():
            off = np.abs(values - losses["one device"]).max()
            print(f"\n{name}: loss {values[0]:.6f} -> {values[-1]:.6f}, largest difference {off:.1e}", end="")
        print()
    assert losses["one device"][-1] < 3.5
    for values in losses.values():
        assert np.abs(values - losses["one device"]).max() < 1e-3
