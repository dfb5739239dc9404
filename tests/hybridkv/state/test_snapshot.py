import jax
import jax.numpy as jnp
import numpy as np
import pytest
from geometries import FLASH, HOMOGENEOUS, SHARED, toy_geometry

from hybridkv.kinds import Kind
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity
from hybridkv.state.snapshot import Snapshots, admit, snapshot_bytes, write_snapshot

TOY = toy_geometry()
CAPACITY = Capacity(blocks=4, slots=3, blocks_per_sequence=2)


def counted(tree, start=1.0):
    """The tree with every element its own number."""
    leaves, structure = jax.tree.flatten(tree)
    out = []
    for leaf in leaves:
        values = start + np.arange(leaf.size).reshape(leaf.shape)
        out.append(jnp.asarray(values.astype(leaf.dtype)))
        start += leaf.size
    return jax.tree.unflatten(structure, out)


def test_a_snapshot_of_v4_flash_is_windows_and_overlaps():
    assert snapshot_bytes(FLASH) == {
        Kind.WINDOW: 43 * 128 * 584,
        Kind.TAIL: 21 * 4 * (512 + 128) * 2 * 4,
    }


def test_a_homogeneous_model_has_nothing_to_snapshot():
    assert sum(snapshot_bytes(HOMOGENEOUS).values()) == 0
    assert jax.tree.leaves(Snapshots.init(HOMOGENEOUS, 3)) == []


@pytest.mark.parametrize("geometry", [TOY, SHARED, FLASH], ids=["toy", "shared", "flash"])
def test_the_trio_agrees_and_abstract_allocates_nothing(geometry):
    abstract = Snapshots.abstract(geometry, 5)
    sizes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(abstract))
    assert sizes == 5 * sum(snapshot_bytes(geometry).values())
    mesh = jax.make_mesh((2,), ("data",))
    shardings = Snapshots.shardings(geometry, 4, mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(Snapshots.abstract(geometry, 4))


def test_init_matches_abstract():
    real, abstract = Snapshots.init(TOY, 2), Snapshots.abstract(TOY, 2)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), real, abstract)
    assert all(jax.tree.leaves(same))


def test_a_round_trip_between_slots_copies_windows_and_overlaps_and_nothing_else():
    cache = counted(Cache.init(TOY, CAPACITY))
    pool = write_snapshot(Snapshots.init(TOY, 2), cache, jnp.int32(1), jnp.int32(1))
    table = jnp.asarray([3, 0], jnp.int32)
    after = admit(cache, pool, jnp.int32(2), table, jnp.int32(16), jnp.int32(1))
    for before, now in zip(
        jax.tree.leaves(cache.sequence.window), jax.tree.leaves(after.sequence.window), strict=True
    ):
        np.testing.assert_array_equal(now[2], before[1])
        np.testing.assert_array_equal(now[:2], before[:2])
    for before, now in zip(cache.sequence.tails.main, after.sequence.tails.main, strict=True):
        if before is None:
            continue
        np.testing.assert_array_equal(now.kv, before.kv)
        np.testing.assert_array_equal(now.gate, before.gate)
        if before.earlier_kv is not None:
            np.testing.assert_array_equal(now.earlier_kv[2], before.earlier_kv[1])
            np.testing.assert_array_equal(now.earlier_gate[2], before.earlier_gate[1])
            np.testing.assert_array_equal(now.earlier_kv[:2], before.earlier_kv[:2])
    for before, now in zip(cache.sequence.tails.index, after.sequence.tails.index, strict=True):
        if before is not None:
            np.testing.assert_array_equal(now.earlier_kv[2], before.earlier_kv[1])
    np.testing.assert_array_equal(after.block_table[2], [3, 0])
    np.testing.assert_array_equal(after.block_table[:2], cache.block_table[:2])
    assert int(after.lengths[2]) == 16
    assert jax.tree.leaves(after.compressed)[0] is jax.tree.leaves(cache.compressed)[0]


def test_a_slot_that_does_not_exist_seats_nobody():
    cache = counted(Cache.init(TOY, CAPACITY))
    pool = counted(Snapshots.init(TOY, 2))
    table = jnp.zeros((2,), jnp.int32)
    after = admit(cache, pool, jnp.int32(3), table, jnp.int32(9), jnp.int32(0))
    same = jax.tree.map(lambda a, b: bool((a == b).all()), cache, after)
    assert all(jax.tree.leaves(same))
