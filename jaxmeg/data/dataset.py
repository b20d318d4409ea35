"""Rows of tokens by their number in an endless stream: any row can be asked for at any time, so a run's position is one integer.

Row number -> (source, row of its stream) by `mixing`, -> (epoch, row of the epoch) by a permutation of that epoch, -> spans of
documents by `packing`, -> tokens read from a store. Must not know jax, updates, processes or how rows are prefetched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock

import numpy as np

from jaxmeg.config import DataConfig
from jaxmeg.data.mixing import Chain, Mixture, make_mixture
from jaxmeg.data.packing import NO_TARGET, DocumentCounts, Packed, pack, usable
from jaxmeg.data.prepare import Progress, open_corpus
from jaxmeg.data.report import Report, SourceReport
from jaxmeg.data.split import split
from jaxmeg.data.store import DataError, Store, ranges
from jaxmeg.data.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows of tokens. Padding at the end of a row has mask False, and 0 for all else."""

    inputs: np.ndarray
    """int32 [rows, T]"""
    labels: np.ndarray
    """int32 [rows, T], the token behind each input."""
    mask: np.ndarray
    """bool [rows, T], True where the label is trained."""
    segments: np.ndarray | None = None
    """int32 [rows, T], number of the document in its row from 1, 0 for padding; None where no row holds two documents."""

    def filled(self, num_rows: int) -> Rows:
        """With rows of padding added, up to num_rows."""
        pad = ((0, num_rows - len(self.inputs)), (0, 0))
        return Rows(inputs=np.pad(self.inputs, pad), labels=np.pad(self.labels, pad), mask=np.pad(self.mask, pad),
                    segments=None if self.segments is None else np.pad(self.segments, pad))

    def take(self, index: np.ndarray | slice) -> Rows:
        """The rows of these indices, int64; those of a slice share memory with these rows."""
        return Rows(inputs=self.inputs[index], labels=self.labels[index], mask=self.mask[index],
                    segments=None if self.segments is None else self.segments[index])


@dataclass(frozen=True, kw_only=True)
class Source:
    """The packed rows of one store, and their order in each epoch."""

    store: Store
    documents: DocumentCounts
    packed: Packed
    rows_left_out: int
    """Rows beyond data.max_rows."""
    order: Callable[[int], np.ndarray] | None
    """Epoch -> the rows of `packed` in the order of that epoch, int64 [rows]; None keeps their own."""

    def shuffled(self, epochs: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """The row of `packed` that is row number `row` of an epoch, for each (epoch, row): int64 [n], int64 [n] -> int64 [n]."""
        if self.order is None:
            return rows
        shuffled = np.empty_like(rows)
        for epoch in set(epochs.tolist()):
            here = epochs == epoch
            shuffled[here] = self.order(epoch)[rows[here]]
        return shuffled

    def read(self, packed: Packed) -> tuple[np.ndarray, np.ndarray]:
        """(tokens of all spans, one span behind the other; the token behind each row that has a target there), int32 [n] both."""
        last = packed.last[packed.target[packed.last] != NO_TARGET]
        target = packed.target[last]
        start = np.where(target == packed.document[last], packed.start[last] + packed.length[last], 0)
        tokens = self.store.read_spans(np.append(packed.document, target), np.append(packed.start, start),
                                       np.append(packed.length, np.ones_like(target)))
        inside, behind = np.split(tokens, [packed.length.sum()])
        return inside, behind


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """An endless stream of training rows, or the rows of validation, which end."""

    seq_len: int
    """T, inputs a row."""
    separate: bool
    """Whether no label crosses from one document to the next."""
    sources: tuple[Source, ...]
    stream: Mixture | Chain
    """Number of a row -> source, and number in the stream of that source."""
    report: Report

    @cached_property
    def rows_per_epoch(self) -> int:
        """Rows of one epoch of every source. For validation, which is read once: all rows."""
        return sum(source.packed.num_rows for source in self.sources)

    @cached_property
    def has_segments(self) -> bool:
        """Whether attention must keep documents of one row apart."""
        return self.separate and any(source.packed.is_shared() for source in self.sources)

    @cached_property
    def vocab_size(self) -> int:
        """All ids are below it."""
        return max(source.store.vocab_size for source in self.sources)

    def rows(self, numbers: np.ndarray) -> Rows:
        """The rows of these numbers, int64 [rows]; every number from 0 up exists in training, 0 to rows_per_epoch - 1 in validation."""
        shape = (len(numbers), self.seq_len)
        rows = Rows(inputs=np.zeros(shape, np.int32), labels=np.zeros(shape, np.int32), mask=np.zeros(shape, bool),
                    segments=np.zeros(shape, np.int32) if self.has_segments else None)
        index, _, row = self._places(numbers)
        by_source = np.argsort(index, kind="stable")
        borders = np.searchsorted(index[by_source], np.arange(len(self.sources) + 1)).tolist()
        for source, begin, end in zip(self.sources, borders[:-1], borders[1:], strict=True):
            if begin < end:
                self._fill(rows.take(slice(begin, end)), source, row[by_source[begin:end]])
        return rows if len(self.sources) == 1 else rows.take(np.argsort(by_source))

    def origin(self, numbers: np.ndarray) -> list[tuple[str, int, int]]:
        """(name of the source, epoch, row in the epoch before shuffling) of each number: with the seed all there is to know."""
        places = (column.tolist() for column in self._places(numbers))
        return [(self.sources[index].store.name, epoch, row) for index, epoch, row in zip(*places, strict=True)]

    def spans(self, number: int) -> list[tuple[int, int, int]]:
        """(document of the store, first token in it, tokens) of each span of one row."""
        [index], _, row = self._places(np.array([number]))
        packed = self.sources[index].packed.take(row)
        return list(zip(packed.document.tolist(), packed.start.tolist(), packed.length.tolist(), strict=True))

    def _places(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(source, epoch, row of its packed rows) of each number, int64 [numbers]."""
        index, row = self.stream.locate(np.asarray(numbers, np.int64))
        epoch, row = np.divmod(row, np.array([source.packed.num_rows for source in self.sources])[index])
        for source in set(index.tolist()):
            here = index == source
            row[here] = self.sources[source].shuffled(epoch[here], row[here])
        return index, epoch, row

    def _fill(self, rows: Rows, source: Source, row: np.ndarray) -> None:
        """Write these rows of a source, int64 [n], to rows, which is all 0 and False before."""
        packed = source.packed.take(row)
        inputs, behind = source.read(packed)
        num_spans, used = np.diff(packed.first), np.add.reduceat(packed.length, packed.first[:-1])
        np.less(np.arange(self.seq_len, dtype=np.int32), used.astype(np.int32)[:, None], out=rows.mask)
        _put(rows.inputs, rows.mask, inputs)
        if rows.segments is not None:
            _put(rows.segments, rows.mask, np.repeat(ranges(1, num_spans).astype(np.int32), packed.length))
        rows.labels[:, :-1] = rows.inputs[:, 1:]
        goes_on = packed.target[packed.last] != NO_TARGET
        rows.labels[goes_on, used[goes_on] - 1] = behind
        borders = np.arange(len(packed.target)) if self.separate else packed.last  # spans behind which a label can be missing
        borders = borders[packed.target[borders] == NO_TARGET]
        at = np.repeat(np.arange(len(row)), num_spans)[borders]
        position = np.cumsum(packed.length)[borders] - (np.cumsum(used) - used)[at] - 1
        rows.labels[at, position], rows.mask[at, position] = 0, False


def _put(array: np.ndarray, where: np.ndarray, values: np.ndarray) -> None:
    """array[where] = values for a bool array `where`, at a quarter of the time where that is everywhere."""
    if array.size == values.size:
        array[:] = values.reshape(array.shape)
    else:
        array[where] = values


def open_data(config: DataConfig, seed: int, progress: Progress = lambda *_: None) -> tuple[Dataset, Dataset | None]:
    """(training, validation or None). Text that was never read before is tokenised first, which `progress` is told about.

    Raises DataError where a file cannot be used or is too little for one row.
    """
    tokenizer = load_tokenizer(config.tokenizer)

    def stores(paths: str | dict[str, float] | None) -> list[tuple[Store, float]]:
        weights = paths if isinstance(paths, dict) else {paths: 1.0}
        return [(open_corpus(path, tokenizer, config.text_key, config.end_token, progress), weight) for path, weight in weights.items()]

    training, validation = stores(config.train), []
    if config.validation is not None:
        validation = stores(config.validation)
    elif config.validation_fraction:
        parts = [(*split(store, config.validation_fraction), weight) for store, weight in training]
        training, validation = [(part, weight) for part, _, weight in parts], [(part, 1.0) for _, part, _ in parts]
    trained = make_dataset(training, config, seed, shuffle=True)
    held = make_dataset(validation, config, seed, shuffle=False) if validation else None
    for report in (dataset.report for dataset in (trained, held) if dataset is not None):
        if not any(source.trained_tokens for source in report.sources):
            raise DataError(f"the {report.split} rows of {report.sources[0].name} hold no token to predict: give more text")
    return trained, held


def make_dataset(stores: Sequence[tuple[Store, float]], config: DataConfig, seed: int, *, shuffle: bool) -> Dataset:
    """Pack stores with weights into a training stream, or with shuffle=False into validation rows, one store after the other.

    Raises DataError for a weight that cannot be kept or has no effect, a training store without any row, or no row at all.
    """
    sources = tuple(_source(store, index, config, seed, shuffle) for index, (store, _) in enumerate(stores))
    num_rows = np.array([source.packed.num_rows for source in sources])
    stream = _mixture(stores) if shuffle else _chain(stores, num_rows)
    counts = stream.counts if isinstance(stream, Mixture) else num_rows
    shares = (counts / max(counts.sum(), 1)).tolist()
    report = Report(split="training" if shuffle else "validation",
                    sources=tuple(_report(source, share, config) for source, share in zip(sources, shares, strict=True)))
    _refuse_no_rows(report, config)
    return Dataset(seq_len=config.seq_len, separate=_is_separate(config), sources=sources, stream=stream, report=report)


def _is_separate(config: DataConfig) -> bool:
    return config.separate or config.packing == "none"


def _source(store: Store, index: int, config: DataConfig, seed: int, shuffle: bool) -> Source:
    seq_len, packing, separate = config.seq_len, config.packing, _is_separate(config)
    lengths, documents = usable(store.lengths, seq_len, packing=packing, separate=separate, long_documents=config.long_documents)
    # The last entry keeps these random numbers apart from those of epoch 0.
    rng = np.random.default_rng([seed, index, 0, 1]) if shuffle else None
    every = pack(lengths, seq_len, packing=packing, separate=separate, rng=rng)
    if config.max_documents is not None and separate:
        every = every.split(config.max_documents)
    packed = every.capped(config.max_rows) if shuffle and config.max_rows is not None else every
    return Source(store=store, documents=documents, packed=packed, rows_left_out=every.num_rows - packed.num_rows,
                  order=_shuffled(seed, index, packed.num_rows) if shuffle else None)


def _report(source: Source, share: float, config: DataConfig) -> SourceReport:
    counts, documents, packed = source.store.counts, source.documents, source.packed
    rows = packed.num_rows
    return SourceReport(
        name=source.store.name, read=counts.read, kept=documents.kept, dropped=dict(Counter(counts.dropped) + Counter(documents.dropped)),
        truncated=documents.truncated, tokens=documents.tokens, trained_tokens=packed.num_trained(_is_separate(config)),
        rows=rows, most_documents=packed.most_spans, rows_left_out=source.rows_left_out,
        padding=1 - int(packed.length.sum()) / (rows * config.seq_len) if rows else 0.0,
        weight=share, steps_per_epoch=rows / (config.global_batch * share) if share else 0.0)


def _mixture(stores: Sequence[tuple[Store, float]]) -> Mixture:
    try:
        return make_mixture([weight for _, weight in stores])
    except ValueError as error:
        raise DataError(f"data.train: {error}") from error


def _chain(stores: Sequence[tuple[Store, float]], num_rows: np.ndarray) -> Chain:
    for store, weight in stores:
        if weight != 1:
            raise DataError(f"data.validation: the weight {weight:g} of {store.name} has no effect, as all validation rows are read: use 1")
    return Chain(ends=np.cumsum(num_rows))


def _refuse_no_rows(report: Report, config: DataConfig) -> None:
    """DataError for a training source without rows, or validation that is asked for and has none."""
    empty = [source for source in report.sources if not source.rows]
    training = report.split == "training"
    if not empty or (not training and len(empty) < len(report.sources)):
        return
    source = empty[0]
    dropped = "".join(f", {count} dropped ({reason})" for reason, count in source.dropped.items())
    found = f"gives no row of data.seq_len={config.seq_len}: {source.read} documents read{dropped}"
    if training:
        fix = "use data.long_documents=split" if any("longer" in reason for reason in source.dropped) else "give more text"
        raise DataError(f"data.train: {source.name} {found}: {fix}")
    if config.validation is not None:
        raise DataError(f"data.validation: {source.name} {found}: give more text, or leave it out")
    raise DataError(f"data.validation_fraction={config.validation_fraction:g} of {source.name} {found}: "
                    "use a larger fraction, 0 for no validation, or a file of its own for data.validation")


def _shuffled(seed: int, source: int, num_rows: int) -> Callable[[int], np.ndarray]:
    """Epoch -> its permutation, int64 [rows]. The two last used are kept; one thread computes, the others wait for it."""
    lock = Lock()

    @lru_cache(maxsize=2)
    def permutation(epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, source, epoch]).permutation(num_rows)

    def order(epoch: int) -> np.ndarray:
        with lock:
            return permutation(epoch)

    return order

