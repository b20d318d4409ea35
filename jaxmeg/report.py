"""What a person sees of a run: what will run on which layout, progress, a sample of text, a summary.

A rich progress bar on a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import time
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
from jaxmeg.flops import mfu
from jaxmeg.layout import layout_rows
from jaxmeg.mesh import format_mesh
from jaxmeg.optim.build import decay_mask
from jaxmeg.pipeline.schedules import simulate
from jaxmeg.setup import Setup

console = Console(highlight=False)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run ended with. Losses in nats a token, in step order."""

    setup: Setup
    losses: list[float]
    validation_loss: float | None
    validation_tokens: int
    sample: bytes
    folder: Path
    seconds: float
    compile_seconds: float
    tokens_per_second: float


def print_setup(setup: Setup) -> None:
    """The layout in a few lines, before anything is compiled."""
    r, config, device = setup.resolved, setup.config, setup.mesh.devices.flat[0]
    line = console.print
    line(f"devices     {setup.mesh.devices.size} x {device.device_kind}, jax {jax.__version__}", soft_wrap=True)
    line(f"model       {config.model.preset}: {num_params(r.arch):,} parameters, {r.arch.num_layers} layers, vocabulary {r.arch.vocab_size}"
         + (f" (padded to {r.padded_vocab} inside)" if r.padded_vocab != r.arch.vocab_size else ""), soft_wrap=True)
    line(f"layout      {format_mesh(setup.layout.sizes)}, ZeRO {config.layout.zero}, remat {config.layout.remat}, compute {setup.compute}, "
         f"attention {setup.model.options.kernel} ({setup.kernel_reason})", soft_wrap=True)
    rows = f"{config.data.global_batch} rows of {config.data.seq_len} tokens = {r.num_microbatches} microbatches of {r.microbatch} rows"
    line(f"batch       {rows} on each of {setup.data_ranks} data ranks", soft_wrap=True)
    if r.schedule:
        replay = simulate(setup.table)
        line(f"pipeline    {r.schedule}, {r.mesh[Axis.PP]} stages x {r.chunks} chunks; bubble {percent(r.bubble)} of the time; "
             f"at most {replay.peak_live} live (chunk, microbatch) pairs a stage", soft_wrap=True)
        if len(set(r.layer_split)) > 1:
            line(f"            uneven: {r.layer_split} layers in model order", soft_wrap=True)
    decayed = sum(jax.tree.leaves(decay_mask(setup.model.dims)))
    total = len(jax.tree.leaves(decay_mask(setup.model.dims)))
    line(f"optimizer   {config.optim.name}, peak lr {config.optim.lr:g} after {config.optim.warmup} updates, then {config.optim.schedule}; "
         f"decay {config.optim.weight_decay:g} on {decayed} of {total} leaves (--show_layout lists them)", soft_wrap=True)


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
    wide = Console(highlight=False, width=max(console.width, 170))
    wide.print(table)
    whole = sum(row.bytes_per_device for row in rows if row.note)
    wide.print(f"total {sum(row.bytes_per_device for row in rows):,} bytes of fp32 parameters a device, and twice that of AdamW moments; "
               f"{whole:,} of them ZeRO could not shard")


class Progress:
    """Step, loss, gradient norm, learning rate, tokens/s and time left."""

    def __init__(self, setup: Setup):
        config = setup.config
        self.steps, self.every = config.train.steps, config.train.log_every
        self.tokens_per_step = config.data.global_batch * config.data.seq_len
        self.bar = bars.Progress(
            bars.TextColumn("step {task.completed}/{task.total}"), bars.BarColumn(bar_width=20), bars.TextColumn("{task.fields[text]}"),
            bars.TimeRemainingColumn(), console=console) if console.is_terminal else None
        self.task = self.bar.add_task("train", total=self.steps, text="compiled, first step") if self.bar else None
        self.last = (time.perf_counter(), 0)
        self.rate = 0.0

    def __enter__(self) -> Progress:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bar:
            self.bar.stop()

    def step(self, record: dict[str, Any]) -> None:
        n, (at, before) = record["step"], self.last
        now = time.perf_counter()
        if now - at > 1 or n == 1 or n == self.steps or n % self.every == 0:
            self.rate, self.last = (n - before) * self.tokens_per_step / max(now - at, 1e-9), (now, n)
        text = f"loss {record['loss']:.4f}  grad {record['grad_norm']:.3f}  lr {record['lr']:.2e}  {self.rate:,.0f} tokens/s"
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=n, text=text)
        elif n == 1 or n % self.every == 0 or n == self.steps:
            left = (self.steps - n) * self.tokens_per_step / max(self.rate, 1e-9)
            console.print(f"step {n:>5}/{self.steps}  {text}  {left:.0f} s left", soft_wrap=True)

    def validation(self, step: int, loss: float, tokens: int) -> None:
        console.print(f"step {step:>5}/{self.steps}  validation loss {loss:.4f} nats a token over {tokens:,} tokens", soft_wrap=True)


def print_sample(prompt: str, text: bytes) -> None:
    console.rule("sample")
    console.print(prompt + text.decode("utf-8", errors="replace"), markup=False)
    console.rule()


def print_summary(result: Result, mesh: str, peak: float | None) -> None:
    setup = result.setup
    config = setup.config
    console.print(f"trained     {config.model.preset} for {config.train.steps} updates on {mesh}, ZeRO {config.layout.zero}"
                  + (f", {setup.resolved.schedule}" if setup.resolved.schedule else "") + f": {result.seconds:.0f} s, "
                  f"{result.tokens_per_second:,.0f} tokens/s (compile {result.compile_seconds:.0f} s)", soft_wrap=True)
    if peak is not None:
        share = mfu(setup.resolved.arch, config.data.seq_len, result.tokens_per_second, setup.mesh.devices.size, peak)
        console.print(f"MFU         {percent(share)} of {peak:g} TFLOP/s a device", soft_wrap=True)
    loss = "no validation rows" if result.validation_loss is None else f"validation loss {result.validation_loss:.4f} nats a token"
    console.print(f"result      {loss}; weights, config and metrics in {result.folder}", soft_wrap=True)
