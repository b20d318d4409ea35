"""GPUs and their links as one table, chips.yaml, to which a user adds rows; and what `64xH100-80G` means.

Every figure is of one GPU. Knows no model and no jax.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

from jaxmeg.files import ContentError, load_yaml, read_yaml
from jaxmeg.wording import any_of, did_you_mean, shown

MOST_GPUS = 2**20
FORMATS = ("fp16", "bf16", "fp8")


class ChipError(ValueError):
    """A chip or a number of them that can't be used: one line of value, rule and fix."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A way between two GPUs."""

    kind: str
    gb_s: float
    """Of one GPU in one direction."""


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One GPU as chips.yaml describes it."""

    name: str
    memory_gib: float
    """What the driver reports as there."""
    tflops: Mapping[str, float]
    """Dense peak by format, fp32 accumulation."""
    memory_gb_s: float
    """Peak of the card's own memory."""
    node_gpus: int
    """GPUs of one host."""
    node_link: Link
    network: Link
    host_link_gb_s: float
    """One direction between a GPU and its host's memory."""
    measured: bool = False
    """Whether this project has run on one."""
    compiles: bool = True
    """Whether the compiler builds for it."""

    @property
    def compute(self) -> str:
        """The 16-bit format that training takes on it."""
        return "bf16" if "bf16" in self.tflops else "fp16"

    @property
    def memory_bytes(self) -> float:
        return self.memory_gib * 2**30

    def link(self, num_gpus: int) -> Link:
        """Between GPUs that are `num_gpus` neighbours or fewer: inside a host as long as they fit one."""
        return self.node_link if num_gpus <= self.node_gpus else self.network


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """So many GPUs of one kind, filled host by host."""

    chip: Chip
    count: int

    def __str__(self) -> str:
        return f"{self.count}x{self.chip.name}"


@cache
def known_chips() -> Mapping[str, Chip]:
    text = (resources.files("jaxmeg.planner") / "chips.yaml").read_text()
    return MappingProxyType(_chips(load_yaml(text), "chips.yaml"))


def read_chips(path: str) -> Mapping[str, Chip]:
    """The table with a user's rows added or replaced. Raises ChipError."""
    try:
        content = read_yaml(path)
    except OSError as error:
        raise ChipError(f"--chips {shown(path)}: cannot be read ({error.strerror}): give an existing YAML file") from None
    except ContentError as error:
        raise ChipError(f"--chips {shown(path)}: is not valid YAML: {error}") from None
    return MappingProxyType({**known_chips(), **_chips(content, f"--chips {shown(path)}")})


def parse_cluster(text: str, chips: Mapping[str, Chip] | None = None) -> Cluster:
    """`64xH100-80G`, `8xa100-80g` or `H200`. Raises ChipError."""
    chips = known_chips() if chips is None else chips
    match = re.fullmatch(r"(?:([0-9]{1,9})\s*[xX*]\s*)?(\S+)", text.strip())
    if match is None:
        raise ChipError(f"--gpus {shown(text)!r} is not COUNTxCHIP: write for example 8xH100-80G")
    count = int(match[1] or 1)
    if not 1 <= count <= MOST_GPUS:
        raise ChipError(f"--gpus {shown(text)}: {count} GPUs: use 1 to {MOST_GPUS:,}")
    return Cluster(chip=find_chip(match[2], chips), count=count)


def find_chip(name: str, chips: Mapping[str, Chip]) -> Chip:
    """By its name, or by a part of it that only one chip's name starts with, in any case. Raises ChipError."""
    def bare(text: str) -> str:
        return re.sub("[^a-z0-9]", "", text.lower())
    if exact := [chip for chip in chips.values() if bare(chip.name) == bare(name)]:
        return exact[0]
    near = [chip for chip in chips.values() if bare(name) and bare(chip.name).removeprefix("rtx").startswith(bare(name))]
    if len(near) == 1:
        return near[0]
    if near:
        raise ChipError(f"--gpus: {shown(name)} may be {any_of(chip.name for chip in near)}: name one")
    raise ChipError(f"--gpus: unknown chip {shown(name)}: {did_you_mean(shown(name), chips)}use {any_of(chips)}, or add it by --chips FILE")


# ------------------------------------------------------------------ the file
def _chips(content: Any, where: str) -> dict[str, Chip]:
    if not isinstance(content, dict) or not content:
        raise ChipError(f"{where}: holds no chips: write NAME: {{memory_gib: 80, ...}}, see {_example()}")
    return {str(name): _chip(str(name), row, where) for name, row in content.items()}


def _chip(name: str, row: Any, where: str) -> Chip:
    known = {field.name for field in fields(Chip)} - {"name"}
    needed = known - {"measured", "compiles"}
    if not isinstance(row, dict):
        raise ChipError(f"{where}: {shown(name)} holds no figures: it needs {any_of(sorted(needed))}")
    if unknown := [key for key in row if key not in known]:
        key = shown(unknown[0])
        raise ChipError(f"{where}: {shown(name)}: unknown key {key}: {did_you_mean(key, known)}see {_example()}")
    if missing := sorted(needed - row.keys()):
        raise ChipError(f"{where}: {shown(name)} lacks {', '.join(missing)}: see {_example()}")
    values = dict(row)
    for key in ("node_link", "network"):
        values[key] = _link(row[key], f"{where}: {shown(name)}.{key}")
    tflops = row["tflops"]
    if not isinstance(tflops, dict) or not tflops or not set(tflops) <= set(FORMATS):
        raise ChipError(f"{where}: {shown(name)}.tflops={shown(tflops)}: give a figure for some of {any_of(FORMATS)}")
    figures = {**{key: row[key] for key in ("memory_gib", "memory_gb_s", "host_link_gb_s", "node_gpus")}, **tflops}
    if wrong := [key for key, figure in figures.items() if not _positive(figure)]:
        raise ChipError(f"{where}: {shown(name)}: {wrong[0]}={shown(figures[wrong[0]])} is not a positive number: give one")
    if not isinstance(row["node_gpus"], int):
        raise ChipError(f"{where}: {shown(name)}: node_gpus={shown(row['node_gpus'])} is not a whole number: give one")
    return Chip(name=name, **values)


def _link(row: Any, where: str) -> Link:
    if not isinstance(row, dict) or set(row) != {"kind", "gb_s"} or not _positive(row["gb_s"]):
        raise ChipError(f"{where}={shown(row)}: write {{kind: NVLink 4, gb_s: 450}}")
    return Link(kind=str(row["kind"]), gb_s=row["gb_s"])


def _positive(figure: Any) -> bool:
    return isinstance(figure, int | float) and not isinstance(figure, bool) and 0 < figure < 1e12


def _example() -> str:
    return "jaxmeg/planner/chips.yaml"
