"""Print versions, driver and the devices that jax sees; exit 1 if there is no accelerator."""

import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

NVIDIA = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cudnn-cu13", "nvidia-nccl-cu13")
PACKAGES = ("jax", "jaxlib", "flax", *NVIDIA, "libtpu")


def package_lines() -> list[str]:
    lines = []
    for name in PACKAGES:
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return lines


def driver_lines() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU, as the driver's own tool tells them."""
    if shutil.which("nvidia-smi") is None:
        return ["nvidia-smi not found: no NVIDIA driver, or not on PATH"]
    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, timeout=60)
    return (result.stdout if result.returncode == 0 else result.stdout + result.stderr).strip().splitlines()


def main() -> int:
    print(f"python {platform.python_version()} on {platform.platform()}")
    print("\n".join(package_lines() + driver_lines()))

    import jax  # after the lines above: they help when this fails

    try:
        devices = jax.devices()
    except RuntimeError as error:
        print(f"jax could not start a backend: {error}")
        return 1
    for device in devices:
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = f", jax may use {limit / 2**30:.1f} GiB" if limit else ""
        print(f"{device.platform}:{device.id} {device.device_kind}, process {device.process_index}{memory}")
    if devices[0].platform == "cpu":
        print('no accelerator: jax sees CPUs only. For NVIDIA GPUs: pip install -e ".[cuda13]"; unset JAX_PLATFORMS')
        return 1
    print(f"{len(devices)} devices in {jax.process_count()} processes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
