"""Attention with windows and documents: every kernel against numpy in fp64, values and every gradient, and which kernel is taken.

No cuDNN runs on a CPU. In its place stands a plain program that reads flat memory as XLA hands it to cuDNN: S = B * M sequences at
element offsets, causal inside each; it leaves NaN wherever a kernel would leave memory unwritten.
This file is also a program that compiles for GPUs: `python -c "import test_attention; test_attention.main()"`.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused
from test_config import make

import jaxmeg
from jaxmeg.config import Config
from jaxmeg.ops.attention import KERNELS, Seen, causal_attention, choose_kernel, score_bytes
from jaxmeg.ops.documents import by_document, by_token, find_documents
from jaxmeg.setup import attention_kernel, build
from jaxmeg.validate.check import problems, warnings
from jaxmeg.validate.speed_rules import attention_here

B, T, H, G, K = 2, 14, 4, 2, 6
MOST = 4
UNWRITTEN = np.nan
ROWS = {  # documents that share a row; 0 is padding
    "two and one": [[1] * 5 + [2] * 7 + [0] * 2, [1] * 14],
    "as many as may be": [[1, 2, 2, 3, 3, 3, 3] + [4] * 6 + [0], [1] * 3 + [2] * 3 + [3] * 4 + [4] * 4],
    "padding only": [[0] * 14, [1] * 13 + [2]],
}


def inputs(seed: int = 0) -> list[np.ndarray]:
    """q, k, v and the gradient of the output."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((B, T, heads, K)).astype(np.float32) for heads in (H, G, G, H)]


def seen_by_loops(segments, window) -> np.ndarray:
    """bool [B, T, T]: from the query back to the first token of its document, or the window's."""
    seen = np.zeros((B, T, T), bool)
    for b, t in np.ndindex(B, T):
        for s in range(t, -1, -1):
            if (segments is not None and segments[b][s] != segments[b][t]) or (window is not None and t - s >= window):
                break
            seen[b, t, s] = True
    return seen


def dense(q, k, v, dout, seen, bias=None, saved=None):
    """(out, log-sum-exp [H, T], dq, dk, dv) of one sequence in fp64, from the formulas; arrays [T, heads, K], seen [T, T].

    saved: take the gradients from this output and log-sum-exp, as a kernel does.
    """
    group = q.shape[1] // k.shape[1]
    q, k, v, dout = (x.astype(np.float64) for x in (q, k, v, dout))
    kv = [np.repeat(x, group, axis=1) for x in (k, v)]
    scores = np.einsum("thk,shk->hts", q, kv[0]) / np.sqrt(q.shape[-1])
    scores = np.where(seen[None], scores if bias is None else scores + bias, -np.inf)
    lse = np.logaddexp.reduce(scores, -1)
    out = np.einsum("hts,shk->thk", np.exp(scores - lse[..., None]), kv[1])
    saved_out, saved_lse = saved or (out, lse)
    p = np.exp(scores - saved_lse[..., None])
    delta = np.einsum("thk,thk->ht", dout, saved_out)
    ds = p * (np.einsum("thk,shk->hts", dout, kv[1]) - delta[..., None]) / np.sqrt(q.shape[-1])
    grouped = [x.reshape(len(q), -1, group, q.shape[-1]).sum(2)
               for x in (np.einsum("hts,thk->shk", ds, q), np.einsum("hts,thk->shk", p, dout))]
    return out, lse, np.einsum("hts,shk->thk", ds, kv[0]), *grouped


def wanted(q, k, v, dout, seen) -> list[np.ndarray]:
    """out, dq, dk, dv of all rows."""
    rows = [dense(*parts) for parts in zip(q, k, v, dout, seen, strict=True)]
    return [np.stack([row[i] for row in rows]) for i in (0, 2, 3, 4)]


def assert_close(got, want) -> None:
    for name, x, y in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        error = np.linalg.norm(np.asarray(x, np.float64) - y) / max(np.linalg.norm(y), 1.0)  # with a window of 1, dq is zero
        assert error < 2e-6, f"{name} is off by {error:.1e}"


def run(kernel, segments, window, max_documents=None):
    q, k, v, dout = inputs()
    segments = None if segments is None else jnp.asarray(segments, jnp.int32)

    def both(q, k, v, dout):
        out, vjp = jax.vjp(lambda q, k, v: causal_attention(q, k, v, segments, kernel, window, max_documents), q, k, v)
        return out, *vjp(dout)

    with jax.default_matmul_precision("highest"):
        return jax.jit(both)(q, k, v, dout)


# ---------------------------------------------------------------- a stand-in for cuDNN
def cudnn_in_numpy(backward: bool, bias_given: bool, ragged: bool, window: int | None, *args: np.ndarray):
    """(out, log-sum-exp), or (dq, dk, dv), of the operands in the order of jax's primitive."""
    q, k, v, bias, q_lengths, kv_lengths, q_offsets, kv_offsets = (np.asarray(x) for x in args[:8])
    rows, tokens, heads, width = q.shape
    count = rows * (q_offsets.shape[1] - 1) if ragged else rows
    if ragged:  # the first S lengths and S + 1 offsets, whatever their shape
        lengths, starts = q_lengths.reshape(-1)[:count], [x.reshape(-1)[: count + 1] for x in (q_offsets, kv_offsets)]
        assert (lengths == kv_lengths.reshape(-1)[:count]).all() and all((np.diff(x) >= 0).all() for x in starts)
    else:
        lengths, starts = np.full(count, tokens), [np.arange(count + 1) * tokens * x.shape[2] * width for x in (q, k)]
    unwritten = [np.full(x.size, UNWRITTEN, np.float32) for x in (q, k, v)]
    out, stats = np.full(q.size, UNWRITTEN, np.float32), np.full((count, heads, tokens), UNWRITTEN, np.float32)
    lse_in, out_in, dout = (np.asarray(x) for x in args[10:]) if backward else (stats, out.reshape(q.shape), np.zeros_like(q))

    def part(x: np.ndarray, s: int) -> slice:
        begin = starts[0 if x.shape[2] == heads else 1][s]
        return slice(begin, begin + lengths[s] * x.shape[2] * width)

    for s in np.flatnonzero(lengths):
        n = lengths[s]
        one = [x.reshape(-1)[part(x, s)].reshape(n, -1, width) for x in (q, k, v, dout)]
        query, key = np.indices((n, n))
        seen = (query >= key) & (query - key < (window or n))
        saved = out_in.reshape(-1)[part(q, s)].reshape(n, -1, width), lse_in[s, :, :n]
        y, lse, *grads = dense(*one, seen, bias[s, 0] if bias_given else None, saved if backward else None)
        out[part(q, s)], stats[s, :, :n] = y.reshape(-1), lse
        for x, array, grad in zip((q, k, v), unwritten, grads, strict=True):
            array[part(x, s)] = grad.reshape(-1)
    return [array.reshape(x.shape) for x, array in zip((q, k, v), unwritten, strict=True)] if backward else [out.reshape(q.shape), stats]


@pytest.fixture
def cudnn(monkeypatch) -> Iterator[list[dict]]:
    """The calls that reach cuDNN."""
    calls: list[dict] = []

    def bind(backward, *args, mask_type, variadic_args, sliding_window_length, scale, layout, **rest):
        q, k, offsets = args[0], args[1], args[6]
        ragged = mask_type == fused.MaskType.PADDING_CAUSAL
        assert ragged or mask_type == fused.MaskType.CAUSAL
        assert layout == fused.AttentionLayout.BTNH.value and scale == pytest.approx(q.shape[-1] ** -0.5)
        assert rest == {"seed": 42, "dropout_rate": 0.0} | ({} if backward else {"is_training": True})
        calls.append({"backward": backward, "bias": variadic_args[0], "ragged": ragged, "window": sliding_window_length,
                      "kv_heads": k.shape[2]})
        per_row = offsets.shape[1] - 1 if ragged else 1
        shapes = [x.shape for x in args[:3]] if backward else [q.shape, (per_row * q.shape[0], q.shape[2], q.shape[1])]
        return jax.pure_callback(partial(cudnn_in_numpy, backward, variadic_args[0], ragged, sliding_window_length),
                                 [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes], *args)

    for name, backward in (("fwd", False), ("bwd", True)):
        monkeypatch.setattr(fused, f"_dot_product_attention_{name}_p", SimpleNamespace(bind=partial(bind, backward)))
    yield calls


# ---------------------------------------------------------------- kernels
@pytest.mark.parametrize("window", [None, 1, 3, T, T + 5])
@pytest.mark.parametrize("rows", [None, "two and one"])
def test_xla(rows, window):
    segments = rows and ROWS[rows]
    assert_close(run("xla", segments, window), wanted(*inputs(), seen_by_loops(segments, window)))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("rows", [None, *ROWS])
@pytest.mark.parametrize("kernel", ["cudnn", "cudnn_packed"])
def test_cudnn_is_called_so_that_the_result_is_right(kernel, rows, window, cudnn):
    segments = rows and ROWS[rows]
    assert_close(run(kernel, segments, window, MOST), wanted(*inputs(), seen_by_loops(segments, window)))
    ragged = kernel == "cudnn_packed" and rows is not None
    masked = rows is not None and not ragged  # the window is then in the mask
    call = {"bias": masked, "ragged": ragged, "window": None if masked else window, "kv_heads": G}
    assert cudnn == [call | {"backward": False}, call | {"backward": True}]


def test_more_documents_than_may_be_give_no_update(cudnn, monkeypatch):
    """S counts over all rows, so one row may have more where another has fewer; too many in all are never silent, whatever a kernel leaves
    in memory."""
    monkeypatch.setattr(sys.modules[__name__], "UNWRITTEN", 0.0)
    many, few = [1, 2, 3, 4, 5, 6] + [7] * 8, [1] * 14
    assert_close(run("cudnn_packed", [many, few], None, MOST), wanted(*inputs(), seen_by_loops([many, few], None)))
    _, *grads = run("cudnn_packed", [many, few], None, 2)
    assert all(np.isnan(np.asarray(grad)).any() for grad in grads)


def test_offsets_that_int32_does_not_hold_are_refused():
    q, k = (jax.ShapeDtypeStruct((2**9, 2**12, heads, 64), jnp.bfloat16) for heads in (32, 8))
    segments = jax.ShapeDtypeStruct((2**9, 2**12), jnp.int32)
    with pytest.raises(ValueError, match="512 rows of 4096 tokens with 32 heads of 64 are more than the 2"):
        jax.eval_shape(lambda q, k, v, s: causal_attention(q, k, v, s, "cudnn_packed", None, 8), q, k, k, segments)


def test_kv_heads_are_read_in_place():
    """In no kernel does an array the size of k or v become one the size of q, but as an operand of a product."""
    q, k, v, dout = inputs()

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            inner = [x for x in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"))
                     if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
            for sub in inner:
                yield from walk(getattr(sub, "jaxpr", sub))
            if not inner:
                yield eqn

    def both(q, k, v, dout):
        out, lse = KERNELS["xla"][0](q, k, v, Seen(None, None, None))
        return KERNELS["xla"][1](q, k, v, Seen(None, None, None), out, lse, dout)

    def sizes(variables):
        return {variable.aval.size for variable in variables}

    eqns = list(walk(jax.make_jaxpr(both)(q, k, v, dout).jaxpr))
    grown = {str(eqn.primitive) for eqn in eqns if k.size in sizes(eqn.invars) and q.size in sizes(eqn.outvars)}
    assert grown == {"dot_general"}


# ---------------------------------------------------------------- where documents lie
@pytest.mark.parametrize("seed", range(4))
def test_documents_are_found(seed):
    rng = np.random.default_rng(seed)
    segments = (rng.random((3, 20)) < 0.2).cumsum(1).astype(np.int32)
    begins = [(b, t) for b in range(3) for t in range(20) if t == 0 or segments[b, t] != segments[b, t - 1]]
    starts = [20 * b + t for b, t in begins] + [60]
    per_row = -(-len(begins) // 3) + seed % 2
    found = find_documents(jnp.asarray(segments), per_row)
    empty = 3 * per_row - len(begins)
    assert found.starts_S1.tolist() == starts + [60] * empty and bool(found.fit)
    assert found.lengths_S.tolist() == np.diff(starts).tolist() + [0] * empty
    assert found.index_BT.reshape(-1).tolist() == np.repeat(np.arange(len(begins)), np.diff(starts)).tolist()
    assert not find_documents(jnp.asarray(segments), (len(begins) - 1) // 3).fit

    lse = rng.standard_normal((3, 2, 20)).astype(np.float32)
    by_doc = np.array(by_document(jnp.asarray(lse), found))
    for s, (b, t) in enumerate(begins):
        n = starts[s + 1] - starts[s]
        np.testing.assert_array_equal(by_doc[s, :, :n], lse[b, :, t : t + n])
        by_doc[s, :, n:] = np.nan  # is not read
    np.testing.assert_array_equal(by_token(jnp.asarray(by_doc), found), lse)


# ---------------------------------------------------------------- which kernel
HOPPER = {"platform": "cuda", "dtype": "bf16", "head_dim": 128, "seq_len": 8192, "packed": True, "capability": "9.0"}


@pytest.mark.parametrize(("changes", "kernel", "why"), [
    ({}, "cudnn", "bf16, head dim 128"),
    ({"head_dim": 64}, "cudnn", "bf16, head dim 64"),
    ({"head_dim": 256}, "xla", "cuDNN was not tried with head dim 256 yet: layout.attention cudnn takes it"),
    ({"head_dim": 256, "wanted": "cudnn"}, "cudnn", "bf16, head dim 256"),
    ({"head_dim": 256, "wanted": "cudnn_packed", "max_documents": 3}, "cudnn_packed", "bf16, head dim 256"),
    ({"head_dim": 264}, "xla", "head dims up to 256 in steps of 8, not 264"),
    ({"head_dim": 256, "wanted": "cudnn", "capability": "8.0"}, "xla", "head dims up to 128 in steps of 8, not 256"),
    ({"head_dim": 256, "wanted": "cudnn", "capability": "10.0"}, "xla", "head dims up to 128 in steps of 8, not 256"),
    ({"window": 512}, "cudnn", "bf16, head dim 128"),  # part of the mask
    ({"window": 512, "packed": False}, "xla", "cuDNN was not tried with a window yet: layout.attention cudnn takes it"),
    ({"window": 512, "packed": False, "wanted": "cudnn"}, "cudnn", "bf16, head dim 128"),
    ({"window": 512, "packed": False, "platform": "cpu"}, "xla", "cuDNN needs an NVIDIA GPU"),
    ({"wanted": "xla"}, "xla", "as layout.attention says"),
    ({"wanted": "cudnn"}, "cudnn", "bf16, head dim 128"),
    ({"wanted": "cudnn", "platform": "cpu"}, "xla", "cuDNN needs an NVIDIA GPU, this is cpu"),
    ({"wanted": "cudnn_packed", "max_documents": 31}, "cudnn_packed", "bf16, head dim 128, at most 31 documents a row"),
    ({"wanted": "cudnn_packed", "max_documents": 31, "seq_len": 127}, "cudnn_packed", "at most 31 documents a row"),  # needs no mask
    ({"wanted": "cudnn_packed", "max_documents": 31, "packed": False}, "cudnn", "bf16, head dim 128"),
    ({"wanted": "cudnn_packed"}, "cudnn", "cudnn_packed needs data.max_documents"),
    ({"wanted": "cudnn_packed", "max_documents": 31, "capability": "8.0"}, "cudnn", "cudnn_packed needs compute capability 9.0 (Hopper)"),
    ({"wanted": "cudnn_packed", "max_documents": 31, "capability": "8.0", "seq_len": 127}, "xla", "cudnn_packed needs compute"),
    ({"wanted": "cudnn_packed", "max_documents": 31, "capability": None}, "cudnn", "this GPU has None"),
    ({"wanted": "cudnn_packed", "max_documents": 31, "dtype": "fp32"}, "xla", "takes bf16 or fp16, not fp32"),
])
def test_which_kernel_is_taken(changes, kernel, why):
    got, reason = choose_kernel(**HOPPER | changes)
    assert got == kernel and why in reason


def config(**changes: object) -> Config:
    """layout__attention="xla" stands for layout.attention."""
    values = {"model.preset": "toy", "data.seq_len": 16, "data.global_batch": 4, "precision.compute": "bf16"}
    return make(values | {key.replace("__", "."): value for key, value in changes.items()})


def test_a_setup_has_the_kernel_that_is_asked_for():
    hopper = SimpleNamespace(platform="gpu", compute_capability="9.0")
    asked = config(layout__attention="cudnn_packed", data__max_documents=3)
    assert problems(asked, 1) == []
    assert attention_kernel(asked.data, "bf16", 64, hopper, wanted=asked.layout.attention)[0] == "cudnn_packed"
    setup = build(asked, jax.devices()[:1])
    assert setup.model.options.kernel == "xla" and setup.model.options.max_documents == 3
    assert setup.attention_scores == score_bytes(4, 8, 16) == 4 * 4 * 8 * 16 * 16
    assert build(asked, jax.devices()[:1], platform="cuda").attention_scores == 0


def test_what_is_known_once_jax_runs_is_said():
    asked, why = config(layout__attention="cudnn"), "cuDNN needs an NVIDIA GPU, this is cpu"
    assert list(attention_here(asked, "xla", why, 10**9)) == [f"layout.attention=cudnn has no effect here, where xla is taken: {why}"]
    assert list(attention_here(asked, "cudnn", "", 0)) == []
    long = config(data__seq_len=8192)
    [line] = attention_here(long, "xla", why, 8 * 2**30)
    assert line == f"the scores of attention take 8.0 GiB a layer on each device at data.seq_len=8192, as the kernel is xla ({why})"
    assert list(attention_here(long, "cudnn", "", 0)) == []


def test_a_window_that_hides_nothing_is_said():
    [line] = [line for line in warnings(config(model__sliding_window=16), 1) if "sliding_window" in line]
    assert line == "model.sliding_window=16 has no effect with data.seq_len=16: no token has more before it"
    assert not [line for line in warnings(config(model__sliding_window=15), 1) if "sliding_window" in line]
    assert problems(config(model__sliding_window=0), 1) == ["model.sliding_window=0 is out of range: use 1 or more, up to 16,777,216"]


def test_cudnn_packed_needs_a_number_of_documents():
    [line] = problems(config(layout__attention="cudnn_packed"), 1)
    assert line.startswith("layout.attention=cudnn_packed needs data.max_documents, the most documents in a row: use ")


# ---------------------------------------------------------------- compiled for eight H200s that are not there
def main() -> None:
    """Prints what the cuDNN calls of a packed step say, as JSON: name, shapes of the results, configuration."""
    from jaxmeg.aot import compile_train_step, gpu_devices

    asked = config(layout__attention="cudnn_packed", layout__zero=3, data__max_documents=6, model__sliding_window=100, model__head_dim=256,
                   model__embed_dim=64, data__seq_len=256, data__global_batch=16, mesh__pp=2, mesh__dp=2, mesh__tp=2)
    text = compile_train_step(asked, gpu_devices("h200", 8), packed=True)[1].as_text() or ""
    calls = re.findall(r"= \((.*?)\) custom-call\(.*custom_call_target=\"__cudnn\$(\w+)\".*?backend_config=(\{.*\})", text)
    fields = ("mask_type", "sliding_window_length", "max_seg_per_batch")
    found = {(name, *re.findall(r"\w+\[[\d,]*\]", shapes), *(json.loads(said)["cudnn_fmha_backend_config"][field] for field in fields))
             for shapes, name, said in calls}
    print(json.dumps(sorted(found)))


@pytest.mark.aot
def test_a_packed_step_calls_cudnn_on_its_documents(gpu_compiler_environment):
    """A pipeline with ZeRO 3 and tensor parallelism, head dim 256, a window: microbatches of 2 rows, 4 query heads and 1 kv head a device,
    7 documents a row with padding."""
    program = subprocess.run(
        [sys.executable, "-c", "import test_attention; test_attention.main()"], cwd=Path(__file__).parent, capture_output=True, text=True,
        env=gpu_compiler_environment | {"PYTHONPATH": str(Path(jaxmeg.__file__).parents[1])}, timeout=600)
    assert program.returncode == 0, program.stderr[-3000:]
    q, kv, said = "bf16[2,4,256,256]", "bf16[2,1,256,256]", ["PADDING_CAUSAL", 100, 7]
    assert json.loads(program.stdout.splitlines()[-1]) == [
        ["fmhaSoftmax", q, f"f32[{2 * 7},4,256]", "u8[0]", *said], ["fmhaSoftmaxBackward", q, kv, kv, "u8[0]", *said]]
