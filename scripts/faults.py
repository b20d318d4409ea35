#!/usr/bin/env python3
"""Try every fault on real runs and write down what became of them: `python scripts/faults.py --out docs/reliability.md`.

Takes about 15 minutes on two cores. The table is in jaxmeg/faults/. Exit code 1 where something is not as it should be.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from jaxmeg.faults import data, disk, hosts, kill, ranks
from jaxmeg.faults.page import render
from jaxmeg.faults.start import EVERY, ROOT, STEPS, Bench
from jaxmeg.faults.table import try_fault

FAULTS = {fault.name: fault for module in (kill, disk, data, ranks, hosts) for fault in module.FAULTS}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Try faults on real training runs.")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=FAULTS, help=f"these faults alone: {', '.join(FAULTS)}")
    parser.add_argument("--times", type=int, help="try each fault so often")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    parser.add_argument("--out", type=Path, help="Markdown page to write, with a .json beside it; with --only its other rows stay")
    args = parser.parse_args(argv)
    rows, started_at = {}, commit()  # the page that is written below is a changed file too
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        bench = Bench(Path(folder))
        for name in args.only or FAULTS:
            row = try_fault(FAULTS[name], bench, args.times, args.seed, started_at)
            rows[name] = row.to_json()
            tried = row.not_tried or f"tried {row.tried}, exit {row.codes}, lost {row.lost}, the same {row.same[0]} of {row.same[1]}"
            print("\n    ".join([f"{name:<18} {tried}", *row.said, *(f"NOT AS IT SHOULD BE: {text}" for text in row.wrong)]), flush=True)
            if args.out:
                write(args.out, rows, args.seed)
    return int(any(row["wrong"] for row in rows.values()))


def write(out: Path, rows: dict[str, dict[str, Any]], seed: int) -> None:
    """The page and its JSON. Rows that are there already and were not tried again stay; all are in the order of the table."""
    file = out.with_suffix(".json")
    old = {row["name"]: row for row in json.loads(file.read_text())["rows"]} if file.exists() else {}
    page = {"head": head(seed), "rows": [(old | rows)[name] for name in FAULTS if name in old | rows]}
    file.write_text(json.dumps(page, indent=1) + "\n")
    out.write_text(render(page))


def head(seed: int) -> dict[str, Any]:
    packages = [f"{name} {version(name)}" for name in ("jax", "orbax-checkpoint", "numpy")]
    return {"updates": STEPS, "every": EVERY, "command": f"python scripts/faults.py --seed {seed}", "cores": os.cpu_count(),
            "date": datetime.now(UTC).date().isoformat(), "system": platform.system(),
            "versions": ", ".join([f"Python {platform.python_version()}", *packages])}


def commit() -> str:
    """Of this checkout; -dirty where files have changed since."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
