"""The update: learning rate per update, decay mask, global norm and clipping, and sums in fp32.

What a run does is read off the real train step, on setups small enough for a hundred updates.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxmeg import parallel
from jaxmeg import step as step_module
from jaxmeg.config import (
    Config,
    DataConfig,
    LayoutConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    PrecisionConfig,
    TrainConfig,
)
from jaxmeg.layout import LeafLayout, make_layout
from jaxmeg.mesh import build_mesh
from jaxmeg.models.own import OwnModel
from jaxmeg.optim.build import decay_mask, learning_rate, make_optimizer
from jaxmeg.pipeline.scan import Batch, Work, loss_and_grads
from jaxmeg.pipeline.schedules import make_table
from jaxmeg.precision import init_loss_scale
from jaxmeg.rules import DEFAULT_RULES
from jaxmeg.setup import Setup, build
from jaxmeg.state import TrainState, canonical, from_canonical, state_shardings
from jaxmeg.step import make_train_step, place_rows

TOKENS = 8
TINY: dict[str, Any] = {"preset": "toy", "vocab_size": 16, "num_layers": 2, "embed_dim": 8, "mlp_dim": 16, "num_heads": 2,
                        "num_kv_heads": 1, "head_dim": 4, "max_seq_len": TOKENS}
P28 = OptimConfig(lr=1e-3, warmup=10, schedule="cosine", final_lr_ratio=0.0)


def setup_of(optim: OptimConfig, mesh: dict[str, int] | None = None, rows: int = 8, steps: int = 100, zero: int = 1,
             microbatch: int | None = None, compute: str = "fp32", **model: Any) -> Setup:
    config = Config(
        model=ModelConfig(**TINY | model), mesh=MeshConfig(**{"dp": 1, **(mesh or {})}), optim=optim, layout=LayoutConfig(zero=zero),
        pipeline=PipelineConfig(microbatch=microbatch), precision=PrecisionConfig(compute=compute),
        data=DataConfig(seq_len=TOKENS, global_batch=rows), train=TrainConfig(steps=steps))
    return build(config, jax.devices()[: math.prod((mesh or {}).values())])


def state_of(setup: Setup, params: Any) -> TrainState:
    """A fresh state with the given canonical weights."""
    def fresh(params: Any) -> TrainState:
        zero = jnp.int32(0)
        return TrainState(zero, zero, zero, params, setup.optimizer.init(params), init_loss_scale(setup.compute, 1.0))
    return jax.jit(fresh, out_shardings=state_shardings(setup))(from_canonical(setup, params))


def random_weights(setup: Setup, scale: float = 0.3) -> Any:
    """Canonical weights with no leaf at a special value."""
    rng = np.random.default_rng(2)
    arch = setup.model.arch

    def one(leaf: LeafLayout) -> np.ndarray:
        size = {"layers": arch.num_layers, "vocab": arch.vocab_size}.get(leaf.dims[0], leaf.shape[0])
        return (scale * rng.standard_normal((size, *leaf.shape[1:]))).astype(np.float32)
    return setup.layout.map(one)


def paths(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


# ---------------------------------------------------------------- learning rate
@pytest.mark.parametrize(("optim", "rates"), [
    (P28, {0: 0.0, 5: 5e-4, 10: 1e-3, 55: 5e-4, 100: 0.0}),
    (OptimConfig(lr=1e-3, warmup=10, schedule="cosine", final_lr_ratio=0.1), {0: 0.0, 10: 1e-3, 55: 5.5e-4, 100: 1e-4, 150: 1e-4}),
    (OptimConfig(lr=1e-3, warmup=0, schedule="cosine", final_lr_ratio=0.1), {0: 1e-3, 50: 5.5e-4, 100: 1e-4}),
    (OptimConfig(lr=1e-3, warmup=10, schedule="linear", final_lr_ratio=0.1), {0: 0.0, 5: 5e-4, 10: 1e-3, 55: 5.5e-4, 100: 1e-4}),
    (OptimConfig(lr=1e-3, warmup=10, schedule="wsd", final_lr_ratio=0.1, wsd_decay=0.2),
     {0: 0.0, 10: 1e-3, 55: 1e-3, 80: 1e-3, 90: 5.5e-4, 100: 1e-4}),
    (OptimConfig(lr=1e-3, warmup=10, schedule="constant"), {0: 0.0, 5: 5e-4, 10: 1e-3, 55: 1e-3, 100: 1e-3}),
    (OptimConfig(lr=1e-3, warmup=100, schedule="linear"), {0: 0.0, 50: 5e-4, 99: 9.9e-4}),
], ids=["P28", "cosine", "no-warmup", "linear", "wsd", "constant", "all-warmup"])
def test_learning_rate_at_every_corner(optim: OptimConfig, rates: dict[int, float]) -> None:
    schedule = learning_rate(optim, 100)
    assert {n: float(np.asarray(schedule(n))) for n in rates} == pytest.approx(rates, abs=1e-9)


@pytest.mark.parametrize(("dp", "microbatch"), [(1, 32), (1, 8), (8, 4), (8, 1)],
                         ids=["dp1-accumulate1", "dp1-accumulate4", "dp8-accumulate1", "dp8-accumulate4"])
def test_schedule_counts_updates_whatever_dp_and_accumulation(dp: int, microbatch: int) -> None:
    """What is logged, and what is applied: embedding rows of ids that never occur have no gradient and shrink by lr * decay."""
    decay, unseen = 50.0, slice(12, 16)
    optim = OptimConfig(lr=1e-3, warmup=10, schedule="cosine", final_lr_ratio=0.0, weight_decay=decay)
    setup = setup_of(optim, {"dp": dp}, rows=32, microbatch=microbatch, num_layers=1)
    assert setup.resolved.num_microbatches == (1 if microbatch * dp == 32 else 4)
    step, state = make_train_step(setup), state_of(setup, random_weights(setup))
    ids = np.random.default_rng(0).integers(0, 12, (32, TOKENS), dtype=np.int32)
    rows = place_rows(setup, ids, ids, np.ones(ids.shape, bool), setup.resolved.num_microbatches)
    logged, applied = {}, {}
    for n in range(101):
        looked_at = n in (0, 5, 10, 55, 100)
        before = np.asarray(state.params["embed"]["tokens"], np.float64)[unseen] if looked_at else None
        state, metrics = step(state, rows)
        if before is not None:
            logged[n] = float(metrics.learning_rate)
            applied[n] = float(np.mean(1 - np.asarray(state.params["embed"]["tokens"], np.float64)[unseen] / before)) / decay
    expected = {0: 0.0, 5: 5e-4, 10: 1e-3, 55: 5e-4, 100: 0.0}
    assert logged == pytest.approx(expected, abs=1e-9)
    assert applied == pytest.approx(expected, abs=1e-8)
    assert int(state.updates) == int(state.step) == 101


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"optim\.name=adam: use adamw, lion, adafactor, muon or sgd"):
        make_optimizer(OptimConfig(name="adam"), 10, setup_of(OptimConfig()).layout)
    with pytest.raises(ValueError, match=r"optim\.schedule=cos: use cosine, linear, wsd or constant"):
        learning_rate(OptimConfig(schedule="cos"), 10)


# ---------------------------------------------------------------- weight decay
LLAMA = {
    "embed.tokens": True, "head.norm.weight": False, "head.tokens": True,
    "layers.attention.key": True, "layers.attention.out": True, "layers.attention.query": True, "layers.attention.value": True,
    "layers.attention_norm.weight": False, "layers.mlp.down": True, "layers.mlp.gate": True, "layers.mlp.up": True,
    "layers.mlp_norm.weight": False,
}
GPT2 = {
    "embed.positions": True, "embed.tokens": True, "head.norm.bias": False, "head.norm.weight": False,
    "layers.attention.key": True, "layers.attention.key_bias": False, "layers.attention.out": True, "layers.attention.out_bias": False,
    "layers.attention.query": True, "layers.attention.query_bias": False, "layers.attention.value": True,
    "layers.attention.value_bias": False, "layers.attention_norm.bias": False, "layers.attention_norm.weight": False,
    "layers.mlp.down": True, "layers.mlp.down_bias": False, "layers.mlp.up": True, "layers.mlp.up_bias": False,
    "layers.mlp_norm.bias": False, "layers.mlp_norm.weight": False,
}
EVERY_LEAF = LLAMA | GPT2 | {"layers.attention.key_norm.weight": False, "layers.attention.query_norm.weight": False,
                             "layers.mlp.gate_bias": False}
ALL_ON: dict[str, Any] = {"norm": "layer", "positions": "learned", "attn_bias": True, "out_bias": True, "mlp_bias": True, "qk_norm": True}


@pytest.mark.parametrize(("model", "decays"), [({"preset": "toy"}, LLAMA), ({"preset": "toy-gpt2"}, GPT2), (TINY | ALL_ON, EVERY_LEAF)],
                         ids=["toy", "toy-gpt2", "every-leaf"])
def test_which_leaves_decay(model: dict[str, Any], decays: dict[str, bool]) -> None:
    dims = build(Config(model=ModelConfig(**model)), jax.devices()[:1]).model.dims
    assert paths(decay_mask(dims)) == decays


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm, self.linear = nnx.RMSNorm(4, rngs=rngs), nnx.Linear(4, 4, rngs=rngs)


class GainNorm(nnx.Module):
    """A norm as users write them, for three layers at once, with a name of its own for its weights."""

    def __init__(self):
        self.weight = nnx.Param(jnp.ones((3, 4)))


class Own(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(6, 4, rngs=rngs)
        self.stacked = nnx.split_rngs(splits=3)(nnx.vmap(Layer))(rngs)
        self.layers = nnx.List([Layer(rngs)])
        self.gain, self.head = GainNorm(), nnx.Linear(4, 3, rngs=rngs)
        self.mix = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))
        self.logit_scale = nnx.Param(jnp.ones((1, 4)))


OWN = {  # path -> (decays, is Muon's)
    "gain.weight": (False, False), "head.bias": (False, False), "head.kernel": (True, True),
    "layers.0.linear.bias": (False, False), "layers.0.linear.kernel": (True, True), "layers.0.norm.scale": (False, False),
    "logit_scale": (False, False), "mix": (True, True), "stacked.linear.bias": (False, False), "stacked.linear.kernel": (True, False),
    "stacked.norm.scale": (False, False), "tokens.embedding": (True, False),
}


@pytest.mark.parametrize("makes", [True, False], ids=["a function of rngs", "an instance"])
def test_what_decays_and_what_muon_takes_in_a_module_of_the_users(makes: bool) -> None:
    """By what the update does: zero gradients leave decay alone, which is lr * decay; the first change that AdamW makes has the size lr
    everywhere, and an orthogonal one has not."""
    optim = OptimConfig(name="muon", lr=0.5, warmup=0, schedule="constant", weight_decay=0.5)
    setup = build(Config(mesh=MeshConfig(dp=1), optim=optim), jax.devices()[:1], own=OwnModel(Own if makes else Own(nnx.Rngs(0))))
    params = jax.tree.map(lambda x: 1 + jnp.zeros(x.shape), setup.model.params)
    rng = np.random.default_rng(0)
    grads = jax.tree.map(lambda x: jnp.asarray(rng.uniform(0.5, 2, x.shape), jnp.float32), params)

    def change(grads: Any, params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):  # as the train step does
            return setup.optimizer.update(grads, setup.optimizer.init(params), params)[0]

    zeros = jax.tree.map(jnp.zeros_like, params)
    decay, whole = jax.jit(lambda: (change(zeros, params), change(grads, zeros)))()
    decays = {path: bool(np.allclose(x, -0.25, atol=1e-6)) for path, x in paths(decay).items()}
    still = {path: bool(np.allclose(x, 0, atol=1e-6)) for path, x in paths(decay).items()}
    adams = {path: bool(np.allclose(x, -0.5, atol=1e-4)) for path, x in paths(whole).items()}
    assert {path: (decays[path], not adams[path]) for path in adams} == OWN
    assert still == {path: not decays for path, (decays, _) in OWN.items()}
    assert paths(decay_mask(setup.model.dims)) == decays


@pytest.mark.parametrize("mesh", [{}, {"pp": 2}], ids=["one-device", "pp2"])
def test_with_zero_gradients_matrices_shrink_and_nothing_else_moves(mesh: dict[str, int]) -> None:
    setup = setup_of(OptimConfig(lr=0.1, warmup=0, schedule="constant", weight_decay=0.1), mesh, **ALL_ON)
    before = random_weights(setup)
    ids = np.zeros((8, TOKENS), np.int32)
    rows = place_rows(setup, ids, ids, np.zeros(ids.shape, bool), setup.resolved.num_microbatches)  # no token is trained
    state, metrics = make_train_step(setup)(state_of(setup, before), rows)
    assert (float(metrics.grad_norm), float(metrics.loss), int(metrics.tokens), bool(metrics.finite)) == (0.0, 0.0, 0, True)
    after = paths(canonical(setup, state.params))
    assert set(after) == set(EVERY_LEAF)
    for path, old in paths(before).items():
        if EVERY_LEAF[path]:
            np.testing.assert_allclose(after[path], old * (1 - 0.1 * 0.1), rtol=1e-6, err_msg=path)
        else:
            np.testing.assert_array_equal(after[path], old, err_msg=path)


# ---------------------------------------------------------------- global norm and clipping
NORM_CASES = {
    "one": ({}, 1), "tp2": ({"tp": 2}, 1), "tp8": ({"tp": 8}, 1), "dp4-zero0": ({"dp": 4}, 0), "dp4-zero3": ({"dp": 4}, 3),
    "rep2-dp2-zero2": ({"rep": 2, "dp": 2}, 2), "pp2-dp2-tp2-zero3": ({"pp": 2, "dp": 2, "tp": 2}, 3),
}


@pytest.mark.parametrize(("mesh", "zero"), NORM_CASES.values(), ids=NORM_CASES)
def test_every_leaf_counts_once_in_the_norm(mesh: dict[str, int], zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leaf that tp shards, of norm 3, and one that it does not, of norm 4: 5 everywhere, and clipped to 1 everywhere."""
    optim = OptimConfig(name="sgd", lr=1.0, warmup=0, schedule="constant", momentum=0.0, weight_decay=0.0, clip_norm=1.0)
    setup = setup_of(optim, mesh, zero=zero, num_heads=8)
    zeros = jax.tree.map(np.zeros_like, random_weights(setup))
    rng, grads = np.random.default_rng(0), jax.tree.map(np.copy, zeros)
    for leaf, norm in ((grads["layers"]["mlp"]["up"], 3.0), (grads["head"]["norm"]["weight"], 4.0)):
        leaf[...] = rng.standard_normal(leaf.shape)
        leaf *= norm / np.linalg.norm(leaf)
    placed = from_canonical(setup, grads)

    def partial(leaf: LeafLayout, x: jax.Array) -> jax.Array:
        """Each rank's part of the sum over the ranks that hold the same entries."""
        sharding = {axis for entry in leaf.spec() if entry is not None for axis in (entry if isinstance(entry, tuple) else (entry,))}
        return parallel.vary(x) / math.prod(size for axis, size in mesh.items() if axis not in sharding)

    def body(grads: Any) -> Any:
        return setup.layout.reduce(setup.layout.map(partial, grads))

    reduced = jax.shard_map(body, mesh=setup.mesh, in_specs=(setup.layout.specs,), out_specs=setup.layout.specs)
    monkeypatch.setattr(step_module, "loss_and_gradients", lambda _: lambda *_: (jnp.float32(1.0), reduced(placed), jnp.float32(1.0)))
    ids = np.zeros((8, TOKENS), np.int32)
    rows = place_rows(setup, ids, ids, np.ones(ids.shape, bool), setup.resolved.num_microbatches)
    state, metrics = make_train_step(setup)(state_of(setup, zeros), rows)
    assert float(metrics.grad_norm) == pytest.approx(5.0, abs=2e-6)
    moved = canonical(setup, state.params)
    jax.tree.map(lambda got, grad: np.testing.assert_allclose(got, -grad / 5, atol=1e-7), moved, grads)


# ---------------------------------------------------------------- sums and masters in fp32
class Adder:
    """A model whose loss adds up its weights: the gradient of every weight is the sum of the token weights of all microbatches.

    Activations are bf16, as in training; the weights arrive typed fp32.
    """

    def embed(self, params: Any, ids: jax.Array, randomness: Any, /) -> jax.Array:
        return jnp.broadcast_to(params["w"][None, None], (*ids.shape, 4)).astype(jnp.bfloat16)

    def block(self, params: Any, x: jax.Array, layer: jax.Array, randomness: Any, /) -> jax.Array:
        return x + jnp.broadcast_to(params["w"][None, None], x.shape).astype(jnp.bfloat16)

    def head_params(self, params: Any, /) -> Any:
        return {"head": params["head"]}

    def loss(self, params: Any, x: jax.Array, labels: jax.Array, weights: jax.Array, /) -> jax.Array:
        counted = parallel.only_on(parallel.reports_loss(), weights)[..., None]
        return jnp.sum((x.astype(jnp.float32) + params["head"]["w"][None, None]) * counted)


@pytest.mark.parametrize(("mesh", "zero"), [({}, 0), ({"pp": 2}, 1), ({"dp": 2}, 2), ({"dp": 2}, 3)],
                         ids=["one", "pp2", "dp2-zero2", "dp2-zero3"])
def test_gradients_of_257_microbatches_are_summed_in_fp32(mesh: dict[str, int], zero: int) -> None:
    """1 + 256 * 2**-9 = 1.5 on every rank; a bf16 sum stays at 1."""
    M, layers = 257, 2
    dims: Any = {"embed": {"w": ("embed",)}, "layers": {"w": ("layers", "embed")}, "head": {"w": ("embed",)}}
    params = jax.tree.map(lambda names: np.ones((layers, 4)[-len(names) :], np.float32), dims, is_leaf=lambda x: isinstance(x, tuple))
    pp, dp = mesh.get("pp", 1), mesh.get("dp", 1)
    layout = make_layout(build_mesh(mesh, jax.devices()), dict(DEFAULT_RULES) | {"vocab": ()}, zero, params, dims)
    table = make_table("1f1b", pp, 1, M)

    def body(params: Any) -> Any:
        weights = jnp.where(jnp.arange(M) == 0, jnp.float32(1), jnp.float32(2.0**-9))[:, None, None]
        ids = jnp.zeros((M, 1, 1), jnp.int32)
        batch = parallel.vary(Batch(ids, ids, weights, ids[:, :, 0], jnp.zeros(2, jnp.uint32)))
        gathered = layout.gather(parallel.vary(params), layout.leaves, "step")
        work = Work(Adder(), layout, gathered, batch, np.arange(layers).reshape(pp, -1), 1, jnp.float32, True)
        loss, grads = loss_and_grads(work, table)
        return jax.lax.psum(loss, parallel.AXES), layout.reduce(layout.scatter(grads, layout.leaves, "step", jnp.float32))

    run = jax.jit(jax.shard_map(body, mesh=layout.mesh, in_specs=(layout.specs,), out_specs=(P(), layout.specs)))
    loss, grads = run(params)
    assert float(loss) == 1.5 * dp * 4 * 4  # four columns, each embedding + two layers + head
    for path, grad in paths(grads).items():
        assert grad.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(grad), 1.5 * dp, err_msg=path)


def test_small_updates_of_bf16_weights_are_not_lost() -> None:
    """A weight of 1.0 and 100 updates of 6e-4 give 0.94: the master is fp32. (In bf16, 1.0 - 6e-4 is 1.0.)

    AdamW without memory moves every weight by the learning rate against the sign of its gradient. Output row 15 is no
    token's label and the hidden state is positive, so its gradient is positive in every update.
    """
    optim = OptimConfig(lr=6e-4, warmup=0, schedule="constant", beta1=0.0, beta2=0.0, weight_decay=0.0, clip_norm=0.0)
    setup = setup_of(optim, compute="bf16", num_layers=1, norm="layer")
    params = random_weights(setup, scale=0.02)
    params["head"]["norm"] = {"weight": np.zeros(8, np.float32), "bias": np.full(8, 5.0, np.float32)}
    params["head"]["tokens"][15] = 1.0
    step, state = make_train_step(setup), state_of(setup, params)
    ids = np.random.default_rng(0).integers(0, 15, (8, TOKENS + 1), dtype=np.int32)
    rows = place_rows(setup, ids[:, :-1], ids[:, 1:], np.ones((8, TOKENS), bool), setup.resolved.num_microbatches)
    for _ in range(100):
        state, _ = step(state, rows)
    table = state.params["head"]["tokens"]
    assert table.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(table)[15], 0.94, atol=1e-5)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((state.params, optax.tree.get(state.opt_state, "mu"))))
