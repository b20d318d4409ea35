"""The form of a result, so that nothing half-written gets into docs/performance.json: what every entry has, and of which type.

A figure that was not measured is null, never absent, and its note says why. Plain values only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

VERSION = 1
Maybe = (int, float, type(None))
Count = (int, type(None))
Text = (str, type(None))

CASE: Mapping[str, Any] = {
    "name": str, "group": str,
    "kind": str,  # "jaxmeg", or the name of a peer
    "config": dict,  # what differs from the defaults, by dotted key
    "workload": {"layers": int, "seq_len": int, "rows": int, "devices": int, "mesh": str},
    "step_s": {"median": Maybe, "p5": Maybe, "p95": Maybe, "steps": Count, "warmup": Count},
    "tokens_per_s": Maybe, "tokens_per_s_per_device": Maybe,
    "mfu": Maybe,
    "roof": {"seconds": Maybe, "share": Maybe, "note": Text},
    "memory": {"allocator_peak_bytes": Maybe, "compiler_bytes": Maybe, "note": Text},
    "compile_s": Maybe,
    "data": {"kind": str, "wait_s": Maybe, "wait_share": Maybe},
    "loss": {"first": Maybe, "last": Maybe},
    "notes": list,
    "error": Text,  # one line: then nothing was measured
}
RUN: Mapping[str, Any] = {"schema": int, "date": str, "commit": Text, "dirty": (bool, type(None)), "machine": dict,
                           "notes": list, "cases": list}
TRIED: Mapping[str, Any] = {"change": str, "predicted": Text, "measured": Text, "verdict": str, "where": str}
VERDICTS = ("kept", "failed", "not measured")


def empty_case(name: str, group: str, kind: str, steps: int | None, warmup: int | None, **known: Any) -> dict[str, Any]:
    """A case of which nothing is known yet but what is given."""
    return {
        "name": name, "group": group, "kind": kind, "config": {},
        "workload": {"layers": 0, "seq_len": 0, "rows": 0, "devices": 0, "mesh": ""},
        "step_s": {"median": None, "p5": None, "p95": None, "steps": steps, "warmup": warmup},
        "tokens_per_s": None, "tokens_per_s_per_device": None, "mfu": None, "roof": {"seconds": None, "share": None, "note": None},
        "memory": {"allocator_peak_bytes": None, "compiler_bytes": None, "note": None}, "compile_s": None,
        "data": {"kind": "synthetic", "wait_s": None, "wait_share": None}, "loss": {"first": None, "last": None}, "notes": [],
        "error": None} | known


def problems(content: Any) -> list[str]:
    """What is wrong with the content of a performance file, one line each."""
    if not isinstance(content, dict) or not isinstance(content.get("runs"), list) or not isinstance(content.get("tried"), list):
        return ['it is not {"runs": [...], "tried": [...]}']
    found: list[str] = []
    for i, run in enumerate(content["runs"]):
        found += run_problems(run, f"runs[{i}]")
    for i, row in enumerate(content["tried"]):
        found += _against(row, TRIED, f"tried[{i}]")
        if isinstance(row, dict) and row.get("verdict") not in VERDICTS:
            found.append(f"tried[{i}].verdict={row.get('verdict')!r}: use one of {', '.join(VERDICTS)}")
    return found


def run_problems(run: Any, where: str = "run") -> list[str]:
    """What is wrong with one run."""
    found = list(_against(run, RUN, where))
    if found:
        return found
    if run["schema"] != VERSION:
        return [f"{where}.schema={run['schema']}: this program reads {VERSION}"]
    for i, case in enumerate(run["cases"]):
        here = f"{where}.cases[{i}]"
        wrong = list(_against(case, CASE, here))
        found += wrong
        if not wrong and (case["error"] is None) != (case["step_s"]["median"] is not None):
            found.append(f"{here}: a case has either an error or a step time")
    return found


def _against(value: Any, form: Any, where: str) -> Iterator[str]:
    if not isinstance(form, Mapping):
        kinds = form if isinstance(form, tuple) else (form,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            yield f"{where}={str(value)[:60]!r} is not {' or '.join('null' if k is type(None) else k.__name__ for k in kinds)}"
    elif not isinstance(value, dict):
        yield f"{where} is not an object"
    else:
        for key, inner in form.items():
            if key in value:
                yield from _against(value[key], inner, f"{where}.{key}")
            else:
                yield f"{where}.{key} is missing"
