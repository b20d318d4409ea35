#!/usr/bin/env python3
"""Write our config from a DeepSpeed JSON, Megatron-LM arguments or a LLaMA-Factory YAML, and say what has no counterpart.

python scripts/migrate.py ds_config.json --devices 8 --out configs/mine.yaml
python scripts/migrate.py --devices 8 -- --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4
"""

import argparse
import shlex
import sys
from pathlib import Path
from typing import NoReturn

from jaxmeg.cli import fail
from jaxmeg.files import read_text
from jaxmeg.migrate.core import SourceError
from jaxmeg.migrate.report import HEADING, to_lines, to_yaml, train_command, warnings
from jaxmeg.migrate.run import FORMATS, check, migrate, read_settings


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        self.exit(2, f"error: {message}\n")


def main(argv: list[str]) -> int:
    own, arguments = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="the file to read; or give Megatron-LM arguments after --")
    parser.add_argument("--from", dest="format", choices=FORMATS, help="what the file is (default: seen from its keys)")
    parser.add_argument("--devices", type=int, help="devices of the run (default: what the source names, or the fewest it needs)")
    parser.add_argument("--set", dest="settings", action="append", default=[], metavar="KEY=VALUE",
                        help="a value of ours, such as train.steps=1000; wins over the source")
    parser.add_argument("--out", type=Path, help="the config to write (default: printed)")
    args = parser.parse_args(own)
    if (args.file is None) == (not arguments):
        parser.error("give a file, or Megatron-LM arguments after --")
    if args.devices is not None and args.devices < 1:
        parser.error(f"--devices {args.devices}: use 1 or more")
    source = str(args.file) if args.file else "the command line"
    try:
        text = read_text(args.file) if args.file else shlex.join(arguments)
        _check_target(args.out)
        out = migrate(text, source, args.devices, "megatron" if arguments else args.format, read_settings(args.settings))
    except SourceError as error:
        fail([str(error)])
    except OSError as error:
        fail([f"{error.filename} cannot be read ({error.strerror})"])
    except UnicodeDecodeError:
        fail([f"{source} is not text"])

    print("\n".join(to_lines(out, source)), flush=True)
    errors, missing = check(out)
    for line in (*warnings(out), *missing):
        print(f"warning: {line}", file=sys.stderr)
    if errors:
        fail([*errors, "no config is written: change the source, --devices, or a value with --set"])
    config = to_yaml(out, source, shlex.join(["python", "scripts/migrate.py", *argv]), str(args.out or "FILE"))
    if args.out is None:
        print(f"\n{config}", end="")
        return 0
    try:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(config, encoding="utf-8")
    except OSError as error:
        fail([f"--out {args.out} cannot be written ({error.strerror}): give another name"])
    print(f"\nwrote {args.out}; train with\n  {train_command(str(args.out))}")
    return 0


def _check_target(path: Path | None) -> None:
    """Only a file that was written here is written again. Raises SourceError."""
    if path is not None and path.exists() and not path.read_bytes().startswith(HEADING.encode()):
        raise SourceError(f"--out {path} exists and was not written here: give another name")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
