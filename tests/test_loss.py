"""The loss of a step is one sum over all trained tokens of all ranks and microbatches; evaluation and sampling read the same.

Expected values are closed forms, `reference.py` (a plain decoder on one device) and finite differences. Every
layout here runs one small model, so each of the compiled programs serves several tests.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference

from jaxmeg import evaluate as evaluate_module
from jaxmeg.config import Config, DataConfig, LayoutConfig, MeshConfig, ModelConfig, PipelineConfig, PrecisionConfig, TrainConfig
from jaxmeg.data.dataset import Rows
from jaxmeg.evaluate import make_evaluate
from jaxmeg.layout import is_leaf_layout
from jaxmeg.setup import Setup, build
from jaxmeg.state import canonical, from_canonical
from jaxmeg.step import dropout_key, loss_and_gradients, make_eval_step, make_next_logits, place_rows

ROWS, TOKENS, VOCAB = 8, 128, 30  # a table sharded four ways has two rows of padding
MODEL = ModelConfig(preset="toy", num_layers=2, vocab_size=VOCAB, embed_dim=16, mlp_dim=32, num_heads=4, num_kv_heads=2, head_dim=4,
                    norm="layer")
DP4, PP2_TP2, DP2_TP2 = {"dp": 4}, {"pp": 2, "tp": 2}, {"dp": 2, "tp": 2}


def setup_of(mesh: dict[str, int], zero: int = 1, microbatch: int | None = None, rows: int = ROWS, dropout: float = 0.0,
             remat: str = "none") -> Setup:
    config = Config(
        model=MODEL, mesh=MeshConfig(**{"dp": 1, **mesh}), layout=LayoutConfig(zero=zero, remat=remat),
        pipeline=PipelineConfig(microbatch=microbatch), precision=PrecisionConfig(compute="fp32", matmul="highest"),
        data=DataConfig(seq_len=TOKENS, global_batch=rows), train=TrainConfig(dropout=dropout))
    return build(config, jax.devices()[: math.prod(mesh.values())])


TRAIN = {
    "one device": setup_of({}),
    "accumulate 2": setup_of({}, microbatch=4),
    "accumulate 4": setup_of({}, microbatch=2),
    "accumulate 8": setup_of({}, microbatch=1),
    "dp=4": setup_of(DP4, zero=2, microbatch=1),
    "pp=2,tp=2": setup_of(PP2_TP2),
    "pp=2,tp=2, dropout": setup_of(PP2_TP2, dropout=0.5, remat="full"),
}
LAYOUTS = [name for name in TRAIN if "dropout" not in name]
ARCH = TRAIN["one device"].model.arch


@functools.cache
def weights() -> Any:
    """Canonical weights, no leaf at a special value, and large enough for gradients that finite differences can see."""
    rng = np.random.default_rng(5)

    def one(leaf: Any) -> np.ndarray:
        x = rng.standard_normal(leaf.shape).astype(np.float32)
        if "norm" in leaf.path:
            return np.float32(0.3) * x + np.float32(leaf.path.endswith("weight"))
        return x if "embed" in leaf.path else np.float32(0.3) * x
    return TRAIN["one device"].layout.map(one)


def ids(num_rows: int = ROWS, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    made = np.random.default_rng(seed).integers(0, VOCAB, (num_rows, TOKENS + 1), dtype=np.int32)
    return made[:, :-1], made[:, 1:]


def masks(counts: list[int]) -> np.ndarray:
    """counts[i] trained tokens, anywhere in row i."""
    rng = np.random.default_rng(1)
    return np.stack([rng.permutation(TOKENS) < count for count in counts])


COUNTS = [1, 5, 17, 128, 3, 0, 64, 100]


@functools.cache
def compiled(name: str) -> Any:
    return jax.jit(loss_and_gradients(TRAIN[name]))


def step(name: str, params: Any, inputs: np.ndarray, labels: np.ndarray, mask: np.ndarray) -> tuple[float, Any, int]:
    """(loss, canonical gradients, trained tokens) of canonical weights on a layout."""
    setup = TRAIN[name]
    rows = place_rows(setup, inputs, labels, mask, setup.resolved.num_microbatches)
    loss, grads, tokens = compiled(name)(from_canonical(setup, params), rows, dropout_key(0, jnp.int32(0)), jnp.float32(1))
    return float(loss), canonical(setup, grads), int(tokens)


@functools.cache
def plain() -> Any:
    return jax.jit(jax.value_and_grad(lambda params, *batch: reference.loss(params, ARCH, *batch, *reference.places(None, batch[0].shape))))


def assert_same_gradients(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Every leaf, relative to its norm."""
    def one(path: Any, a: np.ndarray, b: np.ndarray) -> None:
        assert a.shape == b.shape
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b), jax.tree_util.keystr(path)
    jax.tree_util.tree_map_with_path(one, got, jax.device_get(want))


# ---------------------------------------------------------------- one sum over all trained tokens
@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_of_any_number_of_trained_tokens(name: str) -> None:
    """Also a microbatch with none: with 8 microbatches, number 5."""
    batch = (*ids(), masks(COUNTS))
    loss, grads, tokens = step(name, weights(), *batch)
    want, want_grads = plain()(weights(), *batch)
    assert tokens == sum(COUNTS)
    assert loss == pytest.approx(float(want), abs=1e-5)
    assert_same_gradients(grads, want_grads)


@pytest.mark.parametrize("name", ["accumulate 4", "dp=4"])
def test_the_order_of_rows_over_ranks_and_microbatches_is_free(name: str) -> None:
    inputs, labels = ids()
    mask, order = masks(COUNTS), np.array([3, 0, 6, 5, 1, 7, 4, 2])
    loss, grads, _ = step(name, weights(), inputs[order], labels[order], mask[order])
    want, want_grads = plain()(weights(), inputs, labels, mask)
    assert loss == pytest.approx(float(want), abs=1e-5)
    assert_same_gradients(grads, want_grads)


def certain(*losses: float) -> tuple[Any, np.ndarray]:
    """Weights with which label i costs losses[i] in any context, and the probabilities of all labels."""
    p = np.exp(-np.array(losses))
    p = np.concatenate([p, np.full(VOCAB - len(p), (1 - p.sum()) / (VOCAB - len(p)))])
    first = np.eye(1, ARCH.embed_dim, dtype=np.float32)[0]
    head = {"norm": {"weight": np.zeros_like(first), "bias": first}, "tokens": np.log(p)[:, None].astype(np.float32) * first[None]}
    return weights() | {"head": head}, p


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_short_microbatch_does_not_weigh_more(name: str) -> None:
    """6 tokens at loss 2 and 2 tokens at loss 8, in rows that no layout puts into one microbatch: 3.5, not 5."""
    params, p = certain(2.0, 8.0)
    inputs, labels, mask = ids()[0], np.zeros((ROWS, TOKENS), np.int32), masks([6, 0, 0, 0, 0, 2, 0, 0])
    labels[5] = 1
    loss, grads, tokens = step(name, params, inputs, labels, mask)
    assert tokens == 8 and loss == pytest.approx(3.5, abs=2e-6)
    share = np.zeros(VOCAB)
    share[:2] = 6 / 8, 2 / 8
    np.testing.assert_allclose(grads["head"]["tokens"][:, 0], p - share, atol=1e-6)
    assert (grads["head"]["tokens"][:, 1:] == 0).all()
    np.testing.assert_allclose(grads["head"]["norm"]["bias"], (p - share) @ params["head"]["tokens"], atol=1e-5)
    assert not any(leaf.any() for leaf in jax.tree.leaves([grads["layers"], grads["embed"]]))  # the head ignores its input


@pytest.mark.parametrize("name", ["accumulate 2", "dp=4", "pp=2,tp=2"])
def test_a_step_without_a_trained_token_is_zero(name: str) -> None:
    loss, grads, tokens = step(name, weights(), *ids(), masks([0] * ROWS))
    assert (loss, tokens) == (0.0, 0)
    assert not any(leaf.any() for leaf in jax.tree.leaves(grads))


@pytest.mark.parametrize("name", ["pp=2,tp=2", "pp=2,tp=2, dropout"])
def test_gradient_is_the_slope_of_the_loss(name: str) -> None:
    """Central differences in fp32, at a random entry of every leaf and along one random direction through all leaves."""
    batch = (*ids(seed=3), masks([9, 2, 0, 7, 0, 5, 6, 1]))
    if "dropout" in name:  # masks are slow to draw: shorter rows
        batch = (*(x[:, :16] for x in ids(seed=3)), masks([128, 30, 0, 60, 0, 50, 60, 10])[:, :16])
    params, rng = weights(), np.random.default_rng(11)
    loss, grads, _ = step(name, params, *batch)
    if "dropout" in name:
        assert abs(loss - float(plain()(params, *batch)[0])) > 0.01  # masks are drawn

    def slope(direction: Any) -> float:
        def at(amount: float) -> float:
            return step(name, jax.tree.map(lambda x, d: (x + amount * d).astype(np.float32), params, direction), *batch)[0]
        return (at(1.0) - at(-1.0)) / 2

    def entry(number: int, at: tuple[int, ...], value: float) -> Any:
        made = [np.zeros_like(x) for x in leaves]
        made[number][at] = value
        return tree.unflatten(made)

    leaves, tree = jax.tree.flatten(params)
    paths = [leaf.path for leaf in jax.tree.leaves(TRAIN[name].layout.leaves, is_leaf=is_leaf_layout)]
    size, seen = 0.01, 0
    for number, (path, grad) in enumerate(zip(paths, jax.tree.leaves(grads), strict=True)):
        at = tuple(int(rng.integers(0, n)) for n in grad.shape)
        assert slope(entry(number, at, size)) / size == pytest.approx(grad[at], abs=1e-4), f"{path} {at}"  # rounding of the loss / size
        seen += abs(grad[at]) > 2e-3
    assert seen >= 0.6 * len(leaves)  # most gradients are far above that tolerance
    direction = jax.tree.map(lambda x: 1e-3 * rng.standard_normal(x.shape), params)
    along = sum(jax.tree.leaves(jax.tree.map(lambda d, g: float((d * g).sum()), direction, grads)))
    assert slope(direction) == pytest.approx(along, rel=0.01)


# ---------------------------------------------------------------- evaluation
EVAL = {"one device, batch 8": ({}, 8, 1), "dp=4, batch 4": (DP4, 4, 3), "pp=2,tp=2, batch 8": (PP2_TP2, 8, 1)}


@functools.cache
def evaluator(name: str) -> tuple[Setup, Any, Any]:
    """(setup, evaluate, the compiled step that it runs)."""
    mesh, rows, zero = EVAL[name]
    setup, steps = setup_of(mesh, rows=rows, zero=zero), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate_module, "make_eval_step", lambda *args: steps.append(make_eval_step(*args)) or steps[0])
        return setup, make_evaluate(setup), steps[0]


def in_batches(setup: Setup, rows: Rows) -> Iterator[Rows]:
    """As the loop reads them: the last batch is short."""
    size, count = setup.config.data.global_batch, len(rows.inputs)
    return (rows.take(np.arange(first, min(first + size, count))) for first in range(0, count, size))


@pytest.mark.parametrize("name", EVAL)
def test_every_row_is_evaluated_once_whatever_the_batch(name: str) -> None:
    """10 rows: batches of 4 leave two over, a batch of 8 leaves two over, and nothing is compiled for them."""
    setup, evaluate, compiled_step = evaluator(name)
    inputs, labels = ids(10, seed=4)
    params = from_canonical(setup, weights())
    for mask in (np.ones((10, TOKENS), bool), masks([128, 1, 0, 17, 5, 0, 90, 3, 64, 2])):
        loss, tokens = evaluate(params, in_batches(setup, Rows(inputs=inputs, labels=labels, mask=mask)))
        assert tokens == mask.sum()
        assert loss == pytest.approx(float(plain()(weights(), inputs, labels, mask)[0]), abs=1e-5)
    assert compiled_step._cache_size() == 1


@pytest.mark.parametrize("name", EVAL)
def test_a_short_evaluation_batch_does_not_weigh_more(name: str) -> None:
    """30 tokens at loss 1 in the first rows, 10 at loss 3 in the last: 1.5, perplexity 4.4817; a mean of means is 2."""
    setup, evaluate, _ = evaluator(name)
    num_rows = 2 * setup.config.data.global_batch
    labels, counts = np.zeros((num_rows, TOKENS), np.int32), [0] * num_rows
    counts[0], counts[1], counts[-1] = 7, 23, 10
    labels[-1] = 1
    rows = Rows(inputs=ids(num_rows)[0], labels=labels, mask=masks(counts))
    loss, tokens = evaluate(from_canonical(setup, certain(1.0, 3.0)[0]), in_batches(setup, rows))
    assert tokens == 40 and loss == pytest.approx(1.5, abs=2e-6)
    assert math.exp(loss) == pytest.approx(4.4817, abs=1e-4)


def test_evaluating_no_token_is_not_a_division_by_zero() -> None:
    setup, evaluate, _ = evaluator("one device, batch 8")
    inputs, labels = ids(2)
    rows = Rows(inputs=inputs, labels=labels, mask=masks([0, 0]))
    assert evaluate(from_canonical(setup, weights()), in_batches(setup, rows)) == (0.0, 0)


# ---------------------------------------------------------------- next-token logits
SAMPLE = {"one device": ({}, 1), "pp=2,tp=2": (PP2_TP2, 1), "dp=2,tp=2": (DP2_TP2, 3)}
POSITION = 41


@functools.cache
def next_logits(name: str) -> Any:
    mesh, zero = SAMPLE[name]
    setup = setup_of(mesh, zero=zero)
    compiled, params = make_next_logits(setup), from_canonical(setup, weights())

    def run(inputs: np.ndarray, position: int) -> np.ndarray:
        rows = place_rows(setup, inputs, np.zeros_like(inputs), np.zeros(inputs.shape, bool), 1)
        return np.asarray(compiled(params, rows, np.int32(position)))
    return run


@functools.cache
def plain_log_probabilities(position: int) -> np.ndarray:
    """log p of every next token after `position` of row 0, from the plain decoder's loss with each as the label."""
    inputs, _ = ids(2, seed=6)
    mask = np.arange(TOKENS)[None] == position
    places = reference.places(None, (1, TOKENS))
    loss = jax.jit(jax.vmap(lambda label: reference.loss(weights(), ARCH, inputs[:1], jnp.full((1, TOKENS), label), mask, *places)))
    return -np.asarray(loss(jnp.arange(VOCAB)))


@pytest.mark.parametrize("name", SAMPLE)
def test_next_token_logits_equal_the_plain_decoders(name: str) -> None:
    inputs, _ = ids(2, seed=6)
    z = next_logits(name)(inputs, POSITION)
    assert z.shape == (2, VOCAB) and z.dtype == np.float32
    np.testing.assert_allclose(z[0] - np.log(np.exp(z[0]).sum()), plain_log_probabilities(POSITION), atol=1e-5)
    np.testing.assert_allclose(z, next_logits("one device")(inputs, POSITION), atol=1e-5)


@pytest.mark.parametrize("name", SAMPLE)
def test_next_token_logits_are_causal(name: str) -> None:
    inputs, _ = ids(2, seed=6)
    z = next_logits(name)(inputs, POSITION)
    later, earlier = inputs.copy(), inputs.copy()
    later[:, POSITION + 1 :] = (later[:, POSITION + 1 :] + 1) % VOCAB
    earlier[0, 0] = (earlier[0, 0] + 1) % VOCAB
    assert (next_logits(name)(later, POSITION) == z).all()
    changed = np.abs(next_logits(name)(earlier, POSITION) - z).max(1)
    assert changed[0] > 1e-3 and changed[1] == 0  # the past counts, another row does not
