"""`--mesh auto`: the fastest layout, by the planner's formulas, for the devices at hand, and why, in three lines."""

from __future__ import annotations

from collections.abc import Container

from jaxmeg.config import Axis, Config
from jaxmeg.planner.advice import chip_of
from jaxmeg.planner.chips import Chip, Cluster, known_chips
from jaxmeg.planner.search import Plan, search
from jaxmeg.validate.mesh_rules import named_axes

STAND_IN = "H100-80G"
"""What layouts are chosen for where the chip is not in the table, as with emulated devices."""


class AutoError(ValueError):
    """No layout can be chosen: one line of what, why and fix."""


def choose(config: Config, given: Container[str], device_kind: str, memory_bytes: float, count: int) -> tuple[Config, list[str]]:
    """The config with the rest of its layout filled in, and why it is this one.

    given: keys that stay as they are. memory_bytes: of one device. Raises AutoError where no layout is legal, or none fits.
    """
    known = chip_of(device_kind, memory_bytes)
    cluster = Cluster(chip=known or known_chips()[STAND_IN], count=count)
    found = search(config, cluster, given, top=2)
    if not found.tried:
        raise AutoError(f"--mesh auto: no legal layout of {count} devices for data.global_batch={config.data.global_batch} and the model's "
                        "sizes: name a mesh to see what is wrong with it")
    if not found.fitting:
        least = found.nearest[0]
        raise AutoError(f"--mesh auto: nothing fits {cluster}: the smallest layout, {_name(least)}, needs {least.memory.total / 2**30:.1f} "
                        f"GiB of {least.budget / 2**30:.1f}: see scripts/plan.py")
    best, *others = found.fitting
    return best.config, [_chosen(best, found.tried, cluster, known), _figures(best), *(_beside(best, other) for other in others)]


def _chosen(plan: Plan, tried: int, cluster: Cluster, known: Chip | None) -> str:
    on = f"{cluster}" if known else f"{cluster.count} devices, as if each were a {cluster.chip.name}"
    return f"{_name(plan)}: the fastest that fits, by formula, of {tried:,} legal layouts on {on}"


def _figures(plan: Plan) -> str:
    return (f"{plan.memory.total / 2**30:.1f} GiB of {plan.budget / 2**30:.1f} a device, {plan.speed.seconds:.3g} s a step, "
            f"{plan.speed.tokens_per_second:,.0f} tokens/s: predicted, not measured")


def _beside(best: Plan, other: Plan) -> str:
    """The next best, and the part of the step in which it loses most."""
    names = {part.name for part in (*best.speed.parts, *other.speed.parts)}
    worst = max(names, key=lambda name: other.speed.part(name) - best.speed.part(name))
    slower = other.speed.seconds / best.speed.seconds - 1
    return f"next is {_name(other)}, {slower:.1%} slower" + (f", most of it in: {worst}" if slower >= 0.001 else "")


def _name(plan: Plan) -> str:
    config, resolved = plan.config, plan.resolved
    parts = [named_axes(config.mesh), f"ZeRO {config.layout.zero}" if resolved.mesh[Axis.DP] > 1 else ""]
    parts += [f"{resolved.schedule} x {resolved.chunks}"] if resolved.schedule else []
    parts += [f"remat {config.layout.remat}"] if config.layout.remat != "none" else []
    return " ".join(filter(None, [*parts, f"microbatch {resolved.microbatch}"]))
