"""What holds for every test: eight emulated CPU devices, strict dtypes, no implicit rank promotion, no compile cache.

It is set through the environment, before jax is imported, so that tests of jax-free modules stay free of jax and the
processes that a test starts inherit it. `gpu_compiler_environment` is what a test marked `aot` gives to its subprocess.
"""

import importlib.util
import os
from importlib.metadata import version

import pytest
from hypothesis import HealthCheck, settings

DEVICES = 8

os.environ["JAX_PLATFORMS"] = "cpu"
# The same HLO, compiled to slower machine code in half the time: the programs are tiny and mostly compiled once. From jax 0.11 on such
# code rounds bf16 in other places than optimised code, and not in the same ones in every program.
FAST = version("jax").startswith("0.10.")
FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true" if FAST else ""
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES} {FAST_COMPILE}".strip()
)
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # what a test compiles never depends on an earlier run


# A machine that is busy with something else is slow, not wrong.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def gpu_compiler_environment() -> dict[str, str]:
    """The environment for a subprocess that compiles for GPUs without one; skips where the extra `aot` is absent."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        pytest.skip('needs the GPU compiler: pip install -e ".[aot]"')
    dropped = ("JAX_PLATFORMS", "XLA_FLAGS")
    env = {name: value for name, value in os.environ.items() if name not in dropped}
    return env | {"CUDA_VISIBLE_DEVICES": "-1", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
