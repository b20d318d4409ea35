"""Settings that point to what failed (P89), the stop of all processes at one step, and what only one of them says."""

import importlib.util
import random
import signal
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

import jaxmeg.train
from jaxmeg import report
from jaxmeg.checkpoint.manifest import CheckpointError
from jaxmeg.checkpoint.restore import RestoreError
from jaxmeg.checkpoint.save import SaveError
from jaxmeg.cli import ConfigError
from jaxmeg.config import Config, MeshConfig
from jaxmeg.data.store import DataError
from jaxmeg.journal import RunError
from jaxmeg.models.own import OwnModuleError
from jaxmeg.processes import connect, variables
from jaxmeg.processes.agree import ProcessError
from jaxmeg.processes.stop import StopSignal
from jaxmeg.processes.variables import VARIABLES, axes_of, collective_of, defaults, explain, problems, warnings
from jaxmeg.record.log import LogError
from jaxmeg.setup import build
from jaxmeg.train import Stopped

ROOT = Path(__file__).resolve().parents[1]


class MemoryStore:
    """A store that all 'processes' of a test share."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.lock = threading.Lock()

    def put(self, key: str, text: str) -> None:
        with self.lock:
            self.texts[key] = text

    def put_first(self, key: str, text: str) -> str:
        with self.lock:
            return self.texts.setdefault(key, text)

    def read(self, folder: str) -> dict[str, str]:
        with self.lock:
            return {key.removeprefix(f"{folder}/"): text for key, text in self.texts.items() if key.startswith(f"{folder}/")}


# ------------------------------------------------------------------------------------------------ stopping

@pytest.mark.parametrize("seed", range(200))
def test_all_processes_stop_after_the_same_step(seed):
    """Processes that are signalled at any time, in any order that the devices allow: a step's metrics arrive once all have
    dispatched it."""
    rng = random.Random(seed)
    count, store = rng.randint(2, 5), MemoryStore()
    stops = [StopSignal(store) for _ in range(count)]
    dispatched, asked, end = [0] * count, [0] * count, dict[int, int]()
    signalled = {index: rng.randint(1, 12) for index in rng.sample(range(count), rng.randint(1, count))}
    while len(end) < count:
        ready = [i for i in range(count) if i not in end
                 and (dispatched[i] == asked[i] or min(dispatched) >= dispatched[i] - 1)]  # dispatch, or metrics of the step before
        i = rng.choice(ready)
        if dispatched[i] == asked[i]:
            dispatched[i] += 1
        else:
            asked[i] = dispatched[i]
            if signalled.get(i, 99) <= asked[i]:
                stops[i]._received = True
            if stops[i].requested(asked[i]):
                end[i] = asked[i]
    assert len(set(end.values())) == 1 and min(signalled.values()) <= end[0] <= max(signalled.values()) + 2


def test_one_process_stops_at_once():
    with StopSignal() as stop:
        assert not stop.requested(1)
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested(1) and stop.name == "SIGTERM"


@pytest.mark.parametrize(("store", "when"), [(None, "after this step"), (MemoryStore(), "within three steps")])
def test_when_it_stops_is_said(capfd, store, when):
    with StopSignal(store):
        signal.raise_signal(signal.SIGTERM)
    assert capfd.readouterr().err == f"\nSIGTERM: the run saves and stops {when}; once more stops it at once\n"


# ------------------------------------------------------------------------------------------------ what is said, and by whom

@pytest.mark.parametrize("length", [7, 4096, 4097, 20_000])
def test_a_text_of_any_length_reaches_all(monkeypatch, length):
    """Each broadcast has arrays of one shape on all processes, or it hangs."""
    text, sent = "\u00e4" + "x" * (length - 2), []

    def source(array):
        sent.append(np.asarray(array))
        return array

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", source)
    assert connect.from_first_process(text) == text

    def other(array):
        received = sent.pop(0)
        assert np.asarray(array).shape == received.shape and np.asarray(array).dtype == received.dtype
        return received

    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", other)
    assert connect.from_first_process("=a folder of its own") == text and not sent


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_script", ROOT / "scripts" / "train.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize(("error", "code", "who"), [
    (ConfigError(["no"]), 2, "each"), (DataError("no"), 2, "each"), (OwnModuleError("no"), 2, "each"), (RestoreError("no"), 2, "each"),
    (CheckpointError("no"), 2, "each"), (SaveError("no"), 1, "each"), (LogError("no"), 1, "each"), (ProcessError("no"), 1, "each"),
    (RunError("no"), 1, "first"), (Stopped("SIGTERM", 3, 9, Path("runs/demo")), 128 + 15, "first"),
], ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "")
def test_exit_codes(script, monkeypatch, capsys, error, code, who, index):
    """2 for what is refused at the start, 1 for what fails later; what all know is said by process 0."""
    def run(config: Config) -> None:
        raise error

    monkeypatch.setattr(jaxmeg.train, "run", run)
    monkeypatch.setattr(jax, "process_index", lambda: index)
    try:
        got = script.train(Config())
    except SystemExit as end:
        got = end.code
    line = f"{error}\n" if isinstance(error, Stopped) else f"error: {error}\n"
    assert (got, capsys.readouterr().err) == (code, line if who == "each" or index == 0 else "")


@pytest.mark.parametrize("quiet", [True, False])
def test_the_layout_is_shown_by_one_process(monkeypatch, capsys, quiet):
    monkeypatch.setattr(report.console, "quiet", quiet)
    report.print_layout(build(Config(mesh=MeshConfig(dp=1)), jax.devices()[:1]))
    assert ("embed.tokens" in capsys.readouterr().out) is not quiet


# ------------------------------------------------------------------------------------------------ variables

NEW, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize(("environ", "line"), [
    ({NEW: "100"}, f"{NEW}=100 is not a fraction of the GPU's memory, between 0 and 1: use for example 0.9"),
    ({OLD: "85"}, f"{OLD}=85 is not a fraction of the GPU's memory, between 0 and 1: use for example 0.85"),
    ({NEW: "0"}, f"{NEW}=0 is not a fraction of the GPU's memory, between 0 and 1: use for example 0.9"),
    ({NEW: "abc"}, f"{NEW}=abc is not a number: use a fraction of the GPU's memory, for example 0.9"),
    ({NEW: "nan"}, f"{NEW}=nan is not a number: use a fraction of the GPU's memory, for example 0.9"),
    ({NEW: ".9", OLD: ".9"}, f"{NEW} and {OLD} are both set, and jax takes one: unset {OLD}, the older name"),
])
def test_a_memory_fraction_that_cannot_be(environ, line):
    assert problems(environ) == [line]


def test_a_memory_fraction_that_leaves_nccl_no_room():
    tight = {NEW: "0.99"}
    assert problems(tight) == [] and warnings(tight, 1) == []
    assert warnings(tight, 8) == [f"{NEW}=0.99 leaves NCCL little room for its buffers: use 0.95 or less with several GPUs"]
    assert warnings({"XLA_CLIENT_MEM_FRACTION": "0.95"}, 8) == problems({"XLA_CLIENT_MEM_FRACTION": "1.0"}) == []
    assert problems({"XLA_CLIENT_MEM_FRACTION": "2", "TF_FORCE_UNIFIED_MEMORY": "1"}) == []


def test_variables_of_another_framework_are_named():
    [line] = warnings({"TORCH_NCCL_BLOCKING_WAIT": "1", "NCCL_ASYNC_ERROR_HANDLING": "1"}, 2)
    assert line.startswith("NCCL_ASYNC_ERROR_HANDLING, TORCH_NCCL_BLOCKING_WAIT are PyTorch's and without effect here")


def test_defaults_are_set_only_where_nobody_did():
    assert defaults({}, 8, 600, emulated=False)["NCCL_DEBUG"] == "WARN" and "NCCL_DEBUG" not in defaults({}, 1, 600, emulated=False)
    given = {"NCCL_DEBUG": "INFO", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "1"}
    for name in (NEW, OLD):
        assert defaults({**given, name: "0.5"}, 8, 600, emulated=False) == {}
    assert defaults(given, 8, 600, emulated=False) == {"XLA_CLIENT_MEM_FRACTION": "0.95"}
    flag = "--xla_cpu_collective_call_terminate_timeout_seconds"
    assert defaults({"XLA_FLAGS": "--a"}, 8, 600, emulated=True) == {"XLA_FLAGS": f"--a {flag}=1200"}
    assert defaults({"XLA_FLAGS": f"{flag}=7"}, 8, 600, emulated=True) == {"XLA_FLAGS": f"{flag}=7"}


NCCL = "INTERNAL: NCCL operation ncclCommInitRank(&comm, nranks, id, rank) failed: unhandled {} error. Last NCCL warning(error) log " \
       "entry (may be unrelated) '{}'.; current tracing scope: all-reduce-start.285"


@pytest.mark.parametrize(("text", "names", "concerns_others"), [  # as they stand in public reports
    (NCCL.format("cuda", "Cuda failure 2 'out of memory'"), {"XLA_CLIENT_MEM_FRACTION"}, False),
    ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5.20GiB.", {"XLA_CLIENT_MEM_FRACTION", "--remat", "--zero"}, False),
    (NCCL.format("system", "socketTryAccept: Accept failed: Bad file descriptor"), {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA"}, True),
    ("INTERNAL: NCCL operation ncclAllReduce failed: internal error. Last NCCL warning(error) log entry (may be unrelated) 'x'.",
     {"NCCL_DEBUG=INFO", "NCCL_P2P_DISABLE"}, True),
    ("INTERNAL: [id=1] Termination timeout for `first call to collective operation 3` of 40 seconds exceeded.",
     {"--xla_gpu_first_collective_call_terminate_timeout_seconds", "guard.step_seconds"}, True),
    ("UNKNOWN: Gloo AllGather failed: [external/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:27560",
     {"a process of the run has ended"}, True),
])
def test_a_failure_names_its_setting(text, names, concerns_others):
    found = explain(text)
    assert found and found.concerns_others is concerns_others and all(name in found.line for name in names)


@pytest.mark.parametrize("text", ["INVALID_ARGUMENT: shapes (3,) and (4,)", "Out of memory, says somebody's own ValueError", "NCCL", ""])
def test_other_errors_are_left_alone(text):
    assert explain(text) is None


def test_what_is_named_is_in_the_table():
    named = {word.strip(",;.()") for failure in variables._FAILURES for word in failure.line.replace("=", " ").split()}
    named = {word for word in named if word.startswith(("NCCL_", "XLA_", "--xla"))}
    assert named <= {variable.name for variable in VARIABLES} | {"XLA_FLAGS"} and len(named) > 8


@pytest.mark.parametrize(("peers", "axes"), [
    ([0, 1], ["tp"]), ([2, 3], ["tp"]), ([0, 2], ["dp"]), ([1, 5], ["pp"]), ([0, 1, 2, 3], ["dp", "tp"]), ([0, 3], ["dp", "tp"]),
    (list(range(8)), ["pp", "dp", "tp"]), ([0, 9], []), ([], []),
])
def test_devices_lie_along_axes(peers, axes):
    """pp=2, dp=2, tp=2: device 4 p + 2 d + t."""
    assert axes_of(peers, range(8), {"pp": 2, "dp": 2, "tp": 2}) == axes


def test_a_collective_is_found_in_a_text():
    sizes, ids = {"pp": 2, "dp": 2, "tp": 1}, [10, 11, 12, 13]
    key = "RendezvousKey{run_id=3, global_devices=[10, 12], num_local_participants=2, collective_op_kind=cross_replica, op_id=1}"
    assert collective_of(f"INTERNAL: {key}", ids, sizes) == "a collective among devices 10, 12 (pp)"
    assert collective_of("INTERNAL: all-gather-start.7 replica_groups={{10,11},{12,13}}", ids, sizes) == (
        "all-gather-start.7 among devices 10, 11 (dp)")
    assert collective_of("INTERNAL: nothing of the kind", ids, sizes) is None
