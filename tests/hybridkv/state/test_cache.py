"""The cache as declarations, abstract arrays, shardings and real arrays: one tree, four times."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from geometries import FLASH, HOMOGENEOUS, PRO, SHARED, V41, changed, toy_geometry

from hybridkv import formats
from hybridkv.kinds import Kind
from hybridkv.state.cache import Cache, assign_in_order, cache_bytes
from hybridkv.state.capacity import Capacity

TOY = toy_geometry()
PACKED = changed(
    TOY,
    window_format=formats.FP8_BLOCK32,
    row_format=formats.FP8_ROPE16,
    rope_width=8,
    index_format=formats.BFLOAT16,
)
SMALL = {"toy": TOY, "packed": PACKED, "shared rows": SHARED, "homogeneous": HOMOGENEOUS}
SIZES = Capacity(blocks=6, slots=2, blocks_per_sequence=3)


@pytest.fixture(scope="module")
def mesh():
    return jax.sharding.Mesh(np.asarray(jax.devices()), ("data",))


def forms(tree):
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("geometry", SMALL.values(), ids=SMALL)
def test_abstract_shardings_and_real_arrays_are_one_tree(geometry, mesh):
    abstract = Cache.abstract(geometry, SIZES)
    real = Cache.init(geometry, SIZES)
    shardings = Cache.shardings(geometry, SIZES, mesh)
    assert jax.tree.structure(abstract) == jax.tree.structure(real)
    assert jax.tree.structure(abstract) == jax.tree.structure(shardings)
    assert forms(abstract) == forms(real)
    for form, sharding in zip(jax.tree.leaves(abstract), jax.tree.leaves(shardings), strict=True):
        assert len(sharding.spec) == len(form.shape)


@pytest.mark.parametrize("geometry", SMALL.values(), ids=SMALL)
def test_an_empty_cache_is_finite_and_assigns_no_block(geometry):
    cache = Cache.init(geometry, SIZES)
    assert (np.asarray(cache.block_table) == SIZES.blocks).all()
    assert (np.asarray(cache.lengths) == 0).all()
    pools = jax.tree.leaves((cache.compressed, cache.indexer, cache.sequence))
    assert all((np.asarray(x) == 0).all() for x in pools)
    assert not any(x.committed for x in jax.tree.leaves(cache))


def test_arrays_stand_where_the_placement_says(mesh):
    shardings = Cache.shardings(TOY, SIZES, mesh)
    cache = Cache.init(TOY, SIZES, shardings)
    for array, sharding in zip(jax.tree.leaves(cache), jax.tree.leaves(shardings), strict=True):
        assert array.sharding == sharding
    slots = cache.sequence.window.layers[0]
    assert {s.data.shape for s in slots.addressable_shards} == {(1, 8, 16)}
    one = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    assert {x.sharding for x in jax.tree.leaves(Cache.init(TOY, SIZES, one))} == {one}


def test_sequences_are_spread_and_rows_stand_whole(mesh):
    shardings = Cache.shardings(TOY, SIZES, mesh)
    spread = jax.tree.leaves((shardings.sequence, shardings.block_table, shardings.lengths))
    assert {s.spec[0] for s in spread} == {"data"}
    assert all(set(s.spec[1:]) <= {None} for s in spread)
    whole = jax.tree.leaves((shardings.compressed, shardings.indexer))
    assert all(s.is_fully_replicated for s in whole)


def test_rules_and_meshes_may_name_other_axes(mesh):
    shardings = Cache.shardings(TOY, SIZES, mesh, {"blocks": "data", "width": "model"})
    assert shardings.compressed.layers[1].spec == jax.sharding.PartitionSpec("data", None, None)
    assert shardings.lengths.is_fully_replicated
    other = jax.sharding.Mesh(np.asarray(jax.devices()), ("model",))
    assert all(s.is_fully_replicated for s in jax.tree.leaves(Cache.shardings(TOY, SIZES, other)))


def test_a_million_tokens_are_sized_without_allocating(mesh):
    capacity = Capacity.for_tokens(FLASH, tokens=2**20, slots=2)
    before = len(jax.live_arrays())
    abstract = Cache.abstract(FLASH, capacity)
    shardings = Cache.shardings(FLASH, capacity, mesh)
    assert len(jax.live_arrays()) == before
    assert jax.tree.structure(abstract) == jax.tree.structure(shardings)
    blocks = 2 * 2**20 // 128
    expected = {
        "sparse": jax.ShapeDtypeStruct((blocks, 32, 584), jnp.uint8),
        "heavy": jax.ShapeDtypeStruct((blocks, 1, 584), jnp.uint8),
        "index": jax.ShapeDtypeStruct((blocks, 32, 68), jnp.uint8),
        "window": jax.ShapeDtypeStruct((2, 128, 584), jnp.uint8),
    }
    assert abstract.compressed.layers[0] is None
    assert abstract.compressed.layers[2] == expected["sparse"]
    assert abstract.compressed.layers[3] == expected["heavy"]
    assert abstract.indexer.layers[3] is None
    assert abstract.indexer.layers[42] == expected["index"]
    assert set(abstract.sequence.window.layers) == {expected["window"]}
    assert abstract.sequence.tails.main[3].kv.shape == (2, 128, 512)
    assert abstract.sequence.tails.main[3].earlier_kv is None
    assert abstract.sequence.tails.index[2].kv.shape == (2, 4, 256)
    assert abstract.sequence.tails.index[2].earlier_gate.shape == (2, 4, 128)


GEOMETRIES = SMALL | {"Flash": FLASH, "Pro": PRO, "V4.1": V41}


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_bytes_of_the_arrays_are_those_that_the_geometry_counts(geometry):
    capacity = Capacity(blocks=7, slots=3, blocks_per_sequence=5)
    sizes = cache_bytes(geometry, capacity)
    tokens = 7 * geometry.block_tokens
    for kind, each in geometry.bytes_per_token.items():
        assert sizes[kind] == each * tokens
    for kind, each in geometry.sequence_bytes.items():
        assert sizes[kind] == 3 * each
    assert sizes[Kind.COMPRESSED] + sizes[Kind.INDEXER] == 7 * geometry.block_bytes
    abstract = Cache.abstract(geometry, capacity)
    for kind, tree in (
        (Kind.COMPRESSED, abstract.compressed),
        (Kind.INDEXER, abstract.indexer),
        (Kind.WINDOW, abstract.sequence.window),
        (Kind.TAIL, abstract.sequence.tails),
    ):
        assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)) == sizes[kind]


def test_a_cache_for_some_tokens_has_the_bytes_of_one_sequence():
    for tokens in (1, 16, 17, 100):
        capacity = Capacity.for_tokens(TOY, tokens=tokens)
        assert cache_bytes(TOY, capacity) == TOY.cache_bytes(tokens)


def numbered(geometry) -> Cache:
    """A cache in which every array holds a number of its own."""
    cache = Cache.init(geometry, SIZES)
    leaves, structure = jax.tree.flatten(cache)
    return jax.tree.unflatten(structure, [jnp.full_like(x, i + 1) for i, x in enumerate(leaves)])


@pytest.mark.parametrize("geometry", SMALL.values(), ids=SMALL)
def test_a_cache_taken_apart_by_layer_goes_together_again(geometry):
    cache = numbered(geometry)
    layers = tuple(cache.layer(n) for n in range(len(geometry.layers)))
    again = cache.with_layers(layers, cache.lengths)
    assert jax.tree.structure(again) == jax.tree.structure(cache)
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(old, new)


def test_layers_that_share_rows_see_those_of_their_owner():
    cache = numbered(SHARED)
    assert cache.layer(2).rows is cache.compressed.layers[1]
    assert cache.layer(2).index is cache.indexer.layers[1]
    assert cache.layer(4).rows is cache.compressed.layers[3]
    assert cache.layer(2).window is cache.sequence.window.layers[2]
    assert cache.layer(2).tail is None
    assert cache.layer(0).rows is None


def test_blocks_assigned_in_order_belong_to_one_slot_each():
    cache = assign_in_order(Cache.init(TOY, SIZES))
    np.testing.assert_array_equal(cache.block_table, [[0, 1, 2], [3, 4, 5]])
    assert cache.block_table.dtype == jnp.int32


def test_too_few_blocks_for_all_tables_are_refused():
    small = Cache.init(TOY, dataclasses.replace(SIZES, blocks=5))
    with pytest.raises(ValueError, match="2 sequences of 3 blocks do not fit 5 blocks"):
        assign_in_order(small)


def test_slots_are_counted_by_the_lengths():
    assert Cache.abstract(TOY, dataclasses.replace(SIZES, slots=5)).slots == 5
