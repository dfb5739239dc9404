"""Reads through a block table."""

import jax.numpy as jnp
import numpy as np
import pytest
from pools import pooled

from pallas_kernels.blocks import key_block_rows, read_key_block, read_picked

ROWS = np.arange(22 * 3, dtype=np.float32).reshape(22, 3) + 1


@pytest.mark.parametrize(
    ("per", "key_block", "rows"),
    [(1, 128, 128), (4, 8, 8), (4, 9, 8), (4, 7, 4), (4, 4, 4), (4, 3, 4), (32, 1, 32)],
)
def test_a_key_block_is_whole_cache_blocks(per, key_block, rows):
    assert key_block_rows(per, key_block) == rows


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 21, 22])
def test_key_blocks_give_rows_in_order_and_zero_past_the_length(length):
    rows = pooled(ROWS[:length], table=6)
    for number in range(3):
        got = read_key_block(
            rows, jnp.asarray(number, jnp.int32), 8, jnp.asarray(length, jnp.int32), "float32"
        )
        expected = np.zeros((24, 3), np.float32)
        expected[:length] = ROWS[:length]
        np.testing.assert_array_equal(got, expected[8 * number : 8 * number + 8])


def test_rows_past_the_length_are_not_read_even_where_they_are_written():
    rows = pooled(ROWS)
    got = read_key_block(rows, jnp.asarray(0, jnp.int32), 8, jnp.asarray(5, jnp.int32), "float32")
    np.testing.assert_array_equal(got[5:], np.zeros((3, 3)))


def test_picked_rows_come_from_anywhere_and_others_are_zero():
    picks = np.array([[0, 21, 5], [7, 8, 2**31 - 1], [22, 100, 2**31 - 1]], np.int32)
    valid = picks < 22
    got = read_picked(pooled(ROWS), jnp.asarray(picks), jnp.asarray(valid), "float32")
    expected = np.where(valid[..., None], ROWS[np.minimum(picks, 21)], 0)
    np.testing.assert_array_equal(got, expected)


def test_a_pool_knows_its_rows_per_block():
    assert pooled(ROWS, per=2).rows_per_block == 2
