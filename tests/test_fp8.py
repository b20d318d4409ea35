"""FP8 products against numpy with ml_dtypes' float8: the values, all three products of a layer, the head; and bounds that follow from
the formats alone.

An e4m3 number has 3 bits behind the leading one and an e5m2 number 2, so rounding moves a value by at most 2^-4 or 2^-3 of it; below
the smallest normal number by at most half the smallest step, 2^-10 or 2^-17, times the scale.
"""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from test_config import make
from test_vocab import VOCAB, Case, on_mesh, problem

from jaxmeg.models.decoder import REMAT
from jaxmeg.ops import fp8
from jaxmeg.ops.vocab import token_loss
from jaxmeg.precision import dots
from jaxmeg.setup import build
from jaxmeg.validate.check import problems, warnings
from jaxmeg.validate.speed_rules import fp8_emulated

FORMATS = {"e4m3": (fp8.FORWARD, ml_dtypes.float8_e4m3fn, 7, 2.0**-4, 2.0**-10),
           "e5m2": (fp8.BACKWARD, ml_dtypes.float8_e5m2, 14, 2.0**-3, 2.0**-17)}  # our name, numpy's, top, half a step: of a value, at 0
BF16 = 2.0**-8  # what one rounding to bf16 may change, with room for where it falls
SUM = 1e-6  # of the sum of magnitudes: fp32 sums in another order


def scale(x: np.ndarray, kind: str) -> float:
    """The power of two that brings the largest magnitude to [2^top, 2^(top + 1))."""
    largest = float(np.abs(x.astype(np.float64)).max())
    return 2.0 ** (math.frexp(largest)[1] - 1 - FORMATS[kind][2])


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """x as an 8-bit format holds it, in fp64."""
    s = scale(x, kind)
    return (x.astype(np.float64) / s).astype(FORMATS[kind][1]).astype(np.float64) * s


def uncertainty(x: np.ndarray, kind: str) -> np.ndarray:
    """How far `rounded` may be from x."""
    return np.abs(x.astype(np.float64)) * FORMATS[kind][3] + FORMATS[kind][4] * scale(x, kind)


def bf16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16)


def wide(seed: int, *shape: int) -> np.ndarray:
    """Numbers of many sizes, as bf16 holds them, in fp32."""
    rng = np.random.default_rng(seed)
    return bf16(rng.standard_normal(shape) * np.exp2(rng.integers(-12, 2, shape))).astype(np.float32)


# ---------------------------------------------------------------- values
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("factor", [1.0, 3.7e-8, 2.0**40])
def test_values_are_those_of_the_format(kind, factor):
    x = bf16(wide(0, 300, 7) * factor)
    got = fp8.quantise(jnp.asarray(x), FORMATS[kind][0])
    assert got.values.dtype == FORMATS[kind][0] and got.scale is not None
    np.testing.assert_array_equal(np.asarray(got.values).astype(np.float64) * float(got.scale), rounded(x, kind))
    assert float(got.scale) == scale(x, kind)
    assert (np.abs(rounded(x, kind) - x.astype(np.float64)) <= uncertainty(x, kind)).all()


@pytest.mark.parametrize("kind", FORMATS)
def test_largest_values_are_not_clipped_and_zeros_stay_zeros(kind):
    below = np.nextafter(np.float32(2.0), np.float32(0))  # rounds up to the next power of two
    got = fp8.quantise(jnp.asarray([below, -below, 0.0], jnp.float32), FORMATS[kind][0])
    assert (np.asarray(got.values).astype(np.float32) * np.asarray(got.scale)).tolist() == [2.0, -2.0, 0.0]
    zeros = fp8.quantise(jnp.zeros((4, 4), jnp.bfloat16), FORMATS[kind][0])
    assert (np.asarray(zeros.values).astype(np.float32) == 0).all() and np.isfinite(float(zeros.scale)) and float(zeros.scale) > 0


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("times", [2, 8])
def test_another_scale_changes_only_what_is_below_the_normal_range(kind, times):
    """So ranks may scale their parts of a tensor by themselves."""
    ours, _, _, _, step = FORMATS[kind]
    x = wide(1, 4000)
    own = scale(x, kind)
    one, other = (fp8.quantise(jnp.asarray(x), ours, jnp.float32(s)) for s in (own, own * times))
    a, b = (np.asarray(q.values).astype(np.float64) * float(q.scale) for q in (one, other))
    normal = np.abs(x) >= float(ml_dtypes.finfo(FORMATS[kind][1]).smallest_normal) * own * times
    assert normal.any() and (a[normal] == b[normal]).all()
    assert (np.abs(a - b) <= step * own * (1 + times)).all()


# ---------------------------------------------------------------- the three products of a layer
SHAPES = {"one, two dims out": ((2, 3, 32), ((32, 4, 8), (32, 16)), 1), "two dims in": ((2, 8, 4, 8), ((4, 8, 24),), 2),
          "not multiples of 16": ((1, 5, 12), ((12, 7),), 1)}


def layer(shapes) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    x_shape, w_shapes, n = shapes
    batch = x_shape[: len(x_shape) - n]
    weights = [wide(10 + i, *shape) for i, shape in enumerate(w_shapes)]
    return wide(2, *x_shape), weights, [wide(20 + i, *batch, *shape[n:]) / 64 for i, shape in enumerate(w_shapes)]


def run(products, x, weights, dys, n):
    """(products, dx, gradients of the weights) as numpy arrays."""
    def both(x, weights, dys):
        out, vjp = jax.vjp(lambda x, w: products(x, tuple(w), n), x, weights)
        return out, *vjp(dys)
    out = jax.jit(both)(jnp.asarray(bf16(x)), [jnp.asarray(w) for w in weights], [jnp.asarray(bf16(dy)) for dy in dys])
    assert all(dw.dtype == jnp.float32 for dw in out[2])
    return jax.tree.map(np.asarray, out)


def products(x, weights, dys, n, cast):
    """The same in fp64: cast(array, kind) says what each factor is taken for. dx: its parts, one a weight."""
    rows = math.prod(x.shape[: x.ndim - n])
    x8 = cast(x.reshape(rows, -1), "e4m3")
    ys, dxs, dws = [], [], []
    for w, dy in zip(weights, dys, strict=True):
        w8, dy8 = cast(w.reshape(x8.shape[1], -1), "e4m3"), cast(dy.reshape(rows, -1), "e5m2")
        ys.append((x8 @ w8).reshape(*x.shape[: x.ndim - n], *w.shape[n:]))
        dxs.append((dy8 @ w8.T).reshape(x.shape))
        dws.append((x8.T @ dy8).reshape(w.shape))
    return ys, dxs, dws


def magnitudes(x, weights, dys, n):
    return products(x, weights, dys, n, lambda a, kind: np.abs(rounded(a, kind)))


@pytest.mark.parametrize("name", SHAPES)
def test_products_are_those_of_rounded_factors(name):
    n = SHAPES[name][2]
    case = (*layer(SHAPES[name]), n)
    ys, dx, dws = run(fp8.dots, *case)
    want, sums = products(*case, rounded), magnitudes(*case)
    for got, y, most in zip(ys, want[0], sums[0], strict=True):
        assert (np.abs(got.astype(np.float64) - y) <= BF16 * np.abs(y) + SUM * most).all()
    for got, dw, most in zip(dws, want[2], sums[2], strict=True):
        assert (np.abs(got - dw) <= SUM * most).all()  # fp32: never rounded to bf16
    parts = sum(np.abs(part) for part in want[1])
    assert (np.abs(dx.astype(np.float64) - sum(want[1])) <= 2 * BF16 * parts + SUM * sum(sums[1])).all()


@pytest.mark.parametrize("name", SHAPES)
def test_products_are_as_near_the_true_ones_as_the_formats_allow(name):
    """A term a * b of rounded factors is off by at most |a| db + |b| da + da db, and a sum by the sum of that."""
    n = SHAPES[name][2]
    case = (*layer(SHAPES[name]), n)
    ys, dx, dws = run(fp8.dots, *case)
    true = products(*case, lambda a, _: a.astype(np.float64))
    most = products(*case, lambda a, kind: np.abs(a.astype(np.float64)) + uncertainty(a, kind))
    least = products(*case, lambda a, _: np.abs(a.astype(np.float64)))
    for got, y, m, a in zip([*ys, *dws], [*true[0], *true[2]], [*most[0], *most[2]], [*least[0], *least[2]], strict=True):
        assert (np.abs(got.astype(np.float64) - y) <= (m - a) + BF16 * m).all()
    assert (np.abs(dx.astype(np.float64) - sum(true[1])) <= sum(m - a for m, a in zip(most[1], least[1])) + 2 * BF16 * sum(most[1])).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "w", "dy"])
def test_what_is_not_finite_stays_so(bad, where):
    """A cast to FP8 would make a number of an infinity on a GPU, and the guard would see nothing."""
    x, weights, dys = layer(SHAPES["one, two dims out"])
    {"x": x, "w": weights[0], "dy": dys[0]}[where].reshape(-1)[5] = bad
    ys, dx, dws = run(fp8.dots, x, weights, dys, 1)
    touched = {"x": [*ys, *dws], "w": [ys[0], dx], "dy": [dx, dws[0]]}[where]
    assert all(not np.isfinite(a.astype(np.float32)).any() for a in touched)
    assert where == "x" or np.isfinite(dws[1]).all()


def test_zeros_give_zeros():
    x, weights, dys = layer(SHAPES["one, two dims out"])
    for ys, dx, dws in (run(fp8.dots, 0 * x, weights, dys, 1), run(fp8.dots, x, [0 * w for w in weights], [0 * dy for dy in dys], 1)):
        assert all((y == 0).all() for y in ys) and np.isfinite(dx.astype(np.float32)).all() and all((dw == 0).all() for dw in dws)


# ---------------------------------------------------------------- the head
@pytest.mark.parametrize("case", [Case(()), Case(("tp",), tp=2)], ids=["one", "tp2"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_loss_multiplies_rounded_factors(case, chunks):
    h, table, labels, weights = problem()
    h, table = bf16(h).astype(np.float32), bf16(table).astype(np.float32)

    def body(h, table, labels, weights):
        def loss(h, table):
            return token_loss(h, table, labels, weights, case.axes, VOCAB, chunks, True)
        return jax.value_and_grad(loss, (0, 1))(h, table)

    got, (dh, dtable) = on_mesh(case, body, bf16(h)[None], table, labels[None], weights[None],
                                specs=(P(None, "tp"), P(case.axes or None), P(), P()))
    h8 = rounded(h, "e4m3")
    parts = np.split(table, case.ranks)  # each rank scales its own
    t8 = np.concatenate([rounded(part, "e4m3") for part in parts])
    z = h8 @ t8.T
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    one_hot = np.arange(VOCAB)[None] == labels[:, None]
    dz = (p - one_hot) * weights[:, None]
    s = scale(weights, "e5m2")  # not of dz: the largest weight bounds it
    dz8 = (dz / s).astype(np.float32).astype(ml_dtypes.float8_e5m2).astype(np.float64) * s
    want_dh, want_dtable = dz8 @ t8, dz8.T @ h8
    assert abs(got[-1, 0] - -(weights * np.log(p[one_hot])).sum()) <= 1e-4
    dh = np.concatenate(list(dh[-1, :, 0].astype(np.float64)))
    dtable = np.concatenate(list(dtable[0])) if case.axes else dtable[0, 0]
    # A value of dz next to the middle of two numbers may be rounded to the other one: few do.
    for a, b, rounding in ((dh, want_dh, BF16), (dtable, want_dtable, 0.0)):
        assert np.linalg.norm(a - b) <= (rounding + 1e-3) * np.linalg.norm(b)


# ---------------------------------------------------------------- what a layer keeps
def test_scales_are_kept_so_that_nothing_is_measured_twice():
    """Whatever is redone, a tensor's largest magnitude is taken once; and what is redone is the same to the bit."""
    x, weights, dys = layer(SHAPES["one, two dims out"])
    x, dys = jnp.asarray(bf16(x)), [jnp.asarray(bf16(dy)) for dy in dys]

    def gradients(keep: bool, x, weights):
        def forward(x, weights):
            return fp8.dots(x * x, tuple(weights), 1)
        policy = jax.checkpoint_policies.save_only_these_names(*REMAT["full"])
        _, vjp = jax.vjp(forward if keep else jax.checkpoint(forward, policy=policy), x, weights)
        return vjp(dys)

    jaxpr = str(jax.make_jaxpr(lambda x, w: gradients(False, x, w))(x, weights))
    assert jaxpr.count("reduce_max") == 1 + len(weights) + len(dys)
    jax.tree.map(np.testing.assert_array_equal, gradients(False, x, weights), gradients(True, x, weights))


def test_shapes_and_dtypes_are_those_of_the_products_it_replaces():
    case = (*layer(SHAPES["two dims in"]), 2)
    for a, b in zip(jax.tree.leaves(run(fp8.dots, *case)), jax.tree.leaves(run(dots, *case)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


# ---------------------------------------------------------------- the config
ON = {"precision.fp8": True}


@pytest.mark.parametrize(("values", "line"), [
    (ON | {"precision.compute": "fp32"}, "precision.fp8=True does not work with precision.compute=fp32"),
    (ON | {"precision.compute": "fp16"}, "precision.fp8=True does not work with precision.compute=fp16"),
    ({"precision.fp8_head": True}, "precision.fp8_head=True has no effect with precision.fp8=False"),
])
def test_what_does_not_fit_is_refused_by_name(values, line):
    assert [found for found in problems(make(values), 1) if found.startswith(line)]


def test_what_costs_is_said():
    toy = ON | {"model.preset": "toy", "precision.fp8_head": True}
    assert not problems(make(toy), 1) and not [line for line in warnings(make(toy), 1) if "fp8" in line]
    [line] = [line for line in warnings(make(toy | {"mesh.tp": 2, "model.vocab_size": 250}), 2) if "fp8" in line]
    assert "model.num_kv_heads x head_dim (8 on a device), the padded vocabulary (125 on a device)" in line


def test_auto_is_bf16_and_devices_without_fp8_are_named():
    setup = build(make(ON | {"model.preset": "toy"}), jax.devices()[:1])
    assert setup.compute == "bf16" and setup.compiler_options == {}
    assert build(make(ON | {"model.preset": "toy"}), jax.devices()[:1], platform="cuda").compiler_options == fp8.GPU_OPTIONS
    assert "on a CPU" in next(fp8_emulated(setup.config, "cpu", None))
    assert "compute capability 8.0" in next(fp8_emulated(setup.config, "gpu", "8.0"))
    assert not [*fp8_emulated(setup.config, "gpu", "9.0"), *fp8_emulated(make({}), "cpu", None)]
