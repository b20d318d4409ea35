"""Orders of pipeline operations by generators that know nothing of the package, and the files that a user would make of them."""

import random

Work = tuple[str, int, int]  # F or B, virtual stage, microbatch
Orders = list[list[Work]]  # [stage]

GOOD = "rank 0: F0 F1 B0 B1\nrank 1: F0 B0 F1 B1\n"
ODD = """\
# two chunks a stage; microbatches enter as 2, 0, 3, 1
stage 0,stage 1
F2.0,
F0.0,F2.0
F2.1,F0.0
F0.1,F2.1 B2.1
F3.0 B2.1,F0.1
F1.0,F3.0 B2.0
B2.0,F1.0 B0.1
F3.1 B0.1,
F1.1,F3.1 B0.0
B0.0,F1.1 B1.1
B1.1,B3.1
B3.1,B1.0
B1.0,B3.0
B3.0,
"""


def megatron_1f1b(P: int, M: int) -> Orders:
    """Warm-up of P-1-s forwards on stage s, then one forward and one backward in turns, then the backwards that are left."""
    orders = []
    for s in range(P):
        warmup = min(P - 1 - s, M)
        kinds = "F" * warmup + "FB" * (M - warmup) + "B" * warmup
        orders.append([(kind, s, kinds[:i].count(kind)) for i, kind in enumerate(kinds)])
    return orders


def megatron_interleaved(P: int, V: int, M: int) -> Orders:
    """P microbatches visit a chunk, then the next chunk; warm-up of 2(P-1-s) + (V-1)P forwards on stage s. P divides M."""
    orders = []
    for s in range(P):
        units = [(c, group + r) for group in range(0, M, P) for c in range(V) for r in range(P)]
        forwards = [("F", c * P + s, m) for c, m in units]
        backwards = [("B", (V - 1 - c) * P + s, m) for c, m in units]
        warmup = min(2 * (P - 1 - s) + (V - 1) * P, M * V)
        pairs = zip(forwards[warmup:], backwards, strict=False)
        orders.append(forwards[:warmup] + [op for pair in pairs for op in pair] + backwards[M * V - warmup :])
    return orders


def random_orders(P: int, V: int, M: int, rng: random.Random) -> Orders:
    """Any order in which operations can be done one after the other."""
    orders: Orders = [[] for _ in range(P)]
    ready: list[Work] = [("F", 0, m) for m in range(M)]
    while ready:
        kind, v, m = op = ready.pop(rng.randrange(len(ready)))
        orders[v % P].append(op)
        if kind == "F":
            ready.append(("F", v + 1, m) if v < P * V - 1 else ("B", v, m))
        elif v:
            ready.append(("B", v - 1, m))
    return orders


def written(op: Work, P: int, V: int) -> str:
    kind, v, m = op
    return f"{kind}{m}.{v // P}" if V > 1 else f"{kind}{m}"


def as_lists(orders: Orders, V: int) -> str:
    return "".join(f"rank {s}: {' '.join(written(op, len(orders), V) for op in order)}\n" for s, order in enumerate(orders))


def one_a_slot(orders: Orders, V: int, together: bool = False) -> str:
    """Rows in which every stage does its next operation as soon as its input was there in the row before.

    together: a row takes a backward after a forward, in the same row as the head's if it is one of the last virtual stage.
    """
    P, last = len(orders), len(orders) * V - 1
    done: set[Work] = set()
    left, rows = [list(order) for order in orders], []
    while any(left):
        row: list[list[Work]] = [[] for _ in orders]
        for s, order in enumerate(left):
            while order and len(row[s]) < 1 + together:
                kind, v, m = order[0]
                need = ("F", v - 1, m) if kind == "F" else ("F", v, m) if v == last else ("B", v + 1, m)
                here = together and v == last and kind == "B" and need in row[s]
                waits = (kind == "B" or v > 0) and need not in done and not here
                if waits or (row[s] and (row[s][-1][0], kind) != ("F", "B")):
                    break
                row[s].append(order.pop(0))
        assert any(row), "deadlock"
        done.update(op for cell in row for op in cell)
        rows.append(",".join(" ".join(written(op, P, V) for op in cell) for cell in row))
    return "\n".join(rows) + "\n"
