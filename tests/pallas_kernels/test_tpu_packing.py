"""The TPU kernels of ``encode`` and ``decode``, interpreted: the reference's bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from test_packing_codes import hard_rows, rows_of_codes, seeded

from pallas_kernels.interpreting import interpreted
from pallas_kernels.packing import reference, tpu, tpu_rows
from pallas_kernels.packing.layout import RowLayout

LAYOUTS = [
    RowLayout("fp8_rope16", 192, 64),
    RowLayout("fp8_block32", 64, 16),
    RowLayout("fp4_e4m3", 64),
    RowLayout("mxfp4", 48),
    RowLayout("fp8_index", 128),
]
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)


@functools.cache
def compiled(operation, layout):
    return jax.jit(functools.partial(operation, format=layout))


def both(name, x, layout):
    x = jnp.asarray(x)
    with interpreted(True):
        ours = np.asarray(compiled(getattr(tpu, name), layout)(x))
    theirs = np.asarray(compiled(getattr(reference, name), layout)(x))
    assert ours.dtype == theirs.dtype
    return ours, theirs


@every_layout
def test_encoded_bytes_are_those_of_the_reference(layout):
    rows = hard_rows(layout)
    rows[3, 1], rows[4, -1], rows[5, 0], rows[6, -2] = np.nan, np.inf, -np.inf, np.nan
    np.testing.assert_array_equal(*both("encode", rows, layout))


@every_layout
def test_decoded_bits_are_those_of_the_reference(layout):
    """Any bytes at all, every code with every scale among them."""
    rng = seeded(layout)
    stored = rng.integers(0, 256, (2000, layout.row_bytes)).astype(np.uint8)
    every = np.arange(256, dtype=np.uint8)
    if layout.coding.scale != "float32":
        count = min(layout.data.stop, 256)
        turns = [np.roll(every, shift)[:count] for shift in range(0, 256, count)]
        stored = np.concatenate([stored, *(rows_of_codes(layout, x, every) for x in turns)])
    ours, theirs = both("decode", stored, layout)
    nan = np.isnan(theirs)
    np.testing.assert_array_equal(np.isnan(ours), nan)
    np.testing.assert_array_equal(ours.view(np.uint32)[~nan], theirs.view(np.uint32)[~nan])


@functools.cache
def opened(layout, chip):
    """Rows as attention multiplies them: two a word, the even one below."""
    decoder = tpu_rows.Decoder(layout, chip)

    def kernel(stored, out, *refs):
        scratch = tpu_rows.Scratch(*refs)
        decoder.prepare(scratch)
        unit = tpu_rows.UNIT
        decoder.decode(lambda i: stored[unit * i : unit * (i + 1)], stored.shape[0], out, scratch)

    def run(stored):
        rows, width = stored.shape[0], layout.width
        form = jax.ShapeDtypeStruct((rows // 2, width), jnp.int32)
        memory = decoder.scratch(rows)
        call = pl.pallas_call(kernel, out_shape=form, scratch_shapes=memory, interpret=True)
        pairs = jax.lax.bitcast_convert_type(call(stored), jnp.bfloat16)
        return pairs.transpose(0, 2, 1).reshape(rows, width)

    return jax.jit(run)


@pytest.mark.parametrize("e4m3fn", [False, True], ids=["v6e", "tpu7x"])
@pytest.mark.parametrize(
    "layout",
    [RowLayout("fp8_rope16", 256, 64), RowLayout("fp8_block32", 128)],
    ids=lambda x: x.name,
)
def test_rows_inside_attention_are_those_of_the_reference_in_bfloat16(layout, e4m3fn):
    """Every code with scales as encoding makes them; a row that is NaN anywhere is NaN somewhere.

    Smaller magnitudes than normal numbers, and the sign of zero, do not count.
    """
    rng = seeded(layout)
    stored = rng.integers(0, 256, (160, layout.row_bytes)).astype(np.uint8)
    data = stored[:, layout.data]
    data[data & 0x7F == 0x7F] -= 1
    every = np.arange(256).reshape(2, 128)
    data[:2, :128] = np.where(every & 0x7F == 0x7F, 0, every)
    wide = stored[:, layout.wide]
    wide[:, 1::2] &= 0xBF  # finite, and no larger than 2
    stored[:, layout.scales] = rng.integers(30, 248, (160, layout.groups))
    stored[150, 5], stored[151, 6], stored[152, layout.scales.start + 1] = 0x7F, 0xFF, 0xFF
    with interpreted(True):
        bits = opened(layout, tpu_rows.Chip(e4m3fn=e4m3fn, halves=True))(jnp.asarray(stored))
    ours = np.asarray(bits.astype(jnp.float32))
    exact = jax.jit(functools.partial(reference.decode, format=layout))(jnp.asarray(stored))
    theirs = np.asarray(exact.astype(jnp.bfloat16).astype(jnp.float32))
    nan = np.isnan(theirs).any(axis=1)
    assert nan[150:153].all()
    assert nan.sum() == 3
    np.testing.assert_array_equal(np.isnan(ours).any(axis=1), nan)
    small = np.abs(theirs) < 2.0**-126
    theirs, ours = np.where(small, 0, theirs)[~nan], np.where(small, 0, ours)[~nan]
    np.testing.assert_array_equal(ours, theirs)
    assert len(np.unique(theirs)) > 1000
