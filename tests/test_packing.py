"""Packing on lengths alone: best fit against a plain implementation, what is dropped or cut, seeds, rows that are capped."""

from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmeg.data.packing import NO_TARGET, best_fit, pack, usable

PACKINGS = ("concat", "fit", "none")


def plain_best_fit(lengths, capacity) -> list[int]:
    """Used space of each row: every piece goes to the fullest row that has room."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        room = [index for index, used in enumerate(rows) if used + length <= capacity]
        if room:
            rows[max(room, key=lambda index: rows[index])] += length
        else:
            rows.append(length)
    return sorted(rows)


def spans(packed) -> list[list[tuple[int, int, int, int]]]:
    """Rows as lists of (document, start, length, document of the last label)."""
    columns = (packed.document, packed.start, packed.length, packed.target)
    every = list(zip(*(column.tolist() for column in columns), strict=True))
    return [every[low:high] for low, high in zip(packed.first[:-1].tolist(), packed.first[1:].tolist(), strict=True)]


@given(st.integers(1, 40).flatmap(lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity), max_size=60))))
def test_best_fit_fills_rows_as_the_plain_algorithm_does(case):
    capacity, lengths = case
    falling = np.array(sorted(lengths, reverse=True), np.int64)
    rows = best_fit(falling, capacity)
    assert sorted(set(rows.tolist())) == list(range(len(set(rows.tolist()))))
    assert sorted(np.bincount(rows, falling).astype(int).tolist()) == plain_best_fit(lengths, capacity)


def test_best_fit_of_many_documents_wastes_little():
    rng = np.random.default_rng(0)
    lengths = np.sort(np.clip(rng.lognormal(5, 1, 100_000).astype(np.int64), 2, 1024))[::-1]
    rows = best_fit(lengths, 1024)
    used = np.bincount(rows, lengths)
    least = ceil(lengths.sum() / 1024)
    assert used.max() <= 1024 and used.sum() == lengths.sum()
    assert least <= len(used) <= 1.001 * least


@given(st.lists(st.integers(2, 30), min_size=1, max_size=30), st.integers(1, 12), st.integers(0, 5))
def test_the_seed_moves_documents_but_not_the_number_of_rows(lengths, seq_len, seed):
    for packing in PACKINGS:
        rngs = None, np.random.default_rng(seed)
        stored, shuffled = (pack(np.array(lengths), seq_len, packing=packing, separate=True, rng=rng) for rng in rngs)
        assert stored.num_rows == shuffled.num_rows
        assert stored.num_trained(True) == shuffled.num_trained(True) == sum(lengths) - len(lengths)


def test_rows_of_each_packing():
    lengths = np.array([5, 0, 7, 13, 2])  # the second document is left out
    by_hand = {
        # One stream of 27 tokens; a row ends inside document 3, whose next token is then the label.
        "concat": [[(0, 0, 5, -1), (2, 0, 5, 2)], [(2, 5, 2, -1), (3, 0, 8, 3)], [(3, 8, 5, -1), (4, 0, 2, -1)]],
        # Document 3 is 10 + 3; 10, 7 + 3 and 5 + 2 fill three rows.
        "fit": [[(3, 0, 10, 3)], [(2, 0, 7, -1), (3, 10, 3, -1)], [(0, 0, 5, -1), (4, 0, 2, -1)]],
        "none": [[(0, 0, 5, -1)], [(2, 0, 7, -1)], [(3, 0, 10, 3)], [(3, 10, 3, -1)], [(4, 0, 2, -1)]],
    }
    for packing, rows in by_hand.items():
        assert spans(pack(lengths, 10, packing=packing, separate=True, rng=None)) == rows


def test_a_joined_stream_predicts_the_next_document():
    lengths = np.array([4, 4, 1, 3])
    assert spans(pack(lengths, 4, packing="concat", separate=False, rng=None)) == [
        [(0, 0, 4, 1)], [(1, 0, 4, 2)], [(2, 0, 1, 3), (3, 0, 3, NO_TARGET)]]
    # One token more: it is the last label and gets no row of its own.
    longer = pack(np.append(lengths, 1), 4, packing="concat", separate=False, rng=None)
    assert spans(longer)[-1] == [(2, 0, 1, 3), (3, 0, 3, 4)]
    assert longer.num_trained(False) == 12


@pytest.mark.parametrize("packing", ["concat", "fit"])
def test_rows_of_more_documents_become_several(packing):
    lengths = np.array([2, 3, 2, 2, 9, 2, 2, 3])
    packed = pack(lengths, 12, packing=packing, separate=True, rng=None)
    rows, most = spans(packed), 2
    by_hand = [row[at : at + most] for row in rows for at in range(0, len(row), most)]
    assert packed.most_spans > most and len(by_hand) > len(rows)
    bounded = packed.split(most)
    assert spans(bounded) == by_hand and bounded.most_spans == most
    assert bounded.num_trained(True) == packed.num_trained(True)
    assert spans(packed.split(packed.most_spans)) == rows
    assert packed.capped(0).split(1).num_rows == packed.capped(0).most_spans == 0


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_last_token_gets_no_row_of_its_own(packing):
    """One document of 3 T + 1 tokens is 3 rows in which every input has a label."""
    packed = pack(np.array([25]), 8, packing=packing, separate=True, rng=None)
    assert spans(packed) == [[(0, 0, 8, 0)], [(0, 8, 8, 0)], [(0, 16, 8, 0)]]
    assert packed.num_trained(True) == 24 and not packed.is_shared()


@pytest.mark.parametrize("packing", PACKINGS)
def test_no_documents_are_no_rows(packing):
    packed = pack(np.array([0, 0], np.int64), 8, packing=packing, separate=True, rng=np.random.default_rng(0))
    assert packed.num_rows == packed.num_trained(True) == 0 and not packed.is_shared()


def test_what_is_dropped_and_truncated():
    lengths = np.array([1, 2, 8, 9, 30, 0])
    drop = usable(lengths, 8, packing="fit", separate=True, long_documents="drop")
    assert drop[0].tolist() == [0, 2, 8, 0, 0, 0]
    assert (drop[1].kept, drop[1].tokens, drop[1].truncated) == (2, 10, 0)
    assert drop[1].dropped == {"shorter than 2 tokens": 2, "longer than data.seq_len=8": 2}
    cut = usable(lengths, 8, packing="none", separate=True, long_documents="truncate")
    assert cut[0].tolist() == [0, 2, 8, 8, 8, 0] and cut[1].truncated == 2 and cut[1].dropped == {"shorter than 2 tokens": 2}
    whole = usable(lengths, 8, packing="fit", separate=True, long_documents="split")
    assert whole[0].tolist() == [0, 2, 8, 9, 30, 0] and whole[1].truncated == 0
    joined = usable(lengths, 8, packing="concat", separate=False, long_documents="drop")  # concat has no long documents
    assert joined[0].tolist() == lengths.tolist() and joined[1].dropped == {"empty": 1}


@pytest.mark.parametrize("packing", PACKINGS)
def test_capped_rows_are_the_first_ones(packing):
    every = pack(np.arange(2, 40), 8, packing=packing, separate=True, rng=np.random.default_rng(1))
    some = every.capped(5)
    assert spans(some) == spans(every)[:5]
    assert spans(every.capped(10_000)) == spans(every)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(1, 12), st.sampled_from(PACKINGS), st.booleans(), st.booleans())
def test_where_a_label_can_stand_behind_a_span(lengths, seq_len, packing, separate, shuffle):
    """What reading many rows at once rests on: a document goes on only at the end of a row, and only full rows have a label behind."""
    lengths, _ = usable(np.array(lengths), seq_len, packing=packing, separate=separate, long_documents="split")
    rows = spans(pack(lengths, seq_len, packing=packing, separate=separate, rng=np.random.default_rng(0) if shuffle else None))
    for row in rows:
        for (document, start, length, target), following in zip(row, [*row[1:], None], strict=True):
            assert length >= 1 and start + length <= lengths[document]
            if target == document:
                assert following is None and start + length < lengths[document]
            elif target != NO_TARGET:
                assert packing == "concat" and not separate and start + length == lengths[document]
                assert following is None or following[:2] == (target, 0)
        assert row[-1][3] == NO_TARGET or sum(length for _, _, length, _ in row) == seq_len


@pytest.mark.parametrize("packing", PACKINGS)
def test_rows_taken_are_those_rows(packing):
    every = pack(np.arange(2, 40), 8, packing=packing, separate=True, rng=np.random.default_rng(1))
    rows = [every.num_rows - 1, 3, 0, 3]
    assert spans(every.take(np.array(rows))) == [spans(every)[row] for row in rows]
    assert spans(every.take(np.array([], np.int64))) == []


def test_the_cap_does_not_choose_by_length():
    """Best fit places the longest documents first; capped rows are a sample of all rows all the same."""
    lengths = np.repeat([8, 4, 2], 40)
    packed = pack(lengths, 8, packing="fit", separate=True, rng=np.random.default_rng(0)).capped(35)
    assert set(packed.length.tolist()) == {8, 4, 2}
