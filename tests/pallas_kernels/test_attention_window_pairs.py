"""``attend_window_pairs`` against a dense float64 reference, and the bits that must not change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.api import attend_window_pairs

HEADS, WIDTH, SCALE = 6, 8, 0.35


@functools.cache
def compiled(window: int, kv_heads: int):
    return jax.jit(
        functools.partial(attend_window_pairs, window=window, kv_heads=kv_heads, scale=SCALE)
    )


class Case:
    """Random inputs; rows before the first that exists are NaN."""

    def __init__(self, *, t=6, window=5, first=20, kv_heads=2, seed=0):
        rng = np.random.default_rng(seed)
        self.window, self.first, self.kv_heads = window, first, kv_heads
        self.q = (rng.normal(size=(t, HEADS, WIDTH)) * 2).astype(np.float32)
        self.local = rng.normal(size=(window - 1 + t, 2 * kv_heads * WIDTH)).astype(np.float32)
        self.local[: max(window - 1 - first, 0)] = np.nan

    def run(self):
        out = compiled(self.window, self.kv_heads)(
            jnp.asarray(self.q), jnp.asarray(self.local), jnp.asarray(self.first, jnp.int32)
        )
        assert out.dtype == jnp.float32
        return np.asarray(out)

    def expected(self):
        """Query by query, head by head, in float64."""
        out = np.zeros(self.q.shape)
        shape = (len(self.local), 2, self.kv_heads, WIDTH)
        keys, values = self.local.astype(np.float64).reshape(shape).swapaxes(0, 1)
        for i, head in np.ndindex(*self.q.shape[:2]):
            missing = max(self.window - 1 - (self.first + i), 0)
            at, of = slice(i + missing, i + self.window), head // (HEADS // self.kv_heads)
            if missing < self.window:
                logits = keys[at, of] @ self.q[i, head].astype(np.float64) * SCALE
                weights = np.exp(logits - logits.max())
                out[i, head] = weights @ values[at, of] / weights.sum()
        return out

    def check(self):
        np.testing.assert_allclose(self.run(), self.expected(), atol=3e-6, rtol=2e-5)


@pytest.mark.parametrize("window", [1, 2, 5, 8, 70])
@pytest.mark.parametrize("t", [1, 6, 128])
def test_any_window_and_number_of_queries_matches_float64(window, t):
    """128 queries are more than one chunk of queries."""
    Case(window=window, t=t, first=100).check()


@pytest.mark.parametrize("first", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("t", [1, 128])
def test_rows_before_the_first_that_exists_are_not_read(first, t):
    Case(first=first, t=t).check()


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_any_grouping_of_heads_matches_float64(kv_heads):
    Case(kv_heads=kv_heads).check()


def test_queries_before_the_first_row_give_zeros_and_disturb_nobody():
    case = Case(first=-2)
    case.local[:6] = np.nan
    case.check()
    assert (case.run()[:2] == 0.0).all()


def test_large_and_very_negative_logits_do_not_overflow():
    case = Case()
    case.q *= 200
    np.testing.assert_allclose(case.run(), case.expected(), atol=2e-4, rtol=2e-4)
    case.local[:, : 2 * WIDTH] = np.sign(case.local[:, : 2 * WIDTH]) * 1e6
    np.testing.assert_allclose(case.run(), case.expected(), atol=2e-4, rtol=2e-4)


def test_rows_outside_a_querys_window_change_no_bit_of_it():
    one, other = Case(), Case()
    other.local[:3] += 1.0
    other.local[-1] -= 1.0
    before, after = one.run(), other.run()
    # Query i sees local rows i ... i + 4: only query 3 and 4 see none that changed.
    changed = (before != after).any(axis=(1, 2))
    assert changed.tolist() == [True, True, True, False, False, True]


@pytest.mark.parametrize(
    ("kv_heads", "rows", "message"),
    [(4, 10, "6 query heads do not share 4 key heads evenly"), (2, 9, r"must be \[10, 32\]")],
)
def test_what_does_not_fit_is_refused(kv_heads, rows, message):
    with pytest.raises(ValueError, match=message):
        compiled(5, kv_heads)(
            jnp.zeros((6, HEADS, WIDTH)),
            jnp.zeros((rows, 2 * kv_heads * WIDTH)),
            jnp.zeros((), jnp.int32),
        )
