"""Data files of any content: documents and counted drops that add up, or one DataError of one line; and no partial store is left."""

import gzip
import io
import json
import os
import runpy
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from fuzz import JSON, assert_one_line, bounded, damaged, fuzz, listing
from hypothesis import given
from hypothesis import strategies as st

from jaxmeg.config import DataConfig
from jaxmeg.data import sources, store
from jaxmeg.data.dataset import open_data
from jaxmeg.data.prepare import open_corpus, prepare
from jaxmeg.data.sources import Dropped, read_documents
from jaxmeg.data.store import About, DataError, StoreWriter, open_store
from jaxmeg.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "prepare_data.py"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("JAXMEG_CACHE", str(folder))
    return folder


def prepared(path: Path) -> bool:
    """Whether a file becomes a store; all records are accounted for, or nothing is left."""
    folder = path.parent
    before = listing(folder)
    with bounded():
        try:
            made = prepare([path], folder / "out", ByteTokenizer())
        except DataError as error:
            assert_one_line(str(error))
            assert listing(folder) == before
            return False
    assert made.counts.read == made.counts.kept + sum(made.counts.dropped.values())
    opened = open_store(folder / "out")
    assert len(opened.lengths) == made.counts.kept and opened.lengths.sum() == made.text_bytes
    for suffix in store.SUFFIXES:
        (folder / f"out{suffix}").unlink()
    return True


# ---------------------------------------------------------------- text, JSON lines, Parquet
CONTENTS = st.one_of(
    st.binary(max_size=200), st.text().map(lambda text: text.encode(errors="surrogatepass")),
    st.sampled_from([b"", b"\0", b"\xef\xbb\xbf", b"\xff\xfea\0", b"\r\n", b"[" * 10000, b"{" * 10000, b'{"a":' * 5000,
                     b'{"text": "\\ud800"}', b"1" * 5000, b'{"text": 1e999}', b'{"text": NaN}', gzip.compress(b"x"), b"PAR1PAR1"]))
LINES = st.lists(st.one_of(CONTENTS, JSON.map(lambda value: json.dumps(value).encode()),
                           JSON.map(lambda value: json.dumps({"text": value}).encode())), max_size=5)


@fuzz(60)
@given(CONTENTS, st.sampled_from(["a.txt", "a.txt.gz", "a.jsonl", "a.parquet", "a.jsonl.gz", "a.json", "a.bin"]))
def test_any_file(tmp_path: Path, content: bytes, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    prepared(path)
    path.unlink()


@fuzz(100)
@given(LINES, st.sampled_from([b"\n", b"\r\n", b"\r", b"\n\n"]))
def test_any_lines(tmp_path: Path, lines: list[bytes], end: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(end.join(lines))
    prepared(tmp_path / "a.jsonl")


def parquet() -> bytes:
    out = io.BytesIO()
    pa.parquet.write_table(pa.table({"id": list(range(20)), "text": [f"text {n}" for n in range(20)]}), out, row_group_size=7)
    return out.getvalue()


@fuzz(80)
@given(damaged(parquet()))
def test_a_damaged_parquet_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    prepared(tmp_path / "a.parquet")


@fuzz(60)
@given(damaged(gzip.compress(b"".join(b'{"text": "number %d"}\n' % n for n in range(50)))))
def test_a_damaged_archive(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    prepared(tmp_path / "a.jsonl.gz")


# ---------------------------------------------------------------- stores
DOCUMENTS = [[5, 6, 7, 8], [1], [2, 3, 4, 9, 10, 11, 12]]
ABOUT = About(tokenizer="bytes", fingerprint="bytes", vocab_size=256, sources=("a.txt",))


def write_store(folder: Path) -> dict[str, bytes]:
    with StoreWriter(folder / "wiki", ABOUT) as writer:
        for ids in DOCUMENTS:
            writer.add(np.array(ids))
    return {suffix: (folder / f"wiki{suffix}").read_bytes() for suffix in store.SUFFIXES}


def opened(folder: Path) -> list[list[int]] | None:
    """All documents of a store, or None where it is refused. Its ids are below its vocab_size."""
    with bounded():
        try:
            found = open_corpus(str(folder / "wiki"), ByteTokenizer())
            documents = [found.read(number, 0, int(length)).tolist() for number, length in enumerate(found.lengths)]
            assert all(0 <= number < found.vocab_size for ids in documents for number in ids)
        except DataError as error:
            assert_one_line(str(error))
            return None
    return documents


@fuzz(200)
@given(st.data(), st.sampled_from([".idx", ".bin", ".json"]))
def test_a_damaged_store(tmp_path: Path, data: st.DataObject, suffix: str) -> None:
    good = write_store(tmp_path)
    (tmp_path / f"wiki{suffix}").write_bytes(data.draw(damaged(good[suffix])))
    found = opened(tmp_path)
    tokens = [number for ids in DOCUMENTS for number in ids]
    assert suffix != ".idx" or found is None or [number for ids in found for number in ids] == tokens


def index(code: int, lengths: list[int], pointers: list[int], borders: list[int], counts: tuple[int, int] | None = None) -> bytes:
    head = struct.pack("<QBQQ", 1, code, *(counts or (len(lengths), len(borders))))
    numbers = [np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(borders, "<i8")]
    return b"MMIDIDX\0\0" + head + b"".join(part.tobytes() for part in numbers)


UINT64 = st.integers(0, 2**64 - 1)
INT64 = st.one_of(st.integers(-2, 20), st.integers(-(2**63), 2**63 - 1), st.sampled_from([2**63 - 1, -(2**63), -2]))


@fuzz(200)
@given(st.integers(0, 9), st.lists(st.integers(-1, 9) | st.integers(-(2**31), 2**31 - 1), max_size=4), st.lists(INT64, max_size=4),
       st.lists(INT64, max_size=5), st.none() | st.tuples(UINT64, UINT64), st.binary(max_size=40), st.booleans())
def test_an_index_that_lies(tmp_path: Path, code: int, lengths: list[int], pointers: list[int], borders: list[int],
                            counts: tuple[int, int] | None, content: bytes, honest: bool) -> None:
    if honest:  # but for one part
        pointers, borders = (np.cumsum([0, *lengths])[:-1] * 2).tolist(), [0, *borders[1:-1], len(lengths)]
    (tmp_path / "wiki.bin").write_bytes(content)
    (tmp_path / "wiki.idx").write_bytes(index(code, lengths, pointers, borders, counts))
    opened(tmp_path)


@fuzz(150)
@given(st.sampled_from([*About.__dataclass_fields__, "documents", "tokens", "counts", "format"]), JSON)
def test_a_sidecar_that_lies(tmp_path: Path, key: str, value: Any) -> None:
    good = json.loads(write_store(tmp_path)[".json"])
    counts = good["counts"]
    for changed in (good | {key: value}, good | {"counts": counts | {key: value}}, good | {"counts": counts | {"dropped": value}}):
        (tmp_path / "wiki.json").write_text(json.dumps(changed))
        found = opened(tmp_path)
        assert found in (None, DOCUMENTS)


# ---------------------------------------------------------------- tokenizers
@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(["a text of some words, and more words"] * 3, 270, path, ["<|endoftext|>"])
    return path.read_bytes()


def tokenized(path: Path) -> None:
    with bounded():
        try:
            tokenizer = load_tokenizer(str(path))
            ids = np.concatenate(tokenizer.encode_batch(["some words", "\u00e9\0"]))
        except DataError as error:
            assert_one_line(str(error))
            return
    assert ids.dtype == np.int32 and (ids >= 0).all() and (ids < tokenizer.vocab_size).all()


@fuzz(60)
@given(st.data())
def test_a_damaged_tokenizer(tmp_path: Path, bpe: bytes, data: st.DataObject) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data.draw(damaged(bpe)))
    tokenized(tmp_path / "tokenizer.json")


@fuzz(150)
@given(st.data(), JSON)
def test_a_tokenizer_with_another_entry(tmp_path: Path, bpe: bytes, data: st.DataObject, value: Any) -> None:
    content = json.loads(bpe)
    at: Any = content
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not at[key] or not isinstance(at[key], dict | list) or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = value
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenized(tmp_path / "tokenizer.json")


# ---------------------------------------------------------------- what was found
def refused(work: Any) -> str:
    with bounded(), pytest.raises(DataError) as error:
        work()
    assert_one_line(str(error.value))
    return str(error.value)


def test_fields_with_newlines_and_a_million_of_them(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({f"key\n{n}": 1}) for n in range(20_000)))
    found = refused(lambda: list(read_documents(path)))
    assert found.endswith(r"no record has the field text: set text_key to key\n0, key\n1, key\n2, key\n3, key\n4, key\n5, key\n6, key\n7, "
                          r"key\n8, key\n9 or another")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_a_document_larger_than_what_is_read_at_once(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MOST_BYTES", 1000)
    content = b'{"text": "' + b"a" * 2000 + b'"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    found = refused(lambda: list(read_documents(tmp_path / name)))
    assert "has a document of more than 1,000 bytes, and one is read at once: cut it" in found


def test_a_line_of_ten_megabytes(tmp_path: Path) -> None:
    text = "no end " * 1_500_000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    assert prepared(tmp_path / "a.jsonl")


def test_borders_whose_differences_overflow(tmp_path: Path) -> None:
    (tmp_path / "wiki.bin").write_bytes(b"\1\0\2\0")
    (tmp_path / "wiki.idx").write_bytes(index(8, [2], [0], [0, 2**63 - 1, -2, 1]))
    assert "has document borders that do not go from 0 to its 1 sequences" in refused(lambda: open_store(tmp_path / "wiki"))


def test_an_id_that_the_sidecar_does_not_know(tmp_path: Path) -> None:
    write_store(tmp_path)
    (tmp_path / "wiki.bin").write_bytes(np.array([5, 6, 7, 999, *range(8)], "<u2").tobytes())
    found = refused(lambda: open_store(tmp_path / "wiki").read(0, 0, 4))
    assert "wiki.bin holds the id 999, and" in found and "says that all are below 256: one of the two is damaged" in found


@pytest.mark.parametrize(("change", "message"), [
    ({"counts": {"read": 3, "kept": 3, "more": 1}}, "has entries of a wrong type"), ({"counts": 5}, "has entries of a wrong type"),
    ({"sources": 5}, "has entries of a wrong type"), ({"vocab_size": "256"}, "has entries of a wrong type"),
    ({"vocab_size": -1}, "has entries of a wrong type"), ({"end_id": 1.5}, "has entries of a wrong type"),
])
def test_a_sidecar_of_wrong_types(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    good = json.loads(write_store(tmp_path)[".json"])
    (tmp_path / "wiki.json").write_text(json.dumps(good | change))
    assert message in refused(lambda: open_store(tmp_path / "wiki"))


def test_names_that_are_not_utf_8_or_long(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    (tmp_path / name).write_text("text")
    prepare([tmp_path / name], tmp_path / "out", ByteTokenizer())
    found = open_store(tmp_path / "out")
    assert found.about is not None and found.about.sources == (str(tmp_path / name),)
    long = tmp_path / ("é" * 120 + ".txt")
    long.write_text("text")
    assert open_corpus(str(long), ByteTokenizer()).lengths.tolist() == [4]


@pytest.mark.parametrize(("content", "message"), [
    (b"[" * 100_000, "is not valid JSON"),
    (b'{"model": {"type": "WordLevel", "vocab": {"a": 4294967295}, "unk_token": "a"}}', "has the id 4294967295, and ids end at"),
    (json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "gone"}}).encode(), "is refused by the library tokenizers"),
])
def test_tokenizers_that_are_none(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.json").write_bytes(content)
    assert message in refused(lambda: load_tokenizer(str(tmp_path / "t.json")).encode_batch(["b c"]))


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".txt", ""])
def test_a_pipe_is_not_read(tmp_path: Path, suffix: str) -> None:
    write_store(tmp_path)
    (tmp_path / "wiki.json").unlink()
    os.mkfifo(tmp_path / f"wiki{suffix}")
    with bounded():
        if suffix in (".json", ""):  # the place of a sidecar, and of nothing
            assert len(open_store(tmp_path / "wiki").lengths) == 3
        assert "is no file" in refused(lambda: load_tokenizer(str(tmp_path / f"wiki{suffix}")))
        if suffix in (".jsonl", ".txt"):
            assert "is no file or folder" in refused(lambda: list(read_documents(tmp_path / f"wiki{suffix}")))


def test_a_folder_with_a_loop_and_a_file_nobody_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    (tmp_path / "round").symlink_to(tmp_path, target_is_directory=True)
    with bounded():
        assert [record for record in read_documents(tmp_path) if not isinstance(record, Dropped)] == ["text"]
    (tmp_path / "a.txt").chmod(0)
    if not os.access(tmp_path / "a.txt", os.R_OK):  # root may
        assert "cannot be read (Permission denied)" in refused(lambda: list(read_documents(tmp_path)))


@pytest.mark.parametrize("argv", [["--train_bpe", "9" * 30], ["--train_bpe", "5"], ["--workers", "9" * 9], ["--end_token", "\udcff"],
                                  ["--tokenizer", "a" * 5000], ["--text_key", "\udcff"]])
def test_the_script_refuses_in_one_line(tmp_path: Path, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a text"}\n')
    before = listing(tmp_path)
    with bounded():
        try:
            code = runpy.run_path(str(SCRIPT))["main"]([str(tmp_path / "a.jsonl"), "--out", str(tmp_path / "out"), *argv])
        except SystemExit as stop:
            code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert listing(tmp_path) == before


@fuzz(60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from(["concat", "fit", "none"]), st.booleans(),
       st.sampled_from(["split", "truncate", "drop"]), st.integers(1, 20), st.floats(0, 0.99), st.one_of(st.none(), st.integers(1, 5)))
def test_any_options_for_documents(tmp_path: Path, lengths: list[int], packing: str, separate: bool, long: str, seq_len: int,
                                   fraction: float, most: int | None) -> None:
    """Rows whose ids are bytes of the text, or one line."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * length}) + "\n" for length in lengths))
    config = DataConfig(train=str(tmp_path / "a.jsonl"), packing=packing, separate=separate or packing == "none", long_documents=long,
                        seq_len=seq_len, validation_fraction=fraction, max_rows=most)
    with bounded():
        try:
            training, validation = open_data(config, 0)
        except DataError as error:
            assert_one_line(str(error))
            return
        rows = training.rows(np.arange(3))
    assert set(rows.inputs[rows.mask].tolist()) == {ord("x")} == set(rows.labels[rows.mask].tolist())
    assert (validation is None) == (fraction == 0)
