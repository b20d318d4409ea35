"""The planner against what is known otherwise: published arithmetic, schedule tables, closed forms, and the compiler's own account."""

import io
import json
import math
import random
import re
import sys
from functools import cache
from pathlib import Path
from statistics import median

import jax
import numpy as np
import pytest
from planner_cases import CASES, FACTS, argv
from rich.console import Console
from traffic import F32, Case, kept_elements, memory, traffic

from jaxmeg import cli
from jaxmeg.config import Config, resolve
from jaxmeg.hardware import PEAK_TFLOPS, peak_tflops
from jaxmeg.pipeline.schedules import make_table
from jaxmeg.planner import measure as measured_plans
from jaxmeg.planner import paper, questions
from jaxmeg.planner.advice import advice, after_failure, chip_of
from jaxmeg.planner.auto import AutoError, choose
from jaxmeg.planner.chips import ChipError, known_chips, parse_cluster, read_chips
from jaxmeg.planner.leaves import placed_leaves
from jaxmeg.planner.memory import inbox_slots, kept_bytes, plan_memory, ring_slots, sizes_of
from jaxmeg.planner.search import Plan, candidates, enough, judge, search
from jaxmeg.planner.text import command
from jaxmeg.planner.traffic import transfers
from jaxmeg.setup import build
from jaxmeg.state import init_state
from jaxmeg.step import make_train_step, place_rows
from jaxmeg.validate.check import problems

ROOT = Path(__file__).parent.parent
GB = 1e9


# ---------------------------------------------------------------- what papers say
@pytest.mark.parametrize(("stage", "gigabytes"), [*enumerate((120, 31.4, 16.6, 1.9))])
def test_zero_memory_of_a_7_5b_model_on_64_gpus(stage, gigabytes):
    """Rajbhandari et al. 2020, figure 1."""
    assert float(paper.zero_bytes(7_500_000_000, stage, 64)) / GB == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(("stage", "gigabytes"), [*enumerate((112, 38.5, 26.25, 14))])
def test_zero_memory_of_a_7b_model_on_8_gpus(stage, gigabytes):
    assert float(paper.zero_bytes(7_000_000_000, stage, 8)) / GB == gigabytes


def test_limits_of_zero_and_what_it_sends():
    assert (paper.zero_limit(1), paper.zero_limit(2)) == (4, 8)
    with pytest.raises(ValueError, match="stage=3 has no limit"):
        paper.zero_limit(3)
    assert [paper.zero_sent(100, stage) for stage in (1, 2, 3)] == [200, 200, 300]
    assert paper.tensor_parallel_reductions(32) == 128


def test_the_largest_model_by_zero_3_alone_and_a_popular_mistake():
    assert paper.largest_model(80 * GB, 8) == 40_000_000_000
    assert float(paper.zero_bytes(70_000_000_000, 3, 8)) / GB == 140  # not 30: that would be 3.5 bytes a parameter on 8 GPUs


# ---------------------------------------------------------------- chips
def test_clusters_are_read_as_people_write_them():
    for text, name, count in (
            ("64xH100-80G", "H100-80G", 64), ("8 x a100-40g", "A100-40G", 8), ("h200", "H200", 1), ("4x4090", "RTX4090", 4)):
        cluster = parse_cluster(text)
        assert (cluster.chip.name, cluster.count) == (name, count)


@pytest.mark.parametrize(("text", "says"), [
    ("8xA100", "may be A100-40G or A100-80G: name one"),
    ("8xH300", "unknown chip H300: did you mean H200?"),
    ("0xH200", "0 GPUs: use 1 to"),
    ("", "is not COUNTxCHIP"),
])
def test_bad_clusters(text, says):
    with pytest.raises(ChipError, match=says):
        parse_cluster(text)


def test_the_two_tables_of_peaks_agree():
    same = {"A100-40G": "A100", "A100-80G": "A100", "H100-80G": "H100", "H200": "H200", "B200": "B200", "L40S": "L40S",
            "RTX4090": "RTX 4090"}
    assert {name: known_chips()[name].tflops["bf16"] for name in same} == {name: PEAK_TFLOPS[kind] for name, kind in same.items()}
    assert peak_tflops("NVIDIA H200") == 989


def test_a_chip_of_the_users(tmp_path):
    row = ("{memory_gib: 40, tflops: {bf16: 100}, memory_gb_s: 500, node_gpus: 4, node_link: {kind: PCIe, gb_s: 20}, "
           "network: {kind: Ethernet, gb_s: 1}, host_link_gb_s: 10}")
    path = tmp_path / "chips.yaml"
    path.write_text(f"mine: {row}\n")
    assert parse_cluster("3xMINE", read_chips(str(path))).chip.node_link.gb_s == 20
    for broken, says in (
            (row.replace("500", "-1"), "memory_gb_s=-1 is not a positive number"), (row.replace("node_gpus", "gpus"), "unknown key gpus"),
            (row.replace("bf16", "int4"), "for some of fp16, bf16 or fp8"), ("3", "holds no figures"),
            (row.replace("{kind: PCIe, gb_s: 20}", "20"), "node_link=20: write"), (row.replace("memory_gib: 40,", ""), "lacks memory_gib")):
        path.write_text(f"mine: {broken}\n")
        with pytest.raises(ChipError, match=says):
            read_chips(str(path))
    with pytest.raises(ChipError, match="cannot be read"):
        read_chips(str(tmp_path / "none.yaml"))


# ---------------------------------------------------------------- slots
def test_slots_are_those_of_the_tables():
    """Closed forms against every table that is made."""
    for name, chunks in (("gpipe", (1, 2, 3)), ("1f1b", (1,)), ("interleaved", (2, 3, 4))):
        for P in (2, 3, 4, 8):
            for V in chunks:
                for M in (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 14, 16, 17, 24):
                    table = make_table(name, P, V, M)
                    assert table.ring_slots == ring_slots(name, P, V, M), (name, P, V, M)
                    if M % P == 0 and (name != "gpipe" or V == 1):
                        assert table.forward_slots + table.backward_slots <= inbox_slots(name, P, M), (name, P, V, M)
    assert ring_slots(None, 1, 1, 8) == 1


# ---------------------------------------------------------------- memory
LAYOUTS = [
    Case(), Case(bf16=True), Case(dp=8, zero=1), Case(dp=8, zero=2, bf16=True), Case(dp=8, zero=3, bf16=True), Case(tp=4),
    Case(pp=4, tp=2, bf16=True, microbatches=8), Case(pp=2, dp=2, tp=2, zero=3, remat="selective", bf16=True),
    Case(pp=4, chunks=2, schedule="interleaved", remat="full", bf16=True, microbatches=8),
    Case(rep=2, dp=2, tp=2, zero=2, bf16=True), Case(tp=4, kv_heads=2, bf16=True),
]


def judged(case: Case):
    config = case.config()
    resolved = resolve(config, case.devices)
    leaves = placed_leaves(config, resolved)
    return config, resolved, leaves, sizes_of(config, resolved, "bf16" if case.bf16 else "fp32")


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_what_lives_for_the_whole_step_by_closed_form(case):
    """`traffic.memory` counts from a Case's numbers alone; it is held to compiled programs elsewhere."""
    config, resolved, leaves, s = judged(case)
    plan = plan_memory(config, resolved, leaves, "bf16" if case.bf16 else "fp32")
    lines = {line.name: line.bytes for line in (*plan.state, *plan.held)}
    by_hand = memory(case)
    assert lines["masters"] + lines["moments"] == by_hand["state"] - 7 * F32
    assert lines["gradients"] == by_hand["gradients"]
    assert lines["activations"] == by_hand["ring"]
    assert lines["inboxes"] == by_hand["inboxes"]
    if case.bf16:
        gathered = case.dp > 1 and case.zero in (1, 2)  # norms too, which stay fp32
        norms = case.parameters() - case.parameters(norms=False)
        assert lines["weights"] == by_hand["weights"] + F32 * norms * gathered
    assert {name: size / (F32 if name == "lse" else s.itemsize) for name, size in kept_bytes(s, case.remat).items()} == kept_elements(case)


def errors(name: str, facts: dict[str, int]) -> tuple[float, float, float]:
    """Relative errors of (total, temporaries), and the share of temporaries in the total."""
    config = cli.read(argv(name))
    resolved = resolve(config, CASES[name][0])
    plan = plan_memory(config, resolved, placed_leaves(config, resolved))
    total = sum(facts.values())
    return plan.total / total - 1, plan.temporaries / facts["temporaries"] - 1, facts["temporaries"] / total


def test_memory_against_the_compiler():
    """Total within 10%, temporaries alone within 25%, in at least 20 programs, 10 of them with temporaries over half."""
    facts = json.loads(FACTS.read_text())["cases"]
    assert facts.keys() == CASES.keys() and len(facts) >= 20
    found = {name: errors(name, facts[name]) for name in CASES}
    assert {name: error for name, (error, _, _) in found.items() if abs(error) > 0.10} == {}
    assert {name: error for name, (_, error, _) in found.items() if abs(error) > 0.25} == {}
    assert sum(share > 0.5 for _, _, share in found.values()) >= 10


# ---------------------------------------------------------------- time
def measured() -> list[tuple[Plan, float, float]]:
    """(plan, seconds of a step, peak GiB) of all our cases in docs/performance.json on chips of the table."""
    found = []
    for record in json.loads((ROOT / "docs/performance.json").read_text())["runs"]:
        ((kind, count),) = record["machine"]["devices"].items()
        for case in record["cases"]:
            if case["config"] and not case["error"]:
                options = [f"--{key}={value}" for key, value in case["config"].items()]
                plan = judge(cli.read(["--precision=bf16", *options]), parse_cluster(f"{count}x{kind.removeprefix('NVIDIA ')}"))
                found.append((plan, case["step_s"]["median"], case["memory"]["allocator_peak_bytes"] / 2**30))
    return found


def test_time_and_memory_against_measurements():
    """Median error of the time within 10%, worst within 25%; memory of the program within 10% each."""
    plans = measured()
    times = [abs(plan.speed.seconds / seconds - 1) for plan, seconds, _ in plans]
    assert len(plans) >= 8 and median(times) < 0.10 and max(times) < 0.25
    assert max(abs(plan.memory.total / 2**30 / peak - 1) for plan, _, peak in plans) < 0.10


# ---------------------------------------------------------------- traffic
@pytest.mark.parametrize("case", [case for case in LAYOUTS if case.devices > 1], ids=str)
def test_traffic_by_closed_form(case):
    """Without what the planner leaves out: three sums a token of the softmax, norms' and scalars' sums."""
    config, resolved, leaves, s = judged(case)
    sent: dict[tuple[str, str], int] = {}
    for t in transfers(s, config, resolved, leaves):
        sent[t.op, str(t.axis)] = sent.get((t.op, str(t.axis)), 0) + t.runs * t.bytes
    expected: dict[tuple[str, str], int] = {}
    gathers = (case.embeds - (case.pp > 1), case.microbatches)  # as the GPU compiler leaves them in the loops, see test_aot.py
    for (op, axes), (_, total) in traffic(case, *gathers).items():
        if len(axes) == 1 and axes[0] in ("pp", "tp", "dp", "rep"):
            expected[op, axes[0]] = expected.get((op, axes[0]), 0) + total
    for key in sent:
        if key[0] != "all-reduce":
            assert sent[key] == expected[key], key


# ---------------------------------------------------------------- search
def small(text: str = ""):
    return config_of(f"--model toy --seq_len 64 --global_batch 16 {text}")


def test_every_candidate_is_legal_and_the_given_stays():
    cluster = parse_cluster("8xH200")
    found = list(candidates(small(), cluster))
    assert len(found) == len(set(found)) > 100
    assert not [config for config in found if problems(config, 8)]
    assert {config.mesh.tp for config in found} == {1, 2, 4, 8}
    fixed = list(candidates(small("--zero 3 --mesh.tp 2 --remat full"), cluster, {"layout.zero", "mesh.tp", "layout.remat"}))
    assert fixed and {(config.layout.zero, config.mesh.tp, config.layout.remat) for config in fixed} == {(3, 2, "full")}


def test_the_ranking_is_by_speed_within_memory():
    config, cluster = config_of("--model llama3.1-8b --seq_len 4096 --global_batch 64"), parse_cluster("8xA100-80G")
    found = search(config, cluster, top=50)
    times = [plan.speed.seconds for plan in found.fitting]
    assert times == sorted(times) and all(plan.fits for plan in found.fitting)
    shown = judge(cli.read(command(found.fitting[0].config).split()[2:]), cluster)  # its command line is the same plan
    assert shown.memory == found.fitting[0].memory and shown.speed == found.fitting[0].speed


def test_where_nothing_fits_the_smallest_and_enough_gpus_are_named():
    config, cluster = config_of("--model llama3.1-70b --seq_len 4096 --global_batch 64"), parse_cluster("8xA100-80G")
    found = search(config, cluster)
    assert not found.fitting and all(not plan.fits for plan in found.nearest)
    assert str(enough(config, cluster)) == "32xA100-80G"
    # 18 bytes a parameter: 70.55e9 x 18 / 8 = 148 GiB a GPU before any activation
    assert found.nearest[0].memory.total > 70.55e9 * 18 / 8


def test_advice_is_in_the_order_people_try_and_says_what_each_comes_to():
    config = config_of("--model llama3.1-8b --seq_len 4096 --global_batch 32 --mesh dp=8 --microbatch 4")
    cluster = parse_cluster("8xH100-80G")
    before = judge(config, cluster)
    assert not before.fits
    found = advice(config, cluster)
    assert [options.split()[0] for options, _ in found[:3]] == ["--remat", "--microbatch", "--zero"], found
    for options, plan in found:  # each is the config with exactly these options
        changed = config_of(f"--model llama3.1-8b --seq_len 4096 --global_batch 32 --mesh dp=8 --microbatch 4 {options}")
        assert judge(changed, cluster).memory == plan.memory and plan.memory.total < before.memory.total
    assert any(plan.fits for _, plan in found)


def test_a_run_that_dies_of_memory_is_told_what_to_change():
    config = config_of("--model llama3.1-8b --seq_len 8192 --global_batch 64")
    told = after_failure(config, "NVIDIA H100 80GB HBM3", 79 * 2**30, 8)
    assert "GiB a GPU of 75.1 on a H100-80G" in told[0] and "activations" in told[0] and any("fits" in line for line in told[1:])
    assert chip_of("NVIDIA A100-SXM4-40GB", 39 * 2**30).name == "A100-40G" and chip_of("cpu", 0) is None
    assert after_failure(config, "cpu", 0, 8) == []


def test_fp8_is_as_decision_14_reckons():
    """8 layers of the 8B shape, 4 rows of 8,192: 343 TFLOP in layers and 103 in the head, at 683 and 1,300 TFLOP/s; 98 GB more."""
    line = "--model llama3.1-8b --model.num_layers 8 --seq_len 8192 --global_batch 4 --data.packing none --precision.fp8 true"
    plain, layers, whole = (judge(config_of(options), parse_cluster("1xH200")).speed for options in (
        line.replace(" --precision.fp8 true", ""), line, f"{line} --precision.fp8_head true"))
    faster = 343 / 683 - 343 / 1300
    assert plain.seconds - layers.seconds == pytest.approx(faster - 98 / 4090, rel=0.02)
    assert layers.seconds - whole.seconds == pytest.approx(103 / 683 - 103 / 1300, rel=0.01)
    old, same = (judge(config_of(options), parse_cluster("1xA100-80G")).speed for options in (line, line.replace("fp8 true", "fp8 false")))
    assert old.part("matmuls") == same.part("matmuls") and old.seconds > same.seconds  # has no FP8: rounding costs, and nothing is won


def test_parts_add_up():
    plan = judge(config_of("--model llama3.1-8b --seq_len 4096 --global_batch 64 --mesh pp=2,dp=2,tp=2 --zero 1 --microbatch 1"),
                 parse_cluster("8xH100-80G"))
    assert plan.memory.total == sum(line.bytes for line in plan.memory.lines)
    exposed = sum(part.seconds for part in plan.speed.parts if part.name.startswith("exposed"))
    assert exposed == pytest.approx(plan.speed.exposed) and 0 < plan.speed.mfu < 1
    # the bubble's share of the time in layers is (P-1) of M + P - 1 ticks
    layers = sum(plan.speed.part(name) for name in ("matmuls", "attention", "other kernels")) + plan.speed.part("bubble")
    assert 0 < plan.speed.part("bubble") / layers < float(plan.resolved.bubble)


# ---------------------------------------------------------------- the script
@cache
def script():
    sys.path.insert(0, str(ROOT / "scripts"))
    import plan

    return plan


def run(line: str) -> None:
    script().main(line.split())


def config_of(line: str) -> Config:
    return cli.read(line.split())


def test_the_script_prints_what_trains(capsys):
    run("--model llama3.1-8b --gpus 8xH100-80G --seq 8192 --global_batch 64 --explain")
    out = capsys.readouterr().out
    assert "python scripts/train.py --mesh" in out and "fastest of" in out and "tokens x (8,192 input + " in out
    run("--model llama3.1-8b --gpus 8xH100-80G --seq 8192 --global_batch 64 --json --top 2")
    plans = json.loads(capsys.readouterr().out)
    assert len(plans) == 2 and all(math.isclose(sum(plan["seconds"].values()), plan["step_seconds"]) for plan in plans)


@pytest.mark.parametrize(("line", "says"), [
    ("--gpus 8xH300", "unknown chip H300"),
    ("--gpus 8xH200 --model llama3.1-9b", "model.preset=llama3.1-9b is not a choice"),
    ("--gpus 8xH200 --global_batch 3 --mesh dp=8", "does not divide"),
    ("--gpus 8xH200 --top 0", "--top 0 shows nothing"),
    ("--gpus 8xH200 --measure 0", "--measure 0 runs nothing"),
    ("--gpus 8xH200 --sequence 3", "unknown key sequence"),
    ("--gpus 8xA100-80G --model llama3.1-70b --seq 4096 --global_batch 64", "nothing that is given fits 8xA100-80G"),
])
def test_mistakes_are_one_line(line, says, capsys):
    with pytest.raises(SystemExit) as stop:
        run(line)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and says in err and err.count("\n") == 1


# ---------------------------------------------------------------- the page of questions
def test_the_page_is_what_the_planner_says_and_its_figures_are_right():
    page = questions.page()
    assert page == (ROOT / "docs/planning.md").read_text(), "python -m jaxmeg.planner.questions > docs/planning.md"
    for figure in ("120 / 31.41 / 16.64 / 1.875 GB", "112 / 38.5 / 26.25 / 14 GB", "at most 4x", "at most 8x", "2 / 2 / 3 x the parameters",
                   "4 all-reduces a layer", "nothing else: 40B", "71.5 GB a GPU", "140 GB a card", "fp32 weights alone are 10.9 GB"):
        assert figure in page


@pytest.mark.parametrize(("model", "billions"), [
    ("7B", 6.74), ("13B", 13.02), ("30B", 32.53), ("70B", 70.55), ("100B", 101.3), ("175B", 174.6)])
def test_models_have_their_published_sizes(model, billions):
    """Llama 1 and 2: 6.7, 13.0, 32.5B; GPT-3: 174.6B, whose 2048 positions and 51,200 padded ids are here."""
    assert questions.parameters(model) / 1e9 == pytest.approx(billions, rel=0.003)


def test_checkpointing_decides_whether_30b_fits_and_what_wins_depends_on_the_link_and_the_batch():
    none, _, full, _ = questions.thirty()
    assert "too much" in none and "fits" in full
    lines = list(questions.tensor_or_zero())
    rates = [[float(number.replace(",", "")) for number in re.findall("(?:ZeRO 3|parallel) ([0-9,]+)", line)] for line in lines[:4]]
    (fast_few, _, slow_few, slow_many) = [zero > tensor for zero, tensor in rates]
    assert fast_few and slow_many and not slow_few


# ---------------------------------------------------------------- plans are run
def test_measured_plans_come_fastest_first_and_failures_last(monkeypatch):
    plans = search(small(), parse_cluster("8xH200"), top=3).fitting
    results = iter([{"error": None, "step_s": {"median": 2.0}}, {"error": "no room", "step_s": None},
                    {"error": None, "step_s": {"median": 1.0}}])
    asked = []

    def stand_in(case, devices):
        asked.append(case.config)
        return next(results)

    monkeypatch.setattr(measured_plans, "measure", stand_in)
    found = measured_plans.measure_plans(plans, [])
    assert asked == [plan.config for plan in plans]
    assert [(one.plan, one.seconds) for one in found] == [(plans[2], 1.0), (plans[0], 2.0), (plans[1], None)]
    console = Console(record=True, width=150, file=io.StringIO())
    measured_plans.show_measured(found, console)
    text = console.export_text()
    assert f"{plans[2].speed.tokens:,}" in text and "no room" in text


@pytest.mark.slow
def test_thirty_random_plans_run_one_update_on_emulated_devices():
    """Every kind of mesh, ZeRO, schedule, chunks, microbatch and remat that the search tries, drawn at random."""
    config = config_of("--model toy --model.num_layers 8 --seq_len 32 --global_batch 16 --precision fp32 --data.packing none")
    every = list(candidates(config, parse_cluster("8xH200")))
    drawn = random.Random(6).sample(every, 30)
    assert len({candidate.mesh for candidate in drawn}) >= 8 and {candidate.layout.zero for candidate in drawn} == {0, 1, 2, 3}
    tokens = np.random.default_rng(0).integers(0, 256, (16, 33), dtype=np.int32)
    losses = []
    for candidate in drawn:
        setup = build(candidate, jax.devices()[:8])
        rows = place_rows(setup, tokens[:, :-1], tokens[:, 1:], np.ones((16, 32), bool), setup.resolved.num_microbatches)
        state = init_state(setup, 0)
        step = make_train_step(setup).lower(state, rows).compile(compiler_options={"xla_backend_optimization_level": 0})
        losses.append(float(step(state, rows)[1].loss))
    assert losses == pytest.approx([losses[0]] * 30, abs=1e-5)


# ---------------------------------------------------------------- --mesh auto
def test_auto_keeps_what_is_given_and_says_why():
    config = config_of("--model llama3.1-8b --seq_len 4096 --global_batch 64 --zero 3")
    chosen, why = choose(config, {"layout.zero"}, "NVIDIA H100 80GB HBM3", 79 * 2**30, 8)
    assert chosen.layout.zero == 3 and not problems(chosen, 8) and len(why) == 3
    best, following = search(config, parse_cluster("8xH100-80G"), {"layout.zero"}, top=2).fitting
    assert chosen == best.config
    assert "8xH100-80G" in why[0] and f"{best.speed.tokens_per_second:,.0f} tokens/s: predicted" in why[1]
    assert f"{following.speed.seconds / best.speed.seconds - 1:.1%} slower" in why[2]
    assert "as if each were a H100-80G" in choose(small(), (), "cpu", 0, 8)[1][0]


@pytest.mark.parametrize(("line", "count", "says"), [
    ("--model toy --global_batch 7 --seq_len 7", 8, "no legal layout of 8 devices for data.global_batch=7"),
    ("--model llama3.1-70b --seq_len 4096 --global_batch 8", 8, "nothing fits 8xH100-80G"),
])
def test_auto_says_in_one_line_that_there_is_none(line, count, says):
    with pytest.raises(AutoError, match=says) as refused:
        choose(config_of(line), (), "NVIDIA H100 80GB HBM3", 79 * 2**30, count)
    assert "\n" not in str(refused.value)
