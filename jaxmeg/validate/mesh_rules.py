"""Rules on how a model, a batch and a schedule fit a mesh, and the meshes nearest to one that does not fit.

A mesh here is six sizes in device order. Each function yields finished messages. Dims that the rule table leaves
whole ("heads: []") are not checked against the axis they would have used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log2, prod

from jaxmeg.arch import Arch
from jaxmeg.config import Axis, Config, MeshConfig, mesh_sizes
from jaxmeg.pipeline.notation import ScheduleFileError, UserSchedule
from jaxmeg.pipeline.user import is_schedule_file, read_schedule
from jaxmeg.wording import any_of, divisors, multiples_around, nearest

MOST_MICROBATCHES = 16_384
"""Of a step: a schedule lists every one of them."""
MOST_DEVICES = 2**20
NOT_BUILT = {"cp": "context parallelism", "ep": "expert parallelism"}


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What the rules look at: all sizes are at least 1."""

    config: Config
    arch: Arch
    num_devices: int
    rules: dict[str, tuple[str, ...]]

    @property
    def mesh(self) -> MeshConfig:
        """The sizes as they were asked for."""
        return self.config.mesh

    @property
    def ranks(self) -> int:
        """Data-parallel ranks; a dp of None counts 1 while the other axes do not fit the devices."""
        sizes = mesh_sizes(self.mesh, self.num_devices)
        fits = self.num_devices % num_named(self.mesh) == 0
        dp = sizes[Axis.DP] if fits or self.mesh.dp is not None else 1
        return sizes[Axis.REP] * max(1, dp) * sizes[Axis.EP]


def not_built(mesh: MeshConfig) -> Iterator[str]:
    """Axes that have a name and a place in the mesh, but no implementation."""
    for axis, meaning in NOT_BUILT.items():
        size = getattr(mesh, axis)
        if size > 1:
            yield f"mesh.{axis}={size} asks for {meaning}, which is not built yet: use {axis} 1"


def named_axes(mesh: MeshConfig) -> str:
    """The mesh in the short form of the command line: "pp=2,tp=4"; axes of size 1 are left out."""
    sizes = {axis.value: getattr(mesh, axis.value) for axis in Axis}
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size not in (None, 1)) or "dp=1"


def num_named(mesh: MeshConfig) -> int:
    """Devices that the named axes need; a dp of None counts 1."""
    return mesh.pp * mesh.rep * (mesh.dp or 1) * mesh.ep * mesh.cp * mesh.tp


def devices(fit: Fit) -> Iterator[str]:
    """The product of the axes is the number of devices."""
    named, have, mesh = num_named(fit.mesh), fit.num_devices, fit.mesh
    if named > MOST_DEVICES:
        yield f"mesh {named_axes(mesh)} needs {named:,} devices, more than there can be ({MOST_DEVICES:,}): use smaller sizes"
        return
    fits = have == named if mesh.dp is not None else have % named == 0 and have >= named
    if fits:
        return
    noun = "device" if have == 1 else "devices"
    if named > have:
        what = f"needs {named} devices, but there {'is' if have == 1 else 'are'} {have} {noun}"
    elif mesh.dp is not None:
        what = f"uses {named} of {have} {noun}: leave dp out"
    else:
        what = f"needs a multiple of {named} devices, but there are {have} {noun}"
    near = nearest_meshes(fit)
    use = f"use --mesh {any_of(near)}, or " if near else ""
    joint = ", " if what.endswith("leave dp out") else ": "
    yield f"mesh {named_axes(mesh)} {what}{joint}{use}--emulate {named}"


def _tp_divides(fit: Fit, dim: str, key: str, size: int) -> Iterator[str]:
    if "tp" in fit.rules[dim] and size % fit.mesh.tp:
        fits = any_of(nearest(divisors(size), fit.mesh.tp))
        yield f"mesh.tp={fit.mesh.tp} does not divide {key}={size}: use tp {fits}"


def heads(fit: Fit) -> Iterator[str]:
    """Query heads are cut over tp; KV heads are cut, or repeated when tp has more ranks."""
    yield from _tp_divides(fit, "heads", "model.num_heads", fit.arch.num_heads)
    tp, num_kv = fit.mesh.tp, fit.arch.num_kv_heads
    if "tp" in fit.rules["kv_heads"] and num_kv % tp and tp % num_kv:
        fits = any_of(nearest({*divisors(num_kv), num_kv * 2, *multiples_around(tp, num_kv)}, tp))
        yield f"mesh.tp={tp} neither divides model.num_kv_heads={num_kv} nor is a multiple of it: use tp {fits}"


def mlp(fit: Fit) -> Iterator[str]:
    """The MLP's hidden dim is cut over tp."""
    for message in _tp_divides(fit, "mlp", "model.mlp_dim", fit.arch.mlp_dim):
        yield f"{message}, or mlp_dim {any_of(multiples_around(fit.arch.mlp_dim, fit.mesh.tp))}"


def sequence(fit: Fit) -> Iterator[str]:
    """Between blocks the sequence is cut over tp (sequence parallelism)."""
    seq_len, tp = fit.config.data.seq_len, fit.mesh.tp
    if seq_len % tp:
        fits = any_of(multiples_around(seq_len, tp))
        tps = any_of(nearest(divisors(seq_len), tp))
        yield f"mesh.tp={tp} does not divide data.seq_len={seq_len}: use seq_len {fits}, or tp {tps}"


def batch(fit: Fit) -> Iterator[str]:
    """The rows of an update are dealt evenly to the data-parallel ranks, then to microbatches."""
    rows, ranks = fit.config.data.global_batch, fit.ranks
    rep = fit.mesh.rep * fit.mesh.ep
    dp = ranks // rep
    over = f"mesh.dp={dp}" if rep == 1 else f"mesh.rep*dp={rep}*{dp}={ranks}"
    if rows % ranks:
        fits = any_of(multiples_around(rows, ranks))
        ranks_that_fit = any_of(nearest(divisors(rows), ranks))
        name = "dp" if rep == 1 else "rep*dp"
        yield f"{over} does not divide data.global_batch={rows}: use global_batch {fits}, or {name} {ranks_that_fit}"
        return
    local, microbatch = rows // ranks, fit.config.pipeline.microbatch
    if microbatch is not None and local % microbatch:
        fits = any_of(nearest(divisors(local), microbatch))
        yield (
            f"pipeline.microbatch={microbatch} does not divide the {local} rows of a data-parallel rank "
            f"(data.global_batch={rows} over {over}): use microbatch {fits}"
        )
    elif microbatch is not None and local // microbatch > MOST_MICROBATCHES:
        fits = next(size for size in divisors(local) if local // size <= MOST_MICROBATCHES)
        yield (
            f"pipeline.microbatch={microbatch} makes {local // microbatch:,} microbatches of the {local:,} rows of a data-parallel rank, "
            f"and a step has at most {MOST_MICROBATCHES:,}: use microbatch {fits} or more, or a smaller global_batch"
        )


def schedule(fit: Fit) -> Iterator[str]:
    """Chunks agree with the schedule; stages and microbatches with one of the user's."""
    name, chunks = fit.config.pipeline.schedule, fit.config.pipeline.chunks
    if fit.mesh.pp == 1:
        return
    if user := _user_schedule(fit):
        yield from _fits_user_schedule(fit, user)
    elif name == "interleaved" and chunks == 1:
        yield "pipeline.chunks=1 does not fit pipeline.schedule=interleaved: use chunks 2 or more, or schedule 1f1b"
    elif name in (None, "1f1b") and chunks is not None and chunks > 1:
        shown = name or "1f1b (the default)"
        yield f"pipeline.chunks={chunks} does not fit pipeline.schedule={shown}: use schedule interleaved, or chunks 1"


def _user_schedule(fit: Fit) -> UserSchedule | None:
    """What the file of a schedule holds; None for a name, and for a file that `value_rules.choices` complains of."""
    path = fit.config.pipeline.schedule
    try:
        return read_schedule(path) if path and is_schedule_file(path) else None
    except ScheduleFileError:
        return None


def _fits_user_schedule(fit: Fit, user: UserSchedule) -> Iterator[str]:
    pipeline, pp, num = fit.config.pipeline, fit.mesh.pp, user.num_microbatches
    name = f"pipeline.schedule={pipeline.schedule}"
    if user.num_stages != pp:
        yield f"{name} has {user.num_stages} stages and mesh.pp={pp}: use pp {user.num_stages}, or a schedule of {pp} stages"
        return
    if pipeline.chunks not in (None, user.num_chunks):
        yield f"pipeline.chunks={pipeline.chunks} does not fit {name}, which has {user.num_chunks}: leave chunks out"
    rows, ranks, microbatch = fit.config.data.global_batch, fit.ranks, pipeline.microbatch
    local = rows // ranks
    if rows % ranks or (microbatch and local % microbatch):  # `batch` says so
        return
    if microbatch and local // microbatch != num:
        fixes = [f"microbatch {local // num}"] if local % num == 0 else []
        fixes.append(f"global_batch {num * microbatch * ranks}")
        yield (
            f"{name} has {num} microbatches, and pipeline.microbatch={microbatch} makes {local // microbatch} of the {local} rows of a "
            f"data-parallel rank: use {any_of(fixes)}"
        )
    elif local % num:
        fits = any_of(multiples_around(rows, num * ranks))
        yield f"{name} has {num} microbatches, which do not divide the {local} rows of a data-parallel rank: use global_batch {fits}"


def layers(fit: Fit) -> Iterator[str]:
    """Every chunk of every stage has a layer."""
    pp, num_layers = fit.mesh.pp, fit.arch.num_layers
    user = _user_schedule(fit)
    chunks = user.num_chunks if user else fit.config.pipeline.chunks or (2 if fit.config.pipeline.schedule == "interleaved" else 1)
    if pp == 1 or num_layers >= pp * chunks:
        return
    pieces = f"mesh.pp={pp} stages" if chunks == 1 else f"mesh.pp={pp} stages x {chunks} chunks = {pp * chunks} pieces"
    if user:
        yield f"model.num_layers={num_layers} is fewer than {pieces}: use num_layers {pp * chunks} or more, or another schedule"
        return
    fixes = [f"pp {any_of(_up_to(num_layers // chunks))}"] if num_layers >= chunks else []
    if chunks > 1 and num_layers >= pp:
        fixes.append(f"chunks {any_of(_up_to(num_layers // pp))}")
    yield f"model.num_layers={num_layers} is fewer than {pieces}: use {' or '.join(fixes) or 'pp 1'}"


def _up_to(most: int, count: int = 4) -> range:
    """The `count` numbers up to `most`, from 1 at the least."""
    return range(max(most - count, 0) + 1, most + 1)


FIT_RULES = (heads, mlp, sequence, batch, schedule, layers)
"""Rules that hold for any number of devices; `devices` comes on top."""


def nearest_meshes(fit: Fit, count: int = 3) -> list[str]:
    """Meshes of exactly fit.num_devices devices that break no rule, nearest first, in the command line's short form.

    Near means: few halvings or doublings of pp, rep and tp away; dp takes the rest.
    """
    have, mesh = fit.num_devices, fit.mesh
    needs_stages = fit.config.pipeline.schedule is not None or fit.config.pipeline.chunks is not None
    found: list[tuple[float, str]] = []
    for pp in divisors(have):
        for tp in divisors(have // pp):
            for rep in {1, mesh.rep}:
                dp, rest = divmod(have, pp * tp * rep)
                if rest or (needs_stages and pp == 1):
                    continue
                near = MeshConfig(pp=pp, rep=rep, dp=dp, tp=tp)
                if any(True for rule in FIT_RULES for _ in rule(replace(fit, config=replace(fit.config, mesh=near)))):
                    continue
                pairs = ((pp, mesh.pp), (tp, mesh.tp), (rep, mesh.rep))
                found.append((sum(abs(log2(size / wanted)) for size, wanted in pairs), named_axes(near)))
    return [name for _, name in sorted(found)[:count]]


def is_sized(mesh: MeshConfig) -> bool:
    """Whether every axis has at least one device, so that sizes can be multiplied and divided."""
    return all(size is None or size >= 1 for size in (mesh.pp, mesh.rep, mesh.dp, mesh.ep, mesh.cp, mesh.tp))


def num_ranks_zero(sizes: dict[Axis, int]) -> int:
    """Ranks that ZeRO shards over."""
    return prod(sizes[axis] for axis in (Axis.DP, Axis.EP, Axis.CP))
