"""Reads through a block table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pools import pooled

from pallas_kernels.attention import tpu as attention
from pallas_kernels.blocks import BlockRows, in_hbm, key_block_rows, read_key_block, read_picked
from pallas_kernels.index_scores import tpu as index_scores
from pallas_kernels.interpreting import interpreted
from pallas_kernels.moves import tpu as moves
from pallas_kernels.packing.layout import RowLayout
from pallas_kernels.sequences import Active

MXFP4 = RowLayout("mxfp4", 128)
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


@pytest.mark.parametrize("operation", ["attention", "index_scores", "gather", "scatter"])
def test_a_pool_that_every_call_would_copy_is_refused_on_a_tpu(operation):
    """XLA lays it out with its blocks along the lanes, unless a row fills them."""

    def call(wide):
        row = RowLayout("fp8_rope16", 512, 64) if operation == "attention" else MXFP4
        pool = jnp.zeros((4, 32, wide or row.row_bytes), jnp.uint8)
        rows = BlockRows(pool, jnp.zeros((1, 2), jnp.int32))
        if operation == "attention":
            local = jnp.zeros((1, 128, 512), jnp.uint16)
            q, one = jnp.zeros((1, 1, 64, 512)), jnp.zeros((1,), jnp.int32)
            options = {"active": Active.all(1), "window": 128, "scale": 1.0, "format": row}
            options |= {"rows": rows, "visible": one[None], "local_format": "bfloat16"}
            return attention.attend(q, local, one, jnp.zeros((64,)), **options)
        if operation == "index_scores":
            q, weights = jnp.zeros((1, 1, 64, 128)), jnp.zeros((1, 1, 64))
            seen = jnp.zeros((1, 1), jnp.int32)
            options = {"active": Active.all(1), "topk": 512, "format": row}
            return index_scores.pick_rows(q, weights, rows, seen, **options)
        if operation == "gather":
            return moves.gather_blocks(pool, jnp.zeros((2,), jnp.int32))
        return moves.scatter_blocks(pool, pool[:2], jnp.zeros((2,), jnp.int32))

    with pytest.raises(NotImplementedError, match="would be copied whole: pad its rows to"):
        jax.eval_shape(lambda: call(None))
    jax.eval_shape(lambda: call(640 if operation == "attention" else 128))


def test_pools_stay_in_hbm_where_a_kernel_is_traced_to_be_compiled():
    pool = jnp.zeros((2, 8, 128))
    assert in_hbm(pool) is pool
    assert "memory_space=hbm" in str(jax.make_jaxpr(lambda x: in_hbm(x))(pool))
    with interpreted(True):
        assert not jax.make_jaxpr(lambda x: in_hbm(x))(pool).eqns
