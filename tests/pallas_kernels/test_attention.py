"""``attend`` against a dense float64 reference, and the bits that must not change."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pools import OTHER_POOLS, pooled

from pallas_kernels.attention.reference import attend
from pallas_kernels.index_scores.api import NO_ROW

HEADS, WIDTH, SCALE, RATIO, KEY_BLOCK = 3, 8, 0.35, 4, 8


@functools.cache
def compiled(window: int, key_block: int = KEY_BLOCK, format: str = "float32"):
    def function(q, local, first, sink, rows, visible, picks):
        return attend(
            q,
            local,
            first,
            sink,
            window=window,
            scale=SCALE,
            rows=rows,
            visible=visible,
            picks=picks,
            key_block=key_block,
            format=format,
        )

    return jax.jit(function)


class Case:
    """Random inputs of ``t`` queries from position ``first``; ``visible`` may be any counts."""

    def __init__(self, *, t=6, window=8, first=37, rows=11, visible=None, seed=0, sink=None):
        rng = np.random.default_rng(seed)

        def normal(*shape):
            return rng.normal(size=shape).astype(np.float32)

        self.t, self.window, self.first = t, window, first
        self.q = normal(t, HEADS, WIDTH) * 2
        self.local = normal(window - 1 + t, WIDTH)
        self.rows = normal(rows, WIDTH)
        self.sink = normal(HEADS) if sink is None else np.full(HEADS, sink, np.float32)
        natural = (first + np.arange(t) + 1) // RATIO
        given = np.broadcast_to(natural if visible is None else visible, (t,))
        self.visible = np.minimum(given, rows).astype(np.int32)

    def run(self, rows="pooled", picks=None, key_block=KEY_BLOCK, visible=None):
        given = self.visible if visible is None else visible
        if isinstance(rows, str):
            rows = pooled(self.rows[: given[-1]])
        return np.asarray(
            compiled(self.window, key_block)(
                jnp.asarray(self.q),
                jnp.asarray(self.local),
                jnp.asarray(self.first, jnp.int32),
                jnp.asarray(self.sink),
                rows,
                None if rows is None else jnp.asarray(given, jnp.int32),
                None if picks is None else jnp.asarray(picks, jnp.int32),
            )
        )

    def expected(self, picks=None, rows=True):
        """Position by position, head by head, in float64."""
        out = np.zeros((self.t, HEADS, WIDTH))
        for i in range(self.t):
            position = self.first + i
            near = range(max(position - self.window + 1, 0), position + 1)
            keys = [self.local[p - self.first + self.window - 1] for p in near]
            if rows:
                chosen = range(self.visible[i]) if picks is None else picks[i]
                keys += [self.rows[s] for s in chosen if s < self.visible[i]]
            keys = np.asarray(keys, np.float64)
            for head in range(HEADS):
                logits = keys @ self.q[i, head].astype(np.float64) * SCALE
                sink = float(self.sink[head])
                top = max(logits.max(), sink)
                weights = np.exp(logits - top)
                out[i, head] = weights @ keys / (weights.sum() + np.exp(sink - top))
        return out

    def check(self, picks=None, **options):
        got = self.run(picks=picks, **options)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, self.expected(picks), atol=3e-6, rtol=2e-5)


@pytest.mark.parametrize("first", [0, 1, 3, 6, 7, 8, 9, 37])
def test_queries_from_any_first_position_match_float64(first):
    Case(first=first).check()


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_any_number_of_rows_matches_float64(length):
    case = Case(first=200, rows=length)
    assert (case.visible == length).all()
    case.check()


@pytest.mark.parametrize(("t", "window"), [(1, 8), (5, 1), (160, 8), (134, 8), (200, 100)])
@pytest.mark.parametrize("first", [0, 1, 7, 41])
def test_many_chunks_of_queries_match_float64(t, window, first):
    Case(t=t, window=window, first=first, rows=70).check()


@pytest.mark.parametrize("key_block", [1, 4, 6, 64, 1000])
def test_any_key_block_matches_float64(key_block):
    Case(first=60, rows=17).check(key_block=key_block)


@pytest.mark.parametrize("sink", [-1e4, -50.0, 3.0, 50.0, 1e4])
def test_sink_only_joins_the_denominator(sink):
    case = Case(sink=sink)
    case.check()
    size = np.abs(case.run()).max()
    assert size == 0.0 if sink == 1e4 else size > 0.0


def test_large_logits_do_not_overflow():
    case = Case()
    case.q *= 200
    got = case.run()
    np.testing.assert_allclose(got, case.expected(), atol=2e-4, rtol=2e-4)


def test_without_rows_only_the_window_is_attended():
    case = Case()
    np.testing.assert_allclose(case.run(rows=None), case.expected(rows=False), atol=3e-6, rtol=2e-5)


def test_rows_that_nobody_sees_change_no_bit():
    case = Case(visible=0)
    np.testing.assert_array_equal(case.run(rows=pooled(case.rows[:0])), case.run(rows=None))


def test_window_rows_before_position_zero_are_not_read():
    case = Case(first=2)
    other = Case(first=2)
    other.local[: other.window - 1 - 2] = np.nan
    np.testing.assert_array_equal(other.run(), case.run())


def _picks(case: Case, count: int, seed: int) -> np.ndarray:
    """Per query some visible rows, then rows not visible, then NO_ROW; ascending."""
    rng = np.random.default_rng(seed)
    picks = np.full((case.t, count), NO_ROW, np.int64)
    for i, visible in enumerate(case.visible):
        some = rng.permutation(visible)[: rng.integers(0, count)]
        beyond = [visible] if len(some) < count - 1 and i % 2 else []
        chosen = np.sort(np.concatenate([some, beyond]).astype(np.int64))
        picks[i, : len(chosen)] = chosen
    return picks


@pytest.mark.parametrize("first", [0, 1, 3, 8, 37, 60])
def test_only_picked_rows_are_attended(first):
    case = Case(first=first, rows=17)
    picks = _picks(case, 5, first)
    case.check(picks=picks)


def test_no_pick_at_all_is_the_window_alone():
    case = Case()
    picks = np.full((case.t, 3), NO_ROW)
    np.testing.assert_array_equal(case.run(picks=picks), case.run(rows=None))


def test_picks_at_or_past_visible_are_ignored():
    case = Case(visible=np.array([2, 2, 3, 3, 4, 4]))
    within = np.tile([0, 1, NO_ROW, NO_ROW], (case.t, 1))
    beyond = within.copy()
    beyond[:, 2:] = np.stack([case.visible, case.visible + 5], axis=1)
    np.testing.assert_array_equal(case.run(picks=beyond), case.run(picks=within))


def test_masked_key_blocks_change_no_bit_of_earlier_queries():
    """The last query alone decides how many blocks are read."""
    case = Case(first=20, rows=60, visible=5)
    few = case.run(visible=case.visible)
    for last in (6, 8, 9, 17, 60):
        visible = case.visible.copy()
        visible[-1] = last
        many = case.run(visible=visible)
        np.testing.assert_array_equal(many[:-1], few[:-1])
        assert (many[-1] != few[-1]).any()


@pytest.mark.parametrize("routed", [False, True], ids=["all rows", "picks"])
def test_capacity_order_of_blocks_and_stale_bytes_change_no_bit(routed):
    case = Case(first=70, rows=17)
    picks = _picks(case, 5, 0) if routed else None
    expected = case.run(rows=pooled(case.rows), picks=picks)
    assert np.isfinite(expected).all()
    for other in OTHER_POOLS:
        got = case.run(rows=pooled(case.rows, **other), picks=picks)
        np.testing.assert_array_equal(got, expected, err_msg=str(other))


def test_bfloat16_rows_are_attended_as_they_decode():
    case = Case()
    stored = pooled(case.rows)
    bits = np.asarray(stored.pool).view(np.uint32)
    # Keep 16 bits: what is left of a float32 is a bfloat16.
    case.rows = (case.rows.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    halves = jnp.asarray((bits >> 16).astype(np.uint16))
    got = compiled(case.window, KEY_BLOCK, "bfloat16")(
        jnp.asarray(case.q),
        jnp.asarray(case.local),
        jnp.asarray(case.first, jnp.int32),
        jnp.asarray(case.sink),
        stored._replace(pool=halves),
        jnp.asarray(case.visible),
        None,
    )
    np.testing.assert_allclose(np.asarray(got), case.expected(), atol=3e-6, rtol=2e-5)
