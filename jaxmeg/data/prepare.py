"""From files of text to a token store, once: read, tokenise on all cores, write in the order of the documents, count everything.

`prepare` writes a store under a name of its own; `open_corpus` opens whatever a path names and keeps what it had to tokenise in a cache.
Memory holds a few batches of text and the longest document. Must not know rows or jax. Workers are started with `spawn`, since a forked
copy of a process that has threads can hang.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from importlib import resources
from multiprocessing import connection, get_context, parent_process
from pathlib import Path

import numpy as np

from jaxmeg.data.sources import Dropped, Files, find_files, read_file
from jaxmeg.data.store import (
    About,
    DataError,
    MappedStore,
    MemoryStore,
    ReadCounts,
    Store,
    StoreWriter,
    cache_folder,
    digest,
    open_store,
    stamp,
    store_prefix,
)
from jaxmeg.data.tokenizer import Tokenizer, find_end_id, split_text

SHIPPED = "8 plays by Shakespeare (shipped with jaxmeg)"
CACHE_VERSION = 1  # of what is kept, dropped and written; a new one leaves older caches unread
BATCH_CHARACTERS, BATCH_TEXTS = 1 << 20, 4096  # what a worker gets at once, at most
WORTH_WORKERS = 1 << 24  # bytes of files

Progress = Callable[[int, int, int], object]
"""Told how many bytes of the input files are tokenised, how many they have, how many tokens there are so far."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What a store was made of."""

    counts: ReadCounts
    files: Files
    tokens: int
    """With end tokens."""
    text_bytes: int
    """UTF-8 bytes of the documents that were kept."""
    seconds: float


@dataclass(frozen=True)
class _Batch:
    """Texts to encode; a long document is several. `last` says where a document ends, `position` how far the files are done then."""

    texts: list[str]
    last: list[bool]
    position: int


@dataclass(frozen=True)
class _Encoded:
    """The ids of a batch: of all texts in one array, and the number of each."""

    ids: np.ndarray
    lengths: list[int]
    last: list[bool]
    position: int
    text_bytes: int


@dataclass
class _Tally:
    """What reading has met so far."""

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)


def prepare(
    paths: Sequence[str | Path],
    out_prefix: str | Path,
    tokenizer: Tokenizer,
    text_key: str = "text",
    end_token: str | None = None,
    workers: int | None = None,
    progress: Progress = lambda *_: None,
) -> Prepared:
    """Tokenise files and folders into the store OUT.bin, OUT.idx, OUT.json; what was there is replaced, at the end.

    Workers are processes; 1 is this one with the tokenizer's own threads, None as many as there are cores unless the files are small.
    DataError, and no file, for what cannot be read, an unknown end token, or if nothing was kept.
    """
    started = time.perf_counter()
    end_id = find_end_id(tokenizer, end_token)
    end = _as_ids(end_id)
    files = find_all(paths)
    total_bytes = sum(file.stat().st_size for file in files.read)
    if workers is None:
        workers = _num_cores() if total_bytes > WORTH_WORKERS else 1
    about = About(
        tokenizer=tokenizer.name, fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size, end_token=end_token, end_id=end_id,
        sources=tuple(str(file) for file in files.read),
    )
    tally, text_bytes = _Tally(), 0
    batches = _read_batches(files.read, text_key, tokenizer, tally)
    with StoreWriter(out_prefix, about) as writer, closing(_encode_all(batches, tokenizer, workers)) as encoded:
        document: list[np.ndarray] = []
        for batch in encoded:
            text_bytes += batch.text_bytes
            for ids, last in zip(np.split(batch.ids, np.cumsum(batch.lengths)[:-1]), batch.last, strict=True):
                document.append(ids)
                if not last:
                    continue
                tokens, document = np.concatenate(document), []
                if tokens.size:
                    writer.add(np.concatenate([tokens, end]))
                else:
                    tally.dropped["no tokens"] += 1
            progress(batch.position, total_bytes, writer.num_tokens + sum(part.size for part in document))
        counts = ReadCounts(read=tally.read, kept=writer.num_documents, dropped=dict(tally.dropped), first=tally.first)
        if not counts.kept:
            why = f"of {counts.read} records, dropped {describe_dropped(counts)}" if counts.read else "it has no records"
            raise DataError(f"{', '.join(map(str, paths))} gave no document: {why}: give text, in UTF-8 (iconv converts)")
        writer.counts = counts
    return Prepared(counts=counts, files=files, tokens=writer.num_tokens, text_bytes=text_bytes, seconds=time.perf_counter() - started)


def open_corpus(
    path: str | None, tokenizer: Tokenizer, text_key: str = "text", end_token: str | None = None, progress: Progress = lambda *_: None
) -> Store:
    """The documents that a path names, as tokens of `tokenizer`.

    None is the text that ships with jaxmeg, as one document; X, X.bin or X.idx a token store; else a file or folder of text, tokenised
    once and kept in the cache folder until it, the tokenizer or an option changes. DataError where tokenizer and store do not fit.
    """
    end_id = find_end_id(tokenizer, end_token)
    if path is None:
        text = (resources.files("jaxmeg.data") / "shakespeare.txt").read_text(encoding="utf-8")
        ids = np.concatenate([*tokenizer.encode_batch(split_text(tokenizer, text)), _as_ids(end_id)])
        return MemoryStore(SHIPPED, [ids], tokenizer.vocab_size)
    expanded = Path(os.path.expanduser(path))
    prefix = None if _is_text(expanded) else store_prefix(expanded)
    if prefix:
        store = open_store(prefix)
        _check_fit(store, tokenizer, end_token, end_id)
        return store
    files = find_files(expanded).read
    key = digest(CACHE_VERSION, [stamp(file) for file in files], tokenizer.fingerprint, end_token, text_key)
    cached = cache_folder() / f"{expanded.name.encode(errors='replace')[:100].decode(errors='ignore')}-{key}"  # names end at 255 bytes
    try:
        if not Path(f"{cached}.idx").exists():  # the last of the three files to get its name
            prepare([expanded], cached, tokenizer, text_key, end_token, progress=progress)
    except OSError as error:
        raise DataError(f"the tokens of {path} cannot be kept in {cached.parent} ({error.strerror}): set JAXMEG_CACHE to a folder "
                        "with space, or make a token store with scripts/prepare_data.py") from error
    return open_store(cached, expanded.name)


def find_all(paths: Sequence[str | Path]) -> Files:
    """The files of several paths. DataError if one is among them twice."""
    found = [find_files(path) for path in paths]
    read = [file for one in found for file in one.read]
    twice = [name for name, count in Counter(str(file.resolve()) for file in read).items() if count > 1]
    if twice:
        raise DataError(f"{twice[0]} is given twice: name it once, by itself or by its folder")
    return Files(read=tuple(read), left_out=tuple(file for one in found for file in one.left_out))


def describe_dropped(counts: ReadCounts) -> str:
    """Such as "3 empty (first wiki.jsonl:12), 1 not valid JSON (first wiki.jsonl:40)"; nothing for none."""
    first = {reason: f" (first {where})" for reason, where in counts.first.items()}
    return ", ".join(f"{number:,} {reason}{first.get(reason, '')}" for reason, number in counts.dropped.items())


def _as_ids(end_id: int | None) -> np.ndarray:
    return np.array([] if end_id is None else [end_id], np.int32)


def _num_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _is_text(path: Path) -> bool:
    return os.path.isfile(path) and path.suffix not in (".bin", ".idx")


def _check_fit(store: MappedStore, tokenizer: Tokenizer, end_token: str | None, end_id: int | None) -> None:
    """DataError if the store's tokens are not those of the tokenizer."""
    if store.about and store.about.fingerprint != tokenizer.fingerprint:
        raise DataError(f"{store.prefix} was made with the tokenizer {store.about.tokenizer}, which is not {tokenizer.name}: "
                        f"set tokenizer to {store.about.tokenizer}, or prepare the text again")
    if store.vocab_size > tokenizer.vocab_size:
        raise DataError(f"{store.prefix} has ids up to {store.vocab_size - 1}, beyond the {tokenizer.vocab_size} of the tokenizer "
                        f"{tokenizer.name}: set tokenizer to the tokenizer.json that the store was made with")
    if end_id is not None and len(store.lengths) and store.read(0, int(store.lengths[0]) - 1, 1)[0] != end_id:
        raise DataError(f"end_token={end_token} does not end the documents of {store.prefix}, whose tokens are fixed: "
                        "set no end_token, or prepare the text again with it")


def _read_batches(files: Sequence[Path], text_key: str, tokenizer: Tokenizer, tally: _Tally) -> Iterator[_Batch]:
    texts: list[str] = []
    last: list[bool] = []
    characters, done, began, position = 0, 0, 0, 0

    def read_up_to(here: int) -> None:
        nonlocal position
        position = done + here

    for file in files:
        for record in read_file(file, text_key, read_up_to):
            tally.read += 1
            if isinstance(record, Dropped):
                tally.dropped[record.reason] += 1
                tally.first.setdefault(record.reason, record.where)
                continue
            pieces = split_text(tokenizer, record)
            for number, piece in enumerate(pieces, 1):
                texts.append(piece)
                last.append(number == len(pieces))
                characters += len(piece)
                if characters >= BATCH_CHARACTERS or len(texts) == BATCH_TEXTS:
                    yield _Batch(texts, last, began + (position - began) * number // len(pieces))
                    texts, last, characters = [], [], 0
            began = position
        done += file.stat().st_size
    if texts:
        yield _Batch(texts, last, done)


def _encode(tokenizer: Tokenizer, batch: _Batch) -> _Encoded:
    ids = tokenizer.encode_batch(batch.texts)
    text_bytes = sum(len(text.encode()) for text in batch.texts)
    return _Encoded(np.concatenate(ids), [one.size for one in ids], batch.last, batch.position, text_bytes)


def _encode_all(batches: Iterator[_Batch], tokenizer: Tokenizer, workers: int) -> Generator[_Encoded]:
    """The batches encoded, in their order; with several workers, at most two batches for each are under way."""
    if workers == 1:
        yield from (_encode(tokenizer, batch) for batch in batches)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (tokenizer,))
    waiting = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_encode_in_worker, batch))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(f"one of {workers} worker processes was killed, most often for want of memory: use fewer workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


_worker_tokenizer: Tokenizer | None = None


def _start_worker(tokenizer: Tokenizer) -> None:
    """A worker has one thread, leaves Ctrl-C and other signals to all to its parent, and ends when the parent is gone: a worker that
    a signal ends while it holds the lock of a queue would leave the others waiting."""
    global _worker_tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = tokenizer
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _encode_in_worker(batch: _Batch) -> _Encoded:
    assert _worker_tokenizer is not None
    return _encode(_worker_tokenizer, batch)
