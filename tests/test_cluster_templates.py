"""Slurm script, JobSet, environment file and Dockerfile: rendered, parsed, and as far as possible run with stand-ins.

No cluster, no container engine and no GPU has seen them; what is tested is what can be without.
"""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxmeg.cli import read
from jaxmeg.config import Config

SETUP = Path(__file__).resolve().parents[1] / "tpu_gpu_setup"
ROOT = SETUP.parent
COMMAND = ["scripts/train.py", "--mesh", "tp=8", "--out", "runs/it's $(PROCESS_ID) $$ $HOME @@{name}", "--steps", "3"]
SIZES = ["--nodes", "2", "--gpus", "8", "--name", "llama-8b"]
KUBERNETES = ["kubernetes", *SIZES, "--image", "registry.example.com/jaxmeg:1", "--claim", "shared"]

render = runpy.run_path(str(SETUP / "render.py"))["main"]


def rendered(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert render([*argv, "--", *COMMAND]) == 0
    return capsys.readouterr().out


def assert_is_the_run(config: Config, index: int) -> None:
    assert (config.mesh.tp, config.train.steps, config.train.out) == (8, 3, COMMAND[4])
    assert (config.distributed.num_processes, config.distributed.process_id) == (2, index)


def test_the_slurm_script_is_bash_with_the_right_options(capsys, tmp_path):
    text = rendered(capsys, "slurm", *SIZES, "--time", "2-00:00:00")
    assert text.startswith("#!/bin/bash\n")
    (tmp_path / "job").write_text(text)
    subprocess.run(["bash", "-n", "job"], cwd=tmp_path, check=True)
    header = text[: text.index("\nset -euo")]  # sbatch reads options up to the first command
    found = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", header, re.MULTILINE))
    assert found.items() >= {"job-name": "llama-8b", "nodes": "2", "ntasks-per-node": "1", "gpus-per-node": "8", "time": "2-00:00:00",
                             "signal": "TERM@300", "exclusive": ""}.items()
    assert len(found) == text.count("#SBATCH")


STANDINS = {
    "scontrol": 'test "$*" = "show hostnames gpu[07-08]" && printf "gpu07\\ngpu08\\n"',
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; SLURM_PROCID=0 "$@"; SLURM_PROCID=1 "$@"',
    "python": f'exec {shlex.quote(sys.executable)} -c "import json, os, sys; '
              'print(json.dumps([sys.argv[1:], os.environ[\'XLA_FLAGS\']]))" "$@"',
}


def test_the_slurm_script_starts_both_processes(capsys, tmp_path):
    """Run by bash, with stand-ins for what the cluster brings; the words arrive as they were given."""
    (tmp_path / "bin").mkdir()
    for name, body in STANDINS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "12345678",
           "SLURM_JOB_NODELIST": "gpu[07-08]", "SLURM_JOB_NUM_NODES": "2", "HOME": "/elsewhere"}
    done = subprocess.run(["bash", "-s"], input=rendered(capsys, "slurm", *SIZES), cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 2
    for index, (argv, flags) in enumerate(lines):
        assert argv[0] == "scripts/train.py" and flags.startswith("--xla_gpu")
        config = read(argv[1:])
        assert_is_the_run(config, index)
        assert config.distributed.coordinator == f"gpu07:{20000 + 12345678 % 20000}"


def test_the_jobset(capsys):
    manifest = yaml.safe_load(rendered(capsys, *KUBERNETES))
    assert (manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet", "llama-8b")
    [jobs] = manifest["spec"]["replicatedJobs"]
    job = jobs["template"]["spec"]
    assert (jobs["replicas"], job["completions"], job["parallelism"], job["completionMode"], job["backoffLimit"]) == (1, 2, 2, "Indexed", 0)
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # a Job allows Never and OnFailure only
    [container] = pod["containers"]
    assert container["image"] == "registry.example.com/jaxmeg:1" and container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "shared"
    assert all(isinstance(word, str) for word in container["command"] + container["args"])
    for index in range(2):
        argv = expand(container["args"], {"PROCESS_ID": str(index)})
        assert container["command"] == ["python"] and argv[0] == "scripts/train.py"
        config = read(argv[1:])
        assert_is_the_run(config, index)
        host, port = str(config.distributed.coordinator).split(":")
        assert host == f"llama-8b-{jobs['name']}-0-0.llama-8b"  # JobSet's name for pod 0 of job 0
        assert container["ports"] == [{"containerPort": int(port)}]
    [first, *others] = container["env"]
    assert first["name"] == "PROCESS_ID" and "job-completion-index" in first["valueFrom"]["fieldRef"]["fieldPath"]
    assert {entry["name"]: entry["value"] for entry in others} == sourced()


def expand(words: list[str], values: dict[str, str]) -> list[str]:
    """Kubernetes' rule: $(NAME) is the variable's value if there is one, and $$ is a $."""
    pattern = re.compile(r"\$\$|\$\((\w+)\)")
    return [pattern.sub(lambda match: "$" if match[0] == "$$" else values.get(match[1], match[0]), word) for word in words]


def sourced() -> dict[str, str]:
    """nvidia.env as bash reads it."""
    done = subprocess.run(["bash", "-c", "set -a; . ./nvidia.env; env -0"], cwd=SETUP, env={}, capture_output=True, text=True, check=True)
    return {name: value for name, _, value in (entry.partition("=") for entry in done.stdout.split("\0") if entry)
            if name not in ("PWD", "SHLVL", "_", "OLDPWD")}


@pytest.mark.parametrize(("argv", "complaint"), [
    (["slurm", *SIZES], "no command to run: put it behind --"),
    (["slurm", "--nodes", "0", "--gpus", "8", "--", "x.py"], "--nodes=0 is no number of them"),
    (["slurm", "--nodes", "1", "--gpus", "1", "--name", "My Job", "--", "x.py"], "--name=My Job is no name for a job"),
    (["kubernetes", *SIZES, "--", "x.py"], "required: --image, --claim"),
    (["slurm", *SIZES, "--image", "x", "--", "x.py"], "unrecognized arguments: --image"),
])
def test_a_mistake_is_one_line(capsys, argv, complaint):
    with pytest.raises(SystemExit, match="2"):
        render(argv)
    printed = capsys.readouterr()
    assert complaint in printed.err and printed.err.count("\n") == 1 and not printed.out


def xla_takes(flags: str) -> subprocess.CompletedProcess[str]:
    """Start jax with these flags; XLA ends a process whose flags it does not know."""
    env = {"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    return subprocess.run([sys.executable, "-c", "import jax; jax.jit(lambda x: x + 1)(1.0)"], env=env, capture_output=True, text=True)


def test_xla_knows_every_flag_of_the_environment_file():
    """In this jaxlib, and one that nobody knows is refused."""
    flags = sourced()["XLA_FLAGS"]
    assert xla_takes(flags).returncode == 0
    refused = xla_takes(f"{flags} --xla_gpu_hides_all_latency=true")
    assert refused.returncode != 0 and "xla_gpu_hides_all_latency" in refused.stderr


def test_the_environment_file_is_read_the_same_by_docker():
    """`docker --env-file` takes a line as it stands: no quotes, no references, no `export`."""
    lines = [line for line in (SETUP / "nvidia.env").read_text().splitlines() if line and not line.startswith("#")]
    assert dict(line.split("=", 1) for line in lines) == sourced() and len(lines) >= 2


def instructions() -> list[list[str]]:
    text = (SETUP / "Dockerfile").read_text().replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def test_the_dockerfile():
    lines = instructions()
    assert lines[0] == ["FROM", "python:3.12-slim"]
    copied = [source for name, *words in lines if name == "COPY" for source in words[:-1]]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    names = [line[0] for line in lines]
    install = next(number for number, line in enumerate(lines) if line[:2] == ["RUN", "pip"])
    before = {source for name, *words in lines[:install] if name == "COPY" for source in words[:-1]}
    assert before >= {"pyproject.toml", "README.md", "LICENSE", "jaxmeg"}  # what the build of the package reads
    assert names.index("USER") > install and lines[names.index("USER")][1] not in ("root", "0")
    assert (ROOT / json.loads(" ".join(lines[names.index("CMD")][1:]))[0]).is_file()
