"""Moves by XLA: what a gather gives and a scatter leaves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moves.api import gather_blocks, scatter_blocks

POOL = np.arange(12 * 4 * 6, dtype=np.uint16).reshape(12, 4, 6)


@pytest.mark.parametrize("places", [[], [11], [3, 0, 3, 7]])
def test_a_gather_gives_blocks_in_the_order_of_their_places(places):
    got = gather_blocks(jnp.asarray(POOL), jnp.asarray(places, jnp.int32))
    np.testing.assert_array_equal(got, POOL[np.array(places, int)])


def test_a_gather_past_the_pool_gives_a_block_of_it():
    got = np.asarray(gather_blocks(jnp.asarray(POOL), jnp.asarray([12, 2**31 - 1], jnp.int32)))
    np.testing.assert_array_equal(got, POOL[[11, 11]])


@pytest.mark.parametrize("places", [[], [11], [12], [3, 2**31 - 1, 0, 12]])
def test_a_scatter_writes_inside_the_pool_only(places):
    blocks = 1000 + np.arange(len(places) * 24, dtype=np.uint16).reshape(-1, 4, 6)
    got = scatter_blocks(jnp.asarray(POOL), jnp.asarray(blocks), jnp.asarray(places, jnp.int32))
    expected = POOL.copy()
    for place, block in zip(places, blocks, strict=True):
        if place < 12:
            expected[place] = block
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.uint8])
def test_a_donated_pool_is_written_in_place(dtype):
    scatter = jax.jit(scatter_blocks, donate_argnums=0)
    pool = jnp.asarray(POOL.astype(dtype))
    before = pool.unsafe_buffer_pointer()
    after = scatter(pool, jnp.zeros((1, 4, 6), dtype), jnp.asarray([2], jnp.int32))
    assert after.unsafe_buffer_pointer() == before


@pytest.mark.parametrize("move", [gather_blocks, functools.partial(scatter_blocks, blocks=0)])
def test_an_implementation_that_is_not_there_is_told(move):
    with pytest.raises(ValueError, match="no implementation 'metal'"):
        move(pool=jnp.asarray(POOL), places=jnp.zeros(1, jnp.int32), implementation="metal")
