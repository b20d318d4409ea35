"""One layout, or all of them, compared; and, where one layout fails, the search for what is at fault."""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import jax

from jaxmeg.cli import ConfigError
from jaxmeg.config import Config
from jaxmeg.data.store import DataError
from jaxmeg.engine import BatchError
from jaxmeg.models.own import OwnModuleError
from jaxmeg.verify.certificate import UPDATES, Certificate
from jaxmeg.verify.layouts import command, layout_name, switched_off
from jaxmeg.verify.measure import CLIP, MOMENTUM, verify
from jaxmeg.verify.search import at_fault, smallest_failing
from jaxmeg.verify.text import Report

USER_ERRORS = (ConfigError, DataError, BatchError, OwnModuleError)
Tell = Callable[[str], None]


def certify(config: Config, own_optimizer: bool = False) -> Certificate:
    """`measure.verify`, where a program that can't be made or run is a failure too. Raises what the user can put right."""
    try:
        return verify(config, own_optimizer)
    except USER_ERRORS:
        raise
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        return Certificate(layout=layout_name(config), crash=f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")


def beginning(config: Config, shrunk: list[str], called: str, real: int, own_optimizer: bool) -> Report:
    """What is compared, before it is. real: accelerators of this machine, if they are too few."""
    arithmetic = arithmetic_line(config, config.optim.name if own_optimizer else None)
    return Report(command=called, devices=devices_line(real), arithmetic=arithmetic, shrunk=shrunk, certificates=[], minutes=0.0)


def compare_one(config: Config, report: Report) -> Report:
    """One layout, with the config's own optimizer too."""
    started = time.monotonic()
    return replace(report, certificates=[certify(config, own_optimizer=True)], minutes=_minutes_since(started))


def explain(config: Config, report: Report, tell: Tell) -> Report:
    """Where its one layout fails: what is at fault, and the smallest config that fails still."""
    (certificate,), started = report.certificates, time.monotonic()
    own_alone = not certificate.crash and all(check.passed for check in certificate.checks[:-1])
    failing: dict[str, bool] = {}
    tries, most = 0, len(switched_off(config))

    def fails(candidate: Config) -> bool:
        nonlocal tries
        if (key := repr(candidate)) not in failing:
            failing[key] = not certify(candidate, own_optimizer=own_alone).passed
            tries += 1
            count = f"({tries} of {most})" if tries <= most else f"({tries})"
            tell(f"{count:<10}{'fails' if failing[key] else 'passes':<8}{layout_name(candidate)}: {command(candidate)}")
        return failing[key]

    tell(f"looking for what is at fault, one part switched off at a time, at most {most} tries first")
    found = at_fault(config, fails)
    tell("looking for the smallest config that fails still")
    smallest = command(smallest_failing(config, fails))
    return replace(report, minutes=report.minutes + _minutes_since(started), at_fault=found, smallest=smallest)


def _minutes_since(started: float) -> float:
    return (time.monotonic() - started) / 60


def compare_all(configs: list[Config], report: Report, jobs: int, tell: Callable[[Certificate], None]) -> Report:
    """Every layout with SGD, over `jobs` processes; each is told when it is done."""
    started, done = time.monotonic(), dict[int, Certificate]()
    for n, certificate in _each(configs, jobs):
        done[n] = certificate
        tell(certificate)
    return replace(report, certificates=[done[n] for n in range(len(configs))], minutes=_minutes_since(started))


def _each(configs: list[Config], jobs: int) -> Iterator[tuple[int, Certificate]]:
    """Certificates as they come, each with its config's number. A process that dies takes the work of all with it: what is left then
    runs again, each in a process of its own."""
    left = dict(enumerate(configs))
    if jobs == 1:
        yield from ((n, certify(left.pop(n))) for n in list(left))
        return
    for n, certificate in _in_processes(left, jobs):
        del left[n]
        yield n, certificate
    for n, config in left.items():
        crashed = Certificate(layout=layout_name(config), crash="its process died twice: see what it wrote to stderr")
        yield n, next((certificate for _, certificate in _in_processes({n: config}, 1)), crashed)


def _in_processes(configs: dict[int, Config], jobs: int) -> Iterator[tuple[int, Certificate]]:
    """Ends early if a process dies."""
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:  # each has its own jax
        futures = {pool.submit(certify, config): n for n, config in configs.items()}
        for future in as_completed(futures):
            if isinstance(future.exception(), BrokenProcessPool):
                print("a process died: the layouts that are left run again, one by one", file=sys.stderr)
                return
            yield futures[future], future.result()


def devices_line(real: int = 0) -> str:
    """real: accelerators of this machine, if they are too few."""
    devices = jax.devices()
    where = "emulated on the CPU" if devices[0].platform == "cpu" else devices[0].device_kind
    where += f" (this machine has {real})" if real else ""
    return f"{len(devices)} {where}, jax {jax.__version__}"


def arithmetic_line(config: Config, optimizer: str | None) -> str:
    own = f", and with {optimizer}, from the first one on at its peak learning rate or a larger one" if optimizer else ""
    dtypes = "the module's own dtypes, none below fp32," if config.model.module else "fp32"
    return (f"{dtypes} with matmuls in full precision, where layouts agree to rounding; {UPDATES} updates with SGD, momentum {MOMENTUM}, "
            f"clipped at {CLIP}{own}")
