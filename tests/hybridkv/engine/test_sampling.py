"""Tokens are chosen by the right distribution, row by row, and repeatably."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybridkv.engine.sampling import SamplingBatch, SamplingOptions, sample
from hybridkv.errors import UserError

choose = jax.jit(sample)
LOGITS = np.array([1.0, 3.0, -2.0, 2.5, 0.0, 3.0], np.float32)
DRAWS = 4000


def draw(logits, options, positions=None) -> np.ndarray:
    """One choice a row; ``options`` one for all, or one a row."""
    rows = np.atleast_2d(logits)
    if isinstance(options, SamplingOptions):
        options = [options] * len(rows)
    positions = np.arange(len(rows)) if positions is None else np.asarray(positions)
    got = choose(jnp.asarray(rows), jnp.asarray(positions, jnp.int32), SamplingBatch.of(options))
    assert got.dtype == jnp.int32
    return np.asarray(got)


def shares(**options) -> np.ndarray:
    """How often each token was drawn at many positions."""
    tokens = draw(np.tile(LOGITS, (DRAWS, 1)), SamplingOptions(seed=5, **options))
    return np.bincount(tokens, minlength=len(LOGITS)) / DRAWS


def softmax(logits) -> np.ndarray:
    weights = np.exp(logits - np.max(logits))
    return weights / weights.sum()


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    error = np.sqrt(expected * (1 - expected) / DRAWS)
    assert (np.abs(got - expected) <= 4 * error).all(), (got, expected)


def test_without_temperature_the_likeliest_token_wins_and_ties_go_to_the_lowest():
    rows = np.random.default_rng(0).normal(size=(50, 6)).astype(np.float32)
    np.testing.assert_array_equal(draw(rows, SamplingOptions()), rows.argmax(axis=1))
    assert draw(LOGITS, SamplingOptions()) == 1
    assert draw(np.zeros(6, np.float32), SamplingOptions()) == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_frequencies_follow_the_softmax_at_any_temperature(temperature):
    assert_close(shares(temperature=temperature), softmax(LOGITS / temperature))


def test_a_tiny_temperature_is_greedy_between_distinct_logits():
    rows = np.random.default_rng(1).normal(size=(200, 6)).astype(np.float32)
    cold = SamplingOptions(temperature=1e-30)
    np.testing.assert_array_equal(draw(rows, cold), rows.argmax(axis=1))


def test_a_huge_temperature_is_uniform():
    assert_close(shares(temperature=1e6), np.full(6, 1 / 6))


def only(*tokens: int, temperature: float = 1.0) -> np.ndarray:
    """The distribution cut to some tokens."""
    cut = np.full(6, -np.inf)
    cut[list(tokens)] = LOGITS[list(tokens)] / temperature
    return softmax(cut)


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, [1]), (2, [1, 5]), (3, [1, 5, 3]), (6, range(6)), (99, range(6))]
)
def test_top_k_keeps_the_k_likeliest(top_k, kept):
    assert_close(shares(temperature=1.0, top_k=top_k), only(*kept))


# Probabilities at temperature 1: 0.36, 0.36, 0.22, 0.05, 0.018, 0.002.
@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-6, [1]), (0.3, [1]), (0.5, [1, 5]), (0.75, [1, 5, 3]), (0.95, [1, 5, 3, 0])],
)
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p, kept):
    assert_close(shares(temperature=1.0, top_p=top_p), only(*kept))


def test_top_p_looks_at_the_heated_distribution():
    assert set(np.flatnonzero(shares(temperature=3.0, top_p=0.5))) == {1, 5}
    assert set(np.flatnonzero(shares(temperature=3.0, top_p=0.6))) == {1, 5, 3}
    assert set(np.flatnonzero(shares(temperature=1.0, top_p=0.6))) == {1, 5}


def test_top_k_and_top_p_both_cut():
    assert_close(shares(temperature=1.0, top_k=2, top_p=0.95), only(1, 5))
    assert_close(shares(temperature=1.0, top_k=4, top_p=0.5), only(1, 5))


def test_a_choice_is_the_same_whatever_the_neighbours_do():
    rng = np.random.default_rng(3)
    mine = SamplingOptions(temperature=1.5, top_k=5, top_p=0.9, seed=11)
    logits = rng.normal(size=(20, 6)).astype(np.float32)
    alone = [int(draw(row, mine, [100 + i])[0]) for i, row in enumerate(logits)]
    assert len(set(alone)) > 1
    for seed in range(3):
        rng = np.random.default_rng(seed)
        rows = rng.normal(size=(20, 3, 6)).astype(np.float32)
        rows[:, seed] = logits
        others = [
            SamplingOptions(temperature=float(t), seed=int(s))
            for t, s in zip([0.0, 0.7, 2.0], rng.integers(0, 99, 3), strict=True)
        ]
        others[seed] = mine
        for i in range(20):
            assert (
                draw(rows[i], others, [7, 7, 7][:seed] + [100 + i] + [9] * (2 - seed))[seed]
                == alone[i]
            )


def test_seed_and_position_fix_the_choice_and_both_matter():
    rows = np.tile(np.zeros(6, np.float32), (200, 1))
    hot = [SamplingOptions(temperature=1.0, seed=s) for s in (1, 2)]
    first = draw(rows, hot[0])
    np.testing.assert_array_equal(draw(rows, hot[0]), first)
    assert (draw(rows, hot[1]) != first).mean() > 0.5
    assert (draw(rows, hot[0], np.arange(200) + 1000) != first).mean() > 0.5
    assert (draw(rows, hot[0], np.full(200, 3)) == first[3]).all()


def test_the_largest_seed_is_a_seed():
    assert draw(LOGITS, SamplingOptions(temperature=1.0, seed=2**32 - 1)).shape == (1,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be at least 0, got nan"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, r"top_k must be at least 0 \(0 for all tokens\), got -1"),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, got 0.0"),
        ({"top_p": 1.01}, "top_p must be above 0"),
        ({"top_p": float("nan")}, "top_p must be above 0"),
        ({"seed": -1}, "seed must be between 0"),
        ({"seed": 2**32}, "seed must be between 0"),
    ],
)
def test_options_out_of_range_are_refused_in_one_line(options, message):
    with pytest.raises(UserError, match=message) as error:
        SamplingOptions(**options)
    assert "\n" not in str(error.value)
