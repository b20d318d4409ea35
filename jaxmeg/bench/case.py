"""What is to be measured: cases, each a name and the options of a training run, from the command line and a sweep file.

A case's options stand on top of those of the command line. Must not know jax: mistakes in any case are answered before it is imported.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from jaxmeg.cli import ConfigError, fail, read
from jaxmeg.config import Config
from jaxmeg.files import ContentError, read_yaml
from jaxmeg.wording import any_of, shown

PEERS = ("ceiling", "transformers", "maxtext")
RECORD = "docs/performance.json"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement."""

    name: str
    group: str
    """Cases of one group stand in one table: "remat", "packing", ..."""
    steps: int
    """Steps that are measured."""
    warmup: int
    """Steps before them."""
    real: bool
    """Read the rows of data.train, not made-up ones."""
    breakdown: bool
    roof: bool
    config: Config


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that one command line asks for."""

    cases: tuple[Case, ...]
    peers: tuple[str, ...]
    out: Path | None
    record: Path | None
    commit: str | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([message])


def _parser() -> _Parser:
    parser = _Parser(prog="bench.py", allow_abbrev=False, usage="python scripts/bench.py [options] [any option of scripts/train.py]",
                     description="Time the train step. --steps and --out are the bench's own here. The options of a case stand on top "
                                 "of the command's.")
    add = parser.add_argument
    add("--steps", type=int, default=10, help="measured steps; the figure is their median (10)")
    add("--warmup", type=int, default=3, help="steps before them (3)")
    flag = argparse.BooleanOptionalAction
    add("--real", action=flag, default=False, help="read rows of --data, and say how long the loop waits for them")
    add("--breakdown", action=flag, default=False, help="kernel time by class, from a profile of two more steps")
    add("--roof", action=flag, default=True, help="time the step's matmuls and attention alone (yes)")
    add("--name", help="of the case, or of the first of several")
    add("--group", help="table of the page that the case belongs to")
    add("--also", action="append", default=[], metavar='"NAME: OPTIONS"', help="one more case, on top of the other options")
    add("--sweep", metavar="FILE.yaml", help='cases as lines `name: "options"`')
    add("--peers", default="", help=f"other frameworks at the same shapes, of {', '.join(PEERS)}")
    add("--out", type=Path, metavar="FILE.json", help="write the results there, not to stdout")
    add("--record", type=Path, nargs="?", const=Path(RECORD), metavar="FILE.json", help=f"append them to {RECORD} and write its page")
    add("--commit", help="commit that is measured, where the code is no git checkout")
    return parser


def plan(argv: Sequence[str]) -> Plan:
    """What a command line asks for. Prints every mistake, with the case it is in, and exits with 2."""
    try:
        return read_plan(argv)
    except ConfigError as error:
        fail(error.lines)


def read_plan(argv: Sequence[str]) -> Plan:
    """Like `plan`, but raises ConfigError."""
    parser = _parser()
    own, options = parser.parse_known_args(argv)
    peers = tuple(name for name in own.peers.split(",") if name)
    found = [f"--peers {shown(name)} is not known: use {any_of(PEERS)}" for name in peers if name not in PEERS]
    extra = [*_sweep(own.sweep, found), *(_also(text, found) for text in own.also)]
    cases: list[Case] = []
    alone = own.name is not None or not own.sweep
    for name, words in [*([(own.name, [])] if alone else []), *extra]:
        try:
            cases.append(_case(parser, own, options, name, words))
        except ConfigError as error:
            found += [f"case {shown(name)}: {line}" if extra and name else line for line in error.lines]
    names = [case.name for case in cases]
    found += [f"two cases are called {shown(name)}: give each a name of its own" for name in {*names} if names.count(name) > 1]
    if found:
        raise ConfigError(found)
    return Plan(cases=tuple(cases), peers=peers, out=own.out, record=own.record, commit=own.commit)


def _case(parser: _Parser, common: argparse.Namespace, options: Sequence[str], name: str | None, words: Sequence[str]) -> Case:
    own, more = parser.parse_known_args(words, argparse.Namespace(**vars(common)))
    if found := [f"--{key} belongs to the command, not to a case: give it once, outside"
                 for key in ("name", "also", "sweep", "peers", "out", "record", "commit") if getattr(own, key) != getattr(common, key)]:
        raise ConfigError(found)
    if found := [f"--{key}={getattr(own, key)} is out of range: use {least} or more"
                 for key, least in (("steps", 1), ("warmup", 1)) if getattr(own, key) < least]:
        raise ConfigError(found)
    config = read([*options, *more])
    if config.model.module is not None or config.data.source is not None:
        raise ConfigError(["model.module and data.source: the bench times the decoder alone, and its FLOPs: leave them out"])
    if config.distributed.num_processes not in (None, 1):
        raise ConfigError([f"distributed.num_processes={config.distributed.num_processes}: the bench runs in one process: leave it out"])
    updates = own.warmup + own.steps
    config = replace(config, train=replace(config.train, steps=max(config.train.steps, updates)))
    return Case(name=name or _name(config), group=own.group or "", steps=own.steps, warmup=own.warmup, real=own.real,
                breakdown=own.breakdown, roof=own.roof, config=config)


def _name(config: Config) -> str:
    layers = f", {config.model.num_layers} layers" if config.model.num_layers else ""
    return f"{config.model.preset}{layers}, {config.data.global_batch} x {config.data.seq_len}"


def _also(text: str, found: list[str]) -> tuple[str, list[str]]:
    name, colon, words = text.partition(":")
    if not colon or not name.strip():
        found.append(f'--also {shown(text)}: write "NAME: OPTIONS", for example "full: --remat full"')
    return name.strip(), _words(name.strip(), words, found)


def _words(name: str, text: Any, found: list[str]) -> list[str]:
    try:
        return shlex.split("" if text is None else text)
    except (ValueError, AttributeError):
        found.append(f"case {shown(name)}: {shown(text)} is not a line of options: write for example \"--remat full\"")
        return []


def _sweep(path: str | None, found: list[str]) -> list[tuple[str, list[str]]]:
    if path is None:
        return []
    try:
        content = read_yaml(path)
    except OSError as error:
        found.append(f"--sweep {path}: cannot be read ({error.strerror}): give an existing YAML file")
    except ContentError as error:
        found.append(f"--sweep {path}: is not valid YAML: {error}")
    else:
        if isinstance(content, dict) and content:
            return [(str(name), _words(str(name), text, found)) for name, text in content.items()]
        found.append(f"--sweep {path}: holds no cases: write lines like `full: \"--remat full\"`")
    return []


