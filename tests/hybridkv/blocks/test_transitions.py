import itertools

import numpy as np
import pytest

from hybridkv.blocks.transitions import TABLE, Event, TierState, TransitionError, advance

ALL = list(itertools.product(TierState, Event))


def test_a_life_goes_from_absent_over_present_back_to_absent():
    states = np.zeros(3, np.uint8)
    seen = []
    for event in (Event.FILL, Event.COMMIT, Event.DRAIN, Event.FREE):
        states = advance(states, event)
        seen.append(int(states[0]))
        assert states.dtype == np.uint8
        assert len(set(states.tolist())) == 1
    assert seen == [1, 2, 3, 0]


def test_a_copy_that_fails_drains():
    filling = np.asarray([TierState.FILLING], np.uint8)
    assert advance(filling, Event.ABORT).tolist() == [TierState.DRAINING]


def test_the_table_has_five_events_that_may_happen():
    assert len(TABLE) == 5
    assert {event for _, event in TABLE} == set(Event)


@pytest.mark.parametrize(("state", "event"), [pair for pair in ALL if pair not in TABLE])
def test_every_other_event_is_refused_by_name(state, event):
    with pytest.raises(TransitionError, match=rf"{state.name} has no event {event.name}"):
        advance(np.asarray([state], np.uint8), event)


def test_one_wrong_state_refuses_all_and_leaves_the_input():
    states = np.asarray([TierState.ABSENT, TierState.PRESENT, TierState.ABSENT], np.uint8)
    with pytest.raises(TransitionError, match="PRESENT has no event FILL"):
        advance(states, Event.FILL)
    assert states.tolist() == [0, 2, 0]


def test_a_byte_that_is_no_state_is_refused():
    with pytest.raises(TransitionError, match="state 77 has no event FREE"):
        advance(np.asarray([77], np.uint8), Event.FREE)


def test_nothing_is_fine():
    assert advance(np.zeros(0, np.uint8), Event.FREE).shape == (0,)


def test_the_table_is_read_only():
    with pytest.raises(TypeError):
        TABLE[TierState.ABSENT, Event.FREE] = TierState.ABSENT
