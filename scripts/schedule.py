"""Draws the timeline of a pipeline schedule in the terminal and, with --out, as a figure; --write saves it as a file of ticks.

python scripts/schedule.py --schedule interleaved --pp 4 --chunks 2 --microbatches 8 --out timeline.svg
python scripts/schedule.py --schedule 1f1b --pp 4 --microbatches 8 --write my.csv    # a start for a schedule of your own
python scripts/schedule.py --schedule my.csv
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from jaxmeg.pipeline.notation import ScheduleFileError
from jaxmeg.pipeline.schedules import NAMES, Table, make_table
from jaxmeg.pipeline.timeline import FIGURES, print_timeline, save_timeline
from jaxmeg.pipeline.user import Cost, is_schedule_file, read_schedule, user_table, write_schedule
from jaxmeg.wording import shown

MOST_CELLS = 100_000  # forwards of a table


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line for each mistake and exit code 2."""
        self.exit(2, "".join(f"error: {line}\n" for line in message.splitlines()))


def main(argv: list[str]) -> None:
    parser = Parser(description="Draws the timeline of a pipeline schedule.")
    parser.add_argument("--schedule", default="1f1b",
                        help=f"one of {', '.join(NAMES)}, or a file of your own, .csv or .txt (default: 1f1b)")
    parser.add_argument("--pp", type=int, help="pipeline stages")
    parser.add_argument("--microbatches", type=int, help="microbatches per update")
    parser.add_argument("--chunks", type=int, help="model chunks a stage (default: 1)")
    parser.add_argument("--forward_cost", type=float, default=1.0, help="time of a stage's forward (default: 1)")
    parser.add_argument("--backward_cost", type=float, default=2.0, help="time of a stage's backward (default: 2)")
    parser.add_argument("--out", type=Path, help=f"write a figure ({' or '.join(FIGURES)}) too")
    parser.add_argument("--write", type=Path, help="write the schedule as rows of ticks (.csv) too")
    args = parser.parse_args(argv)
    costs = (args.forward_cost, args.backward_cost)
    if not all(1e-9 <= cost <= 1e9 for cost in costs):
        parser.error(f"costs of {costs[0]:g} and {costs[1]:g}: both must be positive, from 1e-9 to 1e9")
    try:
        table, cost = make(args)
        if args.out:
            save_timeline(table, args.out, *costs)
        if args.write:
            write(table, args.write)
    except ScheduleFileError as error:
        parser.error("\n".join(f"{args.schedule}: {problem}" for problem in error.problems))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print_timeline(table, Console(highlight=False), *costs)
    if cost:
        print()
        for label, line in cost.lines().items():
            print(f"{label:<8}{line}")
    for path in filter(None, (args.out, args.write)):
        print(f"\nwrote {path}")


def make(args: argparse.Namespace) -> tuple[Table, Cost | None]:
    """The table, and for a file what it costs. Raises ValueError."""
    sizes = {"pp": args.pp, "microbatches": args.microbatches, "chunks": args.chunks}
    if not is_schedule_file(args.schedule):
        if missing := [f"--{name}" for name in ("pp", "microbatches") if sizes[name] is None]:
            raise ValueError(f"{' and '.join(missing)} must be given with --schedule {args.schedule}")
        cells = args.pp * (args.chunks or 1) * args.microbatches
        if abs(cells) > MOST_CELLS:
            raise ValueError(f"--pp x --chunks x --microbatches is {shown(cells)}: use at most {MOST_CELLS:,}")
        return make_table(args.schedule, args.pp, args.chunks or 1, args.microbatches), None
    user = read_schedule(args.schedule)
    has = {"pp": user.num_stages, "microbatches": user.num_microbatches, "chunks": user.num_chunks}
    if wrong := [name for name, size in sizes.items() if size not in (None, has[name])]:
        raise ValueError("\n".join(f"--{name} {sizes[name]} does not fit {args.schedule}, which has {has[name]}: leave it out"
                                   for name in wrong))
    return user_table(user)


def write(table: Table, path: Path) -> None:
    """Raises ValueError for a table or a name that can't be read back, OSError."""
    if not table.backward_slots:
        raise ValueError(f"--write={path}: schedule {table.name} has no backwards, so it can't be a schedule of training: use another")
    if not is_schedule_file(str(path)):
        raise ValueError(f"--write={path} would not be read as a schedule: use a name that ends in .csv")
    write_schedule(table, path)


if __name__ == "__main__":
    main(sys.argv[1:])
