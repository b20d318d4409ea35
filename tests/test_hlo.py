"""The reader of compiled programs against short texts, in the words of the GPU compiler.

They hold what the CPU compiler does not print: async collectives, library matmuls, every form of device groups. Whole
programs whose traffic is known are in test_hlo_compiled.py.
"""

import pytest

from jaxmeg import hlo

SHAPE = {"pp": 2, "rep": 1, "dp": 2, "ep": 1, "cp": 1, "tp": 2}
F32, BF16 = 4, 2  # bytes


def module(*instructions: str, head: str = ", is_scheduled=true", before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in instructions)
    return f"HloModule test{head}\n\n{before}\nENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n"


ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def reduced(attributes: str, shape: dict[str, int] | None = None) -> hlo.Collective:
    text = module(
        "%p = f32[64]{0} parameter(0)",
        f"ROOT %all-reduce = f32[64]{{0}} all-reduce(%p), channel_id=1, {attributes}, to_apply=%add",
        before=ADD,
    )
    (found,) = hlo.read(text, shape or SHAPE).collectives
    return found


GLOBAL = "use_global_device_ids=true"


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tp",)),
        ("{{5,4},{7,6},{1,0},{3,2}}", ("tp",)),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("dp",)),
        ("{{0,1,4,5},{2,3,6,7}}", ("pp", "tp")),
        ("{{0,1,2,3,4,5,6,7}}", ("pp", "dp", "tp")),
        ("{}", ("pp", "dp", "tp")),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", ()),
        ("[4,2]<=[8]", ("tp",)),
        ("[2,4]<=[8]", ("dp", "tp")),
        ("[1,8]<=[8]", ("pp", "dp", "tp")),
        ("[4,2]<=[2,4]T(1,0)", ("pp",)),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("pp", "tp")),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("dp",)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ("tp",)),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ("pp", "tp")),
        ("mesh['a'=8] {'a'}", ("pp", "dp", "tp")),
        ("mesh['a'=4,'b'=2], device_ids=([2,2,2]T(0,2,1)) {'a'}", ("pp", "tp")),
        ("mesh['a'=4,'b'=2], device_ids=(0,2,4,6,1,3,5,7) {'b'}", ("dp",)),  # pairs 0,2  4,6  1,3  5,7
        ("mesh['a'=8] {'a':(1)2}", ("pp",)),
        ("mesh['a'=8] {'a':(2)2}", ("dp",)),
        ("mesh['a'=8] {'a':(2)4}", ("dp", "tp")),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ("pp", "tp")),
        ("{{0,3},{1,2},{4,7},{5,6}}", ("?",)),  # pairs along a diagonal of dp and tp
        ("{{0,1,2},{3,4,5},{6,7}}", ("?",)),
        ("{{0,1}}", ("?",)),  # the other devices take no part
        ("{{0,1},{2,3,4,5,6,7}}", ("?",)),
        ("{{0,1,2,3},{4,5}}", ("?",)),
    ],
)
def test_groups_in_every_form_are_recognised_as_axes(groups, axes):
    assert reduced(f"replica_groups={groups}, {GLOBAL}").axes == axes


def test_group_size_and_wire_bytes():
    four = reduced(f"replica_groups=[2,4]<=[8], {GLOBAL}")
    assert (four.group_size, four.bytes, four.wire_bytes) == (4, 256, 2 * 256 * 3 // 4)
    alone = reduced(f"replica_groups=[8,1]<=[8], {GLOBAL}")
    assert (alone.group_size, alone.axes, alone.wire_bytes) == (1, (), 0)


def test_a_group_of_replicas_means_all_their_partitions():
    assert reduced("replica_groups={{0}}").axes == ("pp", "dp", "tp")


def test_axes_follow_the_mesh_that_is_given():
    assert reduced(f"replica_groups={{{{0,1}},{{2,3}},{{4,5}},{{6,7}}}}, {GLOBAL}", {"x": 4, "y": 2}).axes == ("y",)
    assert reduced(f"replica_groups=[4,2]<=[2,4]T(1,0), {GLOBAL}", {"x": 4, "y": 2}).axes == ("?",)


@pytest.mark.parametrize(
    ("pairs", "axes", "wire"),
    [
        ("{{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}", ("pp",), 256),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("pp",), 256),
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("dp", "tp"), 256),
        ("{{0,0},{2,4},{4,2},{6,6},{1,1},{3,5},{5,3},{7,7}}", ("pp", "dp"), 256),
        ("{{0,0},{1,1}}", (), 0),
    ],
)
def test_permutes_span_the_axes_their_messages_cross(pairs, axes, wire):
    text = module(
        "%p = f32[64]{0} parameter(0)",
        f"ROOT %permute = f32[64]{{0}} collective-permute(%p), channel_id=1, source_target_pairs={pairs}",
    )
    (found,) = hlo.read(text, SHAPE).collectives
    assert (found.op, found.axes, found.wire_bytes) == ("collective-permute", axes, wire)


def test_send_counts_once_and_host_transfers_do_not():
    pairs = "frontend_attributes={_xla_send_recv_source_target_pairs={{0,4},{1,5},{2,6},{3,7}}}"
    text = module(
        "%p = bf16[64]{0} parameter(0)",
        "%after = token[] after-all()",
        f"%recv = (bf16[64]{{0}}, u32[], token[]) recv(%after), channel_id=1, {pairs}",
        f"%send = (bf16[64]{{0}}, u32[], token[]) send(%p, %after), channel_id=1, {pairs}",
        "%recv-done = (bf16[64]{0}, token[]) recv-done(%recv), channel_id=1",
        "%send-done = token[] send-done(%send), channel_id=1",
        "%host = (bf16[64]{0}, u32[], token[]) send(%p, %after), channel_id=2, is_host_transfer=true",
    )
    (found,) = hlo.read(text, SHAPE).collectives
    assert (found.op, found.axes, found.dtype, found.bytes) == ("send", ("pp",), "bf16", 64 * BF16)


PAIRS = f"channel_id=1, replica_groups={{{{0,1}},{{2,3}},{{4,5}},{{6,7}}}}, {GLOBAL}"
ASYNC = 'backend_config={"collective_backend_config":{"is_sync":false,"is_pipelined":false}}'
BEFORE = (
    ADD
    + """
%gemm_fusion (x: bf16[64,64], y: bf16[64,64]) -> bf16[64,64] {
  %x = bf16[64,64]{1,0} parameter(0)
  %y = bf16[64,64]{1,0} parameter(1)
  ROOT %dot = bf16[64,64]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%loop_fusion (z: bf16[64,64]) -> bf16[64,64] {
  %z = bf16[64,64]{1,0} parameter(0)
  ROOT %negate = bf16[64,64]{1,0} negate(%z)
}

%scatter_wrapped (u: f32[64,64]) -> f32[32,64] {
  %u = f32[64,64]{1,0} parameter(0)
  ROOT %reduce-scatter = f32[32,64]{1,0} reduce-scatter(%u), """
    + PAIRS
    + """, dimensions={0}, to_apply=%add
}
"""
)
MATMUL = "%m = bf16[64,64]{1,0} fusion(%p, %p), kind=kCustom, calls=%gemm_fusion"
NEGATE = "%m = bf16[64,64]{1,0} fusion(%p), kind=kLoop, calls=%loop_fusion"
CUBLAS = '%m = (bf16[64,64]{1,0}, s8[1024]{0}) custom-call(%p, %p), custom_call_target="__cublas$lt$matmul"'
ATTENTION = '%m = (bf16[64,64]{1,0}, u8[0]{0}) custom-call(%p, %p, %p), custom_call_target="__cudnn$fmhaSoftmax"'
GATHER = (
    f"%start = (bf16[64,64]{{1,0}}, bf16[128,64]{{1,0}}) all-gather-start(%p), {PAIRS}, dimensions={{0}}, {ASYNC}",
    "%done = bf16[128,64]{1,0} all-gather-done(%start)",
    ("all-gather", "bf16", 128 * 64 * BF16),
)
REDUCE = (
    f"%start = (bf16[64,64]{{1,0}}, f32[64]{{0}}) all-reduce-start(%p, %q), {PAIRS}, to_apply=%add, {ASYNC}",
    "%done = (bf16[64,64]{1,0}, f32[64]{0}) all-reduce-done(%start)",
    ("all-reduce", "bf16+f32", 64 * 64 * BF16 + 64 * F32),
)
SCATTER = (
    f"%start = ((f32[64,64]{{1,0}}), f32[32,64]{{1,0}}) reduce-scatter-start(%r), {PAIRS}, dimensions={{0}}, "
    f"to_apply=%add, {ASYNC}",
    "%done = f32[32,64]{1,0} reduce-scatter-done(%start)",
    ("reduce-scatter", "f32", 64 * 64 * F32),
)
WRAPPED = (
    f"%start = ((f32[64,64]{{1,0}}), f32[32,64]{{1,0}}, u32[]) async-start(%r), calls=%scatter_wrapped, {ASYNC}",
    "%done = f32[32,64]{1,0} async-done(%start), calls=%scatter_wrapped",
    ("reduce-scatter", "f32", 64 * 64 * F32),
)
PERMUTE = (
    f"%start = (bf16[64,64]{{1,0}}, bf16[64,64]{{1,0}}, u32[], u32[]) collective-permute-start(%p), channel_id=1, "
    f"source_target_pairs={{{{0,1}},{{1,0}}}}, {ASYNC}",
    "%done = bf16[64,64]{1,0} collective-permute-done(%start)",
    ("collective-permute", "bf16", 64 * 64 * BF16),
)


def async_text(start: str, middle: tuple[str, ...], done: str, head: str = ", is_scheduled=true") -> str:
    inputs = ("%p = bf16[64,64]{1,0} parameter(0)", "%q = f32[64]{0} parameter(1)", "%r = f32[64,64]{1,0} parameter(2)")
    return module(*inputs, start, *middle, done, head=head, before=BEFORE)


@pytest.mark.parametrize("kind", [GATHER, REDUCE, SCATTER, WRAPPED, PERMUTE])
@pytest.mark.parametrize(
    ("middle", "overlapped"), [(MATMUL, True), (CUBLAS, True), (ATTENTION, True), (NEGATE, False), ("", False)]
)
def test_async_collectives_say_whether_a_matmul_hides_them(kind, middle, overlapped):
    start, done, (op, dtype, size) = kind
    (found,) = hlo.read(async_text(start, (middle,), done), SHAPE).collectives
    assert (found.op, found.axes, found.dtype, found.bytes) == (op, ("tp",), dtype, size)
    assert found.overlapped is overlapped


def test_a_matmul_outside_of_the_window_hides_nothing():
    start, done, _ = GATHER
    for text in (
        async_text(f"{MATMUL}\n  {start}", (NEGATE.replace("%m", "%n"),), done),
        async_text(start, (NEGATE.replace("%m", "%n"),), f"{done}\n  {MATMUL}"),
    ):
        (found,) = hlo.read(text, SHAPE).collectives
        assert found.overlapped is False


def test_async_in_form_only_is_synchronous():
    start, done, _ = GATHER
    (found,) = hlo.read(
        async_text(start.replace('"is_sync":false', '"is_sync":true'), (MATMUL,), done), SHAPE
    ).collectives
    assert found.overlapped is None
    (found,) = hlo.read(async_text(start, (MATMUL,), done, head=""), SHAPE).collectives
    assert found.overlapped is None  # without a schedule the order of the text means nothing


def test_a_start_whose_done_is_elsewhere_keeps_its_bytes_and_its_window():
    start, _, (op, _, size) = GATHER
    (found,) = hlo.read(async_text(start, (MATMUL,), ""), SHAPE).collectives
    assert (found.op, found.bytes, found.overlapped) == (op, size, True)


def test_an_update_stands_between_start_and_done():
    start, _, _ = WRAPPED
    update = "%update = ((f32[64,64]{1,0}), f32[32,64]{1,0}, u32[]) async-update(%start), calls=%scatter_wrapped"
    done = "%done = f32[32,64]{1,0} async-done(%update), calls=%scatter_wrapped"
    (found,) = hlo.read(async_text(start, (update, MATMUL), done), SHAPE).collectives
    assert found.overlapped is True


def counting_loop(first: str = "0", step: str = "1", limit: str = "9", test: str = "LT", note: str = "") -> str:
    before = f"""{ADD}
%compare_fusion (i0: s32[]) -> pred[] {{
  %i0 = s32[] parameter(0)
  %limit = s32[] constant({limit})
  ROOT %lt = pred[] compare(%i0, %limit), direction={test}
}}

%condition (c: (s32[], f32[64])) -> pred[] {{
  %c = (s32[], f32[64]{{0}}) parameter(0)
  %ci = s32[] get-tuple-element(%c), index=0
  ROOT %cf = pred[] fusion(%ci), kind=kLoop, calls=%compare_fusion
}}

%step_fusion (i1: s32[], by: s32[]) -> s32[] {{
  %i1 = s32[] parameter(0)
  %by = s32[] parameter(1)
  ROOT %next = s32[] add(%i1, %by)
}}

%body (b: (s32[], f32[64])) -> (s32[], f32[64]) {{
  %b = (s32[], f32[64]{{0}}) parameter(0)
  %bi = s32[] get-tuple-element(%b), index=0
  %bx = f32[64]{{0}} get-tuple-element(%b), index=1
  %one = s32[] constant({step})
  %bn = s32[] fusion(%bi, %one), kind=kLoop, calls=%step_fusion
  %sent = f32[64]{{0}} all-reduce(%bx), {PAIRS}, to_apply=%add
  ROOT %bt = (s32[], f32[64]{{0}}) tuple(%bn, %sent)
}}
"""
    return module(
        "%p = f32[64]{0} parameter(0)",
        f"%first = s32[] constant({first})",
        "%copy = s32[] copy(%first)",
        "%state = (s32[], f32[64]{0}) tuple(%copy, %p)",
        f"ROOT %while.1 = (s32[], f32[64]{{0}}) while(%state), condition=%condition, body=%body{note}",
        before=before,
    )


@pytest.mark.parametrize(
    ("loop", "trips"),
    [
        (dict(), 9),
        (dict(first="2"), 7),
        (dict(step="4"), 3),
        (dict(first="9"), 0),
        (dict(note=', backend_config={"known_trip_count":{"n":"4"},"dynamic_variables":[]}'), 4),
    ],
)
def test_trip_counts_come_from_the_note_or_from_the_constants(loop, trips):
    program = hlo.read(counting_loop(**loop), SHAPE)
    assert program.loops == ((trips,),)
    assert [c.count for c in program.collectives] == [trips]


@pytest.mark.parametrize("loop", [dict(test="NE"), dict(step="0"), dict(limit="-1", test="GT", step="-1", first="5")])
def test_no_trip_count_is_guessed(loop):
    with pytest.raises(ValueError, match=r"loop while\.1, trip count unknown, holds sent"):
        hlo.read(counting_loop(**loop), SHAPE)


def test_a_counter_that_comes_from_elsewhere_is_no_counter():
    text = counting_loop().replace(
        "%bi = s32[] get-tuple-element(%b), index=0",
        "%other = (s32[], f32[64]{0}) optimization-barrier(%b)\n  %bi = s32[] get-tuple-element(%other), index=0",
    )
    with pytest.raises(ValueError, match="trip count unknown"):
        hlo.read(text, SHAPE)


def test_a_computation_that_is_called_twice_counts_twice():
    called = (
        BEFORE
        + f"""
%shared (s: f32[64]) -> f32[64] {{
  %s = f32[64]{{0}} parameter(0)
  %k = f32[64]{{0}} custom-call(%s), custom_call_target="kernel"
  ROOT %sent = f32[64]{{0}} all-reduce(%k), {PAIRS}, to_apply=%add
}}
"""
    )
    text = module(
        "%p = f32[64]{0} parameter(0)",
        '%empty = f32[64]{0} custom-call(), custom_call_target="AllocateBuffer"',
        "%first = f32[64]{0} call(%p), to_apply=%shared",
        "ROOT %second = f32[64]{0} call(%first), to_apply=%shared",
        before=called,
    )
    program = hlo.read(text, SHAPE)
    assert program.totals("op")["all-reduce",].count == 2
    assert program.custom_calls == {"kernel": 2}  # memory that nobody fills is no kernel
    assert program.instructions == 4 + 3 + 3 + 2 + 2 + 3  # of the text: entry, add, gemm, loop, wrapped, shared


def test_dots_are_counted_by_types_and_precision():
    def gemm(name: str, config: str, kind: str = "f32") -> str:
        return (
            f"%{name} = ({kind}[64,64]{{1,0}}, s8[4194304]{{0}}) custom-call(%{kind}, %{kind}), "
            f'custom_call_target="__cublas$lt$matmul", backend_config={{"gemm_backend_config":{{"alpha_real":1,'
            f'"precision_config":{{"operand_precision":[{config}],"algorithm":"ALG_UNSET"}},"epilogue":"DEFAULT"}}}}'
        )

    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    text = module(
        "%f32 = f32[64,64]{1,0} parameter(0)",
        "%bf16 = bf16[64,64]{1,0} parameter(1)",
        "%f8 = f8e4m3fn[64,64]{1,0} parameter(2)",
        f"%d1 = f32[64,64]{{1,0}} dot(%bf16, %bf16), {dims}",
        f"%d2 = f32[64,64]{{1,0}} dot(%f32, %f32), {dims}, operand_precision={{highest,highest}}",
        f"%d3 = f32[64,64]{{1,0}} dot(%f32, %f32), {dims}, algorithm=dot_bf16_bf16_f32_x3",
        gemm("g1", '"DEFAULT","DEFAULT"'),
        gemm("g2", '"HIGHEST","HIGHEST"'),
        gemm("g3", '"DEFAULT","DEFAULT"', "bf16"),
        '%g4 = (bf16[64,64]{1,0}, s8[8]{0}) custom-call(%f8, %f8, %f32), custom_call_target="__cublas$lt$matmul$f8"',
    )
    assert hlo.read(text, SHAPE).dots == {
        "bf16,bf16->f32": 1,
        "f32,f32->f32 highest": 2,
        "f32,f32->f32 dot_bf16_bf16_f32_x3": 1,
        "f32,f32->f32": 1,
        "bf16,bf16->bf16": 1,
        "f8e4m3fn,f8e4m3fn->bf16": 1,
    }


def test_shapes_of_operands_comments_and_tiled_layouts_do_not_confuse_it():
    text = module(
        '%p = bf16[64,64]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="f(x) = {y" source_file="a, calls=%b"}',
        "%q = pred[64]{0} parameter(1)",
        "%s = (pred[64]{0}, /*index=1*/bf16[64,64]{1,0:T(8,128)(2,1)}) all-reduce(pred[64]{0} %q, "
        f"/*index=1*/bf16[64,64]{{1,0:T(8,128)(2,1)}} %p), {PAIRS}, to_apply=%add",
        f"%t = (pred[64]{{0}}, /*index=1*/pred[64]{{0}}) all-reduce(%q, /*index=1*/%q), {PAIRS}, to_apply=%add",
        "ROOT %g = pred[64]{0} get-tuple-element((pred[64]{0}, bf16[64,64]{1,0:T(8,128)(2,1)}) %s), index=0",
        before=ADD,
    )
    found = [(c.dtype, c.bytes) for c in hlo.read(text, SHAPE).collectives]
    assert found == [("pred+bf16", 64 + 64 * 64 * BF16), ("pred", 64 + 64)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("func.func public @main() { return }", "no ENTRY computation"),
        (module("%p = f32[] parameter(0)", head=", num_partitions=4"), "compiled for 4 devices, mesh .* has 8"),
        (module("%p = f32[] parameter(0)", "%q is not an instruction"), "no instruction: %q is not"),
        (
            module(
                "%p = f32[] parameter(0)", "%r = f32[] all-reduce(%p), replica_groups=<new>, to_apply=%add", before=ADD
            ),
            "device groups in an unknown form: replica_groups=<new>",
        ),
    ],
)
def test_what_it_cannot_read_is_an_error(text, message):
    with pytest.raises(ValueError, match=message):
        hlo.read(text, SHAPE)
