"""Rows written through a block table."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from geometries import FLASH

from hybridkv import formats
from hybridkv.state.capacity import Capacity
from hybridkv.state.compressed import CompressedRows, write_rows

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


@pytest.mark.parametrize(
    ("format", "stored"),
    [
        (formats.FLOAT32, jax.ShapeDtypeStruct((512,), jnp.float32)),
        (formats.BFLOAT16, jax.ShapeDtypeStruct((512,), jnp.uint16)),
        (formats.FP8_ROPE16, jax.ShapeDtypeStruct((584,), jnp.uint8)),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_pools_hold_channels_or_packed_bytes(format, stored):
    geometry = dataclasses.replace(FLASH, row_format=format)
    pools = CompressedRows.declare(geometry, Capacity(blocks=3, slots=1, blocks_per_sequence=2))
    assert pools.layers[0] is None
    assert (pools.layers[2].shape, pools.layers[2].dtype) == ((3, 32, *stored.shape), stored.dtype)
