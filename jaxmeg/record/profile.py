"""A profiler trace of a few updates: `--profile 10:13` writes updates 10, 11 and 12 to the run folder.

Both ends wait for the devices, so that the trace holds these updates whole and nothing of others. The scopes in it
(tick, stage, layer, collective) come from `jax.named_scope` in the step. Reference: https://docs.jax.dev/en/latest/profiling.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from jaxmeg.record.late import Late
from jaxmeg.record.window import window


def compiler_options(text: str | None, platform: str) -> dict[str, str]:
    """Options for `Lowered.compile`, given `record.profile`. On a GPU, XLA launches most kernels as CUDA graphs, which
    hides their names from the profiler: a run that is to be traced is compiled without."""
    return {"xla_gpu_enable_command_buffer": ""} if text and platform in ("gpu", "cuda") else {}


class Profile:
    """Traces the updates of a window to `folder`/trace; a context manager, which ends a trace that is still running.

    text: `record.profile`, already checked; None traces nothing. late: counts the time of starting and writing a trace
    apart. With several processes each traces its own devices.
    """

    def __init__(self, text: str | None, folder: Path, late: Late[Any]):
        self.updates = (window(text) if text else None) or range(0)
        self.folder, self.late, self.running = folder / "trace", late, False
        self.written: list[int] = []
        """The updates of the trace that is on disk."""

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.running:
            self._stop()

    @contextmanager
    def update(self, step: int, settle: Callable[[], object]) -> Iterator[None]:
        """Around the dispatch of one update and `late.push` of its metrics. settle: waits for all that has been pushed
        and records it, by `late.flush`; called at the two ends of the window alone."""
        if step in self.updates and not self.running:  # a resumed run may start inside the window
            settle()
            with self.late.apart("profile"):
                jax.profiler.start_trace(self.folder)
            self.running = True
        if self.running:
            self.written.append(step)
        with jax.profiler.StepTraceAnnotation("update", step_num=step):
            yield
        if self.running and step == self.updates[-1]:
            settle()
            self._stop()

    def _stop(self) -> None:
        self.running = False
        with self.late.apart("profile"):
            jax.profiler.stop_trace()

    def where(self) -> str:
        """Where the trace is and how to look at it, in one line."""
        return (f"updates {self.written[0]} to {self.written[-1]} in {self.folder}: pip install tensorboard xprof, then "
                f"tensorboard --logdir {self.folder}; or open the .trace.json.gz below it at ui.perfetto.dev")
