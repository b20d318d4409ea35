"""What to change where a layout does not fit, in the order people try it: checkpointing, smaller microbatches, a higher ZeRO stage,
more model parallelism, then all of these. Each with its predicted memory and speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxmeg.config import REMATS, Axis, Config, resolve
from jaxmeg.planner.chips import Chip, Cluster, known_chips
from jaxmeg.planner.search import Plan, enough, judge, search
from jaxmeg.validate.check import problems
from jaxmeg.validate.mesh_rules import named_axes

GIB = 2**30
Change = tuple[str, Config]
"""(options of the command line, the config with them)."""


def advice(config: Config, cluster: Cluster) -> list[tuple[str, Plan]]:
    """(options, plan): of each kind of change the first that fits, or the one that comes nearest; last the fastest layout of all that
    fits. Nothing that needs as much memory as the config itself."""
    before = judge(config, cluster).memory.total
    found = []
    for kind in (_remat, _microbatch, _zero, _model_parallel):
        plans = [(options, judge(changed, cluster)) for options, changed in kind(config, cluster) if not problems(changed, cluster.count)]
        plans = [(options, plan) for options, plan in plans if plan.memory.total < before]
        if plans:
            found.append(next(((options, plan) for options, plan in plans if plan.fits), min(plans, key=lambda pair: pair[1].memory.total)))
    if not any(plan.fits for _, plan in found) and (best := search(config, cluster, top=1).fitting):
        found.append((_layout_options(best[0].config), best[0]))
    return found


def _remat(config: Config, cluster: Cluster) -> Iterator[Change]:
    for remat in REMATS[REMATS.index(config.layout.remat) + 1 :]:
        yield f"--remat {remat}", replace(config, layout=replace(config.layout, remat=remat))


def _microbatch(config: Config, cluster: Cluster) -> Iterator[Change]:
    rows = resolve(config, cluster.count).microbatch
    for size in (size for size in range(rows - 1, 0, -1) if rows % size == 0):
        yield f"--microbatch {size}", replace(config, pipeline=replace(config.pipeline, microbatch=size))


def _zero(config: Config, cluster: Cluster) -> Iterator[Change]:
    if resolve(config, cluster.count).mesh[Axis.DP] > 1:
        for zero in range(config.layout.zero + 1, 4):
            yield f"--zero {zero}", replace(config, layout=replace(config.layout, zero=zero))


def _model_parallel(config: Config, cluster: Cluster) -> Iterator[Change]:
    """Data-parallel ranks turned into tensor- or pipeline-parallel ones, twice as many at a time."""
    mesh = resolve(config, cluster.count).mesh
    for times in (2, 4, 8):
        for axis in ("tp", "pp"):
            larger = mesh[Axis(axis)] * times
            if mesh[Axis.DP] % times == 0 and (axis == "pp" or larger <= cluster.chip.node_gpus):
                changed = replace(config.mesh, **{axis: larger}, dp=mesh[Axis.DP] // times)
                yield f"--mesh {named_axes(changed)}", replace(config, mesh=changed)


def _layout_options(config: Config) -> str:
    pipeline, layout = config.pipeline, config.layout
    words = [f"--mesh {named_axes(config.mesh)}", f"--zero {layout.zero}", f"--remat {layout.remat}", f"--microbatch {pipeline.microbatch}"]
    words += [f"--schedule {pipeline.schedule}"] if pipeline.schedule else []
    return " ".join([*words, f"--chunks {pipeline.chunks}"] if pipeline.chunks else words)


# ------------------------------------------------------------------ in words
def after_failure(config: Config, device_kind: str, memory_bytes: float, count: int) -> list[str]:
    """What `lines` says, for a run whose memory was full; nothing where the formulas don't apply: another chip, a module of the user's."""
    chip = chip_of(device_kind, memory_bytes)
    if chip is None or config.model.module is not None or problems(config, count):
        return []
    return lines(config, Cluster(chip=chip, count=count))


def chip_of(device_kind: str, memory_bytes: float) -> Chip | None:
    """The chip of the table that a device is: by the name jax has for it, and of several the one with the nearest memory."""
    def in_name(chip: Chip) -> bool:
        return chip.name.split("-")[0].lower() in device_kind.lower().replace(" ", "")
    found = [chip for chip in known_chips().values() if in_name(chip)]
    return min(found, key=lambda chip: abs(chip.memory_bytes - memory_bytes), default=None)


def lines(config: Config, cluster: Cluster) -> list[str]:
    """For a person: what the layout needs by line, and each change with what it comes to. All predicted."""
    plan = judge(config, cluster)
    parts = ", ".join(f"{line.name} {line.bytes / GIB:.1f}" for line in sorted(plan.memory.lines, key=lambda line: -line.bytes))
    has = f"of {plan.budget / GIB:.1f} on a {cluster.chip.name}"
    changes = advice(config, cluster)
    if not any(other.fits for _, other in changes):
        more = enough(config, cluster)
        last = [f"no layout of {cluster} fits: " + (f"use {more} or more" if more else "use other GPUs, or a smaller model")]
    else:
        last = []
    return [f"the layout needs {plan.memory.total / GIB:.1f} GiB a GPU {has}, by formula: {parts}",
            *(f"with {options}: {_verdict(other)}" for options, other in changes), *last]


def _verdict(plan: Plan) -> str:
    fits = "fits" if plan.fits else "still too much"
    return f"{plan.memory.total / GIB:.1f} GiB, {fits}, {plan.speed.tokens_per_second:,.0f} tokens/s predicted"
