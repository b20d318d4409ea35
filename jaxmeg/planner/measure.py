"""The best plans, run: ten steps each on the devices at hand, prediction beside measurement, the fastest first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from jaxmeg.bench.case import Case
from jaxmeg.bench.measure import measure
from jaxmeg.planner.search import Plan
from jaxmeg.planner.text import command
from jaxmeg.validate.mesh_rules import named_axes

STEPS, WARMUP = 10, 3


class Measured(NamedTuple):
    """One plan after it has been run."""

    plan: Plan
    seconds: float | None
    """Median of a step; None where it failed."""
    error: str | None
    """One line."""


def measure_plans(plans: Sequence[Plan], devices: Sequence[Any]) -> list[Measured]:
    """The fastest first, those that failed last. Synthetic tokens; memory is freed in between."""
    found = []
    for plan in plans:
        case = Case(name=command(plan.config), group="plan", steps=STEPS, warmup=WARMUP, real=False, breakdown=False, roof=False,
                    config=plan.config)
        result = measure(case, devices)
        seconds = None if result["error"] else result["step_s"]["median"]
        found.append(Measured(plan, seconds, result["error"]))
    return sorted(found, key=lambda one: (one.seconds is None, one.seconds or 0.0))


def show_measured(found: Sequence[Measured], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("mesh", "ZeRO", "schedule", "remat"):
        table.add_column(name)
    for name in ("predicted s", "measured s", "predicted / measured", "tokens/s"):
        table.add_column(name, justify="right")
    for plan, seconds, error in found:
        config, speed = plan.config, plan.speed
        layout = (named_axes(config.mesh), str(config.layout.zero), config.pipeline.schedule or "-", config.layout.remat)
        if seconds is None:
            table.add_row(*layout, f"{speed.seconds:.3g}", "failed", "-", error or "")
        else:
            ratio, rate = speed.seconds / seconds, speed.tokens / seconds
            table.add_row(*layout, f"{speed.seconds:.3g}", f"{seconds:.3g}", f"{ratio:.2f}", f"{rate:,.0f}")
    console.print(f"\nrun on this machine: median of {STEPS} steps")
    console.print(table)
