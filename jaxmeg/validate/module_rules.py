"""Rules of a config that trains a module of the user's: what applies to it, and what has no effect or can't work.

One line a violation, as in `validate`. Needs no jax.
"""

from __future__ import annotations

from collections.abc import Iterator

from jaxmeg.arch import PRESETS
from jaxmeg.config import AXES, Axis, Config, MeshConfig, mesh_sizes
from jaxmeg.keys import KEYS
from jaxmeg.rules import DEFAULT_RULES
from jaxmeg.validate import mesh_rules, run_rules, value_rules
from jaxmeg.wording import shown

_DECODER = (
    "layout.remat", "layout.attention", "layout.scan_layers", "layout.rules", "pipeline.schedule", "pipeline.chunks", "precision.compute",
    "precision.fp8", "precision.fp8_head",
    "precision.loss_scale_init", "precision.loss_scale_growth_interval", "data.train", "data.validation", "data.tokenizer",
    "data.end_token", "data.text_key", "data.packing", "data.separate", "data.max_documents", "data.long_documents", "data.max_rows",
    "data.seq_len", "train.dropout", "train.sample_tokens", "train.sample_prompt",
)  # read for text and the decoder only, as are the fields of its shape
_LOOP = (
    "checkpoint", "record", "guard", "distributed", "emulate", "show_layout", "model.module", "model.loss", "data.source",
    "data.validation_fraction", "data.prefetch", "optim.max_skipped_updates", "train.stop_after", "train.eval_every", "train.eval_rows",
    "train.log_every", "train.out",
)  # sections and keys that `jaxmeg.train.run` reads, and not its step


def problems(config: Config, num_devices: int) -> list[str]:
    """Every violated rule; empty when the module can be trained on `num_devices` devices."""
    unread = dict(_not_for_modules(config))
    others = [
        *value_rules.texts(config), *value_rules.ranges(config), *value_rules.choices(config), *value_rules.schedule_lengths(config),
        *value_rules.without_effect(config), *run_rules.any_run(config), *_model_axes(config.mesh),
    ]
    found = [*unread.values(), *(line for line in others if line.partition("=")[0] not in unread)]
    return found or [*_devices(config.mesh, num_devices), *_batch(config, num_devices)]


def _model_axes(mesh: MeshConfig) -> Iterator[str]:
    for axis in (Axis.PP, Axis.TP, Axis.CP, Axis.EP):
        size = getattr(mesh, axis)
        if size > 1:
            yield (f"mesh.{axis}={size} does not work with a module of your own, whose layers jaxmeg can't cut: use dp and rep, with "
                   f"zero 0 to 3, or a model of jaxmeg.models")


def _not_for_modules(config: Config) -> Iterator[tuple[str, str]]:
    """(key, message) of options that only the decoder and its text read."""
    for key in KEYS:
        value = value_rules.value_of(config, key)
        if value != KEYS[key].default and (key in _DECODER or (key.startswith("model.") and key not in ("model.module", "model.loss"))):
            instead = ", and give the module's layers their dtype, for example bfloat16" if key == "precision.compute" else ""
            yield key, f"{key}={shown(value)} has no effect on a module of your own: leave it out{instead}"


def unread_by_engine(config: Config, *, draws_weights: bool) -> Iterator[str]:
    """Options that the user's own loop around `jaxmeg.initialize` reads or does without, and nothing else.

    draws_weights: whether the module is a function of rngs, and not an instance with its weights.
    """
    for key in KEYS:
        value = value_rules.value_of(config, key)
        if value != KEYS[key].default and (key in _LOOP or key.split(".")[0] in _LOOP or (key == "train.seed" and not draws_weights)):
            yield (f"{key}={shown(value)} has no effect on jaxmeg.initialize, around which the loop is yours: leave it out, or use "
                   f"jaxmeg.train.run")


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
