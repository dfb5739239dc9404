"""Packed rows decoded inside TPU kernels, interpreted: the reference's bits, chip by chip."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_scores.tpu_packed import Packed
from pallas_kernels.interpreting import interpreted
from pallas_kernels.packing import reference
from pallas_kernels.packing.layout import RowLayout
from pallas_kernels.packing.tpu_rows import Chip, Decoder, Scratch

ROWS = 64
LEAST, MOST = 20, 240
"""Scales between which no product leaves the normal numbers of bfloat16."""


def stored_rows(layout, rng):
    """Any bytes: all codes, NaN among them, any scales, and rotary channels that are numbers."""
    stored = rng.integers(0, 256, (ROWS, layout.row_bytes)).astype(np.uint8)
    stored[:, layout.scales] = rng.integers(LEAST, MOST, stored[:, layout.scales].shape)
    wide = rng.normal(size=(ROWS, layout.width - layout.coded)).astype(jnp.bfloat16)
    stored[:, layout.wide] = wide.view(np.uint8)
    stored[:3, layout.data] &= 0x77  # no NaN
    stored[3, layout.scales.start] = 0xFF
    return stored


def decoded(layout, stored):
    return np.asarray(reference.decode(jnp.asarray(stored), layout))


V5, V6, V7 = (Chip(*x) for x in ((False, False), (False, True), (True, True)))
RELEASE = RowLayout("fp8_rope16", 256, 64)


@pytest.mark.parametrize(
    ("layout", "chip"),
    [
        *((RELEASE, chip) for chip in (V5, V6, V7)),
        (RowLayout("fp8_rope16", 128, 32), V6),  # its scales are in the other half of a register
        *((RowLayout("fp8_block32", 128), chip) for chip in (V6, V7)),
    ],
    ids=str,
)
def test_rows_are_those_of_the_reference_on_every_chip(layout, chip):
    stored = stored_rows(layout, np.random.default_rng(1))
    decoder = Decoder(layout, chip)

    def kernel(bytes_, out, *scratch):
        decoder.prepare(Scratch(*scratch))
        decoder.decode(lambda i: bytes_[32 * i : 32 * i + 32], ROWS, out, Scratch(*scratch))

    words = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((ROWS // 2, layout.width), jnp.int32),
        scratch_shapes=decoder.scratch(ROWS),
        interpret=True,
    )
    with interpreted(True):
        out = np.asarray(jax.jit(words)(jnp.asarray(stored)))
    # Of a word the lower half is the even row.
    pairs = out.view(np.uint16).reshape(ROWS // 2, layout.width, 2).transpose(0, 2, 1)
    got = pairs.reshape(ROWS, -1).view(jnp.bfloat16).astype(np.float32)
    expected = decoded(layout, stored)
    bad = np.isnan(expected).any(axis=1)
    assert not bad[:3].any()
    assert bad[3]
    np.testing.assert_array_equal(np.isnan(got).any(axis=1), bad)
    np.testing.assert_array_equal(got[~bad], expected[~bad])


@functools.cache
def _nibbles(layout):
    def kernel(bytes_, out):
        out[...] = pltpu.bitcast(Packed(layout).decode(bytes_[...]), jnp.int32)

    shape = jax.ShapeDtypeStruct((ROWS // 2, 128), jnp.int32)
    return jax.jit(pl.pallas_call(kernel, out_shape=shape, interpret=True))


def test_mxfp4_rows_are_twice_those_of_the_reference_in_the_order_that_is_scored():
    layout = RowLayout("mxfp4", 128)
    stored = stored_rows(layout, np.random.default_rng(2))
    stored[3, layout.scales] = 0xFF  # the whole row
    out = np.asarray(_nibbles(layout)(jnp.asarray(stored)))
    half = ROWS // 2
    pairs = out.view(np.uint16).reshape(half, 128, 2).transpose(0, 2, 1).reshape(ROWS, 128)
    got = pairs.view(jnp.bfloat16).astype(np.float32)
    expected = 2 * decoded(layout, stored)
    np.testing.assert_array_equal(got[:half, :64], expected[0::2, 0::2])
    np.testing.assert_array_equal(got[:half, 64:], expected[0::2, 1::2])
    np.testing.assert_array_equal(got[half:, :64], expected[1::2, 0::2])
    np.testing.assert_array_equal(got[half:, 64:], expected[1::2, 1::2])
