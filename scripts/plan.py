"""Which layout for a model on so many GPUs: will it fit, how fast, and why. Needs no GPU.

python scripts/plan.py --model llama3.1-70b --gpus 64xH100-80G --seq 8192 --global_batch 512
python scripts/plan.py --model llama3.1-8b --gpus 8xA100-80G --mesh tp=4,pp=2 --explain    # what is given stays as it is
"""

import argparse
import json
import sys
from typing import TYPE_CHECKING, NoReturn

from rich.console import Console

from jaxmeg import cli
from jaxmeg.config import Config
from jaxmeg.planner.chips import ChipError, Cluster, known_chips, parse_cluster, read_chips

if TYPE_CHECKING:
    from jaxmeg.planner.search import Plan


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        self.exit(2, f"error: {message}\n")


def main(argv: list[str]) -> None:
    parser = Parser(description="Ranks the legal layouts of a model on so many GPUs by predicted speed within memory. All options of "
                    "scripts/train.py besides: what is given is fixed, everything else of the layout is tried.", allow_abbrev=False)
    parser.add_argument("--gpus", required=True, metavar="COUNTxCHIP", help=f"for example 8xH100-80G; chips: {', '.join(known_chips())}")
    parser.add_argument("--chips", metavar="FILE", help="YAML of further chips, written like jaxmeg/planner/chips.yaml")
    parser.add_argument("--rates", metavar="FILE", help="rates measured by scripts/calibrate.py, instead of published ones")
    parser.add_argument("--seq", dest="seq_len", metavar="TOKENS", help="short for --seq_len")
    parser.add_argument("--top", type=int, default=8, help="layouts shown (default: 8)")
    parser.add_argument("--explain", action="store_true", help="print the formula behind every number")
    parser.add_argument("--check", action="store_true", help="compile the real train step of the best layout, without a GPU")
    parser.add_argument("--measure", type=int, metavar="N", help="run the best N on this machine's devices, and keep the fastest")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    args, rest = parser.parse_known_args(argv)
    if args.seq_len:
        rest += ["--seq_len", args.seq_len]
    if args.top < 1:
        parser.error(f"--top {args.top} shows nothing: use 1 or more")
    config = cli.parse(rest)
    try:
        cluster = parse_cluster(args.gpus, read_chips(args.chips) if args.chips else None)
    except ChipError as error:
        parser.error(str(error))
    if args.check:
        from jaxmeg import _compat
        _compat.prepare_gpu_topology()
    if args.measure is not None and args.measure < 1:
        parser.error(f"--measure {args.measure} runs nothing: use 1 or more")
    if args.measure and (have := cli.start(config, whole=False).count) != cluster.count:
        parser.error(f"--measure {args.measure} needs the {cluster.count} devices of --gpus {args.gpus}, and here are {have}")
    given = cli.given_keys(rest)
    _refuse(config, cluster)
    show(config, cluster, given, args)


def _refuse(config: Config, cluster: Cluster) -> None:
    """What no layout could mend."""
    from jaxmeg.planner.search import hopeless
    if found := hopeless(config, cluster):
        cli.fail(found)


def show(config: Config, cluster: Cluster, given: frozenset[str], args: argparse.Namespace) -> None:
    from jaxmeg.arch import resolve_arch
    from jaxmeg.planner import advice, text
    from jaxmeg.planner.calibrate import RatesError, read_rates
    from jaxmeg.planner.rates import rates_of
    from jaxmeg.planner.search import search
    from jaxmeg.validate.check import problems
    rates = None
    if args.rates:
        try:
            measured = read_rates(args.rates)
        except RatesError as error:
            cli.fail([str(error)])
        rates = rates_of(cluster.chip, resolve_arch(config.model).head_dim, measured=measured)
    found = search(config, cluster, given, max(args.top, args.measure or 0), rates)
    if not found.tried:
        cli.fail(problems(config, cluster.count) or [f"no mesh of {cluster.count} GPUs divides the model's sizes and "
                 f"data.global_batch={config.data.global_batch} as given: give less, or another batch"])
    best = (found.fitting or found.nearest)[0]
    if args.json:
        print(json.dumps([text.as_dict(plan) for plan in found.fitting or found.nearest], indent=2))
    else:
        console = Console(highlight=False, width=text.WIDTH)
        text.show_ranking(found, cluster, console)
        text.show_plan(best, cluster, console, args.explain)
    if args.check:
        check(best, cluster)
    if args.measure and found.fitting:
        run(found.fitting[: args.measure])
    if not found.fitting:
        print(*advice.lines(best.config, cluster), sep="\n")
        cli.fail([f"nothing that is given fits {cluster}: the smallest layout needs {best.memory.total / 2**30:.1f} GiB of "
                  f"{best.budget / 2**30:.1f} a GPU"])


def run(plans: "list[Plan]") -> None:
    """Measure them, and print the command of the fastest."""
    import jax

    from jaxmeg.planner.measure import measure_plans, show_measured
    from jaxmeg.planner.text import WIDTH, command
    found = measure_plans(plans, jax.devices())
    show_measured(found, Console(highlight=False, width=WIDTH))
    if found[0].seconds is None:
        cli.fail(["none of them ran: see above"])
    print(f"\n{command(found[0].plan.config)}")


def check(best: "Plan", cluster: Cluster) -> None:
    from jaxmeg.planner.check import compile_plan, target_of
    from jaxmeg.planner.text import WIDTH, show_check
    if (target := target_of(cluster.chip)) is None:
        cli.fail([f"--check: there is no description of a {cluster.chip.name} to compile for: leave it out, or use another chip"])
    try:
        checked = compile_plan(best, cluster, target)
    except RuntimeError as error:
        cli.fail([f'--check: the compiler for NVIDIA GPUs could not be used ({str(error).splitlines()[0]}): pip install "jaxmeg[aot]"'])
    show_check(best, checked, Console(highlight=False, width=WIDTH))


if __name__ == "__main__":
    main(sys.argv[1:])
