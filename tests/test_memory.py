"""Memory by line against counts by hand, the compiled program's text and the arrays themselves."""

import math
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params
from parity import TOKENS, Row, config_of

from jaxmeg.config import Config, LayoutConfig, MeshConfig
from jaxmeg.models.own import OwnModel
from jaxmeg.record.memory import Usage, describe, device_memory, gib, memory_lines, memory_record, ring_bytes
from jaxmeg.setup import Setup, build
from jaxmeg.state import abstract_state, init_state
from jaxmeg.step import Rows, abstract_rows, make_train_step

D, F, H, G, K, V = 64, 128, 8, 2, 8, 256  # the toy model: embed, mlp, heads, kv heads, head_dim, vocabulary; 4 layers
LAYER = 2 * D * H * K + 2 * D * G * K + 3 * D * F  # its matrices
PIPELINE = Row(mesh="pp=2,tp=2", optimizer="adamw")
SHARDED = Row(mesh="dp=4", zero=3, optimizer="adamw")


def ready(row: Row) -> tuple[Setup, Rows]:
    setup = build(config_of(row), jax.devices()[: math.prod(row.sizes.values())])
    return setup, abstract_rows(setup, setup.resolved.num_microbatches, TOKENS)


def account(**sizes: int) -> Any:
    """A compiled program that says no more than its sizes."""
    names = ("argument_size_in_bytes", "output_size_in_bytes", "alias_size_in_bytes", "temp_size_in_bytes")
    stats = SimpleNamespace(**(dict.fromkeys(names, 0) | {f"{name}_size_in_bytes": size for name, size in sizes.items()}))
    return SimpleNamespace(memory_analysis=lambda: stats)


@pytest.mark.parametrize(("row", "floats"), [
    # two layers: matrices over tp, norms whole; the two tables over pp and tp; the head's norm whole
    (PIPELINE, 2 * (LAYER // 2 + 2 * D) + 2 * V * D // 4 + D),
    # everything over dp
    (SHARDED, (4 * (LAYER + 2 * D) + 2 * V * D + D) // 4),
], ids=lambda value: getattr(value, "name", None))
def test_parameters_and_moments_of_a_device(row, floats):
    setup, rows = ready(row)
    lines = memory_lines(setup, rows, account())
    assert lines.parameters == 4 * floats
    assert 2 * lines.parameters <= lines.optimizer <= 2 * lines.parameters + 16  # AdamW: two moments, and counters
    if row == SHARDED:
        held = [shard.data.nbytes for leaf in jax.tree.leaves(init_state(setup, 0).params) for shard in leaf.addressable_shards
                if shard.device == jax.devices()[3]]
        assert sum(held) == lines.parameters


def kept(B: int, tp: int, remat: str) -> int:
    """Floats that one layer keeps for its backward pass, of B rows: its input and what the policy names."""
    t, T = TOKENS // tp, TOKENS
    sizes = {"input": B * t * D, "middle": B * t * D, "gate_up": 2 * B * T * F // tp, "qkv": B * T * (H + 2 * G) * K // tp,
             "attention": B * T * H * K // tp, "lse": B * H // tp * T}
    names = {"none": set(sizes), "selective": {"input", "gate_up", "attention", "lse"}, "full": {"input"}}[remat]
    return sum(sizes[name] for name in names)


@pytest.mark.parametrize(("row", "slots", "layers", "B", "tp"), [
    # 1F1B over P stages has 2(P-1)+1 = 3 microbatches on the way at most; M = 4 microbatches
    (Row(mesh="pp=2,tp=2"), 3, 2, 4, 2),
    (Row(mesh="pp=2,dp=2", zero=3), 3, 2, 2, 1),
    (Row(mesh="pp=2,tp=2", remat="selective"), 3, 2, 4, 2),
    (Row(mesh="pp=2,tp=2", remat="full"), 3, 2, 4, 2),
    (Row(mesh="pp=2,tp=2", schedule="gpipe"), 5, 2, 4, 2),  # all M, and one that idle stages write
    (Row(mesh="dp=2"), 1, 4, 8, 1),  # no pipeline: one microbatch, all layers
    (Row(mesh="dp=2", scan_layers=False), 1, 4, 8, 1),
], ids=lambda value: getattr(value, "name", None))
def test_the_ring_by_formula(row, slots, layers, B, tp):
    assert ring_bytes(*ready(row)) == 4 * slots * layers * kept(B, tp, row.remat)


def test_the_ring_is_in_the_compiled_program_and_the_lines_add_up():
    setup, rows = ready(PIPELINE)
    compiled = make_train_step(setup).lower(abstract_state(setup), rows).compile()
    lines, stats = memory_lines(setup, rows, compiled), compiled.memory_analysis()
    loops = re.findall(r"= \((.*)\) while\(", compiled.as_text())
    # what a loop over ticks carries that has the shape [3 slots, 2 layers, ...]
    carried = [sum(4 * math.prod(map(int, dims.split(","))) for dims in re.findall(r"f32\[(3,2,[\d,]+)\]", loop)) for loop in loops]
    assert lines.ring in carried
    assert lines.total == (stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
                           + stats.temp_size_in_bytes)
    batch = 16 * TOKENS * (4 + 4 + 1)  # ids, labels, mask; the rest is scalars
    assert batch <= lines.rest <= batch + 512 and lines.temporaries > 0


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


@pytest.mark.parametrize("row", [PIPELINE, Row(), Row(scan_layers=False)], ids=lambda row: row.name)
def test_slots_are_written_without_a_look_at_what_was_there(row):
    """A scatter selects between old and new, for an index that may be outside. With one microbatch gradients are not added either,
    but for those of the token table's rows."""
    setup, rows = ready(row)
    traced = make_train_step(setup).trace(abstract_state(setup), rows).jaxpr
    found = [(e.primitive.name, e.invars[0].aval.shape) for e in equations(traced.jaxpr) if e.primitive.name.startswith("scatter")]
    assert "scatter" not in dict(found)
    if row != PIPELINE:
        assert found == [("scatter-add", (V, D))]


def test_lines_of_an_account():
    setup, rows = ready(SHARDED)
    ring = ring_bytes(setup, rows)
    lines = memory_lines(setup, rows, account(argument=10**6, output=9 * 10**5, alias=8 * 10**5, temp=ring + 77))
    assert lines.temporaries == 77 and lines.total == 11 * 10**5 + ring + 77
    assert lines.rest == 11 * 10**5 - lines.parameters - lines.optimizer


def test_a_module_of_the_users_has_no_ring():
    setup = build(Config(mesh=MeshConfig(dp=2), layout=LayoutConfig(zero=0)), jax.devices()[:2],
                  own=OwnModel(nnx.Linear(3, 5, rngs=nnx.Rngs(0))))
    lines = memory_lines(setup, None, account(argument=10_000, temp=77))
    assert (lines.parameters, lines.ring, lines.temporaries, lines.total) == (4 * 20, 0, 77, 10_077)


class Device:
    platform = "gpu"

    def __init__(self, in_use: int, peak: int, limit: int | None = None, process: int = 0):
        self.process_index = process
        self.stats = {"bytes_in_use": in_use, "peak_bytes_in_use": peak} | ({"bytes_limit": limit} if limit else {})

    def memory_stats(self) -> dict[str, int]:
        return self.stats


def test_usage_of_this_processs_devices():
    devices = [Device(5, 9, 20), Device(100, 200, 300, process=1), Device(12, 12, 20), Device(7, 8, 20)]
    assert device_memory(devices) == [Usage(5, 9, 20), Usage(12, 12, 20), Usage(7, 8, 20)]
    assert memory_record(devices) == {
        "memory_in_use": [5, 12, 7], "memory_peak": [9, 12, 8], "memory_limit": [20, 20, 20], "memory_spread": 7}
    assert memory_record([Device(5, 9)])["memory_limit"] == [None]


def test_a_cpu_keeps_no_account():
    assert device_memory(jax.devices()) is None and memory_record(jax.devices()) == {}


def test_the_lines_in_words():
    setup, rows = ready(SHARDED)
    lines = memory_lines(setup, rows, account())._replace(ring=3 * 2**30, temporaries=2**20, rest=0)
    text = describe(lines, [Device(1, 1, 2**33), Device(1, 1, 2**32)])
    assert text.startswith("3.00 GiB a device of 4.00 GiB: parameters 0.16 MiB, optimizer 0.33 MiB, ring 3.00 GiB, temporaries 1.00 MiB")
    assert "the cpu backend does not say" in describe(lines, jax.devices()) and "\n" not in text
    assert gib(2**30) == "1.00 GiB" and gib(2**20) == "1.00 MiB"
