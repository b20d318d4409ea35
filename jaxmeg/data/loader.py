"""The rows of update after update, read ahead by threads. What update n gets is a function of the dataset and n alone.

Grain's MapDataset does the reading ahead and keeps the order. There is no state but the number of the update. Grain imports jax
where it is installed, so nothing that must stay free of jax may import this module.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

import grain
import numpy as np

from jaxmeg.data.dataset import Dataset, Rows

T = TypeVar("T")

MAX_THREADS = 2  # reading holds Python's lock for half of the time, and what waits for it is the loop


def batches(dataset: Dataset, global_batch: int, first_update: int, last_update: int, positions: np.ndarray, prefetch: int,
            first_row: int | None = None, place: Callable[[Rows], Any] = lambda rows: rows) -> Generator[tuple[int, Any], None, None]:
    """(update, its rows) for the updates first_update to last_update - 1.

    positions: the rows of a global batch that this process reads, int64 [rows], from 0 to global_batch - 1. prefetch: updates that are
    read ahead. first_row: number in the stream of the first row of first_update, which is the rows consumed before it; None is
    first_update * global_batch, which holds when the batch has always had this size. place: what is done with the rows of an update in the
    thread that has read them, such as putting them on the devices.
    """
    offset = 0 if first_row is None else first_row - first_update * global_batch
    return read_ahead(lambda update: place(dataset.rows(offset + update * global_batch + positions)), first_update, last_update, prefetch)


def read_ahead(read: Callable[[int], T], first_update: int, last_update: int, prefetch: int) -> Generator[tuple[int, T], None, None]:
    """(update, read(update)) for the updates first_update to last_update - 1, at most `prefetch` of them before they are asked for."""
    options = grain.ReadOptions(num_threads=min(prefetch, MAX_THREADS), prefetch_buffer_size=prefetch)
    iterator = iter(grain.MapDataset.range(first_update, last_update).map(lambda update: (update, read(update))).to_iter_dataset(options))
    try:
        yield from iterator
    finally:
        iterator.close()
