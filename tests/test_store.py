"""Token stores against an independent writer and reader of Megatron-LM's published layout: struct and numpy, in this file."""

import json
import pickle
import struct
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from jaxmeg.data import store as store_module
from jaxmeg.data.split import split
from jaxmeg.data.store import About, DataError, MemoryStore, ReadCounts, StoreWriter, open_store, ranges

CODES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.float64, 7: np.float32, 8: np.uint16}
ABOUT = About(tokenizer="some.json", fingerprint="f00", vocab_size=300, end_token="<e>", end_id=7, sources=("a.txt", "b.txt"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("JAXMEG_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_megatron(prefix: Path, code: int, documents: list[list[list[int]]], modes: list[int] | None = None) -> None:
    """Documents of sequences of ids, written as the format is published."""
    sequences = [np.array(ids, CODES[code]) for document in documents for ids in document]
    offsets = np.cumsum([0] + [ids.nbytes for ids in sequences])
    borders = np.cumsum([0] + [len(document) for document in documents])
    prefix.with_suffix(".bin").write_bytes(b"".join(ids.tobytes() for ids in sequences))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code) + struct.pack("<QQ", len(sequences), len(borders))
        + np.array([len(ids) for ids in sequences], "<i4").tobytes() + offsets[:-1].astype("<i8").tobytes()
        + borders.astype("<i8").tobytes() + (b"" if modes is None else np.array(modes, np.int8).tobytes())
    )


def read_megatron(prefix: Path) -> tuple[int, list[list[int]]]:
    """(dtype code, ids of every document), read as the format is published."""
    index, data = prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00" and struct.unpack("<Q", index[9:17]) == (1,)
    code, sequences, borders = struct.unpack("<BQQ", index[17:34])
    lengths = struct.unpack(f"<{sequences}i", index[34 : 34 + 4 * sequences])
    pointers = struct.unpack(f"<{sequences}q", index[34 + 4 * sequences : 34 + 12 * sequences])
    documents = struct.unpack(f"<{borders}q", index[34 + 12 * sequences :])
    read = [np.frombuffer(data, CODES[code], length, pointer).tolist() for length, pointer in zip(lengths, pointers)]
    return code, [[number for ids in read[first:end] for number in ids] for first, end in pairwise(documents)]


def contents(store) -> list[list[int]]:
    return [store.read(number, 0, int(length)).tolist() for number, length in enumerate(store.lengths)]


DOCUMENTS = [[[5, 6, 7], [8]], [[1]], [[2, 3], [4], [9, 10, 11, 12]]]
TOKENS = [[5, 6, 7, 8], [1], [2, 3, 4, 9, 10, 11, 12]]


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("modes", [None, [0] * 6])
def test_a_megatron_store(tmp_path, code, modes):
    write_megatron(tmp_path / "wiki", code, DOCUMENTS, modes)
    store = open_store(tmp_path / "wiki")
    assert contents(store) == TOKENS
    assert store.lengths.tolist() == [4, 1, 7] and store.lengths.dtype == np.int64
    assert (store.name, store.vocab_size, store.counts) == ("wiki", 13, ReadCounts(read=3, kept=3))
    span = store.read(2, 2, 3)
    assert span.tolist() == [4, 9, 10] and span.dtype == np.int32


@pytest.mark.parametrize(("code", "largest"), [(1, 255), (3, 32767), (4, 200_000), (5, 2**31 - 1), (8, 65_535)])
def test_large_ids(tmp_path, code, largest):
    write_megatron(tmp_path / "wiki", code, [[[0, largest]]])
    store = open_store(tmp_path / "wiki.bin")
    assert contents(store) == [[0, largest]] and store.vocab_size == largest + 1


def test_documents_without_tokens_are_left_out_and_counted(tmp_path):
    write_megatron(tmp_path / "wiki", 4, [[], [[1, 2]], [[]], [[3], []], []])
    store = open_store(tmp_path / "wiki")
    assert contents(store) == [[1, 2], [3]]
    assert store.counts == ReadCounts(read=5, kept=2, dropped={"empty": 3})


def test_an_empty_store(tmp_path):
    write_megatron(tmp_path / "wiki", 4, [])
    store = open_store(tmp_path / "wiki")
    assert len(store.lengths) == 0 and store.vocab_size == 0


def test_the_largest_id_is_looked_for_once(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(store_module, "SCANNED_AT_ONCE", 2)
    write_megatron(tmp_path / "wiki", 4, DOCUMENTS)
    assert open_store(tmp_path / "wiki").vocab_size == 13
    (kept,) = (cache / "data").iterdir()
    kept.write_text("98")  # what a second reader finds
    assert open_store(tmp_path / "wiki").vocab_size == 99
    write_megatron(tmp_path / "wiki", 4, [*DOCUMENTS, [[50]]])  # another file of that name
    assert open_store(tmp_path / "wiki").vocab_size == 51


def test_reading_outside_of_a_document(tmp_path):
    write_megatron(tmp_path / "wiki", 4, DOCUMENTS)
    for store in (open_store(tmp_path / "wiki"), MemoryStore("wiki", map(np.array, TOKENS), 13)):
        for span in [(0, 0, 5), (0, -1, 2), (3, 0, 1), (-1, 0, 1), (1, 1, 1), (0, 0, -1)]:
            with pytest.raises(IndexError):
                store.read(*span)
        assert store.read(0, 4, 0).size == 0


def columns(spans) -> list[np.ndarray]:
    return list(np.array(spans, np.int64).reshape(-1, 3).T)


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("mean", [3, 1000])  # shorter and longer than LONG_SPAN
def test_spans_are_read_one_behind_the_other(tmp_path, code, mean):
    """Any spans in any order, some of them empty, against slices of lists; also from the two parts of a store, whose documents are cut."""
    rng = np.random.default_rng(mean)
    expected = [rng.integers(0, 100, length).tolist() for length in rng.integers(1, 2 * mean, 30)]
    write_megatron(tmp_path / "wiki", code, [[ids] for ids in expected])
    stores = [(open_store(tmp_path / "wiki"), expected), (MemoryStore("wiki", map(np.array, expected), 100), expected)]
    training, validation = split(stores[0][0], 0.37)
    cut, before = validation.first, validation.skip
    assert 0 < before < len(expected[cut])
    stores += [(training, [*expected[:cut], expected[cut][:before]]), (validation, [expected[cut][before:], *expected[cut + 1 :]])]
    for store, documents in stores:
        spans = []
        for document in rng.integers(0, len(documents), 40).tolist():
            start, end = sorted(rng.integers(0, len(documents[document]) + 1, 2).tolist())
            spans.append((document, start, end - start))
        spans += [(0, 0, 0), (len(documents) - 1, 0, len(documents[-1])), (0, 0, len(documents[0]))]
        tokens = store.read_spans(*columns(spans))
        assert tokens.dtype == np.int32
        assert tokens.tolist() == [ids for document, start, length in spans for ids in documents[document][start : start + length]]
        assert store.read_spans(*columns([])).tolist() == []
        tokens[:] = -1
        assert contents(store) == documents  # what is read is a copy


def test_a_span_outside_of_its_document_is_named(tmp_path):
    write_megatron(tmp_path / "wiki", 4, DOCUMENTS)
    whole = open_store(tmp_path / "wiki")
    training, validation = split(whole, 0.5)  # 6 tokens each, cut 1 token into the third document
    assert (training.lengths.tolist(), validation.lengths.tolist()) == ([4, 1, 1], [6])
    good = [(0, 0, 1), (0, 1, 0)]
    for store, bad in ((whole, (2, 3, 5)), (whole, (3, 0, 0)), (whole, (-1, 0, 1)), (whole, (1, -1, 1)), (whole, (1, 1, -1)),
                       (training, (2, 0, 2)), (training, (3, 0, 1)), (validation, (0, 6, 1)), (validation, (0, -1, 1))):
        document, start, length = bad
        with pytest.raises(IndexError, match=rf"^tokens \[{start}, {start + length}\) of document {document} are outside of th"):
            store.read_spans(*columns([*good, bad, *good]))


def test_ranges():
    assert ranges(np.array([7, 3, 90, 0]), np.array([2, 0, 3, 1])).tolist() == [7, 8, 90, 91, 92, 0]
    assert ranges(1, np.array([3, 2])).tolist() == [1, 2, 3, 1, 2]
    assert ranges(np.array([], np.int64), np.array([], np.int64)).tolist() == []


def test_a_store_is_pickled_by_its_path(tmp_path):
    write_megatron(tmp_path / "wiki", 4, [[list(range(10_000))]])
    pickled = pickle.dumps(open_store(tmp_path / "wiki", "an encyclopedia"))
    again = pickle.loads(pickled)
    assert len(pickled) < 1000 and again.name == "an encyclopedia" and contents(again) == [list(range(10_000))]


def test_many_threads_read_at_once(tmp_path):
    rng = np.random.default_rng(0)
    expected = [rng.integers(0, 60_000, rng.integers(1, 50)).tolist() for _ in range(200)]
    write_megatron(tmp_path / "wiki", 8, [[ids] for ids in expected])
    store, wrong = open_store(tmp_path / "wiki"), []

    def read(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(200).tolist()
        wrong.extend(number for number in order if store.read(number, 0, len(expected[number])).tolist() != expected[number])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize(("vocab_size", "code"), [(256, 8), (65_500, 8), (65_536, 8), (65_537, 4), (300_000, 4)])
def test_what_is_written_is_read_by_another_reader(tmp_path, vocab_size, code):
    documents = [[0, 1, 2], [vocab_size - 1], [7] * 1000]
    with StoreWriter(tmp_path / "deep" / "wiki", About(tokenizer="t", fingerprint="f", vocab_size=vocab_size)) as writer:
        for ids in documents:
            writer.add(np.array(ids))
    assert read_megatron(tmp_path / "deep" / "wiki") == (code, documents)
    store = open_store(tmp_path / "deep" / "wiki")
    assert contents(store) == documents and store.vocab_size == vocab_size
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["wiki.bin", "wiki.idx", "wiki.json"]


def test_a_document_longer_than_a_sequence_can_be(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "LONGEST_SEQUENCE", 3)
    with StoreWriter(tmp_path / "wiki", ABOUT) as writer:
        for length in (7, 3, 1):
            writer.add(np.arange(length))
    sequences, borders = struct.unpack("<QQ", (tmp_path / "wiki.idx").read_bytes()[18:34])
    assert (sequences, borders) == (3 + 1 + 1, 4)
    assert read_megatron(tmp_path / "wiki")[1] == contents(open_store(tmp_path / "wiki")) == [list(range(n)) for n in (7, 3, 1)]


def test_the_sidecar(tmp_path):
    counts = ReadCounts(read=5, kept=2, dropped={"empty": 1, "not text": 2}, first={"empty": "a.txt", "not text": "b.jsonl:7"})
    with StoreWriter(tmp_path / "wiki", ABOUT) as writer:
        writer.add(np.array([1, 7]))
        writer.add(np.array([2, 3, 7]))
        writer.counts = counts
    store = open_store(tmp_path / "wiki")
    assert (store.about, store.counts, store.vocab_size) == (ABOUT, counts, 300)
    content = json.loads((tmp_path / "wiki.json").read_text())
    assert (content["documents"], content["tokens"], content["fingerprint"], content["sources"]) == (2, 5, "f00", ["a.txt", "b.txt"])


def test_a_json_file_that_is_something_else(tmp_path):
    write_megatron(tmp_path / "wiki", 4, DOCUMENTS)
    for text in ('{"text": "the raw records"}\n{"text": "on lines"}', "[1, 2]", '{"format": "other"}'):
        (tmp_path / "wiki.json").write_text(text)
        store = open_store(tmp_path / "wiki")
        assert store.about is None and store.vocab_size == 13


@pytest.mark.parametrize("tokens", [[], [300], [-1]])
def test_a_failed_writer_leaves_nothing(tmp_path, tokens):
    with pytest.raises(ValueError, match="0 to 299"), StoreWriter(tmp_path / "wiki", ABOUT) as writer:
        writer.add(np.array([1, 2]))
        assert not (tmp_path / "wiki.bin").exists()
        writer.add(np.array(tokens, np.int64))
    assert list(tmp_path.iterdir()) == []


def test_a_failed_writer_leaves_what_was_there(tmp_path):
    with StoreWriter(tmp_path / "wiki", ABOUT) as writer:
        writer.add(np.array([1]))
    with pytest.raises(KeyboardInterrupt), StoreWriter(tmp_path / "wiki", ABOUT) as writer:
        writer.add(np.array([2]))
        raise KeyboardInterrupt
    assert contents(open_store(tmp_path / "wiki")) == [[1]]
    with StoreWriter(tmp_path / "wiki", ABOUT) as writer:
        writer.add(np.array([3]))
    assert contents(open_store(tmp_path / "wiki")) == [[3]]


def cut(name: str, size: int):
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])

    return damage


def put(name: str, at: int, data: bytes):
    def damage(folder: Path) -> None:
        path = folder / name
        content = path.read_bytes()
        path.write_bytes(content[:at] + data + content[at + len(data) :])

    return damage


def remove(name: str):
    return lambda folder: (folder / name).unlink()


def other_type(code: int):
    return lambda folder: write_megatron(folder / "wiki", code, DOCUMENTS)


def sidecar(**changes):
    about = {"tokenizer": "t", "fingerprint": "f", "vocab_size": 13, "end_token": None, "end_id": None, "sources": []}
    content = {"format": "jaxmeg token store", **about, "documents": 3, "tokens": 12, "counts": {"read": 3, "kept": 3}} | changes
    content = {key: value for key, value in content.items() if value != "gone"}
    return lambda folder: (folder / "wiki.json").write_text(json.dumps(content))


# Each row: what happened to a good store of int32 (6 sequences, 3 documents, 12 tokens), a piece of the message.
DAMAGED = [
    (cut("wiki.bin", 40), "wiki.bin has 40 bytes, not the 12 tokens of 4 bytes"),
    (put("wiki.bin", 48, b"\0"), "wiki.bin has 49 bytes, not the 12 tokens of 4 bytes"),
    (cut("wiki.bin", 0), "wiki.bin has 0 bytes"),
    (cut("wiki.idx", 60), "wiki.idx has 60 bytes where its header asks for 138"),
    (cut("wiki.idx", 20), "wiki.idx is not the index of a token store"),
    (put("wiki.idx", 0, b"TNTIDX\x00\x00"), "wiki.idx is not the index of a token store"),
    (put("wiki.idx", 9, b"\x02"), "wiki.idx has format version 2"),
    (put("wiki.idx", 17, b"\x63"), "wiki.idx has tokens of type number 99"),
    (put("wiki.idx", 34, b"\x02"), "wiki.bin has 48 bytes, not the 11 tokens"),
    (put("wiki.idx", 34 + 24 + 8, b"\x10"), "one of the two is cut or of another store"),
    (put("wiki.idx", 34 + 72, b"\x01"), "borders that do not go from 0 to its 6 sequences"),
    (put("wiki.idx", 34 + 72 + 8, b"\x06"), "borders that do not go from 0 to its 6 sequences"),
    (put("wiki.idx", 138, b"\x00\x00\x00\x00\x01\x00"), "multimodal"),
    (other_type(6), "wiki.idx has tokens of type float64"),
    (other_type(7), "wiki.idx has tokens of type float32"),
    (remove("wiki.idx"), "wiki.bin is there without "),
    (remove("wiki.bin"), "wiki.idx is there without "),
    (sidecar(tokens=99), "wiki.json describes 3 documents of 99 tokens, but the store beside it has 3 of 12"),
    (sidecar(tokenizer="gone"), "wiki.json lacks 'tokenizer'"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGED)
def test_a_damaged_store_is_refused_in_one_line(tmp_path, damage, message):
    write_megatron(tmp_path / "wiki", 4, DOCUMENTS)
    damage(tmp_path)
    with pytest.raises(DataError, match=message) as error:
        open_store(tmp_path / "wiki")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("code", "wrong"), [(4, -1), (2, -100), (5, 2**31)])
def test_what_is_no_id_is_refused(tmp_path, code, wrong):
    write_megatron(tmp_path / "wiki", code, [[[1, wrong]]])
    with pytest.raises(DataError, match=f"holds {wrong}, which is no token id"):
        _ = open_store(tmp_path / "wiki").vocab_size


def test_no_store(tmp_path):
    with pytest.raises(DataError, match="gone is not a token store"):
        open_store(tmp_path / "gone")


def test_a_store_in_memory():
    arrays = [np.array([1, 2, 3], np.int32), np.array([], np.uint16), np.array([4], np.uint16)]
    store = MemoryStore("small", arrays, 10)
    arrays[0][:] = 9
    assert contents(store) == [[1, 2, 3], [4]] and store.read(0, 1, 1).dtype == np.int32
    store.read(0, 0, 3)[:] = 5
    assert contents(store) == [[1, 2, 3], [4]]
    assert store.counts == ReadCounts(read=3, kept=2, dropped={"empty": 1})
    assert store.lengths.tolist() == [3, 1]
