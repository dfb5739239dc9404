"""Stages change as the tables say: forward by a person, back by themselves too."""

import dataclasses
import json

import pytest

from hybridkv.observe.rollout import (
    AUTOMATIC,
    BACK,
    FORWARD,
    LONGEST_HISTORY,
    ORDER,
    RollbackCause,
    RolloutError,
    RolloutStage,
    RolloutState,
    back,
    forward,
    roll_back,
)

OFF, SHADOW, PERCENT, FULL = RolloutStage
WHO = {"by": "ada", "reason": "a test", "now": 5.0}


def at(stage: RolloutStage, percent: float = 10.0) -> RolloutState:
    fixed = {OFF: 0.0, SHADOW: 0.0, FULL: 100.0}
    return RolloutState(stage=stage, percent=fixed.get(stage, percent))


def share(stage: RolloutStage, percent: float = 20.0) -> float | None:
    return percent if stage is PERCENT else None


@pytest.mark.parametrize("before", RolloutStage)
def test_forward_is_one_stage_at_a_time(before):
    for to in RolloutStage:
        if to in FORWARD[before]:
            after = forward(at(before), to, percent=share(to), **WHO)
            assert (after.stage, after.revision) == (to, 1)
            assert after.history[-1].by == "ada"
            assert ORDER.index(to) - ORDER.index(before) == (to is not before)
        else:
            with pytest.raises(RolloutError, match=f"from {before.value} a rollout does not go"):
                forward(at(before), to, percent=share(to), **WHO)


@pytest.mark.parametrize("before", RolloutStage)
def test_back_is_any_number_of_stages(before):
    for to in RolloutStage:
        if to in BACK[before]:
            assert back(at(before), to, percent=share(to, 5.0), **WHO).stage is to
        else:
            with pytest.raises(RolloutError, match="is not back from"):
                back(at(before), to, percent=share(to, 5.0), **WHO)


def test_percentages_grow_forward_and_shrink_back():
    state = at(PERCENT, 10.0)
    assert forward(state, PERCENT, percent=11.0, **WHO).percent == 11.0
    assert back(state, PERCENT, percent=9.0, **WHO).percent == 9.0
    with pytest.raises(RolloutError, match="not more than 10"):
        forward(state, PERCENT, percent=10.0, **WHO)
    with pytest.raises(RolloutError, match="percent 10 is not back from percent 10"):
        back(state, PERCENT, percent=10.0, **WHO)
    for wrong in (None, 0.0, 100.0, float("nan")):
        with pytest.raises(RolloutError, match="above 0 and below 100"):
            forward(at(SHADOW), PERCENT, percent=wrong, **WHO)
    with pytest.raises(RolloutError, match="takes no percentage"):
        forward(at(OFF), SHADOW, percent=5.0, **WHO)


@pytest.mark.parametrize("by", ["", "  ", AUTOMATIC])
def test_only_a_person_with_a_reason_goes_forward(by):
    with pytest.raises(RolloutError, match="who decides"):
        forward(at(OFF), SHADOW, by=by, reason="x", now=0.0)
    with pytest.raises(RolloutError, match="why"):
        forward(at(OFF), SHADOW, by="ada", reason=" ", now=0.0)


@pytest.mark.parametrize("to", [OFF, SHADOW])
@pytest.mark.parametrize("before", [SHADOW, PERCENT, FULL])
def test_going_back_by_itself_always_goes_back_and_says_why(before, to):
    after = roll_back(at(before), RollbackCause.MISSES, reason="7 %", now=9.0, to=to)
    assert after.stage is (OFF if before is SHADOW else to)
    assert (after.rolled_back, after.rollbacks, after.percent) == (True, 1, 0.0)
    last = after.history[-1]
    assert (last.by, last.cause, last.reason) == (AUTOMATIC, RollbackCause.MISSES, "7 %")


def test_a_rollback_is_held_until_a_person_goes_forward():
    state = roll_back(at(FULL), RollbackCause.MISMATCH, reason="x", now=0.0, to=SHADOW)
    assert roll_back(at(OFF), RollbackCause.MISMATCH, reason="x", now=0.0, to=OFF) == at(OFF)
    state = back(state, OFF, **WHO)
    assert state.rolled_back
    state = forward(state, SHADOW, **WHO)
    assert not state.rolled_back
    assert state.rollbacks == 1


def test_history_is_bounded_and_keeps_the_last():
    state = at(SHADOW)
    for number in range(LONGEST_HISTORY):
        state = forward(state, PERCENT, percent=number + 1.0, **WHO)
    state = forward(state, FULL, by="grace", reason="last", now=6.0)
    assert len(state.history) == LONGEST_HISTORY
    assert (state.history[-1].by, state.history[0].percent) == ("grace", 2.0)
    assert state.revision == LONGEST_HISTORY + 1
    assert len(json.dumps(state.to_json())) < 10_000


def test_a_state_comes_back_from_json():
    state = forward(at(SHADOW), PERCENT, percent=2.5, **WHO)
    state = roll_back(state, RollbackCause.FIRST_TOKEN, reason="slow", now=7.5, to=OFF)
    assert RolloutState.from_json(json.loads(json.dumps(state.to_json()))) == state


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("version", 2, "version is 2"),
        ("stage", "most", "stage is 'most'"),
        ("percent", "5", "percent is '5'"),
        ("percent", float("inf"), "percent is inf"),
        ("percent", 50.0, "has no percentage of 50"),
        ("revision", True, "revision is True"),
        ("rolled_back", 1, "rolled_back is 1"),
        ("history", {}, "history is {}"),
        ("history", [3], "no change"),
    ],
)
def test_what_is_no_state_is_refused_by_its_field(field, value, says):
    whole = forward(at(OFF), SHADOW, **WHO).to_json()
    with pytest.raises(RolloutError, match=says):
        RolloutState.from_json(whole | {field: value})
    with pytest.raises(RolloutError, match="no JSON object"):
        RolloutState.from_json([whole])


def test_states_are_values():
    with pytest.raises(dataclasses.FrozenInstanceError):
        at(OFF).stage = FULL
