"""All rules of a config in one pass: every violation at once, each as one line of value, rule and fix.

The rules themselves stand in `value_rules` (single values), `mesh_rules` (how sizes fit a mesh), `run_rules` (reading, saving,
starting), `speed_rules` (what makes a step faster) and `module_rules` (a module of the user's). Needs no jax, so a bad config is
refused before anything slow is imported.
"""

from __future__ import annotations

from dataclasses import fields

from jaxmeg.arch import PRESETS, Arch, resolve_arch
from jaxmeg.config import AXES, Axis, Config, Resolved, resolve
from jaxmeg.rules import DEFAULT_RULES, read_rules
from jaxmeg.validate import mesh_rules, module_rules, run_rules, speed_rules, value_rules


def problems(config: Config, num_devices: int) -> list[str]:
    """Every violated rule, one line each; empty when the config can run on `num_devices` devices."""
    if config.model.module is not None:
        return module_rules.problems(config, num_devices)
    arch = resolve_arch(config.model) if config.model.preset in PRESETS else None
    found = [
        *value_rules.ranges(config),
        *value_rules.texts(config),
        *value_rules.choices(config),
        *value_rules.model(config, arch),
        *value_rules.schedule_lengths(config),
        *value_rules.files(config),
        *value_rules.without_effect(config),
        *run_rules.problems(config),
        *speed_rules.attention(config),
        *speed_rules.fp8(config),
        *mesh_rules.not_built(config.mesh),
    ]
    if arch is not None and _can_divide(config, arch):
        rules = dict(DEFAULT_RULES) if config.layout.rules is None else read_rules(config.layout.rules)[0]
        fit = mesh_rules.Fit(config=config, arch=arch, num_devices=num_devices, rules=rules)
        found += [problem for rule in (mesh_rules.devices, *mesh_rules.FIT_RULES) for problem in rule(fit)]
    return found


def _can_divide(config: Config, arch: Arch) -> bool:
    """Whether all sizes are in range; if not, `ranges` has said so and the rules on fit would divide by zero or never end."""
    sizes = [getattr(arch, field.name) for field in fields(arch)]
    sizes += [config.data.seq_len, config.data.global_batch, config.pipeline.chunks, config.pipeline.microbatch]
    counts = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool)]
    return mesh_rules.is_sized(config.mesh) and all(1 <= count <= value_rules.SIZE for count in counts)


def warnings(config: Config, num_devices: int) -> list[str]:
    """What runs but costs more than it need, one line each. Only for a config without problems."""
    sizes = resolve(config, num_devices)
    pp, pieces = sizes.mesh[Axis.PP], len(sizes.layer_split)
    found = []
    if config.optim.warmup > config.train.steps:
        found.append(
            f"optim.warmup={config.optim.warmup} is more than train.steps={config.train.steps}: "
            f"the learning rate does not reach optim.lr={config.optim.lr}"
        )
    if sizes.num_microbatches < pp:
        found.append(
            f"{sizes.num_microbatches} microbatches are fewer than mesh.pp={pp} stages: {bubble_line(sizes)}; "
            f"a larger data.global_batch or a smaller pipeline.microbatch shrinks it"
        )
    if len(set(sizes.layer_split)) > 1:
        split = " + ".join(str(layers) for layers in sizes.layer_split)
        found.append(
            f"model.num_layers={sizes.arch.num_layers} does not divide by {pieces} pieces: {split} layers; "
            f"every stage takes the time of {max(sizes.layer_split)}"
        )
    if config.layout.zero >= 2 and mesh_rules.num_ranks_zero(sizes.mesh) == 1:
        found.append(f"layout.zero={config.layout.zero} shards nothing: mesh.dp is 1")
    found += speed_rules.attention_warnings(config, sizes)
    found += speed_rules.fp8_padded(config, sizes)
    return found


def bubble_line(sizes: Resolved) -> str:
    """The predicted bubble: "predicted bubble 3/11 = 27.3%"."""
    return f"predicted bubble {sizes.bubble} = {float(sizes.bubble):.1%}"


def mesh_line(sizes: Resolved) -> str:
    """The mesh in device order: "pp=2 rep=1 dp=1 ep=1 cp=1 tp=4 (8 devices)"."""
    axes = " ".join(f"{axis}={sizes.mesh[axis]}" for axis in AXES)
    return f"{axes} ({sizes.num_devices} {'device' if sizes.num_devices == 1 else 'devices'})"
