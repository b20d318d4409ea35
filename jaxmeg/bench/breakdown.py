"""Kernel time by class: what each kernel of a profile is, by a table of rules on its name and on the instruction it comes from.

The first rule that fits decides. Names say what a library's kernel is; for the compiler's own fusions the named scopes of the step do
(`hlo.Origin.source`), so that a fusion counts where it comes from. What no rule knows is listed as such. Plain values only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxmeg.hlo import Origin

UNCLASSIFIED = "unclassified"
LOUD = 0.02  # share of unclassified time from which it is said
MOST_SHOWN = 20


class Kernel(NamedTuple):
    """One run of one kernel on one device."""

    device: str
    name: str
    instruction: str
    """The HLO instruction that it belongs to; empty for what the runtime does by itself."""
    start: float
    """ns on the clock of the profile."""
    end: float
    own: float
    """ns, without what other kernels of the same line did meanwhile."""


class Rule(NamedTuple):
    """kind: the class. The pattern is looked for in the kernel's name, in the opcode or custom call of its instruction, or in its path
    of scopes; a scope must equal one whole part of that path. moves: any instruction that only moves values."""

    kind: str
    where: Literal["kernel", "op", "target", "scope", "path", "moves", "dot"]
    pattern: str = ""


RULES: tuple[Rule, ...] = (
    Rule("loops", "op", r"^(while|conditional|call)$"),  # on a CPU these run themselves
    Rule("collectives", "kernel", r"nccl|nvshmem"),
    Rule("collectives", "op", r"^(all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-|send|recv)"),
    Rule("attention", "target", r"fmha"),
    Rule("attention", "kernel", r"sdpa|fmha|flash_?(attn|attention|fwd|bwd|fprop|bprop)"),
    Rule("attention", "scope", r"attention"),
    Rule("matmul", "dot"),
    Rule("matmul", "target", r"gemm|matmul"),
    Rule("matmul", "kernel", r"^nvjet|gemm|cutlass|wgmma|splitK_?reduce"),
    Rule("copies", "kernel", r"memcpy|memset"),
    Rule("copies", "moves"),
    Rule("optimizer", "scope", r"update|clip"),
    Rule("norm", "scope", r"norm"),
    Rule("loss", "scope", r"head"),
    Rule("embedding", "scope", r"embed(\.backward)?"),
    Rule("elementwise", "scope", r"layer|forward\.stage|backward\.stage"),
    Rule("pipeline", "scope", r"microbatch|tick\..*"),  # which slot is read and written, what is handed on
    # what stands outside of the microbatches: the gradients' norm, what is kept of old and new state
    Rule("optimizer", "path", r"^jit\(step\)/"),
)

# Operand types in the names of cuBLAS's kernels: for kernels whose instruction is not known.
_DTYPES = ((r"nvjet_(sm\d+_)?qq|e4m3|e5m2|f8", "fp8"), (r"nvjet_(sm\d+_)?t|bf16", "bf16"), (r"nvjet_(sm\d+_)?h|f16|hgemm|h\d+gemm", "fp16"),
           (r"tf32", "tf32"), (r"f32|sgemm", "fp32"))
_HLO_DTYPES = {"f32": "fp32", "f16": "fp16", "f64": "fp64"}


def classify(kernel: str, origin: Origin | None) -> str:
    """The class of a kernel: "matmul bf16", "norm", ..., or UNCLASSIFIED. origin: of its instruction; None where it has none."""
    known = origin or Origin(op="")
    for rule in RULES:
        if _fits(rule, kernel, known):
            return f"matmul {_operands(kernel, known)}" if rule.kind == "matmul" else rule.kind
    return UNCLASSIFIED


def scopes(path: str) -> set[str]:
    """The parts of an op_name, also those that a derivative has wrapped: "jit(step)/jvp(norm)/mul" has jit, step, jvp, norm and mul."""
    return set(re.split(r"[/():;]+", path)) - {""}


def _fits(rule: Rule, kernel: str, origin: Origin) -> bool:
    if rule.where == "scope":
        return any(re.fullmatch(rule.pattern, part) for part in scopes(origin.source))
    if rule.where == "moves":
        return origin.moves
    if rule.where == "dot":
        return bool(origin.dot)
    text = {"kernel": kernel, "op": origin.op, "target": origin.target, "path": origin.source}[rule.where]
    return bool(re.search(rule.pattern, text, 0 if rule.where == "path" else re.IGNORECASE))


def _operands(kernel: str, origin: Origin) -> str:
    """The type of a matmul's operands: "bf16", "fp8", "fp32" (which a GPU may run in TF32)."""
    if origin.dot:
        first = origin.dot.split(",")[0]
        return "fp8" if first.startswith("f8") else _HLO_DTYPES.get(first, first)
    return next((name for pattern, name in _DTYPES if re.search(pattern, kernel, re.IGNORECASE)), "of unknown type")


def breakdown(kernels: Sequence[Kernel], origins: Mapping[str, Origin], steps: int) -> dict[str, Any]:
    """Milliseconds a step by class, on average over the devices, largest first; how long any kernel ran; the longest kernels.

    Kernels of several streams may run at once: then the classes add up to more than `busy_ms`. `exposed_collectives_ms` is time in
    which nothing but collectives ran.
    """
    devices = {kernel.device for kernel in kernels}
    share = 1e6 * steps * max(1, len(devices))  # ns of all devices and steps -> ms a step
    classes: dict[str, float] = defaultdict(float)
    longest: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    kinds = [classify(kernel.name, origins.get(kernel.instruction)) for kernel in kernels]
    for kernel, kind in zip(kernels, kinds, strict=True):
        classes[kind] += kernel.own / share
        row = longest[kind, kernel.instruction, kernel.name]
        row[0] += kernel.own / share
        row[1] += 1 / (steps * len(devices))
    total = sum(classes.values())
    busy = _union(kernels)
    alone = busy - _union([k for k, kind in zip(kernels, kinds, strict=True) if kind != "collectives"])
    top = sorted(longest.items(), key=lambda item: -item[1][0])[:MOST_SHOWN]
    return {
        "steps": steps, "total_ms": total, "busy_ms": busy / share, "exposed_collectives_ms": alone / share,
        "classes": dict(sorted(classes.items(), key=lambda item: -item[1])),
        "unclassified_share": classes.get(UNCLASSIFIED, 0.0) / total if total else 0.0,
        "longest": [{"ms": ms, "runs": runs, "class": kind, "instruction": instruction, "kernel": name[:100],
                     "source": _tail(origins.get(instruction))} for (kind, instruction, name), (ms, runs) in top]}


def warning(found: Mapping[str, Any]) -> str | None:
    """What has to be said of a breakdown, in one line, or None."""
    if not found["classes"]:
        return "the profile holds no kernels: nothing is known of where the time goes"
    if found["unclassified_share"] <= LOUD:
        return None
    names = [row["instruction"] or row["kernel"] for row in found["longest"] if row["class"] == UNCLASSIFIED][:5]
    return (f"{found['unclassified_share']:.1%} of the kernel time is unclassified ({', '.join(names)}): the shares of the classes are not "
            "to be trusted; add rules to jaxmeg/bench/breakdown.py")


def _tail(origin: Origin | None) -> str:
    return origin.source[-80:] if origin else ""


def _union(kernels: Sequence[Kernel]) -> float:
    """ns in which at least one of the kernels ran, summed over devices."""
    total = 0.0
    for device in {kernel.device for kernel in kernels}:
        end = float("-inf")
        for start, stop in sorted((k.start, k.end) for k in kernels if k.device == device):
            total += max(0.0, stop - max(start, end))
            end = max(end, stop)
    return total
