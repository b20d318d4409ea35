"""One migration from text to a checked config: which format it is, the user's own settings on top, our rules last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxmeg.cli import parse
from jaxmeg.config import Config
from jaxmeg.keys import KEYS, SECTIONS, SHORT_FORMS, section_keys, unknown_key
from jaxmeg.migrate import deepspeed, llamafactory, megatron
from jaxmeg.migrate.core import Migration, SourceError, Table, lookup
from jaxmeg.validate import value_rules
from jaxmeg.validate.check import problems
from jaxmeg.wording import any_of


@dataclass(frozen=True)
class Format:
    """How one format is read and carried over."""

    name: str
    table: Table
    read: Callable[[str, str], dict[str, Any]]
    """(text, path) -> the source's keys. Raises SourceError."""
    migrate: Callable[[Mapping[str, Any], Migration, str], None]
    devices: Callable[[Mapping[str, Any]], int]
    """The number of devices that the source names, or the fewest that it needs."""


FORMATS = {
    module.__name__.rpartition(".")[2]: Format(module.NAME, module.TABLE, module.read, module.migrate, module.devices)
    for module in (deepspeed, megatron, llamafactory)
}


def recognise(text: str, path: str) -> str:
    """The format whose table knows most of the keys. Raises SourceError when none knows any."""
    known, why = {}, []
    for name, form in FORMATS.items():
        try:
            keys = form.read(text, path)
        except SourceError as error:
            why.append(str(error))
            continue
        known[name] = sum(lookup(form.table, key) is not None or any(other.startswith(f"{key}.") for other in form.table) for key in keys)
    best = max(known, key=lambda name: known[name], default=None)
    if best is None or not known[best]:
        formats = any_of(FORMATS)
        raise SourceError(f"{path} is not recognised ({why[0] if why else 'no key is known'}): say --from {formats}")
    return best


def migrate(text: str, path: str, devices: int | None, name: str | None, settings: dict[str, Any]) -> Migration:
    """Read, carry over, put the user's settings on top. Raises SourceError for a text that can't be read."""
    form = FORMATS[name or recognise(text, path)]
    content = form.read(text, path)
    out = Migration(source=form.name, devices=devices or form.devices(content), settings=settings)
    if devices is None:
        out.remarks.append(f"no --devices: {out.devices}")
    form.migrate(content, out, path)
    for key, value in settings.items():
        out.put("--set", value, key, value)
    return out


def read_settings(pairs: list[str]) -> dict[str, Any]:
    """["train.steps=100"] -> {"train.steps": 100}; short forms count. Raises SourceError, and SystemExit as `cli.parse` does."""
    settings = {}
    for pair in pairs:
        name, equals, _ = pair.partition("=")
        key = SHORT_FORMS.get(name, name)
        if not equals or key not in KEYS:
            raise SourceError(f"--set {pair}: {unknown_key(name) if equals else 'write KEY=VALUE'}")
        settings[key] = value_rules.value_of(parse([f"--{pair}"]), key)
    return settings


def to_config(values: Mapping[str, Any]) -> Config:
    """The dataclasses; keys that are not named keep their defaults."""
    full = {key: values.get(key, entry.default) for key, entry in KEYS.items()}
    sections = {name: owner(**{leaf: full[f"{name}.{leaf}"] for leaf in section_keys(name)}) for name, owner in SECTIONS.items()}
    return Config(**sections, **{name: full[name] for name in KEYS if "." not in name})


def check(out: Migration) -> tuple[list[str], list[str]]:
    """(errors, warnings) of the config on its devices. Files that are not on this machine are warnings."""
    if out.problems:
        return out.problems, []
    config = to_config(out.values)
    missing = list(value_rules.files(config))
    return [line for line in problems(config, out.devices) if line not in missing], missing
