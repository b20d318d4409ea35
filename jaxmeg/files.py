"""Small files that a user writes: text and YAML, read so that no content can do harm or cost more than a moment.

Only regular files of a bounded size are read; YAML makes plain values alone, never objects, and anchors are counted at their full size,
so that a few lines can't stand for billions of values. Must not know what a file means.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 1_000_000
MOST_VALUES = 10_000


class ContentError(ValueError):
    """A file that is no YAML; the message is one line."""


class TooManyValuesError(ContentError):
    """More than MOST_VALUES values, with every alias counted at the size of its anchor."""


def read_text(path: str | Path, most_bytes: int = MOST_BYTES) -> str:
    """The text of a regular file in UTF-8, without a byte order mark.

    Raises OSError, with a reason in `strerror`, for what can't be read, is no regular file or too large, and UnicodeDecodeError.
    """
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "a name can't hold NUL", str(path))
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe or a device might never end
        what = "Is a directory" if os.path.isdir(path) else "Not a regular file"
        raise OSError(errno.EINVAL, what, str(path))
    with open(path, "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"More than {most_bytes:,} bytes", str(path))
    return content.decode("utf-8-sig")


def read_yaml(path: str | Path) -> Any:
    """The plain values in a YAML file. Raises OSError like `read_text`, and ContentError."""
    try:
        return load_yaml(read_text(path))
    except UnicodeDecodeError as error:
        raise ContentError(str(error)) from None


def load_yaml(text: str) -> Any:
    """The plain values of a YAML text. Raises ContentError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError:
        raise ContentError("it is nested too deeply") from None
    except TooManyValuesError:
        raise
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError) as error:  # PyYAML, of a value that is not of its tag
        raise ContentError(" ".join(str(error).split())) from None


class _Loader(yaml.SafeLoader):
    """Refuses a key given twice in one mapping, instead of keeping the last, and more than MOST_VALUES values."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._num_values = 0
        self._sizes: dict[int, int] = {}  # by node: values in it

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        is_alias, before = self.check_event(yaml.AliasEvent), self._num_values
        node = super().compose_node(parent, index)
        self._num_values += self._sizes.get(id(node), MOST_VALUES) if is_alias else 1  # an alias inside of its anchor never ends
        self._sizes.setdefault(id(node), self._num_values - before)
        if self._num_values > MOST_VALUES:
            raise TooManyValuesError(f"it holds more than {MOST_VALUES:,} values")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        names = Counter(key.value for key in keys if isinstance(key, yaml.ScalarNode))
        if twice := next((name for name, count in names.items() if count > 1), None):
            raise yaml.constructor.ConstructorError(problem=f"key {twice} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)
