"""What a run says and writes down of each step once its metrics have arrived: log, progress, skipped updates, late compilations."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from jaxmeg.checkpoint.save import Committed
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


class Journal:
    """Writes the run's record step by step."""

    def __init__(self, setup: Setup, log: Log, progress: Progress, watch: Watch, loss_before: float | None = None):
        """loss_before: of the step that a resumed run goes on from."""
        self.loss_before = loss_before
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
        """Take down steps in order. Raises RunError where updates were skipped too often."""
        for arrival in arrivals:
            metrics, seconds = arrival.metrics, arrival.seconds
            record: dict[str, Any] = {
                "step": arrival.step, "loss": float(metrics.loss), "grad_norm": float(metrics.grad_norm),
                "lr": float(metrics.learning_rate), "tokens": float(metrics.tokens), "applied": bool(metrics.finite),
                "loss_scale": float(metrics.loss_scale), "step_s": seconds.step, "data_wait_s": seconds.data_wait,
                "evaluate_s": seconds.evaluate, "save_s": seconds.save, "profile_s": seconds.profile,
                **self.speed.rates(seconds.training), **memory_record(self.devices)}
            if not self.losses and self.loss_before is not None:
                self._compare_with_before(record)
            self.losses.append(record["loss"])
            self.seconds += seconds.training
            self.applied = record["applied"]
            self.log.write(record)
            self.progress.step(record)
            self._check_skips(arrival.step, metrics)

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

    def _compare_with_before(self, record: dict[str, Any]) -> None:
        """A run that goes on starts about where it stopped; one that has lost its weights does not."""
        loss, before = record["loss"], self.loss_before or 0.0
        if loss > before + max(0.5, 0.25 * before):
            print(f"warning: step {record['step']}: loss {loss:.4f}, and it was {before:.4f} when the run stopped: see that --resume names "
                  "the right run and that the data is the same", file=sys.stderr)

    def dispatched(self, step: int) -> None:
        """Report what has been compiled since the step before, except on the first two steps of this start."""
        self.num_dispatched += 1
        for found in self.watch.new():
            if found.seconds >= SLOW_COMPILE and self.num_dispatched > 2:
                self.log.write({"step": step, "compiled": found.name, "compile_s": found.seconds})
                print(f"step {step}: {found.name} was compiled in the run ({found.seconds:.1f} s): a shape or dtype has changed since its "
                      "first use", file=sys.stderr)

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
        print(f"step {step}: update skipped, {where}{halves}", file=sys.stderr)
        limit = setup.config.optim.max_skipped_updates
        if skipped >= limit and (setup.compute != "fp16" or scale <= 1):
            raise RunError(f"stopped at step {step}: {skipped} updates in a row were skipped (optim.max_skipped_updates={limit}); {where}: "
                           "lower optim.lr, lengthen optim.warmup, or look at the data of these steps")
