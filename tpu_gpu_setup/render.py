#!/usr/bin/env python3
"""Fill in a cluster template: `python tpu_gpu_setup/render.py slurm --nodes 2 --gpus 8 -- scripts/train.py --mesh tp=8 > job.sbatch`.

The templates are slurm.sbatch and kubernetes-jobset.yaml beside this file; @@{name} is a place to fill.
"""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import NoReturn

HERE = Path(__file__).resolve().parent
PORT = 29500


class Place(Template):
    """Dollar signs belong to the shell and to Kubernetes."""

    delimiter = "@@"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        self.exit(2, f"error: {message}\n")


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    print(args.render(args), end="")
    return 0


def slurm(args: argparse.Namespace) -> str:
    """The text of a batch script."""
    return fill("slurm.sbatch", name=args.name, nodes=args.nodes, gpus=args.gpus, time=args.time, command=shlex.join(args.command))


def kubernetes(args: argparse.Namespace) -> str:
    """The text of a JobSet. A list in JSON is one in YAML too."""
    words = [word.replace("$", "$$") for word in args.command]  # Kubernetes makes one of two, and puts variables in for $(NAME)
    words += ["--distributed.coordinator", f"{args.name}-hosts-0-0.{args.name}:{PORT}", "--distributed.num_processes", str(args.nodes)]
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    env = [{"name": "PROCESS_ID", "valueFrom": index}]
    env += [{"name": name, "value": value} for name, value in read_env(HERE / "nvidia.env").items()]
    return fill("kubernetes-jobset.yaml", name=args.name, nodes=args.nodes, gpus=args.gpus, port=PORT, image=json.dumps(args.image),
                claim=json.dumps(args.claim), args=json.dumps([*words, "--distributed.process_id", "$(PROCESS_ID)"]), env=json.dumps(env))


def fill(template: str, **values: object) -> str:
    return Place((HERE / template).read_text(encoding="utf-8")).substitute(values)


def read_env(path: Path) -> dict[str, str]:
    """The lines NAME=value of an environment file."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(description="Fill in a cluster template and print it; the command to run stands behind --.", allow_abbrev=False)
    clusters = parser.add_subparsers(required=True, metavar="{slurm,kubernetes}")
    on_slurm = clusters.add_parser("slurm", help="a script for sbatch", allow_abbrev=False)
    on_slurm.set_defaults(render=slurm)
    on_slurm.add_argument("--time", default="24:00:00", help="time limit (default: 24:00:00)")
    on_kubernetes = clusters.add_parser("kubernetes", help="a JobSet", allow_abbrev=False)
    on_kubernetes.set_defaults(render=kubernetes)
    on_kubernetes.add_argument("--image", required=True, help="the container image, see Dockerfile")
    on_kubernetes.add_argument("--claim", required=True, help="the persistent volume claim for runs and data")
    for cluster in (on_slurm, on_kubernetes):
        cluster.add_argument("--nodes", type=int, required=True, metavar="N", help="hosts, with one process each")
        cluster.add_argument("--gpus", type=int, required=True, metavar="N", help="GPUs of each host")
        cluster.add_argument("--name", default="jaxmeg", help="name of the job (default: jaxmeg)")
    split = list(argv).index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    args.command = list(argv[split + 1:])
    if not args.command:
        parser.error("no command to run: put it behind --, for example -- scripts/train.py --mesh tp=8")
    for option, value in (("--nodes", args.nodes), ("--gpus", args.gpus)):
        if value < 1:
            parser.error(f"{option}={value} is no number of them: use 1 or more")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", args.name):
        parser.error(f"--name={args.name} is no name for a job: use up to 40 lower-case letters, digits and hyphens")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
