"""Schedules: every small table replays, costs what the formulas say, and no wrong entry gets past the simulator.

Two proofs that do not trust the simulator: completeness is counted from the table alone, and a table that survives a
random mutation must give the same numbers as before in `interpret`, an executor on integers that shares no code.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest

from jaxmeg.pipeline.schedules import (
    COLUMNS,
    KINDS,
    NAMES,
    SHARED_COLUMNS,
    ScheduleError,
    Table,
    expected_bubble,
    expected_peak_live,
    group_sizes,
    make_table,
    place_layers,
    segments,
    simulate,
)


def legal(name: str, num_chunks: int) -> bool:
    return {"1f1b": num_chunks == 1, "interleaved": num_chunks > 1}.get(name, True)


def chunked(num_chunks: int) -> str:
    return "1f1b" if num_chunks == 1 else "interleaved"


# ---------------------------------------------------------------- every small table
@pytest.mark.parametrize("P", range(1, 9))
@pytest.mark.parametrize("name", NAMES)
def test_every_table_replays_and_meets_the_formulas(name: str, P: int) -> None:
    for V in (chunks for chunks in range(1, 5) if legal(name, chunks)):
        for M in (*range(1, 17), 8 * P):
            case = (name, P, V, M)
            table = make_table(*case)
            report = simulate(table)
            check_complete(table)
            assert report.bubble == pytest.approx(expected_bubble(*case)), case
            assert report.peak_live == expected_peak_live(*case), case
            assert report.time == pytest.approx(report.bubble + M * (1 if name == "forward" else 3)), case
            check_slots(table, report.peak_live)


def check_complete(table: Table) -> None:
    """Every virtual stage sees every microbatch once forward, once backward; each is embedded and scored once."""
    P, V, M = table.num_stages, table.num_chunks, table.num_microbatches
    training = table.name != "forward"
    done: Counter[tuple[str, int, int]] = Counter()
    for tick, kind in enumerate(table.kinds):
        at = {column: table.rows[column][tick] for column in COLUMNS}
        for letter, prefix in (("F", "f"), ("B", "b")):
            for s in range(P):
                if letter in kind and at[f"{prefix}_ok"][s]:
                    done[letter, at[f"{prefix}_chunk"][s] * P + s, at[f"{prefix}_mb"][s]] += 1
        for letter, prefix in (("E", "e"), ("H", "h"), ("G", "g")):
            if letter in kind and at[f"{prefix}_ok"][0]:
                done[letter, 0, at[f"{prefix}_mb"][0]] += 1
        for column in SHARED_COLUMNS:
            assert len(set(at[column])) == 1, (table.name, P, V, M, tick, column)
    wanted = {("F", v, m) for v in range(P * V) for m in range(M)} | {(k, 0, m) for k in "EH" for m in range(M)}
    if training:
        wanted |= {("B", v, m) for v in range(P * V) for m in range(M)} | {("G", 0, m) for m in range(M)}
    assert done == Counter(wanted)
    assert training or not set("BG") & set("".join(table.kinds))


def check_slots(table: Table, peak_live: int) -> None:
    case = (table.name, table.num_stages, table.num_chunks, table.num_microbatches)
    if table.name == "forward":
        assert table.ring_slots == table.backward_slots == 0, case
    else:
        assert 0 <= table.ring_slots - peak_live <= 1, case  # one more for the results of bubbles
    if table.num_microbatches % table.num_stages == 0:
        assert table.forward_slots <= 2, case
        assert table.backward_slots <= (table.num_microbatches if table.name == "gpipe" else 2) + 1, case
        assert table.name == "gpipe" or table.backward_slots <= 2, case


@pytest.mark.parametrize(("P", "V"), [(1, 1), (2, 1), (2, 3), (3, 2), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2)])
def test_1f1b_memory_does_not_grow_with_microbatches(P: int, V: int) -> None:
    for M in range(2 * P, 65):
        table = make_table(chunked(V), P, V, M)
        largest = max(group_sizes(P, M))
        assert table.ring_slots == min(M * V, P * V + P - 1 + (V - 1) * (largest - P)), (P, V, M)
        assert P <= largest < 2 * P or P == largest == 1
        if M % P == 0:
            assert table.ring_slots == min(M * V, P * V + P - 1)
            assert max(table.forward_slots, table.backward_slots) == 2
        else:
            assert max(table.forward_slots, table.backward_slots) <= V + 1 + (V > 1) * (largest - P), (P, V, M)


def test_the_figures_of_the_documentation() -> None:
    report = simulate(make_table("1f1b", 4, 1, 8))
    assert report.bubble_fraction == pytest.approx(3 / 11)
    assert (report.time, report.bubble, report.peak_live) == (33, 9, 7)
    assert simulate(make_table("interleaved", 4, 2, 16)).bubble == pytest.approx(4.5)
    assert simulate(make_table("interleaved", 4, 2, 3)).bubble == pytest.approx(6.0)  # M < P
    assert simulate(make_table("1f1b", 4, 1, 8), forward_cost=2, backward_cost=5).bubble == pytest.approx(21)
    for M, live in ((16, 11), (14, 12), (7, 14)):
        assert expected_peak_live("interleaved", 4, 2, M) == live


@pytest.mark.parametrize("name", NAMES)
def test_the_program_does_not_grow_with_microbatches(name: str) -> None:
    chunks = 2 if name == "interleaved" else 1
    small, large = (segments(make_table(name, 4, chunks, M).kinds) for M in (16, 64))
    shape = [tuple(kind for kind, _ in segment.runs) for segment in small]
    assert shape == [tuple(kind for kind, _ in segment.runs) for segment in large]
    assert {kind for kinds in shape for kind in kinds} == set(make_table(name, 4, chunks, 8).kinds)
    assert len(small) <= 6 and sum(map(len, shape)) <= 7
    # when P does not divide M, and with more chunks, there is still a bound that M does not move
    for V in (1,) if name == "1f1b" else (2, 4):
        for M in (*range(17, 21), *range(61, 69)):
            num_runs = sum(len(segment.runs) for segment in segments(make_table(name, 4, V, M).kinds))
            assert num_runs <= (20 if name == "gpipe" else 11), (V, M)


def test_ticks_are_of_few_kinds() -> None:
    assert set(make_table("1f1b", 4, 1, 13).kinds) == {"E", "EF", "EFHBG", "BG", "G"}
    for M in (13, 14, 16, 22, 23):  # 14, 22, 23: two groups of more than P follow each other
        assert set(make_table("interleaved", 4, 3, M).kinds) == {"E", "EF", "EFHBG", "FB", "BG", "G"}, M
    assert set(make_table("gpipe", 4, 1, 13).kinds) == {"E", "EF", "EFH", "BG", "G"}
    assert set(make_table("forward", 4, 1, 13).kinds) == {"E", "EF", "EFH"}
    assert all("".join(k for k in KINDS if k in kind) == kind for kind in make_table("gpipe", 4, 2, 14).kinds)


@pytest.mark.parametrize(("P", "V", "M"), [(1, 1, 3), (1, 3, 5), (4, 1, 8), (4, 2, 14), (8, 3, 5), (3, 2, 1)])
def test_segments_unfold_to_the_ticks(P: int, V: int, M: int) -> None:
    for name in filter(lambda name: legal(name, V), NAMES):
        kinds = make_table(name, P, V, M).kinds
        unfolded: list[str] = []
        for segment in segments(kinds):
            unfolded += segment.repeats * [kind for kind, ticks in segment.runs for _ in range(ticks)]
        assert tuple(unfolded) == kinds


@pytest.mark.parametrize(("P", "V", "M"), [(4, 1, 8), (4, 2, 8), (4, 2, 14), (4, 3, 2), (1, 1, 5), (1, 2, 5)])
def test_forward_ticks(P: int, V: int, M: int) -> None:
    ticks = make_table("forward", P, V, M).kinds
    assert len(ticks) == 1 + (M * V + P - 1 if M >= P else P * V + M - 1)


# ---------------------------------------------------------------- mutations
PRIME = 1_000_003


def interpret(table: Table) -> list[int]:
    """Loss and all gradients of a toy model y = w[v]*x + m + 1, modulo a prime, by the rules of the executor.

    None stands for rubbish: an unwritten slot, the result of a bubble. Work that counts may not touch it.
    """
    P, V, M = table.num_stages, table.num_chunks, table.num_microbatches
    weight = [7 * v + 3 for v in range(P * V)]
    sizes = (table.forward_slots, table.backward_slots, table.ring_slots)
    inbox, grads, ring = ([cast("list[Any]", [None] * size) for _ in range(P)] for size in sizes)
    grad, embed_grad, loss = [0] * (P * V), [0] * M, 0
    for tick, kind in enumerate(table.kinds):
        rows = [{column: table.rows[column][tick][s] for column in COLUMNS} for s in range(P)]
        y, dx = (cast("list[Any]", [None] * P) for _ in range(2))
        for s, r in enumerate(rows):
            if "F" in kind:
                x: Any = inbox[s][r["f_src"]] if r["f_ok"] else None
                if r["f_ok"]:
                    y[s] = (weight[r["f_chunk"] * P + s] * x + r["f_mb"] + 1) % PRIME
                if ring[s]:
                    ring[s][r["f_slot"]] = x
        if "H" in kind:
            loss = (loss + (rows[0]["h_mb"] + 5) * y[-1]) % PRIME
            for s, r in enumerate(rows if table.backward_slots else []):
                grads[s][r["h_dst"]] = r["h_mb"] + 5 if s == P - 1 else None
        if "G" in kind and rows[-1]["g_ok"]:
            m = rows[-1]["g_mb"]
            embed_grad[m] = (embed_grad[m] + grads[-1][rows[-1]["g_src"]]) % PRIME
        for s, r in enumerate(rows):
            if "B" in kind:
                dy = grads[s][r["b_src"]] if r["b_ok"] else 0
                v = r["b_chunk"] * P + s
                grad[v] = (grad[v] + dy * ring[s][r["b_slot"]]) % PRIME  # a bubble adds 0 * residuals: no rubbish there
                dx[s] = dy * weight[v] % PRIME if r["b_ok"] else None
        for s, r in enumerate(rows):
            if "F" in kind:
                inbox[s][r["xf_dst"]] = y[s - 1]
            if "E" in kind:
                inbox[s][r["e_dst"]] = 11 * r["e_mb"] + 2 if s == 0 and r["e_ok"] else None
            if "B" in kind:
                grads[s][r["xb_dst"]] = dx[(s + 1) % P]
    return [loss, *grad, *embed_grad]


def direct(table: Table) -> list[int]:
    """What `interpret` must find, without a pipeline: microbatch by microbatch."""
    num = table.num_stages * table.num_chunks
    weight, grad, embed_grad, loss = [7 * v + 3 for v in range(num)], [0] * num, [], 0
    for m in range(table.num_microbatches):
        inputs = [11 * m + 2]
        for v in range(num):
            inputs.append((weight[v] * inputs[-1] + m + 1) % PRIME)
        loss, dy = (loss + (m + 5) * inputs[-1]) % PRIME, m + 5
        for v in reversed(range(num)):
            grad[v] = (grad[v] + dy * inputs[v]) % PRIME
            dy = dy * weight[v] % PRIME
        embed_grad.append(dy)
    return [loss, *(grad + embed_grad if table.name != "forward" else [0] * (num + table.num_microbatches))]


def kind_of(column: str) -> str:
    return {"xf_dst": "F", "xb_dst": "B"}.get(column, column[0].upper())


def is_read(table: Table, column: str, tick: int, stage: int) -> bool:
    """Does the executor look at the entry? G's source only on the last stage."""
    return kind_of(column) in table.kinds[tick] and (column != "g_src" or stage == table.num_stages - 1)


def belongs_to_a_bubble(table: Table, column: str, tick: int, stage: int) -> bool:
    """Is the entry the choice of a free slot for rubbish, or of what a bubble computes with?"""
    P, rows = table.num_stages, table.rows

    def at(column: str, stage: int) -> int:
        return rows[column][tick][stage % P]

    if column == "xf_dst":  # nothing arrives from a bubble, nor from the last virtual stage
        return not at("f_ok", stage - 1) or (stage == 0 and at("f_chunk", -1) == table.num_chunks - 1)
    if column == "xb_dst":  # from virtual stage 0 something arrives: for G
        return not at("b_ok", stage + 1)
    if column in ("e_dst", "h_dst"):
        return stage != (0 if column == "e_dst" else P - 1) or not at(column[0] + "_ok", stage)
    return not column.endswith("ok") and not at(column[0] + "_ok", stage)


CASES = [("gpipe", 4, 1, 12), ("gpipe", 3, 2, 13), ("1f1b", 4, 1, 16), ("1f1b", 2, 1, 9), ("1f1b", 4, 1, 2)]
CASES += [("interleaved", 4, 2, 16), ("interleaved", 4, 2, 14), ("interleaved", 3, 3, 13), ("interleaved", 4, 2, 3)]
CASES += [("forward", 4, 2, 12), ("forward", 3, 1, 9)]


@pytest.mark.parametrize("case", [*CASES, ("1f1b", 1, 1, 4), ("gpipe", 1, 3, 2), ("interleaved", 8, 4, 32)])
def test_the_tables_compute_the_model(case: tuple[str, int, int, int]) -> None:
    table = make_table(*case)
    assert interpret(table) == direct(table)


def bound_of(table: Table, column: str) -> int:
    """The entries of a column are below this."""
    bounds = {"ok": 2, "chunk": table.num_chunks, "mb": table.num_microbatches, "slot": table.ring_slots}
    inbox = table.forward_slots if column in ("f_src", "xf_dst", "e_dst") else table.backward_slots
    return bounds.get(column.split("_")[1], inbox)


def mutate(table: Table, rng: random.Random) -> tuple[Table, str, int, int]:
    """An entry that the executor reads gets another value; in a shared column, half the time on all stages."""
    while True:
        column, tick, stage = rng.choice(COLUMNS), rng.randrange(len(table.kinds)), rng.randrange(table.num_stages)
        old = table.rows[column][tick][stage]
        if is_read(table, column, tick, stage) and bound_of(table, column) > 1:
            rows = {**table.rows, column: [list(row) for row in table.rows[column]]}
            new = rng.choice([x for x in range(bound_of(table, column)) if x != old])
            everywhere = column in SHARED_COLUMNS and rng.random() < 0.5
            for s in range(table.num_stages) if everywhere else [stage]:
                rows[column][tick][s] = new
            return replace(table, rows=rows), column, tick, stage


def test_random_mutations_are_caught_or_harmless() -> None:
    rng, caught, harmless = random.Random(0), Counter(), Counter()
    for case in CASES:
        table = make_table(*case)
        truth = interpret(table)
        for _ in range(6 * len(table.kinds)):
            mutated, column, tick, stage = mutate(table, rng)
            try:
                simulate(mutated)
            except ScheduleError as error:
                assert "tick " in str(error) and "stage " in str(error) and "expected" in str(error)
                caught[column] += 1
                continue
            assert belongs_to_a_bubble(table, column, tick, stage), (case, column, tick, stage)
            assert interpret(mutated) == truth, (case, column, tick, stage)
            harmless[column] += 1
    total = caught.total() + harmless.total()
    print(f"{total} mutations: {caught.total()} caught, {harmless.total()} of bubbles and harmless {dict(harmless)}")
    assert total >= 1500
    assert caught.total() > 0.85 * total
    assert set(caught) == set(COLUMNS)


@pytest.mark.parametrize("case", [("interleaved", 2, 2, 4), ("1f1b", 3, 1, 4), ("gpipe", 2, 1, 3), CASES[-1]])
def test_no_mutation_of_real_work_survives(case: tuple[str, int, int, int]) -> None:
    """Exhaustively: any other value for an entry of real work (in a shared column, on all stages) is caught."""
    table, count = make_table(*case), 0
    for column, tick in product(COLUMNS, range(len(table.kinds))):
        for stage in range(table.num_stages):
            if not is_read(table, column, tick, stage) or belongs_to_a_bubble(table, column, tick, stage):
                continue
            row = table.rows[column][tick]
            for new in set(range(bound_of(table, column))) - {row[stage]}:
                mutated = [new if s == stage or column in SHARED_COLUMNS else row[s] for s in range(len(row))]
                table.rows[column][tick] = mutated
                with pytest.raises(ScheduleError):
                    simulate(table)
                count += 1
            table.rows[column][tick] = row
    simulate(table)
    assert count > 100


def first(table: Table, column: str, stage: int, after: int = 0) -> int:
    return next(t for t in range(after, len(table.kinds)) if table.rows[column][t][stage])


def swap_two_ring_slots(table: Table) -> str:
    slots = table.rows["b_slot"]
    one = first(table, "b_ok", 1)
    slots[one][1], slots[one + 1][1] = slots[one + 1][1], slots[one][1]
    return rf"tick {one}, stage 1: expected residuals of virtual stage \d microbatch 0, found residuals"


def drop_a_backward(table: Table) -> str:
    tick = first(table, "b_ok", 2, after=first(table, "b_ok", 2) + 1)
    table.rows["b_ok"][tick][2] = 0
    return rf"tick {tick + 1}, stage 2: expected ring slot \d free for a forward, found residuals .* microbatch 1"


def drop_the_last_backward(table: Table) -> str:
    tick = max(t for t, row in enumerate(table.rows["b_ok"]) if row[0])
    table.rows["b_ok"][tick][0] = 0
    return rf"tick {tick + 1}, stage 3: expected gradient of virtual stage -1 microbatch \d"


def disagree_on_the_head(table: Table) -> str:
    tick = first(table, "h_mb", 0)
    table.rows["h_mb"][tick][2] += 1
    return f"tick {tick}, stage 2: expected h_mb=1 as on stage 0, found 2"


def overwrite_live_residuals(table: Table) -> str:
    tick = first(table, "f_ok", 0)
    table.rows["f_slot"][tick + 1][0] = table.rows["f_slot"][tick][0]
    return f"tick {tick + 1}, stage 0: expected ring slot 0 free for a forward, found residuals .* microbatch 0"


def embed_too_late(table: Table) -> str:
    tick = first(table, "f_ok", 0)
    table.rows["e_mb"][tick - 1] = [1] * 4
    return f"tick {tick}, stage 0: expected input of virtual stage 0 microbatch 0, found input .* microbatch 1"


def idle_head(table: Table) -> str:
    tick = first(table, "h_ok", 0)
    table.rows["h_ok"][tick] = [0] * 4
    return f"tick {tick}, stage 3: expected h_ok=1"


def skip_the_last_embedding_gradient(table: Table) -> str:
    tick = len(table.kinds) - 1
    table.rows["g_ok"][tick] = [0] * 4
    return f"tick {tick}, stage 0: expected G of virtual stage 0 microbatch 7 in some tick, found the end"


def unwritten_residuals_in_a_bubble(table: Table) -> str:
    tick = first(table, "h_ok", 0)  # the first backward tick: stage 0 has none yet
    unwritten = set(range(table.ring_slots)) - {table.rows["f_slot"][t][0] for t in range(1, tick + 1)}
    table.rows["b_slot"][tick][0] = max(unwritten)
    return f"tick {tick}, stage 0: expected residuals for a bubble in ring slot {max(unwritten)}, found nothing"


def out_of_range(table: Table) -> str:
    table.rows["xf_dst"][3][1] = 9
    return r"tick 3, stage 1: expected xf_dst in 0\.\.1, found 9"


def unknown_kind(table: Table) -> str:
    object.__setattr__(table, "kinds", ("X", *table.kinds[1:]))
    return "tick 0, stage 0: expected kinds of work of EFHBG, found X"


@pytest.mark.parametrize("V", [1, 2])
@pytest.mark.parametrize(
    "corrupt",
    [
        swap_two_ring_slots,
        drop_a_backward,
        drop_the_last_backward,
        disagree_on_the_head,
        overwrite_live_residuals,
        embed_too_late,
        idle_head,
        skip_the_last_embedding_gradient,
        unwritten_residuals_in_a_bubble,
        out_of_range,
        unknown_kind,
    ],
)
def test_a_targeted_mutation_is_named(corrupt: Callable[[Table], str], V: int) -> None:
    table = make_table(chunked(V), 4, V, 8)
    message = corrupt(table)
    with pytest.raises(ScheduleError, match=message):
        simulate(table)


# ---------------------------------------------------------------- arguments, layers
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 4, 2, 8), "schedule=1f1b takes one chunk a stage, not num_chunks=2: use 1, or schedule interleaved"),
        (("interleaved", 4, 1, 8), "takes 2 chunks a stage or more, not num_chunks=1: use schedule 1f1b"),
        (("gpip", 4, 1, 8), "schedule=gpip .*gpipe"),
        (("gpipe", 0, 1, 8), "num_stages=0: must be at least 1"),
        (("gpipe", 4, 1, 0), "num_microbatches=0: must be at least 1"),
    ],
)
def test_arguments_are_checked(arguments: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_table(*arguments)


def test_place_layers() -> None:
    assert place_layers(4, 2, 2).rows == (0, 2, 1, 3)  # virtual stages 0..3 are (stage, chunk) 00, 10, 01, 11
    six = place_layers(6, 4, 1)
    assert (six.counts, six.layers_per_chunk, six.num_rows) == (((2,), (2,), (1,), (1,)), 2, 8)
    assert six.rows == (0, 1, 2, 3, 4, 6)
    assert place_layers(30, 4, 1).counts == ((8,), (8,), (7,), (7,))
    assert place_layers(6, 4, 1).counts != place_layers(6, 2, 2).counts


def test_place_layers_keeps_every_layer_in_order() -> None:
    for P in range(1, 9):
        for V in range(1, 5):
            for L in range(P * V, 3 * P * V + 2):
                place = place_layers(L, P, V)
                assert len(place.rows) == len(set(place.rows)) == L == sum(map(sum, place.counts))
                assert max(place.rows) < place.num_rows == P * V * place.layers_per_chunk
                sizes = [place.counts[v % P][v // P] for v in range(P * V)]
                assert sorted(sizes, reverse=True) == sizes and sizes[0] - sizes[-1] <= 1
                chunks = [((v % P * V + v // P) * place.layers_per_chunk, sizes[v]) for v in range(P * V)]
                assert list(place.rows) == [start + i for start, size in chunks for i in range(size)]


def test_place_layers_refuses_empty_stages() -> None:
    with pytest.raises(ValueError, match=r"num_layers=3 .* 4 stages x 1 chunks = 4"):
        place_layers(3, 4, 1)
    with pytest.raises(ValueError, match=r"num_layers=7 .* 4 stages x 2 chunks = 8"):
        place_layers(7, 4, 2)
