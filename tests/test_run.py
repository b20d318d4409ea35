"""Runs that are stopped and go on: on the same layout to the bit, on another within the contract, in one process or two.

The runs read two packed sources at 3:1 with shuffling and reading ahead, so that everything a position stands for is in play.
"""

import json
import math
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_train import ROOT, train, user_environment

STEPS = 10
TINY = ["--model", "toy", "--model.num_layers", "2", "--seq_len", "32", "--global_batch", "8", "--data.packing", "fit",
        "--precision.matmul", "highest", "--optim.warmup", "2", "--optim.eps", "1e-6", "--train.sample_tokens", "0",
        "--train.eval_every", "0", "--train.eval_rows", "16", "--record.tensorboard", "false", "--train.log_every", "1"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> list[str]:
    """Two JSONL files of short documents; the larger lasts less than an epoch, the smaller several."""
    folder, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    paths = {}
    for name, count in (("large", 400), ("small", 12)):
        paths[name] = folder / f"{name}.jsonl"
        texts = ["".join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(3, 40))) for _ in range(count)]
        paths[name].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return ["--data", json.dumps({str(paths["large"]): 3, str(paths["small"]): 1})]


def records(folder: Path, key: str = "loss") -> dict[int, float]:
    lines = (folder / "runs" / "demo" / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record[key] for record in map(json.loads, lines) if key in record}


@pytest.fixture(scope="module")
def straight(sources, tmp_path_factory):
    """Ten updates in one go on one device: losses, and the validation loss at the end."""
    folder = tmp_path_factory.mktemp("straight")
    done = train(*TINY, *sources, "--steps", str(STEPS), cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_that_is_killed_goes_on_to_the_bit(sources, straight, tmp_path):
    """SIGTERM somewhere in the middle: a checkpoint of that step, exit code 143, and the rest as if nothing had happened."""
    env = user_environment()
    command = [sys.executable, "-u", str(ROOT / "scripts" / "train.py"), *TINY, *sources, "--steps", str(STEPS)]
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith("step     3/"):
                process.send_signal(signal.SIGTERM)
                break
        process.stdout.read()
        errors = process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "go on with --resume runs/demo" in errors and "Traceback" not in errors
    [step] = [int(path.name) for path in (tmp_path / "runs" / "demo" / "checkpoints").iterdir()]
    assert 3 <= step < STEPS
    rest = train("--resume", "runs/demo", cwd=tmp_path)
    assert rest.returncode == 0, rest.stderr
    assert f"resumed     runs/demo after update {step}, {8 * step} rows of the data read" in rest.stdout
    assert records(tmp_path) == records(straight)  # every digit
    assert records(tmp_path, "validation_loss") == records(straight, "validation_loss")
    assert records(tmp_path, "grad_norm") == records(straight, "grad_norm")
    again = train("--resume", "runs/demo", cwd=tmp_path)
    assert again.returncode == 2 and "train.steps=10: runs/demo has done 10 updates already: use more steps" in again.stderr
    assert records(tmp_path) == records(straight)


def test_a_run_that_starts_from_other_weights_says_so(sources, tmp_path):
    """The loss that was written down for the step of the checkpoint is far below the next: one line says so."""
    short = [*TINY, *sources, "--lr", "1e-2", "--steps", str(STEPS)]
    assert train(*short, "--train.stop_after", "8", cwd=tmp_path).returncode == 0
    metrics = tmp_path / "runs" / "demo" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    low = [record | ({"loss": 0.5} if record.get("step") == 8 and "loss" in record else {}) for record in lines]
    metrics.write_text("".join(json.dumps(record) + "\n" for record in low))
    rest = train("--resume", "runs/demo", cwd=tmp_path)
    assert rest.returncode == 0 and "warning: step 9: loss" in rest.stderr and "it was 0.5000 when the run stopped" in rest.stderr


def in_two_processes(*arguments: str, cwd: Path) -> list[subprocess.CompletedProcess[str]]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = user_environment() | {"JAXMEG_CHECK_PROCESSES": "1"}
    shared = ["--distributed.coordinator", f"localhost:{port}", "--distributed.num_processes", "2"]
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), *arguments, *shared, "--distributed.process_id"]
    running = [subprocess.Popen([*command, str(i)], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for i in range(2)]
    done = []
    for process in running:
        output, errors = process.communicate(timeout=300)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, output, errors))
    return done


def assert_near(folder: Path, want: Path) -> None:
    """The contract for losses, over whole runs: rounding grows a little from update to update."""
    got, wanted = records(folder), records(want)
    assert got.keys() == wanted.keys()
    for step in got:
        assert got[step] == pytest.approx(wanted[step], abs=1e-5), f"step {step}"


def test_two_processes_train_the_same_model_and_one_goes_on(sources, straight, tmp_path):
    """Five updates in two processes of two devices, five in one process on another layout: the losses of one device."""
    first, second = in_two_processes(*TINY, *sources, "--mesh", "dp=4", "--zero", "3", "--emulate", "4", "--steps", str(STEPS),
                                     "--train.stop_after", "5", cwd=tmp_path)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "4 x cpu of 2 processes" in first.stdout and "loss" not in second.stdout
    rest = train("--resume", "runs/demo", "--mesh", "tp=2,pp=2", cwd=tmp_path)
    assert rest.returncode == 0, rest.stderr
    assert_near(tmp_path, straight)
    loss, wanted = (records(folder, "validation_loss")[STEPS] for folder in (tmp_path, straight))
    assert math.isclose(loss, wanted, abs_tol=1e-5)
    tokens = [records(folder, "validation_tokens")[STEPS] for folder in (tmp_path, straight)]
    assert tokens[0] == tokens[1]
