"""The start of several processes (P91): who they are, what each takes of its host, and one line for all that can go wrong.

The roll call runs in threads of this process, over real sockets; two tests start the script itself.
"""

import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from test_train import ROOT, user_environment

from jaxmeg.config import Config, DistributedConfig, MeshConfig
from jaxmeg.devices import Devices, plan_devices, share_of
from jaxmeg.processes import find, roll_call
from jaxmeg.processes.connect import taken
from jaxmeg.processes.find import Processes, find_processes, tasks_per_node
from jaxmeg.processes.roll_call import Member, StartError, call, resolve, split_address

STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}


def slurm(index: int, count: int, per_node: str, local: int, node: int = 0, **more: str) -> dict[str, str]:
    return STEP | {"SLURM_NTASKS": str(count), "SLURM_PROCID": str(index), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node),
                   "SLURM_STEP_TASKS_PER_NODE": per_node} | more


def open_mpi(index: int, count: int, local: int, here: int) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_SIZE": str(count), "OMPI_COMM_WORLD_RANK": str(index), "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
            "OMPI_COMM_WORLD_LOCAL_SIZE": str(here)}


# ------------------------------------------------------------------------------------------------ who and how many

@pytest.mark.parametrize(("text", "numbers"), [("8", [8]), ("2(x3),1", [2, 2, 2, 1]), ("4(x2)", [4, 4]), ("", []), ("x", [])])
def test_slurms_short_form(text, numbers):
    assert tasks_per_node(text) == numbers


@pytest.mark.parametrize(("environ", "want"), [
    ({}, (1, 0, None, None)),
    (slurm(5, 16, "8(x2)", 5), (16, 5, 8, 5)),
    (slurm(6, 7, "2(x3),1", 0, node=3), (7, 6, 1, 0)),
    (open_mpi(3, 8, 3, 4), (8, 3, 4, 3)),
    (slurm(0, 2, "2", 0) | open_mpi(1, 2, 1, 2), (2, 1, 2, 1)),  # mpirun inside a SLURM job: SLURM calls each of them 0
    ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, (1, 0, None, None)),
])
def test_what_launchers_say(environ, want):
    found = find_processes(DistributedConfig(), environ)
    assert (found.count, found.index, found.on_host, found.rank_on_host) == want and found.problem is None


def test_the_config_comes_before_a_launcher_which_still_knows_the_host():
    config = DistributedConfig(coordinator="a:1", num_processes=16, process_id=9)
    found = find_processes(config, slurm(5, 16, "8(x2)", 5))
    assert (found.count, found.index, found.on_host, found.several_hosts) == (16, 9, 8, True)
    assert find_processes(config, slurm(0, 4, "4", 0)).on_host is None  # another count: not about these processes


def test_sbatch_without_srun_does_not_wait_for_others():
    batch = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}
    problem = find_processes(DistributedConfig(), batch).problem
    assert problem and problem.startswith("SLURM_NTASKS=8, but srun did not start this process") and "write srun before python" in problem
    shell = find_processes(DistributedConfig(), {"SLURM_NTASKS": "8"})  # salloc
    assert shell.problem is None and shell.count == 1 and "running as one process" in (shell.note or "")


def test_a_pod_of_an_indexed_job_is_told_how_to_be_one_of_several():
    found = find_processes(DistributedConfig(), {"JOB_COMPLETION_INDEX": "3", "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert found.count == 1 and "JOB_COMPLETION_INDEX=3" in (found.note or "")


# ------------------------------------------------------------------------------------------------ which accelerators

@pytest.mark.parametrize(("environ", "visible", "ids", "count"), [
    (slurm(1, 2, "1(x2)", 0, node=1), 8, None, 8),  # one process a host has all
    (slurm(13, 16, "8(x2)", 5, node=1), 8, (5,), 1),  # one process a GPU
    (slurm(1, 2, "2", 1), 8, (4, 5, 6, 7), 4),
    (slurm(1, 4, "4", 1, SLURM_GPUS_ON_NODE="8"), 2, None, 2),  # SLURM has given each its own two
    (slurm(1, 4, "4", 1), 1, None, 1),
    (open_mpi(2, 4, 2, 4), 4, (2,), 1),
    (open_mpi(1, 2, 0, 1), 4, None, 4),
    (open_mpi(2, 4, 2, 4) | {"JAX_LOCAL_DEVICE_IDS": "0,3"}, 4, (0, 3), 2),
])
def test_the_processes_of_a_host_share_its_accelerators(environ, visible, ids, count):
    share = share_of(find_processes(DistributedConfig(), environ), visible, environ)
    assert (share.ids, share.count, share.problem) == (ids, count, None)


def test_accelerators_that_do_not_divide_are_refused():
    processes = find_processes(DistributedConfig(), slurm(0, 3, "3", 0))
    assert share_of(processes, 8, {}).problem == (
        "3 processes on this host (SLURM_STEP_TASKS_PER_NODE) do not divide its 8 accelerators: start 1, 2, 4 or 8 a host")
    assert share_of(processes, 2, {}).problem is not None


@pytest.mark.parametrize("asked", ["a,b", "0,b", "0,8", "-1", "2,2", "0,"])
def test_local_device_ids_that_are_none_are_refused(asked):
    environ = open_mpi(2, 4, 2, 4) | {"JAX_LOCAL_DEVICE_IDS": asked}
    assert share_of(find_processes(DistributedConfig(), environ), 8, environ).problem == (
        f"JAX_LOCAL_DEVICE_IDS={asked} is not a list of accelerators, each from 0 to 7 and named once: give for example 0,1, or unset it")


def test_devices_of_the_run_are_those_of_all_processes(tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    for number in range(8):
        (tmp_path / "dev" / f"nvidia{number}").touch()
    monkeypatch.setattr("jaxmeg.devices.jax_lacks", lambda found: None)
    for environ, count in ((slurm(0, 2, "1(x2)", 0), 16), (slurm(3, 16, "8(x2)", 3), 16), (slurm(0, 2, "2", 0), 8)):
        processes = find_processes(DistributedConfig(), environ)
        assert plan_devices(Config(), environ, tmp_path, processes).count == count
    assert plan_devices(Config(), {}, tmp_path).count == 8


def test_local_device_ids_say_nothing_to_one_process(tmp_path, monkeypatch):
    """jax reads them when several processes find each other."""
    (tmp_path / "dev").mkdir()
    for number in range(2):
        (tmp_path / "dev" / f"nvidia{number}").touch()
    monkeypatch.setattr("jaxmeg.devices.jax_lacks", lambda found: None)
    devices = plan_devices(Config(), {"JAX_LOCAL_DEVICE_IDS": "1"}, tmp_path)
    assert (devices.count, devices.local, devices.message) == (
        2, None, "warning: JAX_LOCAL_DEVICE_IDS=1 has no effect with one process: to use only some of the 2 accelerators set "
                 "CUDA_VISIBLE_DEVICES")


def test_emulated_devices_go_evenly_over_processes(tmp_path):
    three = Processes(count=3, index=0, origin="")
    assert plan_devices(Config(), {}, tmp_path, three).count == 3
    assert plan_devices(Config(mesh=MeshConfig(tp=2)), {}, tmp_path, three).count == 6


# ------------------------------------------------------------------------------------------------ the coordinator's address

@pytest.mark.parametrize("address", ["node1", "node1:", ":1234", "node1:http", "node1:70000", "fe80::1:1234x", "::1:80"])
def test_an_address_without_host_or_port_is_refused(address):
    with pytest.raises(StartError, match=r"is not host:port: give for example .*:1234"):
        split_address(address)


def test_addresses():
    assert split_address("node1:1234") == ("node1", 1234) and split_address("[fe80::1]:80") == ("fe80::1", 80)


def test_loopback_is_refused_for_several_hosts():
    with pytest.raises(StartError, match=r"is 127\.0\.0\.1, which is each host itself, and the run has several hosts: give the name"):
        resolve("127.0.0.1", 1234, several_hosts=True)
    assert resolve("127.0.0.1", 1234, several_hosts=False) == ["127.0.0.1"]


def test_a_name_nobody_knows(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(StartError, match=r"the name node9 is not known on .*Name or service not known"):
        resolve("node9", 1234, several_hosts=False)


# ------------------------------------------------------------------------------------------------ the roll call

def member(index: int, count: int = 3, **changes: str) -> Member:
    values = {"host": "a", "versions": "jax 1", "devices": ""} | changes
    return Member(index=index, count=count, pid=100 + index, **values)


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def roll(port: int, members: list[Member], seconds: float) -> list[list[Member] | str]:
    """What each process is told, in the order of `members`."""
    def outcome(future: Future[list[Member]]) -> list[Member] | str:
        try:
            return future.result()
        except StartError as error:
            return str(error)

    with ThreadPoolExecutor(len(members)) as pool:
        return [outcome(future) for future in [pool.submit(call, one, "localhost", port, seconds) for one in members]]


def test_all_are_there(port):
    members = [member(index) for index in (2, 0, 1)]
    assert roll(port, members, 30) == [sorted(members, key=lambda one: one.index)] * 3


def test_who_is_missing_is_named(port):
    want = "1 of 3 processes did not come within 1 s (distributed.timeout): 2 is missing, and these came: 0 on a, 1 on b"
    told = roll(port, [member(0), member(1, host="b")], 1)
    assert all(isinstance(line, str) and line.startswith(want) for line in told), told


@pytest.mark.parametrize(("second", "line"), [
    (member(1, 4), r"process 0 \(a, pid 100\) says that there are 3 processes, and process 1 \(a, pid 101\) says 4"),
    (member(0, host="b"), r"two processes have the id 0: one on a \(pid 100\) and one on b \(pid 100\): give each its own"),
    (member(1, versions="jax 2"), r"has jax 1, and process 1 .* has jax 2: install the same on all hosts"),
])
def test_processes_that_do_not_fit(second, line):
    with pytest.raises(StartError, match=line):
        raise StartError(roll_call.mismatch([member(0)], second) or "")


def test_two_with_one_id_are_both_told(port):
    told = roll(port, [member(0), member(1), member(1, host="b")], 30)
    assert all(isinstance(line, str) and "two processes have the id 1" in line for line in told), told


def test_two_that_would_use_the_same_accelerators():
    first, second = member(0, devices="all"), member(1, devices="all")
    assert "would use the same accelerators" in (roll_call.mismatch([first], second) or "")
    for other in (member(1, devices="0,1"), member(1, devices="all", host="b"), member(1)):
        assert roll_call.mismatch([first], other) is None


@pytest.mark.parametrize(("environs", "refused"), [
    ([slurm(index, 2, "2", index) for index in range(2)], False),  # --gpus-per-task=1: each finds its own under the number 0
    ([slurm(0, 2, "2", 0) | {"JAX_LOCAL_DEVICE_IDS": "0"}, slurm(1, 2, "2", 1) | {"JAX_LOCAL_DEVICE_IDS": "0"}], True),
    ([{}, {}], True),  # nobody has placed them
])
def test_who_is_asked_whether_accelerators_are_its_own(environs, refused):
    members = []
    for index, environ in enumerate(environs):
        processes = find_processes(DistributedConfig(num_processes=2, process_id=index), environ)
        share = share_of(processes, 1, environ)
        devices = Devices(count=2, emulated=False, message=None, local=share.ids)
        members.append(member(index, 2, devices=taken(processes, devices, environ | {"CUDA_VISIBLE_DEVICES": "0"})))
    assert (roll_call.mismatch(members[:1], members[1]) is not None) is refused


def test_what_is_no_process_is_not_counted(port):
    """A health check or a port scanner on the coordinator's port."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(call, member(0, 2), "localhost", port, 30)
        while not first.done():
            try:
                with socket.create_connection(("localhost", port)) as line:
                    line.sendall(b"GET / HTTP/1.0\n")
                    break
            except OSError:
                continue
        second = pool.submit(call, member(1, 2), "localhost", port, 30)
        assert first.result() == second.result() == [member(0, 2), member(1, 2)]


def test_a_port_in_use_is_named(port):
    with socket.create_server(("", port)), pytest.raises(StartError, match=f"port {port} of distributed.coordinator is in use on .*: give"):
        call(member(0), "localhost", port, 5)


def test_nobody_listens(port, monkeypatch):
    monkeypatch.setattr(roll_call, "RETRY", 0.01)
    with pytest.raises(StartError, match=rf"process 1 on a did not reach process 0 at localhost:{port} within 0.1 s .*Connection refused"):
        call(member(1), "localhost", port, 0.1)


def test_something_else_listens(port, monkeypatch):
    monkeypatch.setattr(roll_call, "RETRY", 0.01)
    with socket.create_server(("localhost", port)) as server, ThreadPoolExecutor(1) as pool:
        def answer() -> None:
            line, _ = server.accept()
            with line:
                line.sendall(b"\x00\x00\x18\x04\n")

        answered = pool.submit(answer)
        with pytest.raises(StartError, match="takes no more processes: another program, or the run has begun with another process 1"):
            call(member(1), "localhost", port, 0.5)
        answered.result()


# ------------------------------------------------------------------------------------------------ the script

def start(index: int, count: int, port: int, folder: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "--model", "toy", "--global_batch", str(count), "--emulate", str(count),
               "--distributed.coordinator", f"localhost:{port}", "--distributed.num_processes", str(count),
               "--distributed.process_id", str(index), *more]
    return subprocess.Popen(command, cwd=folder, env=user_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_two_of_three_end_with_one_line(port, tmp_path):
    running = [start(index, 3, port, tmp_path, "--distributed.timeout", "20") for index in (0, 2)]
    for process in running:
        output, errors = process.communicate(timeout=300)
        assert process.returncode == 2 and errors.count("error:") == 1, errors
        assert "1 of 3 processes did not come within 20 s (distributed.timeout): 1 is missing" in errors
        said = output + errors
        assert f"coordinator localhost:{port} (distributed.coordinator)" in said and "1 local device (emulated)" in said
        assert "Traceback" not in errors and "absl" not in errors
    assert not (tmp_path / "runs").exists()


def test_variables_are_checked_before_the_start(tmp_path):
    for value, rule in (("100", "is not a fraction of the GPU's memory"), ("abc", "is not a number")):
        env = user_environment() | {"XLA_PYTHON_CLIENT_MEM_FRACTION": value}
        done = subprocess.run([sys.executable, str(ROOT / "scripts" / "train.py"), "--emulate", "1"], cwd=tmp_path, env=env,
                              capture_output=True, text=True, check=False)
        assert done.returncode == 2 and f"XLA_PYTHON_CLIENT_MEM_FRACTION={value} {rule}" in done.stderr and done.stderr.count("\n") == 1


def test_launchers_are_in_jaxs_order():
    assert [launcher.name for launcher in find.LAUNCHERS] == ["Open MPI", "SLURM"]
