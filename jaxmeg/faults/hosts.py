"""Two hosts on one machine: network namespaces with an address, a hostname and a hosts file of their own, and a link between them.

Nothing reaches them from outside, and they reach nothing. Needs Linux, root and iproute2; they are removed whatever happens.
Reference: https://man7.org/linux/man-pages/man8/ip-netns.8.html
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxmeg.faults.ranks import LIMITS, STUCK
from jaxmeg.faults.start import TINY, TWO, Bench, Ended, Place, Training, several
from jaxmeg.faults.table import Fault, NotTried, Outcome, outcome, went_on

PORT = 4321
_ON_HOST = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'


@dataclass(frozen=True, kw_only=True)
class Host:
    """One of the two."""

    space: str
    """Its network namespace."""
    name: str
    address: str
    hosts_file: Path

    @property
    def prefix(self) -> list[str]:
        """What runs a command there."""
        return ["ip", "netns", "exec", self.space, "unshare", "--uts", "--mount", "sh", "-c", _ON_HOST, str(self.hosts_file), self.name]

    def set_link(self, state: str) -> None:
        """up or down."""
        _ip("-n", self.space, "link", "set", "link0", state)


@contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Hosts `node-a` and `node-b`. Raises NotTried where this machine has no namespaces for us."""
    if not all(map(shutil.which, ("ip", "unshare"))) or os.getuid():
        raise NotTried("it needs Linux, root, ip and unshare")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "hosts"
    file.write_text("127.0.0.1 localhost\n10.77.0.1 node-a\n10.77.0.2 node-b\n")
    first, second = (Host(space=f"jaxmeg-{os.getpid()}-{letter}", name=f"node-{letter}", address=f"10.77.0.{number}", hosts_file=file)
                     for number, letter in enumerate("ab", 1))
    try:
        _ip("netns", "add", first.space)
        _ip("netns", "add", second.space)
        _ip("link", "add", "link0", "netns", first.space, "type", "veth", "peer", "name", "link0", "netns", second.space)
        for host in (first, second):
            _ip("-n", host.space, "address", "add", f"{host.address}/24", "dev", "link0")
            _ip("-n", host.space, "link", "set", "lo", "up")
            host.set_link("up")
        yield first, second
    finally:
        for host in (first, second):
            subprocess.run(["ip", "netns", "delete", host.space], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise NotTried(f"network namespaces do not work here ({done.stderr.strip()})")


def start_on(hosts: Sequence[Host], place: Place, *arguments: str, coordinator: str = "") -> list[Training]:
    """One process a host. coordinator: instead of the first host's name."""
    return several(place, len(hosts), *arguments, coordinator=coordinator or f"{hosts[0].name}:{PORT}",
                   prefixes=[host.prefix for host in hosts])


def train_on(hosts: Sequence[Host], place: Place, *arguments: str, coordinator: str = "") -> list[Ended]:
    """One process a host, from start to end."""
    return [training.end() for training in start_on(hosts, place, *arguments, coordinator=coordinator)]


def cut_link(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    """The link goes down after a step, and is up again when the run goes on."""
    for _ in range(times):
        place = bench.place()
        with two_hosts(place.folder) as hosts:
            trainings = start_on(hosts, place, *TINY, *TWO, *LIMITS)
            with trainings[0], trainings[1]:
                trainings[0].reach(chance.randint(8, 20))
                hosts[1].set_link("down")
                ended = [training.end() for training in trainings]
            lost = place.lost
            hosts[1].set_link("up")
            rest = train_on(hosts, place, "--resume", "runs/demo")
            same, problem = went_on(place, next((one for one in rest if one.code), rest[0]), bench.two)
        yield outcome(place, ended, code=STUCK, lost=lost, same=same, wrong=problem, note="goes on once the link is back")


def loopback(bench: Bench, times: int, chance: random.Random) -> Iterator[Outcome]:
    """The coordinator's address is each host itself."""
    for _ in range(times):
        place = bench.place()
        with two_hosts(place.folder) as hosts:
            ended = train_on(hosts, place, *TINY, *TWO, "--distributed.timeout", "15", coordinator=f"localhost:{PORT}")
        yield outcome(place, ended, code=2, wrong="a run folder is left" if place.run.exists() else "")


FAULTS = [
    Fault("cut_link", "the link between two hosts is cut (network namespaces)", 1, cut_link),
    Fault("loopback", "two hosts, and `localhost` as the coordinator", 1, loopback),
]
