"""``attend_pairs`` against a dense float64 reference, and the bits that must not change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pools import OTHER_POOLS, pooled

from pallas_kernels.attention.api import attend_pairs

HEADS, WIDTH, SCALE, KEY_BLOCK = 6, 8, 0.35, 8


@functools.cache
def compiled(kv_heads: int, key_block: int = KEY_BLOCK, format: str = "float32"):
    options = {"kv_heads": kv_heads, "key_block": key_block, "format": format}
    return jax.jit(functools.partial(attend_pairs, scale=SCALE, **options))


class Case:
    """Random inputs; the last of ``t`` queries sees all ``rows`` unless ``visible`` is given."""

    def __init__(self, *, t=6, rows=17, kv_heads=2, visible=None, seed=0):
        rng = np.random.default_rng(seed)
        self.q = (rng.normal(size=(t, HEADS, WIDTH)) * 2).astype(np.float32)
        self.rows = rng.normal(size=(rows, 2 * kv_heads * WIDTH)).astype(np.float32)
        self.kv_heads = kv_heads
        natural = np.maximum(rows - t + 1 + np.arange(t), 0)
        self.visible = np.asarray(natural if visible is None else visible, np.int32)

    def run(self, rows=None, key_block=KEY_BLOCK, visible=None):
        visible = self.visible if visible is None else visible
        rows = pooled(self.rows[: visible[-1]]) if rows is None else rows
        out = compiled(self.kv_heads, key_block)(
            jnp.asarray(self.q), rows, jnp.asarray(visible, jnp.int32)
        )
        assert out.dtype == jnp.float32
        return np.asarray(out)

    def expected(self):
        """Query by query, head by head, in float64."""
        out = np.zeros(self.q.shape)
        shape = (len(self.rows), 2, self.kv_heads, WIDTH)
        keys, values = self.rows.astype(np.float64).reshape(shape).swapaxes(0, 1)
        for i, head in np.ndindex(*self.q.shape[:2]):
            count, of = self.visible[i], head // (HEADS // self.kv_heads)
            if count:
                logits = keys[:count, of] @ self.q[i, head].astype(np.float64) * SCALE
                weights = np.exp(logits - logits.max())
                out[i, head] = weights @ values[:count, of] / weights.sum()
        return out

    def check(self, **options):
        got = self.run(**options)
        np.testing.assert_allclose(got, self.expected(), atol=3e-6, rtol=2e-5)


@pytest.mark.parametrize("rows", [6, 7, 8, 9, 15, 16, 17, 70])
def test_any_number_of_rows_matches_float64(rows):
    Case(rows=rows).check()


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("t", [1, 5])
def test_any_grouping_of_heads_matches_float64(kv_heads, t):
    Case(kv_heads=kv_heads, t=t).check()


@pytest.mark.parametrize("key_block", [1, 4, 6, 64, 1000])
def test_any_key_block_matches_float64(key_block):
    Case().check(key_block=key_block)


def test_uneven_grouping_is_refused():
    with pytest.raises(ValueError, match="6 query heads do not share 4 key heads evenly"):
        compiled(4)(jnp.zeros((1, HEADS, WIDTH)), pooled(np.zeros((1, 64))), jnp.ones(1, jnp.int32))


def test_queries_that_see_nothing_give_zeros_and_disturb_nobody():
    case = Case(visible=[0, 0, 3, 3, 17, 17])
    case.check()
    assert (case.run()[:2] == 0.0).all()
    assert (Case(visible=[0] * 6).run() == 0.0).all()


def test_large_and_very_negative_logits_do_not_overflow():
    case = Case()
    case.q *= 200
    np.testing.assert_allclose(case.run(), case.expected(), atol=2e-4, rtol=2e-4)
    case.rows[:, : case.kv_heads * WIDTH] = np.sign(case.rows[:, : case.kv_heads * WIDTH]) * 1e6
    np.testing.assert_allclose(case.run(), case.expected(), atol=2e-4, rtol=2e-4)


def test_masked_key_blocks_change_no_bit_of_earlier_queries():
    """The last query alone decides how many blocks are read."""
    case = Case(rows=60, visible=[5] * 6)
    few = case.run()
    for last in (6, 8, 9, 17, 60):
        many = case.run(visible=np.asarray([5] * 5 + [last]))
        np.testing.assert_array_equal(many[:-1], few[:-1])
        assert (many[-1] != few[-1]).any()


def test_capacity_order_of_blocks_and_stale_bytes_change_no_bit():
    case = Case()
    expected = case.run()
    assert np.isfinite(expected).all()
    for other in OTHER_POOLS:
        got = case.run(rows=pooled(case.rows, **other))
        np.testing.assert_array_equal(got, expected, err_msg=str(other))


def test_bfloat16_rows_are_attended_as_they_decode():
    case = Case()
    stored = pooled(case.rows)
    halves = (np.asarray(stored.pool).view(np.uint32) >> 16).astype(np.uint16)
    # Keep 16 bits: what is left of a float32 is a bfloat16.
    case.rows = (case.rows.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    got = compiled(case.kv_heads, KEY_BLOCK, "bfloat16")(
        jnp.asarray(case.q), stored._replace(pool=jnp.asarray(halves)), jnp.asarray(case.visible)
    )
    np.testing.assert_allclose(np.asarray(got), case.expected(), atol=3e-6, rtol=2e-5)
