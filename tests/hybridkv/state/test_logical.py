"""A sequence's words are a function of its tokens: nothing of its slot or its past is in them."""

import dataclasses

import jax
import numpy as np
import pytest
from geometries import FLASH, HOMOGENEOUS, ODD_BYTES, SHARED, toy_geometry

from hybridkv import formats
from hybridkv.kinds import Kind
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity
from hybridkv.state.logical import state_of, state_words, whole_cells
from hybridkv.state.packing import WORD_BYTES, block_spans, state_spans, words_of

TOY = toy_geometry()
ODD = dataclasses.replace(TOY, row_width=5, index_width=3, window_format=formats.BFLOAT16)
ONE = Capacity(blocks=1, slots=1, blocks_per_sequence=1)


def random_state(geometry, seed=0):
    rng = np.random.default_rng(seed)

    def draw(x):
        shape = x.shape[1:]
        raw = rng.integers(0, 256, int(np.prod(shape)) * x.dtype.itemsize, np.uint8)
        return raw.view(x.dtype).reshape(shape)

    return jax.tree.map(draw, Cache.abstract(geometry, ONE).sequence)


def raw(x):
    return np.ascontiguousarray(x).view(np.uint8)


@pytest.mark.parametrize("position", [1, 3, 4, 7, 8, 17, 100, 101])
@pytest.mark.parametrize(
    "geometry", [TOY, ODD, ODD_BYTES, SHARED], ids=["toy", "odd", "odd bytes", "shared"]
)
def test_what_a_position_defines_comes_back_at_its_place(geometry, position):
    state = random_state(geometry)
    words = state_words(state, position)
    assert words.shape == (words_of(state_spans(geometry)),)
    after = state_of(geometry, words, position)
    for before, now in zip(state.window.layers, after.window.layers, strict=True):
        if before is None:
            continue
        window = before.shape[0]
        kept = [p % window for p in range(max(position - window + 1, 0), position)]
        np.testing.assert_array_equal(raw(now)[kept], raw(before)[kept])
        assert not raw(np.delete(now, kept, axis=0)).any()
    for before, now in zip(state.tails.main, after.tails.main, strict=True):
        if before is None:
            continue
        ratio = before.kv.shape[0]
        there = position % ratio
        for name in ("kv", "gate"):
            old, new = raw(getattr(before, name)), raw(getattr(now, name))
            np.testing.assert_array_equal(new[:there], old[:there])
            assert not new[there:].any()
        if before.earlier_kv is not None:
            expected = raw(before.earlier_kv) if position >= ratio else 0 * raw(before.earlier_kv)
            np.testing.assert_array_equal(raw(now.earlier_kv), expected)


def test_what_others_left_in_a_slot_is_in_no_word():
    """Two slots with one meaning and other leftovers have the same words."""
    state = random_state(TOY, 1)
    for position in (2, 5, 33):
        words = state_words(state, position)
        other = random_state(TOY, 2)
        mine = state_of(TOY, words, position)

        def mixed(own, theirs, position=position):
            unused = ~raw(own).reshape(len(own), -1).any(axis=1)
            return np.where(unused[:, None], theirs, own)

        both = jax.tree.map(mixed, mine, other)
        np.testing.assert_array_equal(state_words(both, position), words)


@pytest.mark.parametrize("geometry", [TOY, FLASH, SHARED, HOMOGENEOUS])
def test_spans_of_a_state_are_its_bytes(geometry):
    sizes = {kind: (s.stop - s.start) * WORD_BYTES for kind, s in state_spans(geometry).items()}
    assert sizes == {kind: size for kind, size in geometry.sequence_bytes.items() if size}


def test_rows_of_no_whole_cell_are_zero():
    """TOY: blocks of 16 tokens, layers of ratio 4, 16 and 4, index rows beside those of 4."""
    spans, words = block_spans(TOY), np.full(words_of(block_spans(TOY)), 7, np.uint32)
    np.testing.assert_array_equal(whole_cells(TOY, words, 32), words)
    after = whole_cells(TOY, words, 32 + 9)  # two whole cells of 4, none of 16
    rows = after[spans[Kind.COMPRESSED]]
    sizes = [4 * 16, 16, 4 * 16]
    first, second, third = np.split(rows, np.cumsum(sizes)[:-1])
    for part in (first, third):
        assert (part[: 2 * 16] == 7).all()
        assert not part[2 * 16 :].any()
    assert not second.any()
    index = after[spans[Kind.INDEXER]].reshape(2, 4, 8)
    assert (index[:, :2] == 7).all()
    assert not index[:, 2:].any()


def test_packed_rows_of_no_whole_cell_are_zero_to_the_byte():
    """Rows of 9 and index rows of 5 bytes: a word holds bytes of the last kept and the next one."""
    geometry = ODD_BYTES
    words = np.full(words_of(block_spans(geometry)), 0x07070707, np.uint32)
    after = whole_cells(geometry, words, 32 + 9).view(np.uint8)
    starts = np.cumsum([0, 36, 12, 36, 20, 20])  # the row of ratio 16 is filled up to 12
    for start, stop, size in zip(starts[:-1], starts[1:], (9, 0, 9, 5, 5), strict=True):
        part = after[start:stop]
        assert (part[: 2 * size] == 7).all()
        assert not part[2 * size :].any()
    assert starts[-1] == after.size
