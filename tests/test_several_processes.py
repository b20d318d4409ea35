"""Several processes as one run: the same model whatever axis crosses the border between them, and checkpoints that don't know how many
there were.

The rows come to an end, and begin again, in the middle of an update (P24). Runs over two processes of dp and ZeRO are in test_run.
"""

import shutil
from pathlib import Path

import pytest
from test_run import records
from test_train import train

from jaxmeg.faults.start import Ended, Place, several

STEPS, ROWS = 8, 21  # an epoch ends in the middle of updates 3, 6 and 8
RUN = ["--model", "toy", "--model.num_layers", "2", "--seq_len", "32", "--global_batch", "8", "--data.max_rows", str(ROWS),
       "--precision.matmul", "highest", "--optim.warmup", "2", "--optim.eps", "1e-6", "--train.sample_tokens", "0",
       "--train.eval_every", "3", "--train.eval_rows", "10", "--record.tensorboard", "false", "--checkpoint.every", "4",
       "--steps", str(STEPS)]
CHECKED = ["env", "JAXMEG_CHECK_PROCESSES=1"]


def in_processes(count: int, folder: Path, *arguments: str) -> list[Ended]:
    trainings = several(Place(folder, folder / "cache"), count, *arguments, prefixes=[CHECKED] * count)
    return [training.end() for training in trainings]


def assert_well(ended: list[Ended]) -> None:
    for index, one in enumerate(ended):
        assert one.code == 0, f"process {index}: {one.err}"


def assert_same(folder: Path, straight: Path) -> None:
    """Losses of training and validation within the contract, and every update on the same number of tokens."""
    for key, tolerance in (("loss", 1e-5), ("validation_loss", 1e-5), ("tokens", 0), ("validation_tokens", 0)):
        got, wanted = records(folder, key), records(straight, key)
        assert got.keys() == wanted.keys(), key
        for step, value in wanted.items():
            assert got[step] == pytest.approx(value, abs=tolerance), f"{key} of step {step}"


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """Eight updates on one device in one process."""
    folder = tmp_path_factory.mktemp("straight")
    done = train(*RUN, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert len(records(folder)) == STEPS
    return folder


@pytest.fixture(scope="module")
def of_four(straight, tmp_path_factory) -> Path:
    """Five updates in four processes of one device: tp and pp both cross the border. Evaluates, saves and stops in all."""
    folder = tmp_path_factory.mktemp("four")
    assert_well(in_processes(4, folder, *RUN, "--mesh", "tp=2,pp=2", "--emulate", "4", "--train.stop_after", "5"))
    return folder


def test_tp_over_the_border_of_two_processes(straight, tmp_path):
    """To the end, with evaluation, saves and a sample that both enter (P56)."""
    ended = in_processes(2, tmp_path, *RUN, "--mesh", "tp=4", "--emulate", "4", "--train.sample_tokens", "3")
    assert_well(ended)
    assert "sample" in ended[0].out
    assert_same(tmp_path, straight)


@pytest.mark.parametrize(("count", "layout"), [(2, ["--mesh", "dp=2", "--zero", "2", "--emulate", "2"]), (1, ["--mesh", "pp=2"])],
                         ids=["two", "one"])
def test_what_four_processes_saved_goes_on_in(count, layout, of_four, straight, tmp_path):
    shutil.copytree(of_four / "runs", tmp_path / "runs")
    if count == 1:
        done = train("--resume", "runs/demo", *layout, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    else:
        assert_well(in_processes(count, tmp_path, "--resume", "runs/demo", *layout))
    assert_same(tmp_path, straight)


@pytest.mark.slow
def test_eight_devices_of_four_processes(straight, tmp_path):
    assert_well(in_processes(4, tmp_path, *RUN, "--mesh", "pp=2,dp=2,tp=2", "--zero", "3", "--emulate", "8"))
    assert_same(tmp_path, straight)


def test_devices_that_the_processes_do_not_share_evenly(tmp_path):
    ended = in_processes(2, tmp_path, *RUN, "--mesh", "dp=3", "--emulate", "3", "--global_batch", "6")
    for one in ended:
        assert one.code == 2
        assert one.err.splitlines() == ["error: distributed.num_processes=2 does not divide emulate=3: use emulate 2"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_process_that_evaluates_at_other_steps_is_named(tmp_path):
    """With JAXMEG_CHECK_PROCESSES=1: the one that waits says for what, and both end."""
    trainings = several(Place(tmp_path, tmp_path / "cache"), 2, *RUN, "--mesh", "dp=2", "--emulate", "2", prefixes=[CHECKED] * 2,
                        own={1: ["--train.eval_every", "0"]})
    ended = [training.end() for training in trainings]
    assert all(one.code not in (0, None) and not one.has_traceback for one in ended), ended
    assert "process 0 waited 60 s for the others at evaluate number 1" in ended[0].err
