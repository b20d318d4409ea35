"""The real train step compiled for eight H200s that are not there: kernels, traffic, memory, and what is updated in place.

The closed forms of traffic and memory are those of `traffic.py`; what the compiler is free to choose has a stated bound.
This file is also the program that compiles: `python -c "import test_aot; test_aot.main(...)"`, with the GPU compiler.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from traffic import Case, Traffic, found, memory, traffic

from jaxmeg import hlo
from jaxmeg.ops.vocab import default_chunks

LLAMA = Case(embed=4096, heads=32, kv_heads=8, head_dim=128, mlp=14_336, vocab=128_256, seq=4096, rows=1, bf16=True)
LLAMA_8B = replace(LLAMA, layers=32, pp=4, tp=2, zero=1, microbatches=16, remat="selective")
CASES = {
    "zero 3, 1f1b": replace(LLAMA, layers=8, pp=2, dp=2, tp=2, zero=3, microbatches=4),
    "interleaved": replace(LLAMA, layers=16, pp=4, tp=2, zero=1, microbatches=8, schedule="interleaved", chunks=2),
    "zero 3, dp": replace(LLAMA, layers=4, dp=8, zero=3, microbatches=2),
    "zero 3, dp, written out": replace(LLAMA, layers=4, dp=8, zero=3, microbatches=2, scan_layers=False),
    "fp8": replace(LLAMA, layers=2, microbatches=1, fp8=True),
    "8B, 1f1b": LLAMA_8B,
    "8B, interleaved": replace(LLAMA_8B, schedule="interleaved", chunks=2),
}
GIB = 2**30


# ---------------------------------------------------------------- in the process that compiles
def main(names: list[str]) -> None:
    """Compiles the named cases and prints what there is to say about each, as JSON."""
    from jaxmeg.aot import compile_train_step, gpu_devices
    from jaxmeg.bench.breakdown import UNCLASSIFIED, classify

    facts = {}
    for name in names:
        case = CASES[name]
        _, compiled = compile_train_step(case.config(), gpu_devices("h200", case.devices))
        text, sizes = compiled.as_text() or "", compiled.memory_analysis()
        assert sizes
        program = hlo.read(text, case.mesh_shape)
        facts[name] = {
            "moved": listed(found(program)),
            "custom_calls": program.custom_calls,
            "conditionals": program.conditionals,
            "dots": sorted(program.dots),
            "moved_in_loops": sorted(moved_in_loops(text, 1_000_000)),
            "arguments": sizes.argument_size_in_bytes,
            "donated": sizes.alias_size_in_bytes,
            "temporaries": sizes.temp_size_in_bytes,
            "unclassified": [f"{kernel}: {origin.source}" for kernel, origin in hlo.origins(text).items()
                             if origin.op in ("copy", "custom-call", "fusion") and origin.target != "AllocateBuffer"
                             and classify(kernel, origin) == UNCLASSIFIED],
        }
    print(json.dumps(facts))


def listed(traffic: Traffic) -> list[list]:
    """Bytes by op and axes, as JSON has them. How many collectives share an instruction is the compiler's business."""
    return sorted([op, list(axes), total] for (op, axes), (_, total) in traffic.items())


def moved_in_loops(text: str, limit: int) -> Iterator[str]:
    """Copies and transposes of more than `limit` elements in the bodies of loops: "copy f32[128,4096]".

    Those are instructions of their own, or the whole of a fusion; a part of a fusion that computes something is not one.
    """
    heads = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", re.M | re.S)
    lines = re.compile(r"^ *(ROOT )?%?\S+ = (\S+) ([a-z][\w\-]*)\(%?([\w.\-]*)", re.M)
    bodies = dict(heads.findall(re.sub(r"/\*index=\d+\*/", "", text)))
    within, todo = set(), re.findall(r" body=%?([\w.\-]+)", text)
    while todo:  # loops inside of loops are bodies too; calls and async wrappers belong to the loop
        name = todo.pop()
        if name not in within:
            within.add(name)
            todo += re.findall(r" (?:call|async-start)\(.*(?:to_apply|calls)=%?([\w.\-]+)", bodies[name])

    def size(shape: str) -> int:
        return prod(int(n) for n in re.findall(r"\d+", shape[shape.find("[") : shape.find("]")]))

    for name in within:
        for line in bodies[name].splitlines():
            if not (instruction := lines.match(line)) or size(instruction[2]) <= limit:
                continue
            op, called = instruction[3], re.search(r"calls=%?([\w.\-]+)", line)
            if op == "fusion" and called:
                inside = {at[0]: at for at in re.findall(r"%?(\S+) = \S+ ([a-z][\w\-]*)\(%?([\w.\-]*)", bodies[called[1]])}
                root = next((r for r in lines.findall(bodies[called[1]]) if r[0]), None)
                if root and root[2] in ("copy", "transpose") and inside.get(root[3], ("", "", ""))[1] in ("parameter", "convert"):
                    op = root[2]
            if op.removesuffix("-start") in ("copy", "transpose"):
                yield f"{op} {instruction[2].split('{')[0]}"


# ---------------------------------------------------------------- in the test
# What stays in a loop by the compiler's choice: the gradient of one activation, once a layer. Never a ring, a gradient
# buffer, a weight or a table; but with layers written out three gradient buffers, once a microbatch where there are several.
MOVED_IN_LOOPS = {"zero 3, dp": ["copy bf16[1,4096,4096]"],
                  "zero 3, dp, written out": ["copy f32[4,32,128,512]", "copy f32[4,4096,1792]", "copy f32[4,4096,1792]"]}
# At ZeRO 3, gathers of the embedding and the head: per use. With 2 stages the one warm-up tick shares the first tick's.
TABLE_GATHERS = {"zero 3, 1f1b": (5, 4), "zero 3, dp": (2, 2), "zero 3, dp, written out": (2, 2)}


def compiled_facts(environment: dict[str, str], *names: str) -> dict[str, dict]:
    """What `main` says about the named cases. The process finds the package where this one did."""
    run = subprocess.run(
        [sys.executable, "-c", f"import test_aot; test_aot.main({list(names)!r})"],
        env=environment | {"PYTHONPATH": str(Path(hlo.__file__).parents[1])},
        cwd=Path(__file__).parent, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


def expected_facts(name: str) -> dict:
    case = CASES[name]
    parts = memory(case)
    return {
        "moved": listed(traffic(case, *TABLE_GATHERS.get(name, (1, 1)), update=True)),
        "custom_calls": {"__cudnn$fmhaSoftmax": case.layer_runs, "__cudnn$fmhaSoftmaxBackward": case.layer_runs},
        "conditionals": 0,
        "dots": ["bf16,bf16->bf16", "bf16,bf16->f32"],  # nothing that a GPU would multiply in TF32
        "moved_in_loops": MOVED_IN_LOOPS.get(name, []),
        "unclassified": [],
        "arguments": parts["state"] + parts["batch"],
        "donated": parts["state"],
    }


def parts_of_temporaries(case: Case) -> dict[str, int]:
    return {name: memory(case)[name] for name in ("gradients", "weights", "ring", "inboxes")}


def vocabulary_work(case: Case) -> int:
    """Bytes that the head needs at a time: logits in fp32, their gradient in bf16, the table's gradient in fp32; at ZeRO 3
    both tables, gathered in bf16."""
    rows = case.vocab // (case.pp * case.tp)
    chunks = default_chunks(case.seq, rows)
    return case.seq // chunks * rows * (4 + 2) + rows * case.embed * (4 + (2 + 2) * (case.zero == 3))


@pytest.mark.aot
def test_layouts(gpu_compiler_environment):
    """A ZeRO-3 pipeline, an interleaved pipeline, and ZeRO 3 without tensor or pipeline parallelism; that also with layers written
    out, where weights must be gathered as often and held no longer."""
    # GiB: the last two hold both tables' gradients at a time
    slack = {"zero 3, 1f1b": 0.15, "interleaved": 0.15, "zero 3, dp": 0.65, "zero 3, dp, written out": 0.65}
    facts = compiled_facts(gpu_compiler_environment, *slack)
    for name, fact in facts.items():
        work = fact.pop("temporaries") - sum(parts_of_temporaries(CASES[name]).values())
        assert fact == expected_facts(name), name
        needed = vocabulary_work(CASES[name])
        least = 0.9 if CASES[name].scan_layers else 0.8  # it may lie where the ring was
        assert least * needed <= work <= needed + slack[name] * GIB, (name, work / GIB, needed / GIB)


# GiB on each of 8 devices of: fp32 gradients, bf16 weights, ring, inboxes; then everything else that is temporary
MEMORY_8B = {
    "8B, 1f1b": ((3.74, 1.87, 7.89, 0.06), 0.8),  # 7 slots of 8 layers
    "8B, interleaved": ((3.74, 1.87, 6.20, 0.06), 0.8),  # 11 slots of 4 layers
}


@pytest.mark.aot
def test_memory_of_an_8b_model_on_4_stages(gpu_compiler_environment):
    """32 layers, sequences of 4096, 16 microbatches of one row, selective: what is temporary is what the layout says."""
    facts = compiled_facts(gpu_compiler_environment, *MEMORY_8B)
    for name, (sizes, bound) in MEMORY_8B.items():
        case, fact = CASES[name], facts[name]
        parts = parts_of_temporaries(case)
        assert tuple(round(size / GIB, 2) for size in parts.values()) == sizes
        work = fact.pop("temporaries") - sum(parts.values())
        assert fact == expected_facts(name), name
        assert 0.9 * vocabulary_work(case) <= work <= bound * GIB, (name, work / GIB)
        # A token and layer keeps its input, gate and up, the attention's output and log-sum-exp
        D, F, heads = 4096, 14_336, 32 * 128
        kept = (D + 2 * F + heads) * 2 + 32 * 4
        slots, layers = (7, 8) if case.chunks == 1 else (11, 4)
        assert parts["ring"] == slots * layers * 4096 * kept // case.tp


@pytest.mark.aot
def test_every_product_is_fp8(gpu_compiler_environment):
    """Forward, dx and dW of the 7 matrices of a layer and of the head: e4m3 by e4m3 forward, e5m2 by e4m3 backward, dW and logits in
    fp32. The backward pass asks for sums that are promoted to fp32 (`highest`)."""
    case, fact = CASES["fp8"], compiled_facts(gpu_compiler_environment, "fp8")["fp8"]
    products = 3 * (7 * case.layer_runs + default_chunks(case.seq, case.vocab))
    assert fact["custom_calls"] == {"__cublas$lt$matmul$f8": products, "__cudnn$fmhaSoftmax": case.layer_runs,
                                    "__cudnn$fmhaSoftmaxBackward": case.layer_runs}
    assert fact["dots"] == ["f8e4m3fn,f8e4m3fn->bf16", "f8e4m3fn,f8e4m3fn->f32", "f8e4m3fn,f8e5m2->f32 highest",
                            "f8e5m2,f8e4m3fn->bf16 highest", "f8e5m2,f8e4m3fn->f32 highest"]
    assert fact["conditionals"] == 0
    # Weights and activations are turned where they are quantised. What is copied: the residual stream, to which a product adds itself.
    assert fact["moved_in_loops"] == ["copy bf16[1,4096,4096]", "copy bf16[4096,4096]"]


def test_what_is_moved_in_loops_is_found():
    """The reader of copies, on a text with one of each kind: only what moves a whole array inside of a loop counts."""
    assert sorted(moved_in_loops(TEXT, 1_000_000)) == ["copy f32[2000,1000]", "copy f32[4000,1000]", "transpose f32[1000,3000]"]


TEXT = """HloModule m
%turn (p: f32[3000,1000]) -> f32[1000,3000] {
  %p = f32[3000,1000]{1,0} parameter(0)
  %convert.1 = f32[3000,1000]{1,0} convert(%p)
  ROOT %transpose.1 = f32[1000,3000]{1,0} transpose(%convert.1), dimensions={1,0}
}
%computes (p: f32[3000,1000]) -> f32[3000,1000] {
  %p.1 = f32[3000,1000]{1,0} parameter(0)
  %add.1 = f32[3000,1000]{1,0} add(%p.1, %p.1)
  ROOT %copy.1 = f32[3000,1000]{1,0} copy(%add.1)
}
%inner (t: (f32[4000,1000])) -> (f32[4000,1000]) {
  %t = (f32[4000,1000]{1,0}) parameter(0)
  %get.1 = f32[4000,1000]{1,0} get-tuple-element(%t), index=0
  %copy.2 = f32[4000,1000]{1,0} copy(%get.1)
  ROOT %tuple.1 = (f32[4000,1000]{1,0}) tuple(%copy.2)
}
%condition (t: (f32[4000,1000])) -> pred[] {
  ROOT %true = pred[] constant(true)
}
%body (s: (f32[2000,1000], f32[10,10])) -> (f32[2000,1000], f32[10,10]) {
  %s = (f32[2000,1000]{1,0}, f32[10,10]{1,0}) parameter(0)
  %get.2 = f32[2000,1000]{1,0} get-tuple-element(%s), index=0
  %copy.3 = f32[2000,1000]{1,0} copy(%get.2), metadata={op_name="jit(step)/while"}
  %copy.4 = f32[10,10]{1,0} copy(%get.2)
  %fusion.1 = f32[1000,3000]{1,0} fusion(%get.2), kind=kInput, calls=%turn
  %fusion.2 = f32[3000,1000]{1,0} fusion(%get.2), kind=kLoop, calls=%computes
  %while.1 = (f32[4000,1000]{1,0}) while(%get.2), condition=%condition, body=%inner
  ROOT %tuple.2 = (f32[2000,1000]{1,0}, /*index=1*/f32[10,10]{1,0}) tuple(%copy.3, %copy.4)
}
ENTRY %main (x: f32[5000,1000]) -> f32[5000,1000] {
  %x = f32[5000,1000]{1,0} parameter(0)
  %copy.5 = f32[5000,1000]{1,0} copy(%x)
  %while.2 = (f32[2000,1000]{1,0}, f32[10,10]{1,0}) while(%x), condition=%condition, body=%body
  ROOT %copy.6 = f32[5000,1000]{1,0} copy(%x)
}
"""
