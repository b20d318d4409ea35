"""Documents -> rows of spans: which tokens of which documents each row of an epoch holds, before any shuffling.

Works on lengths alone and must not read a token. Memory is O(documents + rows). Best-fit decreasing after D. S. Johnson,
Near-optimal bin packing algorithms, 1973.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np

from jaxmeg.data.store import ranges

NO_TARGET = -1


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Rows of spans: row r holds the spans first[r] to first[r + 1], one behind the other, then padding.

    The inputs of span s are the tokens [start[s], start[s] + length[s]) of a document, its labels the tokens behind them.
    """

    first: np.ndarray
    """int64 [rows + 1]"""
    document: np.ndarray
    """int64 [spans]"""
    start: np.ndarray
    """int64 [spans]"""
    length: np.ndarray
    """int64 [spans], at least 1."""
    target: np.ndarray
    """int64 [spans], the document of the last label: the span's own, which goes on behind the span; in a joined stream also
    another one, which begins there; or NO_TARGET. A document that goes on behind its span ends the row."""

    @property
    def num_rows(self) -> int:
        return len(self.first) - 1

    @property
    def last(self) -> np.ndarray:
        """int64 [rows], the last span of each row."""
        return self.first[1:] - 1

    def is_shared(self) -> bool:
        """Whether any row holds two documents."""
        return bool((np.diff(self.first) > 1).any())

    @property
    def most_spans(self) -> int:
        """Of a row."""
        return int(np.diff(self.first).max(initial=0))

    def split(self, most_spans: int) -> Packed:
        """A row of more spans becomes several of so many, the last of fewer. No span is cut, so documents must be separate."""
        parts = -(-np.diff(self.first) // most_spans)
        first = np.repeat(self.first[:-1], parts) + ranges(0, parts) * most_spans
        return replace(self, first=np.append(first, self.first[-1]))

    def capped(self, max_rows: int) -> Packed:
        """The first max_rows rows, or all."""
        first = self.first[: max_rows + 1]
        used = slice(0, first[-1])
        return Packed(first=first, document=self.document[used], start=self.start[used], length=self.length[used], target=self.target[used])

    def take(self, rows: np.ndarray) -> Packed:
        """The rows of these indices, int64 [n], in their order."""
        counts = self.first[rows + 1] - self.first[rows]
        spans = ranges(self.first[rows], counts)
        return Packed(first=np.append(0, np.cumsum(counts)), document=self.document[spans], start=self.start[spans],
                      length=self.length[spans], target=self.target[spans])

    def num_trained(self, separate: bool) -> int:
        """Labels that are trained in an epoch. Where documents are not separate, only the last of a row can be missing."""
        last = self.target if separate else self.target[self.last]
        return int(self.length.sum() - (last == NO_TARGET).sum())


@dataclass(frozen=True, kw_only=True)
class DocumentCounts:
    """What becomes of the documents of a store when they are packed."""

    kept: int
    tokens: int
    """Tokens of the documents kept."""
    truncated: int
    """Documents of which only the first tokens are kept."""
    dropped: dict[str, int]
    """Reason -> documents left out."""


def usable(lengths: np.ndarray, seq_len: int, *, packing: str, separate: bool, long_documents: str) -> tuple[np.ndarray, DocumentCounts]:
    """Lengths of documents, int64 [documents] -> tokens of each to pack, 0 where it is left out; counts.

    A document without any target is left out, and `fit` and `none` leave out or truncate what is longer than a row.
    """
    least = 2 if separate else 1
    short = lengths < least
    long = (lengths > seq_len) & (packing != "concat")
    reasons = {"empty" if least == 1 else f"shorter than {least} tokens": short}
    kept = np.where(short, 0, lengths)
    if long_documents == "drop":
        reasons[f"longer than data.seq_len={seq_len}"] = long
        kept = np.where(long, 0, kept)
    elif long_documents == "truncate":
        kept = np.where(long, seq_len, kept)
    dropped = {reason: int(which.sum()) for reason, which in reasons.items() if which.any()}
    truncated = int(((kept > 0) & (kept < lengths)).sum())
    return kept, DocumentCounts(kept=int((kept > 0).sum()), tokens=int(kept.sum()), truncated=truncated, dropped=dropped)


def pack(lengths: np.ndarray, seq_len: int, *, packing: str, separate: bool, rng: np.random.Generator | None) -> Packed:
    """Rows of an epoch from usable lengths, int64 [documents]; documents of length 0 take no part.

    packing is concat, fit or none. rng draws the order of the documents; None keeps the stored one. Not separate: labels
    run on from one document to the next; a row of fit then ends without label where its last document does.
    """
    documents = np.flatnonzero(lengths)
    if rng is not None:
        documents = rng.permutation(documents)
    if packing == "concat":
        return _concat(documents, lengths[documents], seq_len, separate)
    pieces = _pieces(documents, lengths[documents], seq_len)
    return _fit(pieces, seq_len, rng) if packing == "fit" else pieces


def _concat(documents: np.ndarray, lengths: np.ndarray, seq_len: int, separate: bool) -> Packed:
    """One document after the other, cut every seq_len tokens. The last token of all has no target and gets no row of its own."""
    ends = np.cumsum(lengths)
    starts, total = ends - lengths, int(lengths.sum())
    num_rows = -(-max(total - 1, 0) // seq_len)
    row_starts = np.arange(num_rows) * seq_len
    used = min(total, num_rows * seq_len)
    cuts = np.sort(np.concatenate([starts[starts < used], row_starts]), kind="stable")  # two sorted runs: merged in linear time
    cuts = cuts[np.diff(cuts, prepend=-1) > 0]
    cut_ends = np.append(cuts[1:], used)[: len(cuts)]
    here, behind = (np.searchsorted(starts, tokens, side="right") - 1 for tokens in (cuts, cut_ends))
    has_target = (cut_ends < total) & ((behind == here) | (not separate))
    return Packed(first=np.append(np.searchsorted(cuts, row_starts), len(cuts)), document=documents[here], start=cuts - starts[here],
                  length=cut_ends - cuts, target=np.where(has_target, documents[behind], NO_TARGET))


def _pieces(documents: np.ndarray, lengths: np.ndarray, seq_len: int) -> Packed:
    """A row for each document, several for one longer than seq_len; a document's last token gets no row of its own."""
    num_pieces = np.maximum(-(-(lengths - 1) // seq_len), 1)
    document, whole = np.repeat(documents, num_pieces), np.repeat(lengths, num_pieces)
    start = ranges(0, num_pieces) * seq_len
    length = np.minimum(whole - start, seq_len)
    return Packed(first=np.arange(len(document) + 1), document=document, start=start, length=length,
                  target=np.where(start + length < whole, document, NO_TARGET))


def _fit(pieces: Packed, seq_len: int, rng: np.random.Generator | None) -> Packed:
    """Pieces of one row each -> as few rows as best-fit decreasing needs; a number that depends on the lengths alone."""
    falling = np.argsort(-pieces.length, kind="stable")
    rows = best_fit(pieces.length[falling], seq_len)
    num_rows = int(rows.max(initial=-1)) + 1
    if rng is not None:
        rows = rng.permutation(num_rows)[rows]  # else max_rows would keep the longest documents
    by_row = np.argsort(rows, kind="stable")
    order = falling[by_row]
    return replace(pieces, first=np.searchsorted(rows[by_row], np.arange(num_rows + 1)), document=pieces.document[order],
                   start=pieces.start[order], length=pieces.length[order], target=pieces.target[order])


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Falling lengths of at most `capacity`, int64 [pieces] -> the row of each: the fullest one that has room, else a new one.

    Rows are kept by their free space and pieces of one length are placed together, so a million pieces take about a second.
    """
    row_of = np.empty(len(lengths), np.int64)
    rows_by_space: dict[int, list[np.ndarray]] = {}
    spaces: list[int] = []  # the keys of rows_by_space in order
    num_rows = at = 0

    def open_rows(count: int) -> tuple[np.ndarray, int]:
        nonlocal num_rows
        num_rows += count
        return np.arange(num_rows - count, num_rows), capacity

    def put(rows: np.ndarray, space: int) -> None:
        if len(rows) and space:
            if space not in rows_by_space:
                insort(spaces, space)
                rows_by_space[space] = []
            rows_by_space[space].append(rows)

    def take(length: int) -> tuple[np.ndarray, int] | None:
        index = bisect_left(spaces, length)
        if index == len(spaces):
            return None
        space = spaces[index]
        rows = rows_by_space[space].pop()
        if not rows_by_space[space]:
            del rows_by_space[space], spaces[index]
        return rows, space

    for length, count in Counter(lengths.tolist()).items():
        while count:
            rows, space = take(length) or open_rows(-(-count // (capacity // length)))
            each = space // length  # a row that took one piece is the fullest with room for the next, until it is full
            used = min(len(rows), -(-count // each))
            placed = min(count, used * each)
            row_of[at : at + placed] = np.repeat(rows[:used], each)[:placed]
            put(rows[used:], space)
            put(rows[: used - 1], space - each * length)
            put(rows[used - 1 : used], space - (placed - (used - 1) * each) * length)
            at, count = at + placed, count - placed
    return row_of
