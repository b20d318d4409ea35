"""docs/performance.md from docs/performance.json: `python -m jaxmeg.bench.page`. Plain values only.

`python -m jaxmeg.bench.page RESULT.json ...` first adds results that `scripts/bench.py --out` has written, elsewhere perhaps.

The file holds runs of the bench and what was tried: each change with its prediction, what was measured, and what failed. A table holds
the cases of one group of one run, so that nothing is compared that was not measured side by side.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmeg.bench.case import RECORD
from jaxmeg.bench.report import MFU, ROOF, gib, seconds
from jaxmeg.bench.schema import problems, run_problems
from jaxmeg.cli import fail

HEAD = f"""\
# Speed, as measured

Made by `python -m jaxmeg.bench.page` from `docs/performance.json`; figures come from `scripts/bench.py --record`, those of before it as
said. *MFU*: {MFU}.
*Roof*: {ROOF}. Each table is of one run on one machine; a dash was not measured.
"""
COLUMNS = ("case", "rows x tokens", "step", "p5 to p95", "tokens/s", "MFU", "of the roof", "peak GiB", "compiled", "waits for data", "loss")


def render(content: Mapping[str, Any]) -> str:
    """Markdown. content: in the form that `schema.problems` checks."""
    parts = [HEAD]
    for run in content["runs"]:
        groups = list(dict.fromkeys(case["group"] for case in run["cases"]))
        for group in groups:
            cases = [case for case in run["cases"] if case["group"] == group]
            parts.append(f"## {_cell(group or 'Cases')}\n\n{_origin(run)}\n\n{_table(COLUMNS, map(_row, cases))}{_remarks(cases)}")
            parts += _breakdowns(cases) + _roofs(cases)
    tried = content["tried"]
    rows = ([row["change"], row["predicted"], row["measured"], row["verdict"], row["where"]] for row in tried)
    if tried:
        table = _table(("change", "predicted", "measured", "verdict", "where"), rows)
        parts.append(f"## What was tried\n\nA prediction is written down before it is measured, and stays.\n\n{table}")
    return "\n".join(parts)


def append(path: Path, run: Mapping[str, Any]) -> None:
    """Add a run to the file, without the whole configs, and write the page beside it. A file that is not as it should be, or a bad run,
    is refused with a line each, exit code 2, and nothing is written."""
    content = load(path) if path.exists() and path.stat().st_size else {"runs": [], "tried": []}
    cases = [{key: value for key, value in case.items() if key != "whole"} for case in run["cases"]]
    content["runs"].append({**run, "cases": cases})
    try:
        write(path, content)
    except OSError as error:
        fail([f"--record {path} cannot be written ({error.strerror}): give another file"])


def load(path: Path) -> dict[str, Any]:
    """The content of a performance file. Prints what is wrong with it and exits with 2."""
    content = _json(path)
    if found := problems(content):
        fail(f"{path}: {line}" for line in found[:10])
    return content


def write(path: Path, content: dict[str, Any]) -> None:
    """The file and its page."""
    if found := problems(content):
        fail(f"{path}: {line}" for line in found[:10])
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(render(content), encoding="utf-8")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        fail([f"{path} cannot be read ({error.strerror}): give a file that is there"])
    except ValueError as error:
        fail([f"{path} is not JSON ({error}): mend it, or leave it out"])


def _origin(run: Mapping[str, Any]) -> str:
    """What a run was measured on, in one line."""
    machine = run["machine"]
    devices = ", ".join(f"{count} x {kind}" for kind, count in machine.get("devices", {}).items())
    packages = [f"{name} {version}" for name, version in machine.get("packages", {}).items()
                if version and name in ("jax", "torch", "transformers", "nvidia-cudnn-cu13", "nvidia-cublas", "nvidia-nccl-cu13")]
    others = {f"{name} {version}" for case in run["cases"] for name, version in case.get("versions", {}).items()}
    changed = {True: ", with changes", False: "", None: ""}[run["dirty"]]
    driver = machine.get("driver")
    words = [devices, f"commit {(run['commit'] or 'not known')[:12]}{changed}", run["date"][:10], *packages, *sorted(others - {*packages}),
             driver and f"driver {_version(driver)}"]
    return " ".join([", ".join(word for word in words if word) + ".", *run["notes"]])


def _version(driver: str) -> str:
    """The number in the driver's own line, or the line."""
    return next((word for word in driver.split() if word[0].isdigit() and "." in word), driver)


def _row(case: Mapping[str, Any]) -> list[str | None]:
    size = f"{case['workload']['rows']} x {case['workload']['seq_len']:,}"
    if case["error"]:
        return [case["name"], size, case["error"], *[""] * (len(COLUMNS) - 3)]
    step, roof, memory, data, loss = (case[key] for key in ("step_s", "roof", "memory", "data", "loss"))
    spread = None if step["p5"] is None else f"{seconds(step['p5'])} to {seconds(step['p95'])}"
    peak = memory["allocator_peak_bytes"] or memory["compiler_bytes"]
    said = "" if memory["allocator_peak_bytes"] else " (compiler)"
    return [case["name"], size, seconds(step["median"]), spread, _number(case["tokens_per_s"], ",.0f"), _number(case["mfu"], ".3f"),
            _number(roof["share"], ".3f"), None if peak is None else f"{gib(peak)}{said}",
            None if case["compile_s"] is None else f"{case['compile_s']:.0f} s", _number(data["wait_share"], ".2%"),
            None if loss["first"] is None else f"{loss['first']:.3f} to {loss['last']:.3f}"]


def _remarks(cases: Sequence[Mapping[str, Any]]) -> str:
    """How far ours is ahead of each peer of the same size, and what the cases have to say."""
    found = [f"- {case['name']}: {note}\n" for case in cases for note in [*case["notes"], case["roof"]["note"]] if note]
    measured = [case for case in cases if case["tokens_per_s"]]
    for peer in (case for case in measured if case["kind"] != "jaxmeg"):
        ours = [case for case in measured if case["kind"] == "jaxmeg" and case["workload"] == peer["workload"]]
        if ours:
            best = max(ours, key=lambda case: case["tokens_per_s"])
            times = best["tokens_per_s"] / peer["tokens_per_s"]
            found.append(f"- {best['name']} ({best['workload']['rows']} rows) has {times:.3f} times the tokens/s of {peer['name']}\n")
    return "\n" + "".join(dict.fromkeys(found)) if found else ""


def _breakdowns(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """Kernel milliseconds by class side by side."""
    found = {case["name"]: case["breakdown"] for case in cases if case.get("breakdown")}
    kinds = list(dict.fromkeys(kind for one in found.values() for kind in one["classes"]))
    rows = [[kind, *(_number(one["classes"].get(kind, 0.0), ".2f") for one in found.values())] for kind in kinds]
    rows += [[f"*{words}*", *(_number(one[key], ".2f") for one in found.values())] for words, key in (
        ("all kernels", "total_ms"), ("any kernel runs", "busy_ms"), ("nothing but collectives runs", "exposed_collectives_ms"))]
    longest = [f"The longest kernels of {name}:\n\n" + _table(("ms a step", "runs", "class", "instruction", "kernel"), (
        [f"{row['ms']:.2f}", f"{row['runs']:g}", row["class"], row["instruction"], row["kernel"]] for row in one["longest"]))
        for name, one in found.items()]
    return [f"Kernel time, ms a step:\n\n{_table(('class', *found), rows)}", *longest] if found else []


def _roofs(cases: Sequence[Mapping[str, Any]]) -> list[str]:
    """The pieces of the roof, once a shape."""
    texts = []
    for case in cases:
        pieces = case["roof"].get("pieces")
        if pieces:
            rows = [[f"{p['name']}, {p['form']}", f"{p['times']:g}", f"{p['ms']:.3f}", f"{p['tflops']:.0f}"] for p in pieces]
            texts.append(_table(("alone", "times", "ms", "TFLOP/s"), rows))
    return [f"The pieces of the roof:\n\n{text}" for text in dict.fromkeys(texts)]


def _table(head: Sequence[str], rows: Iterable[Sequence[str | None]]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join("-" if cell is None else _cell(cell) for cell in row) + " |\n" for row in cells)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else f"{value:{form}}"


def main(argv: Sequence[str], path: Path = Path(RECORD)) -> int:
    for result in argv:
        run = _json(Path(result))
        if found := run_problems(run, result):
            fail(found[:10])
        append(path, run)
    write(path, load(path))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
