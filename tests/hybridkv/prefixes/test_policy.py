import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.arithmetic import round_down, round_up
from hybridkv.prefixes.policy import (
    DEFAULT,
    DENSE,
    ENDS,
    NEVER,
    POLICIES,
    THINNED,
    PolicyError,
    SnapshotPolicy,
)


def positions(policy, tokens, start=0, shared=0, tile=16, exact_from=0):
    return policy.positions(
        tokens=tokens, start=start, exact_from=exact_from, shared=shared, tile=tile
    )


def test_the_default_writes_the_last_boundary():
    assert positions(DEFAULT, 100) == (96,)


def test_a_prompt_that_ends_on_a_boundary_also_gets_the_one_before_for_its_repetition():
    assert positions(DEFAULT, 96) == (80, 96)


def test_the_default_writes_where_prompts_part():
    assert positions(DEFAULT, 100, start=16, shared=64) == (64, 96)
    assert positions(ENDS, 100, start=16, shared=64) == (96,)


def test_nothing_is_written_that_the_computation_does_not_pass():
    assert positions(DEFAULT, 100, start=64, shared=64) == (96,)
    assert positions(DEFAULT, 100, start=96, shared=96) == ()
    assert positions(DEFAULT, 10) == ()


def test_nothing_is_written_before_the_state_is_exact():
    assert positions(DENSE, 100, start=16, exact_from=64, shared=64) == (64, 80, 96)


def test_dense_writes_every_boundary_and_never_none():
    assert positions(DENSE, 70, start=16) == (32, 48, 64)
    assert positions(NEVER, 70, shared=32) == ()


@pytest.mark.parametrize("every", [2, 3])
def test_an_interval_counts_from_the_first_token(every):
    policy = SnapshotPolicy(ends=False, forks=False, every=every)
    assert positions(policy, 200, start=100) == tuple(
        p for p in range(0, 201, 16 * every) if p > 100
    )


def test_a_period_is_rounded_up_to_tiles_and_stands_alone():
    assert positions(SnapshotPolicy.periodic(40), 200, shared=64) == (48, 96, 144, 192)
    assert positions(SnapshotPolicy.periodic(1), 50) == (16, 32, 48)
    assert positions(SnapshotPolicy.periodic(40), 200, start=96, exact_from=100) == (144, 192)


def test_geometric_gaps_double_from_the_end():
    tiles = [p // 16 for p in positions(SnapshotPolicy.geometric(1.0), 64 * 16 + 5)]
    assert tiles == [2, 34, 50, 58, 62, 64]


SHARES = st.floats(0.05, 8.0)
TILES = st.sampled_from([1, 16, 128])


def assert_bound(kept, tokens, share, tile, first=0):
    """A prompt that leaves at any boundary recomputes at most its share of what is behind it."""
    held = {0, *kept}
    for fork in range(round_up(first, tile), tokens + 1, tile):
        nearest = max(p for p in held if p <= fork)
        assert fork - nearest <= share * (tokens - fork), (fork, nearest)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 3000), SHARES, TILES)
def test_a_fork_anywhere_recomputes_at_most_its_share(tokens, share, tile):
    kept = positions(SnapshotPolicy.geometric(share), tokens, tile=tile)
    assert_bound(kept, tokens, share, tile)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 900), st.booleans()), max_size=12), SHARES, TILES)
def test_the_bound_survives_growth_and_what_is_superseded(turns, share, tile):
    policy = SnapshotPolicy.geometric(share)
    kept, tokens = set(), 0
    for more, replay in turns:
        shared = round_down(tokens, tile)
        start = max((p for p in kept if p <= shared), default=0)
        exact_from = start
        if replay:
            start = round_down(max(shared - 300, 0), tile)
            exact_from = shared if start else 0
        tokens += more
        kept |= set(positions(policy, tokens, start, shared, tile, exact_from))
        gone = policy.superseded(sorted(kept), tokens=tokens, tile=tile)
        kept -= set(gone)
        assert_bound(kept, tokens, share, tile)
        assert policy.superseded(sorted(kept), tokens=tokens, tile=tile) == ()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 3000), SHARES, TILES)
def test_thinning_every_boundary_keeps_the_bound_with_few(tokens, share, tile):
    every = tuple(range(tile, tokens + 1, tile))
    policy = SnapshotPolicy(every=1, thin=share)
    gone = policy.superseded(every, tokens=tokens, tile=tile)
    kept = [p for p in every if p not in gone]
    assert_bound(kept, tokens, share, tile)
    # The first of the geometric positions is where they stop: one more may stand below it.
    assert len(kept) <= 1 + len(positions(SnapshotPolicy.geometric(share), tokens, tile=tile))


def test_a_long_conversation_keeps_a_logarithm_of_its_ends():
    kept = set()
    for turn in range(1, 501):
        tokens = 100 * turn
        kept |= set(positions(THINNED, tokens, start=max(kept, default=0)))
        kept -= set(THINNED.superseded(sorted(kept), tokens=tokens, tile=16))
    assert max(kept) == 50000
    assert len(kept) <= 20


def test_only_a_policy_that_thins_gives_anything_up():
    every = tuple(range(16, 1025, 16))
    for policy in (DEFAULT, DENSE, ENDS, NEVER, SnapshotPolicy.periodic(64)):
        assert policy.superseded(every, tokens=1030, tile=16) == ()
    assert THINNED.superseded((), tokens=1030, tile=16) == ()
    assert THINNED.superseded((16,), tokens=1030, tile=16) == ()
    assert 1024 not in THINNED.superseded(every, tokens=1030, tile=16)


def test_guesses_are_what_nobody_ended_or_parted_at():
    policy = SnapshotPolicy.geometric(1.0)
    written = positions(policy, 1029, shared=160)
    guesses = policy.guesses(written, tokens=1029, shared=160, tile=16)
    assert guesses == tuple(p for p in written if p not in (160, 1024))
    assert DEFAULT.guesses((160, 1024), tokens=1029, shared=160, tile=16) == ()


def test_the_names_of_command_lines():
    assert {"full", "periodic", "geometric", "default", "none"} <= set(POLICIES)
    assert POLICIES["default"] is DEFAULT
    assert positions(POLICIES["none"], 1000) == ()
    assert positions(POLICIES["full"], 70) == (16, 32, 48, 64)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SnapshotPolicy.periodic(0),
        lambda: SnapshotPolicy.geometric(0.0),
        lambda: SnapshotPolicy.geometric(float("nan")),
        lambda: SnapshotPolicy.geometric(float("inf")),
        lambda: SnapshotPolicy(every=-1),
        lambda: SnapshotPolicy(thin=-0.5),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(make):
    with pytest.raises(PolicyError, match="give") as caught:
        make()
    assert "\n" not in str(caught.value)
