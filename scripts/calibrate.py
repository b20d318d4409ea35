"""Measure what the planner calculates with, on this machine, for a model: matmuls, attention, memory, links. About a minute.

python scripts/calibrate.py --model llama3.1-8b --seq_len 8192 --global_batch 8 --rates rates.yaml
python scripts/plan.py --gpus 8xH200 --model llama3.1-8b --seq 8192 --global_batch 64 --rates rates.yaml
"""

import argparse
import sys
from pathlib import Path

import yaml

from jaxmeg.cli import fail, parse, start


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False,
                                     description="Measures the planner's rates. All options of scripts/train.py besides.")
    parser.add_argument("--rates", type=Path, default=Path("rates.yaml"), metavar="FILE", help="file to write (default: rates.yaml)")
    args, rest = parser.parse_known_args(argv)
    config = parse(rest)
    if config.model.module is not None:
        fail(["model.module has no rates to measure: leave it out"])
    start(config)
    try:
        args.rates.open("a").close()
    except OSError as error:
        fail([f"--rates {args.rates} cannot be written ({error.strerror}): give another file"])

    import jax

    from jaxmeg.bench.work import undivided
    from jaxmeg.planner.calibrate import measure
    from jaxmeg.record.folder import versions_record
    from jaxmeg.setup import build
    setup = build(config, jax.devices())
    if why := undivided(setup.resolved):
        fail([f"the work of a device can't be listed: {why}: use another mesh"])
    rates = measure(setup, lambda what: print(f"{what} ...", file=sys.stderr, flush=True))
    versions = versions_record(jax.devices())
    record = {"rates": rates, "measured_on": versions["devices"], "packages": versions["packages"]}
    args.rates.write_text(yaml.safe_dump(record, sort_keys=False))
    for name, value in rates.items():
        print(f"{name:<18}{value:>12.4g}")
    print(f"\nwrote {args.rates}")


if __name__ == "__main__":
    main(sys.argv[1:])
