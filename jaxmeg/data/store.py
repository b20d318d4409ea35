"""Documents of token ids by random access: Megatron-LM's memory-mapped pair X.bin and X.idx, or arrays in memory.

X.bin is all tokens in a row. X.idx, little-endian: the magic, version u64, dtype code u8, number of sequences u64, number of borders u64;
per sequence its length (int32), then its byte offset (int64); the borders (int64): document d is the sequences [border d, border d+1).
Multimodal stores end with an int8 a sequence. Beside a store written here lies X.json, the sidecar: tokenizer, sources, what was dropped.
Must not know texts, tokenizers or rows. Reference: megatron/core/datasets/indexed_dataset.py of NVIDIA/Megatron-LM.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import tempfile
from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxmeg.typed import is_typed
from jaxmeg.wording import shown

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = {6: "float64", 7: "float32"}
SIDECAR = "jaxmeg token store"
SUFFIXES = (".bin", ".json", ".idx")  # in the order in which they get their final names: a store is there when its .idx is
LARGEST_ID = 2**31 - 1  # tokens are read as int32
LONGEST_SEQUENCE = 2**31 - 1  # a length is an int32; a longer document is several sequences
SCANNED_AT_ONCE = 1 << 24
LONG_SPAN = 256  # tokens; spans of a greater mean length are read faster as slices than by one index of all their tokens


class DataError(ValueError):
    """Data that cannot be used as asked; the message is one line of value, rule and fix."""


@dataclass(frozen=True, kw_only=True)
class ReadCounts:
    """What became of the records that were read: read = kept + all dropped."""

    read: int
    """Records: text files, lines of JSON, rows of Parquet, documents of a store."""
    kept: int
    """Documents."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> records."""
    first: dict[str, str] = field(default_factory=dict)
    """Reason -> where its first record is, such as "wiki.jsonl:12"."""


@dataclass(frozen=True, kw_only=True)
class About:
    """Where the tokens of a store come from."""

    tokenizer: str
    """Its name: bytes, or a path."""
    fingerprint: str
    """Hash of what the tokenizer does."""
    vocab_size: int
    """All ids are below it."""
    end_token: str | None = None
    end_id: int | None = None
    sources: tuple[str, ...] = ()
    """Files read."""


class Store(Protocol):
    """Documents of token ids. Any number of threads may read at once."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    @property
    def vocab_size(self) -> int:
        """All ids are below it."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """int64 [documents], tokens of each with its end token; none is 0."""
        ...

    @property
    def counts(self) -> ReadCounts:
        """What reading found."""
        ...

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        """int32 [length], the tokens [start, start + length) of a document. IndexError outside of it."""
        ...

    def read_spans(self, documents: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """int32 [sum of lengths], `read` of each (document, start, length), one behind the other; the arguments are int64 [spans]."""
        ...


class _Flat:
    """Reading where the tokens of all documents lie in one array."""

    lengths: np.ndarray
    """int64 [documents]"""
    _tokens: np.ndarray
    _starts: np.ndarray
    """int64 [documents], where each document begins in _tokens."""

    def read(self, document: int, start: int, length: int) -> np.ndarray:
        return self.read_spans(np.array([document]), np.array([start]), np.array([length]))

    def read_spans(self, documents: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        check_spans(self.lengths, documents, starts, lengths, "the store")
        first = self._starts[documents] + starts
        if lengths.sum() > LONG_SPAN * len(lengths):
            spans = [self._tokens[begin:end] for begin, end in zip(first.tolist(), (first + lengths).tolist(), strict=True)]
            return np.concatenate(spans).astype(np.int32)
        return self._tokens[ranges(first, lengths)].astype(np.int32)


class MemoryStore(_Flat):
    """A store over arrays. Empty ones are dropped and counted."""

    def __init__(self, name: str, documents: Iterable[np.ndarray], vocab_size: int, counts: ReadCounts | None = None):
        every = [np.array(tokens, np.int32) for tokens in documents]
        self.name, self.vocab_size = name, vocab_size
        self.lengths = np.array([tokens.size for tokens in every if tokens.size], np.int64)
        self.counts = counts or _counts(len(every), len(self.lengths))
        self._tokens = np.concatenate([np.empty(0, np.int32), *every])
        self._starts = np.cumsum(self.lengths) - self.lengths


class MappedStore(_Flat):
    """A memory-mapped pair X.bin, X.idx. Documents without tokens are left out and counted. Pickles as its path."""

    def __init__(self, prefix: str, name: str):
        self.prefix, self.name = prefix, name
        dtype, sequence_lengths, pointers, borders = _read_index(Path(f"{prefix}.idx"))
        tokens_before = np.concatenate([[0], np.cumsum(sequence_lengths, dtype=np.int64)])
        bin_path = Path(f"{prefix}.bin")
        size = bin_path.stat().st_size
        if not np.array_equal(pointers, tokens_before[:-1] * dtype.itemsize) or size != tokens_before[-1] * dtype.itemsize:
            raise DataError(f"{bin_path} has {size:,} bytes, not the {tokens_before[-1]:,} tokens of {dtype.itemsize} bytes in a row that "
                            f"{prefix}.idx describes: one of the two is cut or of another store: make or copy both again")
        # An empty file cannot be mapped.
        self._tokens = np.asarray(np.memmap(bin_path, dtype, "r")) if size else np.empty(0, dtype)
        lengths = np.diff(tokens_before[borders])
        filled = lengths > 0
        self.lengths: np.ndarray = lengths[filled]
        self._starts = tokens_before[borders[:-1]][filled]
        self.about, counts = _read_sidecar(Path(f"{prefix}.json"), len(self.lengths), int(tokens_before[-1]))
        self.counts = counts or _counts(len(lengths), len(self.lengths))
        self._vocab_size = self.about.vocab_size if self.about else None

    def read_spans(self, documents: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Like the others', and DataError for an id that the sidecar does not know: the model would read another embedding."""
        tokens = super().read_spans(documents, starts, lengths)
        if tokens.size and tokens.view(np.uint32).max() >= self.vocab_size:
            worst = int(tokens[tokens.view(np.uint32).argmax()])
            raise DataError(f"{self.prefix}.bin holds the id {worst}, and {self.prefix}.json says that all are below {self.vocab_size}: "
                            "one of the two is damaged: make all three files again")
        return tokens

    @property
    def vocab_size(self) -> int:
        """From the sidecar; without one the largest id + 1, found by reading all of X.bin the first time. DataError for what is no id."""
        if self._vocab_size is None:
            self._vocab_size = _largest_id(Path(f"{self.prefix}.bin"), self._tokens) + 1
        return self._vocab_size

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedStore, (self.prefix, self.name)


class StoreWriter:
    """Writes a store document by document: `with StoreWriter("data/wiki", about) as writer: writer.add(tokens)`.

    The files get their names when the block ends well; until then, and after a failure, there are none. Set `counts` inside the block if
    more was read than added.
    """

    def __init__(self, prefix: str | Path, about: About):
        self.prefix, self.about = Path(prefix), about
        self.counts: ReadCounts | None = None
        self.dtype = np.dtype(np.uint16 if about.vocab_size <= 65536 else np.int32).newbyteorder("<")
        self.num_tokens = 0
        self._lengths, self._borders = array("i"), array("q", [0])

    @property
    def num_documents(self) -> int:
        return len(self._borders) - 1

    def __enter__(self) -> StoreWriter:
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f".{self.prefix.name}.", suffix=".partial", dir=self.prefix.parent))
        self._bin = open(self._part(".bin"), "wb")
        return self

    def add(self, tokens: np.ndarray) -> None:
        """Append one document: int [tokens], at least one, ids below vocab_size."""
        if not tokens.size or tokens.min() < 0 or tokens.max() >= self.about.vocab_size:
            raise ValueError(f"a document needs ids from 0 to {self.about.vocab_size - 1}, at least one")
        self._bin.write(tokens.astype(self.dtype).data)
        for start in range(0, tokens.size, LONGEST_SEQUENCE):
            self._lengths.append(min(tokens.size - start, LONGEST_SEQUENCE))
        self._borders.append(len(self._lengths))
        self.num_tokens += tokens.size

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        try:
            self._bin.close()
            if error is None:
                self._write_index()
                self._write_sidecar()
                for suffix in SUFFIXES:
                    os.replace(self._part(suffix), f"{self.prefix}{suffix}")
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _part(self, suffix: str) -> Path:
        return self._folder / f"store{suffix}"

    def _write_index(self) -> None:
        lengths, borders = np.array(self._lengths, "<i4"), np.array(self._borders, "<i8")
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * self.dtype.itemsize
        code = next(code for code, dtype in DTYPES.items() if np.dtype(dtype) == self.dtype)
        with open(self._part(".idx"), "wb") as file:
            file.write(HEADER.pack(MAGIC, 1, code, len(lengths), len(borders)))
            file.writelines(part.data for part in (lengths, pointers.astype("<i8"), borders))

    def _write_sidecar(self) -> None:
        counts = self.counts or _counts(self.num_documents, self.num_documents)
        totals = {"documents": self.num_documents, "tokens": self.num_tokens, "counts": asdict(counts)}
        content = {"format": SIDECAR, **asdict(self.about), **totals}
        self._part(".json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8",
                                           errors="backslashreplace")  # a file name can hold bytes that are not UTF-8


def store_prefix(path: str | Path) -> str | None:
    """X for X, X.bin or X.idx where X.bin and X.idx exist, else None. DataError where only one does."""
    prefix = str(path).removesuffix(".bin").removesuffix(".idx")
    there = [os.path.isfile(f"{prefix}{suffix}") for suffix in (".bin", ".idx")]
    if any(there) and not all(there):
        here, gone = (".bin", ".idx") if there[0] else (".idx", ".bin")
        raise DataError(f"{prefix}{here} is there without {prefix}{gone}: a token store is both files: copy or make the other too")
    return prefix if all(there) else None


def open_store(prefix: str | Path, name: str | None = None) -> MappedStore:
    """The store X, given as X, X.bin or X.idx. DataError for what is not there, damaged or holds no token ids."""
    found = store_prefix(prefix)
    if found is None:
        raise DataError(f"{prefix} is not a token store: {prefix}.bin and {prefix}.idx are not there: scripts/prepare_data.py makes them")
    try:
        return MappedStore(found, name or Path(found).name)
    except OSError as error:
        raise DataError(f"{error.filename or found} cannot be read ({error.strerror}): give a token store that can") from error


def cache_folder() -> Path:
    """Where what was worked out from data is kept: $JAXMEG_CACHE/data, or ~/.cache/jaxmeg/data."""
    return Path(os.environ.get("JAXMEG_CACHE") or "~/.cache/jaxmeg").expanduser() / "data"


def stamp(path: Path) -> tuple[str, int, int]:
    """What tells a file from its later versions: absolute path, bytes, time of the last change."""
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns


def digest(*parts: Any) -> str:
    """A hash of plain values, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def ranges(starts: np.ndarray | int, counts: np.ndarray) -> np.ndarray:
    """The numbers [start, start + count) of each (start, count), one behind the other: int64 [n], int64 [n] -> int64 [sum of counts]."""
    ends = np.cumsum(counts)
    numbers = np.repeat(starts - (ends - counts), counts)
    numbers += np.arange(len(numbers))
    return numbers


def check_spans(lengths: np.ndarray, documents: np.ndarray, starts: np.ndarray, sizes: np.ndarray, where: str) -> None:
    """IndexError for the first of these spans, int64 [spans], that is not inside of its document; lengths are those of all documents."""
    good = (documents >= 0) & (documents < len(lengths)) & (starts >= 0) & (sizes >= 0)
    good[good] = (starts + sizes)[good] <= lengths[documents[good]]
    if not good.all():
        document, start, size = (int(column[np.argmin(good)]) for column in (documents, starts, sizes))
        raise IndexError(f"tokens [{start}, {start + size}) of document {document} are outside of {where}")


def _counts(read: int, kept: int) -> ReadCounts:
    return ReadCounts(read=read, kept=kept, dropped={"empty": read - kept} if read > kept else {})


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """(dtype, lengths [sequences], byte offsets [sequences], borders [documents + 1]) of a .idx file."""
    data = path.read_bytes()
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise DataError(f"{path} is not the index of a token store: give the .idx that was written with the .bin")
    _, version, code, sequences, borders = HEADER.unpack_from(data)
    if version != 1 or code not in DTYPES:
        what = f"tokens of type {FLOATS.get(code, f'number {code}')}" if version == 1 else f"format version {version}"
        raise DataError(f"{path} has {what}: a token store has format version 1 and tokens of an integer type")
    modes = HEADER.size + 12 * sequences + 8 * borders
    if len(data) not in (modes, modes + sequences):
        raise DataError(f"{path} has {len(data):,} bytes where its header asks for {modes:,}: it is cut or damaged: make or copy it again")
    lengths = np.frombuffer(data, "<i4", sequences, HEADER.size)
    pointers = np.frombuffer(data, "<i8", sequences, HEADER.size + 4 * sequences)
    documents = np.frombuffer(data, "<i8", borders, HEADER.size + 12 * sequences)
    if not borders or documents[0] != 0 or documents[-1] != sequences or (documents[1:] < documents[:-1]).any() or (lengths < 0).any():
        raise DataError(f"{path} has document borders that do not go from 0 to its {sequences} sequences: it is damaged: make it again")
    if any(data[modes:]):
        raise DataError(f"{path} is of a multimodal store, with sequences that are not text: give a store of text only")
    return np.dtype(DTYPES[code]), lengths, pointers, documents


def _read_sidecar(path: Path, documents: int, tokens: int) -> tuple[About | None, ReadCounts | None]:
    """What X.json says; (None, None) without one, or for a file of that name that is something else."""
    if not path.is_file():
        return None, None
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None, None
    if not isinstance(content, dict) or content.get("format") != SIDECAR:
        return None, None
    try:
        described = content["documents"], content["tokens"]
        entries: dict[str, Any] = {name: content[name] for name in About.__dataclass_fields__} | {"sources": tuple(content["sources"])}
        about = About(**entries)
        counts = ReadCounts(**content["counts"])
    except KeyError as error:
        raise DataError(f"{path} lacks {error}: it is damaged: delete it or make all three files again") from error
    except TypeError:
        raise DataError(f"{path} {_DAMAGED}") from None
    if not all(is_typed(record) for record in (about, counts)) or not 0 <= about.vocab_size <= LARGEST_ID + 1:
        raise DataError(f"{path} {_DAMAGED}")
    if described != (documents, tokens):
        raise DataError(f"{path} describes {shown(described[0])} documents of {shown(described[1])} tokens, but the store beside it has "
                        f"{documents} of {tokens}: it is of another store: delete it or make all three files again")
    return about, counts


_DAMAGED = "has entries of a wrong type: it is damaged: delete it or make all three files again"


def _largest_id(path: Path, tokens: np.ndarray) -> int:
    """The largest id of a store, -1 for none, found by reading all of it once and kept in the cache folder."""
    kept = cache_folder() / f"largest-id-{digest(stamp(path))}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return int(json.loads(kept.read_text()))
    largest = -1
    for start in range(0, len(tokens), SCANNED_AT_ONCE):
        piece = tokens[start : start + SCANNED_AT_ONCE]
        low, high = int(piece.min()), int(piece.max())
        if low < 0 or high > LARGEST_ID:
            raise DataError(f"{path} holds {low if low < 0 else high}, which is no token id (0 to {LARGEST_ID}): give a store of token ids")
        largest = max(largest, high)
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(largest))
        os.replace(part, kept)
    return largest
