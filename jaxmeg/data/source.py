"""Rows of any kind for a module of the user's: an object with a length and [i] -> a dict of arrays, in a seeded order.

As with text, the rows of an update are a function of (seed, rows consumed) alone: every epoch is a permutation of its own, and a
batch may span two. Must not know models or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxmeg.data.store import DataError

Batch = dict[str, np.ndarray]


class RowSource(Protocol):
    """What a user gives: rows by index, each a dict of arrays or numbers with the same names and shapes."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class RowStream:
    """A source cut in two: the last `num_validation` rows are kept for validation."""

    source: RowSource
    seed: int
    num_validation: int

    @property
    def num_training(self) -> int:
        return len(self.source) - self.num_validation

    def training(self, numbers: np.ndarray) -> Batch:
        """Rows of the endless stream by number, int64 [rows], stacked: name -> [rows, ...]."""
        epochs, offsets = np.divmod(numbers, self.num_training)
        orders = {e: np.random.default_rng([self.seed, e]).permutation(self.num_training) for e in set(epochs.tolist())}
        return self._stack([int(orders[e][i]) for e, i in zip(epochs.tolist(), offsets.tolist(), strict=True)])

    def validation(self, first: int, count: int) -> Batch:
        """At most `count` validation rows from `first` on."""
        return self._stack(range(self.num_training + first, min(self.num_training + first + count, len(self.source))))

    def _stack(self, indices: Any) -> Batch:
        rows = [self.source[i] for i in indices]
        return {name: np.stack([np.asarray(row[name]) for row in rows]) for name in rows[0]}


def open_rows(source: RowSource, seed: int, validation_fraction: float) -> RowStream:
    """Raises DataError for a source without training rows or whose rows are no dicts."""
    num_rows = len(source)
    num_validation = int(num_rows * validation_fraction)
    if num_rows - num_validation < 1:
        raise DataError(f"the data source has {num_rows} rows, of which data.validation_fraction={validation_fraction:g} leaves none "
                        "to train on: give more rows, or a smaller fraction")
    if not isinstance(source[0], dict):
        raise DataError(f"row 0 of the data source is a {type(source[0]).__name__}: give a dict of arrays, for example "
                        '{"inputs": ..., "label": ...}')
    return RowStream(source=source, seed=seed, num_validation=num_validation)
