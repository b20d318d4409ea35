"""What a person sees of a run: what will run on which layout, progress, a sample of text, a summary.

A rich progress bar on a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax
import rich.progress as bars
from rich.console import Console
from rich.table import Table

from jaxmeg.arch import num_params
from jaxmeg.config import Axis
from jaxmeg.layout import is_leaf_layout, layout_rows
from jaxmeg.mesh import format_mesh
from jaxmeg.optim.build import decay_mask
from jaxmeg.optim.moments import moment_bytes
from jaxmeg.optim.traffic import update_lines
from jaxmeg.pipeline.schedules import simulate
from jaxmeg.setup import Setup
from jaxmeg.state import moments

console = Console(highlight=False)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run ended with."""

    setup: Setup
    losses: list[float]
    """Of the steps of this start, in order; nats a token."""
    validation: tuple[float, float] | None
    """(mean loss, tokens) of the last evaluation; with a module of the user's, (mean loss, sum of weights)."""
    sample: str | None
    folder: Path
    seconds: float
    """Of all steps, without compiling, evaluation and saving."""
    compile_seconds: float
    rates: dict[str, float]
    """Mean tokens_per_s, samples_per_s and mfu, as far as they are defined."""


def print_setup(setup: Setup) -> None:
    """The layout in a few lines, before anything is compiled."""
    r, config, device = setup.resolved, setup.config, setup.mesh.devices.flat[0]
    def line(text: str) -> None:
        console.print(text, soft_wrap=True)
    processes = f" of {jax.process_count()} processes" if jax.process_count() > 1 else ""
    line(f"devices     {setup.mesh.devices.size} x {device.device_kind}{processes}, jax {jax.__version__}")
    where = f"{format_mesh(setup.layout.sizes)}, ZeRO {config.layout.zero}"
    if setup.own:
        size = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(setup.layout.leaves, is_leaf=is_leaf_layout))
        line(f"model       {setup.model.name} (a module of your own): {size:,} parameters")
        line(f"layout      {where}")
    else:
        padded = f" (padded to {r.padded_vocab} inside)" if r.padded_vocab != r.arch.vocab_size else ""
        line(f"model       {config.model.preset}: {num_params(r.arch):,} parameters, {r.arch.num_layers} layers, "
             f"vocabulary {r.arch.vocab_size}{padded}")
        line(f"layout      {where}, remat {config.layout.remat}, compute {setup.compute}, "
             f"attention {setup.model.options.kernel} ({setup.kernel_reason})")
    rows = f"{config.data.global_batch} rows" + ("" if setup.own else f" of {config.data.seq_len} tokens")
    microbatches = f"{r.num_microbatches} microbatch{'' if r.num_microbatches == 1 else 'es'}"
    line(f"batch       {rows} = {microbatches} of {r.microbatch} rows on each of {setup.data_ranks} data ranks")
    if r.schedule:
        replay = simulate(setup.table)
        line(f"pipeline    {r.schedule}, {r.mesh[Axis.PP]} stages x {r.chunks} chunks; bubble {percent(replay.bubble_fraction)} of the "
             f"time; at most {replay.peak_live} live (chunk, microbatch) pairs a stage")
        if len(set(r.layer_split)) > 1:
            line(f"            uneven: {r.layer_split} layers in model order")
    decays = jax.tree.leaves(decay_mask(setup.model.dims))
    line(f"optimizer   {config.optim.name}, peak lr {config.optim.lr:g} after {config.optim.warmup} updates, then {config.optim.schedule}; "
         f"decay {config.optim.weight_decay:g} on {sum(decays)} of {len(decays)} leaves (--show_layout lists them)")
    for text in update_lines(config.optim, setup.layout, r.arch.vocab_size):
        line(f"            {text}")


def percent(share: Fraction | float) -> str:
    return f"{100 * float(share):.1f}%"


def print_layout(setup: Setup) -> None:
    """Every leaf: path, shape, dims, spec, bytes a device, whether it decays, and what ZeRO could not shard."""
    table = Table("leaf", "shape in memory", "dims", "mesh axes", "fp32 bytes/device", "decays", "note", box=None, pad_edge=False)
    rows = layout_rows(setup.layout)
    decays = jax.tree.leaves(decay_mask(setup.model.dims))
    for row, decay in zip(rows, decays, strict=True):
        table.add_row(row.path, str(row.shape), " ".join(row.dims), row.spec, f"{row.bytes_per_device:,}",
                      "yes" if decay else "-", row.note)
    wide = Console(highlight=False, width=max(console.width, 170), quiet=console.quiet)
    wide.print(table)
    whole = sum(row.bytes_per_device for row in rows if row.note)
    wide.print(f"total {sum(row.bytes_per_device for row in rows):,} bytes of fp32 parameters a device, and "
               f"{moment_bytes(moments(setup), setup.layout):,} of {setup.config.optim.name} moments; "
               f"{whole:,} of the parameters' ZeRO could not shard")


class Progress:
    """Step, loss, gradient norm, learning rate, speed and time left."""

    def __init__(self, setup: Setup, first: int = 0):
        """first: updates done before this start."""
        config = setup.config
        self.steps, self.every = config.train.steps, config.train.log_every
        self.unit, self.per_step = ("rows", config.data.global_batch) if setup.own else (
            "tokens", config.data.global_batch * config.data.seq_len)
        self.bar = bars.Progress(
            bars.TextColumn("step {task.completed}/{task.total}"), bars.BarColumn(bar_width=20), bars.TextColumn("{task.fields[text]}"),
            bars.TimeRemainingColumn(), console=console) if console.is_terminal else None
        self.task = self.bar.add_task("train", total=self.steps, completed=first, text="compiling") if self.bar else None
        self.seconds, self.count, self.rate = 0.0, 0, 0.0

    def __enter__(self) -> Progress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bar:
            self.bar.stop()

    def step(self, record: dict[str, Any]) -> None:
        n = record["step"]
        self.seconds, self.count = self.seconds + record["step_s"] + record["data_wait_s"], self.count + 1
        if self.seconds > 1 or not self.rate or n == self.steps or n % self.every == 0:
            self.rate, self.seconds, self.count = self.count * self.per_step / max(self.seconds, 1e-9), 0.0, 0
        text = (f"loss {record['loss']:.4f}  grad {record['grad_norm']:.3f}  lr {record['lr']:.2e}  {self.rate:,.0f} {self.unit}/s"
                + (f"  MFU {percent(record['mfu'])}" if "mfu" in record else ""))
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=n, text=text)
        elif n == 1 or n % self.every == 0 or n == self.steps:
            left = (self.steps - n) * self.per_step / max(self.rate, 1e-9)
            console.print(f"step {n:>5}/{self.steps}  {text}  {left:.0f} s left", soft_wrap=True)

    def validation(self, step: int, loss: float, count: float) -> None:
        """count: trained tokens; with a module of the user's, the sum of the weights that its loss gives, 1 each if it gives none."""
        what = f"over weights of {count:,.6g} in all" if self.unit == "rows" else f"nats a token over {count:,.0f} tokens"
        console.print(f"step {step:>5}/{self.steps}  validation loss {loss:.4f} {what}", soft_wrap=True)


def tokenizing() -> Callable[[int, int, int], None]:
    """Told bytes read, bytes in all and tokens so far, says so every two seconds: text is tokenised once, before the first run on it."""
    said = time.monotonic()

    def tell(done: int, total: int, tokens: int) -> None:
        nonlocal said
        if time.monotonic() - said > 2:
            said = time.monotonic()
            console.print(f"tokenising  {done / 1e6:,.0f} of {total / 1e6:,.0f} MB: {tokens:,} tokens", soft_wrap=True)

    return tell


def print_sample(prompt: str, text: str) -> None:
    console.rule("sample")
    console.print(prompt + text, markup=False)
    console.rule()


def print_summary(result: Result) -> None:
    setup, rates = result.setup, result.rates
    config = setup.config
    if result.sample is not None:
        print_sample(config.train.sample_prompt, result.sample)
    speed = f"{rates['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in rates else f"{rates['samples_per_s']:,.1f} rows/s"
    speed += f", MFU {percent(rates['mfu'])}" if "mfu" in rates else ""
    schedule = f", {setup.resolved.schedule}" if setup.resolved.schedule else ""
    console.print(f"trained     {setup.model.name if setup.own else config.model.preset} for {len(result.losses)} updates on "
                  f"{format_mesh(setup.layout.sizes)}, ZeRO {config.layout.zero}{schedule}: {result.seconds:.0f} s, {speed} "
                  f"(compile {result.compile_seconds:.0f} s)", soft_wrap=True)
    loss = "not evaluated" if result.validation is None else f"validation loss {result.validation[0]:.4f}"
    console.print(f"result      {loss}; checkpoints, config and metrics in {result.folder}", soft_wrap=True)
