"""Training state on every layout: initial weights, where bytes live, canonical order, padding, one compilation, refusals."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxmeg.config import Config, DataConfig, LayoutConfig, MeshConfig, ModelConfig, OptimConfig, PipelineConfig
from jaxmeg.layout import Layout, LayoutError, LeafLayout, layout_rows, make_layout
from jaxmeg.mesh import build_mesh
from jaxmeg.rules import DEFAULT_RULES
from jaxmeg.setup import Setup, build
from jaxmeg.state import TrainState, abstract_state, canonical, from_canonical, init_state
from jaxmeg.step import Rows, make_train_step, place_rows

TOKENS, ROWS, VOCAB, LAYERS = 12, 12, 250, 5  # no mesh here divides the vocabulary evenly, nor the layers over stages
UNEVEN = "pp=3,tp=2"  # 2 + 2 + 1 layers; 250 ids in 252 rows

LAYOUTS: dict[str, dict[str, Any]] = {
    "one device": {},
    "rep=2,dp=4, zero 0": {"mesh": {"dp": 4, "rep": 2}, "zero": 0},
    "dp=4, zero 1": {"mesh": {"dp": 4}, "zero": 1},
    "dp=2,tp=4, zero 2": {"mesh": {"dp": 2, "tp": 4}, "zero": 2},
    "pp=2,dp=2,tp=2, zero 3": {"mesh": {"pp": 2, "dp": 2, "tp": 2}, "zero": 3},
    UNEVEN: {"mesh": {"pp": 3, "tp": 2}},
    "pp=2, 2 chunks": {"mesh": {"pp": 2}, "schedule": "interleaved", "chunks": 2},
}


@functools.cache
def setup_of(name: str) -> Setup:
    layout = LAYOUTS[name]
    mesh = layout.get("mesh", {})
    config = Config(
        model=ModelConfig(preset="toy", vocab_size=VOCAB, num_layers=LAYERS, embed_dim=16, mlp_dim=32, num_heads=4, num_kv_heads=2,
                          head_dim=4),
        mesh=MeshConfig(**{"dp": 1, **mesh}), layout=LayoutConfig(zero=layout.get("zero", 1)),
        pipeline=PipelineConfig(schedule=layout.get("schedule"), chunks=layout.get("chunks")),
        optim=OptimConfig(lr=0.05, warmup=0, schedule="constant", weight_decay=0.1), data=DataConfig(seq_len=TOKENS, global_batch=ROWS))
    return build(config, jax.devices()[: math.prod(mesh.values())])


def seed_of(name: str) -> int:
    """Two seeds, in turn: initial weights that ignored the seed would not equal those written out below."""
    return 3 + list(LAYOUTS).index(name) % 2


@functools.cache
def initial(name: str) -> TrainState:
    return init_state(setup_of(name), seed_of(name))


def paths(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


# ---------------------------------------------------------------- initial weights
@functools.cache
def part_init(part: str) -> Any:
    return jax.jit(setup_of("one device").model.parts[part].init)


@functools.cache
def layer_by_layer(seed: int) -> Any:
    """Initial weights written out: one key for each part and, folded in, each layer; stacked in model order."""
    keys = jax.random.split(jax.random.key(seed), 3)
    layers = [part_init("layers")(jax.random.fold_in(keys[1], i)) for i in range(LAYERS)]
    return jax.device_get({"embed": part_init("embed")(keys[0]), "layers": jax.tree.map(lambda *rows: np.stack(rows), *layers),
                           "head": part_init("head")(keys[2])})


@pytest.mark.parametrize("name", LAYOUTS)
def test_initial_weights_are_the_same_bits_on_every_layout(name: str) -> None:
    setup = setup_of(name)
    got = canonical(setup, initial(name).params)
    assert got["embed"]["tokens"].shape == got["head"]["tokens"].shape == (VOCAB, 16)
    jax.tree.map(np.testing.assert_array_equal, got, layer_by_layer(seed_of(name)))
    assert len({row.tobytes() for row in got["layers"]["mlp"]["up"]}) == LAYERS  # no two layers alike
    assert not (got["embed"]["tokens"] == got["head"]["tokens"]).any()


def test_initial_scales() -> None:
    """1 / sqrt(fan in); projections back into the residual stream smaller by sqrt(2 * layers), as GPT-2's; norms 1."""
    arch = setup_of("one device").model.arch
    fan_in = {".out": arch.num_heads * arch.head_dim, ".down": arch.mlp_dim}
    got = paths(canonical(setup_of("one device"), initial("one device").params))
    for path, leaf in got.items():
        if "norm" in path:
            assert (leaf == 1).all()
            continue
        last = path[path.rindex(".") :]
        want = 1 / math.sqrt(fan_in[last] * 2 * LAYERS) if last in fan_in else 1 / math.sqrt(arch.embed_dim)
        assert leaf.std() == pytest.approx(want, rel=5 / math.sqrt(2 * leaf.size)), path
        assert abs(leaf.mean()) < 5 * want / math.sqrt(leaf.size), path


# ---------------------------------------------------------------- where bytes live
def bytes_on_one_device(tree: Any) -> set[int]:
    """Bytes that each device holds, as a set: one number where all hold the same."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return set(held.values())


def ways(setup: Setup, dims: tuple[str, ...]) -> int:
    """Into how many parts a leaf is cut: stages cut layers, stages and tp the vocabulary, tp heads and MLP, ZeRO anything."""
    sizes = setup.layout.sizes
    kv = sizes["tp"] if setup.model.arch.num_kv_heads % sizes["tp"] == 0 else 1
    cuts = {"layers": sizes["pp"], "vocab": sizes["pp"] * sizes["tp"], "heads": sizes["tp"], "mlp": sizes["tp"], "kv_heads": kv}
    return math.prod(cuts.get(dim, 1) for dim in dims) * (sizes["dp"] if setup.config.layout.zero else 1)


@pytest.mark.parametrize("name", LAYOUTS)
def test_zero_divides_masters_and_moments_by_dp(name: str) -> None:
    setup, state = setup_of(name), initial(name)
    moments = {moment: optax.tree.get(state.opt_state, moment) for moment in ("mu", "nu")}
    for tree in (state.params, *moments.values()):
        def check(leaf: LeafLayout, x: jax.Array) -> None:
            assert {shard.data.size for shard in x.addressable_shards} == {x.size // ways(setup, leaf.dims)}, leaf.path
        setup.layout.map(check, tree)
    jax.tree.map(lambda x, mu, nu: None if x.sharding == mu.sharding == nu.sharding else pytest.fail(), state.params, *moments.values())
    held = bytes_on_one_device(state.params)
    assert bytes_on_one_device(moments) == {2 * size for size in held}
    assert held == {sum(row.bytes_per_device for row in layout_rows(setup.layout))}
    if "tp" not in name and "pp" not in name:  # everything divides: at zero 0 a device holds all, above that 1 / dp
        assert held == {sum(4 * x.size for x in jax.tree.leaves(state.params)) // (4 if name == "dp=4, zero 1" else 1)}


@pytest.mark.parametrize("name", ["dp=4, zero 1", UNEVEN])
def test_abstract_state_is_what_init_makes(name: str) -> None:
    def check(a: jax.ShapeDtypeStruct, x: jax.Array) -> None:
        assert (a.shape, a.dtype) == (x.shape, x.dtype)
        assert a.sharding is not None and a.sharding.is_equivalent_to(x.sharding, x.ndim)
    jax.tree.map(check, abstract_state(setup_of(name)), initial(name))


# ---------------------------------------------------------------- canonical order
@pytest.mark.parametrize("name", [UNEVEN, "pp=2, 2 chunks", "pp=2,dp=2,tp=2, zero 3"])
def test_canonical_order_is_the_models_and_has_an_inverse(name: str) -> None:
    setup, rng = setup_of(name), np.random.default_rng(0)
    order = [setup.layer_of_row.reshape(-1).tolist().index(i) for i in range(LAYERS)]
    want = jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(np.float32), layer_by_layer(3))
    placed = from_canonical(setup, want)
    jax.tree.map(np.testing.assert_array_equal, canonical(setup, placed), want)
    np.testing.assert_array_equal(np.asarray(placed["layers"]["mlp"]["up"])[order], want["layers"]["mlp"]["up"])
    jax.tree.map(lambda x, s: None if x.sharding == s else pytest.fail(), placed, setup.layout.shardings)
    assert_padding_is_zero(setup, placed)


def test_rows_of_a_stage_are_its_layers_in_order() -> None:
    assert setup_of(UNEVEN).layer_of_row.tolist() == [[0, 1], [2, 3], [4, -1]]
    # Two chunks a stage: pieces 0..3 of 2, 1, 1, 1 layers go to stages 0, 1, 0, 1.
    assert setup_of("pp=2, 2 chunks").layer_of_row.tolist() == [[0, 1, 3, -1], [2, -1, 4, -1]]


def assert_padding_is_zero(setup: Setup, tree: Any) -> None:
    padding = setup.layer_of_row.reshape(-1) < 0

    def check(leaf: LeafLayout, x: jax.Array) -> None:
        if leaf.dims[0] == "layers":
            assert not np.asarray(x)[padding].any(), leaf.path
        elif leaf.dims[0] == "vocab":
            assert not np.asarray(x)[VOCAB:].any(), leaf.path
    setup.layout.map(check, tree)


# ---------------------------------------------------------------- the step on it
def rows_of(setup: Setup, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, VOCAB, (ROWS, TOKENS + 1), dtype=np.int32)
    return ids[:, :-1], ids[:, 1:], np.ones((ROWS, TOKENS), bool)


def test_three_steps_compile_once_move_nothing_unasked_and_leave_padding_zero() -> None:
    setup = setup_of(UNEVEN)
    step, state = make_train_step(setup), jax.tree.map(jnp.copy, initial(UNEVEN))
    placed = [place_rows(setup, *rows_of(setup, seed), setup.resolved.num_microbatches) for seed in range(3)]
    assert (setup.layer_of_row < 0).any() and state.params["embed"]["tokens"].shape[0] > VOCAB
    before = state
    for n, rows in enumerate(placed):
        with jax.transfer_guard("disallow"):
            state, metrics = step(state, rows)
        assert step._cache_size() == 1
        assert bool(metrics.finite) and int(state.updates) == n + 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))  # donated: one copy of the state in memory
    jax.tree.map(lambda x, a: None if x.sharding.is_equivalent_to(a.sharding, x.ndim) else pytest.fail(), state, abstract_state(setup))

    for tree in (state.params, optax.tree.get(state.opt_state, "mu"), optax.tree.get(state.opt_state, "nu")):
        assert_padding_is_zero(setup, tree)  # weight decay was on
    moved = jax.tree.map(lambda new, old: bool((new != old).any()), canonical(setup, state.params), layer_by_layer(seed_of(UNEVEN)))
    assert all(jax.tree.leaves(moved))

    not_placed: Any = [x.reshape(len(placed[0].mask), -1, TOKENS) for x in rows_of(setup, 0)]
    with jax.transfer_guard("disallow"), pytest.raises(Exception, match=r"[Dd]isallowed"):  # the guard sees a batch that was not placed
        step(state, Rows(*not_placed))


# ---------------------------------------------------------------- what a layout refuses
REFUSED: list[tuple[tuple[int, ...], tuple[str, ...], str]] = [
    ((16, 32), ("embed", "mpl"), 'layers.up: unknown dim "mpl": the rule table has layers, vocab, heads, kv_heads, mlp, experts, embed, '
                                 "head_dim, positions"),
    ((32, 32), ("heads", "mlp"), "layers.up: mesh axis tp is used for heads and for mlp: a leaf uses an axis once"),
    ((32, 252), ("layers", "vocab"), "layers.up: mesh axis pp is used for layers and for vocab: a leaf uses an axis once"),
    ((16, 30), ("embed", "mlp"), "layers.up: tp=4 does not divide mlp=30"),
    ((250, 16), ("vocab", "embed"), "layers.up: pp*tp=8 does not divide vocab=250"),
    ((5, 16), ("layers", "embed"), "layers.up: pp=2 does not divide layers=5"),
    ((16, 6, 8), ("embed", "kv_heads", "head_dim"), "layers.up: tp=4 does not divide kv_heads=6"),
    ((16, 3, 8), ("embed", "kv_heads", "head_dim"), "layers.up: tp=4 does not divide kv_heads=3"),
    ((2, 16, 32), ("embed", "mlp"), "layers.up: 2 dims ('embed', 'mlp') for shape (2, 16, 32): name every dim"),
]


def place(mesh: dict[str, int], zero: int, shape: tuple[int, ...], dims: tuple[str, ...]) -> Layout:
    shapes = {"layers": {"up": jax.ShapeDtypeStruct(shape, np.float32)}}
    return make_layout(build_mesh(mesh, jax.devices()), DEFAULT_RULES, zero, shapes, {"layers": {"up": dims}})


@pytest.mark.parametrize(("shape", "dims", "message"), REFUSED, ids=[message.split(": ")[1][:40] for *_, message in REFUSED])
def test_a_leaf_that_cannot_be_placed_is_named_with_its_sizes(shape: tuple[int, ...], dims: tuple[str, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=f"^{re.escape(message)}$"):
        place({"pp": 2, "tp": 4}, 1, shape, dims)


@pytest.mark.parametrize(("mesh", "zero", "shape", "dims", "spec"), [
    ({"tp": 4}, 1, (16, 8, 8), ("embed", "kv_heads", "head_dim"), P(None, "tp", None)),
    ({"tp": 4}, 1, (16, 4, 8), ("embed", "kv_heads", "head_dim"), P(None, "tp", None)),
    ({"tp": 4}, 1, (16, 2, 8), ("embed", "kv_heads", "head_dim"), P(None, None, None)),  # fewer kv heads than ranks: whole
    ({"pp": 2, "tp": 2}, 1, (8, 16), ("vocab", "embed"), P(("pp", "tp"), None)),
    ({"dp": 4, "tp": 2}, 0, (2, 16, 32), ("layers", "embed", "mlp"), P(None, None, "tp")),
    ({"dp": 4, "tp": 2}, 1, (2, 16, 32), ("layers", "embed", "mlp"), P(None, "dp", "tp")),
    ({"dp": 4}, 3, (4, 16, 32), ("layers", "embed", "mlp"), P(None, None, "dp")),  # the largest free dim, never the layers
    ({"dp": 4}, 2, (4, 16, 30), ("layers", "embed", "mlp"), P(None, "dp", None)),  # the largest that divides
    ({"rep": 2, "dp": 4}, 3, (16,), ("embed",), P("dp")),  # each replica holds all
    ({"dp": 4}, 3, (4, 6), ("layers", "head_dim"), P(None, None)),
])
def test_where_a_leaf_goes(mesh: dict[str, int], zero: int, shape: tuple[int, ...], dims: tuple[str, ...], spec: P) -> None:
    assert place(mesh, zero, shape, dims).specs["layers"]["up"] == spec


def test_what_zero_cannot_shard_is_listed_with_its_bytes() -> None:
    layout = place({"dp": 4}, 1, (4, 6), ("layers", "head_dim"))
    (row,) = layout_rows(layout)
    assert (row.path, row.spec, row.bytes_per_device) == ("layers.up", "(-, -)", 4 * 4 * 6)
    assert row.note == "whole: ZeRO divides no dim"
