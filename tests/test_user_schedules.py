"""Schedules of users: what becomes of a file, what it costs, how it fits a run, and that it trains the same model.

Nothing here trusts the packer: orders are made in `orders.py`, tables are read cell by cell, and their numbers come from
`test_schedules.interpret`, an executor on integers.
"""

import dataclasses
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders import GOOD, ODD, Orders, Work, as_lists, megatron_1f1b, megatron_interleaved, one_a_slot, random_orders
from parity import Row, assert_same, cached_run, config_of, run
from test_schedules import direct, interpret, legal

from jaxmeg.config import Config, resolve
from jaxmeg.journal import RunError
from jaxmeg.pipeline import check
from jaxmeg.pipeline.notation import UserSchedule
from jaxmeg.pipeline.schedules import Table, make_table, segments, simulate
from jaxmeg.pipeline.user import MOST_LOOPS, Cost, read_schedule, schedule_problems, user_table, write_schedule
from jaxmeg.setup import build
from jaxmeg.validate.check import bubble_line, problems


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    def write(text: str, name: str = "my.csv") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path
    return write


# ---------------------------------------------------------------- what a table does, read cell by cell
def operations(table: Table) -> list[list[tuple[int, Work]]]:
    """[stage]: (tick, operation) in the order in which the executor runs them."""
    found: list[list[tuple[int, Work]]] = [[] for _ in range(table.num_stages)]
    for tick, work in enumerate(table.kinds):
        for kind in (k for k in "FB" if k in work):
            ok, chunk, mb = (table.rows[f"{kind.lower()}_{name}"][tick] for name in ("ok", "chunk", "mb"))
            for s in range(table.num_stages):
                if ok[s]:
                    found[s].append((tick, (kind, chunk[s] * table.num_stages + s, mb[s])))
    return found


def check_order(table: Table, orders: Orders, exact: bool) -> None:
    """The operations of the orders, each after its input; forwards in order, backwards in order, no backward earlier than listed."""
    done, last = operations(table), table.num_stages * table.num_chunks - 1
    at = {op: tick for stage in done for tick, op in stage}
    for stage, order in zip(done, orders, strict=True):
        ran = [op for _, op in stage]
        assert [op for op in ran if op[0] == "F"] == [op for op in order if op[0] == "F"]
        assert [op for op in ran if op[0] == "B"] == [op for op in order if op[0] == "B"]
        assert not exact or ran == order
        for i, op in enumerate(ran):
            if op[0] == "B":
                listed_before = {other for other in order[: order.index(op)] if other[0] == "F"}
                assert listed_before <= set(ran[:i])
    for (kind, v, m), tick in at.items():
        if kind == "F":
            assert v == 0 or tick > at["F", v - 1, m]
        else:
            assert tick >= at["F", v, m] if v == last else tick > at["B", v + 1, m]


def peak_of(order: list[Work]) -> int:
    live = [sum(1 if kind == "F" else -1 for kind, _, _ in order[:i]) for i in range(len(order) + 1)]
    return max(live)


def read(path: Path) -> tuple[UserSchedule, Table, Cost]:
    schedule = read_schedule(path)
    return (schedule, *user_table(schedule))


# ---------------------------------------------------------------- files of the named schedules
NAMED = [
    (name, P, V, M)
    for name in ("gpipe", "1f1b", "interleaved")
    for P in (2, 3, 4)
    for V in (1, 2, 3)
    for M in (1, 2, 5, 8, 14)
    if legal(name, V)
]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_named_schedules_written_and_read_back(name: str, tmp_path: Path) -> None:
    for case in (case for case in NAMED if case[0] == name):
        table = make_table(*case)
        write_schedule(table, tmp_path / "out.csv")
        schedule, again, cost = read(tmp_path / "out.csv")
        assert (schedule.num_stages, schedule.num_chunks, schedule.num_microbatches) == case[1:]
        one, two = simulate(table), simulate(again)
        assert one.time == pytest.approx(two.time) == pytest.approx(float(cost.time)), case
        assert one.peak_live == two.peak_live == cost.peak_live, case
        assert cost.packing.endswith("rows run as they are written"), case
        assert interpret(again) == direct(again), case
        if name != "gpipe":
            assert cost.time == cost.named_time, case


# ---------------------------------------------------------------- lists of operations
@pytest.mark.parametrize(("P", "M"), [(2, 1), (2, 8), (3, 5), (4, 3), (4, 16), (8, 32)])
def test_megatrons_1f1b_becomes_1f1b(P: int, M: int, save: Callable[..., Path]) -> None:
    orders = megatron_1f1b(P, M)
    assert max(map(peak_of, orders)) == min(P, M)
    _, table, cost = read(save(as_lists(orders, 1), "my.txt"))
    check_order(table, orders, exact=False)
    assert interpret(table) == direct(table)
    assert cost.time == 3 * (M + P - 1) == cost.named_time
    assert (cost.peak_live, cost.bubble) == (min(M, 2 * P - 1), Fraction(P - 1, M + P - 1))
    if M >= 2 * P:
        assert f"at most {P - 1} of the backwards" in cost.packing
        assert f"live pairs {2 * P - 1} instead of {P}" in cost.packing


@pytest.mark.parametrize(("P", "V", "M"), [(2, 2, 4), (2, 3, 2), (4, 2, 8), (4, 4, 16), (8, 2, 16)])
def test_megatrons_interleaved_order_is_kept(P: int, V: int, M: int, save: Callable[..., Path]) -> None:
    orders = megatron_interleaved(P, V, M)
    _, table, cost = read(save(as_lists(orders, V), "my.txt"))
    check_order(table, orders, exact=True)
    assert interpret(table) == direct(table)
    assert cost.time == 3 * M + Fraction(3 * (P - 1), V)
    assert cost.peak_live == max(map(peak_of, orders)) == min(P * V + P - 1, M * V)


@pytest.mark.parametrize(("P", "M", "ratio"), [(2, 4, 1.53), (4, 16, 1.77), (4, 32, 1.88), (8, 32, 1.79)])
def test_one_operation_a_slot_is_packed(P: int, M: int, ratio: float, save: Callable[..., Path]) -> None:
    """As other tools print 1F1B: run as it stands, a row would take the time of both directions."""
    orders = megatron_1f1b(P, M)
    text = one_a_slot(orders, 1)
    rows = [row.split(",") for row in text.splitlines()]
    slow = sum(any("F" in cell for cell in row) + 2 * any("B" in cell for cell in row) for row in rows)
    _, table, cost = read(save(text))
    check_order(table, orders, exact=False)
    assert cost.time == 3 * (M + P - 1)
    assert slow / float(cost.time) == pytest.approx(ratio, abs=0.005)
    assert cost.packing.startswith(f"{len(rows)} rows that take {slow} as they are written, re-packed into {cost.ticks} ticks")


SIZES = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 8))


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(SIZES, st.integers(0, 2**32 - 1))
def test_any_order_that_can_run_does(tmp_path_factory: pytest.TempPathFactory, sizes: tuple[int, int, int], seed: int) -> None:
    P, V, M = sizes
    orders = random_orders(P, V, M, random.Random(seed))
    path = tmp_path_factory.getbasetemp() / "random.txt"
    path.write_text(as_lists(orders, V))
    schedule, table, cost = read(path)
    assert [list(order) for order in schedule.orders] == orders
    check_order(table, orders, exact=False)
    assert interpret(table) == direct(table)
    assert cost.loops == sum(len(segment.runs) for segment in segments(table.kinds)) <= MOST_LOOPS
    # rows for ticks: their order is kept to the letter, and no tick is lost against a greedy executor
    text = one_a_slot(orders, V, together=True)
    path = path.with_suffix(".csv")
    path.write_text(text)
    _, table, cost = read(path)
    assert interpret(table) == direct(table)
    pairs = any(" " in cell for row in text.splitlines() for cell in row.split(","))
    check_order(table, orders, exact=pairs)
    assert cost.ticks <= len(text.splitlines())
    assert not pairs or cost.packing == f"{cost.ticks} rows run as they are written"
    assert not pairs or cost.peak_live == max(map(peak_of, orders))


def test_idle_rows_are_left_out_and_rows_out_of_order_are_only_an_order(save: Callable[..., Path]) -> None:
    _, _, cost = read(save("F0,\n,\nF1,F0 B0\n,\nB0,F1 B1\nB1,\n"))
    assert (cost.ticks, cost.packing) == (4, "4 rows run as they are written")
    _, table, cost = read(save("F0,F0\nF1 B0,F1 B0\nB1,B1\n"))
    assert cost.packing.endswith("they can't run as they are written: line 1, stage 1: F0 needs stage 0's F0 in an earlier row")
    check_order(table, [[(kind, s, m) for kind in "FB" for m in (0, 1)] for s in (0, 1)], exact=True)


def test_the_cost_of_an_odd_schedule(save: Callable[..., Path]) -> None:
    rows = [row.split(",") for row in ODD.splitlines()[2:]]
    by_hand = Fraction(sum(any("F" in cell for cell in row) + 2 * any("B" in cell for cell in row) for row in rows), 2)
    _, table, cost = read(save(ODD))
    assert (by_hand, cost.named_time, cost.named) == (16, Fraction(27, 2), "interleaved")
    assert cost.time <= by_hand and cost.bubble == 1 - 12 / cost.time
    assert cost.ring_slots - cost.peak_live in (0, 1)
    assert set(cost.lines()) == {"packing", "time", "memory", "program"}
    assert interpret(table) == direct(table)


def test_a_backward_bubble_reads_real_residuals(save: Callable[..., Path]) -> None:
    """All residuals of stage 0 are used up while the other stage still runs forwards and backwards: rubbish must not end up in
    the slot that the bubbles' backwards read."""
    text = "F0,\n,F0 B0\nB0,\nF1,\n,F1 B1\nB1,\nF2 ,\nF3,F2\n,F3 B2\nB2,B3\nB3,\n"
    _, table, _ = read(save(text))
    assert interpret(table) == direct(table)


def test_irregular_ticks_are_merged_or_refused(save: Callable[..., Path]) -> None:
    """The program stays small: bounded loops, by idle work if need be; what can't be merged is refused."""
    fine = read(save(as_lists(random_orders(4, 2, 64, random.Random(1)), 2), "a.txt"))[2]
    merged = read(save(as_lists(random_orders(4, 2, 96, random.Random(1)), 2), "b.txt"))[2]
    assert "loops became" not in fine.packing and fine.loops <= MOST_LOOPS
    assert "loops became" in merged.packing and merged.loops <= MOST_LOOPS
    lines = schedule_problems(save(as_lists(random_orders(4, 2, 256, random.Random(1)), 2), "c.txt"))
    assert len(lines) == 1 and f"at most {MOST_LOOPS} loops are compiled" in lines[0]
    small, large = (read(save(as_lists(megatron_interleaved(4, 2, M), 2), "d.txt"))[2].loops for M in (16, 128))
    assert small == large <= 8


# ---------------------------------------------------------------- the run's config
def make(path: Path, **changes: Any) -> Config:
    config = config_of(Row("pp=2", schedule=str(path)))
    for key, value in changes.items():
        section, _, name = key.partition("_")
        config = dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{name: value})})
    return config


def test_sizes_and_bubble_come_from_the_file(save: Callable[..., Path]) -> None:
    path = save(ODD)
    config = make(path)
    assert problems(config, 2) == []
    sizes = resolve(config, 2)
    assert (sizes.chunks, sizes.num_microbatches, sizes.microbatch, sizes.layer_split) == (2, 4, 4, (1, 1, 1, 1))
    cost = user_table(read_schedule(path))[1]
    assert sizes.bubble == cost.bubble
    assert bubble_line(sizes) == f"predicted bubble {cost.bubble} = {float(cost.bubble):.1%}"
    setup = build(config, jax.devices()[:2])
    assert setup.user_schedule is not None
    assert (setup.table.name, setup.table.num_microbatches) == ("my.csv", 4)


@pytest.mark.parametrize(
    ("changes", "num_devices", "line"),
    [
        ({"mesh_pp": 4}, 4, "pipeline.schedule=PATH has 2 stages and mesh.pp=4: use pp 2, or a schedule of 4 stages"),
        ({"pipeline_chunks": 1}, 2, "pipeline.chunks=1 does not fit pipeline.schedule=PATH, which has 2: leave chunks out"),
        (
            {"pipeline_microbatch": 2}, 2,
            "pipeline.schedule=PATH has 4 microbatches, and pipeline.microbatch=2 makes 8 of the 16 rows of a data-parallel rank: "
            "use microbatch 4 or global_batch 8",
        ),
        (
            {"data_global_batch": 18, "pipeline_microbatch": 3}, 2,
            "pipeline.schedule=PATH has 4 microbatches, and pipeline.microbatch=3 makes 6 of the 18 rows of a data-parallel rank: "
            "use global_batch 12",
        ),
        (
            {"data_global_batch": 18}, 2,
            "pipeline.schedule=PATH has 4 microbatches, which do not divide the 18 rows of a data-parallel rank: use global_batch 16 or 20",
        ),
        (
            {"model_num_layers": 3}, 2,
            "model.num_layers=3 is fewer than mesh.pp=2 stages x 2 chunks = 4 pieces: use num_layers 4 or more, or another schedule",
        ),
        ({"mesh_pp": 1}, 1, "pipeline.schedule=PATH has no effect with mesh.pp=1: leave schedule out, or use pp 2 or more"),
    ],
)
def test_a_file_that_does_not_fit_the_run(changes: dict[str, Any], num_devices: int, line: str, save: Callable[..., Path]) -> None:
    path = save(ODD)
    found = problems(make(path, **changes), num_devices)
    assert any(problem.startswith(line.replace("PATH", str(path))) for problem in found), found


def test_what_is_wrong_in_a_file_is_listed_with_the_key(save: Callable[..., Path]) -> None:
    path = save(GOOD.replace("F1 B0", "F1 F1 B0"))
    assert problems(make(path), 2) == [f"pipeline.schedule={path}: line 1, stage 0: F1 a second time, after line 1: leave one out"]
    assert any("a .csv or .txt file" in problem for problem in problems(make(Path("my.tsv")), 2))


# ---------------------------------------------------------------- the same model
def test_an_odd_schedule_trains_the_same_model(save: Callable[..., Path]) -> None:
    assert_same(run(Row("pp=2", schedule=str(save(ODD)))), cached_run(Row()))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the check prints."""
    printed: list[str] = []
    monkeypatch.setattr(check, "console", SimpleNamespace(print=lambda text, **_: printed.append(text)))
    return printed


def test_the_gradient_check(save: Callable[..., Path], lines: list[str]) -> None:
    """It passes, then a slot of residuals is corrupted, and it names a leaf that a wrong gradient reached."""
    setup = build(make(save(GOOD)), jax.devices()[:2])
    check.check_schedule(setup)
    assert [line.split()[0] for line in lines] == ["schedule", "time", "memory", "program", "check"]
    assert "equal plain accumulation's" in lines[-1]

    slots = [list(row) for row in setup.table.rows["b_slot"]]
    tick = max(t for t, row in enumerate(setup.table.rows["b_ok"]) if row[1])
    slots[tick][1] = (slots[tick][1] + 1) % setup.table.ring_slots
    broken = dataclasses.replace(setup, table=dataclasses.replace(setup.table, rows={**setup.table.rows, "b_slot": slots}))
    with pytest.raises(RunError, match=r"my\.csv: on a toy model the loss is off by .* the gradient of \S+ by .* nothing was trained"):
        check.check_schedule(broken)
