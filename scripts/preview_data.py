"""Shows rows as the model gets them, in colour: tokens, documents, what is trained. Takes every option of scripts/train.py.

python scripts/preview_data.py --data notes.jsonl --data.packing fit --seq_len 256 --rows 3 --from 0
"""

import argparse
import sys
from typing import NoReturn

import numpy as np
from rich.console import Console
from rich.text import Text

from jaxmeg.cli import fail, parse
from jaxmeg.config import Config
from jaxmeg.data.dataset import Dataset, open_data
from jaxmeg.data.report import print_reports
from jaxmeg.data.store import DataError
from jaxmeg.data.tokenizer import Tokenizer, load_tokenizer
from jaxmeg.validate.value_rules import choices, files, ranges

# Two backgrounds a document, in turn from token to token; of the 256 colours that nearly all terminals have.
SHADES = (("on #000087", "on #005fd7"), ("on #005f00", "on #008700"), ("on #5f005f", "on #8700af"), ("on #5f0000", "on #af0000"))
TEXT, UNTRAINED, MARK, PADDING = "#ffffff", "#9e9e9e italic", "bold #000000 on #ffd75f", "#9e9e9e"
SYMBOLS = {"\n": "⏎", "\t": "⇥", "\r": "␍"}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        self.exit(2, f"error: {message}\n")


def main(argv: list[str]) -> None:
    parser = Parser(
        usage="python scripts/preview_data.py [--rows N] [--from N] [any option of scripts/train.py]", allow_abbrev=False,
        description="Shows rows as the model gets them. All other options: python scripts/train.py --help")
    parser.add_argument("--rows", type=int, default=3, metavar="N", help="rows to show (default: 3)")
    parser.add_argument("--from", type=int, default=0, metavar="N", dest="first", help="first of them in the training stream (default: 0)")
    args, rest = parser.parse_known_args(argv)
    if args.rows < 1 or args.first < 0:
        parser.error(f"--rows {args.rows} --from {args.first} is out of range: use rows 1 or more, from row 0 or a later one")
    config = parse(rest)
    problems = [line for rule in (ranges, choices, files) for line in rule(config) if line.startswith("data.")]
    if config.data.source is not None:
        problems.append(f"data.source={config.data.source} has rows of its own making: leave source out to look at rows of tokens")
    if problems:
        fail(problems)
    try:
        preview(config, args.first, args.rows, Console(highlight=False))
    except DataError as error:
        fail([str(error)])


def preview(config: Config, first: int, num_rows: int, console: Console) -> None:
    """Print the data's report, then the rows."""
    training, validation = open_data(config.data, config.train.seed)
    tokenizer = load_tokenizer(config.data.tokenizer)
    print_reports(console, *(dataset.report for dataset in (training, validation) if dataset is not None))
    console.print()
    for number in range(first, first + num_rows):
        for text in row_text(training, number, tokenizer):
            console.print(text, soft_wrap=not console.is_terminal)
        console.print()
    console.print(legend(console.is_terminal, training.separate), soft_wrap=True)


def row_text(dataset: Dataset, number: int, tokenizer: Tokenizer) -> tuple[Text, Text]:
    """(one line on what the row holds, its tokens)."""
    [(name, epoch, row)] = dataset.origin(np.array([number]))
    rows, spans = dataset.rows(np.array([number])), dataset.spans(number)
    inputs, labels, mask = (array[0] for array in (rows.inputs, rows.labels, rows.mask))
    pieces = readable(inputs, tokenizer)
    text, begin = Text(overflow="fold"), 0
    for index, (document, start, length) in enumerate(spans):
        restart = ", position 0" if dataset.separate or begin == 0 else ""
        text.append(f" document {document}{f' from token {start}' if start else ''}{restart} ", MARK)
        for at in range(begin, begin + length):
            text.append(pieces[at], f"{TEXT if mask[at] else UNTRAINED} {SHADES[index % len(SHADES)][at % 2]}")
        begin += length
    if mask[-1]:
        text.append(f" -> {readable(labels[-1:], tokenizer)[0]}", PADDING)
    if begin < dataset.seq_len:
        text.append(f" {dataset.seq_len - begin} x padding", PADDING)
    total = f"{begin} tokens, {mask.sum()} trained, {len(spans)} {'document' if len(spans) == 1 else 'documents'}"
    return Text(f"row {number}: {name}, epoch {epoch}, row {row} of it: {total}", "bold"), text


def readable(ids: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    """The text of each id, with signs for what does not print."""
    return ["".join(SYMBOLS.get(char) or (char if char.isprintable() else f"\\x{ord(char):02x}") for char in piece)
            for piece in tokenizer.pieces(ids.tolist())]


def legend(colour: bool, separate: bool) -> Text:
    """What the colours and marks stand for."""
    tokens = [("to", f"{TEXT} {SHADES[0][0]}"), ("ken", f"{TEXT} {SHADES[0][1]}"), (" one shade a token, one colour a document; ", ""),
              ("token", f"{UNTRAINED} {SHADES[0][0]}"), (" nothing is predicted from it; ", "")]
    marks = [(" document N ", MARK), (f" one begins or goes on{', unseen by the others' if separate else ''}; ", ""),
             ("-> x", PADDING), (" the label of the last token; ⏎ newline, ⇥ tab", "")]
    return Text.assemble(*(tokens if colour else [("colours, and which tokens are trained: only on a terminal; ", "")]), *marks)


if __name__ == "__main__":
    main(sys.argv[1:])
