"""The environment variables and XLA flags that decide how collectives start, wait and fail: one table, the checks before the start,
and which of them a failure points to.

PyTorch's TORCH_NCCL_* and NCCL_ASYNC_ERROR_HANDLING are read by nobody here. Must not know jax. Reference: NCCL's list of environment
variables, docs.nvidia.com/deeplearning/nccl; the DebugOptions of XLA.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Variable:
    """One setting. A name that begins with --xla is a flag in XLA_FLAGS."""

    name: str
    does: str
    default: str = "unset"
    """What holds when nobody sets it; "ours: ..." where `defaults` does."""


VARIABLES = (
    Variable(name="XLA_CLIENT_MEM_FRACTION", default="ours: 0.95",
             does="share of a GPU's memory that jax takes at the start; the buffers of NCCL, cuBLAS and CUDA come out of the rest"),
    Variable(name="XLA_PYTHON_CLIENT_MEM_FRACTION", does="older name of XLA_CLIENT_MEM_FRACTION; jax takes one of the two"),
    Variable(name="XLA_PYTHON_CLIENT_PREALLOCATE", default="true", does="false: jax takes memory as it needs it, and fragments it"),
    Variable(name="XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", default="ours: the host's memory",
             does="pinned host memory that checkpoints may pass through"),
    Variable(name="NCCL_DEBUG", default="ours: WARN with several GPUs",
             does="WARN: why NCCL fails; INFO: also links, rings and interfaces"),
    Variable(name="NCCL_SOCKET_IFNAME", does="network interface for NCCL's start and for TCP, for example eth0 or ^docker0,lo"),
    Variable(name="NCCL_IB_HCA", does="InfiniBand adapters that NCCL uses, for example mlx5_0,mlx5_1"),
    Variable(name="NCCL_IB_DISABLE", default="0", does="1: TCP instead of InfiniBand; slow, to find out whether InfiniBand is at fault"),
    Variable(name="NCCL_IB_TIMEOUT", default="20", does="how long InfiniBand waits for an answer: 4.096 us times 2 to this power"),
    Variable(name="NCCL_P2P_DISABLE", default="0",
             does="1: no direct copies between GPUs of a host, to find out whether they are at fault"),
    Variable(name="NCCL_NVLS_ENABLE", default="2", does="0: no NVLink multicast, where a container or virtual machine breaks it"),
    Variable(name="--xla_gpu_nccl_termination_timeout_seconds", default="-1, never",
             does="XLA ends the process when one NCCL operation takes longer; guard.step_seconds says more"),
    Variable(name="--xla_gpu_first_collective_call_terminate_timeout_seconds", default="40",
             does="XLA ends the process when the GPUs of a process don't come to their first collective together"),
    Variable(name="--xla_cpu_collective_call_terminate_timeout_seconds", default="ours: twice guard.step_seconds",
             does="the same for every collective of emulated devices; XLA's own 40 is short on a busy machine"),
    Variable(name="JAX_COORDINATOR_ADDRESS", does="host:port of process 0, where SLURM or Open MPI say the rest"),
    Variable(name="JAX_COORDINATOR_PORT", does="port of the coordinator that jax finds in a launcher's variables"),
    Variable(name="JAX_LOCAL_DEVICE_IDS", does="the accelerators of this process, for example 0,1"),
    Variable(name="JAXMEG_CHECK_PROCESSES", does="1: name the process that does not come to a section all must enter"),
    Variable(name="JAXMEG_VERBOSE", does="1: the traceback, and jax's own text, below the one line of an error"),
)
FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
MEMORY_FRACTION = 0.95
"""What a run takes unless it is told otherwise, and what the planner counts with; jax's own default is 0.75."""
TIGHT = 0.97
"""Above this fraction NCCL's buffers, some 100 MB to 1 GB a GPU, may find no room."""
FOREIGN = ("TORCH_NCCL_", "NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT")
CPU_TIMEOUT = "xla_cpu_collective_call_terminate_timeout_seconds"


def problems(environ: Mapping[str, str]) -> list[str]:
    """What no run can start with, one line each."""
    given = [name for name in FRACTIONS if environ.get(name)]
    if len(given) == 2:
        return [f"{given[0]} and {given[1]} are both set, and jax takes one: unset {given[1]}, the older name"]
    found = []
    for name in given:
        fraction = _fraction(environ[name])
        if fraction is None:
            found.append(f"{name}={environ[name]} is not a number: use a fraction of the GPU's memory, for example 0.9")
        elif fraction <= 0 or (fraction > 1 and not environ.get("TF_FORCE_UNIFIED_MEMORY")):
            percent = f"{fraction / 100:g}" if 1 < fraction <= 100 and fraction / 100 <= TIGHT else "0.9"
            found.append(f"{name}={environ[name]} is not a fraction of the GPU's memory, between 0 and 1: use for example {percent}")
    return found


def warnings(environ: Mapping[str, str], num_devices: int) -> list[str]:
    """What is likely to hurt, or has no effect, one line each. num_devices: accelerators of the run."""
    found = []
    for name in FRACTIONS:
        fraction = _fraction(environ.get(name, ""))
        if num_devices > 1 and fraction is not None and fraction > TIGHT:
            found.append(f"{name}={environ[name]} leaves NCCL little room for its buffers: use 0.95 or less with several GPUs")
    foreign = sorted(name for name in environ if name.startswith(FOREIGN))
    if foreign:
        found.append(f"{', '.join(foreign)} {'is' if len(foreign) == 1 else 'are'} PyTorch's and without effect here: the limit for a step "
                     "is guard.step_seconds")
    return found


def defaults(environ: Mapping[str, str], num_devices: int, step_seconds: int, emulated: bool) -> dict[str, str]:
    """Variables to set because nobody did: name -> value. Emulated devices: XLA_FLAGS with what it held."""
    if emulated:  # XLA's own limit would end a slow step, and a stuck one before the watchdog can say where
        flags, seconds = environ.get("XLA_FLAGS", ""), 2 * step_seconds or 10**6
        return {"XLA_FLAGS": flags if CPU_TIMEOUT in flags else f"{flags} --{CPU_TIMEOUT}={seconds}".strip()}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
    chosen = {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": str(memory)}  # instead of XLA's 64
    if not any(environ.get(name) for name in FRACTIONS):
        chosen["XLA_CLIENT_MEM_FRACTION"] = str(MEMORY_FRACTION)
    if num_devices > 1:
        chosen["NCCL_DEBUG"] = "WARN"
    return {name: value for name, value in chosen.items() if name not in environ}


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What an error of the runtime means."""

    line: str
    """The cause and the setting to change."""
    concerns_others: bool
    """Whether it may only be the echo of what happened to another process."""
    is_memory: bool = False
    """Whether the device's memory was full."""


@dataclass(frozen=True, kw_only=True)
class _Failure:
    pattern: str
    line: str
    concerns_others: bool = False
    is_memory: bool = False


_STATUS = r"\b(UNKNOWN|INTERNAL|UNAVAILABLE|RESOURCE_EXHAUSTED|DEADLINE_EXCEEDED|ABORTED|CANCELLED|DATA_LOSS|FAILED_PRECONDITION): "
_FAILURES = (  # the first that matches counts
    _Failure(pattern=r"NCCL.*out of memory|ncclCommInit\w*.*unhandled cuda error",
             line="NCCL found no memory for its buffers: lower XLA_CLIENT_MEM_FRACTION (0.95 of a GPU by default)"),
    _Failure(pattern=r"RESOURCE_EXHAUSTED|[Oo]ut of memory", is_memory=True,
             line="the device's memory is full: use a smaller pipeline.microbatch or a larger mesh, --remat selective or full, a higher "
                  "--zero, or see what else is on the GPU (XLA_CLIENT_MEM_FRACTION, 0.95 by default)"),
    _Failure(pattern=r"NCCL.*(unhandled system error|remote process exited|[Ss]ocket|[Cc]onnect|network)", concerns_others=True,
             line="NCCL could not reach another process: see whether one has ended; else name the network with NCCL_SOCKET_IFNAME (TCP) or "
                  "NCCL_IB_HCA (InfiniBand), and see what NCCL_DEBUG=INFO says"),
    _Failure(pattern=r"(?i)rendezvous.*(timed out|timeout)|termination timeout|NCCL.*(timed out|timeout|aborted)|DEADLINE_EXCEEDED",
             concerns_others=True,
             line="a collective waited too long for other devices: one of them is late or stuck; the limits are guard.step_seconds and, in "
                  "XLA_FLAGS, --xla_gpu_nccl_termination_timeout_seconds, "
                  "--xla_gpu_first_collective_call_terminate_timeout_seconds and --xla_cpu_collective_call_terminate_timeout_seconds"),
    _Failure(pattern=r"NCCL", concerns_others=True,
             line="NCCL failed: NCCL_DEBUG=INFO says where; NCCL_P2P_DISABLE=1, NCCL_NVLS_ENABLE=0 or NCCL_IB_DISABLE=1 show which link is "
                  "at fault"),
    _Failure(pattern=r"Gloo|(?i:connection (reset|closed|refused)|socket closed|broken pipe)", concerns_others=True,
             line="a process of the run has ended or can't be reached: see what the others say"),
    _Failure(pattern=r"(?i)coordination service|coordinationservice|unhealthy|UNAVAILABLE", concerns_others=True,
             line="jax's coordination between the processes has failed: see what the others say"),
)


def explain(text: str) -> Explanation | None:
    """The setting that an error of NCCL, a collective or the allocator points to; None for any other error.

    text: of the exception. The runtime's have the code of a status, whatever their class (Gloo's are ValueErrors).
    """
    for failure in _FAILURES if re.search(_STATUS, text) else ():
        if re.search(failure.pattern, text, re.DOTALL):
            return Explanation(line=failure.line, concerns_others=failure.concerns_others, is_memory=failure.is_memory)
    return None


def collective_of(text: str, ids: Sequence[int], sizes: Mapping[str, int]) -> str | None:
    """Which collective an error names, its peers and the mesh axes they lie along: "all-reduce.5 among devices 0, 2 (dp)".

    ids: device ids in mesh order; sizes: axis -> size, outermost first. None where the text has no group of devices.
    """
    groups = re.search(r"(?:replica_groups=\{|global_devices=\[|devices=\[|devices=\{)\{?([\d,; ]+)[\]}]", text)
    if groups is None:
        return None
    peers = [int(number) for number in re.findall(r"\d+", groups[1])]
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    name = re.search(rf"\b((?:{kinds})[-\w]*(?:\.\d+)*)", text)
    axes = axes_of(peers, ids, sizes)
    along = f" ({', '.join(axes)})" if axes else ""
    return f"{name[1] if name else 'a collective'} among devices {', '.join(map(str, peers))}{along}"


def axes_of(peers: Sequence[int], ids: Sequence[int], sizes: Mapping[str, int]) -> list[str]:
    """The mesh axes along which these devices differ."""
    places = {device: number for number, device in enumerate(ids)}
    if not peers or not all(peer in places for peer in peers) or math.prod(sizes.values()) > len(ids):
        return []
    found, stride = [], math.prod(sizes.values())
    for axis, size in sizes.items():
        stride //= size
        if len({places[peer] // stride % size for peer in peers}) > 1:
            found.append(axis)
    return found


def _fraction(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
