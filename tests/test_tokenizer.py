"""Tokenizers: bytes against UTF-8, tokenizer.json against the library `tokenizers` used directly, cutting against not cutting."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxmeg.data.store import DataError
from jaxmeg.data.tokenizer import ByteTokenizer, find_end_id, load_tokenizer, split_text, train_bpe

END = "<|endoftext|>"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "again,", "don't", "you", "think?", "12345", "naïve", "日本語", "🙂"]
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def random_text(seed: int, words: int) -> str:
    rng = np.random.default_rng(seed)
    gaps = [" ", " ", " ", "  ", "\n", "\n\n", ".\n", "\t", ", "]
    return "".join(WORDS[rng.integers(len(WORDS))] + gaps[rng.integers(len(gaps))] for _ in range(words))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    return train_bpe([random_text(0, 2000)], 400, path, [END])


def library(kind: str) -> tokenizers.Tokenizer:
    """One tokenizer of each family, trained on the same words."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "gpt2":
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    elif kind == "llama3":
        split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        made.decoder = decoders.ByteLevel()
    elif kind == "metaspace":
        made.pre_tokenizer, made.decoder, alphabet = pre_tokenizers.Metaspace(), decoders.Metaspace(), []
    elif kind == "prefix":  # a sign before every text: pieces encoded by themselves would each get one
        made.normalizer, alphabet = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), []
    elif kind == "bert":
        made.normalizer, made.pre_tokenizer, alphabet = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer(), []
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>", END], initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([random_text(0, 500)], trainer)
    return made


FAMILIES = ["gpt2", "llama3", "metaspace", "prefix", "bert"]


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_bytes(text):
    (ids,) = ByteTokenizer().encode_batch([text])
    assert ids.dtype == np.int32 and ids.tolist() == list(text.encode())
    assert ByteTokenizer().decode(ids) == text


def test_bytes_one_by_one():
    bytes_ = load_tokenizer("bytes")
    assert (bytes_.name, bytes_.vocab_size) == ("bytes", 256)
    assert bytes_.pieces([104, 10, 195]) == ["h", "\n", "<0xC3>"]
    assert bytes_.decode([104, 300, 195]) == "h��"
    assert [bytes_.token_id(token) for token in ("\n", "\0", "é", "ab", "")] == [10, 0, None, None, None]


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_bpe_round_trip(bpe, text):
    (ids,) = bpe.encode_batch([text])
    assert bpe.decode(ids) == text


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_file_does_what_the_library_does(tmp_path, kind):
    made = library(kind)
    made.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    texts = [random_text(seed, 30) for seed in range(3)] + ["", f"a{END}b"]
    expected = [made.encode(text, add_special_tokens=False).ids for text in texts]
    assert [ids.tolist() for ids in loaded.encode_batch(texts)] == expected
    assert all(ids.dtype == np.int32 for ids in loaded.encode_batch(texts))
    for ids in expected:
        assert loaded.decode(ids) == made.decode(ids, skip_special_tokens=False)
    assert END in loaded.decode(expected[-1])
    assert loaded.pieces(expected[1]) == [made.decode([number], skip_special_tokens=False) for number in expected[1]]
    assert loaded.token_id(END) == made.token_to_id(END) == 1 and loaded.token_id("<none>") is None
    assert loaded.vocab_size == made.get_vocab_size()


def test_nothing_is_added_and_nothing_cut_off(tmp_path):
    """A tokenizer.json as model hubs have them: begin and end tokens, at most 8 ids, padded to 16."""
    made = library("gpt2")
    plain = made.encode(random_text(1, 20), add_special_tokens=False).ids
    made.post_processor = processors.TemplateProcessing(single=f"{END} $A {END}", special_tokens=[(END, 1)])
    made.enable_truncation(8)
    made.enable_padding(length=16)
    assert len(made.encode(random_text(1, 20)).ids) == 16
    made.save(str(tmp_path / "tokenizer.json"))
    long, short = load_tokenizer(str(tmp_path / "tokenizer.json")).encode_batch([random_text(1, 20), "a"])
    assert long.tolist() == plain and len(plain) > 16 and len(short) == 1


def test_ids_with_gaps(tmp_path):
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 900}, unk_token="a"))
    made.add_special_tokens([AddedToken("<end>")])
    made.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert loaded.vocab_size == max(900, made.token_to_id("<end>")) + 1


def test_fingerprints(tmp_path, bpe):
    content = json.loads(Path(bpe.name).read_bytes())

    def fingerprint(changes: dict, indent: int | None = None) -> str:
        path = tmp_path / "changed.json"
        path.write_text(json.dumps(content | changes, indent=indent), encoding="utf-8")
        return load_tokenizer(str(path)).fingerprint

    truncation = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
    assert fingerprint({}) == fingerprint({}, indent=4) == fingerprint({"truncation": truncation}) == bpe.fingerprint
    other = content["model"] | {"merges": content["model"]["merges"][:-1]}
    lower = fingerprint({"normalizer": {"type": "Lowercase"}})
    assert len({bpe.fingerprint, ByteTokenizer().fingerprint, fingerprint({"model": other}), lower}) == 4


def test_a_tokenizer_is_pickled_whole(tmp_path, bpe):
    for tokenizer in (bpe, ByteTokenizer()):
        again = pickle.loads(pickle.dumps(tokenizer))
        (before,), (after,) = tokenizer.encode_batch([random_text(2, 50)]), again.encode_batch([random_text(2, 50)])
        assert np.array_equal(before, after)
        assert (again.name, again.vocab_size, again.fingerprint) == (tokenizer.name, tokenizer.vocab_size, tokenizer.fingerprint)


def test_end_tokens(bpe):
    assert find_end_id(bpe, None) is None
    assert find_end_id(bpe, END) == bpe.token_id(END) == 0
    with pytest.raises(DataError, match=r"end_token=<eos> is not a token of .*tokenizer\.json: use <\|endoftext\|>, or none"):
        find_end_id(bpe, "<eos>")
    with pytest.raises(DataError, match=r"end_token=<eos> is not a token of bytes: use one of its tokens, or none"):
        find_end_id(ByteTokenizer(), "<eos>")


@pytest.mark.parametrize("kind", FAMILIES)
def test_pieces_of_a_long_text_have_its_ids(tmp_path, kind):
    made = library(kind)
    made.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    for seed in range(3):
        text = random_text(seed, 2000)
        pieces = split_text(loaded, text, size=50)
        assert "".join(pieces) == text
        assert (len(pieces) > 100) == (kind != "prefix")
        whole = made.encode(text, add_special_tokens=False).ids
        assert [number for ids in loaded.encode_batch(pieces) for number in ids] == whole
        careless = [made.encode(text[at : at + 50], add_special_tokens=False).ids for at in range(0, len(text), 50)]
        assert [number for ids in careless for number in ids] != whole


def test_a_text_without_a_place_to_cut_stays_whole():
    assert split_text(ByteTokenizer(), "1 2 3 " * 1000, size=100) == ["1 2 3 " * 1000]
    assert split_text(ByteTokenizer(), "a b", size=100) == ["a b"]
    assert split_text(ByteTokenizer(), "") == [""]


def test_training(tmp_path):
    texts = [random_text(seed, 500) for seed in range(4)]
    first = train_bpe(iter(texts), 300, tmp_path / "a.json", [END, "<pad>"])
    train_bpe(texts, 300, tmp_path / "b.json", [END, "<pad>"])
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert first.vocab_size == 300 and (first.token_id(END), first.token_id("<pad>")) == (0, 1)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "a.json"))
    assert made.encode(texts[0]).ids == first.encode_batch(texts)[0].tolist()
    assert len(made.encode(texts[0]).ids) < 0.8 * len(texts[0].encode())
    every_byte = train_bpe(["x"], 256, tmp_path / "c.json")
    assert every_byte.vocab_size == 256
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json", "c.json"]
    with pytest.raises(DataError, match="a vocabulary of 257 is below 256 bytes and 2 special tokens: use 258 or more"):
        train_bpe(texts, 257, tmp_path / "d.json", [END, "<pad>"])


BROKEN = [
    (None, "cannot be read"),
    (b"{", "is not valid JSON"),
    (b"\xff\xfe\x00", "is not valid JSON"),
    (b"[]", "has no entry `model`"),
    (b'{"vocab": {}}', "has no entry `model`"),
    (b'{"model": {"type": "BPE", "vocab": 3, "merges": []}}', "is refused by the library tokenizers"),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_a_broken_file_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        load_tokenizer(str(path))
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"is a folder: give bytes or the file, .*tokenizer\.json"):
        load_tokenizer(str(tmp_path))
