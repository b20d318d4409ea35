"""Model shapes against published parameter counts, FLOPs per token, the chip table, and counting chips without jax."""

from pathlib import Path

import pytest

from jaxmeg.arch import PRESETS, matmul_params, num_params, resolve_arch
from jaxmeg.config import ModelConfig
from jaxmeg.flops import attention_flops_per_token, causal_pairs, formula, forward_flops_per_token, mfu, train_flops_per_token
from jaxmeg.hardware import accelerators, jax_lacks, peak_tflops


@pytest.mark.parametrize(
    ("preset", "count"),
    [
        ("toy", 172_608),
        ("demo", 935_520),
        ("gpt2", 124_439_808),
        ("smollm2-135m", 134_515_008),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("llama3.1-405b", 405_853_388_800),
    ],
)
def test_num_params(preset, count):
    assert num_params(PRESETS[preset]) == count


def test_tied_counts_the_table_once():
    assert num_params(resolve_arch(ModelConfig(preset="toy", tied=True))) == 156_224
    assert matmul_params(PRESETS["toy"]) == 155_648


def test_optional_parameters_are_counted():
    def added(**overrides: object) -> int:
        return num_params(resolve_arch(ModelConfig(preset="toy", **overrides))) - num_params(PRESETS["toy"])

    assert added(attn_bias=True) == 4 * (64 + 16 + 16)
    assert added(out_bias=True) == 4 * 64
    assert added(mlp_bias=True) == 4 * (128 + 128 + 64)
    assert added(qk_norm=True) == 4 * 2 * 8
    assert added(norm="layer") == (2 * 4 + 1) * 64
    assert added(positions="learned") == 128 * 64
    assert added(activation="gelu") == -4 * 64 * 128


def test_overrides_replace_the_preset():
    arch = resolve_arch(ModelConfig(preset="gpt2", num_layers=2, tied=False))
    assert (arch.num_layers, arch.tied, arch.embed_dim, arch.norm) == (2, False, 768, "layer")
    with pytest.raises(KeyError):
        resolve_arch(ModelConfig(preset="gpt3"))


def test_presets_shard():
    demo = PRESETS["demo"]
    assert all(size % 4 == 0 for size in (demo.num_heads, demo.num_kv_heads, demo.mlp_dim, demo.num_layers))
    assert demo.num_layers == 4 * 2  # pp=4 with 2 chunks


def test_flops_per_token():
    toy, tied = PRESETS["toy"], resolve_arch(ModelConfig(preset="toy", tied=True))
    assert train_flops_per_token(toy, 128) == train_flops_per_token(tied, 128) == 933_888 + 196_608 == 1_130_496
    assert 933_888 + attention_flops_per_token(toy, 128, causal=False) == 1_327_104
    assert 3 * forward_flops_per_token(toy, 128) == 1_130_496
    assert "= 1,130,496" in formula(toy, 128)


@pytest.mark.parametrize("window", [None, 1, 2, 7, 15, 16, 40])
def test_flops_of_a_window_are_those_of_the_pairs_it_leaves(window):
    """Counted one by one, with the own key half: what causal attention as half of all pairs means."""
    pairs = sum(0.5 if s == t else 1.0 for t in range(16) for s in range(t + 1) if window is None or t - s < window)
    arch = resolve_arch(ModelConfig(preset="toy", sliding_window=window))
    assert causal_pairs(16, window) == 2 * pairs
    assert attention_flops_per_token(arch, 16) == 12 * 4 * 8 * 8 * pairs // 16
    assert attention_flops_per_token(arch, 16, causal=False) == 12 * 4 * 8 * 8 * 16
    assert ("window" in formula(arch, 16)) == (window is not None)


def test_mfu_is_of_all_devices():
    toy = PRESETS["toy"]
    assert mfu(toy, 128, tokens_per_second=1e12 / 1_130_496, num_devices=1, peak_tflops=1.0) == pytest.approx(1.0)
    assert mfu(toy, 128, tokens_per_second=1e12 / 1_130_496, num_devices=4, peak_tflops=1.0) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("device_kind", "peak"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10G", 70),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("NVIDIA H20", 148),
        ("NVIDIA GeForce RTX 4090", 165),
        ("TPU v5 lite", 197),
        ("cpu", None),
    ],
)
def test_peak_of_a_chip(device_kind, peak):
    assert peak_tflops(device_kind) == peak


def add_gpus(root: Path, count: int) -> None:
    (root / "dev").mkdir()
    for name in [*(f"nvidia{number}" for number in range(count)), "nvidiactl", "nvidia-uvm"]:
        (root / "dev" / name).touch()


@pytest.mark.parametrize(
    ("environ", "gpus"),
    [
        ({}, ["0", "1", "2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, ["2", "0"]),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, ["0"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "7"}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b"}, ["GPU-1a", "GPU-2b"]),
        ({"JAX_PLATFORMS": "cpu"}, []),
        ({"JAX_PLATFORMS": "cuda,cpu"}, ["0", "1", "2", "3"]),
        ({"JAX_PLATFORMS": "tpu"}, []),
    ],
)
def test_gpus_are_counted(tmp_path, environ, gpus):
    add_gpus(tmp_path, 4)
    assert accelerators(environ, tmp_path) == [f"nvidia:{gpu}" for gpu in gpus]


def test_gpus_in_the_driver_table(tmp_path):
    (tmp_path / "proc/driver/nvidia/gpus/0000:18:00.0").mkdir(parents=True)
    assert accelerators({}, tmp_path) == ["nvidia:0"]


def test_tpus_on_the_bus(tmp_path):
    for slot, (vendor, device) in enumerate([("0x1ae0", "0x0063"), ("0x1ae0", "0x0001"), ("0x10de", "0x0063")]):
        folder = tmp_path / "sys/bus/pci/devices" / str(slot)
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "device").write_text(device + "\n")
    assert accelerators({}, tmp_path) == ["tpu:0"]
    assert accelerators({"JAX_PLATFORMS": "cpu"}, tmp_path) == []


def test_a_bare_machine_has_none(tmp_path):
    assert accelerators({}, tmp_path) == []
    assert jax_lacks([]) is None
