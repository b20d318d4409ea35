"""Preparing a corpus: what is written against UTF-8 and the library `tokenizers` by hand, counts, failures, the cache, the script."""

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jaxmeg.data import prepare as prepare_module
from jaxmeg.data.prepare import open_corpus, prepare
from jaxmeg.data.store import About, DataError, ReadCounts, StoreWriter, open_store
from jaxmeg.data.tokenizer import ByteTokenizer, load_tokenizer, split_text, train_bpe

END = "<|endoftext|>"
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "prepare_data.py"
TEXTS = [f"Document {number} counts: {' '.join(str(n * number) for n in range(number % 7 + 1))} and no more.\n" for number in range(1, 60)]

main = runpy.run_path(str(SCRIPT))["main"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("JAXMEG_CACHE", str(folder))
    return folder / "data"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    return train_bpe(TEXTS, 300, tmp_path_factory.mktemp("bpe") / "tokenizer.json", [END])


def write_lines(path: Path, texts: list[str], key: str = "text") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def contents(store) -> list[list[int]]:
    return [store.read(number, 0, int(length)).tolist() for number, length in enumerate(store.lengths)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written(tmp_path):
    write_lines(tmp_path / "in" / "b.jsonl", ["one", "naïve"])
    (tmp_path / "in" / "a.txt").write_text("first")
    (tmp_path / "last.txt").write_text("last")
    made = prepare([tmp_path / "in", tmp_path / "last.txt"], tmp_path / "out", ByteTokenizer(), end_token="\0")
    expected = [[*text.encode(), 0] for text in ("first", "one", "naïve", "last")]
    assert np.fromfile(tmp_path / "out.bin", np.uint16).tolist() == [number for ids in expected for number in ids]
    store = open_store(tmp_path / "out")
    assert contents(store) == expected
    assert store.counts == made.counts == ReadCounts(read=4, kept=4)
    num_tokens = sum(map(len, expected))
    assert (made.tokens, made.text_bytes) == (num_tokens, num_tokens - 4)
    sources = tuple(str(tmp_path / name) for name in ("in/a.txt", "in/b.jsonl", "last.txt"))
    assert store.about == About(tokenizer="bytes", fingerprint="bytes", vocab_size=256, end_token="\0", end_id=0, sources=sources)


def test_the_number_of_workers_changes_nothing(tmp_path, monkeypatch, bpe):
    """Batches of a few texts, and in the middle a document that is cut into many pieces and lies in many batches."""
    monkeypatch.setattr(prepare_module, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(prepare_module, "BATCH_TEXTS", 7)
    monkeypatch.setattr(prepare_module, "split_text", partial(split_text, size=60))
    texts = [*TEXTS[:20], "".join(TEXTS), *TEXTS[20:]]
    source = write_lines(tmp_path / "in.jsonl", texts)
    library = tokenizers.Tokenizer.from_file(bpe.name)
    for workers in (1, 2, 3):
        prepare([source], tmp_path / f"{workers}", bpe, end_token=END, workers=workers)
        assert contents(open_store(tmp_path / f"{workers}")) == [[*library.encode(text).ids, 0] for text in texts]
    for suffix in (".bin", ".idx", ".json"):
        assert len({(tmp_path / f"{workers}{suffix}").read_bytes() for workers in (1, 2, 3)}) == 1


def test_the_default_is_one_process_for_little_and_many_for_much(tmp_path, monkeypatch):
    source, asked = write_lines(tmp_path / "in.jsonl", TEXTS), []
    encode_all = prepare_module._encode_all
    monkeypatch.setattr(prepare_module, "_encode_all", lambda batches, t, workers: asked.append(workers) or encode_all(batches, t, 1))
    monkeypatch.setattr(prepare_module, "_num_cores", lambda: 12)
    prepare([source], tmp_path / "out", ByteTokenizer())
    monkeypatch.setattr(prepare_module, "WORTH_WORKERS", 100)
    prepare([source], tmp_path / "out", ByteTokenizer())
    assert asked == [1, 12]


def test_what_was_read_kept_and_dropped_adds_up(tmp_path):
    """100 records, 82 of them no documents."""
    lines = 18 * ['{"text": "kept"}'] + 40 * ['{"text": ""}'] + 30 * ['{"other": 1}'] + 7 * ['{"text": 1}'] + 3 * ["{"] + 2 * ['"a"']
    order = np.random.default_rng(0).permutation(100).tolist()
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(lines[number] for number in order))
    made = prepare([path], tmp_path / "out", ByteTokenizer())
    assert (made.counts.read, made.counts.kept) == (100, 18)
    assert made.counts.dropped == {"empty": 40, "no field text": 30, "not text": 7, "not valid JSON": 3, "not a JSON object": 2}
    first = 1 + min(order.index(number) for number, line in enumerate(lines) if line == "{")
    assert made.counts.first["not valid JSON"] == f"{path}:{first}"
    assert open_store(tmp_path / "out").counts == made.counts


def test_a_text_without_tokens_is_counted(tmp_path):
    """A tokenizer may make nothing of a text: then an end token alone is no document."""
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<e>": 1, "b": 2}, unk_token="b"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Split("-", "removed")
    library.save(str(tmp_path / "tokenizer.json"))
    source = write_lines(tmp_path / "in.jsonl", ["a-a", "--", "a"])
    made = prepare([source], tmp_path / "out", load_tokenizer(str(tmp_path / "tokenizer.json")), end_token="<e>")
    assert contents(open_store(tmp_path / "out")) == [[0, 0, 1], [0, 1]]
    assert made.counts == ReadCounts(read=3, kept=2, dropped={"no tokens": 1})


class Failing(ByteTokenizer):
    """Fails on a text with a cross, and ends its process on one with a bomb."""

    def encode_batch(self, texts):
        if any("†" in text for text in texts):
            raise KeyboardInterrupt
        if any("💣" in text for text in texts):
            os._exit(9)
        return super().encode_batch(texts)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_preparation_leaves_nothing(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(prepare_module, "BATCH_TEXTS", 2)
    source = write_lines(tmp_path / "in.jsonl", [*TEXTS[:30], "†", *TEXTS[30:]])
    with pytest.raises(KeyboardInterrupt):
        prepare([source], tmp_path / "out", Failing(), workers=workers)
    assert names(tmp_path) == ["in.jsonl"]


def test_a_killed_worker_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "BATCH_TEXTS", 2)
    source = write_lines(tmp_path / "in.jsonl", [*TEXTS[:30], "💣", *TEXTS[30:]])
    with pytest.raises(DataError, match="one of 2 worker processes was killed, most often for want of memory: use fewer workers"):
        prepare([source], tmp_path / "out", Failing(), workers=2)
    assert names(tmp_path) == ["in.jsonl"]


def test_a_worker_leaves_ctrl_c_to_its_parent_and_has_one_thread():
    with ProcessPoolExecutor(1, get_context("spawn"), prepare_module._start_worker, (ByteTokenizer(),)) as pool:
        assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN
        assert pool.submit(os.getenv, "TOKENIZERS_PARALLELISM").result() == "false"


NOTHING = [
    (b'{"text": ""}\n{"text": 1}', r"of 2 records, dropped 1 empty \(first .*in.jsonl:1\), 1 not text \(first .*in.jsonl:2\): give text"),
    (b"", "gave no document: it has no records"),
    (b'{"body": "a"}', "no record has the field text: set text_key to body"),
]


@pytest.mark.parametrize(("content", "message"), NOTHING)
def test_a_preparation_without_documents_leaves_nothing(tmp_path, content, message):
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepare([tmp_path / "in.jsonl"], tmp_path / "out", ByteTokenizer())
    assert names(tmp_path) == ["in.jsonl"]


def test_a_file_given_twice_is_refused(tmp_path):
    source = write_lines(tmp_path / "in" / "a.jsonl", TEXTS)
    with pytest.raises(DataError, match=r"a\.jsonl is given twice"):
        prepare([tmp_path / "in", source], tmp_path / "out", ByteTokenizer())


def test_progress_grows_to_the_size_of_the_files(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "BATCH_CHARACTERS", 300)
    monkeypatch.setattr(prepare_module, "split_text", partial(split_text, size=60))
    write_lines(tmp_path / "in" / "a.jsonl", TEXTS)
    (tmp_path / "in" / "b.txt").write_text("".join(TEXTS))
    size, seen = sum(path.stat().st_size for path in (tmp_path / "in").iterdir()), []
    made = prepare([tmp_path / "in"], tmp_path / "out", ByteTokenizer(), progress=lambda *now: seen.append(now))
    done, totals, tokens = zip(*seen, strict=True)
    assert list(done) == sorted(done) and done[-1] == size and set(totals) == {size}
    assert len(set(done)) > 10 and max(np.diff(done)) < size / 4  # the long text does not come all at once
    assert list(tokens) == sorted(tokens) and tokens[-1] == made.tokens
    assert np.allclose(tokens, np.array(done) * made.tokens / size, atol=size / 4)


# open_corpus


def test_the_text_that_ships(bpe):
    shipped = (Path(prepare_module.__file__).parent / "shakespeare.txt").read_bytes()
    store = open_corpus(None, ByteTokenizer())
    assert store.name == "8 plays by Shakespeare (shipped with jaxmeg)" and store.vocab_size == 256
    assert store.lengths.tolist() == [len(shipped)] and store.read(0, 0, len(shipped)).tolist() == list(shipped)
    store = open_corpus(None, bpe, end_token=END)
    (ids,) = contents(store)
    assert bpe.decode(ids[:-1]).encode() == shipped and ids[-1] == 0


@pytest.mark.parametrize("ending", ["", ".bin", ".idx"])
def test_a_store_by_any_of_its_names(tmp_path, bpe, ending):
    prepare([write_lines(tmp_path / "in.jsonl", TEXTS)], tmp_path / "wiki", bpe, end_token=END)
    for end_token in (None, END):
        store = open_corpus(f"{tmp_path / 'wiki'}{ending}", bpe, end_token=end_token)
        assert store.name == "wiki" and contents(store) == contents(open_store(tmp_path / "wiki"))


def test_text_is_tokenised_once(tmp_path, cache, bpe):
    source = write_lines(tmp_path / "wiki" / "in.jsonl", TEXTS)
    expected = [tokenizers.Tokenizer.from_file(bpe.name).encode(text).ids for text in TEXTS]
    for path in (tmp_path / "wiki", source):
        store = open_corpus(str(path), bpe)
        assert store.name == path.name and contents(store) == expected and store.counts.kept == len(TEXTS)
    before = {path: path.stat().st_ino for path in cache.iterdir()}
    assert len(before) == 6
    for path in (tmp_path / "wiki", source):
        assert contents(open_corpus(str(path), bpe)) == expected
    assert {path: path.stat().st_ino for path in cache.iterdir()} == before


def test_a_change_is_tokenised_again(tmp_path, cache, bpe):
    source = write_lines(tmp_path / "in.jsonl", ["one", "two"])
    options = [(bpe, None), (ByteTokenizer(), None), (bpe, END), (ByteTokenizer(), "\n")]
    first = [contents(open_corpus(str(source), tokenizer, end_token=end))[0] for tokenizer, end in options]
    assert [ids[-1] for ids in first[1:]] == [ord("e"), 0, ord("\n")] and bpe.decode(first[0]) == "one"
    write_lines(source, ["one", "tw0"])  # as many bytes
    os.utime(source, ns=(1, 1))
    assert bytes(contents(open_corpus(str(source), ByteTokenizer()))[1]) == b"tw0"
    source.write_text('{"text": "one", "body": "other"}\n')
    assert bytes(contents(open_corpus(str(source), ByteTokenizer()))[0]) == b"one"
    assert bytes(contents(open_corpus(str(source), ByteTokenizer(), text_key="body"))[0]) == b"other"
    assert len(names(cache)) == 7 * 3


def test_several_at_once(tmp_path, cache, bpe):
    """Threads here, processes in life: all meet before anything is written."""
    source, barrier, results = write_lines(tmp_path / "in.jsonl", TEXTS), threading.Barrier(4), []

    class Meeting(ByteTokenizer):
        def encode_batch(self, texts):
            barrier.wait(timeout=60)
            return super().encode_batch(texts)

    threads = [threading.Thread(target=lambda: results.append(contents(open_corpus(str(source), Meeting())))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == 4 * [[list(text.encode()) for text in TEXTS]]
    assert len(names(cache)) == 3


def test_a_writer_that_is_giving_names_is_waited_out(tmp_path, cache):
    """The .bin of another process has its name already, the .idx not yet."""
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    open_corpus(str(source), ByteTokenizer())
    next(cache.glob("*.idx")).unlink()
    assert len(open_corpus(str(source), ByteTokenizer()).lengths) == len(TEXTS)


def test_a_store_that_does_not_fit_is_refused(tmp_path, bpe):
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    other = train_bpe(TEXTS, 320, tmp_path / "other.json", [END])
    prepare([source], tmp_path / "wiki", bpe)
    for tokenizer in (other, ByteTokenizer()):
        with pytest.raises(DataError, match=f"wiki was made with the tokenizer {bpe.name}, which is not {tokenizer.name}: set"):
            open_corpus(str(tmp_path / "wiki"), tokenizer)
    with pytest.raises(DataError, match=r"end_token=<\|endoftext\|> does not end the documents of .*wiki"):
        open_corpus(str(tmp_path / "wiki"), bpe, end_token=END)
    (tmp_path / "wiki.json").unlink()  # as a store from elsewhere
    with pytest.raises(DataError, match=r"wiki has ids up to 29\d, beyond the 256 of the tokenizer bytes"):
        open_corpus(str(tmp_path / "wiki"), ByteTokenizer())
    assert len(open_corpus(str(tmp_path / "wiki"), other).lengths) == len(TEXTS)


def test_half_a_store_is_refused(tmp_path):
    with StoreWriter(tmp_path / "wiki", About(tokenizer="bytes", fingerprint="bytes", vocab_size=256)) as writer:
        writer.add(np.arange(9))
    (tmp_path / "wiki.idx").unlink()
    for name in ("wiki", "wiki.bin", "wiki.idx"):
        with pytest.raises(DataError, match=r"wiki.bin is there without .*wiki.idx"):
            open_corpus(str(tmp_path / name), ByteTokenizer())


def test_what_open_corpus_refuses(tmp_path, monkeypatch):
    source = write_lines(tmp_path / "in.jsonl", TEXTS)
    with pytest.raises(DataError, match="gone is not there: give a file"):
        open_corpus(str(tmp_path / "gone"), ByteTokenizer())
    with pytest.raises(DataError, match="end_token=<e> is not a token of bytes"):
        open_corpus(str(source), ByteTokenizer(), end_token="<e>")
    monkeypatch.setenv("JAXMEG_CACHE", str(source))
    with pytest.raises(DataError, match=r"the tokens of .*in.jsonl cannot be kept in .*: set JAXMEG_CACHE to a folder with space"):
        open_corpus(str(source), ByteTokenizer())


# scripts/prepare_data.py


def run(*arguments: object) -> int:
    """Its exit code."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as stop:
        return int(stop.code or 0)


def test_the_script_says_what_it_did(tmp_path, capsys):
    write_lines(tmp_path / "in" / "a.jsonl", [*TEXTS, "", ""])
    (tmp_path / "in" / "notes.md").write_text("left out")
    assert run(tmp_path / "in", "--out", tmp_path / "new" / "corpus.bin", "--end_token", "\n") == 0
    assert names(tmp_path / "new") == ["corpus.bin", "corpus.idx", "corpus.json"]
    out = capsys.readouterr().out
    table = {name.strip(): value.strip() for name, value in (line.split("  ", 1) for line in out.splitlines() if "  " in line)}
    num_bytes = sum(len(text) for text in TEXTS)
    num_tokens = num_bytes + len(TEXTS)
    assert table["files"] == f"1 (1 of other kinds left out, first {tmp_path / 'in' / 'notes.md'})"
    assert table["records read"] == "61" and table["documents kept"] == "59"
    assert table["dropped: empty"] == f"2, first {tmp_path / 'in' / 'a.jsonl'}:60"
    assert table["tokens"] == f"{num_tokens:,} of 256 ids, tokenizer bytes"
    assert table["bytes per token"] == f"{num_bytes / num_tokens:.3f}"
    assert out.splitlines()[-1] == f"train on it: python scripts/train.py --data.train {tmp_path / 'new' / 'corpus'}"


def test_the_script_trains_a_tokenizer(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    source, out = write_lines(tmp_path / "in.jsonl", TEXTS, "body"), tmp_path / "corpus"
    assert run(source, "--out", out, "--train_bpe", 280, "--end_token", END, "--text_key", "body") == 0
    assert names(tmp_path) == ["corpus.bin", "corpus.idx", "corpus.json", "corpus.tokenizer.json", "in.jsonl"]
    library = tokenizers.Tokenizer.from_file(f"{out}.tokenizer.json")
    store = open_corpus(str(out), load_tokenizer(f"{out}.tokenizer.json"))
    assert contents(store) == [[*library.encode(text).ids, library.token_to_id(END)] for text in TEXTS]
    assert store.vocab_size == library.get_vocab_size() == 280
    command = f"python scripts/train.py --data.train {out} --data.tokenizer {out}.tokenizer.json --model.vocab_size 280"
    assert capsys.readouterr().out.splitlines()[-1] == f"train on it: {command}"


# Each row: arguments after the input, a piece of the message. in.jsonl and old.bin, old.idx, old.json are there.
MISTAKES = [
    ([], "the following arguments are required: --out"),
    (["--out", "new", "--workers", "0"], "--workers=0 is no number of processes: use 1 or more"),
    (["--out", "new", "--train_bpe", "280", "--tokenizer", "a.json"], "--train_bpe=280 and --tokenizer=a.json are two tokenizers"),
    (["--out", "new", "--train_bpe", "256", "--end_token", END], "a vocabulary of 256 is below 256 bytes and 1 special tokens: use 257"),
    (["--out", "new", "--tokenizer", "gone.json"], "tokenizer gone.json cannot be read"),
    (["--out", "new", "--end_token", END], "end_token=<|endoftext|> is not a token of bytes"),
    (["--out", "new", "--text_key", "body"], "no record has the field body: set text_key to text"),
    (["--out", "new", "gone.txt"], "gone.txt is not there"),
    (["--out", "new", "in.jsonl"], "in.jsonl is given twice"),
    (["--out", "old"], "old.bin is there already: give another --out, or --overwrite to replace it"),
    (["--out", "old", "old.json", "--overwrite"], "--out=old would write over the input old.json: give another name"),
    (["--out", "."], "--out=. is a folder: name the store in it, such as corpus"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    write_lines(Path("in.jsonl"), TEXTS)
    for suffix in (".bin", ".idx", ".json"):
        Path(f"old{suffix}").write_text('{"text": "old"}')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert run("in.jsonl", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and message in error
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_overwriting(tmp_path, capsys):
    for text in ("first", "second"):
        (tmp_path / "in.txt").write_text(text)
        assert run(tmp_path / "in.txt", "--out", tmp_path / "out", "--overwrite") == 0
        assert bytes(contents(open_store(tmp_path / "out"))[0]) == text.encode()
    (tmp_path / "in.txt").write_bytes(b"\xff")
    assert run(tmp_path / "in.txt", "--out", tmp_path / "out", "--overwrite") == 2
    assert bytes(contents(open_store(tmp_path / "out"))[0]) == b"second"


# Whoever starts the tests may have SIGINT ignored.
RESET = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The script with two workers, a tenth into a text of some megabytes."""
    with open(write_lines(folder / "in.jsonl", TEXTS), "a") as file:
        file.writelines(2000 * [json.dumps({"text": "".join(TEXTS)}) + "\n"])
    command = [sys.executable, "-c", RESET, str(SCRIPT), str(folder / "in.jsonl"), "--out", str(folder / "out"), "--workers", "2"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    assert process.stdout
    while not (line := process.stdout.readline()).startswith("tokenised "):
        assert line, process.communicate()
    return process


SIGNALS = [(signal.SIGINT, 130, "interrupted: no store was written\n"), (signal.SIGTERM, 143, "")]


@pytest.mark.parametrize(("number", "code", "message"), SIGNALS)
def test_a_signal_in_the_middle_leaves_nothing(tmp_path, number, code, message):
    """The tokenizer is there already, the store half; the signal goes to all processes, as Ctrl-C does."""
    process = start(tmp_path, "--train_bpe", "300")
    os.killpg(process.pid, number)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (code, message)
    assert names(tmp_path) == ["in.jsonl"]


def test_workers_end_with_a_parent_that_was_killed(tmp_path, bpe):
    """The pipe is at its end when no process holds it any more. What is left can't be taken for a store."""
    process = start(tmp_path, "--tokenizer", bpe.name)
    process.kill()
    process.communicate(timeout=60)
    (left, source) = names(tmp_path)
    assert left.startswith(".out.") and left.endswith(".partial") and source == "in.jsonl"
    with pytest.raises(DataError, match="is not there"):
        open_corpus(str(tmp_path / "out"), bpe)
