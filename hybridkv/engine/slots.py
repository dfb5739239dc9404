"""The slots of a runner: which are free, and which sequence has each of the others."""

from collections.abc import Callable

from hybridkv.engine.sequence import NoSlot, Sequence
from hybridkv.errors import UserError


class Slots:
    """All free at first; the one that was given back last is taken first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = list(range(count))[::-1]
        """Taken from its end."""
        self._running: dict[int, Sequence] = {}

    def require_free(self) -> None:
        """Raises NoSlot where no slot is free."""
        if not self.free:
            raise NoSlot(f"all {self.count} slots are taken")

    def take(self, sequence_of: Callable[[int], Sequence]) -> Sequence:
        """Gives a free slot to what ``sequence_of`` makes for it.

        Raises:
          NoSlot: no slot is free.
        """
        self.require_free()
        sequence = sequence_of(self.free[-1])
        self.free.pop()
        self._running[sequence.slot] = sequence
        return sequence

    def give_back(self, sequence: Sequence) -> None:
        """Frees a sequence's slot; it is finished."""
        sequence.finished = True
        del self._running[sequence.slot]
        self.free.append(sequence.slot)

    def require_running(self, sequence: Sequence) -> None:
        """Raises UserError where a sequence has no slot any more."""
        if sequence.finished or self._running.get(sequence.slot) is not sequence:
            raise UserError("this sequence is finished: start a new one")
