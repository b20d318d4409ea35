"""From text to token ids and back: bytes, or a tokenizer.json read by the library `tokenizers`; and training one.

Nothing is added to a text and nothing is cut off: begin and end tokens, truncation and padding that a tokenizer.json asks for are not
applied, because one option, `data.end_token`, says what stands after a document. A special token that is written out in a text is read as
that token, as `tokenizers` does everywhere. Must not know files of documents or stores.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxmeg.data.store import LARGEST_ID, DataError
from jaxmeg.wording import is_unicode, shown

NOT_APPLIED = ("truncation", "padding", "post_processor", "version")
COMMON_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
PIECE = 1 << 18  # characters: a text longer than two of these is cut before it is encoded
CONTEXT = 1024  # characters on both sides of a cut that are compared
TRIES = 8
BREAK = re.compile(r"[^\W\d_](?=\s)")


class Tokenizer(Protocol):
    """Text to ids and back. Picklable, so that workers can have it."""

    @property
    def name(self) -> str:
        """As given: bytes, or a path."""
        ...

    @property
    def vocab_size(self) -> int:
        """All ids are below it."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hash of what it does: two that are equal give the same ids."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, int32 [tokens]."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens written out; bytes that are no UTF-8 become U+FFFD."""
        ...

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The text of each id alone, for a preview."""
        ...

    def token_id(self, token: str) -> int | None:
        """The id of one token by its text; None if there is none."""
        ...


class ByteTokenizer:
    """Every byte of the UTF-8 text is a token."""

    name = "bytes"
    vocab_size = 256
    fingerprint = "bytes"

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        # 255 occurs in no UTF-8 text: it stands for ids that are no bytes.
        return bytes(min(int(number), 255) for number in ids).decode(errors="replace")

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [chr(number) if number < 128 else f"<0x{number:02X}>" for number in map(int, ids)]

    def token_id(self, token: str) -> int | None:
        encoded = token.encode(errors="surrogatepass")
        return encoded[0] if len(encoded) == 1 else None


class FileTokenizer:
    """A tokenizer.json."""

    def __init__(self, name: str, content: dict[str, Any]):
        self.name = name
        self._library = _import_tokenizers(name).Tokenizer.from_str(json.dumps(content))
        self._library.no_truncation()
        self._library.no_padding()
        self.vocab_size: int = max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        applied = {key: value for key, value in content.items() if key not in NOT_APPLIED}
        self.fingerprint = hashlib.sha256(json.dumps(applied, sort_keys=True).encode()).hexdigest()[:16]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        try:
            encoded = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        except BaseException as error:
            raise _refused(self.name, error) from error
        return [np.array(one.ids, np.int32) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return self._library.decode([int(number) for number in ids], skip_special_tokens=False)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return self._library.decode_batch([[int(number)] for number in ids], skip_special_tokens=False)

    def token_id(self, token: str) -> int | None:
        return self._library.token_to_id(token) if is_unicode(token) else None


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer "bytes", or the one of a tokenizer.json. DataError if there is none."""
    if name == "bytes":
        return ByteTokenizer()
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        raise DataError(f"tokenizer {name} is a folder: give bytes or the file, {path / 'tokenizer.json'}")
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe might never end
        raise DataError(f"tokenizer {name} is no file: give bytes or the path of a tokenizer.json")
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"tokenizer {name} cannot be read ({error.strerror}): give bytes or the path of a tokenizer.json") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"tokenizer {name} is not valid JSON ({error}): give bytes or the path of a tokenizer.json") from error
    if not isinstance(content, dict) or "model" not in content:
        raise DataError(f"tokenizer {name} has no entry `model`: give bytes or a tokenizer.json as the library `tokenizers` writes it")
    try:
        tokenizer = FileTokenizer(name, content)
    except BaseException as error:
        raise _refused(name, error) from error
    if tokenizer.vocab_size > LARGEST_ID + 1:
        raise DataError(f"tokenizer {name} has the id {tokenizer.vocab_size - 1}, and ids end at {LARGEST_ID}: give a valid tokenizer.json")
    return tokenizer


def _refused(name: str, error: BaseException) -> BaseException:
    """What the library `tokenizers` raises, as DataError: plain Exception, or PanicException, which is none; all else as it is."""
    if isinstance(error, DataError) or not (isinstance(error, Exception) or type(error).__name__ == "PanicException"):
        return error
    reason = shown(" ".join(str(error).split()))
    return DataError(f"tokenizer {name} is refused by the library tokenizers ({reason}): give a valid tokenizer.json")


def find_end_id(tokenizer: Tokenizer, end_token: str | None) -> int | None:
    """The id of the token that ends a document; None for none. DataError if the tokenizer does not have it."""
    if end_token is None:
        return None
    found = tokenizer.token_id(end_token)
    if found is None:
        known = next((token for token in COMMON_ENDS if tokenizer.token_id(token) is not None), None)
        fix = f"use {known}" if known else "use one of its tokens"
        raise DataError(f"end_token={end_token} is not a token of {tokenizer.name}: {fix}, or none")
    return found


def split_text(tokenizer: Tokenizer, text: str, size: int = PIECE) -> list[str]:
    """Cut a long text so that the ids of the pieces, one after the other, are the ids of the text.

    Memory and time of encoding are then those of pieces of about `size` characters. A cut lies between a letter and white space, where
    encoding the text around it in one gives what encoding both sides gives; a text without such a place stays whole.
    """
    pieces, start = [], 0
    while len(text) - start > 2 * size:
        candidates = (match.end() for match in islice(BREAK.finditer(text, start + size), TRIES))
        cut = next((place for place in candidates if _is_cut(tokenizer, text, place)), None)
        if cut is None:
            break
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]


def train_bpe(
    texts: Iterable[str], vocab_size: int, out_path: str | Path, special_tokens: Sequence[str] = (), show_progress: bool = False
) -> FileTokenizer:
    """Train a byte-level BPE, save it as a tokenizer.json and return it; a small corpus can give fewer tokens than asked for.

    Texts are read one after the other and not kept. show_progress draws the library's bars on a terminal.
    """
    smallest = 256 + len(special_tokens)
    if vocab_size < smallest:
        raise DataError(f"a vocabulary of {vocab_size} is below 256 bytes and {len(special_tokens)} special tokens: use {smallest} or more")
    if vocab_size > LARGEST_ID:
        raise DataError(f"a vocabulary of {shown(vocab_size)} has more ids than there are (0 to {LARGEST_ID}): use {LARGEST_ID} or less")
    library = _import_tokenizers(str(out_path))
    byte_level = library.pre_tokenizers.ByteLevel
    trained = library.Tokenizer(library.models.BPE())
    trained.pre_tokenizer = byte_level(add_prefix_space=False)
    trained.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=show_progress,
    )
    trained.train_from_iterator(_blocks(texts), trainer)
    content = trained.to_str(pretty=True)
    part = Path(f"{out_path}.{os.getpid()}.partial")
    try:
        part.write_text(content, encoding="utf-8")
        os.replace(part, out_path)
    finally:
        part.unlink(missing_ok=True)
    return FileTokenizer(str(out_path), json.loads(content))


def _is_cut(tokenizer: Tokenizer, text: str, place: int) -> bool:
    left, right = text[max(place - CONTEXT, 0) : place], text[place : place + CONTEXT]
    both, first, second = tokenizer.encode_batch([left + right, left, right])
    return np.array_equal(both, np.concatenate([first, second]))


def _blocks(texts: Iterable[str]) -> Iterator[str]:
    """The texts in blocks of whole lines where that bounds their size, so that training reads them on all cores."""
    for text in texts:
        start = 0
        while start < len(text):
            end = text.find("\n", start + PIECE) + 1 or len(text)
            yield text[start:end]
            start = end


def _import_tokenizers(needed_for: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(f"{needed_for} needs the library tokenizers: pip install tokenizers") from error
    return tokenizers
