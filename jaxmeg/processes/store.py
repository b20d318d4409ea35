"""Short texts that the processes of a run leave for each other, in the key-value store of jax's coordination service.

Nothing here touches a device or waits for another process. Keys of two runs in the same processes don't mix.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Protocol

import jax

from jaxmeg import _compat

_opened: Counter[str] = Counter()


class Store(Protocol):
    """What is shared; raises RuntimeError where the coordinator can't be reached."""

    def put(self, key: str, text: str) -> None:
        """Leave a text, over an earlier one."""
        ...

    def put_first(self, key: str, text: str) -> str:
        """Leave a text unless there is one; the one that is there now."""
        ...

    def read(self, folder: str) -> dict[str, str]:
        """All texts below `folder`, by the last part of the key."""
        ...


class CoordinationStore:
    """A store in jax's coordination service, below one name."""

    def __init__(self, client: Any, name: str):
        self._client, self._name = client, name

    def put(self, key: str, text: str) -> None:
        self._client.key_value_set(f"{self._name}/{key}", text, allow_overwrite=True)

    def put_first(self, key: str, text: str) -> str:
        try:
            self._client.key_value_set(f"{self._name}/{key}", text)
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
        folder, _, last = key.rpartition("/")
        return self.read(folder)[last]

    def read(self, folder: str) -> dict[str, str]:
        pairs = self._client.key_value_dir_get(f"{self._name}/{folder}/")
        return {key.rpartition("/")[2]: text for key, text in pairs}


def open_store(name: str) -> Store | None:
    """A new, empty store that all processes share, or None with one process. Every process opens the same ones in the same order."""
    client, _, count = _compat.coordination()
    if client is None or count == 1:
        return None
    _opened[name] += 1
    return CoordinationStore(client, f"jaxmeg/{name}{_opened[name]}")
