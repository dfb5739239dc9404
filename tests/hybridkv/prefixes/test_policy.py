import pytest

from hybridkv.prefixes.policy import DEFAULT, DENSE, ENDS, NEVER, SnapshotPolicy


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
