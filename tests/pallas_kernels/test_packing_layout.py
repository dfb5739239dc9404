"""Where the bytes of a row are, and that those who only count them count the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybridkv import formats
from hybridkv.formats import RowFormat
from pallas_kernels.packing import api as packing
from pallas_kernels.packing.layout import CODINGS, PADDED, RowLayout, layout_named

FORMATS = {x.name: x for x in vars(formats).values() if isinstance(x, RowFormat)}
encode = jax.jit(packing.encode, static_argnames="format")
WIDTHS = [(512, 64), (128, 64), (16, 8), (128, 0), (40, 4), (0, 0), (8, 8)]


def test_there_is_a_coding_for_every_format_and_no_other():
    assert set(FORMATS) == set(CODINGS) | set(PADDED)


@pytest.mark.parametrize("name", [*CODINGS, *PADDED])
@pytest.mark.parametrize(("width", "rope"), WIDTHS)
def test_a_stored_row_has_the_bytes_that_are_counted_for_it(name, width, rope):
    layout = layout_named(name, width, rope)
    rows = jax.ShapeDtypeStruct((3, width), jnp.float32)
    stored = jax.eval_shape(functools.partial(packing.encode, format=layout), rows)
    form = packing.stored_form(layout)
    assert form == jax.ShapeDtypeStruct(stored.shape[1:], stored.dtype)
    assert form.size * form.dtype.itemsize == FORMATS[name].row_bytes(width, rope)
    if layout.packed:
        assert stored.dtype == jnp.uint8
        assert layout.row_bytes == form.size


@pytest.mark.parametrize(
    ("layout", "data", "wide", "scales", "row_bytes"),
    [
        (RowLayout("fp8_rope16", 512, 64), (0, 448), (448, 576), (576, 583), 584),
        (RowLayout("fp8_block32", 512, 64), (0, 512), (512, 512), (512, 528), 528),
        (RowLayout("fp4_e4m3", 512, 64), (0, 256), (256, 256), (256, 288), 288),
        (RowLayout("mxfp4", 128), (0, 64), (64, 64), (64, 68), 68),
        (RowLayout("fp8_index", 128), (0, 128), (128, 128), (128, 132), 132),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_published_rows_have_their_parts_where_the_release_has_them(
    layout, data, wide, scales, row_bytes
):
    parts = [(part.start, part.stop) for part in (layout.data, layout.wide, layout.scales)]
    assert (*parts, layout.row_bytes) == (data, wide, scales, row_bytes)


@pytest.mark.parametrize(
    ("name", "width", "rope", "row_bytes"),
    [
        ("fp8_rope16_lanes", 512, 64, 640),
        ("mxfp4_lanes", 128, 0, 128),
        ("fp8_index_lanes", 128, 0, 256),
    ],
)
def test_rows_that_fill_lanes_are_the_same_bytes_and_zeros_that_nobody_reads(
    name, width, rope, row_bytes
):
    padded, plain = layout_named(name, width, rope), RowLayout(PADDED[name], width, rope)
    rows = np.random.default_rng(0).normal(size=(3, width)).astype(np.float32)
    stored, own = np.asarray(encode(rows, format=padded)), np.asarray(encode(rows, format=plain))
    assert stored.shape == (3, row_bytes)
    np.testing.assert_array_equal(stored[:, : plain.row_bytes], own)
    assert not stored[:, plain.row_bytes :].any()
    stored = stored.copy()
    stored[:, padded.scales.stop :] = 0xFF
    decode = jax.jit(packing.decode, static_argnames="format")
    expected = np.asarray(decode(own, format=plain)).view(np.uint32)
    np.testing.assert_array_equal(
        np.asarray(decode(stored, format=padded)).view(np.uint32), expected
    )


def test_rows_of_numbers_are_not_padded():
    with pytest.raises(ValueError, match="rows of bfloat16 are numbers"):
        RowLayout("bfloat16", 512, align=128)


def test_each_channel_changes_the_bytes_that_are_its_own():
    """A channel of each group is so large that the others do not change its scale."""
    layout = RowLayout("fp8_rope16", 512, 64)
    rows = np.zeros((512, 512), np.float32)
    rows[:, 0:448:64] = 448
    marked = rows.copy()
    marked[np.arange(512), np.arange(512)] = 100 + 2.0 ** (np.arange(512) % 7)
    before, after = (np.asarray(encode(x, format=layout)) for x in (rows, marked))
    for channel in range(512):
        changed = set(np.flatnonzero(before[channel] != after[channel]))
        if channel >= 448:
            low = 448 + 2 * (channel - 448)
            assert changed <= {low, low + 1}, channel
            assert changed, channel
        elif channel % 64:
            assert changed == {channel}
        else:  # the largest of its group: the scale follows
            assert {576 + channel // 64} <= changed <= {channel, 576 + channel // 64}


def test_two_channels_share_a_byte_the_lower_one_in_the_lower_half():
    layout = RowLayout("mxfp4", 32)
    row = np.zeros(32, np.float32)
    row[[0, 3, 4, 31]] = [6.0, -1.5, 0.5, -4.0]
    stored = np.asarray(encode(row, format=layout))
    assert stored[:4].tolist() == [0x07, 0xB0, 0x01, 0x00]
    assert stored[15] == 0xE0
    assert stored[16] == 127


def test_little_endian_scales_and_rotary_channels():
    row = jnp.zeros((128,)).at[5].set(448.0)
    stored = np.asarray(encode(row, format=RowLayout("fp8_index", 128)))
    assert stored[-4:].tobytes() == np.float32(1).astype("<f4").tobytes()
    row = jnp.zeros((72,)).at[71].set(-1.00390625)  # bfloat16 0xBF80 and a half: to the even
    stored = np.asarray(encode(row, format=RowLayout("fp8_rope16", 72, 8)))
    assert stored[64:80].tolist() == [0] * 14 + [0x80, 0xBF]
    assert stored[81:].tolist() == [0] * 7  # filled up to 8


@pytest.mark.parametrize(
    ("arguments", "error", "why"),
    [
        (("int8", 8), NotImplementedError, "use one of"),
        (("mxfp4", 15), ValueError, "two channels a byte: 15"),
        (("fp8_rope16", 8, 9), ValueError, "9 rotary channels in a row of 8"),
        (("fp8_rope16", 8, -1), ValueError, "-1 rotary"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(arguments, error, why):
    with pytest.raises(error, match=why):
        RowLayout(*arguments)


def test_rows_of_another_width_are_refused():
    layout = RowLayout("mxfp4", 32)
    with pytest.raises(ValueError, match=r"rows of 64 channels for RowLayout\(name='mxfp4'"):
        packing.encode(jnp.zeros((2, 64)), layout)
    with pytest.raises(ValueError, match=r"uint8\[2, 18\]"):
        packing.decode(jnp.zeros((2, 18), jnp.uint8), layout)
    with pytest.raises(ValueError, match=r"float32\[2, 17\]"):
        packing.decode(jnp.zeros((2, 17)), layout)
