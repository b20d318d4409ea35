"""Files of documents: every record is a document or a counted drop, and a format changes nothing."""

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from jaxmeg.data import sources
from jaxmeg.data.sources import Dropped, find_files, read_documents, read_file
from jaxmeg.data.store import DataError

TEXTS = ["one", "two\nlines\r\n", "naïve 日本語 🙂", "a\u2028b\x85c", " x "]
RECORDS = [{"text": text} for text in (TEXTS[0], None, TEXTS[1], "", TEXTS[2], " \n\t", TEXTS[3], TEXTS[4])]
REASONS = {"no field text": 1, "empty": 2}


def json_lines(records: list, ascii_only: bool = True) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=ascii_only) + "\n" for record in records).encode()


def split(records) -> tuple[list[str], dict[str, int]]:
    records = list(records)
    dropped = Counter(record.reason for record in records if isinstance(record, Dropped))
    return [record for record in records if isinstance(record, str)], dict(dropped)


def test_every_format_gives_the_same_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "ROWS_AT_ONCE", 3)
    (tmp_path / "a.jsonl").write_bytes(json_lines(RECORDS))
    (tmp_path / "b.json").write_bytes(b"\xef\xbb\xbf" + json_lines(RECORDS, ascii_only=False).replace(b"\n", b"\r\n\n").rstrip())
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(json_lines(RECORDS[:4])) + gzip.compress(json_lines(RECORDS[4:])))
    pa.parquet.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "d.parquet", row_group_size=4)
    large = pa.table({"id": list(range(8)), "text": pa.array([record["text"] for record in RECORDS], pa.large_string())})
    pa.parquet.write_table(large, tmp_path / "e.parquet", compression="zstd")
    pa.parquet.write_table(large.set_column(1, "text", large["text"].dictionary_encode()), tmp_path / "f.parquet")
    found = find_files(tmp_path).read
    assert [file.name for file in found] == ["a.jsonl", "b.json", "c.jsonl.gz", "d.parquet", "e.parquet", "f.parquet"]
    for file in found:
        assert split(read_documents(file)) == (TEXTS, REASONS), file
    assert split(read_documents(tmp_path)) == (6 * TEXTS, {"no field text": 6, "empty": 12})


def test_a_text_file_is_one_document_as_it_is(tmp_path):
    for text in TEXTS:
        (tmp_path / "a.txt").write_bytes(text.encode())
        (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
        (tmp_path / "c.TXT.GZ").write_bytes(gzip.compress(text.encode()))
        assert list(read_documents(tmp_path)) == [text] * 3
    for name, content, reason in [("d.txt", b"", "empty"), ("e.txt", b" \n", "empty"), ("f.txt", b"fa\xe7ade", "not valid UTF-8")]:
        (tmp_path / name).write_bytes(content)
        assert split(read_documents(tmp_path / name)) == ([], {reason: 1})
    (dropped,) = read_documents(tmp_path / "f.txt")
    assert dropped.where == f"{tmp_path / 'f.txt'}, byte 2"


LINES = [
    (b'{"text": "good"}', None),
    (b'{"body": "x"}', "no field text"),
    (b'{"text": null}', "no field text"),
    (b'{"text": ""}', "empty"),
    (b'{"text": "\\u00a0\\n"}', "empty"),
    (b'{"text": 7}', "not text"),
    (b'{"text": ["a"]}', "not text"),
    (b'{"text": "cut off', "not valid JSON"),
    (b"text: a", "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"),
    (b'"text"', "not a JSON object"),
    (b'{"text": "fa\xe7ade"}', "not valid UTF-8"),
    (b'{"text": "\\ud83d"}', "not valid Unicode"),
    (b"", None),
    (b"   ", None),
    (b'{"text": "\\ud83d\\ude42"}', None),
    (b'{"text": "last"}', None),
]


def test_every_line_is_a_document_or_dropped_for_a_reason_at_a_place(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(line for line, _ in LINES))
    records = list(read_documents(path))
    assert [record for record in records if isinstance(record, str)] == ["good", "🙂", "last"]
    expected = [(reason, f"{path}:{number}") for number, (_, reason) in enumerate(LINES, 1) if reason]
    assert [(record.reason, record.where) for record in records if isinstance(record, Dropped)] == expected
    assert len(records) == len(LINES) - 2  # blank lines are no records


def test_every_row_is_a_document_or_dropped_for_a_reason_at_a_place(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "ROWS_AT_ONCE", 2)
    path = tmp_path / "a.parquet"
    bad = pa.array([b"good", b"fa\xe7ade", None, b"", b"last"], pa.binary())
    pa.parquet.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 5, bad.buffers())}), path)
    records = list(read_documents(path))
    assert [records[0], records[4]] == ["good", "last"]
    dropped = [(record.reason, record.where) for record in records[1:4] if isinstance(record, Dropped)]
    assert dropped == [("not valid UTF-8", f"{path}:2"), ("no field text", f"{path}:3"), ("empty", f"{path}:4")]
    for column in (pa.array([1, 2]), pa.array([["a"], ["b"]]), pa.array([b"a", b"b"])):
        pa.parquet.write_table(pa.table({"text": column}), path)
        assert split(read_documents(path)) == ([], {"not text": 2})


def test_another_field(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(json_lines([{"text": "no", "body": "yes"}, {"text": "no"}]))
    pa.parquet.write_table(pa.table({"text": ["no"], "body": ["yes"]}), tmp_path / "b.parquet")
    assert split(read_documents(tmp_path, "body")) == (["yes", "yes"], {"no field body": 1})


def test_a_folder(tmp_path):
    for name in ("b/2.txt", "b/1.txt", "a.jsonl", "README.md", "b/x.bin", ".hidden/3.txt", "b/.part.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "line"}' if name == "a.jsonl" else name)
    files = find_files(tmp_path)
    assert [str(file.relative_to(tmp_path)) for file in files.read] == ["a.jsonl", "b/1.txt", "b/2.txt", "c.txt"]
    assert [str(file.relative_to(tmp_path)) for file in files.left_out] == ["README.md", "b/x.bin"]
    assert list(read_documents(tmp_path)) == ["line", "b/1.txt", "b/2.txt", "c.txt"]


def test_lines_are_read_one_by_one(tmp_path):
    """The file is never in memory: the first document is there before the broken end of the archive is met."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json_lines([{"text": str(n)} for n in range(200_000)]))[:-100])
    documents = read_documents(tmp_path / "a.jsonl.gz")
    assert [next(documents) for _ in range(3)] == ["0", "1", "2"]
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read"):
        list(documents)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_the_position_grows_to_the_size_of_the_file(tmp_path, name, monkeypatch):
    monkeypatch.setattr(sources, "ROWS_AT_ONCE", 2)
    records, path = [{"text": f"text {number}"} for number in range(9)], tmp_path / name
    if name.endswith("parquet"):
        pa.parquet.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_bytes(gzip.compress(json_lines(records)) if name.endswith("gz") else json_lines(records))
    seen: list[int] = []
    assert len(list(read_file(path, "text", seen.append))) == (1 if name == "a.txt" else 9)
    assert seen == sorted(seen) and seen[-1] == path.stat().st_size


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def without_field(path: Path) -> Path:
    pa.parquet.write_table(pa.table({"id": [1], "body": ["a"]}), path)
    return path


# Each row: what makes the path to read, a piece of the message.
REFUSED = [
    (lambda f: f / "gone.txt", "gone.txt is not there: give a file"),
    (lambda f: write(f / "a.csv", b"a"), "ending that is not read: give .txt, .jsonl, .json, .parquet, .txt.gz, .jsonl.gz or .json.gz"),
    (lambda f: f, "has none of the files that are read"),
    (lambda f: write(f / "a.jsonl", json_lines([{"a": 1, "b": 2}, {"c": 3}])), "no record has the field text: set text_key to a, b or c"),
    (lambda f: without_field(f / "a.parquet"), "no record has the field text: set text_key to id or body"),
    (lambda f: write(f / "a.json", b'[{"text": "a"}, {"text": "b"}]'), "is one JSON array: write one object a line"),
    (lambda f: write(f / "a.json", b'\xef\xbb\xbf [\n{"text": "a"}\n]'), "is one JSON array: write one object a line"),
    (lambda f: write(f / "a.parquet", b"PAR1 no"), "a.parquet is not a Parquet file that can be read"),
    (lambda f: write(f / "a.parquet", b""), "a.parquet is not a Parquet file that can be read"),
    (lambda f: write(f / "a.txt.gz", b"plain text"), "a.txt.gz cannot be read"),
    (lambda f: write(f / "a.txt.gz", gzip.compress(b"text" * 100)[:-12]), "a.txt.gz cannot be read"),
    (lambda f: write(f / "a.txt.gz", gzip.compress(b"text" * 100)[:12] + b"\xff" * 30), "a.txt.gz cannot be read"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, make, message):
    path = make(tmp_path)
    with pytest.raises(DataError, match=message) as error:
        list(read_documents(path))
    assert "\n" not in str(error.value)


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    without_field(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r'a.parquet needs pyarrow: pip install "jaxmeg\[parquet\]"'):
        list(read_documents(tmp_path))


def test_an_empty_file_of_lines_has_no_records(tmp_path):
    assert list(read_documents(write(tmp_path / "a.jsonl", b""))) == []
    assert list(read_documents(write(tmp_path / "b.jsonl.gz", b""))) == []
    assert split(read_documents(write(tmp_path / "c.jsonl", b"{}\n{}\n"))) == ([], {"no field text": 2})
