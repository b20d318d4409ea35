"""Layouts as configs: all of a number of devices, one part switched off, one step smaller, one device; and their command lines.

Every function gives configs without problems (`validate.check`). Needs no jax.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace

from jaxmeg.config import SCHEDULES, Axis, Config, LayoutConfig, MeshConfig, PipelineConfig, resolve
from jaxmeg.keys import KEYS, SHORT_FORMS
from jaxmeg.pipeline.user import is_schedule_file
from jaxmeg.validate.check import problems
from jaxmeg.validate.mesh_rules import named_axes, num_named
from jaxmeg.validate.value_rules import value_of
from jaxmeg.wording import divisors

MESH_AXES = (Axis.PP, Axis.REP, Axis.DP, Axis.TP)
DATA_READ, TRAIN_READ = ("train", "source", "packing", "separate", "seq_len", "global_batch"), ("seed", "dropout")
OPTIM_RESET = ("warmup", "schedule", "final_lr_ratio", "wsd_decay")


def num_devices(config: Config) -> int:
    return num_named(config.mesh)


def is_legal(config: Config) -> bool:
    return not problems(config, num_devices(config))


def layout_name(config: Config) -> str:
    """`pp=2,tp=2, ZeRO 3, 1f1b`, with remat and layers written out where there are."""
    pipeline, pp = config.pipeline, config.mesh.pp
    parts = [named_axes(config.mesh) if num_devices(config) > 1 else "one device", f"ZeRO {config.layout.zero}"]
    if pp > 1:
        parts.append((pipeline.schedule or "1f1b") + (f" x {pipeline.chunks}" if pipeline.chunks else ""))
    if config.layout.remat != "none":
        parts.append(f"remat {config.layout.remat}")
    if not config.layout.scan_layers:
        parts.append("layers written out")
    return ", ".join(parts)


def one_device(config: Config) -> Config:
    """The same training on one device: no ZeRO, one microbatch, nothing recomputed, the default rules."""
    return replace(config, mesh=MeshConfig(dp=1), layout=LayoutConfig(zero=0), pipeline=PipelineConfig())


# ---------------------------------------------------------------- all layouts
def all_layouts(config: Config, count: int) -> list[Config]:
    """The config on every legal layout of `count` devices: meshes x ZeRO stages that shard something x schedules."""
    found = []
    for mesh in _meshes(count):
        for zero in range(4) if (mesh.dp or 1) > 1 else (min(mesh.rep - 1, 1),):
            for pipeline in _pipelines(config.pipeline, mesh.pp):
                layout = replace(config, mesh=mesh, layout=replace(config.layout, zero=zero), pipeline=pipeline)
                any_size = replace(layout, pipeline=replace(pipeline, microbatch=None))
                found += [c for c in (layout, any_size) if is_legal(c)][:1]
    return found


def _meshes(count: int) -> Iterator[MeshConfig]:
    for pp in divisors(count):
        for rep in divisors(count // pp):
            for dp in divisors(count // (pp * rep)):
                yield MeshConfig(pp=pp, rep=rep, dp=dp, tp=count // (pp * rep * dp))


def _pipelines(pipeline: PipelineConfig, pp: int) -> list[PipelineConfig]:
    """Every schedule on pp stages, a file of the user's among them; the config's number of chunks where it is for that schedule."""
    if pp == 1:
        return [replace(pipeline, schedule=None, chunks=None)]
    names = [*SCHEDULES, *([pipeline.schedule] if is_schedule_file(pipeline.schedule) else [])]
    return [replace(pipeline, schedule=name, chunks=pipeline.chunks if name == pipeline.schedule else None) for name in names]


# ---------------------------------------------------------------- parts switched off, sizes halved
def switched_off(config: Config) -> dict[str, Config]:
    """What the layout has -> the config without it: a mesh axis, ZeRO, the schedule, chunks, microbatches, remat, layers written out,
    rules, dropout."""
    layout, pipeline, off = config.layout, config.pipeline, {}
    for axis in MESH_AXES:
        if _size(config, axis) > 1:
            off[f"mesh.{axis}"] = with_axis(config, axis, 1)
    off["layout.zero"] = replace(config, layout=replace(layout, zero=0))
    if config.mesh.pp > 1:
        off["pipeline.schedule"] = replace(config, pipeline=replace(pipeline, schedule="gpipe", chunks=None))
        if resolve(config, num_devices(config)).chunks > 1:
            off["pipeline.chunks"] = replace(config, pipeline=replace(pipeline, schedule="1f1b", chunks=None))
    off["pipeline.microbatch"] = replace(config, pipeline=replace(pipeline, microbatch=None))
    off["layout.remat"] = replace(config, layout=replace(layout, remat="none"))
    off["layout.scan_layers"] = replace(config, layout=replace(layout, scan_layers=True))
    off["layout.rules"] = replace(config, layout=replace(layout, rules=None))
    off["train.dropout"] = replace(config, train=replace(config.train, dropout=0.0))
    return {name: without for name, without in off.items() if without != config and is_legal(without)}


def _size(config: Config, axis: Axis) -> int:
    return getattr(config.mesh, axis) or 1


def with_axis(config: Config, axis: Axis, size: int) -> Config:
    """The same with another size of one axis. Without stages there is no schedule; a schedule of the user's says how many microbatches."""
    pipeline = config.pipeline
    if axis == Axis.PP and size == 1:
        pipeline = PipelineConfig()
    elif is_schedule_file(pipeline.schedule):
        pipeline = replace(pipeline, microbatch=None)
    return replace(config, mesh=replace(config.mesh, **{axis: size}), pipeline=pipeline)


def smaller(config: Config) -> dict[str, Config]:
    """A step -> the config after it, the greatest steps first: without a part, an axis or a size halved, one ZeRO stage down."""
    steps = switched_off(config)
    even = [axis for axis in MESH_AXES if _size(config, axis) % 2 == 0]
    steps |= {f"half of mesh.{axis}": with_axis(config, axis, _size(config, axis) // 2) for axis in even}
    steps["one less of layout.zero"] = replace(config, layout=replace(config.layout, zero=max(config.layout.zero - 1, 0)))
    halves = [("data", "global_batch", config.data.global_batch)]
    if config.model.module is None:
        halves += [("data", "seq_len", config.data.seq_len), ("model", "num_layers", resolve(config, num_devices(config)).arch.num_layers)]
    for section, name, size in halves:
        steps[f"half of {section}.{name}"] = replace(config, **{section: replace(getattr(config, section), **{name: size // 2})})
    return {name: step for name, step in steps.items() if step != config and is_legal(step)}


# ---------------------------------------------------------------- command lines
def options(config: Config) -> Mapping[str, object]:
    """Every key besides the mesh that is not at its default and that the comparison reads."""
    found = {name: value_of(config, name) for name in KEYS if is_read(name)}
    if config.model.module is not None:
        found.pop("data.seq_len")
    return {name: value for name, value in found.items() if value != KEYS[name].default}


def is_read(key: str) -> bool:
    """Whether the comparison depends on a key. It brings its own arithmetic, rows, length and learning-rate schedule."""
    section, _, name = key.rpartition(".")
    match section:
        case "model" | "layout" | "pipeline":
            return True
        case "data":
            return name in DATA_READ
        case "train":
            return name in TRAIN_READ
        case "optim":
            return name not in OPTIM_RESET
        case _:
            return False


def command(config: Config) -> str:
    """The line that compares exactly this config again."""
    short = {key: name for name, key in SHORT_FORMS.items()}
    words = ["python scripts/verify.py --full", f"--mesh {named_axes(config.mesh)}"]
    words += [f"--{short.get(name, name)} {_shown(value)}" for name, value in options(config).items()]
    return " ".join(words)


def _shown(value: object) -> str:
    """As a shell takes it."""
    return shlex.quote(value if isinstance(value, str) else json.dumps(value))
