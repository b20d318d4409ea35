"""How a problem is worded: nearest names, nearest valid numbers, lists. Shared by the rules and the command line.

A message gives value, rule, fix, in one line: `mesh.tp=4 does not divide model.num_heads=6: use tp 1, 2, 3 or 6`.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MOST_SHOWN = 200
"""Characters of a value in a message."""


def any_of(values: Iterable[object]) -> str:
    """The values as a list in words, such as "1, 2 or 4"."""
    words = [str(value) for value in values]
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]


def shown(value: object) -> str:
    """A value as a message shows it: on one line, and cut where it is long."""
    try:
        text = str(value)
    except ValueError:  # Python's limit for the digits of an int
        return "a number of thousands of digits"
    return printable(text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}...")


def printable(text: str) -> str:
    """The text with escapes for what would break a line, move the cursor or not be encoded."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: it holds no half of a surrogate pair, such as Python makes of bytes that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [low for low in range(1, int(number**0.5) + 1) if number % low == 0]
    return sorted({*small, *(number // low for low in small)})


def nearest(values: Iterable[int], wanted: int, count: int = 4) -> list[int]:
    """The `count` values closest to `wanted`, ascending."""
    return sorted(sorted(set(values), key=lambda value: (abs(value - wanted), value))[:count])


def multiples_around(wanted: int, unit: int) -> list[int]:
    """The positive multiples of `unit` next to `wanted`, below and above."""
    below = wanted // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple > 0]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The hint "did you mean X? " if a name is close, else an empty string."""
    near = get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"did you mean {near[0]}? " if near else ""


def unknown_choice(key: str, value: object, choices: Iterable[str]) -> str:
    """The message for a value that is none of a fixed set."""
    choices = list(choices)
    text = shown(value)
    return f"{key}={text} is not a choice: {did_you_mean(text, choices)}use {any_of(choices)}"
