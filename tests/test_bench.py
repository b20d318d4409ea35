"""The benchmark: what is asked for, the form of results, the page, bad input, and a run on the CPU."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxmeg.bench import page, report, schema
from jaxmeg.bench.breakdown import Kernel, breakdown
from jaxmeg.bench.case import read_plan
from jaxmeg.bench.measure import _peak, one_line
from jaxmeg.cli import ConfigError
from jaxmeg.record.memory import Usage

ROOT = Path(__file__).parents[1]


# ---------------------------------------------------------------- what is asked for
def test_cases_stand_on_top_of_the_command_line(tmp_path):
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text('full: "--remat full --group remat"\nlong: "--seq_len 64 --steps 3"\nplain:\n')
    plan = read_plan(["--model", "toy", "--seq_len", "32", "--steps", "5", "--sweep", str(sweep), "--peers", "ceiling,transformers",
                      "--also", "big: --global_batch 64 --breakdown"])
    assert [(c.name, c.group, c.steps, c.config.layout.remat, c.config.data.seq_len, c.config.data.global_batch, c.breakdown)
            for c in plan.cases] == [("full", "remat", 5, "full", 32, 32, False), ("long", "", 3, "none", 64, 32, False),
                                     ("plain", "", 5, "none", 32, 32, False), ("big", "", 5, "none", 32, 64, True)]
    assert plan.peers == ("ceiling", "transformers") and all(c.roof and not c.real and c.warmup == 3 for c in plan.cases)
    first, second = read_plan(["--model", "toy", "--no-roof", "--breakdown", "--name", "base", "--also", "x: --real --no-breakdown"]).cases
    assert [(c.name, c.real, c.roof, c.breakdown) for c in (first, second)] == [("base", False, False, True), ("x", True, False, False)]
    assert read_plan(["--model", "toy"]).cases[0].name == "toy, 32 x 128"
    assert read_plan(["--steps", "500"]).cases[0].config.train.steps == 503  # the reader of real rows ends there


@pytest.mark.parametrize(("words", "said"), [
    (["--steps", "0"], "--steps=0 is out of range: use 1 or more"),
    (["--warmup", "0"], "--warmup=0 is out of range: use 1 or more"),
    (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
    (["--modle", "toy"], "unknown key modle"),
    (["--model", "toy", "--also", "remat full"], '--also remat full: write "NAME: OPTIONS"'),
    (["--also", "a: --remat wild --seq_len x"], "case a: data.seq_len=x has the wrong type"),
    (["--also", "a: --out b"], "case a: --out belongs to the command, not to a case"),
    (["--also", 'a: --data "b'], "case a:  --data \"b is not a line of options"),
    (["--also", "a: --steps 2", "--also", "a: --steps 3"], "two cases are called a: give each a name of its own"),
    (["--peers", "ceiling,nemo"], "--peers nemo is not known: use ceiling, transformers or maxtext"),
    (["--sweep", "no.yaml"], "--sweep no.yaml: cannot be read"),
    (["--sweep", "{list}"], "holds no cases: write lines like"),
    (["--sweep", "{nested}"], "case a: {'b': 1} is not a line of options"),
    (["--model.module", "a:b", "--model.loss", "a:c"], "the bench times the decoder alone"),
    (["--distributed.num_processes", "2"], "the bench runs in one process"),
])
def test_bad_input_is_one_line(words, said, tmp_path):
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "nested.yaml").write_text("a: {b: 1}\n")
    with pytest.raises(ConfigError) as error:
        read_plan([re.sub(r"^\{(\w+)\}$", rf"{tmp_path}/\1.yaml", word) for word in words])
    assert any(said in line for line in error.value.lines) and all("\n" not in line for line in error.value.lines)


# ---------------------------------------------------------------- the form and the page
def a_run(**known):
    case = schema.empty_case("a", "remat", "jaxmeg", 10, 3) | {
        "step_s": {"median": 0.5, "p5": 0.4, "p95": 0.6, "steps": 10, "warmup": 3}, "tokens_per_s": 65536.0, "mfu": 0.5, "compile_s": 30.0,
        "workload": {"layers": 8, "seq_len": 8192, "rows": 4, "devices": 1, "mesh": "one device"},
        "roof": {"seconds": 0.4, "share": 0.8, "note": None,
                 "pieces": [{"name": "qkv", "form": "dx", "times": 8.0, "ms": 1.5, "tflops": 700.0}]},
        "memory": {"allocator_peak_bytes": 70 * 2**30, "compiler_bytes": 2**30, "note": None}, "loss": {"first": 11.0, "last": 9.0},
        "breakdown": breakdown([Kernel("0", "nvjet_tst_1", "mm", 0, 4e6, 4e6)], {}, 1), "whole": {"x": 1}}
    versions = {"git": None, "host": "h", "started": "2026-12-01T00:00:00+00:00", "devices": {"NVIDIA H200": 1}, "driver": "NVRM 580.159 x",
                "packages": {"jax": "0.11.2"}}
    failed = schema.empty_case("b", "remat", "jaxmeg", 10, 3) | {"error": "Out | of memory"}
    return report.run_record(versions, 989.0, "abc", [case | known, failed])


def test_a_run_has_the_form():
    assert schema.run_problems(a_run()) == []
    run = a_run()
    assert "host" not in run["machine"] and run["commit"] == "abc"
    assert json.loads(json.dumps(run, allow_nan=False)) == run


@pytest.mark.parametrize(("change", "said"), [
    (lambda c: c.pop("mfu"), "run.cases[0].mfu is missing"),
    (lambda c: c.update(mfu="0.5"), "run.cases[0].mfu='0.5' is not int or float or null"),
    (lambda c: c.update(mfu=True), "run.cases[0].mfu='True' is not"),
    (lambda c: c["step_s"].pop("p95"), "run.cases[0].step_s.p95 is missing"),
    (lambda c: c.update(memory=3), "run.cases[0].memory is not an object"),
    (lambda c: c.update(error="x"), "run.cases[0]: a case has either an error or a step time"),
    (lambda c: c["step_s"].update(median=None), "run.cases[0]: a case has either an error or a step time"),
])
def test_a_run_without_the_form_is_refused(change, said):
    run = a_run()
    change(run["cases"][0])
    assert len(found := schema.run_problems(run)) == 1 and found[0].startswith(said)


def test_a_peak_of_an_earlier_case_is_not_this_ones():
    def usage(*peaks):
        return [Usage(0, peak, None) for peak in peaks]

    assert _peak(usage(5, 7), usage(9, 8)) == {"allocator_peak_bytes": 9, "note": None}
    assert _peak(usage(5, 9), usage(9, 9))["allocator_peak_bytes"] is None and "before this one" in _peak(usage(9), usage(9))["note"]
    assert _peak(None, None)["note"] == "the allocator keeps no account here"


@pytest.mark.parametrize(("error", "line"), [
    (ConfigError(["a=1: b", "c=2: d"]), "a=1: b; c=2: d"),
    (ValueError("first\nsecond"), "ValueError: first"),
    (RuntimeError(), "RuntimeError: no message"),
])
def test_an_error_is_one_line(error, line):
    assert one_line(error) == line


def test_lines_for_people():
    first, *more = report.lines(a_run(notes=["n"])["cases"][0])
    assert first == ("a: 0.5 s a step (p5-p95 0.4 s-0.6 s of 10), 65,536 tokens/s, MFU 0.500, 0.800 of the roof, peak 70.0 GiB, "
                     "the compiler says 1.0 GiB, compiled in 30.0 s, loss 11.000 to 9.000")
    assert more == ["    kernels, ms a step: matmul bf16 4.00", "    note: n"]
    assert report.line(a_run()["cases"][1]) == "b: failed: Out | of memory"


def test_the_page_is_what_the_json_says():
    content = json.loads((ROOT / "docs/performance.json").read_text())
    assert schema.problems(content) == []
    assert (ROOT / "docs/performance.md").read_text() == page.render(content)


def test_the_page_of_a_run(tmp_path):
    path = tmp_path / "performance.json"
    page.append(path, a_run())
    page.append(path, a_run(group="fp8"))
    assert "whole" not in path.read_text() and len(json.loads(path.read_text())["runs"]) == 2
    text = (tmp_path / "performance.md").read_text()
    assert text.count("\n## remat\n") == 2 and text.count("\n## fp8\n") == 1
    assert "\n1 x NVIDIA H200, commit abc, 2026-12-01, jax 0.11.2, driver 580.159.\n" in text
    assert "\n| a | 4 x 8,192 | 0.5 s | 0.4 s to 0.6 s | 65,536 | 0.500 | 0.800 | 70.0 | 30 s | - | 11.000 to 9.000 |\n" in text
    assert "\n| b | 0 x 0 | Out \\| of memory |  |" in text
    assert "\n| matmul bf16 | 4.00 |\n" in text and "\n| qkv, dx | 8 | 1.500 | 700 |\n" in text


def test_ours_beside_a_peer(tmp_path):
    """The best of ours with as many rows, in tokens/s."""
    run = a_run()
    ours, failed = run["cases"]
    slower = ours | {"name": "slower", "tokens_per_s": 60000.0}
    other = ours | {"name": "other", "tokens_per_s": 99999.0, "workload": ours["workload"] | {"rows": 8}}
    theirs = ours | {"name": "theirs", "kind": "transformers", "tokens_per_s": 50000.0}
    text = page.render({"runs": [run | {"cases": [slower, ours, other, theirs, failed]}], "tried": []})
    assert "\n- a (4 rows) has 1.311 times the tokens/s of theirs\n" in text and text.count("times the tokens/s") == 1


def test_results_from_elsewhere_are_added(tmp_path, capsys):
    path, result = tmp_path / "performance.json", tmp_path / "result.json"
    result.write_text(json.dumps(a_run()))
    assert page.main([str(result), str(result)], path) == 0 and len(json.loads(path.read_text())["runs"]) == 2
    before = path.read_text()
    result.write_text(json.dumps(a_run() | {"cases": 3}))
    with pytest.raises(SystemExit):
        page.main([str(result)], path)
    assert "cases='3' is not list" in capsys.readouterr().err and path.read_text() == before


@pytest.mark.parametrize(("content", "said"), [
    ("{", "is not JSON"), ("[]", 'it is not {"runs": [...], "tried": [...]}'), ('{"runs": [{}], "tried": []}', "runs[0].schema is missing"),
    ('{"runs": [], "tried": [{"change": "x", "predicted": null, "measured": null, "verdict": "great", "where": ""}]}', "verdict='great'"),
])
def test_a_broken_file_is_refused(content, said, tmp_path, capsys):
    path = tmp_path / "performance.json"
    path.write_text(content)
    with pytest.raises(SystemExit) as end:
        page.append(path, a_run())
    assert end.value.code == 2 and said in capsys.readouterr().err and path.read_text() == content


# ---------------------------------------------------------------- the whole, on the CPU
@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Three cases in one process: made-up rows with a breakdown, real rows, and one that can't run. (run, record folder, ended)"""
    folder = tmp_path_factory.mktemp("bench")
    words = "--model toy --model.num_layers 1 --global_batch 4 --seq_len 32 --emulate 1 --steps 4 --warmup 2 --lr 1e-2 --optim.warmup 1"
    command = [sys.executable, "scripts/bench.py", *words.split(), "--name", "base", "--breakdown", "--also", "real: --real",
               "--also", "bad: --model.num_heads 7", "--peers", "maxtext", "--out", str(folder / "out.json"),
               "--record", str(folder / "performance.json")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    return json.loads((folder / "out.json").read_text()), folder, ended


def test_a_run_on_the_cpu(whole):
    run, folder, ended = whole
    assert ended.returncode == 1 and "Traceback" not in ended.stderr and schema.run_problems(run) == []
    base, real, bad, maxtext = run["cases"]
    for case in (base, real):
        step = case["step_s"]
        assert case["error"] is None and 0 < step["p5"] <= step["median"] <= step["p95"]
        assert case["tokens_per_s"] == pytest.approx(4 * 32 / step["median"], rel=1e-4)
        assert case["mfu"] is case["roof"]["share"] is None and "no MFU and no roof: the peak of cpu is not known" in case["notes"]
        assert case["loss"]["first"] > case["loss"]["last"] and case["memory"]["compiler_bytes"] > 0
    assert abs(base["loss"]["first"] - math.log(256)) < 0.7
    assert base["config"] == {"model.preset": "toy", "model.num_layers": 1, "data.global_batch": 4, "data.seq_len": 32, "optim.lr": 1e-2,
                              "optim.warmup": 1, "emulate": 1}
    assert real["data"]["wait_share"] > 0 and base["data"]["wait_share"] is None
    assert bad["error"].startswith("model.num_kv_heads=2 does not divide model.num_heads=7")
    assert maxtext["error"].startswith("not run: maxtext is not installed")
    assert "base: " in ended.stderr and "bad: failed: " in ended.stderr and "maxtext, 4 x 32: not run" in ended.stderr
    assert len(json.loads((folder / "performance.json").read_text())["runs"]) == 1
    assert "| base | 4 x 32 |" in (folder / "performance.md").read_text()


def test_the_breakdown_on_the_cpu(whole):
    found = whole[0]["cases"][0]["breakdown"]
    assert {"attention", "copies", "elementwise", "embedding", "loss", "matmul fp32", "norm", "optimizer"} <= set(found["classes"])
    assert found["unclassified_share"] < 0.02, found
    assert sum(found["classes"].values()) == pytest.approx(found["total_ms"], rel=1e-4)
