"""The device mesh: six named axes, outermost first, so that tp neighbours sit on the fastest links."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxmeg._compat import make_mesh
from jaxmeg.parallel import AXES


def build_mesh(sizes: Mapping[str, int], devices: Sequence[Any]) -> Mesh:
    """A mesh of the first devices, in order pp, rep, dp, ep, cp, tp. sizes: axis -> number of devices; missing axes have 1."""
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    needed = math.prod(shape)
    if len(devices) < needed:
        raise ValueError(f"the mesh {format_mesh(sizes)} needs {needed} devices, and {len(devices)} are there")
    return make_mesh(np.array(devices[:needed], dtype=object).reshape(shape), AXES)


def format_mesh(sizes: Mapping[str, int]) -> str:
    """`pp=2,tp=4`: the axes larger than 1, or `one device`."""
    return ",".join(f"{axis}={sizes[axis]}" for axis in AXES if sizes.get(axis, 1) > 1) or "one device"
