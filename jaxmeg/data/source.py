"""Rows of any kind for a module of the user's: an object with a length and [i] -> a dict of arrays, in a seeded order.

As with text, the rows of an update are a function of (seed, rows consumed) alone: every epoch is a permutation of its own, and a
batch may span two. Must not know models or devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any, Protocol

import numpy as np

from jaxmeg.data.store import DataError

Batch = dict[str, np.ndarray]


class RowSource(Protocol):
    """What a user gives: rows by index, each a dict of arrays or numbers with the same names, shapes and dtypes."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class RowStream:
    """A source cut in two: the last `num_validation` rows are kept for validation."""

    source: RowSource
    order: Callable[[int], np.ndarray]
    """Epoch -> its training rows in order, int64 [num_training]."""
    num_training: int
    num_validation: int
    first: Batch
    """Row 0, which says what all rows look like."""

    def training(self, numbers: np.ndarray) -> Batch:
        """Rows of the endless stream by number, int64 [rows], stacked: name -> [rows, ...]."""
        epochs, offsets = np.divmod(numbers, self.num_training)
        return self._stack(int(self.order(epoch)[offset]) for epoch, offset in zip(epochs.tolist(), offsets.tolist(), strict=True))

    def validation(self, first: int, count: int) -> Batch:
        """At most `count` validation rows from `first` on."""
        return self._stack(range(self.num_training + first, self.num_training + min(first + count, self.num_validation)))

    def _stack(self, indices: Iterable[int]) -> Batch:
        rows = [self._row(i) for i in indices]
        return {name: np.stack([row[name] for row in rows]) for name in self.first}

    def _row(self, index: int) -> Batch:
        row, first = read_row(self.source, index), self.first
        if row.keys() != first.keys():
            own, wanted = (", ".join(map(str, names)) for names in (row, first))
            raise DataError(f"row {index} of the data source has {own}, and row 0 has {wanted}: give all rows the same names")
        for name, x in row.items():
            for what, own, wanted in (("shape", x.shape, first[name].shape), ("dtype", x.dtype, first[name].dtype)):
                if own != wanted:
                    raise DataError(f"row {index} of the data source: {name} has {what} {own}, and in row 0 {wanted}: give all rows one "
                                    f"{what}")
        return row


def open_rows(source: RowSource, seed: int, validation_fraction: float) -> RowStream:
    """Raises DataError for what is no source of rows, rows that are no dicts of arrays, and a split that leaves one side without rows."""
    if missing := [name for name in ("__len__", "__getitem__") if not hasattr(type(source), name)]:
        what = f"the class {source.__name__}" if isinstance(source, type) else f"a {type(source).__name__}"
        raise DataError(f"the data source is {what}, which has no {' and no '.join(missing)}: give an object with len() and [i] -> a dict "
                        "of arrays")
    num_rows = len(source)
    num_validation = int(num_rows * validation_fraction)
    num_training = num_rows - num_validation
    if num_training < 1:
        raise DataError(f"the data source has {num_rows} rows, of which data.validation_fraction={validation_fraction:g} leaves none "
                        "to train on: give more rows, or a smaller fraction")
    if validation_fraction and not num_validation:
        raise DataError(f"data.validation_fraction={validation_fraction:g} of the {num_rows} rows of the data source is no row: "
                        "use a larger fraction, or 0 for no validation")
    return RowStream(source=source, order=_orders(seed, num_training), num_training=num_training, num_validation=num_validation,
                     first=read_row(source, 0))


def read_row(source: RowSource, index: int) -> Batch:
    """One row with all its values as arrays. Raises DataError where it is missing or is no dict of arrays of numbers."""
    try:
        row = source[index]
    except LookupError as error:
        raise DataError(f"row {index} of the data source can't be read ({type(error).__name__}: {error}), and len() is {len(source)}: "
                        f"give a row for every [i] from 0 to {len(source) - 1}") from error
    if not isinstance(row, dict) or not row:
        what = "an empty dict" if isinstance(row, dict) else f"a {type(row).__name__}"
        raise DataError(f"row {index} of the data source is {what}: give a dict of arrays, for example "
                        '{"inputs": ..., "label": ...}')
    arrays = {}
    for name, value in row.items():
        try:
            arrays[name] = np.asarray(value)
        except ValueError as error:  # lists of unequal length
            raise DataError(f"row {index} of the data source: {name} is no array ({error}): pad it to one shape") from error
        if arrays[name].dtype.kind in "OSUMm":  # objects, text, times
            raise DataError(f"row {index} of the data source: {name} is a {type(value).__name__} of dtype {arrays[name].dtype}: give an "
                            "array of numbers")
    return arrays


def _orders(seed: int, num_rows: int) -> Callable[[int], np.ndarray]:
    """Epoch -> its permutation, int64 [rows]. The two last used are kept; one thread computes, the others wait for it."""
    lock = Lock()

    @lru_cache(maxsize=2)
    def permutation(epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, epoch]).permutation(num_rows)

    def order(epoch: int) -> np.ndarray:
        with lock:
            return permutation(epoch)

    return order
