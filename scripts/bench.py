#!/usr/bin/env python3
"""Time the train step: `python scripts/bench.py --model llama3.1-8b --model.num_layers 8 --seq_len 8192 --global_batch 4 --breakdown`.

One line a case for people on stderr; the results as JSON on stdout, or in --out FILE, written anew after every case. Exit code 1 where
a case of ours failed.
"""

import json
import sys

from jaxmeg.bench.case import Plan, plan
from jaxmeg.bench.page import append, load
from jaxmeg.bench.peer import result, run_peers, with_roofs
from jaxmeg.bench.report import lines, run_record
from jaxmeg.cli import fail, start
from jaxmeg.hardware import peak_tflops


def main(argv: list[str]) -> int:
    asked = plan(argv)
    refuse_early(asked)
    devices = start(asked.cases[0].config)
    heard = run_peers(asked.peers, asked.cases, devices.count)  # before jax takes the memory

    import jax

    from jaxmeg.bench.measure import measure
    from jaxmeg.record.folder import versions_record

    if len(jax.devices()) < devices.count:
        fail([f"jax sees {len(jax.devices())} {jax.default_backend()} devices, and the bench has {devices.count}: see scripts/doctor.py"])
    peak = peak_tflops(jax.devices()[0].device_kind)
    versions = versions_record(jax.devices())
    if asked.commit and versions["git"]:
        fail([f"--commit {asked.commit} has no effect in a git checkout, which says {versions['git']['commit']}: leave it out"])
    cases, theirs = [], [result(one, peak) for one in heard]
    for case in asked.cases:
        cases.append(measure(case, jax.devices()))
        print("\n".join(lines(cases[-1])), file=sys.stderr, flush=True)
        run = run_record(versions, peak, asked.commit, with_roofs([*cases, *theirs]))
        if asked.out:
            asked.out.write_text(json.dumps(run, indent=1) + "\n")
    for case in run["cases"][len(cases):]:
        print("\n".join(lines(case)), file=sys.stderr)
    if not asked.out:
        print(json.dumps(run))
    if asked.record:
        append(asked.record, run)
    return int(any(case["error"] for case in cases))


def refuse_early(asked: Plan) -> None:
    """What would else be found out after all has been measured."""
    for option, path in (("--out", asked.out), ("--record", asked.record)):
        try:
            if path:
                path.open("a").close()
        except OSError as error:
            fail([f"{option} {path} cannot be written ({error.strerror}): give another file"])
    if asked.record and asked.record.stat().st_size:
        load(asked.record)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
