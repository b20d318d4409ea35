"""The reader of compiled programs against programs whose traffic is known in closed form.

They are compiled for eight emulated CPU devices, and one (marked aot) for eight GPUs. Forms that appear only in texts
of other compilers are in test_hlo.py.
"""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmeg import hlo

SHAPE = {"pp": 2, "rep": 1, "dp": 2, "ep": 1, "cp": 1, "tp": 2}
AXES = tuple(SHAPE)
ROWS, COLUMNS, INNER, OUTER = 8, 16, 5, 3
F32, BF16 = 4, 2
LOCAL = ROWS * COLUMNS * F32  # bytes of the array each device carries through the loops


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(*SHAPE.values()), AXES, axis_types=(AxisType.Auto,) * 6)


def compiled_text(body, *shapes, out=None) -> str | None:
    """Compiles body, a function of local arrays, on all eight devices; shapes are local shapes, sharded over dim 0."""
    spec = P(AXES)
    step = jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=spec, out_specs=out or spec))
    ones = [jax.ShapeDtypeStruct((8 * rows, *rest), jnp.float32) for rows, *rest in shapes]
    return step.lower(*ones).compile().as_text()


def varying(x: jax.Array, *axes: str) -> jax.Array:
    return lax.pcast(x, axes, to="varying")


def nested(x: jax.Array, w: jax.Array) -> jax.Array:
    """One collective of each kind and of one, two or three axes, in a scan of 5 in a scan of 3, and one outside."""

    def inner(x, _):
        x = jnp.tanh(x @ w)
        x = x + varying(lax.psum(x, "tp"), "tp")
        x = x + lax.psum_scatter(lax.all_gather(x, ("pp", "tp"), tiled=True) * x[0, 0], ("pp", "tp"), tiled=True)
        x = x * lax.all_gather(jnp.tanh(x[:2]), "dp").sum((0, 1))[None]
        x = x + lax.psum_scatter(jnp.tanh(x), "dp", tiled=True).sum(0)[None]
        x = jnp.sin(lax.ppermute(x, "pp", [(0, 1), (1, 0)]))
        return lax.all_to_all(x, "dp", 0, 0, tiled=True), None

    def outer(x, _):
        x, _ = lax.scan(inner, x, length=INNER)
        x = x + varying(lax.psum(x, ("pp", "dp")), "pp", "dp")
        return lax.ppermute(x, ("dp", "tp"), [(i, (i + 1) % 4) for i in range(4)]), None

    x, _ = lax.scan(outer, x, length=OUTER)
    return x + varying(lax.psum(jnp.sum(x), AXES), *AXES)


# op, axes, loops -> instructions, bytes of the full tensor summed over them; everything that `nested` says, and no more
NESTED = {
    ("all-reduce", ("tp",), (OUTER, INNER)): (1, LOCAL),
    ("all-gather", ("pp", "tp"), (OUTER, INNER)): (1, 4 * LOCAL),
    ("reduce-scatter", ("pp", "tp"), (OUTER, INNER)): (1, 4 * LOCAL),
    ("all-gather", ("dp",), (OUTER, INNER)): (1, 2 * 2 * COLUMNS * F32),
    ("reduce-scatter", ("dp",), (OUTER, INNER)): (1, LOCAL),
    ("collective-permute", ("pp",), (OUTER, INNER)): (1, LOCAL),
    ("all-to-all", ("dp",), (OUTER, INNER)): (1, LOCAL),
    ("all-reduce", ("pp", "dp"), (OUTER,)): (1, LOCAL),
    ("collective-permute", ("dp", "tp"), (OUTER,)): (1, LOCAL),
    ("all-reduce", ("pp", "dp", "tp"), ()): (1, F32),
}
# op -> bytes one device sends for a full tensor of b bytes in a group of n
WIRE = {
    "all-reduce": lambda b, n: 2 * b * (n - 1) // n,
    "all-gather": lambda b, n: b * (n - 1) // n,
    "reduce-scatter": lambda b, n: b * (n - 1) // n,
    "all-to-all": lambda b, n: b * (n - 1) // n,
    "collective-permute": lambda b, n: b,
}


@pytest.fixture(scope="module")
def nested_program() -> hlo.Program:
    return hlo.read(compiled_text(nested, (ROWS, COLUMNS), (COLUMNS, COLUMNS)), SHAPE)


def test_collectives_in_nested_scans_match_the_closed_form(nested_program):
    found = nested_program.totals("op", "axes", "loops")
    assert set(found) == set(NESTED)
    for (op, axes, loops), (instructions, size) in NESTED.items():
        runs = int(np.prod(loops)) * instructions
        n = int(np.prod([SHAPE[axis] for axis in axes]))
        want = hlo.Totals(count=runs, bytes=runs * size, wire_bytes=runs * WIRE[op](size, n))
        assert found[op, axes, loops] == want, (op, axes, loops)


def test_a_collective_carries_its_type_group_size_and_source(nested_program):
    assert {c.dtype for c in nested_program.collectives} == {"f32"}
    assert {c.overlapped for c in nested_program.collectives} == {None}  # the CPU backend has no async collectives
    gather = next(c for c in nested_program.collectives if c.op == "all-gather" and c.axes == ("pp", "tp"))
    assert (gather.group_size, gather.count) == (4, OUTER * INNER)
    assert gather.source.endswith("/all_gather")


def test_loops_dots_and_totals_over_everything(nested_program):
    assert nested_program.loops == ((OUTER,), (OUTER, INNER))
    assert nested_program.dots == {"f32,f32->f32": 1}
    assert nested_program.conditionals == 0
    assert nested_program.totals()[()].count == sum(c.count for c in nested_program.collectives) == 7 * 15 + 2 * 3 + 1


def test_program_size_does_not_grow_with_the_trip_count():
    def scanned(length):
        step = lambda x, _: (jnp.tanh(x @ x), None)
        return hlo.read(compiled_text(lambda x: lax.scan(step, x, length=length)[0], (8, 8)), SHAPE)

    short, long = scanned(7), scanned(700)
    assert short.instructions == long.instructions > 0
    assert (short.loops, long.loops) == (((7,),), ((700,),))


def test_a_while_loop_of_unknown_length_is_refused_by_name_or_takes_the_given_count():
    def until_small(x):
        step = lambda x: x * 0.5 + varying(lax.psum(x, "dp"), "dp") * 0.1
        return lax.while_loop(lambda x: lax.pmax(jnp.max(x), AXES) > 1, step, x)

    text = compiled_text(until_small, (ROWS, COLUMNS))
    with pytest.raises(ValueError, match=r"loop while[.\d]*, trip count unknown, holds .*pass unknown_trips"):
        hlo.read(text, SHAPE)
    program = hlo.read(text, SHAPE, unknown_trips=10)
    assert program.loops == ((None,),)
    assert program.totals("op", "axes")["all-reduce", ("dp",)] == hlo.Totals(
        count=10, bytes=10 * LOCAL, wire_bytes=10 * LOCAL
    )


def test_collectives_in_both_branches_of_a_conditional_are_counted():
    def either(x):
        gather = lambda x: lax.all_gather(x, "tp", tiled=True)[:ROWS]
        reduce = lambda x: varying(lax.psum(x, "tp"), "tp")
        return lax.cond(lax.psum(jnp.sum(x), AXES) > 0, gather, reduce, x)

    program = hlo.read(compiled_text(either, (ROWS, COLUMNS)), SHAPE)
    assert program.conditionals == 1
    found = program.totals("op", "axes")
    assert found["all-gather", ("tp",)].bytes == 2 * LOCAL
    assert found["all-reduce", ("tp",)].bytes == LOCAL


def test_what_the_automatic_partitioner_inserts():
    """Its groups come as iota lists and as meshes with a device order, unlike those of shard_map."""
    named = lambda *spec: NamedSharding(mesh(), P(*spec))
    total = jax.jit(lambda x: x.sum(0), in_shardings=named(("pp", "tp"), "dp"), out_shardings=named("dp"))
    program = hlo.read(total.lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile().as_text(), SHAPE)
    assert program.totals("op", "axes", "bytes") == {
        ("all-reduce", ("pp", "tp"), 32 * F32): hlo.Totals(count=1, bytes=32 * F32, wire_bytes=2 * 32 * F32 * 3 // 4)
    }
    gather = jax.jit(lambda x: x, in_shardings=named(("pp", "dp"), "tp"), out_shardings=named("dp", "tp"))
    program = hlo.read(gather.lower(jax.ShapeDtypeStruct((64, 64), jnp.float32)).compile().as_text(), SHAPE)
    assert program.totals("op", "axes", "bytes")["all-gather", ("pp",), 32 * 32 * F32].count == 1


TARGET = Path(hlo.__file__).parent / "targets" / "h200.txt"
FOR_GPU = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

target = open(sys.argv[1]).read()
devices = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x8x1").devices
mesh = Mesh(np.array(devices).reshape(2, 2, 2), ("pp", "dp", "tp"), axis_types=(AxisType.Auto,) * 3)

def body(x, w):
    def layer(x, w):
        x = jnp.tanh(x @ lax.all_gather(w, "dp", tiled=True))
        x = lax.psum_scatter(lax.all_gather(x, "tp", tiled=True), "tp", tiled=True)
        return lax.ppermute(x, "pp", [(0, 1), (1, 0)]), None
    return lax.scan(layer, x, w)[0]

rows, weights = P(("pp", "dp", "tp")), P(None, "dp")
step = jax.shard_map(body, mesh=mesh, in_specs=(rows, weights), out_specs=rows, check_vma=False)
at = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
arguments = at((8 * 512, 1024), rows), at((6, 1024, 1024), weights)
print(jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",)).compile().as_text())
"""


@pytest.mark.aot
def test_a_program_compiled_for_gpus(gpu_compiler_environment):
    run = subprocess.run(
        [sys.executable, "-c", FOR_GPU, str(TARGET)],
        env=gpu_compiler_environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    program = hlo.read(run.stdout, {"pp": 2, "dp": 2, "tp": 2})
    local, weight = 512 * 1024 * BF16, 1024 * 1024 * BF16
    want = {
        ("all-gather", ("dp",)): (weight, weight // 2),
        ("all-gather", ("tp",)): (2 * local, local),
        ("reduce-scatter", ("tp",)): (2 * local, local),
        ("collective-permute", ("pp",)): (local, local),
    }
    assert program.totals("op", "axes", "dtype") == {
        (*key, "bf16"): hlo.Totals(count=6, bytes=6 * size, wire_bytes=6 * wire) for key, (size, wire) in want.items()
    }
    assert program.dots in ({"bf16,bf16->bf16": 1}, {"bf16,bf16->f32": 1})  # with the tanh in f32 fused or not
