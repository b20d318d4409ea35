"""Every optimizer by name: its formula, and the same updates, moments, schedule, decay and clipping on every layout.

The formulas are written out in fp64 numpy for one layer's matrix at a time. On layouts, gradients come from the real
gradient program, compiled once a layout, and go through the real train step of each optimizer.
"""

import functools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmeg.config import (
    OPTIMIZERS,
    Config,
    DataConfig,
    LayoutConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    TrainConfig,
)
from jaxmeg.hlo import Program, read
from jaxmeg.layout import LeafLayout, make_layout
from jaxmeg.mesh import build_mesh
from jaxmeg.optim.adafactor import block_of
from jaxmeg.optim.build import decay_mask, learning_rate, make_optimizer
from jaxmeg.optim.matrices import Matrix, matrix_of, multiplied_matrix
from jaxmeg.optim.moments import moment_bytes, moment_layouts
from jaxmeg.optim.traffic import gathered, reduced, update_lines
from jaxmeg.rules import DEFAULT_RULES
from jaxmeg.setup import Setup, build
from jaxmeg.state import TrainState, canonical, fresh_state, from_canonical, init_state, moments, state_shardings
from jaxmeg.step import Rows, loss_and_gradients, make_train_step, place_rows
from jaxmeg.validate.check import problems

# ---------------------------------------------------------------- what is a matrix


@pytest.mark.parametrize(("dims", "matrix", "multiplied"), [
    (("layers", "embed", "mlp"), ((0,), (1,), (2,)), True),
    (("layers", "embed", "kv_heads", "head_dim"), ((0,), (1,), (2, 3)), True),
    (("layers", "heads", "head_dim", "embed"), ((0,), (1, 2), (3,)), True),
    (("layers", "experts", "embed", "mlp"), ((0, 1), (2,), (3,)), True),
    (("any", "any"), ((), (0,), (1,)), True),  # of a module of one's own
    (("vocab", "embed"), ((), (0,), (1,)), False),
    (("positions", "embed"), ((), (0,), (1,)), False),
    (("layers", "heads", "head_dim"), None, False),  # a bias
    (("layers", "embed"), None, False),
    (("head_dim",), None, False),
    (("any", "any", "any"), None, False),
    ((), None, False),
])
def test_what_in_a_leaf_is_a_matrix(dims: tuple[str, ...], matrix: Any, multiplied: bool) -> None:
    assert matrix_of(dims) == (matrix and Matrix(*matrix))
    assert multiplied_matrix(dims) == (matrix_of(dims) if multiplied else None)


def test_padding_rows_do_not_make_a_matrix_large_enough_to_factor() -> None:
    dims = ("vocab", "embed")
    assert block_of(dims, (8, 9), 7, 8).matrix is None
    assert block_of(dims, (8, 9), 8, 8).matrix == block_of(dims, (8, 9), None, 8).matrix == Matrix((), (0,), (1,))


# ---------------------------------------------------------------- formulas
def rms(x: np.ndarray) -> float:
    return math.sqrt(np.mean(x**2))


class Reference:
    """One optimizer on one layer's vector or matrix in fp64: `change(g, p, t)` of update t = 1, 2, ... before decay and learning rate."""

    def __init__(self, optim: OptimConfig):
        self.optim, self.a, self.b = optim, 0.0, 0.0  # two moments

    def adamw(self, g: np.ndarray, p: np.ndarray, t: int) -> np.ndarray:
        o = self.optim
        self.a, self.b = o.beta1 * self.a + (1 - o.beta1) * g, o.beta2 * self.b + (1 - o.beta2) * g**2
        return self.a / (1 - o.beta1**t) / (np.sqrt(self.b / (1 - o.beta2**t)) + o.eps)

    def lion(self, g: np.ndarray, p: np.ndarray, t: int) -> np.ndarray:
        o = self.optim
        change = np.sign(o.beta1 * self.a + (1 - o.beta1) * g)
        self.a = o.beta2 * self.a + (1 - o.beta2) * g
        return change

    def sgd(self, g: np.ndarray, p: np.ndarray, t: int) -> np.ndarray:
        self.a = self.optim.momentum * self.a + g
        return self.a

    def adafactor(self, g: np.ndarray, p: np.ndarray, t: int) -> np.ndarray:
        decay, square = 1 - t**-0.8, g**2 + 1e-30
        if g.ndim == 2 and min(g.shape) >= self.optim.factored_dim:
            self.a, self.b = (decay * old + (1 - decay) * square.mean(dim) for old, dim in ((self.a, 1), (self.b, 0)))
            change = g / np.sqrt(np.outer(self.a, self.b) / np.mean(self.a))
        else:
            self.a = decay * self.a + (1 - decay) * square
            change = g / np.sqrt(self.a)
        return change / max(1, rms(change)) * max(rms(p), 1e-3)

    def muon(self, g: np.ndarray, p: np.ndarray, t: int) -> np.ndarray:
        o = self.optim
        self.a = o.momentum * self.a + g
        x = g + o.momentum * self.a
        x = x / np.linalg.norm(x)
        for _ in range(o.newton_schulz_steps):
            xx = x @ x.T
            x = 3.4445 * x + (-4.7750 * xx + 2.0315 * xx @ xx) @ x
        return 0.2 * math.sqrt(max(x.shape)) * x


# leaf -> (dims, shape in memory, shape of one layer as a matrix or vector). Row 1 of the layers and rows 6 and 7 of the
# vocabulary are padding.
LEAVES: dict[str, tuple[tuple[str, ...], tuple[int, ...], tuple[int, ...]]] = {
    "tokens": (("vocab", "embed"), (8, 5), (6, 5)),
    "up": (("layers", "embed", "mlp"), (3, 5, 7), (5, 7)),
    "query": (("layers", "embed", "heads", "head_dim"), (3, 5, 2, 3), (5, 6)),
    "out": (("layers", "heads", "head_dim", "embed"), (3, 2, 3, 5), (6, 5)),
    "query_bias": (("layers", "heads", "head_dim"), (3, 2, 3), (6,)),
}
REAL_LAYERS, VOCAB_ROWS = (0, 2), 6


def blocks(name: str, x: Any) -> list[np.ndarray]:
    """The real matrices or vectors of a leaf, fp64."""
    dims, _, own = LEAVES[name]
    x = np.asarray(x, np.float64)
    return [x[:VOCAB_ROWS]] if dims[0] == "vocab" else [x[i].reshape(own) for i in REAL_LAYERS]


def random_leaves(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Weights or gradients; padding is zero. Biases are smaller than what Adafactor takes a parameter to be at least."""
    leaves = {name: rng.standard_normal(shape).astype(np.float32) for name, (_, shape, _) in LEAVES.items()}
    for name, (dims, _, _) in LEAVES.items():
        leaves[name][slice(VOCAB_ROWS, None) if dims[0] == "vocab" else 1] = 0.0
    leaves["query_bias"] *= 1e-4
    return leaves


@pytest.mark.parametrize(("name", "other"), [
    ("adamw", {}), ("lion", {}), ("adafactor", {"factored_dim": 5}), ("adafactor", {"factored_dim": 6}),
    ("muon", {"momentum": 0.7, "newton_schulz_steps": 3}), ("sgd", {"momentum": 0.7}), ("sgd", {"momentum": 0.0}),
], ids=["adamw", "lion", "adafactor", "adafactor-whole", "muon", "sgd", "sgd-without-momentum"])
def test_optimizer_equals_its_formula(name: str, other: dict[str, Any]) -> None:
    """Five updates of stacked, padded leaves; lr and decay change every weight visibly, and padding stays zero."""
    optim = OptimConfig(name=name, lr=0.1, warmup=2, schedule="linear", final_lr_ratio=0.0, beta1=0.8, beta2=0.9, eps=1e-3,
                        weight_decay=0.3, **other)
    rates = [0.0, 0.05, 0.1, 0.1 * 2 / 3, 0.1 / 3]
    rng = np.random.default_rng(0)
    dims = {leaf: names for leaf, (names, _, _) in LEAVES.items()}
    params: Any = random_leaves(rng)
    optimizer = make_optimizer(optim, 5, make_layout(build_mesh({}, jax.devices()), DEFAULT_RULES, 0, params, dims), VOCAB_ROWS)

    @jax.jit
    def update(grads: Any, state: Any, params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            changes, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, changes), state

    state = optimizer.init(params)
    want = {leaf: blocks(leaf, x) for leaf, x in params.items()}
    by_adamw = ("tokens", "query_bias") if name == "muon" else ()
    references = {leaf: [Reference(optim) for _ in want[leaf]] for leaf in want}
    for n, rate in enumerate(rates):
        grads = random_leaves(rng)
        params, state = update(grads, state, params)
        for leaf, references_of_leaf in references.items():
            for i, (reference, g) in enumerate(zip(references_of_leaf, blocks(leaf, grads[leaf]), strict=True)):
                p = want[leaf][i]
                change = getattr(reference, "adamw" if leaf in by_adamw else name)(g, p, n + 1)
                want[leaf][i] = p - rate * (change + (0.3 * p if leaf != "query_bias" else 0.0))
            np.testing.assert_allclose(blocks(leaf, params[leaf]), want[leaf], rtol=0, atol=2e-6, err_msg=f"{leaf} after update {n}")
    assert not any(np.asarray(params[leaf])[1].any() for leaf in LEAVES if leaf != "tokens")
    assert not np.asarray(params["tokens"])[VOCAB_ROWS:].any()


# ---------------------------------------------------------------- every optimizer on every layout
TOKENS, ROWS, UPDATES, VOCAB = 8, 8, 3, 18
LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    "one": ({}, 0),
    "dp4-zero3": ({"dp": 4}, 3),
    "dp2-tp2-zero2": ({"dp": 2, "tp": 2}, 2),
    "pp2-tp2": ({"pp": 2, "tp": 2}, 1),  # layers 2 + 1, and 18 ids in 20 rows
}
OPTIMS = {  # every run warms up, decays weights, and is clipped
    "adamw": OptimConfig(name="adamw", lr=0.02, beta2=0.9),
    "lion": OptimConfig(name="lion", lr=0.005),
    "adafactor": OptimConfig(name="adafactor", lr=0.1, factored_dim=16),
    "muon": OptimConfig(name="muon", lr=0.03),
    "sgd": OptimConfig(name="sgd", lr=0.5, momentum=0.8),
}
OPTIMS = {name: replace(optim, warmup=1, schedule="linear", final_lr_ratio=0.5, clip_norm=0.5) for name, optim in OPTIMS.items()}
RATES = (0.0, 1.0, 0.75)  # of lr


def config_of(optimizer: str, layout: str) -> Config:
    mesh, zero = LAYOUTS[layout]
    return Config(
        model=ModelConfig(preset="toy", vocab_size=VOCAB, num_layers=3, embed_dim=16, mlp_dim=32, num_heads=4, num_kv_heads=2, head_dim=8),
        mesh=MeshConfig(**{"dp": 1, **mesh}), layout=LayoutConfig(zero=zero), optim=OPTIMS[optimizer],
        precision=PrecisionConfig(compute="fp32"), data=DataConfig(seq_len=TOKENS, global_batch=ROWS), train=TrainConfig(steps=UPDATES))


@functools.cache
def built(layout: str) -> tuple[Setup, Callable[..., Any]]:
    """A setup, to be given its optimizer, and the compiled gradients."""
    setup = build(config_of("sgd", layout), jax.devices()[: math.prod(LAYOUTS[layout][0].values())])
    return setup, jax.jit(loss_and_gradients(setup))


@functools.cache
def setup_of(optimizer: str, layout: str) -> Setup:
    setup, config = built(layout)[0], config_of(optimizer, layout)
    return replace(setup, config=config, optimizer=make_optimizer(config.optim, UPDATES, setup.layout, VOCAB),
                   learning_rate=learning_rate(config.optim, UPDATES))


@functools.cache
def weights() -> Any:
    """Canonical initial weights, norms moved off 1."""
    setup, rng = built("one")[0], np.random.default_rng(3)
    params = canonical(setup, init_state(setup, 0).params)
    return jax.tree.map(lambda x: (x + 0.1 * rng.standard_normal(x.shape)).astype(np.float32), params)


def batches(setup: Setup) -> list[Rows]:
    rng, mask = np.random.default_rng(5), np.ones((ROWS, TOKENS), bool)
    ids = [rng.integers(0, VOCAB, (ROWS, TOKENS + 1), dtype=np.int32) for _ in range(UPDATES)]
    return [place_rows(setup, x[:, :-1], x[:, 1:], mask, setup.resolved.num_microbatches) for x in ids]


class Run(NamedTuple):
    """What three updates gave; the curve is loss, gradient norm and learning rate of each."""

    curve: list[tuple[float, float, float]]
    state: TrainState
    params: Any
    moments: Any
    text: str
    program: Program


@functools.cache
def run(optimizer: str, layout: str) -> Run:
    """The gradients of the layout through the train step of the optimizer; its compiled program moves what the update moves."""
    setup, (_, gradients) = setup_of(optimizer, layout), built(layout)
    step: Any = make_train_step(setup, gradients=lambda params, given, key, scale: given)
    state, curve, compiled = fresh_state(setup, from_canonical(setup, weights())), [], None
    for rows in batches(setup):
        given = gradients(state.params, rows, jnp.zeros(2, jnp.uint32), jnp.float32(1))
        compiled = compiled or step.lower(state, given).compile()
        state, metrics = compiled(state, given)
        assert bool(metrics.finite)
        curve.append((float(metrics.loss), float(metrics.grad_norm), float(metrics.learning_rate)))
    assert compiled
    text = compiled.as_text()
    return Run(curve, state, canonical(setup, state.params), canonical(setup, state.opt_state, moments(setup)), text,
               read(text, setup.layout.sizes))


def assert_close(got: Any, want: Any, floor: float, limit: float = 1e-4) -> None:
    """||got - want|| of every leaf, as a part of max(||want||, floor)."""
    def check(path: Any, x: np.ndarray, y: np.ndarray) -> None:
        assert x.shape == y.shape, jax.tree_util.keystr(path)
        error = np.linalg.norm((x - y).ravel()) / max(np.linalg.norm(y.ravel()), floor)
        assert error <= limit, f"{jax.tree_util.keystr(path)} is off by {error:.1e}"
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree_util.tree_map_with_path(check, got, want)


SHARDED = [(optimizer, layout) for layout in list(LAYOUTS)[1:] for optimizer in OPTIMIZERS]


@pytest.mark.parametrize(("optimizer", "layout"), SHARDED, ids=["-".join(row) for row in SHARDED])
def test_updates_do_not_depend_on_the_layout(optimizer: str, layout: str) -> None:
    got, want = run(optimizer, layout), run(optimizer, "one")
    np.testing.assert_allclose(got.curve, want.curve, rtol=1e-5)
    assert [rate for _, _, rate in got.curve] == pytest.approx([OPTIMS[optimizer].lr * part for part in RATES])
    assert all(norm > 2 * OPTIMS[optimizer].clip_norm for _, norm, _ in want.curve)  # clipped, each time
    assert_close(got.params, want.params, floor=1e-6)
    assert_close(got.moments, want.moments, floor=1e-12)
    moved = jax.tree.map(lambda x, y: float(np.linalg.norm((x - y).ravel())), want.params, weights())
    assert min(jax.tree.leaves(moved)) > 1e-3


@pytest.mark.parametrize(("optimizer", "layout"), SHARDED, ids=["-".join(row) for row in SHARDED])
def test_state_stays_where_it_belongs(optimizer: str, layout: str) -> None:
    """After three updates: the shapes of init, the declared shardings, and the bytes that the formula of each optimizer gives."""
    setup, state = setup_of(optimizer, layout), run(optimizer, layout).state
    assert jax.tree.map(jnp.shape, jax.eval_shape(setup.optimizer.init, state.params)) == jax.tree.map(jnp.shape, state.opt_state)
    jax.tree.map(lambda x, s: None if x.sharding.is_equivalent_to(s, x.ndim) else pytest.fail(f"{x.sharding} instead of {s}"),
                 state, state_shardings(setup))

    def numbers(leaf: LeafLayout, x: jax.Array) -> int:
        local, stacked = x.sharding.shard_shape(x.shape), leaf.path.startswith("layers")
        row_dims = 0 if "norm" in leaf.path else 2 if leaf.path.endswith("out") else 1
        parts = local[:stacked], local[stacked : stacked + row_dims], local[stacked + row_dims :]
        count, rows, columns = (math.prod(part) for part in parts)
        match optimizer:
            case "adamw":
                return 2 * math.prod(local)
            case "muon":
                return (1 if stacked and row_dims else 2) * math.prod(local)
            case "adafactor" if row_dims:
                return count * (rows + columns)
            case _:
                return math.prod(local)

    want = 4 * sum(jax.tree.leaves(setup.layout.map(numbers, state.params)))
    floats = [x for x in jax.tree.leaves(state.opt_state) if x.dtype == jnp.float32]
    for device in setup.mesh.devices.flat:
        assert sum(s.data.nbytes for x in floats for s in x.addressable_shards if s.device == device) == want
    assert moment_bytes(moments(setup), setup.layout) == want


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_moments_go_to_another_layout_and_back(optimizer: str) -> None:
    """Canonical moments of one device, placed on uneven stages with a padded vocabulary."""
    setup, want = setup_of(optimizer, "pp2-tp2"), run(optimizer, "one").moments
    placed = from_canonical(setup, want, moments(setup))
    assert jax.tree.map(jnp.shape, placed) == jax.tree.map(jnp.shape, run(optimizer, "pp2-tp2").state.opt_state)
    jax.tree.map(lambda x, s: None if x.sharding == s else pytest.fail(), placed, state_shardings(setup).opt_state)
    jax.tree.map(np.testing.assert_array_equal, canonical(setup, placed, moments(setup)), want)


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_a_whole_step_does_the_same(optimizer: str) -> None:
    """As `build` makes it, gradients and update in one program, on uneven stages with a padded vocabulary."""
    setup = build(config_of(optimizer, "pp2-tp2"), jax.devices()[:4])
    step, state = make_train_step(setup), fresh_state(setup, from_canonical(setup, weights()))
    for rows in batches(setup):
        state, _ = step(state, rows)
    assert_close(canonical(setup, state.params), run(optimizer, "one").params, floor=1e-6)
    assert_close(canonical(setup, state.opt_state, moments(setup)), run(optimizer, "one").moments, floor=1e-12)


# ---------------------------------------------------------------- what an update moves
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_printed_is_what_the_program_moves(layout: str) -> None:
    """Beside the gradient norm's sums, which SGD has too: nothing, Muon's all-to-alls, Adafactor's sums of vectors."""
    setup = built(layout)[0]
    moved = {name: {op: size.bytes for (op,), size in run(name, layout).program.totals("op").items()} for name in OPTIMIZERS}
    norm = moved["sgd"]
    assert moved["adamw"] == moved["lion"] == norm and set(norm) <= {"all-reduce"}
    trades, sums = (sum(row.bytes for row in rows) for rows in (gathered(setup.layout), reduced(setup.layout, VOCAB, 16)))
    assert moved["muon"] == norm | ({"all-to-all": trades} if trades else {})
    assert moved["adafactor"] == norm | ({"all-reduce": norm["all-reduce"] + sums} if sums else {})
    for name, how, size in (("muon", "all-to-alls", trades), ("adafactor", "all-reduces", sums)):
        (line,) = update_lines(OPTIMS[name], setup.layout, VOCAB)
        assert (f"{size:,} bytes a device and update in {how}" in line) == (size > 0) == (layout != "one"), line
    assert not update_lines(OPTIMS["adamw"], setup.layout, VOCAB)


def test_bytes_of_one_leaf_by_hand() -> None:
    """layers.mlp.up, [3, 16, 32], its 32 columns over tp=2 and its 16 rows over dp=2: 3 matrices of [8, 16] a device, and one
    of padding, go over dp and over tp and come back. Adafactor sums 3 x 8 row means over tp, 3 x 16 column means over dp,
    3 means of row means over dp, and 3 sizes of the change and of the parameter over each."""
    layout = built("dp2-tp2-zero2")[0].layout
    (muon,) = [row for row in gathered(layout) if row.path == "layers.mlp.up"]
    assert (set(muon.axes), muon.matrices, muon.orthogonalised, muon.bytes) == ({"dp", "tp"}, 3, 1, 4 * (4 * 8 * 16 * 4))
    (adafactor,) = [row for row in reduced(layout, VOCAB, 16) if row.path == "layers.mlp.up"]
    assert adafactor.bytes == 4 * (3 * 8 + 3 * 16 + 3 + 2 * 2 * 3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_devices_share_the_newton_schulz_work(layout: str) -> None:
    """Five iterations of three products; the compiled program multiplies as many matrices as `gathered` says."""
    rows = gathered(built(layout)[0].layout)
    assert {row.orthogonalised for row in rows} == {3 if layout == "one" else 1}
    products = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", run("muon", layout).text)
    batches_of = [int(shape.split(",")[0]) if shape.count(",") == 2 else 1 for shape in products]
    assert sum(batches_of) == 15 * sum(row.orthogonalised for row in rows)


# ---------------------------------------------------------------- where moments live
def test_a_moment_of_unknown_shape_is_named() -> None:
    layout = built("one")[0].layout
    shapes = layout.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32))
    flat = optax.GradientTransformation(lambda params: {"sum": jax.tree.map(lambda x: jnp.sum(x, 0), params)}, lambda *_: _)
    with pytest.raises(ValueError, match=r"^embed\.tokens: a moment of shape \(16,\) in .*sum.* does not follow from the parameter's"):
        moment_layouts(flat, shapes, layout)


def test_moments_of_any_optax_transform_are_found() -> None:
    """Also behind masks, and where a parameter has none."""
    layout = built("dp4-zero3")[0].layout
    shapes = layout.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32))
    optimizer = optax.masked(optax.adam(0.1), decay_mask(layout.map(lambda leaf: leaf.dims)))
    found = moment_layouts(optimizer, shapes, layout)
    assert found.inner_state[0].count is None
    assert found.inner_state[0].nu["layers"]["mlp"]["up"] is layout.leaves["layers"]["mlp"]["up"]
    assert isinstance(found.inner_state[0].mu["head"]["norm"]["weight"], optax.MaskedNode)


# ---------------------------------------------------------------- options without effect
USES = {"beta1": "adamw lion muon", "beta2": "adamw lion muon", "eps": "adamw muon", "momentum": "sgd muon", "factored_dim": "adafactor",
        "newton_schulz_steps": "muon", "weight_decay": " ".join(OPTIMIZERS), "clip_norm": " ".join(OPTIMIZERS)}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("option", USES)
def test_an_option_that_the_optimizer_does_not_read_is_refused(option: str, name: str) -> None:
    value = 7 if option in ("factored_dim", "newton_schulz_steps") else 0.5
    found = problems(Config(optim=replace(OptimConfig(name=name), **{option: value})), 1)
    start = f"optim.{option}={value} has no effect with optim.name={name}: leave {option} out, or use name "
    assert [line[: len(start)] for line in found] == ([] if name in USES[option].split() else [start])
