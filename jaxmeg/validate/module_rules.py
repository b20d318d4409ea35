"""Rules of a config that trains a module of the user's: what applies to it, and what has no effect or can't work.

One line a violation, as in `validate`. Needs no jax.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from jaxmeg.arch import PRESETS
from jaxmeg.config import AXES, Axis, Config, MeshConfig, ModelConfig, PipelineConfig, mesh_sizes
from jaxmeg.rules import DEFAULT_RULES
from jaxmeg.validate import mesh_rules, run_rules, value_rules


def problems(config: Config, num_devices: int) -> list[str]:
    """Every violated rule; empty when the module can be trained on `num_devices` devices."""
    found = [
        *value_rules.ranges(config), *value_rules.choices(config), *value_rules.schedule_lengths(config),
        *value_rules.without_effect(config), *run_rules.problems(config), *_model_axes(config.mesh), *_not_for_modules(config),
    ]
    return found or [*_devices(config.mesh, num_devices), *_batch(config, num_devices)]


def _model_axes(mesh: MeshConfig) -> Iterator[str]:
    for axis in (Axis.PP, Axis.TP, Axis.CP, Axis.EP):
        size = getattr(mesh, axis)
        if size > 1:
            yield (f"mesh.{axis}={size} does not work with a module of your own, whose layers jaxmeg can't cut: use dp and rep, with "
                   f"zero 0 to 3, or a model of jaxmeg.models")


def _not_for_modules(config: Config) -> Iterator[str]:
    if config.precision.compute not in ("auto", "fp32"):
        yield (f"precision.compute={config.precision.compute} has no effect on a module of your own: leave it out, and give the "
               f"module's layers dtype=bfloat16")
    unused = {
        "layout.remat": "none", "layout.rules": None, "train.dropout": 0.0, "data.train": None, "data.validation": None,
        **{f"model.{field.name}": field.default for field in fields(ModelConfig) if field.name not in ("module", "loss")},
        **{f"pipeline.{field.name}": field.default for field in fields(PipelineConfig) if field.name != "microbatch"},
    }
    for key, default in unused.items():
        value = value_rules.value_of(config, key)
        if value != default:
            yield f"{key}={value} has no effect on a module of your own: leave it out"


def _devices(mesh: MeshConfig, num_devices: int) -> Iterator[str]:
    named = mesh_rules.num_named(mesh)
    fits = num_devices % named == 0 if mesh.dp is None else num_devices == named
    if not fits:
        yield (f"mesh {mesh_rules.named_axes(mesh)} does not fit {num_devices} device{'s' * (num_devices != 1)}: its axes must multiply to "
               f"{num_devices}; leave dp out and it takes what is left")


def _batch(config: Config, num_devices: int) -> Iterator[str]:
    sizes = mesh_sizes(config.mesh, num_devices)
    if all(sizes[axis] >= 1 for axis in AXES):
        fit = mesh_rules.Fit(config=config, arch=next(iter(PRESETS.values())), num_devices=num_devices, rules=dict(DEFAULT_RULES))
        yield from mesh_rules.batch(fit)
