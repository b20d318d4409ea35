"""The few JAX names that move between versions, each behind one function (tests/test_compat.py holds them).

Everything else in jaxmeg uses public, stable names only. Supported: jax 0.10.2 (Python 3.11) to 0.12 (Python 3.12).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

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


class Ragged(NamedTuple):
    """Where the documents of packed rows lie, S = B * M of them, as cuDNN reads it: those that are none come last, with length 0."""

    lengths: jax.Array
    """Tokens of each, int32 [B, M]."""
    query_offsets: jax.Array
    """Elements of q before each, int32 [B, M + 1], of which the first S + 1 are read."""
    key_offsets: jax.Array
    """The same of k and v."""


def _cudnn(backward: bool, q: jax.Array, k: jax.Array, v: jax.Array, saved: tuple[jax.Array, ...], bias: jax.Array | None,
           ragged: Ragged | None, window: int | None) -> list[jax.Array]:
    """One of cuDNN's two attention kernels. The functions of jax around these primitives check what the machine that compiles has, and
    until 0.10 they take the offsets of grouped heads for those of q (jax#39521)."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    none = jnp.zeros(0, q.dtype)
    lengths, *offsets = ragged or (none, none, none)
    primitive: Any = fused._dot_product_attention_bwd_p if backward else fused._dot_product_attention_fwd_p
    training = {} if backward else {"is_training": True}
    return primitive.bind(
        q, k, v, none if bias is None else bias, lengths, lengths, *offsets, none, none, *saved, scale=q.shape[-1] ** -0.5, seed=42,
        dropout_rate=0.0, variadic_args=(bias is not None, False), layout=fused.AttentionLayout.BTNH.value,
        mask_type=fused.MaskType.CAUSAL if ragged is None else fused.MaskType.PADDING_CAUSAL, sliding_window_length=window, **training)


def cudnn_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, bias: jax.Array | None = None, ragged: Ragged | None = None,
                    window: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Causal cuDNN flash attention, scaled by 1 / sqrt(K). q [B, T, H, K], k and v [B, T, G, K]; bias [B, 1, T, T] is added to the scores;
    window: a token sees itself and so many tokens before it, less one -> output [B, T, H, K], fp32 log-sum-exp [B, H, T].

    ragged: attention inside each document alone; the log-sum-exp is then [S, H, T], of document s at [s, :, :length].
    """
    out, lse = _cudnn(False, q, k, v, (), bias, ragged, window)
    return out, lse


def cudnn_attention_grad(q: jax.Array, k: jax.Array, v: jax.Array, out: jax.Array, lse: jax.Array, dout: jax.Array, *,
                         bias: jax.Array | None = None, ragged: Ragged | None = None,
                         window: int | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradient of `cudnn_attention` with respect to q, k, v from its output and log-sum-exp."""
    dq, dk, dv = _cudnn(True, q, k, v, (lse, out, dout), bias, ragged, window)
    return dq, dk, dv


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
