from hypothesis import given
from hypothesis import strategies as st

from hybridkv.kinds import Kind
from hybridkv.prefixes.losses import Cause, Loss, Step, blame

POSITIONS = st.lists(st.integers(0, 300), min_size=1, max_size=6)


def test_each_token_is_lost_once_to_the_step_that_lost_it():
    steps = (
        Step(position=96, cause=Cause.ALIGNMENT),
        Step(position=96, cause=Cause.NEVER_PUBLISHED),
        Step(position=64, cause=Cause.EVICTED, kind=Kind.INDEXER),
        Step(position=80, cause=Cause.POLICY),
    )
    assert blame(100, steps) == (
        Loss(cause=Cause.ALIGNMENT, kind=None, tokens=4),
        Loss(cause=Cause.EVICTED, kind=Kind.INDEXER, tokens=32),
    )


def test_a_cause_that_comes_twice_is_one_loss():
    steps = (
        Step(position=96, cause=Cause.ALIGNMENT),
        Step(position=80, cause=Cause.POLICY),
        Step(position=64, cause=Cause.ALIGNMENT),
    )
    assert [loss.tokens for loss in blame(100, steps)] == [20, 16]


def test_a_loss_reads_as_a_phrase():
    assert str(Loss(cause=Cause.EVICTED, kind=Kind.TAIL, tokens=5)) == "5 to evicted (tail)"
    assert str(Loss(cause=Cause.ALIGNMENT, kind=None, tokens=7)) == "7 to alignment"


@given(st.integers(0, 300), POSITIONS)
def test_losses_are_ideal_minus_the_lowest_step(ideal, positions):
    steps = tuple(Step(position=p, cause=Cause.POLICY) for p in positions)
    assert sum(loss.tokens for loss in blame(ideal, steps)) == ideal - min(ideal, *positions)
