"""The TPU kernel of row writes, interpreted, against XLA's, with no two copies that race."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_tpu_moves import QUICK

from pallas_kernels.interpreting import checked
from pallas_kernels.moves import tpu_rows
from pallas_kernels.moves.api import write_rows

BLOCKS, STORED = 12, 128


def interpret(*arrays):
    with checked():
        call = jax.jit(lambda *a: write_rows(*a, implementation="tpu"), compiler_options=QUICK)
        return np.asarray(call(*arrays))


def arrays_of(dtype, per, first, whole):
    """A pool, tables of three blocks, and rows of some sequences in a row from ``first`` on."""
    rng = np.random.default_rng(0)
    n, count = np.shape(whole)

    def random(*shape):
        return jnp.asarray(rng.integers(0, 2**32, shape, np.uint32).view(np.uint32).astype(dtype))

    table = rng.permutation(BLOCKS)[: 3 * n].reshape(n, 3).astype(np.int32)
    table[-1, 2] = BLOCKS  # the last sequence has only two
    numbers = np.asarray(first, np.int32)[:, None] + np.arange(count, dtype=np.int32)
    rest = (jnp.asarray(x) for x in (table, numbers, np.asarray(whole, bool)))
    return random(BLOCKS, per, STORED), *rest, random(n, count, STORED)


def check(arrays):
    got = interpret(*arrays)
    assert got.dtype == arrays[0].dtype
    expected = np.asarray(write_rows(*arrays, implementation="reference"))
    assert np.any(expected != np.asarray(arrays[0]))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("dtype", "per"), [(np.uint8, 64), (np.uint8, 4), (np.uint16, 16), (np.uint32, 1)]
)
def test_one_row_of_each_sequence_goes_where_the_table_says(dtype, per):
    """A decode step: the second is idle, the third's block is past the pool."""
    check(arrays_of(dtype, per, [per - 1, 0, 2 * per], [[1], [0], [1]]))


@pytest.mark.parametrize(
    ("dtype", "per"), [(np.uint8, 64), (np.uint8, 8), (np.uint16, 8), (np.uint32, 2)]
)
def test_rows_of_one_unit_are_written_together(dtype, per):
    """A tile step that begins and ends inside units, and one that keeps what was there."""
    count = 2 * per
    whole = np.ones((2, count), bool)
    whole[0, -2:] = whole[1, : count // 2] = False
    check(arrays_of(dtype, per, [3 * per // 4, per // 2], whole))


def test_more_units_are_written_than_are_on_their_way_at_once():
    per, count = 1, 3
    n = tpu_rows._TOGETHER // count + 2
    rng = np.random.default_rng(1)
    pool = jnp.asarray(rng.integers(0, 99, (3 * n, per, STORED)).astype(np.uint32))
    table = jnp.asarray(rng.permutation(3 * n).reshape(n, 3).astype(np.int32))
    numbers = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (n, count))
    rows = jnp.asarray(rng.integers(100, 199, (n, count, STORED)).astype(np.uint32))
    check((pool, table, numbers, jnp.ones((n, count), bool), rows))


def test_rows_that_are_not_written_may_have_any_number():
    pool, table, _, _, rows = arrays_of(np.uint8, 32, [0, 0], np.zeros((2, 2)))
    numbers = jnp.asarray([[2**31 - 1, -5], [96, 10**9]], jnp.int32)
    got = interpret(pool, table, numbers, jnp.zeros((2, 2), bool), rows)
    np.testing.assert_array_equal(got, pool)


def test_nan_bits_are_written_unchanged():
    pool, table, numbers, whole, _ = arrays_of(np.uint32, 8, [3], [[1]])
    bits = jnp.asarray(np.arange(STORED, dtype=np.uint32)[None, None] | 0x7F800001)
    floats = [jax.lax.bitcast_convert_type(x, jnp.float32) for x in (pool, bits)]
    got = interpret(floats[0], table, numbers, whole, floats[1]).view(np.uint32)
    expected = write_rows(pool, table, numbers, whole, bits)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("dtype", "per", "stored", "why"),
    [
        (np.uint8, 32, 584, "would be copied whole: pad its rows to 640 bytes"),
        (np.uint8, 48, 128, "blocks of 48 rows of uint8 .* a multiple of 32"),
        (np.uint8, 2, 128, "blocks of 2 rows of uint8 do not fill 32-bit words"),
        (np.uint16, 1, 128, "blocks of 1 rows of uint16 do not fill 32-bit words"),
        (np.uint16, 8, 96, "rows of 96 uint16"),
    ],
)
def test_pools_whose_rows_cannot_be_copied_are_refused(dtype, per, stored, why):
    def write():
        rows = jnp.zeros((1, 1, stored), dtype)
        number = jnp.zeros((1, 1), jnp.int32)
        pool = jnp.zeros((4, per, stored), dtype)
        return write_rows(pool, number, number, number == 0, rows, implementation="tpu")

    with pytest.raises(NotImplementedError, match=why):
        jax.eval_shape(write)


def test_the_pool_that_is_given_is_written():
    """The result aliases it; a copy would cost the whole pool."""
    arrays = arrays_of(np.uint8, 32, [0], [[1]])
    traced = jax.make_jaxpr(lambda *a: write_rows(*a, implementation="tpu"))(*arrays)
    (call,) = (e for e in traced.eqns if e.primitive.name == "pallas_call")
    ((operand, result),) = call.params["input_output_aliases"]
    assert (call.invars[operand].aval.size, result) == (arrays[0].size, 0)
