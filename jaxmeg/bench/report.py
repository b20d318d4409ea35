"""What a run of the bench says: a line a case for people, and what it ran on. Plain values only; must not know jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmeg.bench.schema import VERSION

MFU = ("model FLOPs over the peak of all devices (dense bf16): 6 a weight of a matrix and token, head counted, lookup not; attention by "
       "its causal half; nothing recomputed is counted")
ROOF = "time of the step's matmuls and attention alone, at their own shapes in the same process, over the step's time"


def line(case: Mapping[str, Any]) -> str:
    """One line for people."""
    if case["error"]:
        return f"{case['name']}: {case['error']}" if case["kind"] != "jaxmeg" else f"{case['name']}: failed: {case['error']}"
    step, roof, memory, data, loss = (case[key] for key in ("step_s", "roof", "memory", "data", "loss"))
    parts = [f"{seconds(step['median'])} a step (p5-p95 {seconds(step['p5'])}-{seconds(step['p95'])} of {step['steps']})",
             f"{case['tokens_per_s']:,.0f} tokens/s"]
    parts += [f"MFU {case['mfu']:.3f}"] if case["mfu"] is not None else []
    parts += [f"{roof['share']:.3f} of the roof"] if roof["share"] is not None else []
    parts += [f"peak {gib(memory['allocator_peak_bytes'])} GiB"] if memory["allocator_peak_bytes"] else []
    parts += [f"the compiler says {gib(memory['compiler_bytes'])} GiB"] if memory["compiler_bytes"] else []
    parts += [f"compiled in {case['compile_s']:.1f} s"] if case["compile_s"] is not None else []
    parts += [f"waits for data {data['wait_share']:.2%} of it"] if data["wait_share"] is not None else []
    parts.append(f"loss {loss['first']:.3f} to {loss['last']:.3f}")
    return f"{case['name']}: " + ", ".join(parts)


def lines(case: Mapping[str, Any]) -> list[str]:
    """The line, the classes of a breakdown, and what has to be said."""
    found = case.get("breakdown")
    classes = [", ".join(f"{kind} {ms:.2f}" for kind, ms in found["classes"].items())] if found else []
    return [line(case), *(f"    kernels, ms a step: {text}" for text in classes), *(f"    note: {note}" for note in case["notes"])]


def run_record(versions: Mapping[str, Any], peak_tflops: float | None, commit: str | None, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """A run in the form of `schema.RUN`. versions: of `record.folder.versions_record`; commit: as the user says, for code that is no
    checkout."""
    git = versions["git"] or {"commit": commit, "dirty": None}
    machine = {key: value for key, value in versions.items() if key not in ("host", "git", "started", "processes")}
    return _rounded({"schema": VERSION, "date": versions["started"], **git, "machine": machine | {"peak_tflops": peak_tflops},
                     "definitions": {"mfu": MFU, "roof": ROOF}, "notes": [], "cases": cases})


def _rounded(value: Any) -> Any:
    """The same with six digits a float: no clock here has more."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def gib(size: int) -> str:
    return f"{size / 2**30:.1f}" if size >= 2**30 else f"{size / 2**30:.2g}"


def seconds(value: float) -> str:
    return f"{value:.4g} s" if value >= 0.1 else f"{value * 1e3:.4g} ms"
