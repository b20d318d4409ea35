"""A store cut in two: the tokens before a border, and those behind it for validation.

The border depends on the tokens alone, not on rows or packing: who changes seq_len never trains on what was validation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from jaxmeg.data.store import ReadCounts, Store


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
        if not 0 <= document < len(self.lengths) or start < 0 or start + length > self.lengths[document]:
            raise IndexError(f"tokens [{start}, {start + length}) of document {document} are outside of this part of {self.name}")
        return self.store.read(self.first + document, start + (self.skip if document == 0 else 0), length)


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
