"""The few JAX names that move between versions, each behind one function (tests/test_compat.py holds them).

Everything else in jaxmeg uses public, stable names only. Supported: jax 0.10.2 (Python 3.11) to 0.12 (Python 3.12).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import FrameType
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


def coordination() -> tuple[Any, int, int]:
    """(client of jax's coordination service or None, index of this process, number of processes), without starting a backend."""
    from jax._src import distributed

    state = distributed.global_state
    return state.client, state.process_id, state.num_processes


def detected_coordinator(seconds: int) -> str | None:
    """host:port of process 0 as jax finds it in the variables of SLURM, Open MPI and other launchers, or None."""
    from jax._src.clusters import ClusterEnv

    address, *_ = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, [0], None, seconds)
    return address


_COMPILING = tuple(os.path.join("jax", "_src", *parts) for parts in (
    ("compiler.py",), ("interpreters", "mlir.py"), ("interpreters", "partial_eval.py")))
_JAX = os.path.join("jax", "_src", "")


def stage_of(frame: FrameType | None) -> str:
    """What a thread is doing, by its innermost frame: "compiling" (also tracing and lowering), "in jax" or "in Python"."""
    innermost = "in jax" if frame and _JAX in frame.f_code.co_filename else "in Python"
    while frame:
        if frame.f_code.co_filename.endswith(_COMPILING):
            return "compiling"
        frame = frame.f_back
    return innermost
