"""Checkpoints on disk: what is kept, what is refused, and what happens when a save fails. Layouts are in test_layout_changes.py."""

import errno
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import runs
from etils import epath

from jaxmeg.checkpoint import save as checkpoint
from jaxmeg.checkpoint.canonical import flatten
from jaxmeg.checkpoint.manifest import complete_steps, find_step, read_manifest
from jaxmeg.checkpoint.restore import RestoreError, restore, restore_weights
from jaxmeg.checkpoint.save import Checkpoints, SaveError, array_handler
from jaxmeg.config import CheckpointConfig, DataConfig, OptimConfig, PrecisionConfig, TrainConfig
from jaxmeg.processes.stop import StopSignal
from jaxmeg.state import TrainState, init_state

NAME = "dp=4, zero 1"
ROOT = Path(__file__).parents[1]
WRITER: Any = sys.modules[ocp.AsyncCheckpointer.__module__]


@functools.cache
def state() -> TrainState:
    return restore(runs.setup_of(NAME), runs.five("dp=4, zero 1").folder)[0]


def open_run(folder: Path, **options: Any) -> Checkpoints:
    return Checkpoints(runs.setup_of(NAME), folder, CheckpointConfig(**options), {"tokenizer": "bytes"})


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of `params` or `training`, read with Orbax alone."""
    handler = ocp.PyTreeCheckpointHandler()
    names = handler.metadata(epath.Path(folder)).tree
    args = ocp.args.PyTreeRestore(restore_args={name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names})
    return {name: np.asarray(x) for name, x in ocp.Checkpointer(handler).restore(folder, args=args).items()}


def leaves_of(folder: Path) -> dict[str, np.ndarray]:
    """All arrays of a run's latest checkpoint."""
    return arrays_of(find_step(folder) / "params") | arrays_of(find_step(folder) / "training")


# ---------------------------------------------------------------- what is stored
def test_a_checkpoint_is_plain_arrays_in_model_order_and_a_manifest(tmp_path: Path) -> None:
    with open_run(tmp_path) as checkpoints:
        saved = checkpoints.save(state(), 5, rows=80, validation_loss=1.5)
        checkpoints.wait()
        committed = checkpoints.check()
        assert checkpoints.check() is None
    want = runs.model_order(runs.setup_of(NAME), state())
    num_bytes = sum(x.nbytes for x in want.values())
    assert saved is not None and (saved.step, saved.num_bytes) == (5, num_bytes) and saved.blocked_seconds > 0
    assert committed is not None and committed.step == 5 and committed.seconds >= saved.blocked_seconds
    assert committed.peak_host_bytes > 2**26  # Python with jax is larger
    found = read_manifest(find_step(tmp_path))
    assert (found.step, found.updates, found.rows, found.validation_loss, found.compute, found.extra) == (
        5, 5, 80, 1.5, "fp32", {"tokenizer": "bytes"})
    assert found.arch["num_layers"] == runs.LAYERS and found.config["optim"]["eps"] == 1e-6 and found.layout["mesh"]["dp"] == 4
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in found.leaves.items()} == {
        name: (x.shape, str(x.dtype)) for name, x in want.items()}
    runs.same_bits(leaves_of(tmp_path), want)


@pytest.mark.parametrize("name", ["dp=8", "dp=8, zero 3"])
def test_replicas_are_written_once(name: str) -> None:
    """With ZeRO 0 on dp=8 every device holds everything; files hold it once, and beside the arrays at most 2 kB a leaf and rank."""
    part = runs.five(name)
    files = [path for path in find_step(part.folder).rglob("d/*") if path.is_file()]
    written, held = sum(path.stat().st_size for path in files), sum(x.nbytes for x in part.leaves.values())
    assert held <= written <= held + 2048 * len(part.leaves) * (8 if "zero 3" in name else 1) < 8 * held


def test_weights_alone_start_another_run() -> None:
    """Another optimizer, learning rate and batch: nothing but the model must be the same."""
    part = runs.five("interleaved")
    setup = runs.make_setup("tp=2", optim=OptimConfig(name="lion"), data=DataConfig(seq_len=4, global_batch=8))
    got = flatten({"params": restore_weights(setup, part.folder)})
    runs.same_bits({name: np.asarray(x) for name, x in got.items()}, {name: x for name, x in part.leaves.items() if name in got})
    want = flatten({"params": setup.layout.shardings})
    assert got.keys() == want.keys() and all(x.sharding.is_equivalent_to(want[name], x.ndim) for name, x in got.items())


def fp16_state(setup: Any) -> TrainState:
    started = init_state(setup, 0)
    return started._replace(loss_scale=jax.tree.map(lambda x, value: jax.device_put(np.asarray(value, x.dtype), x.sharding),
                                                    started.loss_scale, type(started.loss_scale)(512.0, 7)))


@pytest.mark.parametrize(("compute", "scale"), [("fp16", (512.0, 7)), ("fp32", (1.0, 0))])
def test_the_loss_scale_goes_on_with_the_same_dtype(compute: str, scale: tuple[float, int], tmp_path: Path) -> None:
    fp16 = runs.make_setup("one device", precision=PrecisionConfig(compute="fp16"))
    runs.write(fp16, fp16_state(fp16), tmp_path, 1)
    setup = runs.make_setup("one device", precision=PrecisionConfig(compute=compute), checkpoint=CheckpointConfig(allow_changes=True))
    assert tuple(map(float, restore(setup, tmp_path)[0].loss_scale)) == scale


# ---------------------------------------------------------------- what is refused
def rewritten(tmp_path: Path, item: str, change: Any) -> Path:
    """A copy of a checkpoint with other arrays in it, and the manifest as it was."""
    run = shutil.copytree(runs.five(NAME).folder, tmp_path / "run")
    folder = find_step(run) / item
    arrays = arrays_of(folder)
    change(arrays)
    shutil.rmtree(folder)
    on_device = {name: jax.device_put(x) for name, x in arrays.items()}
    ocp.Checkpointer(array_handler()).save(folder, args=ocp.args.PyTreeSave(on_device))
    return run


def rename(x: dict[str, Any]) -> None:
    x["params.layers.mlp.upper"] = x.pop("params.layers.mlp.up")


def another_shape(x: dict[str, Any]) -> None:
    x["params.head.norm.weight"] = x["params.head.norm.weight"][:-1]


def another_dtype(x: dict[str, Any]) -> None:
    x["opt_state.0.nu.layers.mlp.up"] = x["opt_state.0.nu.layers.mlp.up"].astype(np.float16)


def no_moments(x: dict[str, Any]) -> None:
    for name in [name for name in x if ".mu." in name]:
        del x[name]


def one_bit(x: dict[str, Any]) -> None:
    x["opt_state.0.mu.embed.tokens"] = x["opt_state.0.mu.embed.tokens"].copy()
    x["opt_state.0.mu.embed.tokens"].view(np.uint32)[3, 3] ^= 1


MISFITS = [
    ("params", rename, "does not fit: params.layers.mlp.up is missing, params.layers.mlp.upper is unexpected:"),
    ("params", another_shape, "does not fit: params.head.norm.weight is float32 [15] and should be float32 [16]:"),
    ("training", another_dtype, r"nu.layers.mlp.up is float16 [6, 16, 32] and should be float32 [6, 16, 32]:"),
    ("training", no_moments, "opt_state.0.mu.layers.attention.key is missing, opt_state.0.mu.layers.attention.out is missing, "
                             "opt_state.0.mu.layers.attention.query is missing and 6 more: resume with its model and optimizer"),
    ("training", one_bit, "does not fit: opt_state.0.mu.embed.tokens does not have its checksum: it is damaged"),
]


@pytest.mark.parametrize(("item", "change", "line"), MISFITS, ids=[change.__name__ for _, change, _ in MISFITS])
def test_arrays_that_do_not_fit_are_named(item: str, change: Any, line: str, tmp_path: Path) -> None:
    run = rewritten(tmp_path, item, change)
    with pytest.raises(RestoreError) as error:
        restore(runs.setup_of(NAME), run)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_a_manifest_of_other_arrays_is_refused(tmp_path: Path) -> None:
    run = shutil.copytree(runs.five(NAME).folder, tmp_path / "run")
    path = find_step(run) / "manifest" / "manifest.json"
    values = json.loads(path.read_text().replace("params.head.tokens", "params.head.table"))
    path.write_text(json.dumps({name: value for name, value in values.items() if name != "checksum"}))
    with pytest.raises(RestoreError, match=r"head.tokens is missing, params.head.table is unexpected: the manifest does not describe"):
        restore(runs.setup_of(NAME), run)


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: os.truncate(path, 5000)], ids=["gone", "cut"])
def test_files_that_are_gone_or_cut_short_are_one_line(harm: Any, tmp_path: Path) -> None:
    run = shutil.copytree(runs.five(NAME).folder, tmp_path / "run")
    harm(max((find_step(run) / "training").rglob("*"), key=lambda path: path.stat().st_size))
    needed = sum(x.nbytes for name, x in runs.five(NAME).leaves.items() if not name.startswith("params."))
    seen = rf"has files of [\d,]+ bytes for arrays of {needed:,}: some are gone or cut short"
    with pytest.raises(RestoreError, match=rf"training ({seen}|cannot be read \(.*\)): give another step$"):
        restore(runs.setup_of(NAME), run)


def test_another_number_of_layers_says_so() -> None:
    setup = runs.make_setup("one device", num_layers=5)
    with pytest.raises(RestoreError, match=r"^resume: model.num_layers 6 -> 5 makes another model: leave it out"):
        restore(setup, runs.five(NAME).folder)
    with pytest.raises(RestoreError, match=r"params.layers.attention.key is float32 \[6, 16, 2, 4\] and should be float32 \[5, 16, 2, 4\].*"
                                           r"take the checkpoint's model \(model.num_layers 6 -> 5\)"):
        restore_weights(setup, runs.five(NAME).folder)


def test_a_change_of_the_schedule_is_refused_without_the_flag() -> None:
    longer = TrainConfig(steps=1000)
    with pytest.raises(RestoreError, match=r"^resume: train.steps 180 -> 1000 changes the learning rate at update 5 from .* to .*: add"):
        restore(runs.make_setup(NAME, train=longer), runs.five(NAME).folder)
    allowed = runs.make_setup(NAME, train=longer, checkpoint=CheckpointConfig(allow_changes=True))
    assert int(restore(allowed, runs.five(NAME).folder)[0].updates) == 5


# ---------------------------------------------------------------- which are kept
def save_all(checkpoints: Checkpoints, losses: dict[int, float | None]) -> None:
    for step, loss in losses.items():
        checkpoints.save(state(), step, step * runs.ROWS, loss)


def test_the_latest_and_the_best_are_kept(tmp_path: Path) -> None:
    with open_run(tmp_path, keep=2, keep_best=2) as checkpoints:
        save_all(checkpoints, {1: 3.0, 2: 1.0, 3: 2.0, 4: float("nan"), 5: 2.5, 6: None, 7: 4.0})
        checkpoints.wait()
        assert [done.step for done in iter(checkpoints.check, None)] == [1, 2, 3, 4, 5, 6, 7]
    assert complete_steps(tmp_path) == [2, 3, 6, 7]
    with open_run(tmp_path, keep=1) as checkpoints:  # goes on in the same folder
        assert checkpoints.latest == 7
        save_all(checkpoints, {8: None})
    assert complete_steps(tmp_path) == [8]


def loop(folder: Path, steps: int, every: int, signal_at: int | None = None) -> list[int]:
    """The saves of a training loop; a signal arrives while step `signal_at` runs."""
    with StopSignal() as stop, open_run(folder, every=every, keep=9) as checkpoints:
        saved = []
        for step in range(1, steps + 1):
            if step == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpoints.check()
            told = stop.requested(step)
            if (step == steps or told or step % every == 0) and checkpoints.save(state(), step, step * runs.ROWS):
                saved.append(step)
            if told:
                break
        assert checkpoints.save(state(), saved[-1], 0) is None
    return saved


@pytest.mark.parametrize(("steps", "signal_at", "want"), [(10, None, [4, 8, 10]), (8, None, [4, 8]), (10, 7, [4, 7]), (10, 8, [4, 8])])
def test_the_last_step_is_saved_once(steps: int, signal_at: int | None, want: list[int], tmp_path: Path) -> None:
    assert loop(tmp_path, steps, 4, signal_at) == complete_steps(tmp_path) == want


# ---------------------------------------------------------------- while training goes on
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rename waits until three more updates are done: they have consumed the state, and what is stored is what was saved."""
    name = "interleaved"  # rows of all layers move, so the copy that is written is not the state's own
    setup, part = runs.setup_of(name), runs.five("interleaved")
    begun = restore(setup, part.folder)[0]
    done, commit = threading.Event(), WRITER.atomicity.on_commit_callback

    async def late(*args: Any, **kwargs: Any) -> None:
        assert done.wait(60)
        await commit(*args, **kwargs)

    monkeypatch.setattr(WRITER.atomicity, "on_commit_callback", late)
    with Checkpoints(setup, tmp_path, CheckpointConfig(), {}) as checkpoints:
        try:
            checkpoints.save(begun, 5, 80)
            _, losses = runs.train(name, begun, 5, 8)
            assert checkpoints.latest is None and checkpoints.check() is None
        finally:
            done.set()
        checkpoints.wait()
        assert checkpoints.latest == 5
    runs.same_bits(leaves_of(tmp_path), part.leaves)
    assert losses == runs.ten(name).losses[5:8]


MEMORY = """
import sys, jax, numpy as np
from pathlib import Path
from jaxmeg.checkpoint.save import Checkpoints
from jaxmeg.config import *
from jaxmeg.setup import build
from jaxmeg.state import init_state

def now(field):
    return int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1]) * 1024

setup = build(Config(model=ModelConfig(preset="toy", vocab_size=64000, embed_dim=256), mesh=MeshConfig(dp=1)), jax.devices()[:1])
state = jax.block_until_ready(init_state(setup, 0))  # before memory is read: or what it grows by is the state
with Checkpoints(setup, Path(sys.argv[1]), CheckpointConfig(), {}) as checkpoints:
    before = now("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts here
    saved = checkpoints.save(state, 1, 1)
    checkpoints.wait()
    print(saved.num_bytes, now("VmHWM") - before)
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux to measure peak memory")
def test_a_save_needs_less_than_half_the_state_beside_its_copy_on_the_host(tmp_path: Path) -> None:
    """400 MB of state in a process of its own. On a CPU the copy on the host is the state itself, so all growth is beside it: the hashes
    of the largest leaf, a sixth of the state, or of two where one is freed late."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one device, as fast as it gets
    done = subprocess.run([sys.executable, "-c", MEMORY, str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    num_bytes, grown = map(int, done.stdout.split())
    assert num_bytes > 395e6 and grown < 0.5 * num_bytes, f"{grown / 1e6:.0f} MB for a state of {num_bytes / 1e6:.0f} MB"


# ---------------------------------------------------------------- when a save fails
def failing_save(checkpoints: Checkpoints, step: int, number: int = errno.ENOSPC) -> None:
    """In the background: the system refuses the rename that would make the step appear."""
    async def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    checkpoints.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WRITER.atomicity, "on_commit_callback", refuse)
        checkpoints.save(state(), step, 0)
        checkpoints.wait()


def test_a_failed_save_is_raised_by_the_next_step(tmp_path: Path) -> None:
    with pytest.raises(SaveError) as error, open_run(tmp_path, keep=1) as checkpoints:
        checkpoints.save(state(), 4, 64)
        failing_save(checkpoints, 5)
        checkpoints.check()
        pytest.fail("step 6 was reached")
    size = sum(x.nbytes for x in flatten(state()).values()) / 1e6
    what = rf"No space left on device \({size:.1f} MB needed, [\d,.]+ MB free\) in {tmp_path}/checkpoints"
    fix = "make room, or lower checkpoint.keep, then --resume"
    assert re.fullmatch(f"the checkpoint of step 5 failed: {what}; step 4 is complete: {fix}", str(error.value)), str(error.value)
    assert os.listdir(tmp_path / "checkpoints") == ["4"]  # nothing half-written, and the good one is whole
    assert int(restore(runs.setup_of(NAME), tmp_path)[0].step) == 5


def test_after_a_failure_later_saves_are_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_run(tmp_path, keep=3, on_failure="continue") as checkpoints:
        failing_save(checkpoints, 1)
        checkpoints.check()
        assert "warning: the checkpoint of step 1 failed: " in capsys.readouterr().err and checkpoints.latest is None
        failing_save(checkpoints, 2)
        checkpoints.save(state(), 3, 48)  # says that 2 failed
        checkpoints.wait()
        checkpoints.check()
        assert "the checkpoint of step 2 failed: " in capsys.readouterr().err and checkpoints.latest == 3
    assert complete_steps(tmp_path) == [3]
    runs.same_bits(leaves_of(tmp_path), runs.model_order(runs.setup_of(NAME), state()))


def test_other_reasons_are_said_too(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match=r"^the checkpoint of step 1 failed: Permission denied in .*; no step is complete: see that the "
                                        r"folder can be written, then --resume$"), open_run(tmp_path) as checkpoints:
        failing_save(checkpoints, 1, errno.EACCES)


def test_a_save_that_cannot_even_begin(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match=r"^the checkpoint of step 1 failed: .* in .*checkpoints; no step is complete"), \
            open_run(tmp_path) as checkpoints:
        shutil.rmtree(tmp_path / "checkpoints")
        (tmp_path / "checkpoints").write_text("a file where the folder was")
        checkpoints.save(state(), 1, 16)


@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_run_whose_last_save_failed_does_not_end_well(on_failure: str, tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="the checkpoint of step 7 failed"), open_run(tmp_path, on_failure=on_failure) as checkpoints:
        failing_save(checkpoints, 7)


def test_a_failure_does_not_hide_what_ended_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), open_run(tmp_path) as checkpoints:
        failing_save(checkpoints, 7)
        raise KeyboardInterrupt
    assert "the checkpoint of step 7 failed" in capsys.readouterr().err


# ---------------------------------------------------------------- before the first step
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(SaveError, match=r"checkpoints cannot be written \(File exists\): see that it can$"):
        open_run(tmp_path)


@pytest.mark.parametrize(("free", "have", "warned"), [(1.9, 0, True), (2.1, 0, False), (1.1, 1, False), (0.9, 1, True)])
def test_too_little_room_is_said_before_the_first_step(
        free: float, have: int, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """keep=1 needs two: the one that is kept while the next is written. One that is there already will make room."""
    if have:
        runs.write(runs.setup_of(NAME), state(), tmp_path, 1)
    size = sum(x.nbytes for x in flatten(state()).values())
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, int(free * size)))
    open_run(tmp_path, keep=1, every=4)
    said = capsys.readouterr().err
    room, one, two = (f"{number * size / 1e6:.1f} MB" for number in (free + have, 1, 2))
    assert (f"has room for {room}, and 2 checkpoints of {one} need {two} (checkpoint.keep=1" in said) == warned == (said != "")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=650k", "none", str(folder)], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("needs the right to mount a small disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")  # Orbax leaves its tasks behind
@pytest.mark.parametrize("seen_before", [True, False])
def test_a_full_disk_keeps_the_good_checkpoint(
        seen_before: bool, small_disk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """One checkpoint fits on this disk and two do not; also where the file system says that there is room (a quota)."""
    with pytest.raises(SaveError, match=r"step 8 failed: No space left on device \(.* needed, .* free\).*step 4 is complete"), \
            open_run(small_disk, keep=2, every=4) as checkpoints:
        assert "make room, or saves will fail" in capfd.readouterr().err
        checkpoints.save(state(), 4, 64)
        checkpoints.wait()
        if not seen_before:
            monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, 10**9))
        checkpoints.save(state(), 8, 128)
    assert "Traceback" not in capfd.readouterr().err
    with open_run(small_disk) as checkpoints:  # what its last writes left is removed when the run goes on
        assert os.listdir(small_disk / "checkpoints") == ["4"] and checkpoints.latest == 4
    runs.same_bits(leaves_of(small_disk), runs.model_order(runs.setup_of(NAME), state()))


def test_left_overs_do_not_stand_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.write(runs.setup_of(NAME), state(), tmp_path, 1)
    folder = tmp_path / "checkpoints"
    for name in ("2", "3/params", "4.orbax-checkpoint-tmp/params", "5.orbax-checkpoint-tmp-1700000000", "0.removing/params"):
        (folder / name).mkdir(parents=True)
    with open_run(tmp_path, keep=9) as checkpoints:
        said = capsys.readouterr().err
        for name in ("2", "4.orbax-checkpoint-tmp", "5.orbax-checkpoint-tmp-1700000000", "0.removing"):
            assert f"removed {folder / name}, left over from a save that did not end" in said
        assert f"{folder / '3'} is not a complete checkpoint" in said
        assert checkpoints.latest == 1 and sorted(os.listdir(folder)) == ["1", "3"]
        save_all(checkpoints, {2: None, 3: None, 4: None})
    assert complete_steps(tmp_path) == [1, 2, 3, 4]
