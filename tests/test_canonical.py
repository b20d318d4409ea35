"""Canonical order on the devices: what moves, what does not, where it lives, what goes over the wire, and checksums.

Expected values are written out with numpy from which layer each memory row is (`runs.model_order`).
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmeg import hlo
from jaxmeg.checkpoint.canonical import canonical_leaves, checksum, checksums, flatten, from_canonical, to_canonical, unflatten
from jaxmeg.config import OptimConfig
from jaxmeg.setup import Setup
from jaxmeg.state import TrainState, abstract_state

NAMES = ["dp=4, zero 3", "pp=2", "uneven pp=4", "tp=4,pp=2", "tp=2,pp=2,dp=2, zero 3", "interleaved"]


@functools.cache
def setup_of(name: str, optimizer: str = "adamw") -> Setup:
    return runs.make_setup(name, optim=OptimConfig(name=optimizer, factored_dim=4, **({"eps": 1e-6} if optimizer == "adamw" else {})))


@functools.cache
def random_state(name: str, optimizer: str = "adamw") -> TrainState:
    """Any bits a leaf can have, NaNs and -0.0 among them; zeros in padding rows."""
    setup, rng = setup_of(name, optimizer), np.random.default_rng(0)
    padding = setup.layer_of_row.reshape(-1) < 0

    def one(path: str, x: jax.ShapeDtypeStruct) -> jax.Array:
        bits = rng.integers(0, 2**32, x.shape, dtype=np.uint32)
        if ".layers." in path:
            bits[padding] = 0
        elif path.endswith(".tokens") and bits.shape[0] > runs.VOCAB:
            bits[runs.VOCAB :] = 0
        return jax.device_put(bits.view(x.dtype) if bits.ndim else x.dtype.type(7), x.sharding)

    abstract = abstract_state(setup)
    return unflatten(abstract, {path: one(path, x) for path, x in flatten(abstract).items()})


@pytest.mark.parametrize(("name", "optimizer"), [*((name, "adamw") for name in NAMES), ("interleaved", "adafactor"),
                                                 ("uneven pp=4", "muon")])
def test_there_and_back(name: str, optimizer: str) -> None:
    setup, state = setup_of(name, optimizer), random_state(name, optimizer)
    leaves, memory = canonical_leaves(setup), flatten(state)
    stored = to_canonical(leaves)(memory)
    runs.same_bits({path: np.array(x) for path, x in stored.items()}, runs.model_order(setup, state))
    back = from_canonical(leaves)(stored)
    runs.same_bits({path: np.array(x) for path, x in back.items()}, {path: np.array(x) for path, x in memory.items()})  # padding is 0 again
    for path, leaf in leaves.items():
        assert stored[path].sharding.is_equivalent_to(leaf.sharding, len(leaf.shape)) and stored[path].shape == leaf.shape
        assert back[path].sharding.is_equivalent_to(memory[path].sharding, len(leaf.shape))


@pytest.mark.parametrize("name", ["dp=4, zero 3", "pp=2", "tp=4,pp=2"])
def test_what_does_not_change_is_not_copied(name: str) -> None:
    """Even stages of one chunk; only 250 rows of a vocabulary that 8 ranks pad to 256 move."""
    memory = flatten(random_state(name))
    leaves = canonical_leaves(setup_of(name))
    stored = to_canonical(leaves)(memory)
    moved = {path for path in memory if stored[path] is not memory[path]}
    assert moved == ({path for path in memory if path.endswith("tokens")} if name == "tp=4,pp=2" else set())
    back = from_canonical(leaves)(stored)
    assert {path for path in memory if back[path] is not stored[path]} == moved


# Bytes of a leaf set on one device, from the model's numbers: 16 wide, 32 in the MLP, 4 heads and 2 kv heads of 4, 6 layers.
TABLES = 2 * 16  # columns of embed and head
LAYER = 2 * 16 * 4 * 4 + 2 * 16 * 2 * 4 + 3 * 16 * 32 + 2 * 16  # query, out; key, value; gate, up, down; two norms
LEAVES = 9
WIRE = {  # name: (all-to-alls over axes -> how many, bytes of one device that take part)
    "uneven pp=4": {("pp",): (3 * (LEAVES + 2), 3 * 4 * (2 * LAYER + 252 // 4 * TABLES))},  # 2 rows of layers a stage
    "interleaved": {("pp",): (3 * LEAVES, 3 * 4 * (4 * LAYER // 2))},  # 2 chunks of 2 rows a stage, halved by ZeRO
    "tp=4,pp=2": {("pp",): (3 * 2, 3 * 4 * 256 // 8 * TABLES), ("tp",): (3 * 2, 3 * 4 * 256 // 8 * TABLES)},
}


@pytest.mark.parametrize("way", [to_canonical, from_canonical])
@pytest.mark.parametrize("name", WIRE)
def test_rows_move_by_all_to_all_alone(name: str, way: Any) -> None:
    """Nothing is put together on a device: each axis costs one all-to-all of the leaf's own bytes."""
    setup = setup_of(name)
    leaves = canonical_leaves(setup)
    given = flatten(abstract_state(setup)) if way is to_canonical else {path: leaf.abstract for path, leaf in leaves.items()}
    program = jax.jit(way(leaves)).lower(given).compile()
    found = hlo.read(program.as_text(), setup.layout.sizes).totals("op", "axes")
    assert {op for op, _ in found} == {"all-to-all"}
    for (_, axes), totals in found.items():
        count, held = WIRE[name][axes]
        assert (totals.count, totals.bytes) == (count, held)
    assert {axes for _, axes in found} == set(WIRE[name])


def test_axes_of_moved_rows_go_to_dims_that_they_divide() -> None:
    specs = {path: leaf.sharding.spec for path, leaf in canonical_leaves(setup_of("tp=2,pp=2,dp=2, zero 3")).items()}
    assert specs["params.embed.tokens"] == P(None, ("dp", "tp", "pp"))  # 250 rows on 4 ranks, 16 columns on 2
    interleaved = {path: leaf.sharding.spec for path, leaf in canonical_leaves(setup_of("interleaved")).items()}
    assert interleaved["params.layers.mlp.up"] == P(None, "pp", "dp")  # [layers, embed, mlp]: embed is free
    assert interleaved["opt_state.0.mu.layers.attention_norm.weight"] == P(None, ("dp", "pp"))  # no free dim: shared


@pytest.mark.parametrize("name", ["uneven pp=4", "tp=2,pp=2,dp=2, zero 3", "interleaved"])
def test_canonical_arrays_are_as_sharded_as_those_in_memory(name: str) -> None:
    in_memory = flatten(abstract_state(setup_of(name)))
    for path, leaf in canonical_leaves(setup_of(name)).items():
        parts = math.prod(leaf.shape) // math.prod(leaf.sharding.shard_shape(leaf.shape))
        x = in_memory[path]
        assert parts == math.prod(x.shape) // math.prod(x.sharding.shard_shape(x.shape)), path


def test_what_no_dim_takes_is_whole_along_those_axes() -> None:
    """Three stages of 4 layers: 3 divides no other dim of this model, so the devices of all stages hold them; tp stays."""
    specs = {path: leaf.sharding.spec for path, leaf in canonical_leaves(runs.make_setup("pp=3,tp=2", num_layers=4)).items()}
    assert specs["params.layers.mlp.up"] == P(None, None, "tp")
    assert specs["params.layers.mlp_norm.weight"] == P(None, None)
    assert specs["params.embed.tokens"] == P(None, "tp")  # two axes shard the rows: the one that divides the columns moves


# ---------------------------------------------------------------- checksums
def numpy_checksum(x: np.ndarray) -> int:
    """The same hash, one element after the other."""
    total = 0
    for index, bits in enumerate(np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").reshape(-1).tolist()):
        h = bits ^ (index * 0x9E3779B1 & 0xFFFFFFFF)
        h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
        h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
        total += h ^ h >> 16
    return total & 0xFFFFFFFF


@pytest.mark.parametrize("dtype", [np.float32, np.int32, jnp.bfloat16, np.uint8])
def test_checksum_is_the_sum_of_hashes(dtype: Any) -> None:
    x = np.random.default_rng(1).integers(0, 100, (3, 5, 2)).astype(dtype)
    assert int(checksum(jnp.asarray(x))) == numpy_checksum(x)
    assert int(checksum(jnp.asarray(x[0, 0, 0]))) == numpy_checksum(x[:1, 0, 0])


def test_checksum_does_not_depend_on_the_sharding() -> None:
    setup = setup_of("tp=2,pp=2,dp=2, zero 3")
    x = np.random.default_rng(2).standard_normal((16, 8, 24)).astype(np.float32)
    found = {spec: checksums({"x": jax.device_put(x, NamedSharding(setup.mesh, spec))})["x"]
             for spec in (P(), P("pp"), P(None, ("dp", "tp")), P("tp", "pp", "dp"))}
    assert set(found.values()) == {numpy_checksum(x)}


@pytest.mark.parametrize("change", ["two rows swapped", "two signs", "lowest bit", "-0.0"])
def test_checksum_sees_a_change(change: str) -> None:
    x = np.random.default_rng(3).standard_normal((4, 6)).astype(np.float32)
    x[2, 3] = 0.0
    y = x.copy()
    match change:
        case "two rows swapped":
            y[[0, 1]] = x[[1, 0]]
        case "two signs":
            y[0, :2] *= -1
        case "lowest bit":
            y.view(np.uint32)[3, 5] ^= 1
        case _:
            y[2, 3] = -0.0
    assert int(checksum(jnp.asarray(x))) != int(checksum(jnp.asarray(y)))
