r"""The allocator: every change of an entry, on every tier, is one of its methods.

    reserve --> take --> (write bytes) --> commit --> attach --> lease ... release --> evicted
                  \                          \-- released unpublished: freed at once
                   \-- abort: freed when the last lease is given back

Ownership: one thread, the one that owns the device cache, calls the allocator; nothing here locks.
A call either happens as a whole or raises and changes nothing. The columns in ``entries`` are the
allocator's; the directory writes ``digest``, ``fingerprint`` and ``position`` of entries that it
publishes, whoever counts the indexer's picks writes ``picks``, and nobody writes anything else.

What holds after every call is in ``invariants.py``.
"""

from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Bool, Int32, Integer

from hybridkv.blocks import eviction, publication
from hybridkv.blocks.entries import FORM_BITS, NONE, Entries, EntryError, Form, Tier
from hybridkv.blocks.eviction import EvictionPolicy
from hybridkv.blocks.invariants import Topology, check
from hybridkv.blocks.leases import (
    Leases,
    Receipt,
    ReleasedAfterEviction,
    StaleEntry,
    StaleReceipt,
)
from hybridkv.blocks.pools import (
    FreeList,
    NeverFits,
    NoRoom,
    Pool,
    PoolSizes,
    Reservation,
    Reservations,
)
from hybridkv.blocks.transitions import Event, TierState, advance
from hybridkv.errors import UserError

Ids = Integer[np.ndarray, " n"]
OnEvict = Callable[[Int32[np.ndarray, " n"], Tier, str], None]
"""Told which published entries are about to be lost, the tier that gives them up, and the cause.
The entries are still whole and published; the callback must not call the allocator."""

OnFreed = Callable[[Tier, Form, Int32[np.ndarray, " n"]], None]
"""Told of places of a tier whose bytes nobody owns any more: whoever keeps them may drop them. The
callback must not call the allocator."""

OnTouched = Callable[[Int32[np.ndarray, " n"]], None]
"""Told of entries of which something may have changed that others see: whether they are published,
or on which tiers they are PRESENT. The columns are those after the change, or in the middle of it;
the callback must not call the allocator, and looks later, when the call has ended."""

_FORM_BITS = np.asarray([FORM_BITS[form] for form in Form], np.uint8)
_EMPTY = PoolSizes(blocks=0, snapshots=0)


class Allocator:
    """Entries, pools, reservations, leases and evictions of all tiers."""

    def __init__(
        self,
        sizes: Mapping[Tier, PoolSizes],
        *,
        policy: EvictionPolicy | Mapping[Tier, EvictionPolicy],
        clock: Callable[[], float],
        debug: bool = False,
    ) -> None:
        """An empty allocator.

        Args:
          sizes: places of each tier; a tier left out has none. An entry id is any tier's, so there
            are as many ids as places.
          policy: which entry goes first; one for all tiers, or one a tier.
          clock: seconds; never goes back.
          debug: walk all invariants after every call: slow.
        """
        self.pools: dict[Tier, dict[Form, Pool]] = {}
        for tier in Tier:
            size = sizes.get(tier, _EMPTY)
            self.pools[tier] = {
                Form.BLOCK: Pool(size.blocks),
                Form.SNAPSHOT: Pool(size.snapshots),
            }
        places = sum(pool.capacity for forms in self.pools.values() for pool in forms.values())
        self.entries = Entries(places)
        self.ids = FreeList(places)
        self.reservations = Reservations()
        self.leases = Leases()
        self.on_evict: list[OnEvict] = []
        self.on_freed: list[OnFreed] = []
        self.on_touched: list[OnTouched] = []
        self.topology = Topology.of(self.entries)
        self._tiers = [t for t in Tier if any(p.capacity for p in self.pools[t].values())]
        self._rank = np.zeros(places, np.int32)
        """Scratch: where in the current call an id stands; of no meaning for other ids."""
        self._policies: dict[Tier, EvictionPolicy] = (
            dict(policy) if isinstance(policy, Mapping) else dict.fromkeys(Tier, policy)
        )
        self._clock, self._debug = clock, debug
        self._floor = np.zeros(len(Form), np.float64)
        """What the last entry of each form that was evicted from the device was worth."""

    # Room.

    def reserve(
        self, *, blocks: int = 0, snapshots: int = 0, tier: Tier = Tier.DEVICE
    ) -> Reservation:
        """Promises places on a tier, all or none, evicting what it must if that suffices.

        Raises:
          NoRoom: not now; nothing was evicted.
          NeverFits: more than the pool has.
          UserError: a negative count.
        """
        wanted = _counts(blocks, snapshots)
        pools = self.pools[tier]
        for form, count in wanted.items():
            if count > pools[form].capacity:
                raise NeverFits(tier=tier, form=form, needed=count, capacity=pools[form].capacity)
        missing = {form: max(0, n - pools[form].available) for form, n in wanted.items()}
        if any(missing.values()):
            self._make_room(tier, wanted, missing)
        for form, count in wanted.items():
            pools[form].reserved += count
        reservation = self.reservations.open(tier, wanted)
        self._changed()
        return reservation

    def cancel(self, reservation: Reservation) -> None:
        """Ends a reservation, once: places that were not taken are free again.

        Raises:
          ReservationError: it was cancelled before.
        """
        for form, count in self.reservations.close(reservation).items():
            self.pools[reservation.tier][form].reserved -= count
        self._changed()

    def evict(self, *, blocks: int = 0, snapshots: int = 0, tier: Tier = Tier.DEVICE) -> None:
        """Makes a tier give up so many published entries, as ``reserve`` does when it must.

        Raises:
          NoRoom: fewer can go; nothing was evicted.
          UserError: a negative count.
        """
        wanted = _counts(blocks, snapshots)
        self._make_room(tier, wanted, wanted)
        self._changed()

    def evictable(self, form: Form, tier: Tier = Tier.DEVICE) -> int:
        """Entries that the tier could give up now; walks all entries."""
        return int(np.count_nonzero(self._can_go(form, tier)))

    def available(self, form: Form, tier: Tier = Tier.DEVICE) -> int:
        """Places that are neither used nor promised."""
        return self.pools[tier][form].available

    # From places to whole entries.

    def take(self, reservation: Reservation, form: Form, count: int) -> Receipt:
        """Makes ``count`` new entries on the reservation's tier: FILLING, leased once.

        Raises:
          ReservationError: fewer places of the form are left in it, or it was cancelled.
        """
        self.reservations.spend(reservation, {form: count})
        tier, entries = reservation.tier, self.entries
        ids = self.ids.pop(count)
        entries.form[ids] = form
        self._fill(tier, form, ids)
        entries.generation[ids] += 1
        entries.kinds[ids] = 0
        entries.leases[ids] = 1
        entries.position[ids] = 0
        entries.used[ids] = self._clock()
        entries.hits[ids] = 0
        entries.picks[ids] = 0
        entries.floor[ids] = self._floor[form]
        receipt = self.leases.issue(ids, entries.generation[ids])
        self._changed()
        return receipt

    def fill(self, reservation: Reservation, entries: Ids) -> Receipt:
        """Gives entries that are whole on some tier a place on the reservation's tier: FILLING.

        The receipt holds the entries, source and target, until the copy is committed or aborted.

        Raises:
          ReservationError: fewer places of their forms are left in it, or it was cancelled.
          EntryError: one is whole nowhere.
          TransitionError: one has a place on that tier already.
        """
        ids, tier, columns = self._distinct(entries), reservation.tier, self.entries
        advance(columns.state[tier, ids], Event.FILL)
        self._require(self._whole(ids), ids, "is whole on no tier")
        forms = columns.form[ids]
        parts = {form: ids[forms == form] for form in Form}
        self.reservations.spend(reservation, {form: part.size for form, part in parts.items()})
        for form, part in parts.items():
            self._fill(tier, form, part)
        columns.leases[ids] += 1
        receipt = self.leases.issue(ids, columns.generation[ids])
        self._changed()
        return receipt

    def commit(self, entries: Ids, kinds: int, tier: Tier = Tier.DEVICE) -> None:
        """The bytes of FILLING entries are whole: PRESENT, holding ``kinds`` (see ``kind_bits``).

        Raises:
          TransitionError: one is not FILLING on the tier.
          EntryError: ``kinds`` is none, or not of the entry's form, or not what another tier has.
        """
        ids, columns = self._distinct(entries), self.entries
        after = advance(columns.state[tier, ids], Event.COMMIT)
        of_form = (kinds & ~_FORM_BITS[columns.form[ids]].astype(np.int32)) == 0
        self._require(of_form & (kinds > 0), ids, f"can't hold kinds {kinds:#x}")
        known = columns.kinds[ids]
        self._require((known == 0) | (known == kinds), ids, f"has other kinds than {kinds:#x}")
        columns.state[tier, ids] = after
        columns.kinds[ids] = kinds
        self._touched(ids)
        self._changed()

    def abort(self, entries: Ids, tier: Tier = Tier.DEVICE) -> None:
        """The bytes of FILLING entries will not come: DRAINING, and freed with the last lease.

        Raises:
          TransitionError: one is not FILLING on the tier.
        """
        ids = self._distinct(entries)
        self.entries.state[tier, ids] = advance(self.entries.state[tier, ids], Event.ABORT)
        self._settle(ids)
        self._changed()

    def drain(self, entries: Ids, tier: Tier) -> None:
        """Gives up one tier's copy of entries that are whole on another, when no lease is left.

        Raises:
          TransitionError: one is not PRESENT on the tier.
          EntryError: one has no other whole copy: evict it or give its leases back.
        """
        ids = self._distinct(entries)
        after = advance(self.entries.state[tier, ids], Event.DRAIN)
        copies = (self.entries.state[:, ids] == TierState.PRESENT).sum(axis=0)
        self._require(copies > 1, ids, f"is whole on {tier.name} only")
        self.entries.state[tier, ids] = after
        self._touched(ids)
        self._settle(ids)
        self._changed()

    # Leases.

    def lease(self, entries: Ids, generations: Ids | None = None) -> Receipt:
        """Claims entries until ``release``: they are not moved, reused or freed.

        Args:
          entries: distinct ids.
          generations: what the caller believes the entries to be, uint32.

        Raises:
          StaleEntry: one has another generation; nothing was leased.
          EntryError: one is neither FILLING nor PRESENT anywhere, or stands twice.
        """
        ids, columns = self._distinct(entries), self.entries
        current = columns.generation[ids]
        if generations is not None:
            expected = np.asarray(generations)
            if expected.shape != ids.shape:
                raise EntryError(
                    f"{ids.size} entries need as many generations, not {expected.size}"
                )
            if (expected != current).any():
                stale = int(ids[expected != current][0])
                raise StaleEntry(f"entry {stale} was taken again since it was found")
        states = columns.state[:, ids]
        alive = ((states == TierState.FILLING) | (states == TierState.PRESENT)).any(axis=0)
        self._require(alive, ids, "is neither filling nor whole anywhere")
        columns.leases[ids] += 1
        receipt = self.leases.issue(ids, current)
        self._changed()
        return receipt

    def release(self, receipt: Receipt) -> None:
        """Gives a claim back; what nobody claims any more and is not published is freed.

        Raises:
          DoubleRelease: it was given back before.
          StaleReceipt: one of its entries was taken again since a ``reset``.
          ReleasedAfterEviction: one of its entries is gone since a ``reset``.
          LeaseError: it was not issued here.
        """
        ids, columns = receipt.entries, self.entries
        if self.leases.lost.pop(receipt.serial, None) is None:
            self.leases.require_open(receipt)
        if (columns.generation[ids] != receipt.generations).any():
            raise StaleReceipt(f"receipt {receipt.serial} has an entry that was taken again since")
        if not columns.state[:, ids].any(axis=0).all():
            raise ReleasedAfterEviction(f"receipt {receipt.serial} has an entry that is gone")
        if receipt.serial not in self.leases.open:
            return  # Void, and without entries.
        self.leases.close(receipt)
        columns.leases[ids] -= 1
        assert not ids.size or columns.leases[ids].min() >= 0, "leases were counted wrong"
        self._settle(ids)
        self._changed()

    def split(self, receipt: Receipt, mask: Bool[np.ndarray, " n"]) -> tuple[Receipt, Receipt]:
        """Two receipts instead of one: of the entries under the mask, and of the others.

        Raises:
          EntryError: the mask is not one bool an entry.
          LeaseError: the receipt is not open.
        """
        parts = self.leases.split(receipt, mask)
        self._changed()
        return parts

    def touch(self, entries: Ids, when: float | None = None) -> None:
        """Counts one use of each entry, now or at ``when`` (seconds of the clock)."""
        ids = self._distinct(entries)
        self.entries.used[ids] = self._clock() if when is None else when
        self.entries.hits[ids] += 1
        self.entries.floor[ids] = self._floor[self.entries.form[ids]]
        self._changed()

    # What the directory shows.

    def attach(self, entries: Ids, parents: Ids) -> None:
        """Publishes blocks, each behind its parent block (-1: a first block).

        Raises:
          EntryError: an entry is not an unpublished block that is PRESENT on a tier; a parent is
            not a published one and does not stand earlier in the same call.
        """
        ids = self._distinct(entries)
        publication.attach(self.entries, ids, _integers(parents), self._ranks)
        self._touched(ids)
        self._changed()

    def attach_snapshot(self, entry: int, block: int) -> None:
        """Publishes a snapshot at the end of a published block.

        Raises:
          EntryError: it is not an unpublished snapshot that is PRESENT on a tier; the block is not
            published, or has a snapshot.
        """
        self.attach_snapshots(np.asarray([entry]), np.asarray([block]))

    def attach_snapshots(self, entries: Ids, blocks: Ids) -> None:
        """Publishes snapshots, each at the end of one of as many published blocks.

        Raises:
          EntryError: as ``attach_snapshot``; none is published.
        """
        ids, under = _integers(entries), _integers(blocks)
        if ids.size != under.size:
            raise EntryError(f"{ids.size} snapshots need as many blocks, not {under.size}")
        self._distinct(np.concatenate([ids, under]))
        publication.attach_snapshots(self.entries, ids, under)
        self._touched(ids)
        self._changed()

    def detach(self, entries: Ids) -> None:
        """Takes entries out of sight; those without a lease are freed.

        Raises:
          EntryError: one is not published, or is a block with a published child or snapshot that
            does not go in the same call.
        """
        ids = self._distinct(entries)
        publication.require_detachable(self.entries, ids, self._ranks)
        publication.detach(self.entries, ids)
        self._touched(ids)
        self._settle(ids)
        self._changed()

    def reset(self) -> None:
        """Forgets every entry and reservation, on all tiers, because the device cache was lost.

        The callbacks hear of every published entry. Open receipts become void: giving one back
        raises ``ReleasedAfterEviction`` or ``StaleReceipt``, once.
        """
        columns = self.entries
        shown = np.flatnonzero(columns.published).astype(np.int32)
        self._announce(shown, Tier.DEVICE)
        publication.detach(columns, shown)
        self._touched(shown)
        self.leases.lose()
        columns.leases[:] = 0
        self._settle(np.flatnonzero(columns.state.any(axis=0)).astype(np.int32))
        self.reservations.clear()
        for forms in self.pools.values():
            for pool in forms.values():
                pool.reserved = 0
        self._changed()

    # Helpers. Callers have checked; these change.

    def _fill(self, tier: Tier, form: Form, ids: Int32[np.ndarray, " n"]) -> None:
        """A promised place on the tier for each entry."""
        state = self.entries.state[tier]
        state[ids] = advance(state[ids], Event.FILL)
        self.entries.place[tier, ids] = self.pools[tier][form].take(ids.size)

    def _settle(self, ids: Int32[np.ndarray, " n"]) -> None:
        """Frees what no lease holds any more: all but the whole copies of published entries."""
        columns = self.entries
        ids = ids[columns.leases[ids] == 0]
        if not ids.size:
            return
        shown = columns.published[ids]
        for tier in self._tiers:
            states = columns.state[tier, ids]
            stays = (states == TierState.ABSENT) | ((states == TierState.PRESENT) & shown)
            self._clear(tier, ids[~stays])
        self.ids.push(ids[~columns.state[:, ids].any(axis=0)])

    def _clear(self, tier: Tier, ids: Int32[np.ndarray, " n"]) -> None:
        """Takes entries that have a place on the tier through the table to ABSENT."""
        if not ids.size:
            return
        state, place = self.entries.state[tier], self.entries.place[tier]
        before = state[ids]
        for old, event in ((TierState.FILLING, Event.ABORT), (TierState.PRESENT, Event.DRAIN)):
            moving = ids[before == old]
            if moving.size:
                state[moving] = advance(state[moving], event)
        state[ids] = advance(state[ids], Event.FREE)
        self._touched(ids)
        places, forms = place[ids], self.entries.form[ids]
        place[ids] = NONE
        for form, pool in self.pools[tier].items():
            freed = places[forms == form]
            pool.places.push(freed)
            for tell in self.on_freed if freed.size else ():
                tell(tier, form, freed)

    def _can_go(self, form: Form, tier: Tier) -> Bool[np.ndarray, " n"]:
        if form == Form.BLOCK:
            return eviction.evictable_blocks(self.entries, tier)
        return eviction.evictable_snapshots(self.entries, tier)

    def _make_room(
        self, tier: Tier, wanted: Mapping[Form, int], missing: Mapping[Form, int]
    ) -> None:
        """Evicts what is missing, or raises ``NoRoom`` before anything has changed."""
        can_go = {form: self._can_go(form, tier) for form, count in missing.items() if count}
        for form, mask in can_go.items():
            evictable = int(np.count_nonzero(mask))
            if evictable < missing[form]:
                free = self.pools[tier][form].available
                raise NoRoom(
                    tier=tier, form=form, needed=wanted[form], free=free, evictable=evictable
                )
        columns, now = self.entries, self._clock()
        blocks = snapshots = np.zeros(0, np.int32)
        if Form.BLOCK in can_go:
            count = missing[Form.BLOCK]
            policy = self._policies[tier]
            blocks = eviction.choose_blocks(columns, can_go[Form.BLOCK], count, policy, now)
            snapshots = columns.snapshot[blocks]
            snapshots = snapshots[snapshots != NONE]
        if Form.SNAPSHOT in can_go:
            can_go[Form.SNAPSHOT][snapshots] = False
            here = np.count_nonzero(columns.state[tier, snapshots] == TierState.PRESENT)
            more = eviction.choose_snapshots(
                columns,
                can_go[Form.SNAPSHOT],
                max(0, missing[Form.SNAPSHOT] - int(here)),
                self._policies[tier],
                now,
            )
            snapshots = np.concatenate([snapshots, more])
        self._give_up(tier, blocks, snapshots)

    def _give_up(
        self, tier: Tier, blocks: Int32[np.ndarray, " b"], snapshots: Int32[np.ndarray, " s"]
    ) -> None:
        """Frees one tier's places of entries; those whole nowhere else are lost.

        A snapshot is lost with its block, even where only the snapshot has another copy.
        """
        columns = self.entries
        if tier == Tier.DEVICE:
            self._raise_floor(Form.BLOCK, blocks)
            self._raise_floor(Form.SNAPSHOT, snapshots)
        chosen = np.concatenate([snapshots, blocks]).astype(np.int32)
        kept = eviction.copied_elsewhere(columns, tier)
        kept[columns.snapshot[blocks[~kept[blocks] & (columns.snapshot[blocks] != NONE)]]] = False
        lost = chosen[~kept[chosen]]
        self._announce(lost, tier)
        publication.detach(columns, lost)
        self._touched(lost)
        self._settle(lost)
        here = chosen[kept[chosen] & (columns.state[tier, chosen] == TierState.PRESENT)]
        self._clear(tier, here)

    def _touched(self, ids: Int32[np.ndarray, " n"]) -> None:
        for tell in self.on_touched if ids.size else ():
            tell(ids)

    def _raise_floor(self, form: Form, ids: Int32[np.ndarray, " n"]) -> None:
        if ids.size:
            policy = self._policies[Tier.DEVICE]
            worth = policy.value(self.entries, ids.astype(np.int32), self._clock())
            self._floor[form] = max(float(self._floor[form]), float(worth.max()))

    def _announce(self, ids: Int32[np.ndarray, " n"], tier: Tier) -> None:
        """Tells the callbacks of published entries that are about to be lost, by form."""
        for form, cause in (
            (Form.SNAPSHOT, eviction.EVICTED_SNAPSHOTS),
            (Form.BLOCK, eviction.EVICTED_BLOCKS),
        ):
            some = ids[self.entries.form[ids] == form]
            for tell in self.on_evict if some.size else ():
                tell(some, tier, cause)

    # Checks. They change nothing but scratch.

    def _distinct(self, entries: Ids) -> Int32[np.ndarray, " n"]:
        """The ids as int32, which must exist and stand once each."""
        ids = _integers(entries)
        if not ids.size:
            return ids
        if ids.min() < 0 or ids.max() >= len(self.entries):
            raise EntryError(f"entries must be in 0..{len(self.entries) - 1}, got {ids}")
        order = np.arange(ids.size, dtype=np.int32)
        self._rank[ids] = order
        if (self._rank[ids] != order).any():
            raise EntryError(f"an entry stands twice in {ids}")
        return ids

    def _ranks(
        self, ids: Int32[np.ndarray, " n"], others: Int32[np.ndarray, " m"]
    ) -> Int32[np.ndarray, " m"]:
        """Where each of ``others`` stands among ``ids``, -1 where it does not."""
        if not ids.size:
            return np.full(others.size, NONE, np.int32)
        self._rank[ids] = np.arange(ids.size, dtype=np.int32)
        at = np.clip(self._rank[others], 0, ids.size - 1)
        return np.where(ids[at] == others, at, NONE).astype(np.int32)

    def _whole(self, ids: Int32[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        return (self.entries.state[:, ids] == TierState.PRESENT).any(axis=0)

    @staticmethod
    def _require(right: Bool[np.ndarray, " n"], ids: Int32[np.ndarray, " n"], wrong: str) -> None:
        if not right.all():
            raise EntryError(f"entry {int(ids[~right][0])} {wrong}")

    def _changed(self) -> None:
        if self._debug:
            check(self)


def _integers(ids: Ids) -> Int32[np.ndarray, " n"]:
    """A copy as one-dimensional int32, whatever integers came."""
    array = np.asarray(ids)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or not array.size):
        raise EntryError(f"entries are a one-dimensional integer array, got {array.dtype}")
    return array.astype(np.int32)


def _counts(blocks: int, snapshots: int) -> dict[Form, int]:
    if min(blocks, snapshots) < 0:
        raise UserError(f"counts can't be negative, got blocks={blocks}, snapshots={snapshots}")
    return {Form.BLOCK: blocks, Form.SNAPSHOT: snapshots}
