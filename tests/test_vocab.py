"""The vocabulary-parallel lookup and loss against plain JAX on one device, for every way to shard the table.

Inside `shard_map` a value that several ranks share has one partial gradient a rank: the tests add those up in numpy.
Arrays that come back have the leading dims [pp, tp], one entry a rank.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxmeg.mesh import build_mesh
from jaxmeg.ops.vocab import CHUNK_LOGITS, default_chunks, log_sum_exp_parts, logits, lookup, token_loss
from jaxmeg.parallel import AXES, computes_loss, only_on, vary

VOCAB, WIDTH, TOKENS = 250, 8, 28  # neither the ranks divide the vocabulary, nor 3 or 8 chunks the tokens
CHUNKS = (1, 3, 8)


class Case(NamedTuple):
    """A mesh of pp x tp, and the axes that the table's rows are sharded over."""

    axes: tuple[str, ...]
    pp: int = 1
    tp: int = 1

    @property
    def ranks(self) -> int:
        return int(np.prod([{"pp": self.pp, "tp": self.tp}[axis] for axis in self.axes]))


CASES = [
    Case(()), Case((), pp=2, tp=2),
    Case(("tp",), tp=2), Case(("tp",), tp=4), Case(("tp",), pp=2, tp=2),
    Case(("pp",), pp=2), Case(("pp",), pp=4), Case(("pp",), pp=2, tp=4),
    Case(("pp", "tp"), pp=2, tp=2), Case(("pp", "tp"), pp=2, tp=4), Case(("pp", "tp"), pp=4, tp=2),
]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{'+'.join(case.axes) or 'whole'}-pp{case.pp}-tp{case.tp}")


def on_mesh(case: Case, body, *args, specs) -> Any:
    """body(*local args), every result stacked over the ranks: [pp, tp, ...]."""
    mesh = build_mesh({"pp": case.pp, "tp": case.tp}, jax.devices())

    def run(*args):
        return jax.tree.map(lambda x: vary(x)[None], body(*vary(args)))

    stacked = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P(AXES), check_vma=True))(*args)
    return jax.tree.map(lambda x: np.asarray(x).reshape(case.pp, case.tp, *x.shape[1:]), stacked)


def padded(table: np.ndarray, case: Case, fill: float = 0.0) -> np.ndarray:
    return np.pad(table, ((0, -len(table) % case.ranks), (0, 0)), constant_values=fill)


def whole_table(parts: np.ndarray, case: Case) -> np.ndarray:
    """[pp, tp, rows of a rank, D] -> the table; ranks that hold the same rows have partial sums of it."""
    for dim, axis in enumerate(("pp", "tp")):
        if axis not in case.axes:
            parts = parts.sum(dim, keepdims=True)
    return parts.reshape(-1, parts.shape[-1])


def reported(loss: np.ndarray) -> float:
    """The loss where it is read: on the last stage and the first tp rank."""
    return loss[-1, 0]


def whole_dh(parts: np.ndarray) -> np.ndarray:
    """[pp, tp, 1, T/tp, D] -> [T, D]: each rank has its tokens, the last stage has the gradient, the others have zero."""
    assert (parts[:-1] == 0).all()
    return np.concatenate(list(parts[-1, :, 0]), axis=0)


def spread(case: Case) -> P:
    return P(case.axes or None)


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def rel(got: np.ndarray, want: np.ndarray) -> float:
    assert got.shape == want.shape
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


# ---------------------------------------------------------------- loss
def plain_loss(h, table, labels, weights):
    """Weighted sum of cross-entropies with all logits at once."""
    log_p = jax.nn.log_softmax(jnp.dot(h, table.T, precision="highest"), -1)
    return -jnp.sum(weights * jnp.take_along_axis(log_p, labels[:, None], -1)[:, 0])


def loss_and_grads(case: Case, h, table, labels, weights, chunks: int, factor: float = 1.0):
    """(loss, (dh of the rank's tokens, dtable of the rank's rows)) of factor * token_loss on every rank."""
    def body(h, table, labels, weights):
        with jax.default_matmul_precision("highest"):
            return jax.value_and_grad(lambda h, table: factor * counted_loss(case, h, table, labels, weights, chunks), (0, 1))(h, table)
    return on_mesh(case, body, h[None], table, labels[None], weights[None], specs=(P(None, "tp"), spread(case), P(), P()))


def counted_loss(case: Case, h, table, labels, weights, chunks: int):
    """token_loss with weights only on the ranks that take part, as the decoder's head has them."""
    return token_loss(h, table, labels, only_on(computes_loss(case.axes), weights), case.axes, VOCAB, chunks)


def problem() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(1)
    labels = rng.integers(0, VOCAB, TOKENS, dtype=np.int32)
    labels[:2] = 0, VOCAB - 1
    weights = np.where(rng.random(TOKENS) < 0.7, rng.random(TOKENS), 0).astype(np.float32)
    return random(2, TOKENS, WIDTH), random(3, VOCAB, WIDTH), labels, weights


@by_case
def test_loss_and_gradients_equal_plain_jax_for_any_sharding_and_chunks(case: Case) -> None:
    h, table, labels, weights = problem()
    want, (want_dh, want_dtable) = jax.jit(jax.value_and_grad(lambda h, t: 2.5 * plain_loss(h, t, labels, weights), (0, 1)))(h, table)

    def body(h, table, labels, weights):
        def loss(h, table, chunks):
            return 2.5 * counted_loss(case, h, table, labels, weights, chunks)
        with jax.default_matmul_precision("highest"):
            return [jax.value_and_grad(loss, (0, 1))(h, table, chunks) for chunks in CHUNKS]

    junk = padded(table, case, fill=1e4)  # whatever stands in rows of padding takes no part
    results = on_mesh(case, body, h[None], junk, labels[None], weights[None], specs=(P(None, "tp"), spread(case), P(), P()))
    for chunks, (loss, (dh, dtable)) in zip(CHUNKS, results, strict=True):
        np.testing.assert_allclose(reported(loss), want, rtol=1e-6, err_msg=f"{chunks} chunks")
        assert rel(whole_dh(dh), np.asarray(want_dh)) < 2e-6, f"{chunks} chunks"
        got = whole_table(dtable, case)
        assert rel(got[:VOCAB], np.asarray(want_dtable)) < 2e-6, f"{chunks} chunks"
        assert (got[VOCAB:] == 0).all()


@pytest.mark.parametrize("case", [Case(("tp",), tp=4), Case(("pp", "tp"), pp=2, tp=4)], ids=["tp", "pp+tp"])
def test_padding_takes_no_part_in_the_softmax(case: Case) -> None:
    h, labels = random(1, 8, WIDTH), np.array([0, 1, 2, 3, 100, 247, 248, 249], np.int32)
    table = padded(np.zeros((VOCAB, WIDTH), np.float32), case)
    assert len(table) in (252, 256)
    loss, (_, dtable) = loss_and_grads(case, h, table, labels, np.full(8, 0.125, np.float32), chunks=3)
    assert reported(loss) == pytest.approx(5.52146, abs=5e-6)  # ln 250; with padding it would be ln 252 = 5.52943 or ln 256 = 5.54518
    got = whole_table(dtable, case)
    assert (got[VOCAB:] == 0).all() and (np.abs(got[:VOCAB]).sum(1) > 0).all()


def test_loss_of_bf16_logits_is_taken_in_fp32() -> None:
    case = Case(("pp", "tp"), pp=2, tp=2)
    h, table = (np.asarray(jnp.asarray(3 * x).astype(jnp.bfloat16), np.float64) for x in (random(1, 40, WIDTH), random(2, VOCAB, WIDTH)))
    z = h @ table.T
    labels = np.argmin(np.abs(np.log(np.exp(z).sum(1, keepdims=True)) - z - 36), axis=1).astype(np.int32)
    per_token = np.log(np.exp(z).sum(1)) - z[np.arange(40), labels]
    far = np.abs(per_token - 36) < 8
    assert far.sum() >= 10
    h, labels, per_token = h[far], labels[far], per_token[far]
    rows = padded(table.astype(np.float32), case)

    def body(h, table, labels):
        one_hot = jnp.eye(2 * h.shape[1], dtype=jnp.float32)  # one token counts at a time
        return [token_loss(h, table, labels, one_hot[None, i], case.axes, VOCAB, 1) for i in range(10)]

    h, labels = h[: len(h) // 2 * 2], labels[: len(h) // 2 * 2]
    got = on_mesh(case, body, jnp.asarray(h, jnp.bfloat16)[None], rows, labels[None], specs=(P(None, "tp"), spread(case), P()))
    for i, loss in enumerate(got):
        assert loss.dtype == np.float32
        np.testing.assert_allclose(reported(loss), per_token[i], atol=1e-3)  # the bf16 numbers near 36 are 0.25 apart


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_gradients_keep_their_dtypes(compute: str) -> None:
    case = Case(("tp",), tp=2)
    h, table, labels, weights = problem()
    low = jnp.asarray(h).astype({"fp32": jnp.float32, "bf16": jnp.bfloat16}[compute])
    _, (dh, dtable) = loss_and_grads(case, low, table, labels, weights, chunks=3)
    assert dh.dtype == low.dtype and dtable.dtype == np.float32
    want_dh, want_dtable = jax.jit(jax.grad(plain_loss, (0, 1)))(low.astype(jnp.float32), table, labels, weights)
    assert rel(whole_dh(dh.astype(np.float32)), np.asarray(want_dh)) < (2e-6 if compute == "fp32" else 0.02)
    assert rel(whole_table(dtable, case), np.asarray(want_dtable)) < (2e-6 if compute == "fp32" else 0.02)


def test_untrained_tokens_change_nothing() -> None:
    case = Case(("pp", "tp"), pp=2, tp=2)
    h, table, labels, weights = problem()
    rows = padded(table, case)
    loss, (dh, dtable) = loss_and_grads(case, h, rows, labels, np.zeros_like(weights), chunks=3)
    assert (loss == 0).all() and (dh == 0).all() and (dtable == 0).all()
    results = [loss_and_grads(case, h, rows, np.where(weights == 0, label, labels), weights, chunks=3) for label in (7, -100)]
    jax.tree.map(np.testing.assert_array_equal, *results)  # nor does the label of such a token


def test_chunks_bound_the_logits_of_a_device() -> None:
    assert default_chunks(1, 256) == default_chunks(2**10, CHUNK_LOGITS >> 10) == 1
    assert default_chunks(2**10 + 1, CHUNK_LOGITS >> 10) == 2
    for num_tokens in (32_768, 99_991):
        chunks = default_chunks(num_tokens, 151_936)
        assert num_tokens / chunks * 151_936 <= CHUNK_LOGITS < num_tokens / (chunks - 1) * 151_936


@by_case
def test_logits_are_the_plain_product_and_padding_is_last(case: Case) -> None:
    h, table, *_ = problem()
    rows = padded(table, case, fill=1e4)
    z = on_mesh(case, lambda h, t: logits(h, t, case.axes, VOCAB).T, h, rows, specs=(P(), spread(case)))
    for dim, axis in enumerate(("pp", "tp")):
        if axis not in case.axes:  # the same on all ranks, to the bit
            assert (z == z.take([0], axis=dim)).all()
            z = z.take([0], axis=dim)
    z = z.reshape(-1, z.shape[-1]).T
    np.testing.assert_allclose(z[:, :VOCAB], h @ table.T, atol=1e-4)
    assert (z[:, VOCAB:] == np.finfo(np.float32).min).all()


def test_one_pass_log_sum_exp_survives_any_size_and_order() -> None:
    """Against fp64, where the largest element comes first, last, everywhere, is huge, or there is nothing but padding."""
    ramp, lowest = np.linspace(-1e4, 1e4, 300, dtype=np.float32), np.finfo(np.float32).min
    rows = np.stack([ramp, ramp[::-1], np.full(300, 77.0), 50 * random(1, 300), np.where(ramp > 0, lowest, ramp), np.full(300, -3e38),
                     np.full(300, lowest)]).astype(np.float32)
    peak, total = jax.jit(log_sum_exp_parts)(rows)
    exact = rows.astype(np.float64)
    np.testing.assert_array_equal(peak, rows.max(-1))
    np.testing.assert_allclose(total, np.exp(exact - exact.max(-1, keepdims=True)).sum(-1), rtol=1e-5)
    assert total[2] == 300


# ---------------------------------------------------------------- lookup
@by_case
def test_lookup_and_its_gradient_equal_indexing(case: Case) -> None:
    table, rng = random(1, VOCAB, WIDTH), np.random.default_rng(2)
    ids = rng.integers(0, VOCAB, (3, 8), dtype=np.int32)
    ids[0, :4] = 0, VOCAB - 1, 5, 5  # first, last, twice the same
    dx = random(3, 3, 8, WIDTH)  # what arrives of the gradient, in all
    shares = random(4, case.pp, *dx.shape)  # the stages hold parts of it that add up to it
    shares[-1] = dx - shares[:-1].sum(0)
    rows = padded(table, case, fill=1e4)

    def body(table, ids, dx):
        x, vjp = jax.vjp(lambda table: lookup(table, ids, case.axes, jnp.dtype(jnp.float32)), table)
        return x, vjp(dx[0])[0]

    x, dtable = on_mesh(case, body, rows, ids, shares, specs=(spread(case), P(), P("pp", None, "tp")))
    for stage in x:  # [tp, B, T/tp, D]: each rank has its tokens
        assert (np.concatenate(list(stage), axis=1) == table[ids]).all()
    got, want = whole_table(dtable, case), np.zeros((VOCAB, WIDTH))
    np.add.at(want, ids.reshape(-1), dx.reshape(-1, WIDTH).astype(np.float64))
    np.testing.assert_allclose(got[:VOCAB], want, atol=2e-6)
    assert (got[VOCAB:] == 0).all()


def test_gradient_of_a_repeated_id_is_summed_in_fp32() -> None:
    case = Case(("tp",), tp=2)
    ids, dx = np.full((1, 258), 3, np.int32), np.full((1, 258, WIDTH), 2.0**-9, np.float32)
    dx[0, 0], dx[0, 1] = 1.0, 0.0
    table = random(1, VOCAB, WIDTH)

    def body(table, ids, dx):
        x, vjp = jax.vjp(lambda table: lookup(table, ids, case.axes, jnp.dtype(jnp.bfloat16)), table)
        return x, vjp(dx.astype(jnp.bfloat16))[0]

    x, dtable = on_mesh(case, body, table, ids, dx, specs=(spread(case), P(), P(None, "tp")))
    assert x.dtype == jnp.bfloat16
    assert (whole_table(dtable, case)[3] == 1.5).all()  # 1 + 256 * 2**-9; a bf16 sum stays at 1
