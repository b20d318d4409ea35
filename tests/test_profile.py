"""`--profile 10:13`: which updates, what is refused, and a real trace of the pipelined step with its scopes."""

import gzip
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from parity import TOKENS, Row, config_of

from jaxmeg.config import Config, RecordConfig, TrainConfig
from jaxmeg.record.late import Late
from jaxmeg.record.profile import Profile, compiler_options
from jaxmeg.record.window import window, window_problem
from jaxmeg.setup import build
from jaxmeg.state import init_state
from jaxmeg.step import make_train_step, place_rows
from jaxmeg.validate.check import problems


def test_the_end_is_left_out():
    assert list(window("10:13") or ()) == [10, 11, 12]
    assert window("10") is None and window("a:b") is None and window("-1:3") is None


@pytest.mark.parametrize(("text", "problem"), [
    ("1:181", None),
    ("180:181", None),
    ("10-13", 'record.profile=10-13 is not a range of updates: use first:end, for example "10:13" for 10, 11 and 12'),
    ("0:3", "record.profile=0:3 starts before the first update: use 1:3"),
    ("0:0", "record.profile=0:0 starts before the first update: use 1:2"),
    ("13:10", "record.profile=13:10 holds no update, its end is left out: use 13:14 or a later end"),
    ("13:13", "record.profile=13:13 holds no update, its end is left out: use 13:14 or a later end"),
    ("10:200", "record.profile=10:200 goes beyond train.steps=180: use 10:181, or more steps"),
    ("180:182", "record.profile=180:182 goes beyond train.steps=180: use 180:181, or more steps"),
    ("190:200", "record.profile=190:200 goes beyond train.steps=180: use more steps"),
])
def test_what_is_refused(text, problem):
    assert window_problem(text, 180) == problem
    config = Config(record=RecordConfig(profile=text), train=TrainConfig(steps=180))
    assert problems(config, 1) == ([problem] if problem else [])


@pytest.fixture
def told(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append(f"start {folder}"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


def drive(profile: Profile, steps: range, told: list[str]) -> None:
    for n in steps:
        with profile.update(n, lambda: told.append("wait")):
            told.append(str(n))


def profile(text: str | None, folder: Path) -> Profile:
    return Profile(text, folder, Late())


def test_both_ends_wait_for_the_devices(told, tmp_path):
    with profile("2:4", tmp_path) as p:
        drive(p, range(1, 6), told)
    assert told == ["1", "wait", f"start {tmp_path / 'trace'}", "2", "3", "wait", "stop", "4", "5"]


def test_without_a_window_nothing_is_traced(told, tmp_path):
    with profile(None, tmp_path) as p:
        drive(p, range(1, 3), told)
    assert told == ["1", "2"]


@pytest.mark.parametrize(("steps", "kept"), [
    (range(3, 6), ["start", "3", "wait", "stop"]), (range(5, 7), []), (range(1, 3), ["start", "2", "stop"])])
def test_a_run_that_starts_or_ends_inside_the_window(told, tmp_path, steps, kept):
    """A resumed run traces what is left of it, and a run that ends early closes the trace."""
    with profile("2:4", tmp_path) as p:
        drive(p, steps, told)
    told = [entry.split()[0] for entry in told]
    assert told[told.index("start") : told.index("stop") + 1] == kept if kept else "start" not in told


def test_an_error_inside_the_window_closes_the_trace(told, tmp_path):
    with pytest.raises(KeyError), profile("1:9", tmp_path) as p, p.update(1, lambda: None):
        raise KeyError
    assert told[-1] == "stop"


def test_a_run_to_be_traced_on_a_gpu_is_compiled_without_cuda_graphs():
    assert compiler_options("2:4", "gpu") == {"xla_gpu_enable_command_buffer": ""}
    assert compiler_options("2:4", "cpu") == compiler_options(None, "gpu") == {}


# ------------------------------------------------------------------ the pipelined step, traced on the CPU
@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Updates 2 and 3 of 4 on pp=2,dp=2 with ZeRO 3: folder, and the text of the compiled program."""
    row, folder = Row(mesh="pp=2,dp=2", zero=3), tmp_path_factory.mktemp("run")
    setup = build(config_of(row), jax.devices()[: math.prod(row.sizes.values())])
    state = init_state(setup, 0)
    ids = np.arange(row.rows * TOKENS, dtype=np.int32).reshape(row.rows, TOKENS) % 256
    rows = place_rows(setup, ids, ids, ids >= 0, setup.resolved.num_microbatches)
    step = make_train_step(setup).lower(state, rows).compile()

    late, arrived = Late(), []

    def settle() -> None:
        arrived.extend(late.flush())

    with Profile("2:4", folder, late) as profile:
        for n in range(1, 5):
            with profile.update(n, settle):
                state, metrics = step(state, rows)
                arrived.extend(late.push(n, metrics))
    settle()
    return folder, step.as_text(), profile, arrived


SCOPES = {
    "tick.EFHBG", "forward.stage", "backward.stage", "layer", "embed", "head", "embed.backward",
    "all_gather(dp)", "reduce_scatter(dp)", "send_forward(pp)", "send_backward(pp)", "all_sum(pp)",
}


def test_every_part_of_the_step_has_a_name(traced):
    """In the compiled program's metadata, which is where a profile takes its names from."""
    _, text, *_ = traced
    paths = [set(re.split(r"[/:]", re.sub(r"\b(?:jvp|transpose)\(((?:[^()]|\([^()]*\))*)\)", r"\1", name)))
             for name in re.findall(r'op_name="([^"]*)"', text)]
    assert set.union(*paths) >= SCOPES
    for inside in ({"forward.stage", "layer", "all_gather(dp)"}, {"backward.stage", "layer", "reduce_scatter(dp)"},
                   {"send_backward(pp)"}, {"head"}):
        assert any(path >= {"tick.EFHBG", *inside} for path in paths), inside


def test_a_trace_holds_its_updates_and_the_names(traced):
    folder, _, profile, arrived = traced
    (trace,) = folder.rglob("*.xplane.pb")
    found = trace.read_bytes()
    assert not [scope for scope in SCOPES if scope.encode() not in found]
    (events,) = folder.rglob("*.trace.json.gz")
    assert gzip.decompress(events.read_bytes()).count(b'"name":"update"') == 2
    assert [a.step for a in arrived] == [1, 2, 3, 4] and [a.seconds.profile > 0 for a in arrived] == [False, True, False, True]
    assert str(folder / "trace") in profile.where() and "updates 2 to 3" in profile.where()


