"""Every legal layout of a model on so many GPUs, judged by the formulas: those that fit by predicted speed, and the nearest that don't.

What the user fixed stays as it is; everything else is tried: mesh, ZeRO stage, schedule, chunks, microbatch, remat.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

from jaxmeg.arch import resolve_arch
from jaxmeg.config import REMATS, Axis, Config, MeshConfig, PipelineConfig, Resolved, mesh_sizes, resolve
from jaxmeg.planner.chips import Cluster
from jaxmeg.planner.leaves import Leaf, placed_leaves
from jaxmeg.planner.memory import Memory, plan_memory, sizes_of
from jaxmeg.planner.rates import Rates, rates_of
from jaxmeg.planner.speed import Speed, plan_speed
from jaxmeg.processes.variables import MEMORY_FRACTION
from jaxmeg.validate.check import problems
from jaxmeg.wording import divisors

CHUNKS = (2, 4)
"""Tried for the interleaved schedule."""
MICROBATCHES = (1, 2, 4, 8)
"""Rows tried."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One layout, judged."""

    config: Config
    """The run's config with the layout filled in."""
    resolved: Resolved
    memory: Memory
    speed: Speed
    budget: float
    """Bytes of a GPU that a run can use."""

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.budget


def judge(config: Config, cluster: Cluster, rates: Rates | None = None) -> Plan:
    """A config that has no problems on this number of GPUs."""
    resolved = resolve(config, cluster.count)
    leaves = placed_leaves(config, resolved)
    return _judge(config, resolved, leaves, cluster, rates or rates_of(cluster.chip, resolved.arch.head_dim))


def _judge(config: Config, resolved: Resolved, leaves: list[Leaf], cluster: Cluster, rates: Rates) -> Plan:
    compute = compute_of(config, cluster)
    sizes = sizes_of(config, resolved, compute)
    return Plan(config=config, resolved=resolved, memory=plan_memory(config, resolved, leaves, compute),
                speed=plan_speed(config, resolved, sizes, leaves, cluster.chip, rates), budget=budget(cluster))


def budget(cluster: Cluster) -> float:
    """Bytes of a GPU that a program may take; CUDA's context, cuBLAS and NCCL have the rest."""
    return cluster.chip.memory_bytes * MEMORY_FRACTION


def compute_of(config: Config, cluster: Cluster) -> str:
    return cluster.chip.compute if config.precision.compute == "auto" else config.precision.compute


# ------------------------------------------------------------------ all of them
@dataclass(frozen=True, kw_only=True)
class Found:
    """The outcome of a search."""

    fitting: list[Plan]
    """The fastest first."""
    nearest: list[Plan]
    """Where nothing fits: those that need the least memory first."""
    tried: int


def search(config: Config, cluster: Cluster, given: Container[str] = (), top: int = 10, rates: Rates | None = None) -> Found:
    """rates: measured ones.

    given: keys of the config that the user fixed, such as "layout.zero"; a mesh axis that is fixed is named like "mesh.tp"."""
    rates = rates or rates_of(cluster.chip, resolve_arch(config.model).head_dim)
    budgeted = budget(cluster)
    fitting: list[Plan] = []
    nearest: list[tuple[int, Config]] = []
    tried = 0
    for candidate in candidates(config, cluster, given):
        tried += 1
        resolved = resolve(candidate, cluster.count)
        leaves = placed_leaves(candidate, resolved)
        memory = plan_memory(candidate, resolved, leaves, compute_of(candidate, cluster))
        if memory.total <= budgeted:
            fitting.append(_judge(candidate, resolved, leaves, cluster, rates))
        else:
            nearest.append((memory.total, candidate))
    fitting.sort(key=lambda plan: (plan.speed.seconds, _effort(plan.config)))
    nearest.sort(key=lambda pair: pair[0])
    return Found(fitting=fitting[:top], tried=tried,
                 nearest=[judge(candidate, cluster, rates) for _, candidate in nearest[:top]] if not fitting else [])


def _effort(config: Config) -> tuple[int, ...]:
    """Of two layouts as fast as each other the plainer one comes first."""
    mesh = config.mesh
    return (mesh.pp, mesh.tp, config.layout.zero, REMATS.index(config.layout.remat), config.pipeline.chunks or 1)


def candidates(config: Config, cluster: Cluster, given: Container[str] = ()) -> Iterator[Config]:
    """Configs without problems. ZeRO and remat decide about no rule, so rules are asked once for all their values."""
    for mesh in _meshes(config.mesh, cluster, given):
        for pipeline in _pipelines(config, mesh, cluster, given):
            laid = replace(config, mesh=mesh, pipeline=pipeline)
            if problems(laid, cluster.count):
                continue
            for zero in _zeros(config, mesh_sizes(mesh, cluster.count), given):
                for remat in (config.layout.remat,) if "layout.remat" in given else REMATS:
                    yield replace(laid, layout=replace(config.layout, zero=zero, remat=remat))


def _meshes(mesh: MeshConfig, cluster: Cluster, given: Container[str]) -> Iterator[MeshConfig]:
    """Tensor parallelism stays inside a host; replicas of a ZeRO group are tried where it would span hosts."""
    count, node = cluster.count, cluster.chip.node_gpus
    def sizes(axis: str, rest: int, least: int = 1) -> list[int]:
        fixed = getattr(mesh, axis)
        return [fixed] if f"mesh.{axis}" in given and fixed else [size for size in divisors(rest) if size >= least]
    for tp in sizes("tp", count):
        if tp > node and "mesh.tp" not in given:
            continue
        for pp in sizes("pp", count // tp):
            left = count // (tp * pp)
            for rep in sizes("rep", left):
                crosses = tp * left // rep > node or rep == 1
                if tp * pp * rep * (left // rep) == count and (crosses or "mesh.rep" in given):
                    yield MeshConfig(pp=pp, rep=rep, dp=left // rep, tp=tp)


def _zeros(config: Config, mesh: dict[Axis, int], given: Container[str]) -> tuple[int, ...]:
    """Stages that shard something; without data-parallel ranks they are all the same."""
    if "layout.zero" in given:
        return (config.layout.zero,)
    return (0, 1, 2, 3) if mesh[Axis.DP] > 1 else (1,)


def _pipelines(config: Config, mesh: MeshConfig, cluster: Cluster, given: Container[str]) -> Iterator[PipelineConfig]:
    """Schedules and microbatches that divide the rows of a data-parallel rank."""
    ranks = mesh.rep * (mesh.dp or 1)
    rows, odd = divmod(config.data.global_batch, ranks)
    if odd or not rows:
        return
    fixed = config.pipeline
    sizes = [fixed.microbatch] if "pipeline.microbatch" in given else [size for size in {*MICROBATCHES, rows} if rows % size == 0]
    if mesh.pp == 1:
        schedules: list[tuple[str | None, int | None]] = [(None, None)]
    elif "pipeline.schedule" in given:
        schedules = [(fixed.schedule, fixed.chunks)]
    else:
        schedules = [("1f1b", None), *(("interleaved", chunks) for chunks in CHUNKS), ("gpipe", None)]
        if "pipeline.chunks" in given:
            schedules = [("interleaved" if (fixed.chunks or 1) > 1 else "1f1b", fixed.chunks)]
    for schedule, chunks in schedules:
        for size in sorted(size for size in sizes if size):
            if mesh.pp == 1 or rows // size >= mesh.pp or size == 1:
                yield PipelineConfig(schedule=schedule, chunks=chunks, microbatch=size)


# ------------------------------------------------------------------ where nothing fits
def hopeless(config: Config, cluster: Cluster) -> list[str]:
    """What is wrong with a config on every layout: its rules on one device, where no size has to divide."""
    one = replace(config, mesh=MeshConfig(dp=1), pipeline=PipelineConfig(), layout=replace(config.layout, zero=0))
    return problems(one, 1)


def enough(config: Config, cluster: Cluster, given: Container[str] = ()) -> Cluster | None:
    """The next number of GPUs, by doubling, on which something fits; None within 64 times as many."""
    for times in (2, 4, 8, 16, 32, 64):
        larger = replace(cluster, count=cluster.count * times)
        if search(config, larger, given, top=1).fitting:
            return larger
    return None
