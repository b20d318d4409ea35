"""The doctor: each check with a healthy and a sick machine, links that corrupt what they carry, children that hang or die, the script."""

import json
import math
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmeg import parallel
from jaxmeg.config import Config, DataConfig, MeshConfig, ModelConfig, OptimConfig, PipelineConfig
from jaxmeg.devices import Devices
from jaxmeg.doctor import examine, forward, gpus, host, links, packages, plan, probe, rates
from jaxmeg.doctor.child import Session, child_environment
from jaxmeg.doctor.finding import Finding, Problem, attempt, conclude, last_error_line

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def said(finding: Finding) -> tuple[str, str]:
    return finding.status, finding.text()


# ------------------------------------------------------------------ findings
def test_a_finding_is_one_line_and_details_on_request_even_if_the_check_fails():
    finding = Finding(name="disk", status="FAIL", line="full", fix="free space", details=("a", "b"))
    assert finding.text() == "FAIL    disk           full: free space"
    assert finding.text(verbose=True).splitlines()[1:] == [f"{'':23}a", f"{'':23}b"]
    found = attempt("x", lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    assert found.status == "FAIL" and found.line.startswith("ZeroDivisionError: ") and "\n" not in found.text()


def test_the_worst_problem_is_the_line_and_none_is_lost():
    found = conclude("x", "fine", [Problem("warn", "w", "fix w"), Problem("FAIL", "f", "fix f")], ["more"])
    assert (found.status, found.line, found.fix) == ("FAIL", "f", "fix f (and 1 more: --verbose)")
    assert found.details == ("warn: w: fix w", "fine", "more")
    assert conclude("x", "fine").status == "ok"


@pytest.mark.parametrize(("text", "line"), [
    ("Traceback (most recent call last):\n  File x\n    raise Error\nRuntimeError: no CUDA\n", "RuntimeError: no CUDA"),
    ("F0719 12:00 x.cc:3] Check failed: a == b\nsome frame\n*** end ***\n", "F0719 12:00 x.cc:3] Check failed: a == b"),
    ("loading\nKilled by nobody knows", "Killed by nobody knows"),
    ("only this\n\n", "only this"),
    ("", None)])
def test_the_last_error_line(text, line):
    assert last_error_line(text) == line


# ------------------------------------------------------------------ packages
GOOD = packages.Facts(
    python="3.11.7", requires_python=">=3.11",
    installed={name: (version,) for name, version in {
        "jaxmeg": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2", "flax": "0.12.8", "numpy": "2.3.0", "jax-cuda13-plugin": "0.10.2",
        "jax-cuda13-pjrt": "0.10.2", "nvidia-cudnn-cu13": "9.12.0.46"}.items()},
    requirements={
        "jaxmeg": ("jax>=0.10.2,<0.13", "flax>=0.12.8", 'matplotlib>=3.10; extra == "plot"'),
        "jax": ("jaxlib<=0.10.2,>=0.10.2", "numpy>=2.0", 'jax-cuda13-plugin<=0.10.2,>=0.10.2; extra == "cuda13"',
                'jax-cuda12-plugin<=0.10.2,>=0.10.2; extra == "cuda12"'),
        "jax-cuda13-plugin": ("jax-cuda13-pjrt==0.10.2", 'nvidia-cudnn-cu13<10.0,>=9.8; extra == "with-cuda"')},
    jax_imported_from="/env/jax/__init__.py", jax_installed_at="/env/jax/__init__.py")


def test_packages_that_fit():
    found = packages.packages(GOOD)
    assert said(found) == ("ok", "ok      packages       python 3.11.7, jaxmeg 0.1.0, jax 0.10.2, jaxlib 0.10.2, flax 0.12.8, "
                                 "jax-cuda13-plugin 0.10.2")
    assert packages.cuda_major(GOOD) == 13 and "nvidia-cudnn-cu13 9.12.0.46" in found.details


@pytest.mark.parametrize(("change", "status", "pieces"), [
    ({"jaxlib": ("0.9.1",)}, "FAIL", ["jaxlib is 0.9.1, and jax 0.10.2 needs jaxlib<=0.10.2,>=0.10.2", "pip install -e"]),
    ({"flax": ()}, "FAIL", ["flax is missing, and jaxmeg 0.1.0 needs flax>=0.12.8"]),
    ({"jax": ("0.8.0",)}, "FAIL", ["jax is 0.8.0, and jaxmeg 0.1.0 needs jax"]),
    ({"jax-cuda13-plugin": ("0.10.1",)}, "FAIL", ["jax-cuda13-plugin is 0.10.1, and jax 0.10.2 needs"]),
    ({"jax-cuda13-pjrt": ("0.10.1",)}, "FAIL", ["jax-cuda13-pjrt is 0.10.1, and jax-cuda13-plugin 0.10.2 needs"]),
    ({"nvidia-cudnn-cu13": ("9.1.0",)}, "FAIL", ["nvidia-cudnn-cu13 is 9.1.0"]),
    ({"jax-cuda12-plugin": ("0.10.2",)}, "FAIL", ["plugins for CUDA 12 and CUDA 13", "pip uninstall jax-cuda12-plugin"]),
    ({"jaxlib": ("0.10.2", "0.9.1")}, "FAIL", ["jaxlib is installed 2 times: 0.10.2 and 0.9.1"])])
def test_packages_that_do_not_fit(change, status, pieces):
    installed = {name: versions for name, versions in (GOOD.installed | change).items() if versions}
    found = packages.packages(replace(GOOD, installed=installed))
    assert found.status == status and all(piece in found.text() for piece in pieces), found.text()


@pytest.mark.parametrize(("change", "status", "piece"), [
    ({"python": "3.10.2"}, "FAIL", "python 3.10.2 is not >=3.11"),
    ({"requires_python": None}, "warn", "jaxmeg is not installed"),
    ({"jax_imported_from": "/tmp/jax.py"}, "warn", "import jax runs /tmp/jax.py")])
def test_a_python_that_does_not_fit(change, status, piece):
    found = packages.packages(replace(GOOD, **change))
    assert found.status == status and piece in found.text()


def test_this_python_is_read():
    found = packages.facts()
    assert found.installed["jax"] == (jax.__version__,) and found.python == sys.version.split()[0]
    assert found.jax_imported_from == jax.__file__ and found.requires_python == ">=3.11"
    assert any(text.startswith(("jax>", "jax<")) for text in found.requirements["jaxmeg"])


# ------------------------------------------------------------------ GPUs
SMI = "".join(f"{i}, NVIDIA H200, 580.95.05, 143771, {used}, {errors}, Disabled\n" for i, (used, errors) in enumerate([(0, 0), (1, 0)]))
NAMES = ("nvidia:0", "nvidia:1")
MACHINE = gpus.Machine(devices=NAMES, visible=NAMES, driver="580.95.05", gpus=gpus.parse_smi(SMI), smi_error=None, environ={})
OLD = gpus.parse_smi(SMI.replace("580.95.05", "535.183.01"))


@pytest.fixture
def plugin(monkeypatch):
    monkeypatch.setattr(gpus, "jax_lacks", lambda found: None)


def test_a_machine_with_gpus(plugin, monkeypatch):
    found = gpus.driver(MACHINE, cuda=13)
    assert said(found) == ("ok", "ok      gpus           2 of 2 visible, NVIDIA H200, driver 580.95.05")
    assert found.details[1] == "GPU 1: NVIDIA H200, 0.0 of 140.4 GiB in use"
    assert gpus.memory(MACHINE).text() == "ok      gpu memory     140.4 GiB free on each GPU, a run takes 0.95 of it"
    monkeypatch.setattr(gpus, "jax_lacks", lambda found: 'pip install "jax[cuda13]"')
    assert gpus.driver(MACHINE, cuda=None).text() == (
        'FAIL    gpus           2 GPUs, and jax has no plugin for them: pip install "jax[cuda13]"')


@pytest.mark.parametrize(("change", "cuda", "status", "piece"), [
    ({"driver": "535.183.01"}, 13, "FAIL",
     'driver 535.183.01 is too old for CUDA 13: install driver 580 or newer, or pip install "jax[cuda12]"'),
    ({"driver": "535.183.01"}, 12, "ok", "driver 535"),
    ({"driver": None, "gpus": OLD}, 13, "FAIL", "driver 535.183.01 is too old"),
    ({"driver": "470.1"}, 12, "FAIL", "install driver 525 or newer"),
    ({"smi_error": "gave no answer in 30 s", "gpus": None}, 13, "FAIL", "nvidia-smi: gave no answer in 30 s"),
    ({"devices": (), "visible": (), "gpus": None}, 13, "FAIL", "no GPU is visible here: start the container with its GPUs"),
    ({"devices": (), "visible": (), "gpus": None, "driver": None}, None, "skipped", "no accelerator"),
    ({"devices": (*NAMES, "nvidia:2")}, 13, "warn", "nvidia-smi lists 2 of 3 GPUs"),
    ({"environ": {"CUDA_VISIBLE_DEVICES": "0,7"}, "visible": NAMES[:1]}, 13, "FAIL",
     "CUDA_VISIBLE_DEVICES=0,7 names GPUs that are not there: use numbers from 0 to 1"),
    ({"environ": {"CUDA_VISIBLE_DEVICES": ""}, "visible": ()}, 13, "FAIL", "CUDA_VISIBLE_DEVICES= names"),
    ({"environ": {"CUDA_VISIBLE_DEVICES": "1"}, "visible": NAMES[1:]}, 13, "ok", "1 of 2 visible"),
    ({"environ": {"JAX_PLATFORMS": "cpu"}, "visible": ()}, 13, "warn", "JAX_PLATFORMS=cpu hides 2 GPUs"),
    ({"gpus": gpus.parse_smi(SMI.replace(" 1, 0, Disabled", " 1, 3, Disabled"))}, 13, "warn", "GPU 1 has 3 uncorrected memory errors"),
    ({"gpus": gpus.parse_smi(SMI.replace("Disabled", "Enabled"))}, 13, "warn", "GPU 0 is cut into MIG instances")])
def test_a_machine_with_sick_gpus(plugin, change, cuda, status, piece):
    found = gpus.driver(replace(MACHINE, **change), cuda)
    assert found.status == status and piece in found.text(), found.text()


def test_memory_that_another_process_holds():
    found = gpus.memory(replace(MACHINE, gpus=gpus.parse_smi(SMI.replace(", 1, 0,", ", 61440, 0,"))))
    assert found.status == "warn" and "another process (GPU 1: 60.0 of 140.4 GiB)" in found.text()


@pytest.mark.parametrize(("environ", "status", "piece"), [
    ({"XLA_CLIENT_MEM_FRACTION": "0.9"}, "ok", "a run takes 0.9 of it"),
    ({"XLA_CLIENT_MEM_FRACTION": "100"}, "FAIL", "XLA_CLIENT_MEM_FRACTION=100 is not a fraction"),
    ({"XLA_CLIENT_MEM_FRACTION": "abc"}, "FAIL", "=abc is not a number"),
    ({"XLA_CLIENT_MEM_FRACTION": "nan"}, "FAIL", "=nan is not a number"),
    ({"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.99"}, "warn", "0.99 leaves NCCL little room"),
    ({"XLA_CLIENT_MEM_FRACTION": ".9", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".9"}, "FAIL", "both set"),
    ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "warn", "slow"),
    ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "ok", "as needed")])
def test_the_share_of_memory(environ, status, piece):
    found = gpus.memory(replace(MACHINE, environ=environ))
    assert found.status == status and piece in found.text(), found.text()


def test_what_the_driver_says_is_read(tmp_path):
    closed = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\nGCC version: 12.3.0"
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22)"
    assert [gpus.driver_version(text) for text in (closed, opened, "?")] == ["535.183.01", "580.95.05", None]
    assert gpus.parse_smi("0, A10, 580.1, 23028, [N/A], [Not Supported], [N/A]\nWARNING: infoROM\n")[0].memory == 23028
    write(tmp_path, dict.fromkeys(("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl", "proc/driver/nvidia/version"), opened))
    machine = gpus.read_machine({"CUDA_VISIBLE_DEVICES": "1", "JAX_PLATFORMS": "cuda"}, tmp_path)
    assert (machine.devices, machine.visible, machine.driver) == (NAMES, NAMES[1:], "580.95.05")


@pytest.mark.parametrize(("code", "answer"), [
    ("print('0, A')", ("0, A\n", None)),
    ("print('Failed to initialize NVML: Driver/library version mismatch'); raise SystemExit(18)",
     (None, "Failed to initialize NVML: Driver/library version mismatch")),
    ("import time; time.sleep(99)", (None, "gave no answer in 0.5 s"))])
def test_what_nvidia_smi_answers(code, answer):
    assert gpus.ask_smi([sys.executable, "-c", code], seconds=0.5 if "sleep" in code else 60) == answer
    assert gpus.ask_smi(["/nowhere/nvidia-smi"]) == (None, None)


# ------------------------------------------------------------------ host
def fake_memory(root: Path, cgroup: str, files: dict[str, str]) -> host.Memory:
    meminfo = f"MemTotal: {64 * 2**20} kB\nMemFree: 5 kB\nMemAvailable: {40 * 2**20} kB\n"
    write(root, {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup, **files})
    return host.read_memory(root)


@pytest.mark.parametrize(("cgroup", "files", "left"), [
    ("0::/\n", {}, 40),
    ("0::/a/b\n", {"sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/b/memory.current": "7",
                   "sys/fs/cgroup/a/memory.max": f"{8 * GIB}", "sys/fs/cgroup/a/memory.current": f"{3 * GIB}"}, 5),
    ("4:memory:/x\n0::/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{10 * GIB}",
                             "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{1 * GIB}"}, 9),
    ("4:memory:/\n", {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
                      "sys/fs/cgroup/memory/memory.usage_in_bytes": "1"}, 40)])
def test_the_memory_that_is_left(tmp_path, cgroup, files, left):
    assert fake_memory(tmp_path, cgroup, files).left == left * GIB


def test_memory_that_is_enough_or_not():
    found = host.Memory(total=64 * GIB, available=40 * GIB, limit=8 * GIB, used=3 * GIB)
    assert host.memory(found, state=4 * GIB).text() == "ok      host memory    5.0 of 64.0 GiB free, this container may have 8.0"
    assert said(host.memory(found, state=6 * GIB))[0] == "warn" and "about 6.0 GiB" in host.memory(found, 6 * GIB).text()
    assert host.memory(replace(found, used=7 * GIB), None).status == "FAIL"


SPACE = host.Space(where="/data", free=100 * GIB, size=200 * GIB, files_left=10**6, error=None)


@pytest.mark.parametrize(("change", "state", "status", "piece"), [
    ({}, 10 * GIB, "ok", "train.out=r: 100.0 GiB free, writable"),
    ({"error": "No space left on device"}, None, "FAIL", "nothing can be written in /data (No space left on device)"),
    ({"error": "Read-only file system"}, 10 * GIB, "FAIL", "Read-only"),
    ({"files_left": 3}, None, "FAIL", "room for 3 more files"),
    ({"free": GIB // 2}, None, "warn", "only 0.50 GiB free"),
    ({}, 150 * GIB, "FAIL", "100.0 GiB free, and a checkpoint has about 150.00 GiB"),
    ({}, 40 * GIB, "warn", "3 checkpoints of about 40.00 GiB")])
def test_the_disk_of_the_run(change, state, status, piece):
    found = host.run_folder(replace(SPACE, **change), "train.out=r", state, keep=2)
    assert found.status == status and piece in found.text(), found.text()


def test_other_disks():
    sick = replace(SPACE, error="Permission denied")
    assert host.compile_cache(sick, "record.compile_cache=x").status == "warn"
    assert host.compile_cache(SPACE, "record.compile_cache=x").status == "ok" and host.compile_cache(None, "off").status == "skipped"
    small = replace(SPACE, free=64 * 2**20, size=64 * 2**20)
    assert [host.shared_memory(small, gpus).status for gpus in (0, 1, 8)] == ["ok", "ok", "warn"]
    assert "--shm-size" in host.shared_memory(small, 8).text() and host.shared_memory(None, 8).status == "skipped"


def test_a_folder_that_is_not_there_yet_is_looked_for_above(tmp_path, monkeypatch):
    found = host.read_space(tmp_path / "a" / "b")
    assert (found.where, found.error) == (str(tmp_path), None) and found.free > 0 and list(tmp_path.iterdir()) == []

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host.os, "fsync", full)
    assert host.read_space(tmp_path).error == "No space left on device" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("change", "status", "piece"), [
    ({}, "ok", "65,536 open files, unlimited processes, 16 cores"),
    ({"files": 1024, "files_most": 524288}, "warn", "1,024 open files are few for checkpoints and data: ulimit -n 65536"),
    ({"files": 1024, "files_most": 1024}, "warn", "limits.conf"),
    ({"processes": 512}, "warn", "512 processes and threads are few"),
    ({"cores": 2}, "warn", "2 cores for 8 accelerators")])
def test_limits(change, status, piece):
    fine = host.Limits(files=65536, files_most=None, processes=None, locked=None, cores=16)
    found = host.limits(replace(fine, **change), num_accelerators=8)
    assert found.status == status and piece in found.text(), found.text()


def test_a_port_that_is_taken_is_named():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen(1)
        name = f"localhost:{listener.getsockname()[1]}"
        found = host.ports(host.read_ports(name, is_first=True))
        assert found.status == "FAIL" and f"coordinator {name}: Address already in use" in found.text()
        assert host.read_ports(name, is_first=False).coordinator_error is None
    assert host.read_ports(name, is_first=True).coordinator_error is None
    assert host.read_ports("localhost", is_first=True).coordinator_error == "is not host:port"


def test_names_without_an_address(monkeypatch):
    def unknown(name, port):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(host.socket, "getaddrinfo", unknown)
    assert host.ports(host.read_ports("node7:1234", is_first=False)).text().startswith(
        "FAIL    ports          coordinator node7:1234: node7 has no address: Name or service not known")
    assert host.ports(host.read_ports(None, is_first=True)).status == "warn"


# ------------------------------------------------------------------ the config
def test_the_batch_is_spelled_out():
    config = Config(mesh=MeshConfig(pp=2, dp=2), pipeline=PipelineConfig(microbatch=2), data=DataConfig(global_batch=32, seq_len=128))
    found = plan.config(config, 4, is_given=True)
    # 16 rows a data rank in 8 microbatches; 1F1B on 2 stages idles (2 - 1) / (2 - 1 + 8) of the time.
    assert said(found) == ("ok", "ok      config         32 rows = 8 microbatches x 2 rows x 2 data ranks, 4,096 tokens an update, "
                                 "bubble 11.1%")
    tokens = len((ROOT / "jaxmeg/data/shakespeare.txt").read_bytes())
    assert f"about {tokens:,} tokens: {int(tokens * 0.95 - 1) // 128 // 32} updates an epoch" in " ".join(found.details)


def test_a_config_that_breaks_rules_costs_time_or_is_not_given(tmp_path):
    broken = Config(mesh=MeshConfig(tp=3, dp=1), data=DataConfig(train=str(tmp_path / "nowhere.txt")))
    found = plan.config(broken, 3, is_given=True)
    assert found.status == "FAIL" and "nowhere.txt does not exist" in found.text() and "more: --verbose" in found.text()
    assert any("mesh.tp=3 does not divide" in line for line in found.details)
    assert plan.config(Config(), 1, is_given=False).status == "skipped"
    unread = plan.config(Config(), 1, True, ("unknown key x: did you mean y?",))
    assert unread.text() == "FAIL    config         unknown key x: did you mean y?"
    few = Config(mesh=MeshConfig(pp=4, dp=1), pipeline=PipelineConfig(microbatch=16), data=DataConfig(global_batch=32))
    found = plan.config(few, 4, is_given=True)
    assert found.status == "warn" and "2 microbatches are fewer than mesh.pp=4 stages" in found.text()


def test_a_vocabulary_that_is_too_small():
    config = Config(model=ModelConfig(preset="toy", vocab_size=200), mesh=MeshConfig(dp=1))
    found = plan.config(config, 1, is_given=True)
    assert found.status == "FAIL" and "model.vocab_size=200 is too small for the data, whose token ids go up to 255" in found.text()


def test_the_size_of_a_checkpoint():
    toy = ModelConfig(preset="toy")  # 172,608 parameters
    assert [plan.state_bytes(Config(model=toy, optim=OptimConfig(name=name))) for name in ("adamw", "lion")] == [172_608 * 12, 172_608 * 8]
    assert plan.state_bytes(Config(model=ModelConfig(module="a:b"))) is None


# ------------------------------------------------------------------ the child
def child(code: str) -> Session:
    return Session([sys.executable, "-c", f"import json, os, sys, time\n{code}"], os.environ)


FINDING = """
def say(message): print(json.dumps(message), flush=True)
def finding(name): say({"finding": {"name": name, "status": "ok", "line": "fine", "details": ["d"], "fix": None}})
"""


def test_findings_come_through_whatever_else_is_printed():
    noise = "print('NCCL version 2'); print('{}'); print('[1]')"
    with child(f"{FINDING}\n{noise}; finding('a'); say({{'at': 'x'}}); finding('b')") as session:
        assert [session.finding(name, 60).name for name in "ab"] == ["a", "b"]
        assert session.finding("c", 60).status == "skipped"


@pytest.mark.parametrize(("code", "seconds", "pieces"), [
    ("say({'at': 'all-gather over tp'}); time.sleep(99)", 0.5, ["no answer in 0 s at all-gather over tp"]),
    ("say({'at': 'x'}); print('F0 a.cc:1] Check failed: b', file=sys.stderr, flush=True); os.abort()", 60,
     ["Check failed: b", "signal SIGABRT at x"]),
    ("raise RuntimeError('no device')", 60, ["RuntimeError: no device", "exit code 1"]),
    ("os.kill(os.getpid(), 9)", 60, ["ended with signal SIGKILL"])])
def test_a_child_that_hangs_or_dies_is_a_finding(code, seconds, pieces):
    with child(f"{FINDING}\nfinding('a')\n{code}") as session:
        assert session.finding("a", 60).status == "ok"
        lost = session.finding("b", seconds)
        assert lost.status == "FAIL" and all(piece in lost.text() for piece in pieces) and "\n" not in lost.text(), lost.text()
        assert session.finding("c", 60).text() == "skipped c              not tried after b"


def test_the_environment_of_the_child():
    emulated = child_environment({"XLA_FLAGS": "--a"}, Devices(count=8, emulated=True, message=None), num_processes=2, step_seconds=9)
    assert emulated["JAX_PLATFORMS"] == "cpu" and set(emulated["XLA_FLAGS"].split()) >= {"--a", "--xla_force_host_platform_device_count=4"}
    given = {"A": "b", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    real = child_environment(given, Devices(count=8, emulated=False, message=None), num_processes=2, step_seconds=9)
    assert real.items() >= given.items() and "JAX_PLATFORMS" not in real
    assert child_environment({}, Devices(count=1, emulated=False, message=None), 1, 9)["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


# ------------------------------------------------------------------ on the devices
def test_devices_that_are_missing():
    planned = Devices(count=8, emulated=True, message=None)
    assert probe.devices(jax.devices(), planned).status == "ok"
    found = probe.devices(jax.devices(), replace(planned, count=16))
    assert found.status == "FAIL" and "jax sees 8 devices (8 x cpu), and the run has 16" in found.text()
    assert "jax sees no accelerator, only 8 x cpu" in probe.devices(jax.devices(), replace(planned, emulated=False)).text()


def test_the_mesh_of_a_config_that_cannot_run_is_all_devices():
    assert probe.mesh_of(Config(mesh=MeshConfig(tp=2, dp=2)), 4) == {"pp": 1, "rep": 1, "dp": 2, "ep": 1, "cp": 1, "tp": 2}
    assert probe.mesh_of(Config(mesh=MeshConfig(tp=3)), 4) == {"dp": 4}


def test_a_loss_or_gradient_that_is_wrong():
    right = math.log(256)
    assert forward.judge(right, 256, 2.0, 2.05, "fp32").status == "ok"
    assert "not ln 256" in forward.judge(right + 0.01, 256, 2.0, 2.0, "fp32").text()
    for square, slope in ((2.0, 1.0), (0.0, 0.0), (math.nan, 1.0), (2.0, math.nan)):
        assert forward.judge(right, 256, square, slope, "fp32").status == "FAIL"
    assert forward.judge(math.nan, 256, 2.0, 2.0, "fp32").status == "FAIL"


def test_a_device_far_below_its_peers():
    found = [rates.Rate(str(i), "NVIDIA H200", 700.0, 4000.0) for i in range(4)]
    assert rates.rates(found, emulated=False).text() == "ok      rates          matmul 700 TFLOP/s, memory 4e+03 GB/s"
    slow = [*found[:3], rates.Rate("3", "NVIDIA H200", 500.0, 4000.0)]
    assert "device 3 multiplies at 500 TFLOP/s, its peers at 700" in rates.rates(slow, emulated=False).text()
    capped = [rate._replace(tflops=300.0) for rate in found]
    assert rates.rates(capped, emulated=False).status == "warn" and rates.rates(slow, emulated=True).status == "ok"
    forgetful = [*found[:3], rates.Rate("3", "NVIDIA H200", 700.0, 2000.0)]
    assert "device 3 moves memory at 2e+03 GB/s" in rates.rates(forgetful, emulated=False).text()


def test_rates_are_measured_on_each_device():
    told = []
    found = rates.measure(jax.devices()[:2], emulated=True, tell=told.append)
    assert [rate.device for rate in found] == ["0", "1"] and told == ["device 0", "device 1"]
    assert all(rate.tflops > 0 and rate.gbytes > 0 for rate in found)


def test_every_pair_and_a_link_that_changes_a_value(monkeypatch):
    devices = jax.devices()[:3]
    assert links.pairs(devices, emulated=True).text().startswith("ok      pairs          6 pairs of 3 devices: all values arrive")
    good = jax.lax.ppermute

    def bad(x, axis, routes):  # what device 0 sends to 2 arrives with its first value changed
        changed = x.at[0].add(np.float32(1))
        return jax.numpy.where((jax.lax.axis_index(axis) == 2) & ((0, 2) in routes), good(changed, axis, routes), good(x, axis, routes))

    monkeypatch.setattr(links.lax, "ppermute", bad)
    found = links.pairs(devices, emulated=True)
    assert found.status == "FAIL" and found.line == f"device 0 to 2: 1 of {links.FEW} values arrive wrong", found.text()
    assert {check.status for check in (links.pairs(devices[:1], True), links.collectives({"dp": 1}, devices[:1], True))} == {"skipped"}


def test_a_wrong_collective_is_named_with_its_axis(monkeypatch):
    monkeypatch.setattr(links, "VERBS", {name: links.VERBS[name] for name in ("all-reduce", "reduce-scatter")})
    good = parallel.reduce_scatter

    def bad(x, axes, dim):  # over tp, rank 1 gets the part of rank 0
        return good(x, axes, dim) if axes == ("dp",) else good(jax.numpy.concatenate([x[: x.size // 2]] * 2), axes, dim)

    monkeypatch.setattr(parallel, "reduce_scatter", bad)
    told = []
    found = links.collectives({"dp": 2, "tp": 2}, jax.devices()[:4], emulated=True, tell=told.append)
    assert found.status == "FAIL" and found.line.startswith("reduce-scatter over tp in fp32 is wrong on device 1: "), found.text()
    wrong = {line.split(" is wrong")[0].removeprefix("FAIL: ") for line in (found.line, *found.details) if " is wrong on" in line}
    assert wrong == {"reduce-scatter over tp in fp32", "reduce-scatter over tp in bf16"}
    assert "all-reduce over dp in bf16" in told and len(told) == 8


# ------------------------------------------------------------------ the whole
def doctor(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run([sys.executable, str(ROOT / "scripts/doctor.py"), *words], env=kept | environ, capture_output=True, text=True,
                          timeout=600)


def statuses(text: str) -> dict[str, str]:
    return {line[8:23].strip(): line[:8].strip() for line in text.splitlines() if line.startswith(("ok ", "warn ", "FAIL ", "skipped "))}


NAMES_IN_ORDER = [*(name for name, _ in examine.HOST_CHECKS), *examine.DEVICE_CHECKS]


def test_a_healthy_machine(tmp_path):
    file = tmp_path / "doctor.json"
    result = doctor("--mesh", "dp=2,tp=2", "--verbose", "--json", str(file), "--out", str(tmp_path / "run"))
    found = statuses(result.stdout)
    assert list(found) == NAMES_IN_ORDER and "FAIL" not in found.values(), result.stdout + result.stderr
    assert result.returncode == 0 and result.stderr == ""
    for piece in ("12 pairs of 4 devices", "loss 5.54518 = ln 256", "all-to-all over tp in bf16", "6 collectives in fp32 and bf16 agree",
                  "32 rows = 1 microbatch x 16 rows x 2 data ranks", "emulated: rates mean nothing"):
        assert piece in result.stdout, piece
    assert [row["name"] for row in json.loads(file.read_text())] == NAMES_IN_ORDER
    assert not (tmp_path / "run").exists()


def test_a_broken_config_and_a_broken_jax(tmp_path):
    (tmp_path / "jax.py").write_text("raise RuntimeError('this jax is broken')")
    result = doctor("--mesh", "tp=3", PYTHONPATH=str(tmp_path))
    found = statuses(result.stdout)
    assert result.returncode == 1 and "Traceback" not in result.stdout + result.stderr, result.stderr
    assert list(found) == NAMES_IN_ORDER and found["config"] == found["jax"] == "FAIL" and found["forward"] == "skipped"
    assert "RuntimeError: this jax is broken" in result.stdout and "mesh.tp=3 does not divide" in result.stdout
    assert f"import jax runs {tmp_path / 'jax.py'}" in result.stdout and result.stdout.splitlines()[-1] == "2 failed: start with config"


def test_a_package_that_is_missing_altogether(tmp_path):
    (tmp_path / "jsonargparse.py").write_text("raise ModuleNotFoundError(\"No module named 'jsonargparse'\")")
    result = doctor(PYTHONPATH=str(tmp_path))
    assert (result.returncode, result.stderr) == (1, "")
    assert result.stdout.startswith("FAIL    packages       No module named 'jsonargparse': run pip install")


@pytest.mark.slow
def test_two_processes():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    words = ["--mesh", "dp=2,tp=2", "--distributed.coordinator", f"localhost:{port}", "--distributed.num_processes", "2"]
    environ = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    both = [subprocess.Popen([sys.executable, str(ROOT / "scripts/doctor.py"), *words, "--distributed.process_id", str(index)], env=environ,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for index in range(2)]
    (first, error), (second, _) = (process.communicate(timeout=600) for process in both)
    assert [process.returncode for process in both] == [0, 0], first + error + second
    assert list(statuses(first)) == NAMES_IN_ORDER and second == "" and "12 pairs of 4 devices in 2 processes" in first
