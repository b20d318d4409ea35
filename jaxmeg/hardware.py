"""What accelerators this machine has, counted without jax, and what they can do at most.

Counting must come before jax is imported: the number of emulated CPU devices is fixed when jax starts. Reads device
files and the environment only, and never opens a device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

PEAK_TFLOPS: Mapping[str, float] = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 150.0,
    "A10": 125.0,
    "A10G": 70.0,
    "A6000": 155.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 5090": 210.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5": 459.0,
    "TPU v5p": 459.0,
    "TPU v6 lite": 918.0,
}
"""Dense bf16 TFLOP/s with fp32 accumulation, by a part of jax's `device_kind`.
By the vendors' published figures; only the H200's has been used here."""

_TPU_VENDOR = "0x1ae0"
_TPU_CHIPS = ("0x005e", "0x0062", "0x0063", "0x006f")  # v4, v5p, v5e, v6e: one jax device a chip


def peak_tflops(device_kind: str) -> float | None:
    """Dense bf16 TFLOP/s of one device, or None if the chip is not in the table. The longest matching name wins."""
    names = [name for name in PEAK_TFLOPS if re.search(rf"{re.escape(name)}(?![0-9A-Za-z])", device_kind)]
    return PEAK_TFLOPS[max(names, key=len)] if names else None


def accelerators(environ: Mapping[str, str] | None = None, root: Path = Path("/")) -> list[str]:
    """One name per accelerator that jax would use: "nvidia:0", "tpu:0", ...; empty on a machine that has none.

    Respects JAX_PLATFORMS (its first entry is jax's default) and CUDA_VISIBLE_DEVICES. AMD GPUs are not counted.
    """
    environ = os.environ if environ is None else environ
    platform = environ.get("JAX_PLATFORMS", "").split(",")[0].strip().lower()
    found: list[str] = []
    if platform in ("", "cuda", "gpu"):
        found += [f"nvidia:{gpu}" for gpu in _visible(_nvidia_gpus(root), environ.get("CUDA_VISIBLE_DEVICES"))]
    if platform in ("", "tpu"):
        found += [f"tpu:{chip}" for chip in range(_num_tpus(root))]
    return found


def jax_lacks(found: list[str]) -> str | None:
    """What to install if jax cannot use the accelerators found, else None. Looks for packages, imports nothing."""
    if found and found[0].startswith("nvidia"):
        plugins = ("jax_cuda13_plugin", "jax_cuda12_plugin")
        return None if any(find_spec(plugin) for plugin in plugins) else 'pip install "jax[cuda13]"'
    if found and found[0].startswith("tpu"):
        return None if find_spec("libtpu") else 'pip install "jax[tpu]"'
    return None


def _nvidia_gpus(root: Path) -> list[str]:
    """GPU numbers from /dev, which a container restricts, else from the driver's /proc table."""
    numbers = [path.name.removeprefix("nvidia") for path in (root / "dev").glob("nvidia[0-9]*")]
    numbers = sorted((number for number in numbers if number.isdigit()), key=int)
    if numbers:
        return numbers
    table = root / "proc/driver/nvidia/gpus"
    return [str(number) for number in range(len(list(table.iterdir())))] if table.is_dir() else []


def _visible(gpus: list[str], setting: str | None) -> list[str]:
    """CUDA's own rule: entries count up to the first that names no GPU. An entry is an ordinal or a UUID."""
    if setting is None:
        return gpus
    visible: list[str] = []
    for entry in (part.strip() for part in setting.split(",")):
        is_ordinal = entry.isdigit() and int(entry) < len(gpus)
        is_uuid = bool(gpus) and entry.startswith(("GPU-", "MIG-"))
        if not (is_ordinal or is_uuid):
            break
        visible.append(entry)
    return visible


def _num_tpus(root: Path) -> int:
    """TPU chips on the PCI bus."""
    count = 0
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        if vendor.read_text().strip() == _TPU_VENDOR:
            count += (vendor.parent / "device").read_text().strip() in _TPU_CHIPS
    return count
