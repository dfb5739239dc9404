import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from geometries import FLASH, HOMOGENEOUS, ODD_BYTES, SHARED, V41, toy_geometry

from hybridkv import formats
from hybridkv.kinds import Kind
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity
from hybridkv.state.packing import (
    WORD_BYTES,
    block_spans,
    put_blocks,
    put_snapshot,
    snapshot_spans,
    take_blocks,
    take_snapshot,
    words_of,
)
from hybridkv.state.snapshot import Snapshots, snapshot_bytes

TOY = toy_geometry()
ODD = dataclasses.replace(TOY, row_width=5, index_width=3, row_format=formats.BFLOAT16)
BLOCKS = 5


def random_bytes(tree, seed):
    """Every byte of a tree drawn at random, NaN and all."""
    rng = np.random.default_rng(seed)

    def draw(leaf):
        raw = rng.integers(0, 256, leaf.size * leaf.dtype.itemsize, np.uint8)
        return jnp.asarray(raw.view(leaf.dtype).reshape(leaf.shape))

    return jax.tree.map(draw, tree)


def raw(tree):
    return [np.asarray(x).view(np.uint8) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    "geometry",
    [TOY, ODD, ODD_BYTES, FLASH, V41],
    ids=["toy", "odd", "odd bytes", "flash", "v4.1"],
)
def test_blocks_come_back_with_every_bit_and_nothing_else_changes(geometry):
    empty = Cache.init(geometry, Capacity(blocks=BLOCKS, slots=1, blocks_per_sequence=2))
    cache = random_bytes(empty, 0)
    places = jnp.asarray([3, 0, BLOCKS, 1], jnp.int32)
    words = take_blocks(cache, places)
    after = put_blocks(empty, words, places)
    pairs = zip(raw(cache.compressed), raw(after.compressed), strict=True)
    pairs = [*pairs, *zip(raw(cache.indexer), raw(after.indexer), strict=True)]
    for before, now in pairs:
        np.testing.assert_array_equal(now[[3, 0, 1]], before[[3, 0, 1]])
        assert not now[[2, 4]].any()


@pytest.mark.parametrize(
    "geometry", [TOY, ODD, ODD_BYTES, FLASH], ids=["toy", "odd", "odd bytes", "flash"]
)
def test_a_snapshot_comes_back_with_every_bit(geometry):
    pool = random_bytes(Snapshots.init(geometry, 3), 1)
    words = take_snapshot(pool, jnp.int32(2))
    after = put_snapshot(Snapshots.init(geometry, 3), words, jnp.int32(1))
    for before, now in zip(raw(pool), raw(after), strict=True):
        np.testing.assert_array_equal(now[1], before[2])
        assert not now[[0, 2]].any()


@pytest.mark.parametrize("geometry", [TOY, FLASH, SHARED, V41])
def test_words_of_a_kind_stand_together_and_are_its_bytes(geometry):
    spans = block_spans(geometry)
    assert words_of(spans) * WORD_BYTES == geometry.block_bytes
    assert [span.start for span in spans.values()] == [0, *[s.stop for s in spans.values()]][:-1]
    sizes = {kind: (s.stop - s.start) * WORD_BYTES for kind, s in snapshot_spans(geometry).items()}
    assert sizes == {kind: size for kind, size in snapshot_bytes(geometry).items() if size}


def test_a_kind_is_where_its_span_says():
    cache = Cache.init(TOY, Capacity(blocks=2, slots=1, blocks_per_sequence=2))
    marked = dataclasses.replace(cache, indexer=jax.tree.map(lambda x: x + 1, cache.indexer))
    words = np.asarray(take_blocks(marked, jnp.asarray([1], jnp.int32))[0])
    spans = block_spans(TOY)
    assert not words[spans[Kind.COMPRESSED]].any()
    assert words[spans[Kind.INDEXER]].all()


def test_a_model_without_a_kind_has_no_span_and_no_words():
    assert list(block_spans(HOMOGENEOUS)) == [Kind.COMPRESSED]
    assert snapshot_spans(HOMOGENEOUS) == {}
    words = take_snapshot(Snapshots.init(HOMOGENEOUS, 2), jnp.int32(0))
    assert words.shape == (0,)
    assert jax.tree.leaves(put_snapshot(Snapshots.init(HOMOGENEOUS, 2), words, jnp.int32(0))) == []
