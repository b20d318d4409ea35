"""The loader: rows of update n whatever is read ahead, where a run starts, how many processes read, or how the batch changes."""

import queue
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmeg.config import DataConfig
from jaxmeg.data.dataset import make_dataset
from jaxmeg.data.loader import batches
from jaxmeg.data.store import DataError, MemoryStore

BATCH, STEPS = 8, 12


def mixed_dataset(packing="fit"):
    """Two sources 3:1 with shuffle and packing; 12 updates of 8 rows are several epochs of both."""
    rng = np.random.default_rng(0)
    stores, at = [], 0
    for name, count in (("a", 24), ("b", 7)):
        documents = []
        for length in rng.integers(2, 30, count):
            documents.append(np.arange(at, at + length))
            at += length
        stores.append(MemoryStore(name, documents, 10_000))
    config = DataConfig(seq_len=16, global_batch=BATCH, packing=packing)
    return make_dataset([(stores[0], 3.0), (stores[1], 1.0)], config, 5, shuffle=True)


DATASET = mixed_dataset()
ALL = np.arange(BATCH)


def taken(first=0, last=STEPS, positions=ALL, prefetch=3, batch=BATCH, first_row=None, dataset=DATASET):
    """The updates and inputs that the loader gives."""
    return [(update, rows.inputs) for update, rows in batches(dataset, batch, first, last, positions, prefetch, first_row)]


def same(some, others) -> bool:
    return [update for update, _ in some] == [update for update, _ in others] and all(
        np.array_equal(a, b) for (_, a), (_, b) in zip(some, others, strict=True))


@pytest.mark.parametrize("packing", ["concat", "fit", "none"])
@pytest.mark.parametrize("prefetch", [1, 3, 40])
def test_every_update_has_its_rows(packing, prefetch):
    dataset = mixed_dataset(packing)
    found = list(batches(dataset, BATCH, 0, STEPS, ALL, prefetch))
    assert [update for update, _ in found] == list(range(STEPS))
    for update, rows in found:
        expected = dataset.rows(np.arange(update * BATCH, (update + 1) * BATCH))
        for name in ("inputs", "labels", "mask", "segments"):
            assert np.array_equal(getattr(rows, name), getattr(expected, name))
    places = dataset.origin(np.arange(STEPS * BATCH))
    assert {(name, epoch) for name, epoch, _ in places} >= {("a", 0), ("a", 1), ("b", 0), ("b", 1)}  # over borders of epochs


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, STEPS), max_size=4))
def test_a_run_in_pieces_reads_what_a_straight_run_reads(stops):
    """P37, P38: stopped after any updates, with a loader and a dataset made anew each time."""
    borders = [0, *sorted(stops), STEPS]
    pieces = [taken(first, last, dataset=mixed_dataset()) for first, last in pairwise(borders)]
    assert same([step for piece in pieces for step in piece], taken())


@pytest.mark.parametrize("readers", [1, 2, 4, 8])
@pytest.mark.parametrize("strided", [False, True])
def test_the_batch_does_not_depend_on_the_number_of_readers(readers, strided):
    """P42: the processes read parts of the same batch, in whatever way the mesh cuts it."""
    whole = taken()
    parts = [ALL[reader::readers] if strided else np.split(ALL, readers)[reader] for reader in range(readers)]
    for positions in parts:
        assert same(taken(positions=positions), [(update, inputs[positions]) for update, inputs in whole])
    assert sorted(np.concatenate(parts).tolist()) == ALL.tolist()


def test_resumed_with_other_readers_the_rest_is_read_once():
    """P42: five updates at four readers, then the rest at two and at eight; every row of the stream comes once, at 3:1."""
    numbers = []
    for first, last, readers in ((0, 5, 4), (5, 9, 2), (9, STEPS, 8)):
        for positions in np.split(ALL, readers):
            for update, inputs in taken(first, last, positions=positions):
                rows = update * BATCH + positions
                assert np.array_equal(inputs, DATASET.rows(rows).inputs)
                numbers += rows.tolist()
    assert sorted(numbers) == list(range(STEPS * BATCH))
    for first in range(0, STEPS * BATCH, 4):
        assert Counter(name for name, _, _ in DATASET.origin(np.arange(first, first + 4))) == {"a": 3, "b": 1}


@pytest.mark.parametrize("batch", [1, 4, 6, 16])
def test_another_batch_goes_on_with_the_next_row(batch):
    """Five updates of 8 rows, then updates of another size: no row is left out or comes twice."""
    before = taken(0, 5)
    after = taken(5, 9, positions=np.arange(batch), batch=batch, first_row=5 * BATCH)
    assert [update for update, _ in after] == [5, 6, 7, 8]
    inputs = np.concatenate([inputs for _, inputs in before + after])
    assert np.array_equal(inputs, DATASET.rows(np.arange(5 * BATCH + 4 * batch)).inputs)


def test_no_updates_are_no_batches():
    assert taken(7, 7) == []


class Recorder:
    """A dataset that says which rows were asked for."""

    def __init__(self):
        self.asked: queue.Queue[int] = queue.Queue()

    def rows(self, numbers):
        self.asked.put(int(numbers[0]))
        return numbers


def test_updates_are_read_ahead():
    recorder = Recorder()
    steps = batches(recorder, 2, 0, 100, np.arange(2), prefetch=3)
    assert next(steps)[0] == 0
    ahead = [recorder.asked.get(timeout=30) for _ in range(4)]
    assert sorted(ahead) == [0, 2, 4, 6]  # the one taken and three more, though nobody asked for them
    steps.close()
    assert recorder.asked.empty()


class Broken:
    """A dataset that cannot be read from some update on."""

    def rows(self, numbers):
        if numbers[0] >= 6:
            raise DataError("the file is gone: put it back")
        return numbers


def test_an_error_while_reading_ahead_comes_at_its_update():
    steps = batches(Broken(), 2, 0, 100, np.arange(2), prefetch=4)
    assert [next(steps)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match=r"^the file is gone"):
        next(steps)
