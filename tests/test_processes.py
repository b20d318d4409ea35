"""Settings that point to what failed (P89), and the stop of all processes at one step."""

import random
import signal
import threading

import pytest

from jaxmeg.processes import variables
from jaxmeg.processes.stop import StopSignal
from jaxmeg.processes.variables import VARIABLES, axes_of, collective_of, defaults, explain, problems, warnings


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
    assert defaults({"NCCL_DEBUG": "INFO", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "1"}, 8, 600, emulated=False) == {}
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
