"""From files to documents: .txt (one document a file), .jsonl and .json (one record a line), each also as .gz, and .parquet.

A record is a document or is dropped for a stated reason; nothing disappears. Files are streamed: at most one text file, one line or one
batch of rows is in memory. Must not know tokens.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from jaxmeg.data.store import DataError
from jaxmeg.wording import any_of, is_unicode, shown

ROWS_AT_ONCE = 256
MOST_BYTES = 2**31 - 1  # of a text file, or of one line of JSON: both are read at once
MOST_KEYS = 10  # fields named where none is the one that is wanted


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A record that is no document."""

    reason: str
    """One of a few fixed wordings."""
    where: str
    """file, file:line or file:row, from 1."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files of a path, in the order in which they are read."""

    read: tuple[Path, ...]
    left_out: tuple[Path, ...]
    """Files of a folder that hold no documents by their names."""


Record = str | Dropped
Position = Callable[[int], object]
"""Told how many bytes of a file have been read."""


def find_files(path: str | Path) -> Files:
    """The file itself, or the files of a folder and the folders in it, sorted by path, without hidden ones. DataError if there is none."""
    root = Path(os.path.expanduser(path))
    if os.path.isfile(root):
        if _reader(root) is None:
            raise DataError(f"{path} has an ending that is not read: give {any_of(ENDINGS)}, or a token store (.bin with .idx)")
        return Files(read=(root,), left_out=())
    if not os.path.isdir(root):
        what = "no file or folder" if os.path.exists(root) else "not there"
        raise DataError(f"{path} is {what}: give a file ({any_of(ENDINGS)}), a folder of them or a token store (.bin with .idx)")
    inside = sorted(file for file in root.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(root)))
    read = tuple(file for file in inside if _reader(file))
    if not read:
        raise DataError(f"folder {path} has none of the files that are read: give one with {any_of(ENDINGS)}")
    return Files(read=read, left_out=tuple(file for file in inside if file not in set(read)))


def read_documents(path: str | Path, text_key: str = "text") -> Iterator[Record]:
    """Every record of a file or folder, in order. DataError for what cannot be read, or a file without the field `text_key`."""
    for file in find_files(path).read:
        yield from read_file(file, text_key)


def read_file(file: Path, text_key: str, position: Position = lambda _: None) -> Iterator[Record]:
    """Every record of one file that `find_files` found."""
    reader = _reader(file)
    assert reader is not None
    try:
        yield from reader(file, text_key, position)
    except (OSError, EOFError, zlib.error) as error:
        reason = shown(" ".join(str(getattr(error, "strerror", None) or error).split()))
        raise DataError(f"{file} cannot be read ({reason}): give a whole, readable file") from error


def _read_text(file: Path, _: str, position: Position) -> Iterator[Record]:
    with _open(file) as (raw, stream):
        content = _up_to_most(file, stream.read(MOST_BYTES + 1))
        position(raw.tell())
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield Dropped(reason="not valid UTF-8", where=f"{file}, byte {error.start}")
    else:
        yield Dropped(reason="empty", where=str(file)) if _is_empty(text) else text


def _read_json_lines(file: Path, text_key: str, position: Position) -> Iterator[Record]:
    keys: dict[str, None] = {}
    has_key = False
    with _open(file) as (raw, stream):
        for number, line in enumerate(iter(lambda: stream.readline(MOST_BYTES + 1), b""), 1):
            position(raw.tell())
            where = f"{file}:{number}"
            _up_to_most(file, line)
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
                if line.lstrip().startswith(b"["):
                    raise DataError(f"{file} is one JSON array: write one object a line, for example with `jq -c .[] IN.json > OUT.jsonl`")
            if line.isspace():
                continue
            try:
                record = json.loads(line.decode())
            except UnicodeDecodeError:
                yield Dropped(reason="not valid UTF-8", where=where)
            except (ValueError, RecursionError):
                yield Dropped(reason="not valid JSON", where=where)
            else:
                if isinstance(record, dict):
                    has_key = has_key or text_key in record
                    if not has_key and len(keys) <= MOST_KEYS:
                        keys |= dict.fromkeys(record)
                    yield _document(record.get(text_key), text_key, where)
                else:
                    yield Dropped(reason="not a JSON object", where=where)
    if keys and not has_key:
        raise _without_key(file, text_key, list(keys))


def _read_parquet(file: Path, text_key: str, position: Position) -> Iterator[Record]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f'{file} needs pyarrow: pip install "jaxmeg[parquet]"') from error
    size, done = file.stat().st_size, 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            if text_key not in table.schema_arrow.names:
                raise _without_key(file, text_key, table.schema_arrow.names)
            for batch in table.iter_batches(ROWS_AT_ONCE, columns=[text_key]):
                for row, cell in enumerate(batch.column(0), done + 1):
                    try:
                        yield _document(cell.as_py(), text_key, f"{file}:{row}")
                    except UnicodeDecodeError:
                        yield Dropped(reason="not valid UTF-8", where=f"{file}:{row}")
                done += batch.num_rows
                position(size * done // max(table.metadata.num_rows, done, 1))
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not a Parquet file that can be read ({shown(' '.join(str(error).split()))}): write it again") from error


READERS = {".txt": _read_text, ".jsonl": _read_json_lines, ".json": _read_json_lines}
ENDINGS = (*READERS, ".parquet", *(f"{ending}.gz" for ending in READERS))


def _reader(file: Path) -> Callable[[Path, str, Position], Iterator[Record]] | None:
    name = file.name.lower()
    return _read_parquet if name.endswith(".parquet") else READERS.get(Path(name.removesuffix(".gz")).suffix)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


@contextmanager
def _open(file: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """(the file, its content unzipped)."""
    with open(file, "rb") as raw:
        if file.name.lower().endswith(".gz"):
            with gzip.open(raw) as stream:
                yield raw, cast(BinaryIO, stream)
        else:
            yield raw, raw


def _document(value: object, text_key: str, where: str) -> Record:
    if value is None:
        return Dropped(reason=f"no field {text_key}", where=where)
    if not isinstance(value, str):
        return Dropped(reason="not text", where=where)
    if _is_empty(value):
        return Dropped(reason="empty", where=where)
    if not is_unicode(value):  # JSON can spell half of a surrogate pair
        return Dropped(reason="not valid Unicode", where=where)
    return value


def _is_empty(text: str) -> bool:
    return not text or text.isspace()


def _without_key(file: Path, text_key: str, keys: list[str]) -> DataError:
    more = ["another"] if len(keys) > MOST_KEYS else []
    return DataError(f"{file}: no record has the field {text_key}: set text_key to {any_of([*map(shown, keys[:MOST_KEYS]), *more])}")


def _up_to_most(file: Path, content: bytes) -> bytes:
    if len(content) > MOST_BYTES:
        raise DataError(f"{file} has a document of more than {MOST_BYTES:,} bytes, and one is read at once: cut it into several")
    return content
