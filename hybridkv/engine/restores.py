r"""What an engine asks of whoever brings prefixes from other tiers.

    hold --begin--> ticket --state: PENDING ... READY | FAILED--> plan again with what is there
                       \--cancel: the request ended, or its deadline passed

While a ticket is pending its request keeps its room and has no slot, so the batch goes on. What
was loaded is published like everything else; the plan that follows finds it, or finds less.
"""

from typing import Protocol

from hybridkv.engine.sequence import Hold
from hybridkv.tiers.tickets import RestoreState, RestoreTicket

__all__ = ["RestoreState", "RestoreTicket", "Restores"]


class Restores(Protocol):
    """Loads what a plan could use. Called on the thread that owns the cache."""

    def begin(self, hold: Hold) -> RestoreTicket | None:
        """Starts to load what would make the hold's plan longer; None where nothing would."""
        ...
