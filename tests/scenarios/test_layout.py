"""Bytes of rows and blocks: sizes, strides, addresses, and who may read them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from geometries import FLASH, PRO, V41, toy_geometry
from shelves import Shelf

from hybridkv import formats
from hybridkv.blocks.entries import Form, Tier
from hybridkv.engine.steps import idle_tile, prompt_tiles
from hybridkv.errors import UserError
from hybridkv.geometry import Geometry, LayerGeometry
from hybridkv.kinds import Kind
from hybridkv.prefixes.checks import byte_alignment
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.policy import DENSE, NEVER
from hybridkv.state.cache import Cache, cache_bytes
from hybridkv.state.capacity import Capacity
from hybridkv.state.compressed import write_rows
from pallas_kernels.packing import api as packing
from pallas_kernels.packing.layout import layout_named
from scenarios.runs import GEOMETRY, plan_on, tokens

BLOCKS, ROWS = 6, 4


def pool(sharded=False):
    """Zeros, over two devices where asked."""
    zeros = jnp.zeros((BLOCKS, ROWS, 2), jnp.float32)
    if not sharded:
        return zeros
    mesh = jax.make_mesh((2,), ("blocks",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("blocks")
    return jax.device_put(zeros, jax.sharding.NamedSharding(mesh, spec))


def written(into, blocks, whole=True):
    """Which blocks a write of a row through a table entry for each of ``blocks`` changed."""
    table = jnp.asarray([[block] for block in blocks], jnp.int32)
    count = len(blocks)
    after = jax.jit(write_rows)(
        into,
        table,
        jnp.full((count, 1), 1, jnp.int32),
        jnp.broadcast_to(jnp.asarray(whole), (count, 1)),
        jnp.arange(1, count + 1, dtype=jnp.float32)[:, None, None] * jnp.ones((1, 1, 2)),
    )
    changed = np.asarray(after)[:, 1, 0]
    assert not np.asarray(after)[:, [0, 2, 3]].any()
    return changed.tolist()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("block", [BLOCKS - 1, BLOCKS, BLOCKS + 1, 2**31 - 1])
def test_b172_a_block_past_the_pool_is_written_nowhere(block, sharded):
    expected = [0.0] * BLOCKS
    if block < BLOCKS:
        expected[block] = 1.0
    assert written(pool(sharded), [block]) == expected


@pytest.mark.parametrize(
    "geometry", [FLASH, PRO, V41, GEOMETRY], ids=["flash", "pro", "v41", "toy"]
)
def test_b172_every_array_has_the_blocks_that_admission_counts(geometry):
    cache = Cache.abstract(geometry, Capacity(blocks=37, slots=2, blocks_per_sequence=5))
    pools = jax.tree.leaves((cache.compressed, cache.indexer))
    assert {leaf.shape[0] for leaf in pools} == {37}


def test_b172_every_place_that_admission_gives_is_in_the_arrays(bench):
    runner = bench.runner
    reservation = runner.allocator.reserve(blocks=400)
    receipt = runner.allocator.take(reservation, Form.BLOCK, 400)
    runner.allocator.cancel(reservation)
    places = runner.allocator.entries.place[Tier.DEVICE, receipt.entries]
    assert sorted(places.tolist()) == list(range(400))
    runner.allocator.release(receipt)


@pytest.mark.parametrize("sharded", [False, True])
def test_b173_padding_never_lands_on_a_row_that_counts(sharded):
    whole = [[True], [False], [False], [False]]
    assert written(pool(sharded), [2, 2, 2, BLOCKS], whole) == [0, 0, 1.0, 0, 0, 0]
    assert written(pool(sharded), [BLOCKS, 2, BLOCKS, BLOCKS]) == [0, 0, 2.0, 0, 0, 0]


@pytest.mark.parametrize("sharded", [False, True])
def test_b174_no_write_relies_on_being_clamped(sharded):
    assert written(pool(sharded), [BLOCKS] * 3) == [0.0] * BLOCKS
    beyond = jax.jit(write_rows)(
        pool(sharded),
        jnp.asarray([0, 1], jnp.int32),
        jnp.asarray([2 * ROWS + 1], jnp.int32),  # a row past the table of two blocks
        jnp.asarray([False]),
        jnp.ones((1, 2), jnp.float32),
    )
    assert not np.asarray(beyond).any()


def test_b176_no_two_layers_share_bytes(bench):
    leaves = jax.tree.leaves((bench.runner.cache, bench.runner.snapshots))
    addresses = sorted((x.unsafe_buffer_pointer(), x.nbytes) for x in leaves)
    ends = [start + size for start, size in addresses]
    assert all(end <= start for end, (start, _) in zip(ends, addresses[1:], strict=False))


@pytest.mark.parametrize("format", [formats.FLOAT32, formats.BFLOAT16])
def test_b177_what_is_written_in_a_format_is_read_in_it(format):
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(5, 16)), jnp.float32)
    stored = packing.encode(rows, format.name)
    assert stored.nbytes == 5 * format.row_bytes(16)
    tolerance = 0.0 if format is formats.FLOAT32 else 2**-8
    np.testing.assert_allclose(packing.decode(stored, format.name), rows, rtol=tolerance)


def test_b177_rows_in_another_layout_are_another_identity():
    ours = Identity.of_geometry(GEOMETRY, weights="w", numerics="n")
    for name in ("window_format", "row_format", "index_format"):
        other = dataclasses.replace(GEOMETRY, **{name: formats.BFLOAT16})
        theirs = Identity.of_geometry(other, weights="w", numerics="n")
        assert "layout" in ours.differences(theirs)
        assert ours.root("") != theirs.root("")


def test_b178_the_last_blocks_of_the_pools_are_as_good_as_the_first(bench):
    runner, ids, after = bench.runner, bench.ids(150), bench.ids(4)
    cold, namespace = bench.cold(ids, after), bench.namespace()
    reservation = runner.allocator.reserve(blocks=400)
    receipt = runner.allocator.take(reservation, Form.BLOCK, 400)
    runner.allocator.cancel(reservation)
    places = runner.allocator.entries.place[Tier.DEVICE, receipt.entries]
    last, others = runner.allocator.split(receipt, places >= 370)
    runner.allocator.release(last)
    seen = []
    bench.run(ids, after, namespace, policy=DENSE)
    warm = bench.run(ids, after, namespace, prepare=lambda s: seen.append(bench.places(s)))
    assert seen[0].min() >= 370 > 400 // 4
    assert warm.start == 144
    assert warm.continues(cold)
    runner.allocator.release(others)


def test_b180_index_rows_lie_in_arrays_of_their_own(bench):
    cache, geometry = bench.runner.cache, bench.runner.model.geometry
    for layer, index in zip(geometry.layers, cache.indexer.layers, strict=True):
        assert (index is not None) == layer.stores_index
        if index is not None:
            rows = geometry.rows_per_block(layer.ratio)
            assert index.shape == (400, rows, geometry.index_width)


def test_b181_groups_of_one_width_and_two_ratios_stay_two_groups():
    layers = (LayerGeometry(ratio=1), LayerGeometry(ratio=4))
    geometry = Geometry(layers=layers, row_width=16)
    cache = Cache.abstract(geometry, Capacity(blocks=3, slots=1, blocks_per_sequence=3))
    assert geometry.ratios == (1, 4)
    assert [x.shape for x in cache.compressed.layers] == [(3, 4, 16), (3, 1, 16)]
    assert geometry.block_bytes == 5 * 16 * 4


def test_b182_pools_larger_than_addresses_are_refused_when_they_are_made():
    byte_alignment(FLASH, 2**25, "cpu")
    with pytest.raises(UserError, match="exceed int32: use fewer blocks"):
        byte_alignment(FLASH, 2**26, "cpu")


def test_b184_a_row_has_the_bytes_of_its_own_width():
    for width, size in ((512, 584), (448, 520)):
        geometry = dataclasses.replace(FLASH, row_width=width)
        assert geometry.row_bytes == size
    narrow = dataclasses.replace(FLASH, row_width=448)
    one, two = (Identity.of_geometry(g, weights="w", numerics="n") for g in (FLASH, narrow))
    assert one.differences(two) == ("geometry",)


@pytest.mark.parametrize("geometry", [FLASH, V41, GEOMETRY], ids=["flash", "v41", "toy"])
def test_b185_each_kind_is_counted_in_its_own_bytes(geometry):
    capacity = Capacity(blocks=10, slots=1, blocks_per_sequence=10)
    counted = cache_bytes(geometry, capacity)
    said = geometry.cache_bytes(10 * geometry.block_tokens)
    assert {kind: counted[kind] for kind in said} == dict(said)
    assert counted[Kind.INDEXER] * geometry.row_bytes != counted[Kind.COMPRESSED]


SCALED = pytest.mark.parametrize("name", ["fp8_rope16", "fp4_e4m3", "fp8_index"])
"""Formats with scales of powers of two, of floats of eight bits and of plain floats."""


@functools.cache
def scaled_rows(name):
    """Rows of very different sizes, as they are and as they are stored; and what reads them."""
    layout = layout_named(name, 128, 0)
    sizes = np.float32(2.0) ** np.array([[-2], [4], [0], [-1], [5], [1]], np.float32)
    rows = np.random.default_rng(0).normal(size=(6, 128)).astype(np.float32) * sizes
    encode = jax.jit(functools.partial(packing.encode, format=layout))
    decode = jax.jit(functools.partial(packing.decode, format=layout))
    return rows, layout, lambda x: np.asarray(encode(x)), lambda x: np.asarray(decode(x))


@SCALED
def test_b186_each_row_keeps_its_scales_wherever_it_is_gathered_to(name):
    rows, _, encode, decode = scaled_rows(name)
    stored = encode(rows)
    back = decode(stored)
    errors = np.abs(back - rows).max(axis=1) / np.abs(rows).max(axis=1)
    assert errors.max() < (2**-2 if name == "fp4_e4m3" else 2**-4)  # as for rows of one size
    for order in ([4, 0, 0, 5, 2, 1], [3] * 6):
        np.testing.assert_array_equal(decode(stored[order]), back[order])


@SCALED
def test_b188_the_scale_that_is_written_is_the_one_that_is_read(name):
    """Twice the numbers are the same codes under twice the scale, and the other way round."""
    rows, layout, encode, decode = scaled_rows(name)
    stored, twice = encode(rows), encode(2 * rows)
    codes, scales = layout.data, layout.scales
    np.testing.assert_array_equal(twice[:, codes], stored[:, codes])
    form = np.float32 if name == "fp8_index" else np.uint8
    before, after = (np.ascontiguousarray(x[:, scales]).view(form) for x in (stored, twice))
    one_power_more = {"fp8_rope16": before + 1, "fp4_e4m3": before + 8, "fp8_index": 2 * before}
    np.testing.assert_array_equal(after, one_power_more[name])
    mixed = stored.copy()
    mixed[::2, scales] = twice[::2, scales]
    factors = np.where(np.arange(6) % 2, 1, 2)[:, None]
    np.testing.assert_array_equal(decode(mixed), factors * decode(stored))


def test_b189_rows_of_another_dtype_are_a_miss():
    shelf, ids = Shelf(GEOMETRY), tokens(65, 1)
    shelf.store(ids, snapshots=(64,))
    other = dataclasses.replace(GEOMETRY, row_format=formats.BFLOAT16)
    theirs = Identity.of_geometry(other, weights="w", numerics="n")
    assert theirs.root("") != shelf.identity.root("")
    assert plan_on(shelf, ids).start == 64


def test_b190_every_index_is_of_one_dtype(bench):
    runner = bench.runner
    ids, namespace = bench.ids(40), bench.namespace()
    bench.run(ids, bench.ids(0), namespace, policy=DENSE)
    found = bench.plan(ids, namespace)
    (batch,) = prompt_tiles(ids[:16], 0, runner.options, 3)
    arrays = [
        runner.cache.block_table,
        runner.cache.lengths,
        runner.allocator.entries.place,
        runner.allocator.entries.parent,
        found.entries,
        *jax.tree.leaves(batch),
        *jax.tree.leaves(idle_tile(runner.options, 3)),
    ]
    assert {np.dtype(x.dtype) for x in arrays} == {np.dtype(np.int32)}


def test_b192_another_block_size_is_another_layout():
    coarse = dataclasses.replace(GEOMETRY, cells_per_block=2)
    ours, theirs = (Identity.of_geometry(g, weights="w", numerics="n") for g in (GEOMETRY, coarse))
    assert "layout" in ours.differences(theirs)
    foreign = Shelf(coarse).chain(tokens(64, 1))
    with pytest.raises(ValueError, match="not this directory's"):
        Shelf(GEOMETRY).directory.find(foreign)


def test_a_run_in_scattered_blocks_gives_the_bits_of_one_in_order(bench):
    ids, after = bench.ids(120), bench.ids(4)
    cold, runner = bench.cold(ids, after), bench.runner
    reservation = runner.allocator.reserve(blocks=60)
    receipt = runner.allocator.take(reservation, Form.BLOCK, 60)
    runner.allocator.cancel(reservation)
    shuffled = np.random.default_rng(0).permutation(60)
    left = receipt
    for one in receipt.entries[shuffled]:
        one_, left = runner.allocator.split(left, left.entries == one)
        runner.allocator.release(one_)
    seen = []
    warm = bench.run(
        ids,
        after,
        bench.namespace(),
        policy=NEVER,
        prepare=lambda s: seen.append(bench.places(s)),
    )
    runner.allocator.release(left)
    assert (np.diff(seen[0]) != 1).any()
    assert warm.continues(cold)


def test_toy_blocks_are_addressable_on_every_platform():
    for ratios in ((4, 16), (1, 4), (2, 8)):
        for platform in ("cpu", "gpu", "tpu"):
            byte_alignment(toy_geometry(ratios), 1000, platform)
