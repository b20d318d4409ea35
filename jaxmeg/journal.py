"""What a run says and writes down of each step once its metrics have arrived: log, progress, late compilations; and what
makes it stop: skipped updates, a jump of the loss, devices that disagree. Lines for people come from process 0 alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmeg.checkpoint.save import Checkpoints, Committed
from jaxmeg.guard.replicas import Found
from jaxmeg.guard.spikes import WINDOW, Spikes
from jaxmeg.layout import is_leaf_layout
from jaxmeg.record.compiles import Watch
from jaxmeg.record.late import Arrival
from jaxmeg.record.log import Log
from jaxmeg.record.memory import memory_record
from jaxmeg.record.speed import speed_of
from jaxmeg.report import Progress
from jaxmeg.setup import Setup
from jaxmeg.step import Metrics

SLOW_COMPILE = 0.1  # seconds: smaller programs are not worth a line


class RunError(RuntimeError):
    """The run cannot go on; the message says at which step, why, and what to change."""


class Start(NamedTuple):
    """What a run, or the next part of one, starts from."""

    folder: Path
    step: int = 0
    """Updates done before."""
    rows: int = 0
    """Rows of the data consumed before."""
    losses: Sequence[float] = ()
    """Of the updates before, as far as they are known."""


def warn(line: str) -> None:
    """One line on stderr, from process 0 alone: all processes find the same."""
    if jax.process_index() == 0:
        print(line, file=sys.stderr)


class Journal:
    """Writes the run's record step by step."""

    def __init__(self, setup: Setup, log: Log, progress: Progress, watch: Watch, checkpoints: Checkpoints, start: Start):
        self.checkpoints, self.start = checkpoints, start
        self.spikes = Spikes(setup.config.guard.spike_deviations)
        for loss in start.losses[-WINDOW:]:
            self.spikes.see(loss)
        self.setup, self.log, self.progress, self.watch = setup, log, progress, watch
        self.speed, self.devices = speed_of(setup), list(setup.mesh.devices.flat)
        self.losses: list[float] = []
        self.seconds = 0.0
        """Of all steps, without evaluation and saving."""
        self.applied = True
        """Whether the last update that was read changed the weights."""
        self.validation: tuple[float, float] | None = None
        self.num_dispatched = 0
        self.seen: set[str] = set()

    def steps(self, arrivals: Iterable[Arrival[Metrics]]) -> None:
        """Take down steps in order. Raises RunError where updates were skipped too often, or the loss jumped and is to stop the run."""
        for arrival in arrivals:
            metrics, seconds = arrival.metrics, arrival.seconds
            record: dict[str, Any] = {
                "step": arrival.step, "loss": float(metrics.loss), "grad_norm": float(metrics.grad_norm),
                "lr": float(metrics.learning_rate), "tokens": float(metrics.tokens), "applied": bool(metrics.finite),
                "loss_scale": float(metrics.loss_scale), "step_s": seconds.step, "data_wait_s": seconds.data_wait,
                "evaluate_s": seconds.evaluate, "save_s": seconds.save, "profile_s": seconds.profile,
                **self.speed.rates(seconds.training), **memory_record(self.devices)}
            if not self.losses and self.start.losses:
                self._compare_with_before(record, self.start.losses[-1])
            self.losses.append(record["loss"])
            self.seconds += seconds.training
            self.applied = record["applied"]
            self.log.write(record)
            self.progress.step(record)
            self._check_skips(arrival.step, metrics)
            self._check_spike(record)

    def replicas(self, found: Found | None) -> None:
        """What a look at the replicas found. Raises RunError for a difference."""
        if found:
            raise RunError(f"stopped after update {found.step}: devices that hold the same values don't agree: {found.text}: a device or "
                           "link is faulty, or the program is wrong (scripts/verify.py shows whether the layout computes what one device "
                           f"does); nothing more is saved; {self._way_back()}")

    def validated(self, step: int, loss: float, count: float) -> None:
        self.validation = (loss, count)
        self.log.write({"step": step, "validation_loss": loss, "validation_tokens": count})
        self.progress.validation(step, loss, count)

    def committed(self, save: Committed | None) -> None:
        """A checkpoint that is complete now."""
        if save is not None:
            self.log.write({"step": save.step, "checkpoint_s": save.seconds, "checkpoint_bytes": save.num_bytes,
                            "peak_host_bytes": save.peak_host_bytes})

    @contextmanager
    def first(self, what: str) -> Iterator[None]:
        """Around work that compiles programs of its own: only the first time is that as it should be."""
        yield
        if what not in self.seen:
            self.watch.new()
            self.seen.add(what)

    def _compare_with_before(self, record: dict[str, Any], before: float) -> None:
        """A run that goes on starts about where it stopped; one that has lost its weights does not."""
        loss = record["loss"]
        if loss > before + max(0.5, 0.25 * before):
            warn(f"warning: step {record['step']}: loss {loss:.4f}, and it was {before:.4f} when the run stopped: see that --resume names "
                 "the right run and that the data is the same")

    def dispatched(self, step: int) -> None:
        """Report what has been compiled since the step before, except on the first two steps of this start."""
        self.num_dispatched += 1
        for found in self.watch.new():
            if found.seconds >= SLOW_COMPILE and self.num_dispatched > 2:
                self.log.write({"step": step, "compiled": found.name, "compile_s": found.seconds})
                warn(f"step {step}: {found.name} was compiled in the run ({found.seconds:.1f} s): a shape or dtype has changed since its "
                     "first use")

    def _check_skips(self, step: int, metrics: Metrics) -> None:
        """Say which leaf made an update be skipped, and stop after too many in a row.

        fp16 starts with a large loss scale on purpose: there skips only count once the scale has fallen to 1.
        """
        if self.applied:
            return
        setup, scale, skipped = self.setup, float(metrics.loss_scale), int(metrics.skipped)
        paths = [leaf.path for leaf in jax.tree.leaves(setup.layout.leaves, is_leaf=is_leaf_layout)]
        bad = np.flatnonzero(~np.asarray(metrics.leaf_finite))
        where = f"the first of {len(bad)} gradient leaves that are not finite is {paths[bad[0]]}" if len(bad) else "the loss is not finite"
        halves = f"; loss scale {scale:g} halves" if setup.compute == "fp16" else ""
        warn(f"step {step}: update skipped, {where}{halves}")
        limit = setup.config.optim.max_skipped_updates
        if skipped >= limit and (setup.compute != "fp16" or scale <= 1):
            raise RunError(f"stopped at step {step}: {skipped} updates in a row were skipped (optim.max_skipped_updates={limit}); {where}: "
                           "lower optim.lr, lengthen optim.warmup, or look at the data of these steps")

    def _check_spike(self, record: dict[str, Any]) -> None:
        """Say that the loss jumped, or stop: before the state after this update is saved."""
        guard, step = self.setup.config.guard, record["step"]
        spike = self.spikes.see(record["loss"]) if guard.loss_spike != "off" else None
        if spike is None:
            return
        self.log.write({"step": step, "loss_spike": spike.deviations})
        text = (f"the loss jumped to {record['loss']:.4f}, {spike.deviations:.1f} standard deviations ({spike.deviation:.4f}) above "
                f"{spike.mean:.4f}, the mean of the {spike.num_losses} losses before it; gradient norm {record['grad_norm']:.3f}; "
                f"{self._rows_of(step)}")
        if guard.loss_spike == "stop":
            raise RunError(f"stopped at step {step}: {text} (guard.loss_spike=stop); {self._way_back()}; the same rows come again: change "
                           "the data or optim.lr, or use guard.loss_spike warn")
        warn(f"warning: step {step}: {text}")

    def _rows_of(self, step: int) -> str:
        """The rows of an update, and how to look at them."""
        size = self.setup.config.data.global_batch
        first = self.start.rows + (step - self.start.step - 1) * size
        look = "of data.source" if self.setup.own else (
            f"(python scripts/preview_data.py --config {self.start.folder / 'config.yaml'} --from {first} --rows {size})")
        return f"it read rows {first} to {first + size - 1} {look}"

    def _way_back(self) -> str:
        """How to go on after a stop, once what is being saved has been."""
        self.checkpoints.wait()
        step = self.checkpoints.latest
        return "there is no checkpoint to go on from" if step is None else (
            f"go on from the checkpoint after update {step} with --resume {self.start.folder}")
