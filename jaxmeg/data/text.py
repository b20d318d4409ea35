"""Byte-level rows of a text file: the data of the demo. The rows of update n are a function of (seed, n) alone.

Every byte is a token (256 ids). The text is cut into rows of seq_len bytes; the last part is kept for validation.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np

VOCAB_SIZE = 256


class DataError(ValueError):
    """Text that cannot fill the rows asked for; the message has both numbers and the fix."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """inputs and labels, int32 [rows, T]; mask, bool [rows, T], False where there is nothing to train or count."""

    inputs: np.ndarray
    labels: np.ndarray
    mask: np.ndarray

    def filled(self, num_rows: int) -> Rows:
        """With rows of mask False added, up to num_rows."""
        pad = ((0, num_rows - len(self.inputs)), (0, 0))
        return Rows(inputs=np.pad(self.inputs, pad), labels=np.pad(self.labels, pad), mask=np.pad(self.mask, pad))


def read_text(path: str | None) -> tuple[np.ndarray, str]:
    """(bytes as uint8 [N], name). None reads the text that ships with the project."""
    if path is None:
        file = resources.files("jaxmeg.data") / "shakespeare.txt"
        return np.frombuffer(file.read_bytes(), np.uint8), "8 plays by Shakespeare (shipped with jaxmeg)"
    return np.fromfile(path, np.uint8), Path(path).name


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text cut into rows by random access: row i holds bytes [i*T, i*T + T], the last being a label only."""

    tokens: np.ndarray
    seq_len: int
    seed: int
    num_validation: int

    @property
    def num_rows(self) -> int:
        """All rows, training first, then validation."""
        return (len(self.tokens) - 1) // self.seq_len

    @property
    def num_training(self) -> int:
        return self.num_rows - self.num_validation

    def rows(self, indices: np.ndarray) -> Rows:
        window = np.asarray(indices)[:, None] * self.seq_len + np.arange(self.seq_len + 1)[None]
        tokens = self.tokens[window].astype(np.int32)
        return Rows(inputs=tokens[:, :-1], labels=tokens[:, 1:], mask=np.ones(tokens[:, 1:].shape, bool))

    def batch(self, update: int, size: int) -> Rows:
        """The `size` training rows of an update. Each epoch is a permutation of its own; a batch may span two epochs."""
        position = update * size + np.arange(size)
        epochs, offsets = np.divmod(position, self.num_training)
        orders = {epoch: np.random.default_rng([self.seed, epoch]).permutation(self.num_training) for epoch in set(epochs.tolist())}
        return self.rows(np.array([orders[epoch][offset] for epoch, offset in zip(epochs.tolist(), offsets.tolist(), strict=True)]))

    def validation(self, count: int) -> Rows:
        """The first `count` validation rows, all for 0."""
        count = min(count, self.num_validation) if count else self.num_validation
        return self.rows(np.arange(self.num_training, self.num_training + count))


def open_text(tokens: np.ndarray, seq_len: int, validation_fraction: float, seed: int, global_batch: int) -> Text:
    """Split a text into training and validation rows. Raises DataError where it is too short for one update."""
    num_rows = max(len(tokens) - 1, 0) // seq_len
    num_validation = int(num_rows * validation_fraction)
    if num_rows - num_validation < global_batch:
        raise DataError(f"the text has {len(tokens)} bytes, {num_rows - num_validation} training rows of data.seq_len={seq_len}, fewer "
                        f"than data.global_batch={global_batch}: use a longer text, a smaller batch or shorter rows")
    return Text(tokens=tokens, seq_len=seq_len, seed=seed, num_validation=num_validation)
