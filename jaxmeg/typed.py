"""Whether plain values, such as JSON holds, are of the types that a dataclass says. Must not know any dataclass of the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args, get_origin, get_type_hints

LARGEST = 2**63 - 1


def is_typed(record: Any) -> bool:
    """Whether every field of a dataclass holds a value of its type."""
    return not unfit(record)


def unfit(record: Any) -> list[str]:
    """Fields of a dataclass whose values are not of their types."""
    hints = get_type_hints(type(record))
    return [field.name for field in fields(record) if not fits(getattr(record, field.name), hints[field.name])]


def fits(value: object, hint: Any) -> bool:
    """Whether a value is of a type: a class, a union, tuple[T, ...], dict[K, V] or Any.

    A bool is no number, an int also a float, and an int fits into 64 bits.
    """
    origin, args = get_origin(hint) or hint, get_args(hint)
    if hint is Any:
        return True
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(entry, args[0]) for entry in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(fits(k, args[0]) and fits(v, args[1]) for k, v in value.items())
    if args:
        return any(fits(value, arg) for arg in args)
    if isinstance(value, bool):
        return origin is bool
    if isinstance(value, int):
        return origin in (int, float) and abs(value) <= LARGEST
    return isinstance(value, origin)
