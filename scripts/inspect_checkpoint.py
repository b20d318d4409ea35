#!/usr/bin/env python3
"""What the checkpoints of a run hold: `python scripts/inspect_checkpoint.py runs/demo`. Reads manifests only, needs no device.

Lists the steps, then of one step every leaf with shape, dtype and bytes, and how the run's config differs from the
defaults or, with --against, from another run's.
"""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from jaxmeg.checkpoint.manifest import CheckpointError, Manifest, complete_steps, find_step, left_over, read_manifest, step_folder
from jaxmeg.checkpoint.resume import config_changes
from jaxmeg.config import Config


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        self.exit(2, f"error: {message}\n")


def main(argv: list[str]) -> None:
    parser = Parser(description="What the checkpoints of a run hold.")
    parser.add_argument("path", type=Path, help="a run folder, or one of its step folders")
    parser.add_argument("--against", type=Path, help="another run or step folder whose config is compared")
    args = parser.parse_args(argv)
    try:
        folder = find_step(args.path)
        steps(folder.parent.parent)
        shown = read_manifest(folder)
        leaves(shown)
        against = read_manifest(find_step(args.against)).config if args.against else asdict(Config())
    except CheckpointError as error:
        parser.error(str(error))
    print(f"\nconfig, {args.against or 'default'} -> {folder}")
    for change in config_changes(against, shown.config):
        print(f"  {change}")


def steps(run: Path) -> None:
    """One line a checkpoint, and what is left over from saves that did not end."""
    print(f"{'step':>10} {'rows':>14} {'validation':>10} {'MB':>12}  saved from")
    for step in complete_steps(run):
        found = read_manifest(step_folder(run, step))
        loss = "-" if found.validation_loss is None else f"{found.validation_loss:.4f}"
        print(f"{found.step:>10,} {found.rows:>14,} {loss:>10} {found.num_bytes / 1e6:>12,.1f}  {layout(found)}")
    for path in left_over(run):
        print(f"  not complete: {path}")


def layout(manifest: Manifest) -> str:
    values = manifest.layout
    mesh = ",".join(f"{axis}={size}" for axis, size in values["mesh"].items() if size > 1) or "one device"
    schedule = f", {values['schedule']} x {values['chunks']}" if values["schedule"] else ""
    return f"{mesh}, zero {values['zero']}{schedule}, {manifest.compute}"


def leaves(manifest: Manifest) -> None:
    print(f"\nleaves of step {manifest.step}")
    width = max(map(len, manifest.leaves))
    for path, leaf in manifest.leaves.items():
        print(f"  {path:<{width}}  {leaf!s:<36} {leaf.num_bytes:>16,}")
    print(f"  {'all':<{width}}  {'':<36} {manifest.num_bytes:>16,}")


if __name__ == "__main__":
    main(sys.argv[1:])
