"""The launcher: hosts, GPUs and commands without a process; then tiny scripts, a stand-in for ssh, and one real run.

Who has ended is asked of the kernel with pidfds, so that nothing here sleeps.
"""

import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmeg.launch.hosts import Host, LaunchError, limit, read_hostfile, this_machine
from jaxmeg.launch.hosts import select as select_hosts
from jaxmeg.launch.plan import Options, environment, plan

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "launch.py"
TRAIN = str(ROOT / "scripts" / "train.py")
HOSTFILE = "# the rack\nworker-1 slots=4\n\nworker-2 slots=4  # the new one\n"
linux = pytest.mark.skipif(sys.platform != "linux", reason="pidfds and PR_SET_PDEATHSIG are Linux's")

main = runpy.run_path(str(SCRIPT))["main"]


def user_environment() -> dict[str, str]:
    """That of a user, not of these tests."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_"))}
    return env | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])}


@pytest.fixture
def hostfile(tmp_path) -> str:
    (tmp_path / "hosts").write_text(HOSTFILE)
    return str(tmp_path / "hosts")


@pytest.fixture
def four_gpus(tmp_path) -> Path:
    """The root of a machine with four NVIDIA GPUs."""
    for number in range(4):
        (tmp_path / "root" / "dev" / f"nvidia{number}").mkdir(parents=True)
    return tmp_path / "root"


def host(name: str, gpus: str) -> Host:
    return Host(name, tuple(gpus))


# Which hosts and GPUs.


def test_a_hostfile(hostfile):
    assert read_hostfile(hostfile) == [host("worker-1", "0123"), host("worker-2", "0123")]


@pytest.mark.parametrize(("text", "complaint"), [
    ("a slots=0\n", "hosts:1: a slots=0 has no GPU to use: give 1 or more, or leave the line out"),
    ("a slots=2\n\na slots=4\n", "hosts:3: host a is there already: name every host once, with all its slots"),
    ("# nobody\n", "hosts names no hosts: write lines such as 'worker-1 slots=8'"),
    ("a\n", "hosts:1: 'a' is not a host with its slots"),
    ("a slots=two\n", "hosts:1: 'a slots=two' is not a host"),
    ("a slots=2 max_slots=4\n", "hosts:1: 'a slots=2 max_slots=4' is not a host"),
    ("-oProxyCommand=x slots=1\n", "hosts:1: '-oProxyCommand=x slots=1' is not a host"),
], ids=["no slots", "twice", "empty", "no count", "no number", "more", "an option of ssh"])
def test_a_wrong_hostfile(tmp_path, text, complaint):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(LaunchError, match=r"^[^\n]*$") as error:
        read_hostfile(str(tmp_path / "hosts"))
    assert complaint in str(error.value)


HOSTS = [host("worker-1", "0123"), host("worker-2", "0123")]


@pytest.mark.parametrize(("include", "exclude", "left"), [
    (None, None, HOSTS),
    ("worker-2", None, [host("worker-2", "0123")]),
    ("worker-2:0,2@worker-1", None, [host("worker-1", "0123"), host("worker-2", "02")]),
    ("worker-1:3,1", None, [host("worker-1", "13")]),
    (None, "worker-1", [host("worker-2", "0123")]),
    (None, "worker-1:0,1@worker-2:3", [host("worker-1", "23"), host("worker-2", "012")]),
    (None, "worker-1:0,1,2,3", [host("worker-2", "0123")]),
])
def test_include_and_exclude(include, exclude, left):
    assert select_hosts(HOSTS, include, exclude) == left


@pytest.mark.parametrize(("include", "exclude", "complaint"), [
    ("worker-3", None, "--include=worker-3: unknown host 'worker-3': did you mean worker-"),
    ("worker-1:4", None, "--include=worker-1:4: worker-1 has no GPU '4': use 0, 1, 2 or 3"),
    ("worker-1:", None, "worker-1 has no GPU ''"),
    ("worker-1:0@worker-1:1", None, "host worker-1 is named twice"),
    (None, "worker-1@worker-2", "--exclude=worker-1@worker-2 leaves no hosts: exclude fewer"),
    ("worker-1", "worker-2", "--include=worker-1 and --exclude=worker-2 say the same in two ways"),
])
def test_a_wrong_filter(include, exclude, complaint):
    with pytest.raises(LaunchError) as error:
        select_hosts(HOSTS, include, exclude)
    assert complaint in str(error.value)


def test_limits():
    assert limit(HOSTS, 1, 2) == [host("worker-1", "01")]
    for nodes, gpus, complaint in ((3, None, "--num_nodes=3 is more than the 2 there are (worker-1, worker-2): use 1 to 2"),
                                   (None, 8, "--num_gpus=8 is more than the 4 of worker-1: use 1 to 4"), (None, 0, "--num_gpus=0")):
        with pytest.raises(LaunchError) as error:
            limit(HOSTS, nodes, gpus)
        assert complaint in str(error.value)


def test_the_gpus_of_this_machine(four_gpus, tmp_path):
    assert this_machine({}, four_gpus) == host("localhost", "0123")
    assert this_machine({"CUDA_VISIBLE_DEVICES": "3,1"}, four_gpus) == host("localhost", "31")
    (tmp_path / "part" / "dev" / "nvidia5").mkdir(parents=True)  # a container with one GPU of the host: CUDA calls it 0
    assert this_machine({}, tmp_path / "part") == host("localhost", "0")
    with pytest.raises(LaunchError, match="no NVIDIA GPU to use: give --hostfile, or --emulate N"):
        this_machine({"CUDA_VISIBLE_DEVICES": ""}, four_gpus)


# Commands.


def options(**given) -> Options:
    return Options(**{"script": TRAIN, "arguments": ["--mesh", "tp=2"], **given})


def test_one_process_has_all_gpus_of_its_host(four_gpus):
    [process] = plan(options(), {}, four_gpus)
    assert process.argv == (sys.executable, TRAIN, "--mesh", "tp=2") and not process.remote
    assert process.env["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    [process] = plan(options(include="localhost:1,3"), {}, four_gpus)
    assert process.env["CUDA_VISIBLE_DEVICES"] == "1,3"


def test_a_process_a_gpu(four_gpus):
    processes = plan(options(num_gpus=3, per_host="gpu", master_port=1234), {}, four_gpus)
    assert [process.env["CUDA_VISIBLE_DEVICES"] for process in processes] == ["0", "1", "2"]
    for index, process in enumerate(processes):
        assert process.argv[4:] == ("--distributed.coordinator", "localhost:1234", "--distributed.num_processes", "3",
                                    "--distributed.process_id", str(index))


def test_a_free_port_is_chosen_where_the_first_host_is_this_one():
    [first, second] = plan(options(emulate=4, num_processes=2), {})
    where = first.argv[first.argv.index("--distributed.coordinator") + 1]
    assert where in second.argv and where.startswith("localhost:")
    with socket.socket() as probe:
        probe.bind(("localhost", int(where.partition(":")[2])))
    assert first.argv[4:6] == ("--emulate", "4") and "CUDA_VISIBLE_DEVICES" not in first.env


def test_a_remote_command(hostfile):
    """The shell on the other side gets the same folder, Python, words and the stated part of the environment."""
    environ = {"NCCL_DEBUG": "WARN", "XLA_FLAGS": "--xla_a=1 --xla_b='2'", "JAX_PLATFORMS": "cuda", "PATH": "/my bin:/usr/bin",
               "HOME": "/root", "HF_TOKEN": "secret", "LD_LIBRARY_PATH": "/lib", "PYTHONPATH": "/src", "JAX_LOCAL_DEVICE_IDS": "0"}
    arguments = ["--out", "a b/$HOME", "--data", '{"x": 3, "y\'s": 1}']
    [first, second] = plan(options(hostfile=hostfile, num_gpus=2, ssh_args="-p 2222 -i 'my key'", arguments=arguments), environ)
    for index, (process, name) in enumerate(((first, "worker-1"), (second, "worker-2"))):
        assert process.remote and process.host == name
        *ssh, command = process.argv
        assert ssh[:5] == ["ssh", "-p", "2222", "-i", "my key"] and ssh[-1] == name and "BatchMode=yes" in ssh
        words = shlex.split(command)
        assert words[:5] == ["cd", str(Path.cwd()), "&&", "exec", "env"]
        passed = dict(word.split("=", 1) for word in words[5:words.index(sys.executable)])
        wanted = {key: environ[key] for key in ("NCCL_DEBUG", "XLA_FLAGS", "JAX_PLATFORMS", "PATH", "LD_LIBRARY_PATH", "PYTHONPATH")}
        assert passed == wanted | {"CUDA_VISIBLE_DEVICES": "0,1", "PYTHONUNBUFFERED": "1"}
        assert words[words.index(sys.executable):] == [
            sys.executable, "-m", "jaxmeg.launch.keep", sys.executable, TRAIN, *arguments, "--distributed.coordinator", "worker-1:29500",
            "--distributed.num_processes", "2", "--distributed.process_id", str(index)]


def test_what_another_launcher_said_is_not_passed_on():
    """In a SLURM allocation, the launcher's own processes don't count as SLURM's."""
    [process] = plan(options(emulate=1), {})
    inner = environment(process, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "OMPI_COMM_WORLD_RANK": "1", "HOME": "/root"})
    assert inner == {"SLURM_NTASKS": "4", "HOME": "/root", "PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize(("given", "complaint"), [
    ({"script": "trian.py"}, "trian.py is not a file: give the script to run behind the launcher's own options"),
    ({"arguments": ["--distributed.num_processes=2"]}, "--distributed.num_processes is set by the launcher: leave it out"),
    ({"num_gpus": 8}, "--num_gpus=8 is more than the 4 of localhost: use 1 to 4"),
    ({"num_nodes": 2}, "--num_nodes=2 is more than the 1 there are (localhost): use 1 to 1, or name more hosts in --hostfile"),
    ({"num_processes": 2}, "--num_processes=2 has no effect without --emulate"),
    ({"emulate": 4, "num_processes": 3}, "--num_processes=3 does not divide --emulate=4: use for example --emulate 3"),
    ({"emulate": 0}, "--emulate=0 is no number of them: use 1 or more"),
    ({"emulate": 4, "num_gpus": 2}, "--num_gpus=2 has no effect with --emulate"),
    ({"per_host": "gpu", "master_port": 99999}, "--master_port=99999 is no port"),
])
def test_a_wrong_launch(four_gpus, given, complaint):
    with pytest.raises(LaunchError, match=r"^[^\n]*$") as error:
        plan(options(**given), {}, four_gpus)
    assert complaint in str(error.value)


@pytest.mark.parametrize(("lines", "given", "complaint"), [
    ("a slots=4\nb slots=2\n", {}, "a has 4 GPUs and b 2, but every process must have the same number: use --num_gpus 2, or"),
    ("localhost slots=2\nb slots=2\n", {}, "the first host, localhost, is another machine for b: give --master_addr"),
    ("a slots=2\nb slots=2\n", {"master_addr": "127.0.0.1"}, "--master_addr=127.0.0.1 is another machine for b"),
])
def test_hosts_that_do_not_go_together(tmp_path, lines, given, complaint):
    (tmp_path / "hosts").write_text(lines)
    with pytest.raises(LaunchError) as error:
        plan(options(hostfile=str(tmp_path / "hosts"), **given), {})
    assert complaint in str(error.value)


def test_a_dry_run_prints_the_commands_and_nothing_else(hostfile, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", None)
    assert main(["--hostfile", hostfile, "--per_host", "gpu", "--dry_run", TRAIN, "--dry_run", "-x"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert len(lines) == 8 and not printed.err
    assert all(shlex.split(line)[0] == "ssh" and "train.py --dry_run -x --distributed" in line for line in lines)


@pytest.mark.parametrize("words", ["", "--num_gpus 2", "--numgpus 2 train.py", "--num_gpus two train.py", "--emulate 1 no.py"])
def test_a_mistake_is_one_line(words, capsys):
    try:
        code = main(words.split())
    except SystemExit as stop:
        code = stop.code
    printed = capsys.readouterr()
    assert code == 2 and not printed.out and printed.err.startswith("error: ") and printed.err.count("\n") == 1


# Processes. Each script begins with its number in `me`.

HEAD = """\
import json, os, signal, subprocess, sys
me = int(sys.argv[sys.argv.index("--distributed.process_id") + 1])
"""


@pytest.fixture
def launch(tmp_path):
    """A function that launches a script of this text."""
    started: list[subprocess.Popen[str]] = []

    def start(body: str, *given: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        (tmp_path / "script.py").write_text(HEAD + body)
        command = [sys.executable, str(SCRIPT), *(given or ("--emulate", "3", "--num_processes", "3")), "script.py"]
        started.append(subprocess.Popen(command, cwd=tmp_path, env=user_environment() | (env or {}), stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def read_pids(process: subprocess.Popen[str], count: int) -> list[int]:
    """pidfds of the processes that have said "pid N"."""
    assert process.stdout is not None
    fds = []
    for line in process.stdout:
        if " pid " in f" {line}":
            fds.append(os.pidfd_open(int(line.split()[-1])))
        if len(fds) == count:
            return fds
    raise AssertionError(process.stderr.read() if process.stderr else "")


def assert_gone(fds: list[int]) -> None:
    for fd in fds:
        assert select.select([fd], [], [], 60)[0], "still runs"
        os.close(fd)


def test_output_has_the_number_of_its_process(launch):
    body = "print('out', me); print('part', end='')\nif me == 1: print('err', me, file=sys.stderr)"
    output, errors = launch(body).communicate(timeout=60)
    assert sorted(output.splitlines()) == [f"[{i}] {text}" for i in range(3) for text in (f"out {i}", "part")]
    assert errors == "[1] err 1\n"


def test_the_first_failure_ends_all(launch, tmp_path):
    """Its exit code is the launcher's. Process 0 takes SIGTERM; process 2 doesn't and is killed."""
    body = """
if me == 2: signal.signal(signal.SIGTERM, lambda *_: print("not yet"))
open("pipe", "rb" if me == 1 else "wb").close() if me else None  # process 1 fails when process 2 is ready
if me == 1: sys.exit(7)
while True: signal.pause()
"""
    os.mkfifo(tmp_path / "pipe")
    process = launch(body, "--emulate", "3", "--num_processes", "3", "--grace", "0.2")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 7 and output == "[2] not yet\n"
    assert errors == "error: process 1 on localhost ended with exit code 7: the others get SIGTERM after 0.2 s\n"


@linux
def test_the_others_may_speak_before_they_end(launch, tmp_path):
    """Process 0 notices by itself that process 1 is gone, and says so; the exit code is still that of process 1."""
    body = """
import select
if me == 1:
    print(os.getpid(), file=open("pipe", "w"), flush=True)
    while True: signal.pause()
other = int(open("pipe").read())
watch = os.pidfd_open(other)
os.kill(other, signal.SIGKILL)
select.select([watch], [], [])
print("process 1 is gone")
sys.exit(3)
"""
    os.mkfifo(tmp_path / "pipe")
    process = launch(body, "--emulate", "2", "--num_processes", "2", "--grace", "600")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL and output == "[0] process 1 is gone\n" and "exit code 137" in errors


@linux
def test_of_two_that_end_together_the_killed_one_is_the_cause(launch):
    """The launcher is held until both have ended."""
    body = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(3))\nprint('pid', os.getpid(), flush=True)\nwhile True: signal.pause()"
    process = launch(body, "--emulate", "2", "--num_processes", "2")
    assert process.stdout is not None
    pids = {line[1]: int(line.split()[-1]) for line in (process.stdout.readline() for _ in range(2))}
    fds = [os.pidfd_open(pid) for pid in pids.values()]
    process.send_signal(signal.SIGSTOP)
    os.kill(pids["0"], signal.SIGUSR1)
    os.kill(pids["1"], signal.SIGKILL)
    assert_gone(fds)
    process.send_signal(signal.SIGCONT)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGKILL


ASKED = """
def asked(number, frame):
    print("asked", flush=True)
    if {ends}: sys.exit(128 + number)
for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, asked)
child = subprocess.Popen(["sleep", "600"])
print("pid", child.pid)
print("pid", os.getpid(), flush=True)
while True: signal.pause()
"""


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_all_and_nothing_is_left(launch, number):
    process = launch(ASKED.format(ends=True))
    fds = read_pids(process, 6)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number and not errors
    assert sorted(output.splitlines()) == ["[0] asked", "[1] asked", "[2] asked"]
    assert_gone(fds)


@linux
def test_the_second_signal_kills(launch):
    process = launch(ASKED.format(ends=False))
    fds = read_pids(process, 6)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(3)) == ["[0] asked\n", "[1] asked\n", "[2] asked\n"]
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGKILL
    process.communicate()
    assert_gone(fds)


@linux
def test_a_launcher_that_is_killed_takes_its_processes_along(launch):
    body = "print('pid', os.getpid(), flush=True)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()"
    process = launch(body)
    fds = read_pids(process, 3)
    process.kill()
    assert_gone(fds)
    process.communicate(timeout=60)


@linux
def test_a_single_process_takes_the_launchers_place(tmp_path):
    (tmp_path / "script.py").write_text("import os, sys\nprint(os.getpid(), *sys.argv[1:])\nsys.exit(5)")
    command = [sys.executable, str(SCRIPT), "--emulate", "2", "script.py", "--mesh", "tp=2"]
    with subprocess.Popen(command, cwd=tmp_path, env=user_environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.read() == f"{process.pid} --mesh tp=2 --emulate 2\n"
    assert process.returncode == 5


# Several hosts: a stand-in for ssh that notes the host and gives the command to a shell in a session of its own, as sshd does.

SSH = """#!/bin/sh
for word; do host=$last; last=$word; done
echo "$host" >> ssh.log
HOST=$host setsid sh -c "$last"
exit $?
"""


@pytest.fixture
def two_hosts(launch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").write_text(SSH)
    (tmp_path / "bin" / "ssh").chmod(0o755)
    (tmp_path / "hosts").write_text("alpha slots=2\nbeta slots=2\n")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return lambda body, *given: launch(body, "--hostfile", "hosts", *given, env={"PATH": path})


def test_two_hosts_over_ssh(two_hosts, tmp_path):
    body = "print(json.dumps([os.environ['HOST'], os.environ['CUDA_VISIBLE_DEVICES'], os.getcwd(), sys.argv[1:]]))\nif me == 2: sys.exit(9)"
    process = two_hosts(body, "--per_host", "gpu", "--master_port", "1234")
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 9, errors
    said = dict(line.split(" ", 1) for line in output.splitlines())
    for index, (name, gpu) in enumerate((("alpha", "0"), ("alpha", "1"), ("beta", "0"), ("beta", "1"))):
        assert json.loads(said[f"[{index}]"]) == [name, gpu, str(tmp_path), ["--distributed.coordinator", "alpha:1234",
                                                                             "--distributed.num_processes", "4",
                                                                             "--distributed.process_id", str(index)]]
    assert sorted((tmp_path / "ssh.log").read_text().split()) == ["alpha", "alpha", "beta", "beta"]


@linux
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["a request", "a launcher that is killed"])
def test_signals_cross_ssh(two_hosts, number):
    process = two_hosts(ASKED.format(ends=True))
    fds = read_pids(process, 4)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert_gone(fds)
    if number == signal.SIGTERM:
        assert process.returncode == 143 and sorted(output.splitlines()) == ["[0] asked", "[1] asked"]


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")  # of this process's jax
def test_no_ssh_is_one_line(tmp_path, capsys, monkeypatch, hostfile):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["--hostfile", hostfile, TRAIN]) == 1
    assert capsys.readouterr().err == "error: ssh cannot be started: No such file or directory\n"


# A real run.

FAST_COMPILE = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}


def test_two_processes_train_what_one_does(tmp_path):
    """The same layout over four devices in one process and in two: the same losses and gradient norms."""
    arguments = ["--model", "toy", "--model.num_layers", "1", "--mesh", "dp=4", "--seq_len", "16", "--global_batch", "4",
                 "--steps", "3", "--optim.warmup", "1", "--precision.matmul", "highest", "--train.sample_tokens", "0",
                 "--data.validation_fraction", "0", "--record.tensorboard", "false"]
    found = []
    for count in ("1", "2"):
        command = [sys.executable, str(SCRIPT), "--emulate", "4", "--num_processes", count, TRAIN, *arguments, "--out", f"runs/{count}"]
        done = subprocess.run(command, cwd=tmp_path, env=user_environment() | FAST_COMPILE, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = map(json.loads, (tmp_path / "runs" / count / "metrics.jsonl").read_text().splitlines())
        found.append({(line["step"], key): line[key] for line in lines for key in ("loss", "grad_norm") if key in line})
    one, two = found
    assert len(one) == 6 and one.keys() == two.keys()
    for key in one:
        assert two[key] == pytest.approx(one[key], abs=1e-5), key
