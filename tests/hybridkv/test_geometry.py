"""Everything that is derived from a geometry: bytes, blocks, minimum hits, replay lengths."""

import math
from fractions import Fraction

import numpy as np
import pytest
from geometries import (
    FLASH,
    FLASH_RATIOS,
    HOMOGENEOUS,
    PRO,
    PRO_RATIOS,
    SHARED,
    V41,
    changed,
    toy_geometry,
    v4,
)

from hybridkv import formats
from hybridkv.geometry import Geometry, LayerGeometry
from hybridkv.kinds import Kind

TOY5 = toy_geometry((0, 4, 16, 4, 16))


@pytest.mark.parametrize(
    ("format", "width", "rope", "size"),
    [
        (formats.FLOAT32, 512, 64, 2048),
        (formats.BFLOAT16, 512, 64, 1024),
        (formats.FP8_ROPE16, 512, 64, 584),
        (formats.FP8_BLOCK32, 512, 64, 528),
        (formats.FP4_E4M3, 512, 64, 288),
        (formats.MXFP4, 128, 0, 68),
        (formats.FP8_INDEX, 128, 0, 132),
    ],
    ids=lambda x: getattr(x, "name", None),
)
def test_row_bytes_are_the_published_ones(format, width, rope, size):
    assert format.row_bytes(width, rope) == size


@pytest.mark.parametrize(
    ("geometry", "compressed", "index"),
    [
        (FLASH, Fraction(21 * 584, 4) + Fraction(20 * 584, 128), Fraction(21 * 68, 4)),
        (PRO, Fraction(30 * 584, 4) + Fraction(31 * 584, 128), Fraction(30 * 68, 4)),
        (V41, 3 * Fraction(288, 2) + 288, 3 * Fraction(68, 2) + 68),
    ],
    ids=["Flash", "Pro", "V4.1"],
)
def test_bytes_a_token_by_kind(geometry, compressed, index):
    assert geometry.bytes_per_token == {Kind.COMPRESSED: compressed, Kind.INDEXER: index}


@pytest.mark.parametrize(
    ("geometry", "total"),
    [
        (FLASH, Fraction("3514.25")),
        (PRO, Fraction("5031.4375")),
        (v4(FLASH_RATIOS, packed=False), 6880),
        (v4(PRO_RATIOS, packed=False), 9848),
        (V41, 890),
    ],
    ids=["Flash", "Pro", "Flash bfloat16", "Pro bfloat16", "V4.1"],
)
def test_bytes_a_token_are_the_published_ones(geometry, total):
    assert sum(geometry.bytes_per_token.values()) == total
    assert geometry.block_bytes == total * geometry.block_tokens


def test_a_cache_of_a_million_tokens_has_the_published_size():
    for geometry, gibibytes in ((FLASH, 3.43), (PRO, 4.91)):
        sizes = geometry.cache_bytes(2**20)
        whole = sizes[Kind.COMPRESSED] + sizes[Kind.INDEXER]
        assert round(whole / 2**30, 2) == gibibytes


def test_windows_of_a_sequence_have_the_published_bytes():
    assert FLASH.sequence_bytes[Kind.WINDOW] == 43 * 128 * 584 == 3_214_336
    assert PRO.sequence_bytes[Kind.WINDOW] == 61 * 128 * 584 == 4_559_872
    assert V41.sequence_bytes[Kind.WINDOW] == 40 * 128 * 528


def test_tails_of_a_sequence_have_the_bytes_of_the_release():
    """Reference section 7: a token's (kv, gate) is 8 KiB and 2 KiB (main and index) where rows
    overlap, 4 KiB at ratio 128; the overlap is 16 and 4 KiB a layer.
    """
    sparse = 4 * (8 + 2) * 1024 + (16 + 4) * 1024
    heavy = 128 * 4 * 1024
    assert FLASH.sequence_bytes[Kind.TAIL] == 21 * sparse + 20 * heavy
    assert PRO.sequence_bytes[Kind.TAIL] == 30 * sparse + 31 * heavy
    assert V41.sequence_bytes[Kind.TAIL] == 3 * 2 * (512 + 128) * 2 * 4


def test_cache_bytes_count_whole_blocks():
    for tokens, blocks in ((0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (160, 10)):
        sizes = TOY5.cache_bytes(tokens)
        assert sizes[Kind.COMPRESSED] == blocks * (2 * 4 + 2 * 1) * 16 * 4
        assert sizes[Kind.INDEXER] == blocks * 2 * 4 * 8 * 4
        assert {k: sizes[k] for k in TOY5.sequence_bytes} == TOY5.sequence_bytes
        assert set(sizes) == {Kind.COMPRESSED, Kind.INDEXER, Kind.WINDOW, Kind.TAIL}


def test_a_block_is_the_lcm_of_the_ratios():
    assert (FLASH.ratios, FLASH.block_tokens) == ((4, 128), 128)
    assert [FLASH.rows_per_block(ratio) for ratio in FLASH.ratios] == [32, 1]
    assert (V41.ratios, V41.block_tokens) == ((1, 2), 2)
    assert (TOY5.ratios, TOY5.block_tokens) == ((4, 16), 16)
    odd = toy_geometry((6, 4))
    assert (odd.ratios, odd.block_tokens) == ((4, 6), 12)
    assert changed(odd, cells_per_block=3).block_tokens == 36
    assert changed(odd, cells_per_block=3).rows_per_block(4) == 9


def test_cells_per_block_changes_no_byte_a_token():
    wide = changed(FLASH, cells_per_block=4)
    assert wide.bytes_per_token == FLASH.bytes_per_token
    assert wide.block_bytes == 4 * FLASH.block_bytes


def test_a_minimum_hit_is_whole_blocks_and_whole_tiles():
    assert FLASH.minimum_hit(128) == 128
    assert FLASH.minimum_hit(512) == 512
    assert changed(FLASH, cells_per_block=3).minimum_hit(256) == 768


def test_layers_that_share_rows_store_none():
    assert [n for n, layer in enumerate(V41.layers) if layer.stores_rows] == [2, 8, 14, 20]
    assert [V41.owner(n) for n in (0, 2, 7, 8, 19, 20, 39)] == [0, 2, 2, 8, 14, 20, 20]
    assert [n for n, layer in enumerate(V41.layers) if layer.compresses] == [2, 8, 14]
    assert [n for n, layer in enumerate(V41.layers) if layer.stores_index] == [2, 8, 14, 20]


def test_one_row_a_token_and_no_window_is_the_homogeneous_scheme():
    assert HOMOGENEOUS.block_tokens == 1
    assert HOMOGENEOUS.sequence_bytes == {Kind.WINDOW: 0, Kind.TAIL: 0}
    assert HOMOGENEOUS.bytes_per_token == {Kind.COMPRESSED: 3 * 64, Kind.INDEXER: 0}
    assert HOMOGENEOUS.longest_replay_tokens == 0
    assert all(HOMOGENEOUS.replay_tokens(p) == 0 for p in range(50))
    assert changed(HOMOGENEOUS, cells_per_block=16).minimum_hit(32) == 32


def test_windows_alone_need_no_blocks():
    sliding = toy_geometry((0, 0, 0))
    assert (sliding.ratios, sliding.block_tokens, sliding.block_bytes) == ((), 1, 0)
    assert sliding.longest_replay_tokens == 3 * 7


LAYER = LayerGeometry(window=8, ratio=4)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "at least one layer"),
        ((LayerGeometry(),), "layer 0 attends to nothing"),
        ((LAYER, LayerGeometry(window=-1, ratio=4)), "layer 1: window and ratio must not be neg"),
        ((LayerGeometry(window=1, ratio=-4),), "layer 0: window and ratio must not be negative"),
        ((LayerGeometry(window=1, indexed=True),), "layer 0 is indexed"),
        ((LayerGeometry(ratio=4, indexed=True),), "layer 0 is indexed: set .* index_width"),
        ((LayerGeometry(ratio=1, overlap=True),), "layer 0 overlaps"),
        ((LAYER, LayerGeometry(ratio=4, rows_of=1)), "layer 1 reads rows of 1: not a layer below"),
        ((LAYER, LayerGeometry(ratio=4, rows_of=-1)), "layer 1 reads rows of -1"),
        ((LAYER, LayerGeometry(ratio=2, rows_of=0)), r"layer 1 \(ratio 2\).*stores ratio 4"),
        (
            (LAYER, LayerGeometry(ratio=4, rows_of=0), LayerGeometry(ratio=4, rows_of=1)),
            r"layer 2 .*reads rows of layer 1, which stores none",
        ),
    ],
)
def test_an_impossible_geometry_is_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        Geometry(layers=layers, row_width=8)


# Replay: which (layer, token) values are exact when recomputation starts late.


def inexact_need(geometry: Geometry, position: int, start: int) -> list[str]:
    """What cannot be rebuilt exactly at ``position`` when tokens ``start ...`` are recomputed.

    Compressed rows of complete cells are stored; window rows, overlaps and open cells are not. A
    layer's value at a token is exact when its input there is, and every window row it reads.
    """
    value = np.arange(position) >= start  # embeddings of recomputed tokens
    lacks = []
    for number, layer in enumerate(geometry.layers):
        needed = set(range(max(position - layer.window + 1, 0), position))
        if layer.compresses:
            last = position // layer.ratio * layer.ratio
            needed |= set(range(last, position))
            if layer.overlap:
                needed |= set(range(max(last - layer.ratio, 0), last))
        if not all(value[t] for t in needed):
            lacks.append(f"layer {number}")
        value = np.array(
            [value[max(t - layer.window + 1, 0) : t + 1].all() for t in range(position)]
            if layer.window
            else value,
            bool,
        )
    return lacks


REPLAYED = {
    "toy": TOY5,
    "toy4": toy_geometry(),
    "small window": toy_geometry((4, 16, 4, 16), window=2),
    "heavy first": toy_geometry((16, 4, 0, 4), window=5),
    "shared rows": SHARED,
    "sliding": toy_geometry((0, 0, 0)),
    "no windows": toy_geometry((4, 16, 4), window=0),
    "windows between": Geometry(
        layers=(
            LayerGeometry(window=6),
            LayerGeometry(ratio=4, overlap=True),
            LayerGeometry(window=3, ratio=2),
            LayerGeometry(ratio=8),
        ),
        row_width=4,
    ),
    "homogeneous": HOMOGENEOUS,
}


@pytest.mark.parametrize("geometry", REPLAYED.values(), ids=REPLAYED)
def test_replay_rebuilds_everything_at_every_position_and_no_shorter_one_does(geometry):
    for position in range(110):
        length = geometry.replay_tokens(position)
        assert 0 <= length <= position
        assert not inexact_need(geometry, position, position - length), position
        if length:
            assert inexact_need(geometry, position, position - length + 1), position


def test_layers_times_window_is_too_short_in_a_small_geometry():
    lengths = {p: TOY5.replay_tokens(p) for p in range(64, 80)}
    assert sorted(set(lengths.values())) == [35, *range(36, 44)]
    assert (lengths[64], lengths[75], lengths[79]) == (35, 39, 43)
    assert inexact_need(TOY5, 75, 75 - 35) == ["layer 4"]
    assert inexact_need(TOY5, 79, 79 - 35) == ["layer 4"]
    assert TOY5.longest_replay_tokens == 43


@pytest.mark.parametrize("geometry", REPLAYED.values(), ids=REPLAYED)
def test_the_longest_replay_is_that_of_the_worst_position(geometry):
    worst = max(geometry.replay_tokens(p) for p in range(300))
    assert geometry.longest_replay_tokens == worst


def test_replay_of_the_released_models():
    """At a block boundary every window below the last layer warms up the next one."""
    assert FLASH.replay_tokens(128 * 100) == 43 * 127
    assert PRO.replay_tokens(128 * 100) == 61 * 127
    assert V41.replay_tokens(128 * 100) == 40 * 127
    period = math.lcm(*FLASH.ratios)
    assert FLASH.longest_replay_tokens == max(FLASH.replay_tokens(10**5 + i) for i in range(period))
