"""The few JAX names that move between versions, each behind one function (tests/test_compat.py holds them).

Everything else in jaxmeg uses public, stable names only. Supported: jax 0.10.2 (Python 3.11) to 0.12 (Python 3.12).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Mesh axes along which `x` may differ between devices, inside `shard_map` with `check_vma=True`."""
    aval: Any = jax.typeof(x)
    return aval.vma if hasattr(aval, "vma") else aval.mat.varying


def make_mesh(devices: np.ndarray, axis_names: tuple[str, ...]) -> Mesh:
    """A mesh whose axes are all `Auto`: outside `shard_map` the compiler may place elementwise work as it likes."""
    return Mesh(devices, axis_names, axis_types=(AxisType.Auto,) * len(axis_names))


def own_vjp(*static: int) -> Any:
    """Decorator: a function with its own derivative (`jax.custom_vjp`), arguments at positions `static` being constants."""
    return partial(jax.custom_vjp, nondiff_argnums=static)


def vjp_leaves(vjp: Callable[..., Any]) -> tuple[list[jax.Array], Any]:
    """The residual arrays that a function returned by `jax.vjp` holds, and the tree to rebuild it from others."""
    return jax.tree.flatten(vjp)


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, scale: float) -> tuple[jax.Array, jax.Array]:
    """Causal cuDNN flash attention. q [B, T, H, K], k and v [B, T, G, K], bias [B, 1, T, T], added to the scores -> output
    [B, T, H, K], fp32 log-sum-exp [B, H, T]."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    result: Any = fused.dot_product_attention(
        q, k, v, bias, scale=scale, mask_type=fused.MaskType.CAUSAL, return_residual=True)
    return result


def cudnn_attention_grad(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, out: jax.Array,
                         lse: jax.Array, dout: jax.Array, scale: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradient of `cudnn_attention` with respect to q, k, v from its saved output and log-sum-exp."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    none = jnp.zeros(0, dtype=q.dtype)
    residuals = (q, k, v, none if bias is None else bias, none, none, none, none, none, none, lse, out)
    grads = fused._dot_product_attention_bwd_rule(
        scale, 42, 0.0, (bias is not None, False), fused.MaskType.CAUSAL, fused.AttentionLayout.BTNH.value, None, True, False,
        residuals, dout)
    return grads[0], grads[1], grads[2]


def gpu_topology(target_config: str, num_devices: int) -> list[Any]:
    """Stand-in devices of one host with `num_devices` GPUs, to compile for on a machine that has none.

    target_config: text of a GPU target description (jaxmeg/targets/*.txt). Needs the `aot` extra, and
    `prepare_gpu_topology` before JAX is first used.
    """
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda", target_config=target_config, topology=f"1x{num_devices}x1")
    return list(topology.devices)


def prepare_gpu_topology() -> None:
    """Environment that lets the CUDA plugin load without a GPU; call before JAX is first used."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
