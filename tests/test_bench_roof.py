"""The roof: its list of work against the counted FLOPs of the step, exactly, and the loops that time it."""

import json
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmeg import hlo
from jaxmeg.bench import roof
from jaxmeg.bench.work import AttentionWork, Matmul, pieces, undivided
from jaxmeg.cli import read
from jaxmeg.config import resolve
from jaxmeg.flops import train_flops_per_token
from jaxmeg.ops.attention import causal_attention

ROOT = Path(__file__).parents[1]


# ---------------------------------------------------------------- the roof's list of work
def sizes(words: str, devices: int = 1):
    config = read(words.split())
    return config, resolve(config, devices)


@pytest.mark.parametrize(("words", "devices"), [
    ("--model llama3.1-8b --model.num_layers 8 --seq_len 8192 --global_batch 4", 1),
    ("--model llama3.2-1b --seq_len 4096 --global_batch 4", 1),  # tied
    ("--model gpt2 --seq_len 1024 --global_batch 3", 1),  # two MLP matrices, an odd vocabulary
    ("--model toy --model.num_kv_heads 1 --seq_len 24 --global_batch 6 --microbatch 2", 1),
    ("--model toy --model.sliding_window 5 --seq_len 16 --global_batch 4", 1),
    ("--model toy --model.head_dim 12 --seq_len 7 --global_batch 5", 1),  # heads wider than the model
    ("--model llama3.1-8b --seq_len 5000 --global_batch 5 --microbatch 5", 1),  # no piece of the head has a round size
    ("--model llama3.1-70b --mesh tp=8,dp=2 --seq_len 4096 --global_batch 8 --microbatch 2", 16),
    ("--model llama3.1-8b --mesh pp=4,tp=2,rep=2 --seq_len 4096 --global_batch 32", 16),
    ("--model toy --model.num_layers 6 --mesh pp=4,dp=2 --seq_len 16 --global_batch 16", 8),  # stages of two lengths
    ("--model toy --mesh pp=2,tp=2 --layout.rules {file} --seq_len 16 --global_batch 8", 4),  # the vocabulary on the last stage alone
])
def test_the_flops_of_all_pieces_are_the_counted_ones_of_the_step(words, devices, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text("vocab: [tp]\n")
    config, resolved = sizes(words.format(file=rules), devices)
    assert undivided(resolved) is None
    done = sum(piece.flops * piece.times for piece in pieces(resolved, config.data.seq_len)) * devices
    assert done == train_flops_per_token(resolved.arch, config.data.seq_len) * config.data.seq_len * config.data.global_batch


def test_shapes_of_the_8b_step():
    _, resolved = sizes("--model llama3.1-8b --model.num_layers 8 --seq_len 8192 --global_batch 4")
    found = pieces(resolved, 8192)
    forward = {p.name: (p.tokens, p.inputs, p.outputs, p.times) for p in found if p.form == "forward"}
    assert forward == {
        "qkv": (32768, 4096, 6144, 8), "out": (32768, 4096, 4096, 8), "gate and up": (32768, 4096, 28672, 8),
        "down": (32768, 14336, 4096, 8), "head": (8192, 4096, 128256, 4)}
    assert [p for p in found if isinstance(p, AttentionWork)] == [AttentionWork(4, 8192, 32, 8, 128, Fraction(8))]
    assert sorted(p.form for p in found if isinstance(p, Matmul)) == ["dw"] * 5 + ["dx"] * 5 + ["forward"] * 5


@pytest.mark.parametrize(("words", "devices", "why"), [
    ("--model llama3.1-8b --mesh tp=16", 16, "mesh.tp=16 does not divide kv_heads (8)"),
    ("--model gpt2 --mesh tp=2", 2, "2 ranks do not divide the vocabulary (50257)"),
    ("--model toy --mesh tp=2 --layout.rules {file}", 2, "rule mlp: () has tp ranks do the same work"),
])
def test_no_roof_where_devices_do_the_same_work(words, devices, why, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text("mlp: []\n")
    assert undivided(sizes(words.format(file=rules), devices)[1]) == why


# ---------------------------------------------------------------- the roof's loops
def arrays(shapes):
    return [jax.random.normal(jax.random.key(i), x.shape, x.dtype) for i, x in enumerate(shapes)]


@pytest.mark.parametrize("form", ["forward", "dx", "dw"])
def test_a_matmul_of_the_roof_is_that_of_the_step(form):
    product, shapes = roof.matmul(Matmul("m", form, 6, 4, 5, Fraction(1)), "bf16")
    a, b = arrays(shapes)
    x, y = np.asarray(a, np.float32), np.asarray(b, np.float32)
    wanted = {"forward": lambda: x @ y, "dx": lambda: x @ y.T, "dw": lambda: x.T @ y}[form]()
    got = product(a, b)
    assert got.dtype == (jnp.float32 if form == "dw" else jnp.bfloat16) and got.shape == wanted.shape
    np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=2e-2, atol=2e-2)


def test_attention_of_the_roof_is_forward_and_backward():
    gradients, shapes = roof.attention(AttentionWork(2, 8, 4, 2, 8, Fraction(1)), "fp32", "xla")
    q, k, v, dout = arrays(shapes)
    wanted = jax.grad(lambda *x: jnp.sum(causal_attention(*x, None, "xla") * dout), (0, 1, 2))(q, k, v)
    for got, want in zip(gradients(q, k, v, dout), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_no_turn_of_a_loop_is_left_out():
    """The product stands in the body of the loop, whose number of turns is in the program, and one value goes from turn to turn."""
    product, shapes = roof.matmul(Matmul("m", "forward", 64, 64, 64, Fraction(1)), "fp32")
    operands = arrays(shapes)
    compiled = jax.jit(roof.loop(product, 7)).lower(jnp.zeros((64, 64)), *operands).compile()
    x, w = map(np.asarray, operands)
    last = np.zeros((64, 64))
    for _ in range(7):
        x = np.concatenate([[np.sin(last[0, 0])], x.ravel()[1:]]).reshape(64, 64)
        last = x @ w
    text = compiled.as_text()
    assert text and hlo.read(text, {"x": 1}).loops == ((7,),)
    (body,) = re.findall(r"body=%?([\w.\-]+)", text)
    blocks = dict(re.findall(r"^%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    called = re.findall(r"calls=%?([\w.\-]+)", blocks[body])
    assert any(" dot(" in block for block in [blocks[body], *(blocks[name] for name in called)])
    np.testing.assert_allclose(compiled(jnp.zeros((64, 64)), *operands), last, rtol=1e-3, atol=1e-3)


def compile_loops() -> None:
    """In a process with the GPU compiler: the loops at the 8B shape for one H200, and prints what their bodies hold."""
    from jax.sharding import NamedSharding, PartitionSpec

    from jaxmeg.aot import gpu_devices
    from jaxmeg.mesh import build_mesh

    mesh = build_mesh(dict.fromkeys(("pp", "rep", "dp", "ep", "cp", "tp"), 1), gpu_devices("h200", 1))
    found, everywhere = {}, NamedSharding(mesh, PartitionSpec())
    for piece in pieces(sizes("--model llama3.1-8b --seq_len 8192 --global_batch 4")[1], 8192)[:3]:
        found[piece.form] = roof.matmul(piece, "bf16")
    found["attention"] = roof.attention(AttentionWork(4, 8192, 32, 8, 128, Fraction(8)), "bf16", "cudnn")
    for name, (one, operands) in found.items():
        results = jax.eval_shape(one, *operands)
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), (results, *operands))
        text = jax.jit(roof.loop(one, 50), donate_argnums=0).trace(*placed).lower(lowering_platforms=("cuda",)).compile().as_text()
        (body,) = re.findall(r"body=%?([\w.\-]+)", text)
        lines = dict(re.findall(r"^%?([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S))[body]
        kernels = re.findall(r"%(\S+) = [^\n]* (?:fusion|custom-call|copy)\(", lines)
        print(json.dumps([name, hlo.read(text, dict(mesh.shape)).loops, sorted(re.sub(r"[.\d]+$", "", kernel) for kernel in kernels)]))


@pytest.mark.aot
def test_the_loops_of_the_roof_hold_nothing_else(gpu_compiler_environment):
    """Compiled for the H200: a turn is the product or the two kernels of attention, one value put in place, and the loop's counter."""
    run = subprocess.run(
        [sys.executable, "-c", "import test_bench_roof; test_bench_roof.compile_loops()"], cwd=Path(__file__).parent, timeout=600,
        env=gpu_compiler_environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    found = {name: (loops, kernels) for name, loops, kernels in map(json.loads, run.stdout.splitlines())}
    extra = ["loop_add_fusion", "loop_dynamic_update_slice_fusion"]
    product = ["gemm_fusion_dot_general", *extra]
    attention = ["dot_product_attention_bwd", "dot_product_attention_fwd", *extra]
    assert found == {form: ([[50]], product) for form in ("forward", "dx", "dw")} | {"attention": ([[50]], attention)}


def test_the_roof_is_the_sum_over_layers_and_pieces():
    matmul = Matmul("m", "forward", 1, 1, 1, Fraction(3, 2))
    assert roof.total([roof.Timed(matmul, 2.0), roof.Timed(matmul._replace(times=Fraction(4)), 0.5)]) == 5.0
    timed = roof.measure([matmul._replace(tokens=64, inputs=64, outputs=64)], "fp32", "xla", 1e-6)
    assert timed[0].piece.times == Fraction(3, 2) and timed[0].seconds > 0
