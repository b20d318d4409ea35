"""A run that stops after 5 updates and goes on on another layout: the same losses, and not one bit of its state changed on the way."""

import functools
import json
import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest
import runs
from jax.sharding import NamedSharding

from jaxmeg.checkpoint.canonical import flatten
from jaxmeg.checkpoint.restore import restore
from jaxmeg.state import state_shardings

ROOT = Path(__file__).parents[1]
LOSS = 1e-5  # the parity bound in fp32

PAIRS = [
    ("tp=2", "uneven pp=4"),
    ("uneven pp=4", "dp=8"),
    ("dp=8", "tp=4"),
    ("tp=4", "pp=2"),
    ("pp=2", "dp=4, zero 3"),
    ("dp=4, zero 3", "tp=2,pp=2"),
    ("tp=2,pp=2", "tp=2,pp=2,dp=2, zero 3"),
    ("tp=2,pp=2,dp=2, zero 3", "dp=4, zero 2"),
    ("dp=4, zero 2", "tp=2"),
    ("dp=4, zero 1", "interleaved"),
    ("interleaved", "uneven pp=4"),
    ("uneven pp=4", "dp=8, zero 3"),
    ("dp=8, zero 3", "interleaved"),
    ("interleaved", "one device"),
]
AGAIN = ["one device", "tp=2,pp=2,dp=2, zero 3", "interleaved", "uneven pp=4"]


def has_sharding(x: jax.Array, sharding: NamedSharding) -> None:
    assert x.sharding.is_equivalent_to(sharding, x.ndim)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_a_run_goes_on_on_another_layout(first: str, second: str) -> None:
    saved, setup = runs.five(first), runs.setup_of(second)
    state, manifest = restore(setup, saved.folder)
    runs.same_bits(runs.model_order(setup, state), saved.leaves)
    jax.tree.map(has_sharding, state, state_shardings(setup))
    assert (manifest.step, manifest.updates, manifest.rows) == (5, 5, 5 * runs.ROWS)
    _, losses = runs.train(second, state, 5, 10)
    want = runs.ten("one device").losses
    np.testing.assert_allclose(saved.losses, want[:5], rtol=0, atol=LOSS)
    np.testing.assert_allclose(losses, want[5:], rtol=0, atol=LOSS)
    assert max(abs(a - b) for a, b in zip(want[5:], want[:5])) > 100 * LOSS  # another update's loss would not do


@pytest.mark.parametrize("name", AGAIN)
def test_on_the_same_layout_it_goes_on_bit_for_bit(name: str) -> None:
    """Weights, moments, counts and losses of 5 + 5 updates are those of 10."""
    setup, whole = runs.setup_of(name), runs.ten(name)
    state, losses = runs.train(name, restore(setup, runs.five(name).folder)[0], 5, 10)
    assert runs.five(name).losses + losses == whole.losses
    runs.same_bits(runs.model_order(setup, state), whole.leaves)
    assert int(state.step) == int(state.updates) == int(flatten(state)["opt_state.0.count"]) == 10


@functools.cache
def eight() -> tuple[Path, dict[str, np.ndarray]]:
    """A state saved on tp=4,pp=2, and its leaves."""
    setup, part = runs.setup_of("tp=4,pp=2"), runs.five("interleaved")
    return runs.write(setup, restore(setup, part.folder)[0], Path(tempfile.mkdtemp()), 5), part.leaves


@pytest.mark.parametrize(("count", "name"), [(1, "one device"), (2, "tp=2"), (8, "dp=8, zero 3")])
def test_what_eight_devices_saved_opens_on(count: int, name: str) -> None:
    folder, leaves = eight()
    setup = runs.setup_of(name)
    state, _ = restore(setup, folder)
    runs.same_bits(runs.model_order(setup, state), leaves)
    jax.tree.map(has_sharding, state, state_shardings(setup))
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(state)} == {count}


ALONE = """
import json, sys, zlib, jax, runs
from pathlib import Path
from jaxmeg.checkpoint.restore import restore
assert jax.device_count() == 1
setup = runs.setup_of("one device")
state, _ = restore(setup, Path(sys.argv[1]))
print(json.dumps({path: zlib.crc32(x.tobytes()) for path, x in runs.model_order(setup, state).items()}))
"""


def test_what_eight_devices_saved_opens_in_a_process_that_has_one() -> None:
    folder, leaves = eight()
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, "-c", ALONE, str(folder)], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {path: zlib.crc32(x.tobytes()) for path, x in leaves.items()}
