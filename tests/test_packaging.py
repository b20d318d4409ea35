"""What is shipped (data files), and what README, pins and extras promise, down to a compile for GPUs without one."""

import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
TEST_COMMAND = 'python3 -m venv .venv && . .venv/bin/activate && pip install -e ".[dev]" && pytest'


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.mark.smoke
def test_the_text_is_shipped():
    """8 plays, ASCII, and the entropy that jaxmeg/data/README.md states: the loss to beat is 2.482 nats."""
    text = (resources.files("jaxmeg") / "data" / "shakespeare.txt").read_bytes()
    assert len(text) == 1_041_710 and text.isascii()
    codes = np.frombuffer(text, np.uint8).astype(np.int64)
    pairs = np.bincount(codes[:-1] * 256 + codes[1:], minlength=65536).reshape(256, 256)
    first = pairs.sum(1, keepdims=True)
    seen = pairs > 0
    nats = -(pairs[seen] / pairs.sum() * np.log((pairs / np.maximum(first, 1))[seen])).sum()
    assert round(float(nats), 3) == 2.482


def test_the_gpu_target_is_shipped():
    text = (resources.files("jaxmeg") / "targets" / "h200.txt").read_text(encoding="utf-8")
    assert 'device_description_str: "NVIDIA H200"' in text


def test_the_readme_has_the_test_command():
    """Once, on a line of its own, as .ci/run looks for it."""
    assert (ROOT / "README.md").read_text(encoding="utf-8").splitlines().count(TEST_COMMAND) == 1


def test_tools_are_pinned_exactly():
    """pre-commit and CI use what the extra `dev` installs; a floating linter would fail changes that did nothing."""
    dev = project()["project"]["optional-dependencies"]["dev"]
    for tool in ("ruff", "pyright", "pre-commit"):
        assert any(requirement.startswith(f"{tool}==") for requirement in dev), tool


def test_the_compiler_alone_is_part_of_the_full_gpu_install():
    """`aot` names no version that `jax[cuda13]` would not: both take the plugin of exactly jax's version."""
    extras = project()["project"]["optional-dependencies"]
    assert extras["cuda13"] == ["jax[cuda13]; sys_platform == 'linux'"]
    assert extras["aot"][0] == "jax[cuda13-local]; sys_platform == 'linux'"


COMPILE_FOR_8_H200 = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

target = open(sys.argv[1]).read()
topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x8x1")
mesh = Mesh(np.array(topology.devices).reshape(8), ("dp",))
x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("dp")))
w = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
step = jax.jit(lambda x, w: jnp.sum((x @ w).astype(jnp.float32)))
compiled = step.trace(x, w).lower(lowering_platforms=("cuda",)).compile()
print(len(topology.devices), "all-reduce" in compiled.as_text(), compiled.memory_analysis().argument_size_in_bytes)
"""


@pytest.mark.aot
def test_compiles_for_8_h200_without_a_gpu(gpu_compiler_environment):
    target = resources.files("jaxmeg") / "targets" / "h200.txt"
    result = subprocess.run(
        [sys.executable, "-c", COMPILE_FOR_8_H200, str(target)],
        env=gpu_compiler_environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    argument_bytes = (1024 // 8 * 512 + 512 * 256) * 2
    assert result.stdout.split() == ["8", "True", str(argument_bytes)]
