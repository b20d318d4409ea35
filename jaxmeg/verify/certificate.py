"""What one layout and one device gave, held against each other: the layout contract, check by check and leaf by leaf.

Works on host arrays by path; knows no mesh, no config and no jax. The bounds are those of tests/parity.py. Of parameters it is the
change from their start that is compared: the weights themselves are so much larger that a wrong update would be lost in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np

LOSS, LEAF, NORM = 1e-5, 1e-4, 1e-5
"""Largest difference of the loss, in nats a token; of a leaf, as part of its norm; of the gradient norm, as part of it."""
FLOOR = 1e-6
"""Of the global gradient norm: a leaf whose gradient is smaller on one device is zero but for rounding, and must be so on the layout."""
UPDATES = 3
ROUNDING = 2 * UPDATES * 2.0**-24
"""Of a leaf's weights: how far fp32 alone takes two runs apart, each of which rounds to half a unit in the last place an update."""
LEFT_OUT = 1000
"""Of the config's optimizer, one entry in so many may be off. AdamW and Lion make an update of normal size of a gradient that is near zero
by chance, where rounding decides on its sign. The other checks compare every entry."""

Leaves = Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run of three updates gave. Leaves by path, in canonical order."""

    initial: Leaves
    """Weights as the seed makes them; the updates start from others, see `measure`."""
    misplaced_rows: int
    """Rows of the batches that a device holds in another place than its own, or not as the host has them."""
    rows: str
    """Where the rows are, in words."""
    loss: float
    """Of the first update."""
    grads: Leaves
    """Of the first update, from SGD's momentum: what was clipped, brought back to its size."""
    grad_norm: float
    params: Leaves
    """After three updates with SGD."""
    skipped: tuple[int, ...] = ()
    """Which of them, from 1, were not applied."""
    own_params: Leaves | None = None
    """After three updates with the config's optimizer."""
    own_skipped: tuple[int, ...] = ()
    """The same of those."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of a certificate."""

    name: str
    error: float
    bound: float
    note: str = ""
    leaves: dict[str, float] = field(default_factory=dict)
    """Error of every leaf, as part of the bound: more than 1 is too much."""
    why: str = ""
    """Why it can't pass, in one line, where that is not an error's size."""

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # nan is not

    @property
    def worst(self) -> str:
        """The leaf that is furthest off."""
        return max(self.leaves, key=lambda path: np.nan_to_num(self.leaves[path], nan=np.inf)) if self.leaves else ""

    @property
    def off(self) -> list[str]:
        """All leaves that are too far off."""
        return [path for path, error in self.leaves.items() if not error <= 1]

    @property
    def reason(self) -> str:
        """How far what is off, in one line."""
        if self.why:
            return f"{self.name}: {self.why}"
        where = f" in {self.worst}" if self.worst else ""
        return f"{self.name} off by {self.error:.1e}{where}" + (f", and {len(self.off) - 1} leaves more" if len(self.off) > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """One layout against one device."""

    layout: str
    checks: tuple[Check, ...] = ()
    crash: str = ""
    """Why there was nothing to compare, in one line."""

    @property
    def passed(self) -> bool:
        return not self.crash and all(check.passed for check in self.checks)

    @property
    def reason(self) -> str:
        """What failed first, in one line; empty where nothing did."""
        return self.crash or next((check.reason for check in self.checks if not check.passed), "")

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no nan."""
        checks = [asdict(check) | {"passed": check.passed, "worst": check.worst} for check in self.checks]
        return {"layout": self.layout, "passed": self.passed, "crash": self.crash, "checks": _without_nan(checks)}


def _without_nan(value: Any) -> Any:
    match value:
        case dict():
            return {key: _without_nan(inner) for key, inner in value.items()}
        case list():
            return [_without_nan(inner) for inner in value]
        case float() if not np.isfinite(value):
            return str(value)
        case _:
            return value


def certify(layout: str, got: Outcome, want: Outcome, start: Leaves, optimizer: str = "") -> Certificate:
    """got: of the layout; want: of one device. start: weights that both start from. optimizer: name of the config's, where the outcomes
    have its parameters."""
    floor = FLOOR * want.grad_norm
    tiny = [path for path, leaf in want.grads.items() if _norm(leaf) <= floor]
    checks = [
        _same_bits(got.initial, want.initial),
        Check(name="placement of rows", error=got.misplaced_rows, bound=0, note=f"rows out of place; {got.rows}"),
        Check(name="loss", error=abs(got.loss - want.loss), bound=LOSS, note=f"{want.loss:.4f} nats a token"),
        _gradients(got.grads, want.grads, want.grad_norm, tiny),
        Check(name="gradient norm", error=abs(got.grad_norm - want.grad_norm) / want.grad_norm, bound=NORM, note=f"{want.grad_norm:.4f}"),
        _params("parameters", got.params, want.params, start, (got.skipped, want.skipped)),
    ]
    if got.own_params is not None and want.own_params is not None:  # an optimizer that scales by the gradient's size makes noise large
        mine, true = ({path: leaf for path, leaf in leaves.items() if path not in tiny} for leaves in (got.own_params, want.own_params))
        skipped = got.own_skipped, want.own_skipped
        checks.append(_params(f"parameters, {optimizer}", mine, true, start, skipped, LEFT_OUT, f", {_but(tiny)}" if tiny else ""))
    return Certificate(layout=layout, checks=tuple(checks))


def _norm(leaf: np.ndarray) -> float:
    return float(np.linalg.norm(leaf.astype(np.float64).ravel()))


def _check(name: str, errors: dict[str, float], note: str) -> Check:
    """A check of leaves. errors: as part of the bound."""
    worst = max((np.inf if np.isnan(error) else error for error in errors.values()), default=0.0)
    return Check(name=name, error=float(worst * LEAF), bound=LEAF, note=note, leaves=errors)


def _gradients(got: Leaves, want: Leaves, norm: float, tiny: list[str]) -> Check:
    """Of its norm, each leaf; a leaf that is zero but for rounding on one device, of the whole gradient's."""
    errors = {path: _norm(got[path]) / (FLOOR * norm) if path in tiny else _norm(got[path] - leaf) / (LEAF * _norm(leaf))
              for path, leaf in want.items()}
    note = f"{len(want)} leaves" + (f"; {', '.join(tiny)} against zero" if tiny else "")
    return _check("gradients", errors, note)


def _params(name: str, got: Leaves, want: Leaves, start: Leaves, skipped: tuple[tuple[int, ...], tuple[int, ...]],
            left_out: int | None = None, note: str = "") -> Check:
    """Of the norm of its change, each leaf; of a change so small that fp32 hardly holds it, what rounding of the weights may make of it.
    skipped: updates, on the layout and on one device. left_out: one entry in so many, those that are furthest off.

    Layouts of small Llamas and of GPT-2 are off by up to 1.2e-5 of the change (SGD 1.0e-5, AdamW 1.2e-5, Muon 1.1e-5, Adafactor 2.5e-6,
    Lion 0), so LEAF leaves them a factor of eight. A layout without AdamW's weight decay of 0.01 is off by 2.8e-3, of 0.1 by 2.8e-2.
    """
    errors = {}
    for path, leaf in want.items():
        off, begin = np.abs(got[path].astype(np.float64) - leaf).ravel(), start[path].astype(np.float64)
        if left_out and not np.isnan(off).any():
            off = np.sort(off)[: off.size - off.size // left_out]
        errors[path] = _norm(off) / max(LEAF * _norm(leaf - begin), ROUNDING * _norm(begin), np.finfo(np.float32).tiny)
    check = _check(name, errors, f"change of {len(want)} leaves in {UPDATES} updates{note}")
    if found := [f"update {n[0]} on {where}" for where, n in zip(("the layout", "one device"), skipped, strict=True) if n]:
        return replace(check, error=np.inf, why=f"{' and '.join(found)} was skipped: the loss or a gradient is not finite")
    return check


def _but(tiny: list[str]) -> str:
    return f"without {', '.join(tiny)}, whose gradient is zero but for rounding"


def _same_bits(got: Leaves, want: Leaves) -> Check:
    """Elements that differ."""
    wrong = {path: float(np.sum(_bits(got[path]) != _bits(leaf))) if got[path].shape == leaf.shape else float(leaf.size)
             for path, leaf in want.items()}
    return Check(name="initial weights", error=sum(wrong.values()), bound=0, note=f"numbers that differ; sha256 {checksum(got)}",
                 leaves={path: count for path, count in wrong.items() if count})


def _bits(leaf: np.ndarray) -> np.ndarray:
    """Of fp32 numbers, one integer each; a scalar has one."""
    return leaf.ravel().view(np.uint32)


def checksum(leaves: Leaves) -> str:
    """Of names and bytes of all leaves, in the order of names."""
    digest = sha256()
    for path in sorted(leaves):
        digest.update(path.encode() + np.ascontiguousarray(leaves[path]).tobytes())
    return digest.hexdigest()[:12]
