"""What the formats share: the three kinds of table entries, converters, and the record that a migration fills.

A table maps a key of the source to `To` (a key of ours and how its value follows), to a `Reason` why there is no
counterpart, or to `JOINT`, where a function reads several keys at once. `*` in a name stands for any text. Must not
know any format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from math import isfinite
from typing import Any

from jaxmeg.keys import KEYS
from jaxmeg.wording import did_you_mean

ABSENT = object()
FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True)
class Reason:
    """Why a key has no counterpart; harmless when the run does the same without it."""

    text: str
    harmless: bool = False
    off: Callable[[Any], bool] | None = None
    """Whether a value asks for nothing that a run here doesn't do anyway. None is `is_off`."""


@dataclass(frozen=True)
class To:
    """A counterpart."""

    key: str
    convert: Callable[[Any], Any]
    note: str = ""
    default: Any = ABSENT
    """What the source takes where its key is absent; ABSENT leaves ours."""


class Joint(Enum):
    """One value: the key is read together with others."""

    JOINT = "joint"


JOINT = Joint.JOINT
Table = Mapping[str, To | Reason | Joint]


def not_built(text: str, off: Callable[[Any], bool] | None = None) -> Reason:
    """Something that this project has no implementation of."""
    return Reason(f"not built yet: {text}", off=off)


def not_needed(text: str) -> Reason:
    """Something that a run here does anyway, or that changes neither result nor layout."""
    return Reason(f"not needed: {text}", harmless=True)


def differs(text: str, off: Callable[[Any], bool] | None = None) -> Reason:
    """Something that works in another way here."""
    return Reason(f"no counterpart: {text}", off=off)


class NoCounterpart(ValueError):
    """Raised by a converter: this value of a key that has a counterpart has none."""


class SourceError(ValueError):
    """The input can't be read; the message is one line."""


@dataclass(frozen=True)
class Row:
    """A source key with its counterpart."""

    source: str
    value: str
    key: str
    ours: Any
    note: str


@dataclass(frozen=True)
class Lack:
    """A source key without one."""

    source: str
    value: str
    reason: Reason


@dataclass(kw_only=True)
class Migration:
    """What came out: values by our dotted keys, and where each came from."""

    source: str
    """Name of the format."""
    devices: int
    """Devices of the run."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Values that the user gave beside the source, by our keys; they win."""
    values: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    lacks: list[Lack] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Contradictions and values of the wrong kind, one line each."""
    batch: list[str] = field(default_factory=list)
    """The batch arithmetic in words."""
    remarks: list[str] = field(default_factory=list)
    """What the source does not say, and what the run takes instead."""

    def put(self, source: str, value: Any, key: str, ours: Any, note: str = "") -> None:
        """Set one of our keys. Raises KeyError for a key that does not exist."""
        if KEYS[key].type is float:
            ours = float(ours)
        self.values[key] = ours
        self.rows.append(Row(source, shown(value), key, ours, note))

    def lack(self, source: str, value: Any, reason: Reason) -> None:
        """Record a key without counterpart, once. A value that asks for nothing is harmless whatever the reason."""
        off = reason.off or is_off
        if not reason.harmless and off(value):
            reason = not_needed("this value asks for nothing that a run here does not do")
        entry = Lack(source, shown(value), reason)
        if entry not in self.lacks:
            self.lacks.append(entry)

    def has_row(self, source: str) -> bool:
        """Whether a source key has got a counterpart."""
        return any(row.source == source for row in self.rows)

    def leaves(self, key: str) -> bool:
        """Whether nobody has set a key of ours so far: not the source, not the user."""
        return key not in self.values and key not in self.settings

    def get(self, key: str) -> Any:
        """The value that the run will have, as far as it is known by now."""
        return self.settings.get(key, self.values.get(key, KEYS[key].default))


def lookup(table: Table, key: str) -> To | Reason | Joint | None:
    """The entry of a key: its own, else the first pattern that fits."""
    if key in table:
        return table[key]
    return next((entry for name, entry in table.items() if "*" in name and fnmatchcase(key, name)), None)


def apply_table(out: Migration, table: Table, given: Mapping[str, Any], defaults: bool) -> None:
    """Everything that one key decides alone; with `defaults`, also what the source takes for absent keys."""
    for key, value in given.items():
        entry = lookup(table, key)
        if entry is None:
            hint = did_you_mean(key, [name for name in table if "*" not in name]).strip()
            out.lack(key, value, Reason(f"unknown key: {hint or 'nothing here is called alike'}", off=never))
        elif isinstance(entry, Reason):
            out.lack(key, value, entry)
        elif isinstance(entry, To):
            put_converted(out, key, value, entry)
    for key, entry in table.items():
        if defaults and isinstance(entry, To) and entry.default is not ABSENT and key not in given:
            ours = entry.convert(entry.default)
            if entry.key not in out.values and ours != KEYS[entry.key].default:
                out.put(key, ABSENT, entry.key, ours, f"the default of {out.source}")


def without_null(out: Migration, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that have a value; null is what a source takes anyway."""
    for key, value in given.items():
        if value is None:
            out.lack(key, value, not_needed("null is the default"))
    return {key: value for key, value in given.items() if value is not None}


def report_rest(out: Migration, table: Table, given: Mapping[str, Any]) -> None:
    """Keys that are read together with others, and were not, because those are missing."""
    reported = {row.source for row in out.rows} | {lack.source for lack in out.lacks}
    for key, value in given.items():
        if lookup(table, key) is JOINT and not any(name == key or name.startswith((f"{key}[", f"{key}.")) for name in reported):
            out.lack(key, value, differs("nothing reads it without the keys that belong to it"))


def put_converted(out: Migration, source: str, value: Any, entry: To) -> None:
    """Set a key from its converter; a value without counterpart, or of the wrong kind, is recorded as that."""
    try:
        out.put(source, value, entry.key, entry.convert(value), entry.note)
    except NoCounterpart as error:
        out.lack(source, value, differs(str(error), off=never))
    except (ValueError, TypeError, OverflowError, ZeroDivisionError):
        out.problems.append(f"{source}={shown(value)} has the wrong type: give {KEYS[entry.key].type_name}")


def shown(value: Any) -> str:
    """A value as it stands in a table cell."""
    if value is ABSENT:
        return "(absent)"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {shown(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return " ".join(shown(inner) for inner in value)
    return str(value)


# ---------------------------------------------------------------- converters
def whole(value: Any) -> int:
    """5, "5", 5.0 or 5e8 -> int. Raises ValueError for a fraction."""
    exact = number(value)
    if exact != int(exact):
        raise ValueError(value)
    return int(exact)


def number(value: Any) -> float:
    """3e-4 or "3e-4" -> float. Raises ValueError for what is no finite number."""
    if isinstance(value, bool) or not isfinite(float(value)):
        raise ValueError(value)
    return float(value)


def text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(value)
    return value


def flag(value: Any) -> bool:
    """true, "True", 1 or "yes" -> bool. Raises ValueError for anything that is no flag."""
    name = str(value).lower()
    if name not in FLAGS:
        raise ValueError(value)
    return FLAGS[name]


def always(ours: Any) -> Callable[[Any], Any]:
    """A converter for keys whose presence decides."""
    return lambda value: ours


def choice(names: Mapping[str, Any], otherwise: str) -> Callable[[Any], Any]:
    """A converter by table, case ignored; other values have no counterpart."""

    def convert(value: Any) -> Any:
        name = str(value).lower()
        if name not in names:
            raise NoCounterpart(otherwise)
        return names[name]

    return convert


def part(amount: float, of: float) -> float:
    """A fraction, to six digits."""
    return float(f"{amount / of:.6g}")


# ---------------------------------------------------------------- values that ask for nothing
def is_off(value: Any) -> bool:
    """False, 0, null, "none", nothing, a section that is switched off or whose device is none."""
    if isinstance(value, Mapping):
        if "enabled" in value:
            return is_off(value["enabled"])
        return is_off(value["device"]) if "device" in value else all(is_off(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return not value
    return str(value).lower() in ("false", "0", "0.0", "none", "", "no", "off", "auto", "-1")


def never(value: Any) -> bool:
    return False


def equals(*names: Any) -> Callable[[Any], bool]:
    """Whether a value is one of these, as text, case ignored."""
    texts = {str(name).lower() for name in names}
    return lambda value: str(value).lower() in texts


def is_one(value: Any) -> bool:
    """Whether a value is the number 1, however it is written."""
    return str(value) in ("1", "1.0", "1.00")
