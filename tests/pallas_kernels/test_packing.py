"""Stored bytes and what they decode to."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.packing import api as packing
from pallas_kernels.packing.layout import RowLayout


def rows(seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(50, 16)) * 10.0 ** rng.integers(-6, 6, (50, 1))).astype(np.float32)


def test_float32_rows_keep_every_bit():
    odd = np.array([[-0.0, np.inf, np.nan, 1e-42, 3.4e38, -1.0]], np.float32)
    for x in (rows(), odd):
        stored = packing.encode(jnp.asarray(x), "float32")
        back = np.asarray(packing.decode(stored, "float32"))
        np.testing.assert_array_equal(back.view(np.uint32), x.view(np.uint32))


def test_bfloat16_rows_round_to_the_nearest_even():
    x = rows()
    bits = x.view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    stored = packing.encode(jnp.asarray(x), "bfloat16")
    assert stored.dtype == jnp.uint16
    np.testing.assert_array_equal(stored, nearest)
    back = np.asarray(packing.decode(stored, "bfloat16"))
    assert back.dtype == np.float32
    np.testing.assert_array_equal(back.view(np.uint32), nearest.astype(np.uint32) << 16)


def test_ties_of_bfloat16_go_to_the_even_neighbour():
    one = np.float32(1).view(np.uint32)
    ties = np.array([[one + 0x8000, one + 0x18000]], np.uint32).view(np.float32)
    stored = np.asarray(packing.encode(jnp.asarray(ties), "bfloat16"))
    np.testing.assert_array_equal(stored, [[0x3F80, 0x3F82]])


def test_packing_bfloat16_again_changes_nothing():
    once = packing.encode(jnp.asarray(rows()), "bfloat16")
    decoded = packing.decode(once, "bfloat16")
    np.testing.assert_array_equal(packing.encode(decoded, "bfloat16"), once)


def test_bfloat16_input_is_stored_as_it_is():
    x = jnp.asarray(rows()).astype(jnp.bfloat16)
    stored = packing.encode(x, "bfloat16")
    np.testing.assert_array_equal(packing.decode(stored, "bfloat16"), x.astype(jnp.float32))


@pytest.mark.parametrize("format", ["bfloat16_words", RowLayout("bfloat16_words", 16)])
def test_words_hold_the_halves_of_a_row_and_decode_to_the_same_numbers(format):
    x = jnp.asarray(rows()).at[0, :4].set(jnp.asarray([-0.0, np.inf, np.nan, 1e-40]))
    plain, stored = packing.encode(x, "bfloat16"), packing.encode(x, format)
    form = packing.stored_form(RowLayout("bfloat16_words", 16))
    assert (stored.shape[1:], stored.dtype) == (form.shape, form.dtype) == ((8,), jnp.uint32)
    np.testing.assert_array_equal(stored & 0xFFFF, plain[:, :8])
    np.testing.assert_array_equal(stored >> 16, plain[:, 8:])
    want, got = packing.decode(plain, "bfloat16"), packing.decode(stored, format)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint32), np.asarray(want).view(np.uint32))


def test_words_take_no_odd_width():
    with pytest.raises(ValueError, match="two channels a word: 5 is odd"):
        packing.encode(jnp.zeros((2, 5)), "bfloat16_words")
    assert packing.decode(jnp.zeros((2, 5), jnp.uint32), "bfloat16_words").shape == (2, 10)


@pytest.mark.parametrize("operation", [packing.encode, packing.decode], ids=["encode", "decode"])
def test_a_format_that_nobody_knows_is_refused_with_those_that_are(operation):
    with pytest.raises(NotImplementedError, match="stored as 'int8': use one of float32, bfloat16"):
        operation(jnp.zeros((2, 32)), "int8")


@pytest.mark.parametrize("operation", [packing.encode, packing.decode], ids=["encode", "decode"])
def test_the_name_of_a_packed_format_alone_is_refused_with_what_to_pass(operation):
    with pytest.raises(ValueError, match=r"pass RowLayout\('mxfp4', width, rope\)"):
        operation(jnp.zeros((2, 32)), "mxfp4")
