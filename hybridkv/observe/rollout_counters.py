"""What a rollout counts, for whoever serves metrics."""

import dataclasses
import enum

from hybridkv.observe.rollout import RollbackCause, RolloutState


class Dropped(enum.Enum):
    """Why a request that was sampled was not compared."""

    BUSY = "busy"
    """As many were run twice already as may be."""
    ROOM = "room"
    """A served request needed the slot or the blocks."""
    LATE = "late"
    """The shadow run took too long."""
    REFUSED = "refused"
    """The other engine does not take it: it is too large for it."""
    CANCELLED = "cancelled"
    """The client gave up, or the request ended early by itself."""
    INEXACT = "inexact"
    """The output says itself that its bits are not those of a cold run."""
    FAULT = "fault"
    """The engine that should have run it beside raised."""
    STAGE = "stage"
    """The stage changed meanwhile."""


@dataclasses.dataclass(kw_only=True)
class RolloutCounters:
    """Totals since the process started; one thread counts, any may read.

    sampled = compared + all dropped + ``running``, at the end of every turn.
    """

    state: RolloutState = dataclasses.field(default_factory=RolloutState)
    """Where the rollout stands now; replaced, never changed."""
    served: dict[str, int] = dataclasses.field(default_factory=dict)
    """Requests by the scheme that began to serve them."""
    faults: dict[str, int] = dataclasses.field(default_factory=dict)
    """Times that an engine raised, by scheme: in a turn, or when it was given a shadow run."""
    restarted: int = 0
    """Requests that a rollback moved to the safe path before they had ended."""
    eligible: int = 0
    """Requests that might have been sampled: those that a fault of the reuse path could meet."""
    sampled: int = 0
    running: int = 0
    """Sampled ones that have not ended."""
    compared: int = 0
    mismatches: int = 0
    """Of those compared."""
    dropped: dict[Dropped, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(Dropped, 0)
    )
    rollbacks: dict[RollbackCause, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(RollbackCause, 0)
    )
    """Times that it went back by itself, in this process."""
    served_turns: int = 0
    """Turns in which an engine that serves computed something."""
    shadow_turns: int = 0
    """Turns that engines which serve nothing got between those."""
    unwritten: int = 0
    """Times that a rollback could not be written to the state file."""

    def copy(self) -> "RolloutCounters":
        """As it is now, for another thread."""
        return dataclasses.replace(
            self,
            served=dict(self.served),
            faults=dict(self.faults),
            dropped=dict(self.dropped),
            rollbacks=dict(self.rollbacks),
        )

    @property
    def coverage(self) -> float:
        """Compared / eligible requests: the share that counts, after drops; 0 without any."""
        return self.compared / self.eligible if self.eligible else 0.0
