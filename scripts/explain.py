"""What a config's compiled step sends: every collective with where it is, over which axis, how often, how many bytes, overlapped or not.

python scripts/explain.py --gpus 8xH200 --model llama3.1-8b --seq_len 4096 --global_batch 16 --mesh pp=2,dp=2,tp=2 --zero 3
python scripts/explain.py --gpus 8xH200 ... --mesh dp=8 --zero 1 --diff "--zero 3"     # the same config with other options beside it
python scripts/explain.py --mesh tp=4,pp=2 --topology                                  # the devices of this machine, or emulated ones
"""

import argparse
import shlex
import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jaxmeg import cli
from jaxmeg.config import Config
from jaxmeg.planner.chips import ChipError, Cluster, parse_cluster

if TYPE_CHECKING:
    from jaxmeg.hlo import Program

WIDTH = 150  # of tables, also on a narrower terminal
SMALL = 10**6


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Every collective of the compiled train step. All options of scripts/train.py besides.",
                                     allow_abbrev=False)
    parser.add_argument("--gpus", metavar="COUNTxCHIP", help="compile for GPUs that are not there, such as 8xH200 (needs the extra aot)")
    parser.add_argument("--diff", metavar="OPTIONS", help="options of a second config, on top of the first: what it sends more or less")
    parser.add_argument("--topology", action="store_true", help="draw the process groups of each axis and the links they use")
    parser.add_argument("--all", action="store_true", help=f"also what sends less than {SMALL // 10**6} MB a step")
    args, rest = parser.parse_known_args(argv)
    config = cli.parse(rest)
    other = cli.parse([*rest, *shlex.split(args.diff)]) if args.diff else None
    try:
        cluster = parse_cluster(args.gpus) if args.gpus else None
    except ChipError as error:
        cli.fail([str(error)])
    devices = prepare([config, *([other] if other else [])], cluster)

    from jaxmeg.planner.explain import show_difference, show_rows, show_topology
    console = Console(highlight=False, width=WIDTH)
    program, memory, mesh = compiled(config, devices)
    if args.topology:
        show_topology(mesh, cluster.chip if cluster else None, console)
    show_rows(program, console, 0 if args.all else SMALL)
    if other:
        second, more, _ = compiled(other, devices)
        console.print()
        show_difference(("first", program, memory), (args.diff, second, more), console)


def prepare(configs: list[Config], cluster: Cluster | None) -> list[Any]:
    """The devices to compile for: stand-ins, or this machine's. Exits with 2 where a config breaks a rule."""
    if cluster is None:
        count = cli.start(configs[0]).count
        for config in configs[1:]:
            cli.check(config, count)
        import jax
        return jax.devices()
    for config in configs:
        cli.check(config, cluster.count)
    from jaxmeg import _compat
    _compat.prepare_gpu_topology()
    from jaxmeg.aot import gpu_devices
    from jaxmeg.planner.check import target_of
    if (target := target_of(cluster.chip)) is None:
        cli.fail([f"--gpus: there is no description of a {cluster.chip.name} to compile for: use another chip"])
    try:
        return gpu_devices(target, cluster.count)
    except RuntimeError as error:
        cli.fail([f'the compiler for NVIDIA GPUs could not be used ({str(error).splitlines()[0]}): pip install "jaxmeg[aot]"'])


def compiled(config: Config, devices: list[Any]) -> "tuple[Program, int, dict[str, int]]":
    """(program, bytes it needs on one device, mesh)."""
    from jaxmeg import hlo
    from jaxmeg.aot import compile_train_step
    setup, step = compile_train_step(config, devices)
    sizes = step.memory_analysis()
    assert sizes is not None
    mesh = {str(axis): size for axis, size in setup.resolved.mesh.items()}
    held = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes
    return hlo.read(step.as_text(), mesh), held, mesh


if __name__ == "__main__":
    main(sys.argv[1:])
