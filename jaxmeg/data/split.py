"""A store cut in two: the tokens before a border, and those behind it for validation.

The border depends on the tokens alone, not on rows or packing: who changes seq_len never trains on what was validation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from jaxmeg.data.store import ReadCounts, Store, check_spans


@dataclass(frozen=True, kw_only=True)
class Section:
    """Neighbouring documents of a store, as a store. The first and the last one may be cut."""

    store: Store
    first: int
    """Document of the store that is the first one here."""
    skip: int
    """Tokens of it that are left out."""
    lengths: np.ndarray
    """int64 [documents], tokens of each."""
    counts: ReadCounts

    @property
    def name(self) -> str:
        return self.store.name

    @property
    def vocab_size(self) -> int:
        return self.store.vocab_size

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        """int32 [length], the tokens [start, start + length) of a document. IndexError outside of it."""
        return self.read_spans(np.array([document]), np.array([start]), np.array([length]))

    def read_spans(self, documents: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """int32 [sum of lengths], `read` of each (document, start, length), one behind the other."""
        check_spans(self.lengths, documents, starts, lengths, f"this part of {self.name}")
        return self.store.read_spans(self.first + documents, np.where(documents == 0, starts + self.skip, starts), lengths)


def split(store: Store, fraction: float) -> tuple[Section, Section]:
    """(training, validation): the last `fraction` of the tokens in stored order is validation.

    A document across the border is cut, counts in both parts, and has no target from one to the other.
    """
    lengths, counts = store.lengths, store.counts
    ends = np.cumsum(lengths)
    total = int(lengths.sum())
    border = total - int(total * fraction)
    document = int(np.searchsorted(ends, border, side="right"))
    before = border - int(ends[document - 1] if document else 0)  # tokens of this document that are trained
    trained, held = lengths[: document + (before > 0)].copy(), lengths[document:].copy()
    if before:
        trained[-1], held[0] = before, held[0] - before
    others = len(lengths) - len(trained)  # documents of which training has nothing
    training = Section(store=store, first=0, skip=0, lengths=trained, counts=replace(counts, read=counts.read - others, kept=len(trained)))
    return training, Section(store=store, first=document, skip=before, lengths=held, counts=ReadCounts(read=len(held), kept=len(held)))
