"""Numerical building blocks against formulas written out plainly: values, every gradient, and which dtype each comes in.

References are dense fp32 with plain autodiff, or fp64 numpy; none of them uses a derivative of jaxmeg's own.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmeg.config import Config, DataConfig, ModelConfig, PrecisionConfig
from jaxmeg.models.layers import gelu, swiglu
from jaxmeg.ops.attention import causal_attention, choose_kernel
from jaxmeg.ops.dropout import dropout
from jaxmeg.ops.norm import layer_norm, rms_norm
from jaxmeg.ops.rope import rope
from jaxmeg.precision import add_bias, dot
from jaxmeg.setup import attention_kernel, build

BF16 = 2.0**-8  # largest relative error of one rounding to bf16
EPS = 1e-5


def random(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def rounded(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x).astype(jnp.bfloat16)


def error(got, want) -> float:
    """||got - want|| / ||want|| in fp64."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def row(w, ndim: int):
    return w.reshape((1,) * (ndim - w.ndim) + w.shape)


def with_grads(f, dy, *args) -> tuple[Any, tuple[Any, ...]]:
    """(f(*args), gradients of the arguments for the output's gradient dy), compiled as one program."""
    def run(dy, *args):
        y, vjp = jax.vjp(f, *args)
        return y, vjp(dy)
    return jax.jit(run)(dy, *args)


# ---------------------------------------------------------------- attention
B, T, H, K = 2, 12, 8, 8


def dense_attention(q, k, v):
    """All scores at once, kv heads repeated."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthk,bshk->bhts", q, k, precision="highest") / np.float32(np.sqrt(q.shape[-1]))
    scores = jnp.where(np.tril(np.ones((q.shape[1],) * 2, bool))[None, None], scores, -jnp.inf)
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(scores, -1), v, precision="highest")


def own_attention(q, k, v):
    return causal_attention(q, k, v, None, "xla")


def attention_inputs(kv_heads: int, tokens: int = T) -> list[np.ndarray]:
    """q, k, v and the gradient of the output."""
    return [random(i, B, tokens, heads, K) for i, heads in enumerate((H, kv_heads, kv_heads, H))]


@pytest.mark.smoke
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_attention_equals_dense_attention(kv_heads: int) -> None:
    q, k, v, dout = attention_inputs(kv_heads)
    with jax.default_matmul_precision("highest"):
        out, grads = with_grads(own_attention, dout, q, k, v)
    want, plain_grads = with_grads(dense_attention, dout, q, k, v)
    assert error(out, want) < 1e-6
    for name, got, plain in zip(("dq", "dk", "dv"), grads, plain_grads, strict=True):
        assert error(got, plain) < 2e-6, name


@pytest.mark.parametrize(("sharpness", "close"), [(1, 2 * BF16), (32, 6 * BF16)])
def test_attention_in_bf16_is_as_close_as_its_inputs_are_rounded(sharpness: int, close: float) -> None:
    """Also with scores of tens, where scores or exponents in bf16 would be off by 20 roundings."""
    q, k, v, dout = (rounded(x) for x in attention_inputs(2, tokens=64))
    q = q * sharpness
    out, grads = with_grads(own_attention, dout, q, k, v)
    want, (want_dq, want_dk, want_dv) = with_grads(dense_attention, *(x.astype(jnp.float32) for x in (dout, q, k, v)))
    assert out.dtype == jnp.bfloat16 and all(grad.dtype == jnp.bfloat16 for grad in grads)
    assert error(out, want) < BF16 and error(grads[2], want_dv) < BF16
    assert error(grads[0], want_dq) < close and error(grads[1], want_dk) < close


def test_attention_survives_scores_that_overflow_exp() -> None:
    q, k, v, dout = attention_inputs(2)
    q, k = 100 * q, 100 * k
    out, grads = with_grads(own_attention, dout, q, k, v)
    assert all(bool(jnp.isfinite(x).all()) for x in (out, *grads))
    assert error(out, jax.jit(dense_attention)(q, k, v)) < 1e-3  # scores near 1e4 are fp32 to 1e-3


@pytest.mark.parametrize(("platform", "dtype", "head_dim", "kernel", "why"), [
    ("cuda", "bf16", 64, "cudnn", "bf16, head dim 64"),
    ("gpu", "fp16", 128, "cudnn", "fp16, head dim 128"),
    ("cuda", "bf16", 8, "cudnn", "bf16, head dim 8"),
    ("cuda", "bf16", 136, "xla", "cuDNN's flash attention takes head dims up to 128 in steps of 8, not 136"),
    ("cuda", "bf16", 12, "xla", "cuDNN's flash attention takes head dims up to 128 in steps of 8, not 12"),
    ("cuda", "fp32", 64, "xla", "cuDNN's flash attention takes bf16 or fp16, not fp32"),
    ("cpu", "bf16", 64, "xla", "cuDNN needs an NVIDIA GPU, this is cpu"),
    ("tpu", "bf16", 64, "xla", "cuDNN needs an NVIDIA GPU, this is tpu"),
])
def test_which_attention_kernel_runs_and_why(platform: str, dtype: str, head_dim: int, kernel: str, why: str) -> None:
    assert choose_kernel(platform, dtype, head_dim, 128, True, None) == (kernel, why)


ODD = "cuDNN's flash attention keeps documents apart in rows of even length, not of 127 tokens"
OLD = "cuDNN's flash attention needs compute capability 8.0 (Ampere) or newer, this GPU has 7.5"


@pytest.mark.parametrize(("device", "data", "compute", "kernel", "why"), [
    ({"compute_capability": "9.0"}, {"seq_len": 128}, "bf16", "cudnn", "bf16, head dim 64"),
    ({"compute_capability": "9.0"}, {"seq_len": 127}, "bf16", "xla", ODD),
    ({"compute_capability": "9.0"}, {"seq_len": 127, "packing": "fit"}, "bf16", "xla", ODD),
    ({"compute_capability": "9.0"}, {"seq_len": 127, "packing": "none"}, "bf16", "cudnn", "bf16, head dim 64"),  # no mask
    ({"compute_capability": "9.0"}, {"seq_len": 127, "separate": False}, "bf16", "cudnn", "bf16, head dim 64"),
    ({"compute_capability": "7.5"}, {"seq_len": 128}, "fp16", "xla", OLD),
    ({"compute_capability": "8.0"}, {"seq_len": 128}, "fp16", "cudnn", "fp16, head dim 64"),
    ({"compute_capability": "10.3"}, {"seq_len": 128}, "bf16", "cudnn", "bf16, head dim 64"),
    ({}, {"seq_len": 128}, "bf16", "cudnn", "bf16, head dim 64"),  # a stand-in to compile for
    ({}, {"seq_len": 127}, "bf16", "xla", ODD),
])
def test_the_kernel_fits_the_gpu_and_the_rows(device, data, compute, kernel, why) -> None:
    assert attention_kernel(DataConfig(**data), compute, 64, SimpleNamespace(platform="gpu", **device)) == (kernel, why)


def test_a_setup_has_the_kernel_of_its_rows() -> None:
    for seq_len, kernel in ((16, "cudnn"), (15, "xla")):
        config = Config(model=ModelConfig(preset="toy"), data=DataConfig(seq_len=seq_len), precision=PrecisionConfig(compute="bf16"))
        assert build(config, jax.devices()[:1], platform="cuda").model.options.kernel == kernel


# ---------------------------------------------------------------- norms
def plain_rms(x, w):
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + EPS) * row(w, x.ndim)


def plain_layer(x, w, b):
    x = x - jnp.mean(x, -1, keepdims=True)
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + EPS) * row(w, x.ndim) + row(b, x.ndim)


NORMS = {
    "rms": (lambda x, w: rms_norm(x, w, EPS), plain_rms, 1),
    "layer": (lambda x, w, b: layer_norm(x, w, b, EPS), plain_layer, 2),
}


@pytest.mark.parametrize("shape", [(2, 5, 16), (2, 5, 3, 16)])
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_norm_equals_its_formula(kind: str, dtype: str, shape: tuple[int, ...]) -> None:
    own, plain, num_weights = NORMS[kind]
    weights = [1 + random(7 + i, shape[-1], scale=0.3) for i in range(num_weights)]
    x, dy = (jnp.asarray(random(i, *shape, scale=3.0) + np.float32(0.5)) for i in (1, 2))
    if dtype == "bf16":
        x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    y, (dx, *dweights) = with_grads(own, dy, x, *weights)
    want, (want_dx, *want_dweights) = with_grads(plain, dy.astype(jnp.float32), x.astype(jnp.float32), *weights)

    close = 3e-6 if dtype == "fp32" else BF16  # one rounding of the result, no more
    assert y.dtype == dx.dtype == x.dtype
    assert error(y, want) < close and error(dx, want_dx) < close
    for got, exact in zip(dweights, want_dweights, strict=True):
        assert got.dtype == jnp.float32 and error(got, exact) < 3e-6  # summed in fp32, never rounded


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e14])
def test_rms_norm_and_its_gradient_at_any_size(size: float) -> None:
    """fp64 by hand; an input of 1e14 has a scale of 1e-14, whose third power is no fp32 number."""
    x, dy, w = random(1, 6, 32, scale=size), random(2, 6, 32), 1 + random(3, 32, scale=0.3)
    y, (dx, dw) = with_grads(lambda x, w: rms_norm(x, w, EPS), dy, x, w)
    x64, dy64, w64 = (a.astype(np.float64) for a in (x, dy, w))
    scale = 1 / np.sqrt((x64**2).mean(-1, keepdims=True) + EPS)
    assert error(y, x64 * scale * w64) < 1e-6
    assert error(dx, scale * dy64 * w64 - scale**3 * x64 * (dy64 * w64 * x64).mean(-1, keepdims=True)) < 1e-6
    assert error(dw, (dy64 * x64 * scale).sum(0)) < 1e-6


# ---------------------------------------------------------------- rope
def complex_rotation(x: np.ndarray, positions: np.ndarray, theta: float, back: bool = False) -> np.ndarray:
    """Dims i and i + K/2 are the parts of a complex number, turned by position * theta**(-2i/K); fp64."""
    half = x.shape[-1] // 2
    z = x[..., :half].astype(np.float64) + 1j * x[..., half:].astype(np.float64)
    phase = positions[:, None] * theta ** (-2.0 * np.arange(half) / x.shape[-1])[None]
    z = z * np.exp((-1j if back else 1j) * phase)[None, :, None]
    return np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rope_is_a_complex_rotation(theta: float) -> None:
    positions = np.array([0, 1, 2, 3, 7, 40, 127], np.int32)
    x, dy = random(1, 2, 7, 3, 8), random(2, 2, 7, 3, 8)
    y, (dx,) = with_grads(lambda x: rope(x, positions[None], theta), dy, x)
    assert error(y, complex_rotation(x, positions, theta)) < 5e-6
    assert error(dx, complex_rotation(dy, positions, theta, back=True)) < 5e-6
    low = rope(rounded(x), positions[None], theta)
    assert low.dtype == jnp.bfloat16
    assert error(low, complex_rotation(np.asarray(rounded(x), np.float32), positions, theta)) < BF16


def test_rope_scores_depend_on_the_distance_alone() -> None:
    q, k = random(1, 1, 1, 1, 8), random(2, 1, 1, 1, 8)

    def score(m: int, n: int) -> float:
        return float(jnp.sum(rope(q, jnp.array([[m]]), 1e4) * rope(k, jnp.array([[n]]), 1e4)))

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-2)


# ---------------------------------------------------------------- matmul and bias
DOTS = [((3, 5, 16), (16, 4), 1), ((3, 5, 16), (16, 2, 4), 1), ((3, 5, 2, 8), (2, 8, 6), 2)]


@pytest.mark.parametrize(("x_shape", "w_shape", "contract"), DOTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_dot_keeps_the_weight_gradient_in_fp32(dtype: str, x_shape, w_shape, contract: int) -> None:
    x, w = jnp.asarray(random(1, *x_shape)), np.asarray(rounded(random(2, *w_shape)), np.float32)
    dy = jnp.asarray(random(3, *x_shape[: len(x_shape) - contract], *w_shape[contract:]))
    if dtype == "bf16":
        x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    with jax.default_matmul_precision("highest"):
        y, (dx, dw) = with_grads(lambda x, w: dot(x, w, contract), dy, x, w)

    x64, dy64, inner = np.asarray(x, np.float64), np.asarray(dy, np.float64), np.prod(w_shape[:contract])
    flat_x, flat_w = x64.reshape(-1, inner), w.astype(np.float64).reshape(inner, -1)
    flat_dy = dy64.reshape(len(flat_x), -1)
    close = 1e-6 if dtype == "fp32" else BF16
    assert y.dtype == dx.dtype == x.dtype and dw.dtype == jnp.float32
    assert error(y, (flat_x @ flat_w).reshape(y.shape)) < close
    assert error(dx, (flat_dy @ flat_w.T).reshape(x.shape)) < close
    assert error(dw, (flat_x.T @ flat_dy).reshape(w.shape)) < 1e-6  # also for bf16 inputs, where rounding it would give 1e-3


@pytest.mark.parametrize("bias_shape", [(6,), (3, 6)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_bias_gradient_is_summed_in_fp32(dtype: str, bias_shape: tuple[int, ...]) -> None:
    kind = jnp.float32 if dtype == "fp32" else jnp.bfloat16
    x, b = jnp.asarray(random(1, 2, 50, 3, 6)).astype(kind), random(2, *bias_shape)
    dy = jnp.asarray(random(3, 2, 50, 3, 6)).astype(kind)
    y, (dx, db) = with_grads(add_bias, dy, x, b)
    want = np.asarray(x, np.float64) + np.asarray(b, np.float64).reshape((1,) * (4 - b.ndim) + b.shape)
    assert y.dtype == kind and error(y, want) < (1e-6 if dtype == "fp32" else BF16)
    assert dx.dtype == kind and bool((dx == dy).all())
    assert db.dtype == jnp.float32
    assert error(db, np.asarray(dy, np.float64).sum(tuple(range(4 - b.ndim)))) < 1e-6


# ---------------------------------------------------------------- activations
def silu_64(g: np.ndarray) -> np.ndarray:
    return g / (1 + np.exp(-g))


def gelu_64(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def slope(f, x: np.ndarray) -> np.ndarray:
    """f'(x) by a central difference in fp64, exact to 1e-9."""
    return (f(x + 1e-5) - f(x - 1e-5)) / 2e-5


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_activations_equal_their_formulas(dtype: str) -> None:
    kind, close = (jnp.float32, 2e-6) if dtype == "fp32" else (jnp.bfloat16, BF16)
    gate, up, dy = (jnp.asarray(random(i, 4, 33, scale=3.0)).astype(kind) for i in (1, 2, 3))
    g, u, d = (np.asarray(x, np.float64) for x in (gate, up, dy))

    y, (dgate, dup) = with_grads(swiglu, dy, gate, up)
    assert y.dtype == dgate.dtype == dup.dtype == kind
    assert error(y, silu_64(g) * u) < close
    assert error(dgate, d * u * slope(silu_64, g)) < close
    assert error(dup, d * silu_64(g)) < close

    y, (dup,) = with_grads(gelu, dy, up)
    assert y.dtype == kind and error(y, gelu_64(u)) < close
    assert error(dup, d * slope(gelu_64, u)) < close


# ---------------------------------------------------------------- dropout
KEY = jax.random.key_data(jax.random.key(5))
ROWS, POSITIONS = jnp.arange(6, dtype=jnp.int32), jnp.arange(40, dtype=jnp.int32)


dropped = jax.jit(dropout, static_argnums=4)


def mask_of(rate: float, key: jax.Array = KEY, rows: jax.Array = ROWS, positions: jax.Array = POSITIONS) -> np.ndarray:
    """What is kept of ones [rows, positions, 32]."""
    return np.asarray(dropped(jnp.ones((len(rows), len(positions), 32)), key, rows, positions, rate)) != 0


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_right_share_at_the_right_scale(rate: float) -> None:
    x = jnp.asarray(random(1, 6, 40, 32))
    y, kept = np.asarray(dropped(x, KEY, ROWS, POSITIONS, rate)), mask_of(rate)
    sigma = np.sqrt(rate * (1 - rate) / kept.size)
    assert abs(kept.mean() - (1 - rate)) < 4 * sigma
    np.testing.assert_allclose(y, np.where(kept, np.asarray(x) / (1 - rate), 0.0), rtol=1e-6)
    low = dropped(x.astype(jnp.bfloat16), KEY, ROWS, POSITIONS, rate)
    assert low.dtype == jnp.bfloat16 and bool(((low != 0) == kept).all())


def test_dropout_mask_follows_global_row_and_position() -> None:
    whole, rng = mask_of(0.5), np.random.default_rng(0)
    rows, positions = rng.permutation(6), rng.permutation(40)
    permuted = mask_of(0.5, rows=ROWS[rows], positions=POSITIONS[positions])
    assert (permuted == whole[rows][:, positions]).all()
    assert (mask_of(0.5, rows=ROWS[2:4], positions=POSITIONS[10:20]) == whole[2:4, 10:20]).all()  # one rank's part


def test_dropout_masks_of_rows_positions_and_keys_are_unrelated() -> None:
    kept = mask_of(0.5)
    other = mask_of(0.5, key=jax.random.key_data(jax.random.key(6)))
    pairs = {"rows": (kept[:-1], kept[1:]), "positions": (kept[:, :-1], kept[:, 1:]), "keys": (kept, other),
             "elements": (kept[..., :-1], kept[..., 1:])}
    for name, (a, b) in pairs.items():  # independent masks agree in half of the places
        assert abs((a == b).mean() - 0.5) < 4 * 0.5 / np.sqrt(a.size), name


def test_dropout_gradient_uses_the_mask_of_the_forward_pass() -> None:
    x, dy = jnp.asarray(random(1, 6, 40, 32)), random(2, 6, 40, 32)
    _, (dx,) = with_grads(lambda x: dropout(x, KEY, ROWS, POSITIONS, 0.25), dy, x)
    np.testing.assert_allclose(dx, np.where(mask_of(0.25), dy / 0.75, 0.0), rtol=1e-6)
