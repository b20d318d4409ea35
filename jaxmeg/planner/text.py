"""Plans as people read them: the ranking, and one layout with memory, time and traffic by line. The one place that words a plan."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from jaxmeg.arch import num_params, resolve_arch
from jaxmeg.config import Axis, Config
from jaxmeg.keys import KEYS, SHORT_FORMS
from jaxmeg.planner import paper
from jaxmeg.planner.check import Checked
from jaxmeg.planner.chips import Cluster
from jaxmeg.planner.search import Found, Plan, budget
from jaxmeg.validate.mesh_rules import named_axes
from jaxmeg.validate.value_rules import value_of

GIB = 2**30
SMALL = 10**7  # bytes a step over an axis that are not shown: sums of norms, of the softmax, of the loss
WIDTH = 150  # of tables, also on a narrower terminal


def command(config: Config) -> str:
    """The line that trains a plan."""
    short = {key: name for name, key in SHORT_FORMS.items()}
    words = ["python scripts/train.py", f"--mesh {named_axes(config.mesh)}"]
    for name, key in KEYS.items():
        value = value_of(config, name)
        if value != key.default and not name.startswith("mesh."):
            words.append(f"--{short.get(name, name)} {shlex.quote(value if isinstance(value, str) else json.dumps(value))}")
    return " ".join(words)


def show_ranking(found: Found, cluster: Cluster, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("", "mesh", "ZeRO", "schedule", "microbatch", "remat"):
        table.add_column(name)
    for name in ("GiB a GPU", "bubble", "exposed", "s a step", "tokens/s", "MFU"):
        table.add_column(name, justify="right")
    for number, plan in enumerate(found.fitting or found.nearest, 1):
        config, speed = plan.config, plan.speed
        schedule = f"{config.pipeline.schedule} x {plan.resolved.chunks}" if plan.resolved.chunks > 1 else config.pipeline.schedule or "-"
        table.add_row(str(number), named_axes(config.mesh), str(config.layout.zero), schedule,
                      f"{plan.resolved.num_microbatches} x {plan.resolved.microbatch}", config.layout.remat,
                      f"{plan.memory.total / GIB:.1f}", f"{float(plan.resolved.bubble) if plan.resolved.schedule else 0:.1%}",
                      f"{speed.exposed / speed.seconds:.1%}", f"{speed.seconds:.3g}", f"{speed.tokens_per_second:,.0f}", f"{speed.mfu:.3f}")
    order = "fastest" if found.fitting else "smallest"
    console.print(f"{order} of {found.tried:,} legal layouts on {cluster}, "
                  f"{budget(cluster) / GIB:.1f} GiB of {cluster.chip.memory_gib} for the program on each; predicted, not measured")
    console.print(table)


def show_plan(plan: Plan, cluster: Cluster, console: Console, explain: bool = False) -> None:
    """One layout in full. explain: with the formula behind every number."""
    arch = resolve_arch(plan.config.model)
    console.print(f"\n{named_axes(plan.config.mesh)}, ZeRO {plan.config.layout.zero}, {num_params(arch):,} parameters: memory of one GPU")
    _rows(console, [(line.name, f"{line.bytes / GIB:8.2f} GiB", line.formula) for line in plan.memory.lines], explain)
    room = (plan.budget - plan.memory.total) / GIB
    console.print(f"  {'total':<16}{plan.memory.total / GIB:8.2f} GiB, {abs(room):.2f} GiB {'to spare' if room >= 0 else 'too much'}")
    ranks = plan.resolved.mesh[Axis.DP]
    share = num_params(arch) // (plan.resolved.mesh[Axis.PP] * plan.resolved.mesh[Axis.TP])
    console.print(f'  as papers count (2 + 2 + 12 bytes a parameter, no activations): '
                  f'{float(paper.zero_bytes(share, plan.config.layout.zero, ranks)) / GIB:.2f} GiB; "this program" keeps 18: fp32 masters, '
                  f"two moments and gradient sums, and a 16-bit copy")
    console.print("\ntime of a step")
    _rows(console, [(part.name, f"{part.seconds * 1e3:8.1f} ms", part.formula) for part in plan.speed.parts], explain)
    speed = plan.speed
    console.print(f"  {'total':<16}{speed.seconds * 1e3:8.1f} ms, {speed.tokens_per_second:,.0f} tokens/s, MFU {speed.mfu:.3f}")
    if plan.speed.transfers:
        console.print("\nsent by one GPU in a step")
        table = Table(box=None, pad_edge=False)
        for name in ("  axis", "link", "what", "collective"):
            table.add_column(name)
        for name in ("runs", "GB in all", "ms", "exposed"):
            table.add_column(name, justify="right")
        for t, link, took, left in plan.speed.transfers:
            table.add_row(f"  {t.axis}", link, t.what, t.op, f"{t.runs:,}", f"{t.runs * t.bytes / 1e9:.2f}", f"{took * 1e3:.1f}",
                          f"{left * 1e3:.1f}")
        console.print(table)
    console.print(f"\n{command(plan.config)}", soft_wrap=True)


def show_check(plan: Plan, checked: Checked, console: Console) -> None:
    """Formulas and compiler side by side."""
    state = sum(line.bytes for line in plan.memory.state)
    console.print(f"\ncompiled in {checked.seconds:.0f} s, attention by {checked.kernel}: the compiler's figures for one GPU")
    table = Table(box=None, pad_edge=False)
    for name in ("  ", "formulas", "compiler", "formulas / compiler"):
        table.add_column(name, justify="left" if name == "  " else "right")
    pairs = (("state and batch", state, checked.arguments + checked.other), ("temporaries", plan.memory.temporaries, checked.temporaries),
             ("program", plan.memory.total, checked.total))
    for name, formula, compiled in pairs:
        table.add_row(f"  {name}", f"{formula / GIB:.2f} GiB", f"{compiled / GIB:.2f} GiB", f"{formula / compiled:.3f}")
    sent: dict[tuple[str, tuple[str, ...]], int] = {}
    for t, *_ in plan.speed.transfers:
        sent[t.op, (str(t.axis),)] = sent.get((t.op, (str(t.axis),)), 0) + t.runs * t.bytes
    for key in sorted(sent.keys() | checked.moved.keys(), key=lambda key: (key[1], key[0])):
        formula, compiled = sent.get(key, 0), checked.moved.get(key, (0, 0))[1]
        ratio = f"{formula / compiled:.3f}" if compiled else "-"
        if max(formula, compiled) >= SMALL:
            table.add_row(f"  {','.join(key[1])} {key[0]}", f"{formula / 1e9:.3f} GB", f"{compiled / 1e9:.3f} GB", ratio)
    console.print(table)
    room = (plan.budget - checked.total) / GIB
    console.print(f"  by the compiler it {f'fits: {room:.2f} GiB to spare' if room >= 0 else f'does not fit: {-room:.2f} GiB too much'}")


def _rows(console: Console, rows: Iterable[tuple[str, str, str]], explain: bool) -> None:
    for name, figure, formula in rows:
        console.print(f"  {name:<16}{figure}" + (f"  = {formula}" if explain else ""), soft_wrap=True)


def as_dict(plan: Plan) -> dict[str, object]:
    """For JSON."""
    speed = plan.speed
    return {
        "command": command(plan.config), "fits": plan.fits, "memory_bytes": {line.name: line.bytes for line in plan.memory.lines},
        "total_bytes": plan.memory.total, "step_seconds": speed.seconds, "seconds": {part.name: part.seconds for part in speed.parts},
        "tokens_per_second": speed.tokens_per_second, "mfu": speed.mfu, "bubble": float(plan.resolved.bubble),
        "transfers": [{"axis": str(t.axis), "op": t.op, "what": t.what, "runs": t.runs, "bytes": t.bytes, "link": link, "seconds": took,
                       "exposed_seconds": left} for t, link, took, left in speed.transfers]}
