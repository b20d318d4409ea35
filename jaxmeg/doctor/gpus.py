"""NVIDIA driver and GPUs as the machine tells them, without jax: the driver's files, nvidia-smi, the environment.

`read_machine` probes, the rest judges plain values. Nothing here opens a device. References: `nvidia-smi
--help-query-gpu`, and the driver versions in https://docs.jax.dev/en/latest/installation.html
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxmeg.doctor.finding import Finding, Problem, conclude, last_error_line, problem_of
from jaxmeg.hardware import accelerators, jax_lacks
from jaxmeg.processes import variables

OLDEST_DRIVER = {12: 525, 13: 580}  # by major version of CUDA
COLUMNS = ("index", "name", "driver_version", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total", "mig.mode.current")
SMI = ["nvidia-smi", f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader,nounits"]
SMI_SECONDS = 30
OTHERS_USE = 0.03  # of a GPU's memory: less than this is the driver's own
MIB_PER_GIB = 1024


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A row of nvidia-smi; memory in MiB."""

    index: str
    name: str
    driver: str
    memory: float
    used: float
    errors: float
    """Uncorrected memory errors since the driver was loaded; 0 where it does not count them."""
    mig: bool


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What was read."""

    devices: tuple[str, ...]
    """All accelerators, as `hardware.accelerators` names them."""
    visible: tuple[str, ...]
    """Those that the environment leaves."""
    driver: str | None
    """Of the kernel module, such as 580.159.03."""
    gpus: tuple[Gpu, ...] | None
    """None where nvidia-smi is not installed or failed."""
    smi_error: str | None
    """How nvidia-smi failed."""
    environ: Mapping[str, str]


def read_machine(environ: Mapping[str, str], root: Path = Path("/")) -> Machine:
    """Look at device files, the driver's version and nvidia-smi."""
    file = root / "proc/driver/nvidia/version"
    plain = {name: value for name, value in environ.items() if name not in ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS")}
    answer, error = ask_smi()
    return Machine(
        devices=tuple(accelerators(plain, root)), visible=tuple(accelerators(environ, root)),
        driver=driver_version(file.read_text()) if file.is_file() else None,
        gpus=None if answer is None else parse_smi(answer), smi_error=error, environ=environ)


def ask_smi(command: list[str] = SMI, seconds: float = SMI_SECONDS) -> tuple[str | None, str | None]:
    """(what it prints, how it failed); both None where there is no nvidia-smi."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except FileNotFoundError:
        return None, None
    except subprocess.TimeoutExpired:
        return None, f"gave no answer in {seconds} s"
    except OSError as error:
        return None, error.strerror
    if done.returncode:
        return None, last_error_line(done.stdout + done.stderr) or f"exit code {done.returncode}"
    return done.stdout, None


def driver_version(text: str) -> str | None:
    """From the driver's own line in /proc: "... Kernel Module for x86_64  580.95.05  Release Build ..." -> 580.95.05."""
    found = re.search(r"Kernel Module\b.*?\s(\d+\.\d[\d.]*)", text)
    return found[1] if found else None


def parse_smi(text: str) -> tuple[Gpu, ...]:
    """The rows of SMI's answer. Columns that a GPU does not have read [N/A]."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == len(COLUMNS) - 1]
    return tuple(Gpu(index=index, name=name, driver=driver, memory=_number(memory), used=_number(used), errors=_number(errors),
                     mig=mig == "Enabled") for index, name, driver, memory, used, errors, mig in rows)


def _number(cell: str) -> float:
    return float(cell) if re.fullmatch(r"\d+(\.\d+)?", cell) else 0.0


def driver(machine: Machine, cuda: int | None) -> Finding:
    """Is the driver there, new enough for the installed packages, and does it show all GPUs? cuda: its major version there."""
    gpus, version = machine.gpus or (), machine.driver or (machine.gpus[0].driver if machine.gpus else None)
    if not machine.devices and not version and not machine.smi_error:
        return Finding(name="gpus", status="skipped", line="no accelerator on this machine: the CPU is used")
    kinds = ", ".join(dict.fromkeys(gpu.name for gpu in gpus)) or (machine.devices[0].split(":")[0] if machine.devices else "no GPU")
    fine = f"{len(machine.visible)} of {len(machine.devices)} visible, {kinds}" + (f", driver {version}" if version else "")
    details = [f"GPU {gpu.index}: {gpu.name}, {gpu.used / MIB_PER_GIB:.1f} of {gpu.memory / MIB_PER_GIB:.1f} GiB in use" for gpu in gpus]
    settings = [f"{name}={value}" for name, value in sorted(machine.environ.items())
                if name.startswith(("CUDA_", "NCCL_", "NVIDIA_VISIBLE_", "XLA_", "JAX_", "TPU_"))]
    return conclude("gpus", fine, _driver_problems(machine, version, cuda), details + settings)


def _driver_problems(machine: Machine, version: str | None, cuda: int | None) -> Iterator[Problem]:
    if machine.smi_error:
        yield Problem("FAIL", f"nvidia-smi: {machine.smi_error}", "reload the driver or restart the machine, and look for Xid in dmesg")
    if not machine.devices:
        yield Problem("FAIL", f"driver {version} is loaded, but no GPU is visible here", "start the container with its GPUs (--gpus all)")
        return
    if not machine.devices[0].startswith("nvidia"):
        return
    if cuda and version and int(version.split(".")[0]) < OLDEST_DRIVER[cuda]:
        older = ', or pip install "jax[cuda12]"' if cuda == 13 and int(version.split(".")[0]) >= OLDEST_DRIVER[12] else ""
        yield Problem("FAIL", f"driver {version} is too old for CUDA {cuda}", f"install driver {OLDEST_DRIVER[cuda]} or newer{older}")
    if lacks := jax_lacks(list(machine.devices)):
        yield Problem("FAIL", f"{len(machine.devices)} GPUs, and jax has no plugin for them", lacks)
    yield from _visibility(machine)
    if machine.gpus and len(machine.gpus) < len(machine.devices):
        yield Problem("warn", f"nvidia-smi lists {len(machine.gpus)} of {len(machine.devices)} GPUs",
                      "if one has been lost, restart the machine, and look for Xid in dmesg")
    for gpu in machine.gpus or ():
        if gpu.errors:
            yield Problem("warn", f"GPU {gpu.index} has {gpu.errors:.0f} uncorrected memory errors", "have it reset, or take it out of use")
        if gpu.mig:
            yield Problem("warn", f"GPU {gpu.index} is cut into MIG instances", "switch MIG off to train on all of it")


def _visibility(machine: Machine) -> Iterator[Problem]:
    platforms, setting = machine.environ.get("JAX_PLATFORMS", ""), machine.environ.get("CUDA_VISIBLE_DEVICES")
    first = platforms.split(",")[0].strip().lower()
    if first not in ("", "cuda", "gpu"):
        yield Problem("warn", f"JAX_PLATFORMS={platforms} hides {len(machine.devices)} GPUs", "unset JAX_PLATFORMS")
        return
    named = [entry for entry in (setting or "").split(",") if entry.strip()]
    if setting is not None and len(machine.visible) < max(1, len(named)):
        yield Problem("FAIL", f"CUDA_VISIBLE_DEVICES={setting} names GPUs that are not there",
                      f"use numbers from 0 to {len(machine.devices) - 1}")


def memory(machine: Machine) -> Finding:
    """Is the memory of the GPUs free, and is the share that jax takes of it a sensible one?"""
    environ, gpus = machine.environ, machine.gpus or ()
    fraction = next((environ[name] for name in variables.FRACTIONS if environ.get(name)), None)
    share = f"a run takes {fraction or variables.MEMORY_FRACTION} of it"
    if environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("false", "0"):
        share = "jax takes it as needed (XLA_PYTHON_CLIENT_PREALLOCATE)"
    free = f"{min(gpu.memory - gpu.used for gpu in gpus) / MIB_PER_GIB:.1f} GiB free on each GPU, {share}" if gpus else share
    problems = [*_share_problems(machine), *_use_problems(gpus)]
    if not gpus and not problems:
        return Finding(name="gpu memory", status="skipped", line="nvidia-smi is not there to tell" if machine.visible else "no GPU")
    return conclude("gpu memory", free, problems)


def _share_problems(machine: Machine) -> Iterator[Problem]:
    yield from (problem_of("FAIL", line) for line in variables.problems(machine.environ))
    yield from (problem_of("warn", line) for line in variables.warnings(machine.environ, len(machine.visible)))
    if machine.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
        yield Problem("warn", "XLA_PYTHON_CLIENT_ALLOCATOR=platform asks the driver for every array, which is slow", "unset it")


def _use_problems(gpus: tuple[Gpu, ...]) -> Iterator[Problem]:
    taken = [gpu for gpu in gpus if gpu.used > OTHERS_USE * gpu.memory]
    if taken:
        listed = ", ".join(f"GPU {gpu.index}: {gpu.used / MIB_PER_GIB:.1f} of {gpu.memory / MIB_PER_GIB:.1f} GiB" for gpu in taken)
        yield Problem("warn", f"memory is in use by another process ({listed})",
                      "end it (nvidia-smi names it), or leave these GPUs out with CUDA_VISIBLE_DEVICES")
