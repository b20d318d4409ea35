"""The rule table: which mesh axes a dim of a tensor is sharded over, and a user's own table read from YAML.

Axis order in an entry is the order of sharding, outermost first. ZeRO is not a rule of this table: it shards what the
table leaves free. Must not know shapes or meshes; `layout` turns the table into specs.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from types import MappingProxyType

from jaxmeg.files import ContentError, read_yaml
from jaxmeg.wording import any_of, did_you_mean, shown

DEFAULT_RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "layers": ("pp",),
        "vocab": ("pp", "tp"),
        "heads": ("tp",),
        "kv_heads": ("tp",),
        "mlp": ("tp",),
        "experts": ("ep",),
        "embed": (),
        "head_dim": (),
        "positions": (),
    }
)

FIXED_DIMS = ("layers",)
"""Dims whose entry cannot change: the pipeline is built on it."""


def _subsets(axes: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """All sub-tuples in the same order, longest first."""
    return tuple(subset for size in range(len(axes), -1, -1) for subset in combinations(axes, size))


ALLOWED: Mapping[str, tuple[tuple[str, ...], ...]] = MappingProxyType(
    {dim: (axes,) if dim in FIXED_DIMS else _subsets(axes) for dim, axes in DEFAULT_RULES.items()}
)

MESH_AXES = ("pp", "rep", "dp", "ep", "cp", "tp")


def _show(axes: tuple[str, ...]) -> str:
    return "[" + ", ".join(axes) + "]"


def _dim_problems(dim: str, axes: object) -> list[str]:
    if dim not in DEFAULT_RULES:
        return [f'unknown dim "{shown(dim)}": {did_you_mean(shown(dim), DEFAULT_RULES)}use {any_of(DEFAULT_RULES)}']
    if not isinstance(axes, list) or not all(isinstance(axis, str) for axis in axes):
        return [f"{dim}: {shown(repr(axes))} is not a list of mesh axes: write for example {_show(DEFAULT_RULES[dim])}"]
    found = []
    for axis in dict.fromkeys(axes):
        if axis not in MESH_AXES:
            found.append(f'{dim}: unknown mesh axis "{shown(axis)}": {did_you_mean(shown(axis), MESH_AXES)}use {any_of(MESH_AXES)}')
        elif axes.count(axis) > 1:
            found.append(f"{dim}: axis {axis} is named {axes.count(axis)} times: name it once")
    if found or tuple(axes) in ALLOWED[dim]:
        return found
    if not DEFAULT_RULES[dim]:
        return [f"{dim}: {_show(tuple(axes))} is not allowed: ZeRO chooses the sharding of {dim}, set layout.zero"]
    return [f"{dim}: {_show(tuple(axes))} is not allowed: use {any_of(_show(choice) for choice in ALLOWED[dim])}"]


def rule_problems(table: object) -> list[str]:
    """Everything that is wrong with a user's table, one line each; empty when it is valid."""
    if not isinstance(table, dict):
        return [f"expected a table of dim: [axes], found {type(table).__name__}"]
    found = [problem for dim, axes in table.items() for problem in _dim_problems(dim, axes)]
    if table.get("heads") == [] and table.get("kv_heads") != []:
        found.append("heads: [] needs kv_heads: [] as well: query heads and their KV heads stay on one device")
    if table.get("kv_heads") == [] and table.get("heads") != []:
        found.append("kv_heads: [] needs heads: [] as well: query heads and their KV heads stay on one device")
    return found


def read_rules(path: str) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """The complete table with a user's entries laid over the defaults, and every problem found in the file.

    The table holds the defaults alone when there are problems.
    """
    defaults = dict(DEFAULT_RULES)
    try:
        table = read_yaml(path)
    except OSError as error:
        return defaults, [f"cannot be read ({error.strerror}): give an existing YAML file"]
    except ContentError as error:
        return defaults, [f"is not valid YAML: {error}"]
    table = {} if table is None else table
    found = rule_problems(table)
    if found:
        return defaults, found
    return defaults | {dim: tuple(axes) for dim, axes in table.items()}, []


def load_rules(path: str | None) -> dict[str, tuple[str, ...]]:
    """The complete rule table; `path` is a user's YAML file or None. Raises ValueError listing every problem."""
    if path is None:
        return dict(DEFAULT_RULES)
    table, found = read_rules(path)
    if found:
        raise ValueError("\n".join(f"layout.rules={path}: {problem}" for problem in found))
    return table
