"""Tokens are chosen by the right distribution, row by row, and repeatably."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.engine.guard import CompileGuard
from hybridkv.engine.sampling import (
    Sampled,
    Sampler,
    SamplerState,
    SamplingBatch,
    SamplingOptions,
    sample,
    tokens_seen,
)
from hybridkv.engine.steps import DonatedCacheError
from hybridkv.errors import UserError

LOGITS = np.array([1.0, 3.0, -2.0, 2.5, 0.0, 3.0], np.float32)
DRAWS = 4000


@functools.cache
def compiled(logprobs: int):
    return jax.jit(functools.partial(sample, logprobs=logprobs))


def choose(
    logits, options, positions=None, *, seen=None, logprobs=0, slots=None
) -> tuple[Sampled, np.ndarray]:
    """What is chosen, and the tokens that count as seen afterwards, all on the host."""
    rows = np.atleast_2d(logits)
    if isinstance(options, SamplingOptions):
        options = [options] * len(rows)
    positions = np.arange(len(rows)) if positions is None else np.asarray(positions)
    seen = np.zeros(rows.shape, bool) if seen is None else np.atleast_2d(seen)
    sampled, state = compiled(logprobs)(
        jax.device_put(rows),
        jax.device_put(positions.astype(np.int32)),
        SamplingBatch.of(options, slots=slots),
        SamplerState(seen=jax.device_put(seen)),
    )
    assert sampled.tokens.dtype == jnp.int32
    return jax.tree.map(np.asarray, sampled), np.asarray(state.seen)


def draw(logits, options, positions=None, *, seen=None) -> np.ndarray:
    """One choice a row; ``options`` one for all, or one a row."""
    return choose(logits, options, positions, seen=seen)[0].tokens


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


def test_top_p_counts_what_top_k_left():
    """0.38, 0.38, 0.23 after top_k: two of them are 0.764 of what is left, but 0.72 of all."""
    assert_close(shares(temperature=1.0, top_k=3, top_p=0.75), only(1, 5))
    assert_close(shares(temperature=1.0, top_p=0.75), only(1, 5, 3))


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.0, range(6)), (0.1, [1, 5, 3, 0]), (0.2, [1, 5, 3]), (1.0, [1, 5])]
)
def test_min_p_is_a_share_of_the_likeliest(min_p, kept):
    """Probabilities over the largest: 1, 1, 0.61, 0.14, 0.05, 0.007."""
    assert_close(shares(temperature=1.0, min_p=min_p), only(*kept))


def test_min_p_looks_at_the_heated_distribution():
    hot = only(1, 5, 3, 0, 4, temperature=3.0)
    assert_close(shares(temperature=3.0, min_p=0.3), hot)  # 0.37 for token 4, 0.19 for token 2


def test_a_cut_among_equals_keeps_the_lowest():
    row = np.array([0.0, 7.0, -0.0, 7.0, 7.0, 0.0], np.float32)

    def kept(**options) -> set[int]:
        hot = SamplingOptions(temperature=5.0, **options)
        return set(draw(np.tile(row, (500, 1)), hot).tolist())

    assert kept(top_k=2) == {1, 3}
    assert kept(top_k=4) == {1, 3, 4, 0}
    assert kept(top_k=5) == {1, 3, 4, 0, 2}
    assert kept(top_p=1e-30) == {1}
    assert kept(min_p=1.0) == {1, 3, 4}


def expected_cut(logits: np.ndarray, options: SamplingOptions) -> set[int]:
    """The tokens that may be drawn, by a sort in float64."""
    heated = np.exp((logits.astype(float) - logits.max()) / options.temperature)
    order = np.argsort(-logits.astype(float), kind="stable")
    order = order[: options.top_k or len(order)]
    weights = heated[order]
    before = np.cumsum(weights) - weights
    order = order[before < options.top_p * weights.sum()]
    return set(order[heated[order] >= options.min_p].tolist())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    scores=st.lists(st.integers(-6, 6), min_size=24, max_size=24),
    top_k=st.integers(0, 30),
    top_p=st.sampled_from([0.13, 0.37, 0.71, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.17, 0.9]),
    temperature=st.sampled_from([0.71, 2.3, 9.1]),
)
def test_cuts_are_those_of_a_sort(scores, top_k, top_p, min_p, temperature):
    """Flat noise would need many draws to see every token, so the heat is high and rows many."""
    logits = np.array(scores, np.float32) / 2
    options = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = expected_cut(logits, options)
    drawn = set(draw(np.tile(logits, (300, 1)), options).tolist())
    assert drawn <= expected
    certain = np.exp((logits - logits.max()) / temperature)
    likely = {t for t in expected if certain[t] / certain.sum() > 0.05}
    assert likely <= drawn


def penalised(logits: np.ndarray, seen: np.ndarray, penalty: float) -> np.ndarray:
    return np.where(seen, np.where(logits > 0, logits / penalty, logits * penalty), logits)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_the_penalty_moves_seen_tokens_away_from_what_is_likely(penalty):
    seen = np.array([0, 1, 1, 0, 1, 0], bool)
    options = SamplingOptions(temperature=1.0, repetition_penalty=penalty, seed=5)
    tokens = draw(np.tile(LOGITS, (DRAWS, 1)), options, seen=np.tile(seen, (DRAWS, 1)))
    got = np.bincount(tokens, minlength=6) / DRAWS
    assert_close(got, softmax(penalised(LOGITS, seen, penalty)))


def test_the_penalty_counts_for_greedy_rows_and_is_theirs_alone():
    seen = np.array([0, 1, 0, 0, 0, 0], bool)
    strong, off = SamplingOptions(repetition_penalty=2.0), SamplingOptions()
    np.testing.assert_array_equal(draw([LOGITS] * 2, [strong, off], seen=[seen, seen]), [5, 1])
    favoured = SamplingOptions(repetition_penalty=0.5)
    assert draw(LOGITS, favoured, seen=np.array([0, 0, 0, 1, 0, 0], bool)) == 3


def test_what_is_chosen_counts_as_seen_in_active_rows_only():
    seen = np.zeros((3, 6), bool)
    greedy = SamplingOptions(repetition_penalty=100.0)
    chosen = []
    for _ in range(4):
        got, seen = choose([LOGITS] * 3, [None, greedy, None], seen=seen)
        chosen.append(int(got.tokens[1]))
    assert chosen == [1, 5, 3, 0]
    np.testing.assert_array_equal(seen[[0, 2]], np.zeros((2, 6), bool))
    np.testing.assert_array_equal(np.flatnonzero(seen[1]), [0, 1, 3, 5])


def test_rows_of_lanes_belong_to_the_slots_they_name():
    """A tile step's rows are lanes: here lane 0 is slot 2, lane 1 idle, lane 2 slot 0."""
    seen = np.zeros((4, 6), bool)
    seen[2, 1] = True
    options = [SamplingOptions(repetition_penalty=2.0), None, SamplingOptions()]
    got, after = choose([LOGITS] * 3, options, seen=seen, slots=[2, 2, 0])
    assert got.tokens.tolist() == [5, 0, 1]
    assert {tuple(x) for x in np.argwhere(after).tolist()} == {(2, 1), (2, 5), (0, 1)}


@pytest.mark.parametrize(("count", "slots"), [(2, [1]), (2, [1, 1])])
def test_a_batch_with_wrong_slots_is_refused(count, slots):
    with pytest.raises(ValueError, match="slot"):
        SamplingBatch.of([SamplingOptions()] * count, slots=slots)


def test_logprobs_are_those_of_the_raw_logits():
    hot = SamplingOptions(temperature=3.0, top_k=3, repetition_penalty=1.7, seed=4)
    seen = np.ones(6, bool)
    got, _ = choose(LOGITS, hot, seen=seen, logprobs=4)
    expected = np.log(softmax(LOGITS.astype(float)))
    np.testing.assert_allclose(got.logprobs, expected[got.tokens], rtol=1e-6)
    assert got.top_tokens.tolist() == [[1, 5, 3, 0]]
    np.testing.assert_allclose(got.top_logprobs[0], expected[[1, 5, 3, 0]], rtol=1e-6)


def test_negative_zero_equals_zero_everywhere():
    row = np.array([-1.0, -0.0, 0.0, -0.0], np.float32)
    got, _ = choose(row, SamplingOptions(), logprobs=3)
    assert got.tokens == 1
    assert got.top_tokens.tolist() == [[1, 2, 3]]
    assert draw(row, SamplingOptions(temperature=1.0, top_k=1)) == 1


def test_without_logprobs_nothing_is_sorted():
    def text(logprobs: int) -> str:
        rows = jax.ShapeDtypeStruct((8, 64), jnp.float32)
        positions = jax.ShapeDtypeStruct((8,), jnp.int32)
        batch = SamplingBatch.of([SamplingOptions()] * 8)
        state = SamplerState.abstract(slots=8, vocab_size=64)
        return compiled(logprobs).lower(rows, positions, batch, state).as_text()

    # The order of the rows is the only sort: eight flags.
    assert text(0).count("stablehlo.sort") == 1
    assert "top_k" not in text(0)
    assert "top_k" in text(3)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_tokens_without_a_number_are_not_chosen(value):
    row = LOGITS.copy()
    row[[1, 5]] = value
    assert draw(row, SamplingOptions()) == 3
    hot = SamplingOptions(temperature=1.0, top_p=0.999)
    assert not set(draw(np.tile(row, (200, 1)), hot).tolist()) & {1, 5}
    assert 0 <= draw(np.full(6, value, np.float32), hot)[0] < 6


def test_infinities_of_a_penalty_do_not_become_nan():
    seen = np.array([0, 1, 0, 0, 0, 1], bool)
    hot = SamplingOptions(temperature=1.0, repetition_penalty=1.2e-38)
    tokens = draw(np.tile(LOGITS * 1e9, (50, 1)), hot, seen=np.tile(seen, (50, 1)))
    assert set(tokens.tolist()) == {1, 5}


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


@pytest.mark.parametrize("options", [{}, {"temperature": 1.3, "top_k": 40, "top_p": 0.9}])
def test_a_rows_bits_do_not_depend_on_the_other_rows_the_slot_or_their_number(options):
    rng = np.random.default_rng(8)
    rows = rng.normal(size=(8, 500)).astype(np.float32) * 3
    seen = rng.random((8, 500)) < 0.2
    mine = SamplingOptions(repetition_penalty=1.2, min_p=0.01, seed=9, **options)

    def bits(sampled: Sampled, row: int) -> list[bytes]:
        return [x[row].tobytes() for x in jax.tree.leaves(sampled)]

    alone = bits(choose(rows[0], mine, [77], seen=seen[0], logprobs=5)[0], 0)
    for place in (0, 3, 7):
        others = [None if i % 2 else SamplingOptions(temperature=i * 0.7) for i in range(8)]
        others[place] = mine
        order = np.roll(np.arange(8), place)
        got, _ = choose(rows[order], others, np.full(8, 77), seen=seen[order], logprobs=5)
        assert bits(got, place) == alone


def test_idle_rows_give_zeros():
    got, seen = choose([LOGITS] * 3, [None, SamplingOptions(), None], logprobs=2)
    for leaf in jax.tree.leaves(got):
        assert not leaf[[0, 2]].any()
    assert np.argwhere(seen).tolist() == [[1, 1]]


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
        ({"min_p": -0.1}, r"min_p must be between 0 \(off\) and 1, got -0.1"),
        ({"min_p": 1.5}, "min_p must be between"),
        ({"min_p": float("nan")}, "min_p must be between"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be above 0 and finite .* got 0.0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": 1e-60}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be above 0"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be above 0"),
        ({"seed": -1}, "seed must be between 0"),
        ({"seed": 2**32}, "seed must be between 0"),
    ],
)
def test_options_out_of_range_are_refused_in_one_line(options, message):
    with pytest.raises(UserError, match=message) as error:
        SamplingOptions(**options)
    assert "\n" not in str(error.value)


def test_a_sampler_compiles_nothing_after_warm_up_and_seats_whole_rows():
    sampler = Sampler(vocab_size=6, slots=4, logprobs=2)
    state = sampler.warm_up(sampler.init_state(), 4, 2)
    np.testing.assert_array_equal(np.asarray(state.seen), np.zeros((4, 6), bool))
    guard = CompileGuard(mode="raise")
    guard.arm()
    state = sampler.seat(state, 3, tokens_seen(np.array([1, 1, 4]), 6))
    state = sampler.seat(state, 2, tokens_seen(np.array([5]), 6))
    rows = jax.device_put(np.tile(LOGITS, (2, 1)))
    greedy = SamplingOptions(repetition_penalty=9.0)
    batch = SamplingBatch.of([greedy, None], slots=[3, 4])
    sampled, state = sampler.sample(rows, jax.device_put(np.zeros(2, np.int32)), batch, state)
    assert np.asarray(sampled.tokens).tolist() == [5, 0]
    four = jax.device_put(np.tile(LOGITS, (4, 1)))
    hot = dataclasses.replace(greedy, temperature=1.0, top_k=1)
    batch = SamplingBatch.of([None, None, hot, greedy])
    sampled, state = sampler.sample(four, jax.device_put(np.zeros(4, np.int32)), batch, state)
    assert np.asarray(sampled.tokens).tolist() == [0, 0, 1, 3]
    state = sampler.seat(state, 3, tokens_seen(np.array([0]), 6))
    guard.check()
    assert np.flatnonzero(np.asarray(state.seen)[3]).tolist() == [0]
    assert np.flatnonzero(np.asarray(state.seen)[2]).tolist() == [1, 5]


def test_a_donated_state_is_refused_with_the_right_call():
    sampler = Sampler(vocab_size=6, slots=1)
    old = sampler.init_state()
    state = sampler.warm_up(old, 1)
    with pytest.raises(DonatedCacheError, match=r"write `state = sampler.seat\("):
        sampler.seat(old, 0, np.zeros(6, bool))
    batch = SamplingBatch.of([None])
    logits, positions = jax.device_put((LOGITS[None], np.zeros(1, np.int32)))
    sampler.sample(logits, positions, batch, state)
    with pytest.raises(DonatedCacheError, match=r"write `sampled, state = sampler\.sample"):
        sampler.sample(logits, positions, batch, state)


def test_a_row_of_another_vocabulary_is_refused():
    sampler = Sampler(vocab_size=6, slots=1)
    for row in (np.zeros(7, bool), np.zeros(6, np.int32)):
        with pytest.raises(ValueError, match="not bool"):
            sampler.seat(sampler.init_state(), 0, row)


@pytest.mark.parametrize(("vocab", "most"), [(6, 6), (4096, 20)])
def test_more_alternatives_than_there_are_is_refused(vocab, most):
    with pytest.raises(UserError, match=f"logprobs must be between 0 and {most}, got {most + 1}"):
        Sampler(vocab_size=vocab, slots=1, logprobs=most + 1)
    assert Sampler(vocab_size=vocab, slots=1, logprobs=most).logprobs == most
