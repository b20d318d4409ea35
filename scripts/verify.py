#!/usr/bin/env python3
"""Compare a layout with one device: `python scripts/verify.py --config X --mesh tp=2,pp=2 --zero 3`.

Initial weights, placement of rows, loss, every gradient leaf, gradient norm and every parameter's change in three updates, each with
error and bound. The config is made small first (--full: as it is). --all 8: every layout of 8 devices. Exit code 0: PASS, 1: FAIL, 2: a
mistake.
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from jaxmeg.cli import fail, parse
from jaxmeg.verify.shrink import shrink
from jaxmeg.verify.start import cannot_write, check_options, check_writable, emulate, plan
from jaxmeg.verify.text import body, foot, head, line, write


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fail([message])


def read(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This script's own options, and the rest, which scripts/train.py has too."""
    parser = Parser(description=__doc__, epilog="All options of scripts/train.py work too: see its --help.", allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter, usage="python scripts/verify.py [options] [options of train.py]")
    parser.add_argument("--full", action="store_true", help="compare the config as it is, not a small one")
    parser.add_argument("--all", type=int, metavar="DEVICES", help="every legal layout of so many devices, a line each")
    parser.add_argument("--jobs", type=int, default=1, help="with --all: processes that share the layouts (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("runs/verify"), help="writes OUT.txt and OUT.json (default: runs/verify)")
    own, rest = parser.parse_known_args(argv)
    wrong = [f"--{name}={value} is out of range: use 1 or more" for name, value in (("all", own.all), ("jobs", own.jobs))
             if value is not None and value < 1]
    if own.jobs > 1 and own.all is None:
        wrong.append(f"--jobs={own.jobs} has no effect without --all: leave it out")
    if wrong:
        fail(wrong)
    check_options(rest, vars(own), own.all)
    check_writable(own.out)
    return own, rest


def main(argv: list[str]) -> int:
    own, rest = read(argv)
    todo = plan(parse(rest), own.all)
    if own.jobs > 1 and not todo.emulated:
        fail([f"--jobs={own.jobs} needs emulated devices, as a process takes all real ones: leave it out, or add --emulate {todo.count}"])
    configs, shrunk = (todo.configs, []) if own.full else shrink(todo.configs, todo.count)
    if todo.emulated:
        emulate(todo.count, quick=not own.full)

    from jaxmeg.verify.run import USER_ERRORS, beginning, compare_all, compare_one, explain  # from here on the number of devices is fixed

    screen, called = Console(highlight=False), shlex.join(["python", "scripts/verify.py", *argv])
    try:
        report = beginning(configs[0], shrunk, called, todo.real, own_optimizer=not own.all)
        if own.all:
            print(f"{len(configs)} layouts of {own.all} devices, {own.jobs} at a time", file=sys.stderr)
            head(report, screen)
            report = compare_all(configs, report, own.jobs, lambda certificate: line(certificate, screen))
        else:
            report = compare_one(configs[0], report)
            head(report, screen)
            body(report.certificates[0], screen)
            if not report.passed:
                report = explain(configs[0], report, lambda text: print(text, file=sys.stderr, flush=True))
        foot(report, screen)
        print("written     " + " and ".join(map(str, write(report, own.out))))
    except USER_ERRORS as error:
        fail(str(error).splitlines())
    except OSError as error:
        fail([cannot_write(own.out, error)])
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
