"""Values that several devices hold must be the same bits on all of them: parameters, moments, counters, the loss scale.

They start equal and every device is meant to compute the same update, so a difference is a faulty device or link, or a
wrong program (openxla/xla#40034). Each device digests its own shards, the digests go to every host and are compared there:
no compiler is told, or can conclude, that they are equal. They are read one step late: the device never waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxmeg.checkpoint.canonical import checksum, flatten
from jaxmeg.parallel import AXES
from jaxmeg.record.memory import device_bytes, gib
from jaxmeg.setup import Setup
from jaxmeg.state import TrainState, abstract_state

SHOWN = 3  # leaves, and devices of a leaf, that a message names


class Watched(NamedTuple):
    """A leaf that several devices hold the same part of."""

    path: str
    axes: tuple[str, ...]
    """Mesh axes of more than one device that it is not sharded over."""


class Difference(NamedTuple):
    """A leaf whose copies are not the same."""

    path: str
    axes: tuple[str, ...]
    """Mesh axes along which neighbours differ."""
    devices: tuple[tuple[int, ...], ...]
    """Places in the mesh of the copies that are not like most; empty where no value has a majority."""
    num_copies: int
    """Of each part of the leaf."""


class Found(NamedTuple):
    """What a look at the replicas after an update found."""

    step: int
    text: str


class Replicas:
    """Looks at the state of one run: `look` begins a look, `late` says what the last one found.

    Without a leaf that several devices hold, and with guard.replicas_every=0, there is no program and nothing is ever found.
    """

    def __init__(self, setup: Setup):
        self.mesh, self.every = setup.mesh, setup.config.guard.replicas_every
        leaves = flatten(abstract_state(setup)) if self.every else {}
        self.watched = [Watched(path, axes) for path, x in leaves.items() if (axes := replicated_axes(x.sharding))]
        size = device_bytes([leaves[leaf.path] for leaf in self.watched])
        self.line = (f"{len(self.watched)} of {len(leaves)} leaves of the state are held by several devices, "
                     f"{gib(size) if size >= 2**14 else f'{size} bytes'} on each: compared every {self.every} updates and before a save"
                     ) if self.watched else ""
        """For a person: what is read, and when; empty if nothing is."""
        self._digests = make_digests(setup.mesh, [leaves[leaf.path].sharding.spec for leaf in self.watched]) if self.watched else None
        self._waiting: tuple[int, jax.Array] | None = None

    def due(self, step: int) -> bool:
        """Whether to look after this update, whatever else happens."""
        return self.every > 0 and step % self.every == 0

    def look(self, step: int, state: TrainState) -> None:
        """Queue a look at the state after update `step`; before the state is given to the next update."""
        if self._digests:
            leaves = flatten(state)
            digests = self._digests([leaves[leaf.path] for leaf in self.watched])
            digests.copy_to_host_async()
            self._waiting = step, digests

    def late(self) -> Found | None:
        """What the look that was queued last found, once; waits for it."""
        if self._waiting is None:
            return None
        (step, digests), self._waiting = self._waiting, None
        found = differences(np.asarray(digests).reshape(*self.mesh.devices.shape, -1), self.watched)
        return Found(step, describe(found, self.mesh.devices)) if found else None


def replicated_axes(sharding: NamedSharding) -> tuple[str, ...]:
    """Mesh axes of more than one device along which the same part of an array is held."""
    used = {axis for entry in sharding.spec for axis in (entry if isinstance(entry, tuple) else (entry,))}
    return tuple(axis for axis, size in sharding.mesh.shape.items() if size > 1 and axis not in used)


def make_digests(mesh: jax.sharding.Mesh, specs: Sequence[PartitionSpec]) -> Any:
    """A program from leaves to uint32 [devices in mesh order, leaves] on every device: digests of each device's own shards."""
    def body(leaves: list[jax.Array]) -> jax.Array:
        return jnp.stack([checksum(x) for x in leaves])[None]

    own = jax.shard_map(body, mesh=mesh, in_specs=(list(specs),), out_specs=PartitionSpec(AXES), check_vma=False)
    return jax.jit(own, out_shardings=NamedSharding(mesh, PartitionSpec()))


def differences(digests: np.ndarray, watched: Sequence[Watched]) -> list[Difference]:
    """digests: [*sizes of the mesh axes, leaves]."""
    found = []
    for leaf, values in zip(watched, np.moveaxis(digests, -1, 0), strict=True):
        along = {axis: AXES.index(axis) for axis in leaf.axes}
        if differing := tuple(axis for axis, dim in along.items() if (values != values.take([0], dim)).any()):
            copies = np.prod([values.shape[dim] for dim in along.values()], dtype=int)
            found.append(Difference(leaf.path, differing, _minority(values, tuple(along.values()), copies), int(copies)))
    return found


def _minority(values: np.ndarray, dims: tuple[int, ...], copies: int) -> tuple[tuple[int, ...], ...]:
    """Places whose value is not that of more than half of the copies along `dims`; none if there is no such value."""
    places = np.moveaxis(np.indices(values.shape), 0, -1)
    last = tuple(range(-len(dims), 0))
    groups = np.moveaxis(values, dims, last).reshape(-1, copies)
    places = np.moveaxis(places, dims, [dim - 1 for dim in last]).reshape(-1, copies, values.ndim)
    found = []
    for group, where in zip(groups, places, strict=True):
        kinds, counts = np.unique(group, return_counts=True)
        if 2 * counts.max() <= copies:
            return ()
        found += [tuple(map(int, place)) for place in where[group != kinds[counts.argmax()]]]
    return tuple(found)


def describe(found: Sequence[Difference], devices: np.ndarray) -> str:
    """In one line: leaves, axes, and the devices whose copies are not like the others'."""
    def names(places: Sequence[tuple[int, ...]]) -> str:
        some = [f"{devices[place].platform}:{devices[place].id} of process {devices[place].process_index}" for place in places[:SHOWN]]
        return ", ".join(some) + _more(len(places))

    def one(d: Difference) -> str:
        where = f"wrong on {names(d.devices)}" if d.devices else "no value has a majority"
        return f"{d.path} over {', '.join(d.axes)} ({d.num_copies} copies, {where})"

    return "; ".join(one(d) for d in found[:SHOWN]) + _more(len(found))


def _more(count: int) -> str:
    return f" and {count - SHOWN} more" if count > SHOWN else ""
