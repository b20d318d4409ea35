"""The arguments in a shell script, or in one command: `--name value ...` wherever it stands, with variables filled in.

Understands comments, quotes, continued lines, `NAME=value`, `NAME=(...)`, `NAME+=(...)`, `$NAME`, `${NAME}` and
`${NAME:-value}`. Branches are not followed: arguments of all of them count, and the last of a name wins.
"""

from __future__ import annotations

import re
import shlex

from jaxmeg.migrate.core import SourceError

Value = bool | str | list[str]
"""True for a flag, text for one value, a list for several."""

_COMMENT = re.compile(r"(?<!\S)#.*")
_ARRAY = re.compile(r"\b\w+\+?=\(")
_ASSIGNMENT = re.compile(r"(\w+)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
_ENDS = {"\n", ")", ";", "&&", "||", "|", "&", ">", ">>", "<", "2>&1", "then", "fi", "else"}


def read_arguments(text: str) -> tuple[dict[str, Value], list[str]]:
    """(arguments by name with its dashes, names that were given more than once). Raises SourceError for open quotes."""
    found: dict[str, Value] = {}
    twice: list[str] = []
    name = None
    for word in _words(text):
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word.partition("=")
            name = name.replace("_", "-")
            twice += [name] * (name in found)
            found[name] = value if has_value else True
        elif word in _ENDS:
            name = None
        elif name is not None:
            before = found[name]
            found[name] = word if before is True else [*(before if isinstance(before, list) else [str(before)]), word]
    return found, list(dict.fromkeys(twice))


def _words(text: str) -> list[str]:
    """Words and line ends, variables filled in, brackets of arrays as words of their own."""
    text = _COMMENT.sub("", text.replace("\\\n", " "))
    variables: dict[str, str] = {}
    words: list[str] = []
    for word in _split(_ARRAY.sub(" ", text)):
        assignment = _ASSIGNMENT.fullmatch(word)
        if assignment and "--" not in word:
            variables[assignment[1]] = _fill(assignment[2], variables)
            continue
        word = _fill(assignment[2] if assignment else word, variables)
        if "[@]" in word or "[*]" in word:
            continue
        inner = _split(word) if re.search(r"\s", word.strip()) and "--" in word else [word]
        for part in inner:
            closing = part.endswith((")", ";")) and len(part) > 1 and part.count(")") > part.count("(") - part.endswith(";")
            words += [part[:-1], part[-1]] if closing else [part]
    return words


def _split(text: str) -> list[str]:
    lexer = shlex.shlex(text.replace("\n", " \n "), posix=True)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        return list(lexer)
    except ValueError as error:
        raise SourceError(f"the shell text can't be read: {str(error).lower()}") from None


def _fill(word: str, variables: dict[str, str]) -> str:
    """The word with its variables; one that is not set stays as it is."""
    def value(match: re.Match[str]) -> str:
        default = match[3].strip("\"'") if match[3] else match[0]
        return variables.get(match[1] or match[2], default)
    return _VARIABLE.sub(value, word)


def is_open(value: Value) -> bool:
    """Whether a value still holds a variable that the text does not set."""
    return any("$" in part for part in (value if isinstance(value, list) else [str(value)]))
