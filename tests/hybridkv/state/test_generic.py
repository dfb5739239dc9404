import jax.numpy as jnp
import numpy as np
import pytest
from geometries import FLASH, HOMOGENEOUS, PRO, SHARED, V41, changed, toy_geometry

from hybridkv.errors import UserError
from hybridkv.kinds import Kind
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds
from hybridkv.state.cache import cache_bytes
from hybridkv.state.capacity import Capacity
from hybridkv.state.generic import generic_geometry, join_fields, raw_fields, read_tokens
from hybridkv.state.snapshot import snapshot_bytes
from pallas_kernels.blocks import BlockRows

EVERY = {"flash": FLASH, "pro": PRO, "v41": V41, "shared": SHARED, "toy": toy_geometry()}


def widths(geometry, layer):
    return [field.width for field in raw_fields(geometry, layer)]


def test_a_raw_row_is_the_window_then_kv_and_gate_of_each_compressor():
    toy = toy_geometry()  # rows of 16 channels, index rows of 8
    assert widths(toy, 0) == [16]
    assert widths(toy, 1) == [16, 32, 32, 16, 16]  # overlap: two halves
    assert widths(toy, 2) == [16, 16, 16]
    assert [widths(FLASH, layer) for layer in (0, 2, 3)] == [
        [512],
        [512, 1024, 1024, 256, 256],
        [512, 512, 512],
    ]


def test_a_layer_that_reads_rows_of_another_has_none_of_its_own():
    assert widths(SHARED, 1) == [6, 6, 6, 4, 4]
    assert widths(SHARED, 2) == [6]


def test_a_row_of_one_token_has_no_gate():
    assert widths(SHARED, 3) == [6]
    assert raw_fields(SHARED, 3).main.gate is None


@pytest.mark.parametrize("name", EVERY)
def test_fields_stand_side_by_side_and_fit_the_uniform_row(name):
    geometry = EVERY[name]
    generic = generic_geometry(geometry)
    for layer in range(len(geometry.layers)):
        fields = list(raw_fields(geometry, layer))
        stops = [field.stop for field in fields]
        assert [field.start for field in fields] == [0, *stops[:-1]]
        assert raw_fields(geometry, layer).width == stops[-1] <= generic.row_width


@pytest.mark.parametrize("name", EVERY)
def test_nothing_but_blocks_is_kept_so_a_hit_means_reuse(name):
    generic = generic_geometry(EVERY[name])
    assert set(generic.sequence_bytes.values()) == {0}
    assert set(snapshot_bytes(generic).values()) == {0}
    assert (block_kinds(generic), snapshot_kinds(generic)) == ((Kind.COMPRESSED,), ())
    assert generic.longest_replay_tokens == 0


def test_what_a_token_costs():
    """``row_width * 4`` bytes in every layer: 150 times the packed rows of V4-Flash."""
    generic = generic_geometry(FLASH)
    assert generic.row_width == 512 + 2 * 1024 + 2 * 256
    assert sum(generic.bytes_per_token.values()) == 3072 * 4 * 43 == 528_384
    hybrid = sum(FLASH.bytes_per_token.values())
    assert float(528_384 / hybrid) == pytest.approx(150.4, abs=0.1)
    capacity = Capacity.for_tokens(generic, tokens=100, slots=3)
    sizes = cache_bytes(generic, capacity)
    assert sizes == {Kind.COMPRESSED: 3 * 112 * 528_384} | {
        kind: 0 for kind in (Kind.INDEXER, Kind.WINDOW, Kind.TAIL)
    }


def test_a_homogeneous_geometry_is_its_own_generic_one():
    assert generic_geometry(HOMOGENEOUS, block_tokens=1) == HOMOGENEOUS


@pytest.mark.parametrize("block", [1, 5, 16, 128])
def test_a_block_is_a_multiple_of_nothing(block):
    assert generic_geometry(FLASH, block_tokens=block).block_tokens == block


def test_an_empty_block_is_refused():
    with pytest.raises(UserError, match="block_tokens is 0: give at least 1"):
        generic_geometry(FLASH, block_tokens=0)


def test_rows_are_float32_whatever_the_formats_of_the_hybrid_cache():
    assert generic_geometry(FLASH).row_format.name == "float32"


def test_fields_come_back_as_they_were_joined():
    toy = toy_geometry()
    fields, width = raw_fields(toy, 2), generic_geometry(toy).row_width
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(3, f.width)).astype(np.float32) for f in fields]
    rows = join_fields(fields, [jnp.asarray(part) for part in parts], width)
    assert rows.shape == (3, width)
    for field, part in zip(fields, parts, strict=True):
        np.testing.assert_array_equal(field.of(rows), part)
    np.testing.assert_array_equal(rows[:, fields.width :], 0.0)
    with pytest.raises(ValueError, match=r"parts of \[16\] channels for fields of \[16, 16, 16\]"):
        join_fields(fields, [jnp.asarray(parts[0])], width)


@pytest.mark.parametrize("first", [-3, -1, 0, 1, 3, 4, 8, 11, 14])
@pytest.mark.parametrize("end", [0, 1, 7, 8, 12])
def test_tokens_are_read_through_the_table_and_only_those_that_exist(first, end):
    """Rows of no sequence are NaN, entries past the sequence's blocks are no block at all."""
    flat = np.full((20, 2), np.nan, np.float32)
    table = np.array([3, 0, 4, 5, 5], np.int32)  # blocks of 4 tokens; 5 is past the pool
    for position in range(end):
        flat[table[position // 4] * 4 + position % 4] = position
    raw = BlockRows(jnp.asarray(flat.reshape(5, 4, 2)), jnp.asarray(table))
    rows = read_tokens(raw, jnp.int32(first), 6, jnp.int32(end))
    expected = [p if 0 <= p < end else 0 for p in range(first, first + 6)]
    np.testing.assert_array_equal(rows, np.repeat(np.float32(expected)[:, None], 2, axis=1))


def test_the_narrow_layers_pay_for_the_widest():
    heavy_only = changed(FLASH, layers=FLASH.layers[3:4] * 2, index_width=0)
    assert generic_geometry(heavy_only).row_width == 3 * 512
