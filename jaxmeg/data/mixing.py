"""Which source a row of the stream comes from, in closed form: no counter is kept, so a run can start at any row.

A mixture repeats one period of rows in which every source has its exact share, evenly spread. Must not know documents
or tokens. The order in a period is that of seats under Sainte-Laguë's method.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

MAX_PERIOD = 10_000
"""Rows of the longest period; a ratio that needs more is rounded to this many."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The endless stream of a mixture: slot s of every period is row `rank[s]` of the rows of source `source[s]` in it."""

    counts: np.ndarray
    """int64 [sources], rows of a period."""
    source: np.ndarray
    """int64 [period]"""
    rank: np.ndarray
    """int64 [period]"""

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row numbers of the stream, int64 [n] -> (source, number of the row in that source's own stream), int64 [n]."""
        period, slot = np.divmod(numbers, len(self.source))
        source = self.source[slot]
        return source, period * self.counts[source] + self.rank[slot]


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Sources one after the other, once."""

    ends: np.ndarray
    """int64 [sources], rows up to the end of each."""

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Like `Mixture.locate`, for numbers below the sum of all rows."""
        source = np.searchsorted(self.ends, numbers, side="right")
        return source, numbers - np.concatenate([[0], self.ends])[source]


def make_mixture(weights: Sequence[float]) -> Mixture:
    """Rows in the ratio of the weights: exactly in every period, and nearly in every part of one.

    Raises ValueError for a weight that is not above 0, or so small that a period of MAX_PERIOD rows has no row for it.
    """
    counts = np.array(integer_ratio(weights), np.int64)
    source = np.repeat(np.arange(len(counts)), counts)
    rank = np.concatenate([np.arange(count) for count in counts])
    # Row k of n stands at (k + 1/2)/n of the period. Division rounds equal ratios alike, so ties go to the first source.
    order = np.argsort((2 * rank + 1) / counts[source], kind="stable")
    return Mixture(counts=counts, source=source[order], rank=rank[order])


def integer_ratio(weights: Sequence[float]) -> list[int]:
    """The smallest whole numbers in the ratio of the weights as they are written: (0.7, 0.3) -> [7, 3].

    If their sum is above MAX_PERIOD, the nearest numbers of that sum.
    """
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(f"the weight {weight} is out of range: use a number above 0")
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    whole = [count // math.gcd(*whole) for count in whole]
    total = sum(whole)
    if total <= MAX_PERIOD:
        return whole
    counts, rests = zip(*(divmod(count * MAX_PERIOD, total) for count in whole), strict=True)
    missing = MAX_PERIOD - sum(counts)
    largest = sorted(range(len(whole)), key=lambda index: -rests[index])[:missing]
    counts = [count + (index in largest) for index, count in enumerate(counts)]
    if min(counts) == 0:
        weight = weights[counts.index(0)]
        raise ValueError(f"the weight {weight} is too small beside a sum of {sum(weights):g}: use at least {sum(weights) / MAX_PERIOD:g}")
    return counts
