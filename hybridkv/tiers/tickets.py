"""How far something that a request waits for is."""

import enum
from typing import Protocol

from hybridkv.blocks.leases import Receipt
from hybridkv.blocks.pools import Reservation
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.plan import Miss, Plan


class RestoreState(enum.Enum):
    """How far a restore is."""

    PENDING = "pending"
    READY = "ready"
    FAILED = "failed"


class RestoreTicket(Protocol):
    """One restore on its way."""

    def state(self) -> RestoreState:
        """Where it stands now; called once a turn, and must not block."""
        ...

    def cancel(self) -> None:
        """Ends it: once this returns, nothing of it writes to the cache any more."""
        ...


class Held(Protocol):
    """What a request holds while it waits: its plan, leases on what it names, and room for it."""

    @property
    def chain(self) -> TokenChain:
        """The prompt."""
        ...

    @property
    def plan(self) -> Plan | Miss:
        """What is to be brought is in ``Plan.loads``."""
        ...

    @property
    def reservation(self) -> Reservation:
        """Of the device: has room for what is to be brought."""
        ...

    @property
    def shared(self) -> Receipt:
        """Of the plan's blocks."""
        ...
