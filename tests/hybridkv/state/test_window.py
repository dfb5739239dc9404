"""Rings against a list of all rows ever written."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybridkv.state.window import read_window, ring_after, write_token

read = jax.jit(read_window, static_argnums=2)
after = jax.jit(ring_after)
STALE = -1.0


def row(position: int) -> float:
    return position + 100.0


def ring_at(length: int, window: int) -> np.ndarray:
    """What a ring holds after ``length`` tokens; places never written hold ``STALE``."""
    ring = np.full((window, 1), STALE, np.float32)
    for position in range(length):
        ring[position % window] = row(position)
    return ring


@pytest.mark.parametrize("window", [1, 2, 5, 8])
@pytest.mark.parametrize("fewer", [0, 1])
def test_a_window_is_read_oldest_first_and_zero_before_the_start(window, fewer):
    lengths, count = range(3 * window + 2), window - fewer
    rings = np.stack([ring_at(n, window) for n in lengths])
    got = read(jnp.asarray(rings), jnp.asarray(lengths, jnp.int32), count)
    assert got.shape == (len(lengths), count, 1)
    for length, rows in zip(lengths, np.asarray(got), strict=True):
        positions = range(length - count, length)
        assert rows[:, 0].tolist() == [row(p) if p >= 0 else 0.0 for p in positions]


def test_stale_rows_before_the_start_are_not_read():
    ring = jnp.full((1, 4, 2), jnp.nan).at[0, 0].set(1.0)
    got = read(ring, jnp.ones((1,), jnp.int32), 3)
    np.testing.assert_array_equal(got, [[[0, 0], [0, 0], [1, 1]]])


@pytest.mark.parametrize("window", [1, 2, 5, 8])
@pytest.mark.parametrize("tile", [1, 4, 12])
def test_a_ring_after_some_tokens_holds_the_last_rows(window, tile):
    """Every start up to some windows, every number of tokens of a tile, in one call."""
    cases = [
        (start, start + count)
        for start, count in itertools.product(range(2 * window + 3), range(tile + 1))
    ]
    first, end = (jnp.asarray(x, jnp.int32) for x in zip(*cases, strict=True))
    rings = jnp.asarray(np.stack([ring_at(start, window) for start, _ in cases]))
    # Rows of the tile past ``end`` are garbage, as the step computes them.
    fresh = [
        [row(p) if p < end else -7.0 for p in range(start, start + tile)] for start, end in cases
    ]
    earlier = read(rings, first, window - 1)
    buffer = jnp.concatenate([earlier, jnp.asarray(fresh)[..., None]], axis=1)
    got = np.asarray(after(buffer, rings, first, end))
    expected = np.stack([ring_at(end, window) for _, end in cases])
    np.testing.assert_array_equal(got, expected)


def test_packed_rows_keep_their_bytes():
    rng = np.random.default_rng(0)
    ring = jnp.asarray(rng.integers(0, 256, (1, 4, 7)), jnp.uint8)
    buffer = jnp.asarray(rng.integers(0, 256, (1, 5, 7)), jnp.uint8)
    first, end = jnp.asarray([9], jnp.int32), jnp.asarray([11], jnp.int32)
    got = after(buffer, ring, first, end)
    assert got.dtype == jnp.uint8
    # Positions 7 ... 10 stand in the buffer from index 1 on (position 6 is its first row).
    np.testing.assert_array_equal(got[0, [3, 0, 1, 2]], buffer[0, 1:5])


@pytest.mark.parametrize("kernels", ["reference", "tpu"])
def test_one_row_goes_into_each_ring_that_is_named(kernels):
    """Rings of five rows are nothing for the TPU's kernel: any window is written all the same."""
    rings = np.arange(3 * 5 * 2, dtype=np.uint8).reshape(3, 5, 2)
    slots, positions = [2, 3, 0], [13, 4, 5]  # the second is past the end
    rows = np.array([[101, 102], [103, 104], [105, 106]], np.uint8)
    got = jax.jit(write_token, static_argnames="kernels")(
        jnp.asarray(rings),
        *(jnp.asarray(x, jnp.int32) for x in (slots, positions)),
        jnp.asarray(rows),
        kernels=kernels,
    )
    expected = rings.copy()
    expected[2, 3], expected[0, 0] = rows[0], rows[2]
    np.testing.assert_array_equal(got, expected)
