"""Mixtures: exact in every period, evenly spread, and in closed form what counters would give one row after the other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmeg.data.mixing import MAX_PERIOD, Chain, integer_ratio, make_mixture

WEIGHTS = st.lists(st.integers(1, 12), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("weights", "ratio"),
    [
        ([1.0], [1]),
        ([3, 1], [3, 1]),
        ([0.75, 0.25], [3, 1]),
        ([0.7, 0.3], [7, 3]),
        ([0.1, 0.2, 0.7], [1, 2, 7]),
        ([6, 3, 9.0], [2, 1, 3]),
        ([1e-05, 3e-05], [1, 3]),
        ([1e9, 2.5e9], [2, 5]),
        ([0.9999, 0.0001], [9999, 1]),
    ],
)
def test_the_ratio_is_that_of_the_weights_as_written(weights, ratio):
    assert integer_ratio(weights) == ratio


def test_a_ratio_of_large_numbers_is_rounded_to_the_longest_period():
    weights = [123_456_789, 987_654_321, 55_555]
    counts = integer_ratio(weights)
    assert sum(counts) == MAX_PERIOD
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - MAX_PERIOD * weight / sum(weights)) < 1


@pytest.mark.parametrize("weights", [[0.0, 1.0], [-1.0], [float("nan"), 1.0], [float("inf")], [1.0, 1e-5]])
def test_a_weight_that_cannot_be_kept_is_refused(weights):
    with pytest.raises(ValueError, match=r"^the weight .*: use ") as error:
        integer_ratio(weights)
    assert "\n" not in str(error.value)


def test_the_largest_remainders_can_leave_a_small_weight_without_row():
    with pytest.raises(ValueError, match="the weight 3e-05 is too small beside a sum of 1"):
        integer_ratio([0.99997, 0.00003])


@given(WEIGHTS)
def test_closed_form_is_what_counters_give(weights):
    mixture = make_mixture(weights)
    period = len(mixture.source)
    sources, ranks = mixture.locate(np.arange(3 * period))
    taken = [0] * len(weights)
    for source, rank in zip(sources.tolist(), ranks.tolist(), strict=True):
        assert rank == taken[source]  # the next row of the source: none is skipped, none comes twice
        taken[source] += 1
    assert taken == [3 * count for count in integer_ratio(weights)]
    far = 10**15 * period
    assert mixture.locate(np.array([far]))[1] == 10**15 * integer_ratio(weights)[sources[0]]


@given(WEIGHTS, st.integers(0, 100))
def test_every_window_of_a_period_has_the_exact_mixture(weights, start):
    mixture = make_mixture(weights)
    sources, _ = mixture.locate(start + np.arange(len(mixture.source)))
    assert np.bincount(sources, minlength=len(weights)).tolist() == integer_ratio(weights)


@settings(max_examples=200)
@given(WEIGHTS)
def test_sources_are_evenly_spread(weights):
    """After any number of rows a source is at most one row away from its share, or two where many sources meet."""
    sources, _ = make_mixture(weights).locate(np.arange(2 * sum(weights)))
    for source, weight in enumerate(weights):
        ahead = np.cumsum(sources == source) - np.arange(1, len(sources) + 1) * weight / sum(weights)
        assert np.abs(ahead).max() <= (1 if len(weights) <= 2 else 2)


def test_three_to_one():
    sources, _ = make_mixture([3, 1]).locate(np.arange(8))
    assert sources.tolist() == [0, 0, 1, 0] * 2


def test_a_chain_goes_through_one_source_after_the_other():
    sources, rows = Chain(ends=np.array([3, 3, 5])).locate(np.arange(5))  # the second one has no row
    assert list(zip(sources.tolist(), rows.tolist(), strict=True)) == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 1)]
