#!/usr/bin/env python3
"""Tokenise text once into a store that a run reads: `python scripts/prepare_data.py wiki.jsonl books/ --out data/corpus --train_bpe 8192`.

Inputs are .txt (one document a file), .jsonl or .json (one record a line), all also as .gz, .parquet, or folders of them. The store is
OUT.bin with OUT.idx in the format of Megatron-LM, and OUT.json, which says how it was made.
"""

import argparse
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from jaxmeg.data.prepare import Prepared, find_all, prepare
from jaxmeg.data.sources import Dropped, read_file
from jaxmeg.data.store import SUFFIXES, DataError
from jaxmeg.data.tokenizer import Tokenizer, find_end_id, load_tokenizer, train_bpe
from jaxmeg.wording import printable, shown

MOST_WORKERS = 1024
console = Console(highlight=False)
if not console.is_terminal:
    console.width = 1000  # a file has no margin to wrap at


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        self.exit(2, f"error: {message}\n")


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that nothing half-written is left
    try:
        tokenizer, prepared = run(args)
    except DataError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or args.out}: {error.strerror}: no store was written", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: no store was written", file=sys.stderr)
        return 130
    print_summary(args, tokenizer, prepared)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(description="Tokenise text once into a store that a run reads.")
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=".txt, .jsonl, .json (also .gz), .parquet, or a folder of them")
    parser.add_argument("--out", required=True, help="name of the store, without ending: data/corpus gives data/corpus.bin and .idx")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, or the path of a tokenizer.json (default: bytes)")
    parser.add_argument("--train_bpe", type=int, metavar="VOCAB_SIZE", help="train a byte-level BPE on the inputs: OUT.tokenizer.json")
    parser.add_argument("--end_token", help="token put after every document, such as <|endoftext|> (default: none)")
    parser.add_argument("--text_key", default="text", help="field of a JSON or Parquet record that holds the text (default: text)")
    parser.add_argument("--workers", type=int, help="processes that tokenise (default: one a core)")
    parser.add_argument("--overwrite", action="store_true", help="replace a store of that name")
    args = parser.parse_intermixed_args(argv)  # inputs may stand anywhere
    args.out = args.out.removesuffix(".bin").removesuffix(".idx")
    if args.workers is not None and not 1 <= args.workers <= MOST_WORKERS:
        use = "1 or more" if args.workers < 1 else f"{MOST_WORKERS:,} or less"
        parser.error(f"--workers={shown(args.workers)} is no number of processes: use {use}")
    if args.train_bpe is not None and args.tokenizer != "bytes":
        parser.error(f"--train_bpe={args.train_bpe} and --tokenizer={args.tokenizer} are two tokenizers: give one of them")
    if not Path(args.out).name or Path(args.out).is_dir():
        parser.error(f"--out={args.out} is a folder: name the store in it, such as {Path(args.out) / 'corpus'}")
    return args


def run(args: argparse.Namespace) -> tuple[Tokenizer, Prepared]:
    """Looks at everything that can be wrong before anything is read."""
    files = find_all(args.inputs).read
    check_out(args, files)
    if args.train_bpe is None:
        tokenizer = load_tokenizer(args.tokenizer)
        find_end_id(tokenizer, args.end_token)
        return tokenizer, tokenise(args, tokenizer)
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", suffix=".partial", dir=out.parent) as folder:
        unfinished = Path(folder) / "tokenizer.json"
        console.print(f"training a byte-level BPE of {args.train_bpe:,} tokens on {len(files):,} files", soft_wrap=True)
        texts = (record for file in files for record in read_file(file, args.text_key) if not isinstance(record, Dropped))
        special = [args.end_token] if args.end_token else []
        tokenizer = train_bpe(texts, args.train_bpe, unfinished, special, show_progress=console.is_terminal)
        tokenizer.name = trained_path(args)
        prepared = tokenise(args, tokenizer)
        os.replace(unfinished, tokenizer.name)
    return tokenizer, prepared


def trained_path(args: argparse.Namespace) -> str:
    return f"{args.out}.tokenizer.json"


def check_out(args: argparse.Namespace, inputs: Sequence[Path]) -> None:
    """DataError if a file to write is there already, or is an input."""
    written = [f"{args.out}{suffix}" for suffix in SUFFIXES] + ([trained_path(args)] if args.train_bpe else [])
    there = [path for path in written if Path(path).exists()]
    for path in there:
        if Path(path).resolve() in {file.resolve() for file in inputs}:
            raise DataError(f"--out={args.out} would write over the input {path}: give another name")
    if there and not args.overwrite:
        raise DataError(f"{there[0]} is there already: give another --out, or --overwrite to replace it")


def tokenise(args: argparse.Namespace, tokenizer: Tokenizer) -> Prepared:
    with reporting() as progress:
        return prepare(args.inputs, args.out, tokenizer, args.text_key, args.end_token, args.workers, progress)


@contextmanager
def reporting() -> Iterator[Callable[[int, int, int], None]]:
    """A bar on a terminal, a line every tenth of the input elsewhere."""
    if console.is_terminal:
        tokens_so_far = TextColumn("{task.fields[tokens]:,} tokens")
        columns = (TextColumn("tokenising"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), tokens_so_far, TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("tokenising", total=None, tokens=0)
            yield lambda done, total, tokens: bar.update(task, completed=done, total=total, tokens=tokens)
    else:
        tenths = 0

        def line(done: int, total: int, tokens: int) -> None:
            nonlocal tenths
            if 10 * done // max(total, 1) > tenths:
                tenths = 10 * done // total
                console.print(f"tokenised {done / 1e6:,.1f} of {total / 1e6:,.1f} MB: {tokens:,} tokens", soft_wrap=True)

        yield line


def print_summary(args: argparse.Namespace, tokenizer: Tokenizer, prepared: Prepared) -> None:
    """What went in, what came out, how fast, and the command that trains on it."""
    counts, files, seconds = prepared.counts, prepared.files, prepared.seconds
    left_out = f" ({len(files.left_out):,} of other kinds left out, first {printable(str(files.left_out[0]))})" if files.left_out else ""
    rows = [("files", f"{len(files.read):,}{left_out}"), ("records read", f"{counts.read:,}"), ("documents kept", f"{counts.kept:,}")]
    for reason, number in counts.dropped.items():
        first = f", first {printable(counts.first[reason])}" if reason in counts.first else ""
        rows.append((f"dropped: {reason}", f"{number:,}{first}"))
    rows += [
        ("tokens", f"{prepared.tokens:,} of {tokenizer.vocab_size:,} ids, tokenizer {tokenizer.name}"),
        ("bytes per token", f"{prepared.text_bytes / prepared.tokens:.3f}"),
        ("speed", f"{prepared.text_bytes / 1e6 / seconds:,.1f} MB/s, {prepared.tokens / seconds:,.0f} tokens/s, {seconds:,.1f} s"),
        ("store", ", ".join(f"{args.out}{suffix}" for suffix in SUFFIXES)),
    ]
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    command = ["python", "scripts/train.py", "--data.train", args.out]
    if tokenizer.name != "bytes":
        command += ["--data.tokenizer", tokenizer.name, "--model.vocab_size", str(tokenizer.vocab_size)]
    console.print("train on it: " + shlex.join(command), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
