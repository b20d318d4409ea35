"""From an argument vector to a `Config`: YAML files, dotted overrides, short forms, and errors of one line each.

Every name and value is looked at before the parser runs, so that all mistakes are listed at once, with the nearest
valid keys. Errors go to stderr and the exit code is 2. Must not import jax: a mistake is answered in well under a
second.
"""

from __future__ import annotations

import json
import os
import re
import sys
from argparse import ArgumentError, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace

from jaxmeg.checkpoint.manifest import run_of
from jaxmeg.config import AXES, Config, Resolved, resolve
from jaxmeg.devices import Devices, plan_devices
from jaxmeg.files import ContentError, TooManyValuesError, load_yaml, read_yaml
from jaxmeg.keys import KEYS, SECTIONS, SHORT_FORMS, is_section, section_keys, unknown_key
from jaxmeg.processes import variables
from jaxmeg.processes.find import find_processes
from jaxmeg.typed import fits
from jaxmeg.validate.check import problems, warnings
from jaxmeg.validate.value_rules import value_of
from jaxmeg.wording import any_of, did_you_mean, printable, shown

_DESCRIPTION = """\
Train a language model on any mesh of devices. The layout is a flag: every layout trains the same model.
Values come from the defaults, then from --config files, then from the command line."""

_SHORT_HELP = "short forms:\n" + "\n".join(
    f"  --{short:<21} --{key}" for short, key in {"mesh tp=4,pp=2": "mesh.tp 4 --mesh.pp 2", **SHORT_FORMS}.items()
)


_REFUSALS = (ArgumentError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What the parser raises for a value: its own error, or that of a conversion."""

Overrides = list[tuple[str, str]]
Entries = dict[str, Any]
Files = dict[str, tuple[Entries, list[str]]]


class _HelpFormatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Types and defaults beside each option; description and short forms as they are written."""


class ConfigError(ValueError):
    """A config that can't be used; `lines` has every mistake, one line each."""

    def __init__(self, lines: Sequence[str]):
        super().__init__("\n".join(lines))
        self.lines = list(lines)


def parse(argv: Sequence[str]) -> Config:
    """The config that a command line asks for, not yet validated. Prints every mistake and exits with 2."""
    try:
        return read(argv)
    except ConfigError as error:
        fail(error.lines)


def config_of(values: Mapping[str, Any] | str | Path) -> Config:
    """A config from {"mesh.dp": 4, "optim.lr": 1e-3} or from a YAML file. Raises ConfigError with every mistake."""
    if isinstance(values, str | Path):
        return read(["--config", str(values)])
    wrong = [is_section(key) if key in SECTIONS else unknown_key(key) for key in values if key not in KEYS]
    if wrong:
        raise ConfigError(wrong)
    return read([f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()])


def take_auto(argv: Sequence[str]) -> tuple[list[str], bool]:
    """`--mesh auto` and `--mesh tp=2,auto` taken out of a command line: what is left of it, and whether there was one."""
    rest, found, words = [], False, list(argv)
    while words:
        word = words.pop(0)
        name, has_value, value = word.partition("=")
        if name != "--mesh":
            rest.append(word)
            continue
        value = value if has_value else words.pop(0) if words else ""
        axes = [part.strip() for part in value.split(",")]
        found = "auto" in axes
        named = [part for part in axes if part != "auto"]
        if not found:
            rest += [f"--mesh={value}"]
        else:
            rest += [f"--mesh.{axis}={size}" for axis, _, size in (part.partition("=") for part in named)]
    return rest, found


def given_keys(argv: Sequence[str]) -> frozenset[str]:
    """The keys that a command line or its config files name, of one that `read` accepts."""
    paths, overrides, _, _ = _read_argv(argv)
    return frozenset(key for key, _ in overrides).union(*(_read_file(path)[0] for path in paths))


def read(argv: Sequence[str]) -> Config:
    """Like `parse`, but raises ConfigError."""
    parser = _make_parser()
    given, overrides, keep, found = _read_argv(argv)
    paths, overrides = _resumed(given, overrides)
    files = {path: _read_file(path) for path in paths}
    found += [f"{path}: checkpoint.resume={shown(resume)} in a file does not start from that run's config: leave it out, and write "
              f"--resume {shown(resume)}" for path in given if (resume := files[path][0].get("checkpoint.resume")) is not None]
    found += [problem for entries, wrong in files.values() for problem in wrong]
    # Files first: an override wins wherever it stands. The parser does not take a file without any key.
    used = [f"--config={path}" for path, (entries, _) in files.items() if entries]
    args = [*used, *(f"--{key}={value}" for key, value in overrides), *keep]
    try:
        if not found and not any(map(_is_nested, _values(files, overrides))):
            return _typed(_build(parser.parse_args(args)))
    except _REFUSALS as error:
        found = [" ".join(str(error).split())]
        raise ConfigError(_type_problems(parser, files, overrides) or found) from None
    raise ConfigError([*found, *_type_problems(parser, files, overrides)])


def _resumed(paths: list[str], overrides: Overrides) -> tuple[list[str], Overrides]:
    """With --resume RUN, what else is given stands on top of RUN's config, and the run goes on in its folder. Another mesh
    gets its own pipeline options, not those of the old one."""
    folder = next((value for key, value in reversed(overrides) if key == "checkpoint.resume"), None)
    if folder in (None, "null"):
        return paths, overrides
    run = run_of(Path(folder))
    if not os.path.isfile(run / "config.yaml"):
        raise ConfigError([f"checkpoint.resume={shown(folder)} is not the folder of a run: it has no config.yaml"])
    if any(key == "train.out" for key, _ in overrides):
        raise ConfigError(["train.out has no effect with checkpoint.resume, which goes on in the run's own folder: leave it out, or start "
                           "a new run with --init_from"])
    processes = ["distributed.coordinator", "distributed.num_processes", "distributed.process_id"]
    pipeline = [key for key in KEYS if key.startswith("pipeline.")] if any(key.startswith("mesh.") for key, _ in overrides) else []
    once = dict.fromkeys(["checkpoint.init_from", "train.stop_after", "record.profile", "emulate", *processes, *pipeline], "null")
    start = [*once.items(), ("checkpoint.allow_changes", "false"), ("train.out", str(run))]
    return [str(run / "config.yaml"), *paths], [*start, *overrides]


def check(config: Config, num_devices: int, *, warn: bool = True) -> Resolved:
    """Every violated rule as one line and exit code 2, or every warning and the resolved sizes. warn: whether to print the warnings."""
    found = problems(config, num_devices)
    if found:
        fail(found)
    for line in warnings(config, num_devices) if warn else []:
        print(f"warning: {line}", file=sys.stderr)
    return resolve(config, num_devices)


def start(config: Config, *, whole: bool = True) -> Devices:
    """Count the devices, check config and environment for them, and set what jax reads when it is first imported.

    whole: whether the config is to be checked; not while its layout is still to be chosen. Returns the devices. Process 0 prints the
    warnings, one line where devices are emulated, and what was set. Exits with 2 where no run can start.
    """
    processes = find_processes(config.distributed, os.environ)
    devices = plan_devices(config, processes=processes)
    found = [line for line in (processes.problem, devices.problem, *variables.problems(os.environ)) if line]
    if found:
        fail(found)
    first = processes.index == 0
    if whole:
        check(config, devices.count, warn=first)
    for line in filter(None, (processes.note, *variables.warnings(os.environ, 0 if devices.emulated else devices.count))) if first else ():
        print(f"warning: {line}", file=sys.stderr)
    if first and devices.message:
        print(devices.message, file=sys.stderr)
    chosen = variables.defaults(os.environ, devices.count, config.guard.step_seconds, devices.emulated)
    os.environ.update(chosen)
    if devices.emulated:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices.count // processes.count}"
    elif chosen and first:
        print(f"environment {', '.join(f'{name}={value}' for name, value in chosen.items())} (set, as nobody had)", file=sys.stderr)
    return devices


def fail(lines: Iterable[str]) -> NoReturn:
    """Print each line as an error and exit with 2."""
    for line in lines:
        print(f"error: {printable(line)}", file=sys.stderr)
    raise SystemExit(2)


def _make_parser() -> ArgumentParser:
    """A jsonargparse parser with one option per key, grouped by section."""
    parser = ArgumentParser(
        prog="train.py",
        usage="python scripts/train.py [--config FILE] [--section.key VALUE ...]",
        description=_DESCRIPTION,
        epilog=_SHORT_HELP,
        formatter_class=_HelpFormatter,
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="YAML file of sections and keys; may be given several times.")
    groups: dict[str, Any] = {"": parser}
    for section, owner in SECTIONS.items():
        groups[section] = parser.add_argument_group(section, description=(owner.__doc__ or "").strip())
    for key in KEYS.values():
        section, _, leaf = key.name.rpartition(".")
        text = key.doc.replace("%", "%%")
        metavar = None if key.is_flag else leaf.upper()
        groups[section].add_argument(
            f"--{key.name}", type=key.type, default=key.default, help=text, **({"metavar": metavar} if metavar else {})
        )
    return parser


def _build(values: Namespace) -> Config:
    """The dataclasses from the parser's nested namespace."""
    top = {name: values[name] for name in KEYS if "." not in name}
    sections = {
        name: owner(**{leaf: values[f"{name}.{leaf}"] for leaf in section_keys(name)})
        for name, owner in SECTIONS.items()
    }
    return Config(**sections, **top)


def _read_argv(argv: Sequence[str]) -> tuple[list[str], Overrides, list[str], list[str]]:
    """(config files, (key, value) overrides, other options such as --help, problems); short forms are spelled out."""
    paths: list[str] = []
    overrides: Overrides = []
    keep: list[str] = []
    found: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.removeprefix("--").partition("=")
        if word == "-h" or name in ("help", "print_config"):
            keep.append(word)
            continue
        if not word.startswith("--"):
            found.append(_stray(word))
            continue
        name = SHORT_FORMS.get(name, name)
        if name != "mesh" and name != "config" and name not in KEYS:
            found.append(is_section(name) if name in SECTIONS else unknown_key(name))
            if not has_value and rest and not rest[0].startswith("--"):
                rest.pop(0)
            continue
        if not has_value:
            is_flag = name in KEYS and KEYS[name].is_flag
            if is_flag and (not rest or rest[0] not in ("true", "false")):
                value = "true"
            elif rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            else:
                found.append(f"--{name} has no value: write --{name} VALUE")
                continue
        if name == "config":
            paths.append(value)
        elif name == "mesh":
            axes, wrong = _read_mesh(value)
            overrides += axes
            found += wrong
        else:
            overrides.append((name, value))
    return paths, overrides, keep, found


def _stray(word: str) -> str:
    if word.endswith((".yaml", ".yml")):
        return f"{word} stands alone: write --config {word}"
    if "=" in word:
        key = word.partition("=")[0]
        if key in AXES:
            return f"{word} stands alone: write --mesh {word}, with commas and no spaces between axes"
        return f"{word} stands alone: write --{word}" if key in KEYS else unknown_key(key)
    return f"{word} stands alone: options are written --section.key VALUE"


def _read_mesh(text: str) -> tuple[Overrides, list[str]]:
    """The overrides in "tp=4,pp=2": an axis that is not named gets its default; and what is wrong with it."""
    axes: dict[str, str] = {}
    found: list[str] = []
    for part in text.split(","):
        axis, equals, size = (piece.strip() for piece in part.partition("="))
        if part.strip() == "auto":
            found.append(f"--mesh {shown(text)}: only scripts/train.py chooses a mesh: name one; scripts/plan.py ranks them")
        elif not equals:
            found.append(f"--mesh {shown(text)}: {shown(part)!r} is not axis=size: write for example tp=4,pp=2")
        elif axis not in list(AXES):
            found.append(f"--mesh {shown(text)}: unknown axis {shown(axis)}: {did_you_mean(shown(axis), AXES)}use {any_of(AXES)}")
        elif axis in axes:
            found.append(f"--mesh {shown(text)}: axis {axis} is named twice: name it once")
        elif not re.fullmatch("[0-9]{1,18}", size) or int(size) < 1:
            axes[axis] = "1"
            found.append(f"--mesh {shown(text)}: {axis}={shown(size)} is not a size: use a whole number of 1 or more")
        else:
            axes[axis] = size
    return [(f"mesh.{axis}", axes.get(axis, "null" if axis == "dp" else "1")) for axis in AXES], found


def _type_problems(parser: ArgumentParser, files: Files, overrides: Overrides) -> list[str]:
    """Every value that the parser refuses when it is the only one given."""
    found: list[str] = []
    for path, (entries, _) in files.items():
        for key, value in entries.items():
            section, _, leaf = key.rpartition(".")
            nested = {section: {leaf: value}} if section else {leaf: value}
            if _is_nested(value) or not _accepts(lambda nested=nested: parser.parse_object(nested)):
                found.append(f"{path}: {key}={shown(value)} has the wrong type: give {KEYS[key].type_name}")
    for key, value in overrides:
        if _is_nested(value) or not _accepts(lambda key=key, value=value: parser.parse_args([f"--{key}={value}"])):
            found.append(f"{key}={shown(value)} has the wrong type: give {KEYS[key].type_name}")
    return found


def _accepts(parse_one: Callable[[], object]) -> bool:
    try:
        parse_one()
    except _REFUSALS:
        return False
    return True


def _values(files: Files, overrides: Overrides) -> list[Any]:
    return [*(value for entries, _ in files.values() for value in entries.values()), *(value for _, value in overrides)]


def _is_nested(value: object) -> bool:
    """Whether a value holds more than any option does: names with single values. The parser would copy and print all of it."""
    if isinstance(value, str) and "&" in value and "*" in value:  # YAML that can repeat itself
        try:
            load_yaml(value)
        except TooManyValuesError:
            return True
        except ContentError:
            return False
    entries = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple | set) else []
    return any(isinstance(entry, dict | list | tuple | set) for entry in entries)


def _typed(config: Config) -> Config:
    """ConfigError for what the parser lets through: null for any key, names that are numbers, and whole numbers of any size."""
    wrong = {key: value for key, entry in KEYS.items() if not fits(value := value_of(config, key), entry.type)}
    if wrong:
        why = {key: "is out of range: use a number of at most 18 digits" if isinstance(value, int) else
               f"has the wrong type: give {KEYS[key].type_name}" for key, value in wrong.items()}
        raise ConfigError([f"{key}={'null' if value is None else shown(value)} {why[key]}" for key, value in wrong.items()])
    return config


def _read_file(path: str) -> tuple[Entries, list[str]]:
    """The values of a YAML file by dotted key, and everything wrong with its names."""
    try:
        content = read_yaml(path)
    except OSError as error:
        return {}, [f"--config {path}: cannot be read ({error.strerror}): give an existing YAML file"]
    except ContentError as error:
        return {}, [f"--config {path}: is not valid YAML: {error}"]
    if content is None:
        return {}, []
    if not isinstance(content, dict):
        return {}, [f"--config {path}: holds no sections: write for example `optim: {{lr: 0.001}}`"]
    values: Entries = {}
    for name, value in content.items():
        if isinstance(value, dict) and name not in KEYS:
            values |= {f"{name}.{leaf}": inner for leaf, inner in value.items()}
        else:
            values[str(name)] = value
    wrong = [is_section(key) if key in SECTIONS else unknown_key(key) for key in values if key not in KEYS]
    return {key: value for key, value in values.items() if key in KEYS}, [f"{path}: {problem}" for problem in wrong]
