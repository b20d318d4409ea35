"""Jumps of the loss: one that lies far above those before it, in their own standard deviations.

Plain numbers, no jax. A loss that jumps is remembered as if it had just reached the limit: so the next is still seen, and
a loss that stays high widens the deviation until it is the new normal. A loss that is not finite is left to the step,
which skips the update, and is not remembered.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

WINDOW = 100  # losses that are remembered
FEWEST = 20  # remembered before anything is called a jump
LEAST = 0.005  # smallest deviation, of the mean: on a flat curve rounding would be a jump


class Spike(NamedTuple):
    """A loss that jumped, and what it is measured by."""

    deviations: float
    """How far it is above the mean, in standard deviations."""
    mean: float
    deviation: float
    num_losses: int
    """Losses before it that are remembered."""


class Spikes:
    """Sees the losses of a run in order."""

    def __init__(self, limit: float):
        """limit: a jump is so many standard deviations above the mean."""
        self.limit = limit
        self.losses: deque[float] = deque(maxlen=WINDOW)

    def see(self, loss: float) -> Spike | None:
        """The next loss; what there is to say if it jumped."""
        if not math.isfinite(loss):
            return None
        count = len(self.losses)
        if count < FEWEST:
            self.losses.append(loss)
            return None
        mean = math.fsum(self.losses) / count
        spread = math.sqrt(math.fsum((x - mean) ** 2 for x in self.losses) / count)
        deviation = max(spread, LEAST * abs(mean), 1e-12)
        most = mean + self.limit * deviation
        self.losses.append(min(loss, most))
        return Spike((loss - mean) / deviation, mean, deviation, count) if loss > most else None
