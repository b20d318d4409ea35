"""Kernels by class: on the names that real profiles and programs have, and a breakdown of a trace that is made up."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxmeg import hlo
from jaxmeg.bench.breakdown import UNCLASSIFIED, Kernel, breakdown, classify, scopes, warning
from jaxmeg.bench.profile import kernels_in, own_time
from jaxmeg.hlo import Origin

STEP = "jit(step)/while/body/eval_jaxpr/microbatch/"
FORWARD, BACKWARD = f"{STEP}forward.stage/while/body/eval_jaxpr/layer/", f"{STEP}backward.stage/while/body/eval_jaxpr/layer/"
FUSION = Origin(op="fusion")
KERNELS = [
    # libraries' kernels, as profiles of H100 and H200 have them; some without an instruction
    ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN", None, "matmul bf16"),
    ("nvjet_sm90_tst_mma_128x256x64_4_64x256x64_cga1x2x1_h_bz_TNT", None, "matmul bf16"),
    ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NTT", None, "matmul fp16"),
    ("nvjet_qqtst_128x256_128x6_2x1_v_bz_TNT", None, "matmul fp8"),
    ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas", None,
     "matmul bf16"),
    ("sm90_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x128", None, "matmul fp8"),
    ("sm80_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x16_stage4", None, "matmul tf32"),
    ("void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x>", None, "matmul of unknown type"),
    ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT",
     Origin(op="custom-call", target="__cublas$gemm", dot="bf16,bf16->f32", source=f"{BACKWARD}dot_general"), "matmul bf16"),
    ("any", Origin(op="custom-call", target="__cublas$lt$matmul$f8", dot="f8e4m3fn,f8e4m3fn->bf16"), "matmul fp8"),
    ("any", Origin(op="custom-call", target="__cublas$gemm", dot="f32,f32->f32 highest"), "matmul fp32"),
    ("gemm_fusion_dot_general_64", replace(FUSION, dot="bf16,bf16->f32", source=f"{STEP}head/jvp()/dot_general"), "matmul bf16"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0", None, "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x4x1_cga1x1x1_kernel0_0",
     Origin(op="custom-call", target="__cudnn$fmhaSoftmaxBackward", source=f"{BACKWARD}transpose(jvp(jvp()))/checkpoint/attention/x"),
     "attention"),
    ("some_helper_of_cudnn", Origin(op="custom-call", target="__cudnn$fmhaSoftmax"), "attention"),
    ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 128, 4>>", None, "attention"),
    ("loop_exponential_fusion", replace(FUSION, source=f"{FORWARD}jvp(attention)/exp"), "attention"),  # not fused into one kernel
    ("gemm_fusion_dot_7", replace(FUSION, dot="f32,f32->f32", source=f"{FORWARD}jvp(attention)/dot_general"), "attention"),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", None, "collectives"),
    ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", Origin(op="reduce-scatter-start", source=f"{BACKWARD}layer/x"), "collectives"),
    ("any", Origin(op="all-reduce", source="jit(step)/reduce_sum"), "collectives"),
    ("MemcpyD2D", None, "copies"), ("MemcpyD2H", None, "copies"), ("Memset", None, "copies"),
    # the compiler's own, as compiled for the H200 (jax 0.11.2)
    ("wrapped_convert_8", replace(FUSION, moves=True, source="jit(step)/convert_element_type"), "copies"),
    ("loop_dynamic_update_slice_fusion_17", replace(FUSION, moves=True, source=f"{FORWARD}dynamic_update_slice"), "copies"),
    ("loop_broadcast_fusion", replace(FUSION, moves=True), "copies"),
    ("copy_103", Origin(op="copy", moves=True), "copies"),
    ("fusion", replace(FUSION, source=f"{FORWARD}jvp(norm)/convert_element_type"), "norm"),
    ("input_add_reduce_fusion", replace(FUSION, source=f"{BACKWARD}transpose(jvp(jvp()))/checkpoint/norm/reduce_sum"), "norm"),
    ("loop_rsqrt_fusion", replace(FUSION, source=f"{STEP}head/jvp(norm)/rsqrt"), "norm"),
    ("input_concatenate_fusion", replace(FUSION, source=f"{FORWARD}jvp()/concatenate"), "elementwise"),
    ("loop_convert_fusion_2", replace(FUSION, source=f"{BACKWARD}transpose(jvp(jvp()))/checkpoint/convert_element_type"), "elementwise"),
    ("input_reduce_fusion_1", replace(FUSION, source=f"{STEP}head/jvp()/while/body/eval_jaxpr/reduce_max"), "loss"),
    ("input_scatter_fusion", replace(FUSION, source=f"{STEP}embed.backward/transpose(microbatch)/embed.backward/jvp()/scatter-add"),
     "embedding"),
    ("loop_multiply_fusion_17", replace(FUSION, source="jit(step)/update/mul"), "optimizer"),
    ("loop_minimum_fusion", replace(FUSION, source="jit(step)/clip/min"), "optimizer"),
    ("input_reduce_fusion_19", replace(FUSION, source="jit(step)/reduce_sum"), "optimizer"),
    ("loop_select_fusion", replace(FUSION, source="jit(step)/shard_map/mul"), "optimizer"),
    ("loop_add_fusion", replace(FUSION, source=f"{STEP}add"), "pipeline"),
    ("loop_select_fusion_9", replace(FUSION, source="jit(step)/shard_map/while/body/eval_jaxpr/tick.BG/jit(_where)/select_n"), "pipeline"),
    ("while_4", Origin(op="while", source="jit(step)/while"), "loops"),
    # what no rule knows
    ("mystery_kernel", None, UNCLASSIFIED),
    ("input_reduce_fusion", FUSION, UNCLASSIFIED),
    ("loop_add_fusion", replace(FUSION, source="jit(other)/add"), UNCLASSIFIED),
]


@pytest.mark.parametrize(("kernel", "origin", "kind"), KERNELS, ids=[f"{kernel[:40]}-{i}" for i, (kernel, *_) in enumerate(KERNELS)])
def test_the_class_of_a_kernel(kernel, origin, kind):
    assert classify(kernel, origin) == kind


def test_scopes_are_whole_words():
    assert scopes("jit(step)/transpose(jvp(norm))/mul;all_sum(tp)/x:y") == {
        "jit", "step", "transpose", "jvp", "norm", "mul", "all_sum", "tp", "x", "y"}
    assert classify("f", replace(FUSION, source=f"{FORWARD}jvp()/normalise")) == "elementwise"


PROGRAM = """\
HloModule jit_step, is_scheduled=true

%inner (p: bf16[4,8], q: bf16[8,2]) -> f32[4,2] {
  %p = bf16[4,8]{1,0} parameter(0)
  %q = bf16[8,2]{1,0} parameter(1)
  ROOT %d = f32[4,2]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%slice (p: f32[9,4], i: s32[]) -> bf16[1,4] {
  %p = f32[9,4]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %two = s32[] constant(2)
  %start = s32[] add(%i, %two)
  %zero = s32[] constant(0)
  %s = f32[1,4]{1,0} dynamic-slice(%p, %start, %zero), dynamic_slice_sizes={1,4}, metadata={op_name="jit(step)/layer/pick"}
  ROOT %c = bf16[1,4]{1,0} convert(%s)
}

%double (p: f32[1,4]) -> f32[1,4] {
  %p = f32[1,4]{1,0} parameter(0)
  ROOT %a = f32[1,4]{1,0} add(%p, %p)
}

ENTRY %main (x: bf16[4,8], w: bf16[8,2], t: f32[9,4], i: s32[]) -> f32[4,2] {
  %x = bf16[4,8]{1,0} parameter(0)
  %w = bf16[8,2]{1,0} parameter(1)
  %t = f32[9,4]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %picked = bf16[1,4]{1,0} fusion(%t, %i), kind=kLoop, calls=%slice
  %wide = f32[1,4]{1,0} convert(%picked)
  %sum = f32[1,4]{1,0} fusion(%wide), kind=kLoop, calls=%double, metadata={op_name="jit(step)/update/add"}
  %lib = (bf16[4,2]{1,0}, s8[64]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/head/dot"}
  ROOT %mm = f32[4,2]{1,0} fusion(%x, %w), kind=kOutput, calls=%inner, metadata={op_name="jit(step)/layer/dot_general"}
}
"""


def test_where_instructions_come_from():
    found = hlo.origins(PROGRAM)
    assert found["mm"] == Origin(op="fusion", dot="bf16,bf16->f32", source="jit(step)/layer/dot_general")
    assert found["lib"] == Origin(op="custom-call", target="__cublas$gemm", dot="bf16,bf16->bf16", source="jit(step)/head/dot")
    assert found["picked"] == Origin(op="fusion", moves=True, source="jit(step)/layer/pick")  # where to slice is no arithmetic
    assert found["sum"] == Origin(op="fusion", source="jit(step)/update/add")


def test_a_breakdown_of_a_small_trace():
    """Two devices, two steps; on each device a collective on a stream of its own lies beside a matmul for half of its time."""
    def kernels(device: str) -> list[Kernel]:
        at = [("nvjet_tst_1", "mm", 0, 400), ("ncclDevKernel_AllGather", "", 200, 400), ("loop_add_fusion", "sum", 700, 100),
              ("?", "", 900, 100)]
        return [Kernel(device, name, instruction, 1e6 * start, 1e6 * (start + ms), 1e6 * ms)
                for offset in (0, 10_000) for name, instruction, start, ms in [(n, i, s + offset, d) for n, i, s, d in at]]

    found = breakdown([*kernels("gpu:0"), *kernels("gpu:1")], hlo.origins(PROGRAM), 2)
    assert found["classes"] == {"matmul bf16": 400.0, "collectives": 400.0, "optimizer": 100.0, UNCLASSIFIED: 100.0}
    assert (found["total_ms"], found["busy_ms"], found["exposed_collectives_ms"]) == (1000.0, 800.0, 200.0)
    assert found["unclassified_share"] == 0.1
    assert [found["longest"][0][key] for key in ("class", "ms", "runs")] == ["matmul bf16", 400.0, 1.0]
    assert "10.0% of the kernel time is unclassified (?)" in (warning(found) or "")
    assert warning(found | {"unclassified_share": 0.02}) is None
    assert "holds no kernels" in (warning(breakdown([], {}, 2)) or "")


def test_a_loop_does_not_count_what_it_runs_again():
    events = [Kernel("0", name, name, start, end, end - start) for name, start, end in
              [("inner", 12, 20), ("while", 0, 100), ("body", 10, 50), ("body", 50, 80), ("after", 100, 130)]]
    assert [(k.name, k.own) for k in own_time(events)] == [("while", 30), ("body", 32), ("inner", 8), ("body", 30), ("after", 30)]


def test_the_lines_of_a_profile():
    """A GPU's streams, whose other lines repeat them; on a host what has an instruction."""
    def event(name, start, duration, **stats):
        return SimpleNamespace(name=name, start_ns=start, duration_ns=duration, stats=list(stats.items()))

    def line(name, *events):
        return SimpleNamespace(name=name, events=events)

    gemm, copy = event("nvjet_tst_1", 10, 5, hlo_op="dot.1", correlation_id=3), event("MemcpyD2D", 20, 2)
    gpu = SimpleNamespace(name="/device:GPU:1", lines=[line("Stream #13(Compute,MemcpyD2D)", gemm, copy), line("XLA Ops", gemm)])
    thread = line("tf_XLAEigen/1", event("dot.1", 0, 4, hlo_op="dot.1", device_ordinal=2), event("end: dot.1", 4, 1))
    host = SimpleNamespace(name="/host:CPU", lines=[thread, line("python", event("step", 0, 9))])
    assert [tuple(kernel) for kernel in kernels_in([gpu])] == [
        ("/device:GPU:1", "nvjet_tst_1", "dot.1", 10, 15, 5), ("/device:GPU:1", "MemcpyD2D", "", 20, 22, 2)]
    assert kernels_in([host]) == [Kernel("2", "dot.1", "dot.1", 0, 4, 4)]
    assert kernels_in([host, gpu]) == kernels_in([gpu])
