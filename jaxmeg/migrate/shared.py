"""Sums that several formats need: batch sizes, data-parallel ranks, and which optimizer reads which of our keys.

The batch rule is DeepSpeed's: rows of an update = rows a rank runs at once x gradient accumulation x data-parallel
ranks. Any two of the first three give the third; all three must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import gcd, prod
from typing import Any, NamedTuple

from jaxmeg.migrate.core import (
    ABSENT,
    Migration,
    Reason,
    To,
    differs,
    flag,
    never,
    not_needed,
    number,
    put_converted,
    shown,
    whole,
)
from jaxmeg.wording import any_of, divisors, multiples_around, nearest

READS = {
    "adamw": ("beta1", "beta2", "eps"),
    "lion": ("beta1", "beta2"),
    "muon": ("momentum", "newton_schulz_steps", "beta1", "beta2", "eps"),
    "sgd": ("momentum",),
    "adafactor": (),
}
"""What an optimizer of ours reads besides lr and weight_decay."""


class Found(NamedTuple):
    """A value of the source and the key it is from."""

    key: str
    value: Any
    given: bool = True
    """False for a default of the source."""

    @property
    def shown(self) -> Any:
        """The value for the table, ABSENT for a default."""
        return self.value if self.given else ABSENT


def find(given: Mapping[str, Any], key: str, default: Any = ABSENT) -> Found | None:
    """The value at a key, or the source's default; None where there is neither."""
    if key in given:
        return Found(key, given[key])
    return None if default is ABSENT else Found(key, default, given=False)


def put(out: Migration, found: Found | None, key: str, convert: Callable[[Any], Any], note: str = "") -> None:
    """A key of ours from what was found, if anything was; a value that can't be converted is a problem or has no counterpart."""
    if found is None or found.value is None:
        return
    if found.given:
        put_converted(out, found.key, found.value, To(key, convert, note))
    else:
        reasons = [f"the default of {out.source}", note]
        out.put(found.key, ABSENT, key, convert(found.value), "; ".join(filter(None, reasons)))


def lack(out: Migration, found: Found | None, reason: Reason) -> None:
    """Record what was found as without counterpart; a default of the source is not worth a word."""
    if found is not None and found.given:
        out.lack(found.key, found.value, reason)


def size(out: Migration, given: Mapping[str, Any], key: str, default: int | None = None) -> int | None:
    """A whole number of 1 or more; the default where it is absent, "auto" or null, or wrong (a problem)."""
    value = given.get(key)
    if value is None or value == "auto":
        return default
    try:
        if (exact := whole(value)) >= 1:
            return exact
    except (ValueError, TypeError):
        pass
    out.problems.append(f"{key}={shown(value)} is not a size: use a whole number of 1 or more")
    return default


def switch(out: Migration, given: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """True or false; the default where it is absent, "auto" or null, or wrong (a problem)."""
    value = given.get(key)
    if value is None or value == "auto":
        return default
    try:
        return flag(value)
    except ValueError:
        out.problems.append(f"{key}={shown(value)} is neither true nor false")
        return default


def amount(out: Migration, given: Mapping[str, Any], key: str, default: float = 0.0) -> float:
    """A number; the default where it is absent, or wrong (a problem)."""
    try:
        return number(given.get(key, default))
    except (ValueError, TypeError):
        out.problems.append(f"{key}={shown(given[key])} is not a number")
        return default


# ---------------------------------------------------------------- mesh
def num_ranks(out: Migration, sizes: Mapping[str, int]) -> int:
    """Data-parallel ranks: devices / product of the named sizes. A remainder is a problem, and 0 ranks."""
    product = prod(sizes.values())
    if out.devices % product:
        named = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        out.problems.append(
            f"--devices {out.devices} is not a multiple of {named}{f' = {product}' if ' x ' in named else ''}: "
            f"use --devices {any_of(multiples_around(out.devices, product))}"
        )
        return 0
    return out.devices // product


def put_replicas(out: Migration, source: Found, shard: int, ranks: int, note: str) -> None:
    """mesh.rep for ZeRO groups of `shard` ranks; the rest of the data-parallel ranks is mesh.dp."""
    if ranks == 0:
        return
    if ranks % shard:
        fits = any_of(nearest(divisors(ranks), shard))
        out.problems.append(f"{source.key}={source.value} does not divide the {_ranks(ranks)}: use {fits}")
    else:
        out.put(source.key, source.shown, "mesh.rep", ranks // shard, note)


def put_dp(out: Migration, ranks: int) -> None:
    """mesh.dp, written out: the file is for this number of devices."""
    if ranks:
        out.put("--devices", out.devices, "mesh.dp", ranks // out.values.get("mesh.rep", 1), "the ranks that are left")


# ---------------------------------------------------------------- batch
def put_batch(
    out: Migration,
    names: tuple[str, str, str],
    sizes: tuple[int | None, int | None, int | None],
    ranks: int,
    own_ranks: int | None = None,
) -> None:
    """data.global_batch and pipeline.microbatch from (rows an update, rows a rank, accumulation), as far as given.

    `names` are what the source calls the three. `own_ranks` are our data-parallel ranks where some of the source's
    axes have no counterpart; the rows of an update stay the same.
    """
    total, micro, steps = sizes
    if ranks == 0 or (total is None and micro is None):
        return
    unit = ranks * (micro or 1) * (steps or 1)
    rows = unit if total is None else total
    exact = None not in sizes
    if rows % unit or (exact and rows != unit):
        product = " x ".join([*(f"{name}={size}" for name, size in zip(names[1:], sizes[1:]) if size), _ranks(ranks)])
        fits = any_of([unit] if exact else multiples_around(rows, unit))
        out.problems.append(
            f"{names[0]}={rows} is not {'' if exact else 'a multiple of '}{product} = {unit}: use {names[0]} {fits}"
        )
        return
    micro = micro or rows // ranks // (steps or 1)
    words = f"{names[0]} {rows} = {_product(rows, micro, ranks)}"
    own = own_ranks or ranks
    if own != ranks and rows % own == 0:
        micro = gcd(micro, rows // own)
        words += f"; here {_product(rows, micro, own)}"
    out.batch.append(f"{words}: global_batch {rows}, microbatch {micro}")
    note = "from the batch arithmetic"
    out.put(names[0], total or ABSENT, "data.global_batch", rows, "" if total else note)
    for name, value in zip(names[1:], sizes[1:]):
        if value or name == names[1]:
            out.put(name, value or ABSENT, "pipeline.microbatch", micro, "" if value == micro and name == names[1] else note)


def _product(rows: int, micro: int, ranks: int) -> str:
    return f"{rows // ranks // micro} accumulation x {_ranks(ranks)} x {micro} {'row' if micro == 1 else 'rows'}"


def _ranks(ranks: int) -> str:
    return f"{ranks} data-parallel {'rank' if ranks == 1 else 'ranks'}"


# ---------------------------------------------------------------- optimizer
def put_optimizer(out: Migration, source: Found, names: Mapping[str, str], options: Mapping[str, Found | None]) -> None:
    """optim.name, and the options of ours that it reads: key of optim -> where its value is from.

    For an optimizer that is not in `names` (theirs -> ours), the name stays as it is, and lr and weight_decay are used.
    """
    name = names.get(str(source.value).lower())
    if name is None:
        name = str(out.get("optim.name"))
        out.lack(source.key, source.value, differs(f"no such optimizer here: optim.name stays {name}", off=never))
    elif source.given or name != out.get("optim.name"):
        out.put(source.key, source.shown, "optim.name", name)
    for leaf, found in options.items():
        if leaf in ("lr", "weight_decay") or leaf in READS[name]:
            put(out, found, f"optim.{leaf}", whole if leaf == "newton_schulz_steps" else number)
        else:
            lack(out, found, not_needed(f"optim.name={name} does not read it"))
