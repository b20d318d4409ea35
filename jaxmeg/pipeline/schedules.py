"""Pipeline schedules are data: a table says what every stage does in every tick.

`make_table` writes the table of a named schedule, `fill_table` that of any plan; `simulate` replays it with labels for
arrays and refuses a table whose work would read or overwrite the wrong thing, `segments` folds its ticks into nested loops,
`place_layers` spreads layers.
Plain Python: nothing here knows arrays, devices or models. Reference: interleaved 1F1B, arXiv:2104.04473.

Each of P stages holds V chunks of the model. Chunk c of stage s is *virtual stage* v = c*P + s, and every one of M
microbatches visits v = 0, 1, .. P*V-1. A tick has four phases, in this order on all stages:
  FORWARD     F: forward of one chunk. Reads a slot of the forward inbox, keeps residuals in a slot of the ring.
  VOCABULARY  All stages together, on one microbatch. H: head and loss of what the last virtual stage has just computed;
              its gradient goes to the last stage's backward inbox. G: embedding gradient, from the input gradient of
              virtual stage 0, which has travelled on round the ring to the last stage's backward inbox.
  BACKWARD    B: backward of one chunk. Reads a slot of the backward inbox, and the ring slot of its forward.
  EXCHANGE    Results of the neighbours arrive in inbox slots, and on stage 0 a microbatch embedded by E.
A stage with nothing to do works all the same (a *bubble*), so nothing is conditional or masked: its result goes to a
slot that is free at that moment, and a bubble's backward gets a zero gradient and residuals that a real forward wrote.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby, product
from typing import NamedTuple

from jaxmeg.pipeline.ticks import KINDS, Phase, Plan, Slots, group_sizes, make_plan
from jaxmeg.wording import unknown_choice

NAMES = ("gpipe", "1f1b", "interleaved", "forward")
COLUMNS: tuple[str, ...] = (
    *("f_ok", "f_chunk", "f_mb", "f_src", "f_slot"),  # F: real?, chunk, microbatch, inbox slot read, ring slot written
    *("b_ok", "b_chunk", "b_mb", "b_src", "b_slot"),  # B: real?, chunk, microbatch, inbox slot read, ring slot read
    *("xf_dst", "xb_dst"),  # inbox slots in which the neighbours' forward and backward results arrive
    *("e_mb", "e_ok", "e_dst"),  # E: microbatch, real?, forward inbox slot written
    *("h_mb", "h_ok", "h_dst"),  # H: microbatch, real?, backward inbox slot written
    *("g_ok", "g_mb", "g_src"),  # G: real?, microbatch, backward inbox slot read
)
SHARED_COLUMNS = ("e_mb", "e_ok", "h_mb", "h_ok", "g_ok", "g_mb")  # equal on all stages: they do this work together


class ScheduleError(ValueError):
    """A table that would compute something else than the model; the message names tick and stage."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A schedule: `rows[column][tick][stage]`, and for every tick the kinds of work that all stages do in it."""

    name: str
    num_stages: int
    num_chunks: int
    num_microbatches: int
    rows: dict[str, list[list[int]]]
    kinds: tuple[str, ...]
    ring_slots: int  # residuals of one chunk of one microbatch each
    forward_slots: int  # inbox of activations
    backward_slots: int  # inbox of gradients of activations


def make_table(name: str, num_stages: int, num_chunks: int, num_microbatches: int) -> Table:
    """The table of a named schedule. Its first tick only embeds.

    Args:
        name: `gpipe` (all forwards, then all backwards), `1f1b` (one chunk a stage), `interleaved` (1F1B, more chunks),
            `forward` (evaluation, sampling: no B, G, ring, backward inbox; 1 + MV+P-1 ticks, 1 + PV+M-1 if M < P).

    Raises:
        ValueError: unknown name, a count below 1, or a number of chunks that the schedule does not take.
    """
    P, V, M = num_stages, num_chunks, num_microbatches
    if name not in NAMES:
        raise ValueError(unknown_choice("schedule", name, NAMES))
    sizes = {"num_stages": P, "num_chunks": V, "num_microbatches": M}
    if small := [f"{size}={number}" for size, number in sizes.items() if number < 1]:
        raise ValueError(f"{', '.join(small)}: must be at least 1")
    if name == "1f1b" and V > 1:
        raise ValueError(f"schedule=1f1b takes one chunk a stage, not num_chunks={V}: use 1, or schedule interleaved")
    if name == "interleaved" and V < 2:
        raise ValueError(f"schedule=interleaved takes 2 chunks a stage or more, not num_chunks={V}: use schedule 1f1b")
    return fill_table(name, make_plan(name, P, V, M), P, V, M)


def fill_table(name: str, plan: Plan, num_stages: int, num_chunks: int, num_microbatches: int) -> Table:
    """The table of a plan: what every stage reads and writes where."""
    P, V = num_stages, num_chunks
    rows = {column: [[0] * P for _ in plan.kinds] for column in COLUMNS}
    used = [_fill_stage(rows, plan, stage, P, P * V - 1) for stage in range(P)]
    ring, inbox, grads = (max(numbers) for numbers in zip(*used, strict=True))
    return Table(name=name, num_stages=P, num_chunks=V, num_microbatches=num_microbatches, rows=rows, kinds=plan.kinds,
                 ring_slots=ring, forward_slots=inbox, backward_slots=grads)


def _fill_stage(rows: dict[str, list[list[int]]], plan: Plan, stage: int, P: int, last: int) -> tuple[int, int, int]:
    """Writes one stage's entries; returns its slots of ring, forward inbox, backward inbox. `last`: a virtual stage."""
    F, VOCABULARY, B, X = Phase
    forward, backward, embed, head, embed_grad, kinds = plan
    mine = [(v, m) for v, m in forward if v % P == stage]
    # A forward reads what the virtual stage before sent, or what E wrote. Backwards likewise; G is virtual stage -1.
    sent = {(v, m): embed[m] if v == 0 else forward[v - 1, m] for v, m in mine}
    inbox = Slots((X.of(sent[w]), F.of(forward[w]), w) for w in mine)
    ring, grads = Slots([]), Slots([])
    if backward:
        sent = {(v, m): VOCABULARY.of(head[m]) if v == last else X.of(backward[v + 1, m]) for v, m in mine}
        uses = [(sent[w], B.of(backward[w]), w) for w in mine]
        if stage == P - 1:
            uses += [(X.of(backward[0, m]), VOCABULARY.of(tick), (-1, m)) for m, tick in embed_grad.items()]
        ring, grads = Slots((F.of(forward[w]), B.of(backward[w]), w) for w in mine), Slots(uses)

    forward_at = {(v % P, tick): (v, m) for (v, m), tick in forward.items()}  # (stage, tick) -> work
    backward_at = {(v % P, tick): (v, m) for (v, m), tick in backward.items()}
    embed_at, head_at, grad_at = ({tick: m for m, tick in ticks.items()} for ticks in (embed, head, embed_grad))
    newest = -1  # ring slot that a real forward wrote last: for backwards of bubbles, so forwards of bubbles leave it alone
    for tick, kind in enumerate(kinds):
        row: dict[str, int] = {}
        if work := forward_at.get((stage, tick)):
            newest = ring.of[work] if backward else 0
            row |= {"f_ok": 1, "f_chunk": work[0] // P, "f_mb": work[1], "f_src": inbox.of[work], "f_slot": newest}
        elif "F" in kind and backward:
            row["f_slot"] = ring.free(F.of(tick), besides=newest)
        if work := backward_at.get((stage, tick)):
            src, slot = grads.of[work], ring.of[work]
            row |= {"b_ok": 1, "b_chunk": work[0] // P, "b_mb": work[1], "b_src": src, "b_slot": slot}
        elif "B" in kind:
            row["b_slot"] = newest
        if "F" in kind:
            v, m = forward_at.get(((stage - 1) % P, tick), (last, 0))
            row["xf_dst"] = inbox.of[v + 1, m] if v < last else inbox.free(X.of(tick))
        if "B" in kind:
            v, m = backward_at.get(((stage + 1) % P, tick), (-1, 0))
            row["xb_dst"] = grads.of[v - 1, m] if v >= 0 else grads.free(X.of(tick))
        if "E" in kind:
            m = embed_at.get(tick)
            row |= {"e_ok": int(m is not None), "e_mb": m or 0}
            row["e_dst"] = inbox.of[0, m] if stage == 0 and m is not None else inbox.free(X.of(tick))
        if "H" in kind:
            row |= {"h_ok": 1, "h_mb": head_at[tick]}
            if backward:
                row["h_dst"] = grads.of[last, head_at[tick]] if stage == P - 1 else grads.free(VOCABULARY.of(tick))
        if "G" in kind:
            m = grad_at.get(tick)
            row |= {"g_ok": int(m is not None), "g_mb": m or 0}
            row["g_src"] = grads.of[-1, m] if stage == P - 1 and m is not None else 0
        for column, entry in row.items():
            rows[column][tick][stage] = entry
    return len(ring.uses), len(inbox.uses), len(grads.uses)


# ---------------------------------------------------------------- proof: replay a table with labels for arrays
@dataclass(frozen=True, kw_only=True)
class Report:
    """What a replay found. Times are of one stage, in the unit of the costs; vocabulary work is not counted."""

    time: float
    bubble: float  # part of `time` in which a stage does no real work
    bubble_fraction: float
    peak_live: int  # most (chunk, microbatch) pairs whose residuals a stage holds: V of them are a whole microbatch


class _Label(NamedTuple):
    what: str  # input (of a virtual stage), gradient (of its output), residuals
    v: int
    m: int

    def __str__(self) -> str:
        return f"{self.what} of virtual stage {self.v} microbatch {self.m}"


def simulate(table: Table, forward_cost: float = 1.0, backward_cost: float = 2.0) -> Report:
    """Replays a table as the executor runs it. The costs are the time of one microbatch on a whole stage.

    Raises:
        ScheduleError: an entry out of range; stages that disagree on vocabulary work; a read that finds something else
            than its work needs; residuals overwritten while needed; work done twice or never.
    """
    _check_entries(table)
    replay, time, trains = _Replay(table), 0.0, table.backward_slots > 0
    for tick, kind in enumerate(table.kinds):
        replay.run(tick, kind)
        time += (forward_cost * ("F" in kind) + backward_cost * ("B" in kind)) / table.num_chunks
    replay.check_complete("FHBG" if trains else "FH")
    bubble = time - table.num_microbatches * (forward_cost + backward_cost * trains)
    return Report(time=time, bubble=bubble, bubble_fraction=bubble / time, peak_live=replay.peak_live)


def _error(tick: int, stage: int, expected: object, found: object) -> ScheduleError:
    found = "nothing of use" if found is None else found
    return ScheduleError(f"tick {tick}, stage {stage}: expected {expected}, found {found}")


def _check_entries(table: Table) -> None:
    for tick, kind in enumerate(table.kinds):
        if not set(kind) <= set(KINDS):
            raise _error(tick, 0, f"kinds of work of {KINDS}", kind)
    bounds = {"ok": 2, "chunk": table.num_chunks, "mb": table.num_microbatches, "slot": max(table.ring_slots, 1)}
    for column in COLUMNS:
        inbox = table.forward_slots if column in ("f_src", "xf_dst", "e_dst") else max(table.backward_slots, 1)
        bound = bounds.get(column.split("_")[1], inbox)
        for tick, row in enumerate(table.rows[column]):
            for stage, entry in enumerate(row):
                if not 0 <= entry < bound:
                    raise _error(tick, stage, f"{column} in 0..{bound - 1}", entry)
                if column in SHARED_COLUMNS and entry != row[0]:
                    raise _error(tick, stage, f"{column}={row[0]} as on stage 0", entry)


class _Replay:
    """What each slot of each stage holds, and what is done. `forward` and `backward` return what a stage sends on."""

    def __init__(self, table: Table) -> None:
        self.table, self.stages, self.last = table, range(table.num_stages), table.num_stages * table.num_chunks - 1
        self.inbox: list[list[_Label | None]] = [[None] * table.forward_slots for _ in self.stages]
        self.grads: list[list[_Label | None]] = [[None] * table.backward_slots for _ in self.stages]
        self.ring: list[list[_Label | None]] = [[None] * table.ring_slots for _ in self.stages]
        self.live: list[set[_Label]] = [set() for _ in self.stages]  # residuals that wait for their backward
        self.done: set[tuple[str, int, int]] = set()
        self.tick, self.peak_live = 0, 0

    def need(self, stage: int, expected: _Label, found: _Label | None) -> None:
        if found != expected:
            raise _error(self.tick, stage, expected, found)

    def finish(self, kind: str, stage: int, v: int, m: int) -> None:
        if (kind, v, m) in self.done:
            raise _error(self.tick, stage, f"{kind} of virtual stage {v} microbatch {m} once", "it a second time")
        self.done.add((kind, v, m))

    def check_complete(self, kinds: str) -> None:
        virtual_stages = {"F": range(self.last + 1), "B": range(self.last + 1), "H": [self.last], "G": [0]}
        for kind, m in product(kinds, range(self.table.num_microbatches)):
            for v in virtual_stages[kind]:
                if (kind, v, m) not in self.done:
                    missing = f"{kind} of virtual stage {v} microbatch {m} in some tick"
                    raise _error(self.tick, v % len(self.stages), missing, "the end of the table")

    def run(self, tick: int, kind: str) -> None:
        self.tick = tick
        rows = [{column: self.table.rows[column][tick][stage] for column in COLUMNS} for stage in self.stages]
        outputs = [self.forward(s, rows[s]) if "F" in kind else None for s in self.stages]
        if "H" in kind:
            self.head(rows, outputs[-1])
        if "G" in kind and rows[-1]["g_ok"]:
            m = rows[-1]["g_mb"]
            self.need(self.stages[-1], _Label("gradient", -1, m), self.grads[-1][rows[-1]["g_src"]])
            self.finish("G", self.stages[-1], 0, m)
        gradients = [self.backward(s, rows[s]) if "B" in kind else None for s in self.stages]
        if "E" in kind and rows[0]["e_ok"]:
            self.finish("E", 0, 0, rows[0]["e_mb"])
        for s, row in enumerate(rows):
            if "F" in kind:
                self.inbox[s][row["xf_dst"]] = outputs[s - 1]
            if "E" in kind:
                self.inbox[s][row["e_dst"]] = _Label("input", 0, row["e_mb"]) if s == 0 and row["e_ok"] else None
            if "B" in kind:
                self.grads[s][row["xb_dst"]] = gradients[(s + 1) % len(rows)]

    def forward(self, s: int, row: dict[str, int]) -> _Label | None:
        v, m = row["f_chunk"] * len(self.stages) + s, row["f_mb"]
        if row["f_ok"]:
            self.need(s, _Label("input", v, m), self.inbox[s][row["f_src"]])
            self.finish("F", s, v, m)
        if self.table.ring_slots:
            slot, overwritten = row["f_slot"], self.ring[s][row["f_slot"]]
            if overwritten in self.live[s]:
                raise _error(self.tick, s, f"ring slot {slot} free for a forward", overwritten)
            self.ring[s][slot] = _Label("residuals", v, m) if row["f_ok"] else None
            self.live[s] |= {_Label("residuals", v, m)} if row["f_ok"] else set()
            self.peak_live = max(self.peak_live, len(self.live[s]))
        return _Label("input", v + 1, m) if row["f_ok"] else None

    def head(self, rows: list[dict[str, int]], output: _Label | None) -> None:
        stage, m = self.stages[-1], rows[-1]["h_mb"]
        if not rows[-1]["h_ok"]:
            raise _error(self.tick, stage, "h_ok=1 in a tick with H, which never runs idle", 0)
        self.need(stage, _Label("input", self.last + 1, m), output)
        self.finish("H", stage, self.last, m)
        for s, row in enumerate(rows if self.table.backward_slots else ()):
            self.grads[s][row["h_dst"]] = _Label("gradient", self.last, m) if s == stage else None

    def backward(self, s: int, row: dict[str, int]) -> _Label | None:
        residuals = self.ring[s][row["b_slot"]]
        if not row["b_ok"]:
            if residuals is None:
                raise _error(self.tick, s, f"residuals for a bubble in ring slot {row['b_slot']}", None)
            return None
        v, m = row["b_chunk"] * len(self.stages) + s, row["b_mb"]
        self.need(s, _Label("residuals", v, m), residuals)
        self.need(s, _Label("gradient", v, m), self.grads[s][row["b_src"]])
        self.finish("B", s, v, m)
        self.live[s].discard(_Label("residuals", v, m))
        return _Label("gradient", v - 1, m)


def expected_bubble(
    name: str, num_stages: int, num_chunks: int, num_microbatches: int,
    forward_cost: float = 1.0, backward_cost: float = 2.0,
) -> float:
    """Time a stage loses: (P-1)(f+b)/V if M >= P, also ragged; else ((PV-1+M)/V - M)(f+b). `forward` has no b."""
    P, V, M = num_stages, num_chunks, num_microbatches
    lost = (P - 1) / V if M >= P else (P * V - 1 + M) / V - M
    return lost * (forward_cost if name == "forward" else forward_cost + backward_cost)


def expected_peak_live(name: str, num_stages: int, num_chunks: int, num_microbatches: int) -> int:
    """Most live (chunk, microbatch) pairs: min(MV, PV+P-1+(V-1)(N-P)), N: largest group or P. gpipe MV, forward 0."""
    P, V, M = num_stages, num_chunks, num_microbatches
    N = max(P, *group_sizes(P, M))
    return {"gpipe": M * V, "forward": 0}.get(name, min(M * V, P * V + P - 1 + (V - 1) * (N - P)))


# ---------------------------------------------------------------- for the executor: loops, and rows of layers
@dataclass(frozen=True, kw_only=True)
class Segment:
    """Runs of equal ticks, `(kind, number of ticks)`, and how often the group of runs is repeated."""

    repeats: int
    runs: tuple[tuple[str, int], ...]


def segments(kinds: Iterable[str], max_period: int = 8) -> list[Segment]:
    """Folds ticks into nested loops: warm-up, repeated period, cool-down. Their number does not grow with M."""
    runs = [(kind, len(list(ticks))) for kind, ticks in groupby(kinds)]
    found, at = [], 0
    while at < len(runs):
        best = (1, 1)  # repeats, period
        for period in range(2, max_period + 1):
            repeats = 1
            while runs[at + repeats * period :][:period] == runs[at : at + period]:
                repeats += 1
            if repeats > 1 and repeats * period > best[0] * best[1]:
                best = (repeats, period)
        found.append(Segment(repeats=best[0], runs=tuple(runs[at : at + best[1]])))
        at += best[0] * best[1]
    return found


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where layers live in arrays stacked as [stage, chunk, slot]; each (stage, chunk) has the longest one's rows."""

    rows: tuple[int, ...]  # of each layer: (stage*V + chunk)*layers_per_chunk + slot
    counts: tuple[tuple[int, ...], ...]  # counts[stage][chunk]: real layers
    layers_per_chunk: int
    num_rows: int


def place_layers(num_layers: int, num_stages: int, num_chunks: int) -> Placement:
    """Spreads layers evenly over virtual stages in model order, longer ones first; ValueError if one would be empty."""
    P, V = num_stages, num_chunks
    if num_layers < P * V:
        raise ValueError(f"num_layers={num_layers} is fewer than {P} stages x {V} chunks = {P * V}: none may be empty")
    count = [num_layers // (P * V) + (v < num_layers % (P * V)) for v in range(P * V)]
    Lc = count[0]
    rows = tuple(((v % P) * V + v // P) * Lc + i for v in range(P * V) for i in range(count[v]))
    counts = tuple(tuple(count[c * P + s] for c in range(V)) for s in range(P))
    return Placement(rows=rows, counts=counts, layers_per_chunk=Lc, num_rows=P * V * Lc)
