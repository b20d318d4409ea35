"""One layout, or all of them, compared; and, where one layout fails, the search for what is at fault."""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

import jax

from jaxmeg.cli import ConfigError
from jaxmeg.config import Config
from jaxmeg.data.store import DataError
from jaxmeg.engine import BatchError
from jaxmeg.models.own import OwnModuleError
from jaxmeg.verify.certificate import UPDATES, Certificate
from jaxmeg.verify.layouts import command, layout_name
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


def compare_one(config: Config, shrunk: list[str], called: str, tell: Tell) -> Report:
    """One layout with the config's own optimizer too; if it fails, what is at fault and the smallest config that fails still."""
    started = time.monotonic()
    certificate = certify(config, own_optimizer=True)
    found, smallest = None, ""
    if not certificate.passed:
        own_alone = all(check.passed for check in certificate.checks[:-1]) and not certificate.crash

        failing: dict[str, bool] = {}

        def fails(candidate: Config) -> bool:
            if (key := repr(candidate)) not in failing:
                failing[key] = not certify(candidate, own_optimizer=own_alone).passed
                tell(f"{'fails' if failing[key] else 'passes':<8}{layout_name(candidate)}: {command(candidate)}")
            return failing[key]

        tell(f"FAIL: {certificate.reason}\nlooking for what is at fault, one part switched off at a time")
        found = at_fault(config, fails)
        tell("looking for the smallest config that fails still")
        smallest = command(smallest_failing(config, fails))
    return Report(
        command=called, devices=devices_line(), arithmetic=arithmetic_line(config, config.optim.name), shrunk=shrunk,
        certificates=[certificate], minutes=(time.monotonic() - started) / 60, at_fault=found, smallest=smallest)


def compare_all(configs: list[Config], shrunk: list[str], called: str, jobs: int, tell: Callable[[Certificate], None]) -> Report:
    """Every layout with SGD, over `jobs` processes; each is told when it is done."""
    started, done = time.monotonic(), dict[int, Certificate]()
    for n, certificate in _each(configs, jobs):
        done[n] = certificate
        tell(certificate)
    return Report(
        command=called, devices=devices_line(), arithmetic=arithmetic_line(configs[0], None), shrunk=shrunk,
        certificates=[done[n] for n in range(len(configs))], minutes=(time.monotonic() - started) / 60)


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


def devices_line() -> str:
    devices = jax.devices()
    where = "emulated on the CPU" if devices[0].platform == "cpu" else devices[0].device_kind
    return f"{len(devices)} {where}, jax {jax.__version__}"


def arithmetic_line(config: Config, optimizer: str | None) -> str:
    own = f", and with {optimizer} at its peak learning rate" if optimizer else ""
    return (f"fp32 with matmuls in full precision, where layouts agree to rounding; the config's own precision.compute="
            f"{config.precision.compute} is not what was compared; {UPDATES} updates with SGD, momentum {MOMENTUM}, clipped at {CLIP}{own}")
