"""The life of an entry on one tier: one table that everything goes through.

ABSENT --FILL--> FILLING --COMMIT--> PRESENT --DRAIN--> DRAINING --FREE--> ABSENT
                    +---------------ABORT------------------^
"""

import enum
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from jaxtyping import UInt8


class TierState(enum.IntEnum):
    """What a tier has of an entry."""

    ABSENT = 0
    """Nothing; the entry has no place there."""
    FILLING = 1
    """A place whose bytes are being written."""
    PRESENT = 2
    """All bytes, final."""
    DRAINING = 3
    """A place that is given back as soon as no lease is left."""


class Event(enum.IntEnum):
    """What happens to an entry on a tier."""

    FILL = 0
    COMMIT = 1
    ABORT = 2
    DRAIN = 3
    FREE = 4


TABLE: Mapping[tuple[TierState, Event], TierState] = MappingProxyType(
    {
        (TierState.ABSENT, Event.FILL): TierState.FILLING,
        (TierState.FILLING, Event.COMMIT): TierState.PRESENT,
        (TierState.FILLING, Event.ABORT): TierState.DRAINING,
        (TierState.PRESENT, Event.DRAIN): TierState.DRAINING,
        (TierState.DRAINING, Event.FREE): TierState.ABSENT,
    }
)
"""Every event that may happen, and the state after it."""

_NONE = 255


def _lookup() -> np.ndarray:
    """``TABLE`` as ``[event, byte]``; bytes that are no state have no event either."""
    after = np.full((len(Event), 256), _NONE, np.uint8)
    for (state, event), following in TABLE.items():
        after[event, state] = following
    return after


_AFTER = _lookup()


class TransitionError(RuntimeError):
    """An event that the table does not have in this state."""


def advance(states: UInt8[np.ndarray, " n"], event: Event) -> UInt8[np.ndarray, " n"]:
    """The states after ``event`` happened to each of ``states``; the input is left as it is.

    Raises:
      TransitionError: the table lacks the event for one of the states; names both.
    """
    after = _AFTER[event][states]
    refused = after == _NONE
    if refused.any():
        raise TransitionError(f"{_name(states[refused][0])} has no event {Event(event).name}")
    return after


def _name(state: int) -> str:
    known = {int(member) for member in TierState}
    return TierState(state).name if int(state) in known else f"state {int(state)}"
