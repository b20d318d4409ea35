"""Two hosts with a link between them: training over it, the link cut in the middle, and the run gone on with.

The hosts are network namespaces that this test makes and removes; nothing leaves them. Skipped where the machine has none for us.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxmeg.faults.hosts import Host, start_on, train_on, two_hosts
from jaxmeg.faults.ranks import LIMITS, STUCK
from jaxmeg.faults.start import EVERY, TINY, TWO, Place
from jaxmeg.faults.table import NotTried


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts(tmp_path_factory.mktemp("hosts")) as pair:
            yield pair
    except NotTried as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cache")


def test_an_address_that_is_each_host_itself_is_one_line(hosts, cache, tmp_path):
    """`localhost` as the coordinator: process 1 finds nobody at its own, and process 0 hears of nobody."""
    place = Place(tmp_path, cache)
    first, second = train_on(hosts, place, *TINY, *TWO, "--distributed.timeout", "4", coordinator="localhost:4321")
    assert (first.code, second.code) == (2, 2), first.err + second.err
    assert "1 is missing, and these came: 0 on node-a" in first.line and "distributed.timeout" in first.line
    assert "process 1 on node-b did not reach process 0 at localhost:4321 within 4 s (distributed.timeout)" in second.line
    assert not place.run.exists() and not first.has_traceback and not second.has_traceback


@pytest.mark.slow
def test_a_link_that_is_cut_ends_both_sides_and_the_run_goes_on_to_the_bit(hosts, cache, tmp_path):
    straight, place = Place(tmp_path / "straight", cache), Place(tmp_path / "cut", cache)
    for one in train_on(hosts, straight, *TINY, *TWO):
        assert one.code == 0, one.err
    trainings = start_on(hosts, place, *TINY, *TWO, *LIMITS)
    with trainings[0], trainings[1]:
        trainings[0].reach(3 * EVERY + 1)
        hosts[1].set_link("down")
        try:
            ended = [training.end() for training in trainings]
        finally:
            hosts[1].set_link("up")
    for one in ended:
        assert one.code == STUCK and not one.has_traceback, one.err
        assert sum(line.startswith("error:") for line in one.err.splitlines()) == 1, one.err
    assert "process 1 (node-b, pid" in ended[0].line and "is gone" in ended[0].line
    assert "process 0 (node-a, pid" in ended[1].line and "does not answer" in ended[1].line
    assert place.steps and place.lost <= 2 * EVERY
    for one in train_on(hosts, place, "--resume", "runs/demo"):
        assert one.code == 0, one.err
    assert place.records == straight.records
