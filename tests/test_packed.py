"""Documents that share a row: as if each had a row of its own. Real programs, one device and a pipeline with tensor parallelism.

Row = document A (5 tokens) + document B (7). The index that makes such rows is tested in test_packing.py and test_dataset.py.
"""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxmeg.config import Config, DataConfig, MeshConfig, ModelConfig, PrecisionConfig
from jaxmeg.data.dataset import make_dataset
from jaxmeg.data.store import MemoryStore
from jaxmeg.setup import Setup, build
from jaxmeg.state import canonical, init_state
from jaxmeg.step import loss_and_gradients, make_next_logits, place_rows

TOKENS, VOCAB = 12, 64
MESHES: dict[str, dict[str, int]] = {"one device": {}, "pp=2,tp=2": {"pp": 2, "tp": 2}}
A = np.array([3, 9, 27, 17, 51], np.int32)
B = np.array([2, 4, 8, 16, 32, 1, 2], np.int32)


@functools.cache
def ready(mesh: str, arch: str = "toy") -> tuple[Setup, Any, Any, Any]:
    """(setup, parameters, jitted gradients, next-token logits); two rows an update."""
    sizes = MESHES[mesh]
    config = Config(model=ModelConfig(preset=arch, num_layers=2, vocab_size=VOCAB, mlp_dim=32), mesh=MeshConfig(**{"dp": 1, **sizes}),
                    data=DataConfig(seq_len=TOKENS, global_batch=2), precision=PrecisionConfig(compute="fp32", matmul="highest"))
    setup = build(config, jax.devices()[: int(np.prod(list(sizes.values()), dtype=int))])
    return setup, init_state(setup, 0).params, jax.jit(loss_and_gradients(setup)), make_next_logits(setup)


def packed_row(first: np.ndarray, second: np.ndarray, pad: int = 0):
    """(inputs, labels, mask, segments) of one row, made by hand; `pad` is the content of whatever is not trained."""
    inputs = np.full((1, TOKENS), pad, np.int32)
    labels, mask, segments = inputs.copy(), np.zeros((1, TOKENS), bool), np.zeros((1, TOKENS), np.int32)
    at = 0
    for number, document in enumerate((first, second), 1):
        end = at + len(document)
        inputs[0, at:end], segments[0, at:end] = document, number
        labels[0, at : max(end - 1, at)], mask[0, at : max(end - 1, at)] = document[1:], True
        at = end
    return inputs, labels, mask, segments


def gradients(mesh: str, *parts: np.ndarray):
    setup, params, run, _ = ready(mesh)
    inputs, labels, mask, segments = parts
    rows = place_rows(setup, inputs, labels, mask, setup.resolved.num_microbatches, segments)
    loss, grads, tokens = run(params, rows, np.zeros(2, np.uint32), np.float32(1))
    return float(loss), canonical(setup, grads), int(tokens)


def two(row, other):
    return tuple(np.concatenate(pair) for pair in zip(row, other, strict=True))


NOTHING = packed_row(np.zeros(0, np.int32), np.zeros(0, np.int32))


@pytest.mark.parametrize("mesh", MESHES)
def test_packed_rows_train_like_rows_of_their_own(mesh):
    """10 targets: 4 of A, 6 of B (11 would train A's last token to predict B's first)."""
    empty = np.zeros(0, np.int32)
    packed, apart = two(packed_row(A, B), NOTHING), two(packed_row(A, empty), packed_row(B, empty))
    loss, grads, tokens = gradients(mesh, *packed)
    wanted_loss, wanted, wanted_tokens = gradients(mesh, *apart)
    assert tokens == wanted_tokens == 10
    assert loss == pytest.approx(wanted_loss, abs=1e-6)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(x - y) <= 2e-6 * np.linalg.norm(y), jax.tree_util.keystr(path)
    classic = (*packed[:3], np.where(packed[3] > 0, 1, 0).astype(np.int32))  # one document: this must differ
    assert abs(gradients(mesh, *classic)[0] - loss) > 1e-4


@pytest.mark.parametrize("mesh", MESHES)
def test_a_document_does_not_see_its_neighbour(mesh):
    """Every token of A changed: B's logits are the same bits. One of B changed: those behind it are not."""
    setup, params, _, next_logits = ready(mesh)

    def logits(first, second) -> np.ndarray:
        inputs, labels, mask, segments = packed_row(first, second)
        rows = place_rows(setup, inputs, labels, mask, 1, segments)
        return np.stack([np.asarray(next_logits(params, rows, np.int32(t)))[0] for t in range(len(A), TOKENS)])

    before = logits(A, B)
    np.testing.assert_array_equal(logits((A + 11) % VOCAB, B), before)
    changed = logits(A, np.array([5, *B[1:]], np.int32))
    assert all(np.abs(row - old).max() > 1e-4 for row, old in zip(changed, before, strict=True))


def test_what_padding_holds_does_not_matter():
    """Padding filled with 7, an id that the documents have too and that is trained there: the same bits."""
    first, second = np.array([7, 3, 7], np.int32), np.array([7, 7, 1, 4], np.int32)
    row, other = packed_row(first, second), packed_row(first, second, pad=7)
    assert row[2].sum() == 5 and (row[0] != other[0]).any()
    (loss, grads, tokens), (same_loss, same, _) = gradients("one device", *two(row, NOTHING)), gradients("one device", *two(other, NOTHING))
    assert tokens == 5 and loss == same_loss
    jax.tree.map(np.testing.assert_array_equal, grads, same)


def test_the_index_makes_the_rows_that_are_tested_here():
    store = MemoryStore("two", [A, B], VOCAB)
    dataset = make_dataset([(store, 1.0)], DataConfig(seq_len=TOKENS, packing="fit", validation_fraction=0.0), 0, shuffle=True)
    rows = dataset.rows(np.array([0]))
    assert rows.segments is not None
    by_hand = packed_row(B, A)  # best fit takes the longest first
    for got, want in zip((rows.inputs, rows.labels, rows.mask, rows.segments), by_hand, strict=True):
        np.testing.assert_array_equal(np.where(rows.mask, got, 0) if got is rows.labels else got, want)
