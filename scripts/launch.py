#!/usr/bin/env python3
"""Start the processes of a run on this machine or several: `python scripts/launch.py --num_gpus 8 scripts/train.py --mesh tp=8`.

Only starts them with --distributed.* options and waits; finding each other is jax's work, and watching is the run's own. Lines of several
processes begin with [number]. SIGINT and SIGTERM go to all: the run saves and stops; once more kills.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxmeg.launch.hosts import LaunchError
from jaxmeg.launch.plan import DEFAULT_PORT, EXPORTED, EXPORTED_PREFIXES, Options, Process, environment, plan
from jaxmeg.launch.supervise import Job, supervise

USAGE = "launch.py [options] script.py [its options]"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line and exit code 2."""
        self.exit(2, f"error: {message}: write {USAGE}; --help lists the options\n")


def main(argv: Sequence[str]) -> int:
    args = vars(parse(argv))
    dry_run, grace = args.pop("dry_run"), args.pop("grace")
    try:
        processes = plan(Options(**args), os.environ)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if dry_run:
        print("\n".join(process.line for process in processes))
        return 0
    return start(processes, grace)


def start(processes: Sequence[Process], grace: float) -> int:
    """A single process here takes this one's place; all others are watched over."""
    if len(processes) == 1 and not processes[0].remote:
        os.execvpe(processes[0].argv[0], processes[0].argv, environment(processes[0], os.environ))
    jobs = [Job(argv=process.argv, env=environment(process, os.environ), name=f"process {index} on {process.host}",
                prefix=f"[{index}] " if len(processes) > 1 else "", takes_orders=process.remote) for index, process in enumerate(processes)]
    try:
        return supervise(jobs, grace)
    except BrokenPipeError:  # nobody reads the output any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"error: {error.filename} cannot be started: {error.strerror}", file=sys.stderr)
        return 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, usage=USAGE)
    parser.add_argument("--num_gpus", type=int, metavar="N", help="GPUs to use on each host (default: all)")
    parser.add_argument("--num_nodes", type=int, metavar="N", help="hosts to use, from the top of --hostfile (default: all)")
    parser.add_argument("--hostfile", metavar="FILE", help="lines 'worker-1 slots=8', reached with ssh (default: this machine alone)")
    parser.add_argument("--include", metavar="HOSTS", help="hosts and GPUs to use: worker-1@worker-2:0,1")
    parser.add_argument("--exclude", metavar="HOSTS", help="hosts and GPUs to leave out, in the same form")
    parser.add_argument("--per_host", choices=("1", "gpu"), default="1", help="processes: one with all GPUs, or one a GPU (default: 1)")
    parser.add_argument("--master_addr", metavar="HOST", help="name by which all know the first host (default: as in --hostfile)")
    parser.add_argument("--master_port", type=int, metavar="PORT", help=f"its port (default: a free one; {DEFAULT_PORT} if it is remote)")
    parser.add_argument("--ssh_args", default="", metavar="ARGS", help="further options of ssh: --ssh_args='-p 2222'; remote processes get "
                        f"{', '.join(EXPORTED)} and what begins with {', '.join(EXPORTED_PREFIXES)}")
    parser.add_argument("--emulate", type=int, metavar="N", help="without GPUs: N devices on this machine's CPU")
    parser.add_argument("--num_processes", type=int, metavar="P", help="with --emulate: spread over P processes (default: 1)")
    parser.add_argument("--grace", type=float, default=75.0, metavar="SECONDS", help="after a failure, how long the others have to end "
                        "before SIGTERM, and from there to SIGKILL (default: 75, so that their watchdogs can speak)")
    parser.add_argument("--dry_run", action="store_true", help="print the commands, start nothing")
    parser.add_argument("script", nargs=argparse.REMAINDER, metavar="script.py", help="the script and its options")
    args = parser.parse_args(argv)
    command = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not command:
        parser.error("no script to run")
    args.script, args.arguments = command[0], command[1:]
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
