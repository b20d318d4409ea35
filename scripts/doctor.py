#!/usr/bin/env python3
"""Is this machine ready for this run? `python scripts/doctor.py`, with any options of scripts/train.py. docs/troubleshooting.md

One line a check: ok, warn, FAIL or skipped, what was found, and the fix. Exit code 1 if a check failed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        usage="python scripts/doctor.py [--verbose] [--json FILE] [any option of scripts/train.py]", allow_abbrev=False,
        description="Check packages, machine, devices, links and config in the order in which to look for a fault.")
    parser.add_argument("--verbose", action="store_true", help="show the details of every check")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings there too")
    args, words = parser.parse_known_args(argv)
    if sys.version_info < (3, 11):  # noqa: UP036 (an older one gets here)
        print(f"FAIL    python         this is Python {sys.version_info[0]}.{sys.version_info[1]}: use Python 3.11 or newer")
        return 1
    try:
        from jaxmeg.doctor.examine import run
    except ImportError as error:
        print(f'FAIL    packages       {error}: run pip install -e . (or ".[cuda13]" on NVIDIA GPUs) in the folder of jaxmeg')
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the child process ends too
    try:
        return run(words, args.verbose, args.json)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
