"""Everything that is decided before an array exists: mesh, model, layout, schedule tables, optimizer. No arrays here.

`build` is the one place where a config becomes objects; `state` and `step` read a `Setup` and no config section twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxmeg.config import Axis, Config, DataConfig, Resolved, resolve
from jaxmeg.layout import Layout, make_layout
from jaxmeg.mesh import build_mesh
from jaxmeg.models.decoder import Decoder
from jaxmeg.models.layers import Options
from jaxmeg.models.own import RULES, OwnModel
from jaxmeg.ops import fp8
from jaxmeg.ops.attention import choose_kernel, score_bytes
from jaxmeg.optim.build import learning_rate, make_optimizer
from jaxmeg.pipeline.notation import UserSchedule
from jaxmeg.pipeline.schedules import Placement, Table, make_table, place_layers
from jaxmeg.pipeline.user import user_table
from jaxmeg.precision import DTYPES, compute_dtype, dots


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One run on one layout."""

    config: Config
    resolved: Resolved
    mesh: Mesh
    model: Any
    """A `Decoder`, or a `models.own.OwnModel` around a module of the user's."""
    layout: Layout
    placement: Placement
    table: Table
    """Schedule of the training step."""
    optimizer: optax.GradientTransformation
    learning_rate: optax.Schedule
    compute: str
    """fp32, bf16 or fp16."""
    kernel_reason: str
    """Why `model.options.kernel` was taken for attention."""
    compiler_options: dict[str, bool | int]
    """For the programs of this run, beside those of the environment."""

    @property
    def own(self) -> bool:
        """Whether the model is a module of the user's."""
        return isinstance(self.model, OwnModel)

    @property
    def attention_scores(self) -> int:
        """Bytes of the scores that attention makes in a layer on one device: 0 where the kernel keeps none."""
        if self.own or self.model.options.kernel != "xla":
            return 0
        ranks = math.prod(self.resolved.mesh[Axis(axis)] for axis in self.resolved.rules["heads"])
        return score_bytes(self.resolved.microbatch, -(-self.resolved.arch.num_heads // ranks), self.config.data.seq_len)

    @property
    def user_schedule(self) -> UserSchedule | None:
        """The schedule of the training step, if it is the user's."""
        return self.resolved.user_schedule

    @property
    def layer_of_row(self) -> np.ndarray:
        """int [stages, rows of a stage]: the layer in each memory row, -1 where a shorter stage has none."""
        rows = np.full(self.placement.num_rows, -1)
        rows[list(self.placement.rows)] = np.arange(len(self.placement.rows))
        return rows.reshape(self.resolved.mesh[Axis.PP], -1)

    def forward_table(self, num_microbatches: int) -> Table:
        return make_table("forward", self.resolved.mesh[Axis.PP], self.resolved.chunks, num_microbatches)

    @property
    def data_ranks(self) -> int:
        return self.resolved.mesh[Axis.REP] * self.resolved.mesh[Axis.DP] * self.resolved.mesh[Axis.EP]


def parameter_shapes(model: Any, num_rows: int) -> Any:
    """The parameter tree as ShapeDtypeStructs, fp32, in memory order."""
    return jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((num_rows,), jnp.int32))


def attention_kernel(data: DataConfig, compute: str, head_dim: int, device: Any, platform: str | None = None,
                     wanted: str = "auto", window: int | None = None) -> tuple[str, str]:
    """(kernel, why) on a device, which may be a stand-in for one of `platform`. Whether documents share rows in fact is known when
    the data is read; here it counts whether they may. wanted: layout.attention."""
    packed = data.separate and data.packing != "none"
    capability = getattr(device, "compute_capability", None)
    return choose_kernel(platform or str(device.platform), compute, head_dim, data.seq_len, packed, capability, wanted, data.max_documents,
                         window)


def build(config: Config, devices: Sequence[Any], platform: str | None = None, own: OwnModel | None = None) -> Setup:
    """Set up a run on the first devices of `devices`, which may be stand-ins to compile for.

    platform: "cpu" or "cuda", where the program will run; by default the devices' own. own: train this in place of the
    decoder that `config.model` describes.
    """
    resolved = resolve(config, len(devices))
    arch = resolved.arch
    mesh = build_mesh({str(axis): size for axis, size in resolved.mesh.items()}, devices)
    asked = config.precision.compute
    compute = "fp32" if own else compute_dtype("bf16" if config.precision.fp8 and asked == "auto" else asked, devices[0])
    kernel, reason = attention_kernel(config.data, compute, arch.head_dim, devices[0], platform, config.layout.attention,
                                      arch.sliding_window)
    placement = place_layers(arch.num_layers, resolved.mesh[Axis.PP], resolved.chunks)
    options = Options(dtype=jnp.dtype(DTYPES[compute]), kernel=kernel, dropout=config.train.dropout,
                      max_documents=config.data.max_documents, dots=fp8.dots if config.precision.fp8 else dots,
                      fp8_head=config.precision.fp8_head)
    on_gpu = (platform or devices[0].platform) != "cpu"
    compiler_options = fp8.GPU_OPTIONS if config.precision.fp8 and on_gpu else {}
    vocab_axes = tuple(axis for axis in resolved.rules["vocab"] if resolved.mesh[Axis(axis)] > 1)
    model = own or Decoder(arch=arch, options=options, remat=config.layout.remat, scan_layers=config.layout.scan_layers,
                           vocab_rows=resolved.padded_vocab, vocab_axes=vocab_axes)
    dims, rules = model.dims, RULES if own else resolved.rules
    layout = make_layout(mesh, rules, config.layout.zero, parameter_shapes(model, placement.num_rows), dims)
    return Setup(
        config=config, resolved=resolved, mesh=mesh, model=model, layout=layout, placement=placement,
        table=user_table(resolved.user_schedule)[0] if resolved.user_schedule else make_table(
            resolved.schedule or "1f1b", resolved.mesh[Axis.PP], resolved.chunks, resolved.num_microbatches),
        optimizer=make_optimizer(config.optim, config.train.steps, layout, arch.vocab_size),
        learning_rate=learning_rate(config.optim, config.train.steps),
        compute=compute, kernel_reason=reason, compiler_options=compiler_options)
