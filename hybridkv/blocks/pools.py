"""Places of each tier: how many there are, which are free, and who was promised some.

    capacity = used + reserved + available

A reservation is a promise of places that nobody can take away; it is made at once and in full or
not at all. Places of a reservation become used one ``take`` at a time, and whoever made it cancels
it once at the end, which gives back what was not taken.
"""

import dataclasses

import numpy as np
from jaxtyping import Int32

from hybridkv.blocks.entries import Form, Tier
from hybridkv.errors import UserError


class NoRoom(RuntimeError):  # noqa: N818 - a condition to wait out, not a fault
    """A reservation does not fit now; the caller waits and asks again."""

    def __init__(self, *, tier: Tier, form: Form, needed: int, free: int, evictable: int) -> None:
        self.tier, self.form = tier, form
        self.needed, self.free, self.evictable = needed, free, evictable
        super().__init__(
            f"{needed} {_plural(form)} do not fit {tier.name} now: {free} free, {evictable} can go"
        )


class NeverFits(UserError):  # noqa: N818 - reads as what happened
    """A reservation is larger than its pool: waiting would not help."""

    def __init__(self, *, tier: Tier, form: Form, needed: int, capacity: int) -> None:
        self.tier, self.form, self.needed, self.capacity = tier, form, needed, capacity
        super().__init__(
            f"{needed} {_plural(form)} never fit {tier.name}, which has {capacity}: "
            f"ask for less or make the pool larger"
        )


class ReservationError(RuntimeError):
    """A reservation is used beyond what it holds, or after it was cancelled."""


def _plural(form: Form) -> str:
    return f"{form.name.lower()}s"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolSizes:
    """Places of one tier."""

    blocks: int
    """Costs ``geometry.block_bytes`` each."""
    snapshots: int
    """Costs ``sum(hybridkv.state.snapshot.snapshot_bytes(geometry).values())`` bytes each."""

    def __post_init__(self) -> None:
        if min(self.blocks, self.snapshots) < 0:
            raise UserError(f"a pool can't have fewer than 0 places, got {self}")


class FreeList:
    """A stack of free numbers of ``0 ... size - 1``; fresh ones come out ascending."""

    def __init__(self, size: int) -> None:
        self._stack = np.arange(size - 1, -1, -1, dtype=np.int32)
        self._count = size

    def __len__(self) -> int:
        return self._count

    @property
    def size(self) -> int:
        """Numbers that are free or not."""
        return self._stack.shape[0]

    @property
    def free(self) -> Int32[np.ndarray, " free"]:
        """The free numbers; a view, the next to come out last."""
        return self._stack[: self._count]

    def pop(self, count: int) -> Int32[np.ndarray, " count"]:
        """Takes ``count`` numbers; the caller knows that there are so many."""
        assert 0 <= count <= self._count, f"{count} of {self._count} free"
        rest = self._count - count
        taken = self._stack[rest : self._count][::-1].copy()
        self._count = rest
        return taken

    def push(self, numbers: Int32[np.ndarray, " count"]) -> None:
        """Gives numbers back; the caller knows that they are not free."""
        count = self._count + numbers.shape[0]
        assert count <= self.size, f"{count} free of {self.size}"
        self._stack[self._count : count] = numbers[::-1]
        self._count = count


class Pool:
    """Places of one form on one tier."""

    def __init__(self, capacity: int) -> None:
        self.places = FreeList(capacity)
        self.reserved = 0
        """Places promised and not taken yet."""

    @property
    def capacity(self) -> int:
        """All places."""
        return self.places.size

    @property
    def used(self) -> int:
        """Places that entries have."""
        return self.capacity - len(self.places)

    @property
    def available(self) -> int:
        """Places that are neither used nor promised."""
        return len(self.places) - self.reserved

    def take(self, count: int) -> Int32[np.ndarray, " count"]:
        """Turns promised places into used ones."""
        assert count <= self.reserved, f"{count} taken of {self.reserved} reserved"
        self.reserved -= count
        return self.places.pop(count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reservation:
    """A promise of places; what is left of it, the allocator knows."""

    serial: int
    tier: Tier
    blocks: int
    """Places for blocks when it was made."""
    snapshots: int
    """Places for snapshots when it was made."""


class Reservations:
    """The open reservations and what is left of each."""

    def __init__(self) -> None:
        self.left: dict[int, dict[Form, int]] = {}
        """By serial."""
        self.tiers: dict[int, Tier] = {}
        """By serial."""
        self._next = 0

    def open(self, tier: Tier, wanted: dict[Form, int]) -> Reservation:
        """A new reservation; the pools have counted it."""
        serial, self._next = self._next, self._next + 1
        self.left[serial] = dict(wanted)
        self.tiers[serial] = tier
        return Reservation(
            serial=serial,
            tier=tier,
            blocks=wanted[Form.BLOCK],
            snapshots=wanted[Form.SNAPSHOT],
        )

    def remaining(self, reservation: Reservation) -> dict[Form, int]:
        """What is left, by form.

        Raises:
          ReservationError: it was cancelled.
        """
        left = self.left.get(reservation.serial)
        if left is None:
            raise ReservationError(f"reservation {reservation.serial} was cancelled before")
        return dict(left)

    def spend(self, reservation: Reservation, wanted: dict[Form, int]) -> None:
        """Takes from what is left, all forms or none.

        Raises:
          ReservationError: it was cancelled, or less is left.
        """
        left = self.remaining(reservation)
        for form, count in wanted.items():
            if not 0 <= count <= left[form]:
                raise ReservationError(
                    f"reservation {reservation.serial} has {left[form]} {_plural(form)} left, "
                    f"not {count}: reserve all that a request needs at once"
                )
        self.left[reservation.serial] = {f: n - wanted.get(f, 0) for f, n in left.items()}

    def close(self, reservation: Reservation) -> dict[Form, int]:
        """Ends it and returns what was left.

        Raises:
          ReservationError: it was cancelled before.
        """
        left = self.remaining(reservation)
        del self.left[reservation.serial], self.tiers[reservation.serial]
        return left

    def clear(self) -> None:
        """Ends all."""
        self.left.clear()
        self.tiers.clear()
