"""Draws the timeline of a pipeline schedule in the terminal and, with --out, as a figure.

python scripts/schedule.py --schedule interleaved --pp 4 --chunks 2 --microbatches 8 --out timeline.svg
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from jaxmeg.pipeline.schedules import NAMES, make_table
from jaxmeg.pipeline.timeline import FIGURES, print_timeline, save_timeline


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        self.exit(2, f"error: {message}\n")


def main(argv: list[str]) -> None:
    parser = Parser(description="Draws the timeline of a pipeline schedule.")
    parser.add_argument("--schedule", default="1f1b", help=f"one of {', '.join(NAMES)} (default: 1f1b)")
    parser.add_argument("--pp", type=int, required=True, help="pipeline stages")
    parser.add_argument("--microbatches", type=int, required=True, help="microbatches per update")
    parser.add_argument("--chunks", type=int, default=1, help="model chunks a stage (default: 1)")
    parser.add_argument("--forward_cost", type=float, default=1.0, help="time of a stage's forward (default: 1)")
    parser.add_argument("--backward_cost", type=float, default=2.0, help="time of a stage's backward (default: 2)")
    parser.add_argument("--out", type=Path, help=f"write a figure ({' or '.join(FIGURES)}) too")
    args = parser.parse_args(argv)
    costs = (args.forward_cost, args.backward_cost)
    if min(costs) <= 0:
        parser.error(f"costs of {costs[0]:g} and {costs[1]:g}: both must be positive")
    try:
        table = make_table(args.schedule, args.pp, args.chunks, args.microbatches)
        if args.out:
            save_timeline(table, args.out, *costs)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print_timeline(table, Console(highlight=False), *costs)
    if args.out:
        print(f"\nwrote {args.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
