"""Picks against a dense ranking, with ties everywhere: small integers make scores exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pools import pooled

from pallas_kernels.index_scores.api import NO_ROW
from pallas_kernels.index_scores.reference import block_scores, pick_rows

T, HEADS, WIDTH = 5, 4, 6


@functools.cache
def compiled(topk: int, key_block: int):
    return jax.jit(functools.partial(pick_rows, topk=topk, key_block=key_block, format="float32"))


def picked(queries, weights, rows, visible, topk, key_block=8):
    arrays = (jnp.asarray(queries), jnp.asarray(weights), rows, jnp.asarray(visible, jnp.int32))
    got = np.asarray(compiled(topk, key_block)(*arrays))
    assert got.dtype == np.int32
    return got


def integers(seed: int, rows: int):
    rng = np.random.default_rng(seed)
    queries = rng.integers(-2, 3, (T, HEADS, WIDTH)).astype(np.float32)
    weights = rng.integers(-2, 3, (T, HEADS)).astype(np.float32) / 2
    return queries, weights, rng.integers(-1, 2, (rows, WIDTH)).astype(np.float32)


def ranked(queries, weights, rows, visible, topk):
    """All scores in float64, one sort, lowest row first among equals."""
    hits = np.maximum(np.einsum("thc,sc->ths", *(x.astype(np.float64) for x in (queries, rows))), 0)
    scores = np.einsum("ths,th->ts", hits, weights.astype(np.float64))
    out = np.full((len(queries), topk), NO_ROW, np.int64)
    for i, count in enumerate(visible):
        order = sorted(range(count), key=lambda s: (-scores[i, s], s))[:topk]
        out[i, : len(order)] = sorted(order)
    return out


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("last", [0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 40])
def test_picks_are_the_best_rows_with_ties_to_the_lowest(seed, last):
    queries, weights, rows = integers(seed, last)
    visible = np.maximum(last - np.arange(T)[::-1], 0)
    got = picked(queries, weights, pooled(rows), visible, topk=3)
    np.testing.assert_array_equal(got, ranked(queries, weights, rows, visible, 3))


@pytest.mark.parametrize("key_block", [1, 8, 12, 1000])
@pytest.mark.parametrize("topk", [1, 6, 39])
def test_a_stream_of_key_blocks_picks_what_one_block_does(key_block, topk):
    queries, weights, rows = integers(9, 40)
    visible = np.array([0, 3, 20, 39, 40])
    got = picked(queries, weights, pooled(rows), visible, topk=topk, key_block=key_block)
    np.testing.assert_array_equal(got, ranked(queries, weights, rows, visible, topk))


def test_random_floats_rank_like_float64():
    rng = np.random.default_rng(2)
    queries = rng.normal(size=(T, HEADS, WIDTH)).astype(np.float32)
    weights = rng.normal(size=(T, HEADS)).astype(np.float32)
    rows = rng.normal(size=(50, WIDTH)).astype(np.float32)
    visible = np.array([46, 47, 48, 49, 50])
    got = picked(queries, weights, pooled(rows), visible, topk=7)
    np.testing.assert_array_equal(got, ranked(queries, weights, rows, visible, 7))


def test_scores_that_are_all_zero_pick_the_lowest_rows():
    queries, weights, rows = integers(0, 30)
    got = picked(np.zeros_like(queries), weights, pooled(rows), np.full(T, 30), topk=4)
    np.testing.assert_array_equal(got, np.tile(np.arange(4), (T, 1)))


def test_negative_scores_are_still_picked_where_rows_are_few():
    queries, weights, rows = integers(0, 30)
    queries[:], rows[:], weights[:] = 1, 1, -1
    got = picked(queries, weights, pooled(rows), np.array([1, 2, 3, 4, 30]), topk=4)
    expected = [[0, NO_ROW, NO_ROW, NO_ROW], [0, 1, NO_ROW, NO_ROW], [0, 1, 2, NO_ROW]]
    np.testing.assert_array_equal(got, [*expected, [0, 1, 2, 3], [0, 1, 2, 3]])


def test_zero_beats_negative_and_loses_to_positive():
    one = np.ones((T, 1, 1), np.float32)
    rows = np.array([[-1], [2], [-1], [0], [1], [3]], np.float32)
    falling = picked(one, -one[:, 0], pooled(rows), np.full(T, 6), topk=4)
    np.testing.assert_array_equal(falling, np.tile([0, 2, 3, 4], (T, 1)))
    rising = picked(one, one[:, 0], pooled(rows), np.full(T, 6), topk=4)
    np.testing.assert_array_equal(rising, np.tile([0, 1, 4, 5], (T, 1)))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_negative_zero_becomes_zero(heads):
    """One head times relu zero is -0.0; top_k would rank it below 0.0."""
    queries = -jnp.ones((T, heads, WIDTH))
    scores = jax.jit(block_scores)(queries, -jnp.ones((T, heads)), jnp.ones((7, WIDTH)))
    assert (np.asarray(scores) == 0).all()
    assert not np.signbit(np.asarray(scores)).any()


def test_a_query_without_visible_rows_picks_none():
    queries, weights, rows = integers(1, 20)
    for visible in (np.zeros(T, int), np.array([0, 0, 0, 19, 20])):
        got = picked(queries, weights, pooled(rows[: visible[-1]]), visible, topk=3)
        assert (got[visible == 0] == NO_ROW).all()


def test_picks_ascend_and_pad_at_the_end():
    queries, weights, rows = integers(4, 33)
    visible = np.array([1, 4, 6, 20, 33])
    got = picked(queries, weights, pooled(rows), visible, topk=6).astype(np.int64)
    for row, count in zip(got, visible, strict=True):
        real = row[row != NO_ROW]
        assert len(real) == min(count, 6)
        assert (np.diff(real) > 0).all()
        assert (row[len(real) :] == NO_ROW).all()


def test_capacity_order_of_blocks_and_stale_bytes_change_no_pick():
    queries, weights, rows = integers(5, 18)
    visible = np.array([9, 10, 17, 18, 18])
    expected = ranked(queries, weights, rows, visible, 5)
    for other in ({}, {"blocks": 5, "table": 5}, {"blocks": 300, "table": 99}, {"fill": np.inf}):
        got = picked(queries, weights, pooled(rows, **other), visible, topk=5)
        np.testing.assert_array_equal(got, expected, err_msg=str(other))


def test_where_the_last_query_looks_changes_no_earlier_pick():
    queries, weights, rows = integers(6, 40)
    few = picked(queries, weights, pooled(rows[:9]), np.full(T, 9), topk=5)
    many = picked(queries, weights, pooled(rows), np.array([9, 9, 9, 9, 40]), topk=5)
    np.testing.assert_array_equal(many[:-1], few[:-1])


def test_no_row_is_past_any_length():
    assert np.iinfo(np.int32).max == NO_ROW
