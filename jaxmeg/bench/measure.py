"""One case, measured: the train step of its config in a loop that waits for every step, as the peers' loops do.

The loss is read after every step and written down: a step that computes nothing can't pass as fast. What can't be measured here is null,
with a note. After a case all its arrays are freed; an error is one line of its result, and the next case goes on.
"""

from __future__ import annotations

import gc
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmeg.bench import roof
from jaxmeg.bench.breakdown import breakdown, warning
from jaxmeg.bench.case import Case
from jaxmeg.bench.profile import kernels_of
from jaxmeg.bench.schema import empty_case
from jaxmeg.bench.work import pieces, undivided
from jaxmeg.cli import ConfigError
from jaxmeg.config import Config
from jaxmeg.flops import train_flops_per_token
from jaxmeg.hlo import origins
from jaxmeg.keys import KEYS
from jaxmeg.mesh import format_mesh
from jaxmeg.processes.variables import explain
from jaxmeg.record.memory import Usage, device_memory
from jaxmeg.record.profile import compiler_options
from jaxmeg.record.speed import speed_of
from jaxmeg.setup import Setup, build
from jaxmeg.state import init_state
from jaxmeg.step import make_train_step, place_rows
from jaxmeg.task import text_task
from jaxmeg.validate.check import problems
from jaxmeg.validate.value_rules import value_of

PROFILED = 2  # steps of a breakdown


def measure(case: Case, devices: Sequence[Any]) -> dict[str, Any]:
    """The result of a case, in the form of `schema.CASE`."""
    known = {"config": differences(case.config), "whole": asdict(case.config)}
    result = empty_case(case.name, case.group, "jaxmeg", case.steps, case.warmup, **known)
    try:
        result |= _measured(case, devices)
    except Exception as error:  # the cases after this one are to be measured
        result["error"] = one_line(error)
    gc.collect()
    jax.clear_caches()
    return result


def differences(config: Config) -> dict[str, Any]:
    """Every key of a config whose value is not the default."""
    return {key: value for key, entry in KEYS.items() if (value := value_of(config, key)) != entry.default}


def one_line(error: Exception) -> str:
    """An exception as one line: all that is wrong with a config, or what the error points to and how it begins."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    if isinstance(error, ConfigError):
        return "; ".join(lines)[:400]
    known = explain(str(error))
    return f"{known.line if known else type(error).__name__}: {lines[0][:300]}"


def synthetic(setup: Setup) -> Any:
    """One batch of random tokens. The same in every step, so that the loss falls where training works."""
    data, vocab = setup.config.data, setup.resolved.arch.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab, (data.global_batch, data.seq_len + 1), dtype=np.int32)
    mask = np.ones((data.global_batch, data.seq_len), bool)
    return place_rows(setup, tokens[:, :-1], tokens[:, 1:], mask, setup.resolved.num_microbatches)


def _measured(case: Case, devices: Sequence[Any]) -> dict[str, Any]:
    if found := problems(case.config, len(devices)):
        raise ConfigError(found)
    before = device_memory(list(devices))
    if case.real:
        task = text_task(case.config, devices)
        setup, read = task.setup, task.read(0, 0)
    else:
        setup = build(case.config, devices)
        batch = synthetic(setup)
        read = ((n, batch) for n in itertools.count())
    with closing(read) as batches:
        result = _timed(case, setup, batches, before)
    if case.roof:
        gc.collect()  # the state and its programs are not needed any more
        try:
            result["roof"] = _roof(setup, result["step_s"]["median"])
        except Exception as error:  # the step's figures stand
            result["roof"] = {"seconds": None, "share": None, "note": f"not measured: {one_line(error)}"}
    return result


class Loop(NamedTuple):
    """Steps one after the other, each waited for. Lists are by step, the warm-up's left out but for losses."""

    seconds: list[float]
    """From asking for the rows to having the loss."""
    waits: list[float]
    """The part of it in which there were no rows yet."""
    losses: list[float]
    skipped: int
    """Updates that changed nothing, as their gradient was not finite."""


def _timed(case: Case, setup: Setup, batches: Iterator[tuple[int, Any]], before: list[Usage] | None) -> dict[str, Any]:
    state, step = init_state(setup, case.config.train.seed), make_train_step(setup)
    _, rows = next(batches)
    started = time.perf_counter()
    lowered = step.lower(state, rows)
    compiled = lowered.compile()
    compile_seconds = time.perf_counter() - started
    state, found = _loop(case, compiled, state, itertools.chain([(0, rows)], batches))
    result = _figures(case, setup, found)
    result["compile_s"] = compile_seconds
    result["memory"] = {"compiler_bytes": _compiler_bytes(compiled), **_peak(before, device_memory(list(setup.mesh.devices.flat)))}
    if case.breakdown:
        options = compiler_options("1:2", setup.mesh.devices.flat[0].platform)
        try:
            result["breakdown"] = _breakdown(lowered.compile(compiler_options=options) if options else compiled, state, rows)
        except Exception as error:  # the step's figures stand
            result["notes"].append(f"no breakdown: {one_line(error)}")
        else:
            result["notes"] += [] if options else ["kernel time on a CPU is that of its threads, which run at once"]
            result["notes"] += filter(None, [warning(result["breakdown"])])
    return result


def _loop(case: Case, compiled: Any, state: Any, batches: Iterator[tuple[int, Any]]) -> tuple[Any, Loop]:
    found = Loop([], [], [], 0)
    for _ in range(case.warmup + case.steps):
        started = time.perf_counter()
        _, rows = next(batches)
        got = time.perf_counter()
        state, metrics = compiled(state, rows)
        found.losses.append(float(metrics.loss))  # waits
        found.seconds.append(time.perf_counter() - started)
        found.waits.append(got - started)
        found = found._replace(skipped=found.skipped + (not bool(metrics.finite)))
    bad = [number for number, loss in enumerate(found.losses, 1) if not math.isfinite(loss)]
    if bad:
        raise ArithmeticError(f"the loss is not finite after step {bad[0]}")
    return state, found._replace(seconds=found.seconds[case.warmup :], waits=found.waits[case.warmup :])


def _figures(case: Case, setup: Setup, found: Loop) -> dict[str, Any]:
    """What follows from the seconds and losses."""
    median, wait = float(np.median(found.seconds)), float(np.median(found.waits))
    speed, count, arch = speed_of(setup), setup.mesh.devices.size, setup.resolved.arch
    rates, first, last = speed.rates(median), found.losses[0], found.losses[-1]
    notes = [f"{found.skipped} of {len(found.losses)} updates were skipped: their gradient was not finite"] if found.skipped else []
    if not case.real and last >= first:
        notes.append(f"the loss did not fall on the one batch: {first:.4f} to {last:.4f}")
    if speed.peak is None:
        notes.append(f"no MFU and no roof: the peak of {setup.mesh.devices.flat[0].device_kind} is not known")
    return {
        "workload": {"layers": arch.num_layers, "seq_len": speed.seq_len, "rows": speed.rows, "devices": count,
                     "mesh": format_mesh(setup.layout.sizes)},
        "model": asdict(arch), "microbatches": setup.resolved.num_microbatches, "compute": setup.compute,
        "attention": setup.model.options.kernel, "attention_why": setup.kernel_reason, "schedule": setup.resolved.schedule,
        "step_s": {"median": median, "p5": float(np.percentile(found.seconds, 5)), "p95": float(np.percentile(found.seconds, 95)),
                   "steps": case.steps, "warmup": case.warmup},
        "tokens_per_s": rates["tokens_per_s"], "tokens_per_s_per_device": rates["tokens_per_s"] / count, "mfu": rates.get("mfu"),
        "tflops_per_device": rates["tokens_per_s"] * train_flops_per_token(arch, speed.seq_len) / count / 1e12,
        "loss": {"first": first, "last": last}, "notes": notes,
        "data": {"kind": "real" if case.real else "synthetic", "wait_s": wait if case.real else None,
                 "wait_share": wait / median if case.real else None}}


def _breakdown(compiled: Any, state: Any, rows: Any) -> dict[str, Any]:
    def steps(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, metrics = compiled(state, rows)
            float(metrics.loss)

    steps(1)
    return breakdown(kernels_of(lambda: steps(PROFILED)), origins(compiled.as_text()), PROFILED)


def _roof(setup: Setup, step_seconds: float) -> dict[str, Any]:
    speed = speed_of(setup)
    if speed.peak is None:
        return {"seconds": None, "share": None, "note": "the peak of this device is not known"}
    if why := undivided(setup.resolved):
        return {"seconds": None, "share": None, "note": why}
    with jax.default_device(setup.mesh.devices.flat[0]):
        timed = roof.measure(pieces(setup.resolved, speed.seq_len), setup.compute, setup.model.options.kernel, speed.peak)
    seconds = roof.total(timed)
    alone = [{"name": one.piece.name, "form": one.piece.form, "times": float(one.piece.times), "ms": one.seconds * 1e3,
              "tflops": one.piece.flops / one.seconds / 1e12} for one in timed]
    return {"seconds": seconds, "share": seconds / step_seconds, "note": None, "mfu": speed.rates(seconds)["mfu"], "pieces": alone}


def _compiler_bytes(compiled: Any) -> int:
    """What the program asks for on one device: arguments, results that are no arguments, temporaries."""
    sizes = compiled.memory_analysis()
    return sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes


def _peak(before: list[Usage] | None, after: list[Usage] | None) -> dict[str, Any]:
    """The allocator's peak on the fullest device. It counts from the start of the process; before: the case."""
    if not before or not after:
        return {"allocator_peak_bytes": None, "note": "the allocator keeps no account here"}
    peak = max(usage.peak for usage in after)
    if peak <= max(usage.peak for usage in before):
        return {"allocator_peak_bytes": None, "note": "a case before this one in the process had the higher peak"}
    return {"allocator_peak_bytes": peak, "note": None}
