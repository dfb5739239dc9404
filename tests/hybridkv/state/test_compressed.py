"""Rows written through a block table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybridkv import formats
from hybridkv.state.compressed import stored_row, write_rows

write = jax.jit(write_rows)
BLOCKS, PER = 9, 4


def table() -> np.ndarray:
    """Two sequences of three blocks each in random order; the second has only two assigned."""
    return np.array([[7, 2, 5], [0, 8, BLOCKS]], np.int32)


def simulated(pool, table, numbers, whole, rows):
    pool = pool.copy()
    for sequence in range(len(table)):
        for number, full, row in zip(
            numbers[sequence], whole[sequence], rows[sequence], strict=True
        ):
            if full and table[sequence][number // PER] < BLOCKS:
                pool[table[sequence][number // PER], number % PER] = row
    return pool


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.uint8])
@pytest.mark.parametrize("first", [[0, 0], [3, 1], [8, 4], [4, 7]])
def test_rows_go_where_the_table_says_and_nowhere_else(dtype, first):
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 200, (BLOCKS, PER, 3)).astype(dtype)
    rows = rng.integers(0, 200, (2, 4, 3)).astype(dtype)
    numbers = np.asarray(first, np.int32)[:, None] + np.arange(4, dtype=np.int32)
    for whole in ([[1, 1, 1, 1], [1, 1, 1, 1]], [[1, 1, 0, 0], [0, 0, 0, 0]]):
        whole = np.asarray(whole, bool)
        got = write(*(jnp.asarray(x) for x in (pool, table(), numbers, whole, rows)))
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, simulated(pool, table(), numbers, whole, rows))


def test_rows_that_are_not_whole_may_have_any_number():
    pool = jnp.arange(BLOCKS * PER, dtype=jnp.float32).reshape(BLOCKS, PER, 1)
    numbers = jnp.asarray([[12, 1000, 2**31 - 1], [11, 12, 13]], jnp.int32)
    got = write(
        pool, jnp.asarray(table()), numbers, jnp.zeros((2, 3), bool), jnp.full((2, 3, 1), jnp.nan)
    )
    np.testing.assert_array_equal(got, pool)


def test_one_table_without_a_batch_axis_will_do():
    pool = jnp.zeros((BLOCKS, PER, 1))
    got = write(
        pool,
        jnp.asarray(table()[0]),
        jnp.asarray([5], jnp.int32),
        jnp.ones((1,), bool),
        jnp.ones((1, 1)),
    )
    assert np.argwhere(np.asarray(got)[..., 0]).tolist() == [[2, 1]]


def test_stored_rows_are_channels_or_packed_bytes():
    assert stored_row(16, "float32", 64) == jax.ShapeDtypeStruct((16,), jnp.float32)
    assert stored_row(16, "bfloat16", 32) == jax.ShapeDtypeStruct((16,), jnp.uint16)
    size = formats.FP8_ROPE16.row_bytes(512, 64)
    assert stored_row(512, "fp8_rope16", size) == jax.ShapeDtypeStruct((584,), jnp.uint8)
