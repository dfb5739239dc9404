"""The allocator and the directory for a replay: the same bookkeeping, without asking twice.

A replay is one caller, whose calls are always the same few: ``CheckedAllocator`` names them, made
of the allocator's own. ``TrustedAllocator`` and ``TrustedDirectory`` do them without the checks of
what they are handed, and without the steps between which nobody looks. What decides anything is
inherited: which entries go, what a lease keeps, what is published where, what a match is and who
is to blame. A replay gives the same numbers with either, which its tests hold it to.

One thread owns all of it.
"""

from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Int32

from hybridkv.blocks.allocator import Allocator, Ids
from hybridkv.blocks.entries import NONE, Form, Tier
from hybridkv.blocks.leases import Receipt
from hybridkv.blocks.transitions import TierState
from hybridkv.prefixes.digest_table import _GONE, DigestTable
from hybridkv.prefixes.directory import NOTHING, Directory, Match
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.identity import Identity

_BLOCK, _SNAPSHOT, _PRESENT = Form.BLOCK, Form.SNAPSHOT, TierState.PRESENT
"""Looked up once: in Python 3.11 each look-up of a member is a call."""
_DEVICE = Tier.DEVICE


class CheckedAllocator(Allocator):
    """The allocator with what a replay asks of it, event by event."""

    def make(self, form: Form, count: int, kinds: int) -> Receipt:
        """New whole entries on the device, which may push others out, leased once.

        Raises:
          NoRoom: not now; nothing has changed.
          NeverFits: more than the pool has.
        """
        block = form == _BLOCK
        reservation = self.reserve(blocks=count if block else 0, snapshots=0 if block else count)
        receipt = self.take(reservation, form, count)
        self.cancel(reservation)
        self.commit(receipt.entries, kinds)
        return receipt

    def copy(self, blocks: Ids, snapshots: Ids, tier: Tier, kinds: dict[Form, int]) -> None:
        """Gives a tier copies of entries that are whole on another, which may push others out.

        Raises:
          NoRoom: not now; nothing has changed.
          NeverFits: more than a pool has.
        """
        reservation = self.reserve(blocks=len(blocks), snapshots=len(snapshots), tier=tier)
        receipt = self.fill(reservation, np.concatenate([blocks, snapshots]))
        self.cancel(reservation)
        for form, ids in ((_BLOCK, blocks), (_SNAPSHOT, snapshots)):
            if len(ids):
                self.commit(ids, kinds[form], tier)
        self.release(receipt)


class TrustedAllocator(CheckedAllocator):
    """The same without the checks; ids are int32 and stand once each."""

    def make(self, form: Form, count: int, kinds: int) -> Receipt:
        """See ``CheckedAllocator.make``; here entries are whole as soon as they are taken."""
        pool, columns = self.pools[_DEVICE][form], self.entries
        if count > pool.available:
            block = form == _BLOCK
            self.cancel(self.reserve(blocks=count if block else 0, snapshots=0 if block else count))
        ids = self.ids.pop(count)
        columns.form[ids] = form
        columns.state[_DEVICE, ids] = _PRESENT
        columns.place[_DEVICE, ids] = pool.places.pop(count)
        generations = columns.generation.take(ids) + np.uint32(1)
        columns.generation[ids] = generations
        columns.kinds[ids] = kinds
        columns.leases[ids] = 1
        columns.position[ids] = 0
        columns.used[ids] = self._clock()
        columns.hits[ids] = 0
        columns.picks[ids] = 0
        columns.floor[ids] = self._floor[form]
        return self.leases.issue(ids, generations)

    def copy(self, blocks: Ids, snapshots: Ids, tier: Tier, kinds: dict[Form, int]) -> None:
        """See ``CheckedAllocator.copy``."""
        columns, pools = self.entries, self.pools[tier]
        if len(blocks) > pools[_BLOCK].available or len(snapshots) > pools[_SNAPSHOT].available:
            self.cancel(self.reserve(blocks=len(blocks), snapshots=len(snapshots), tier=tier))
        for form, ids in ((_BLOCK, blocks), (_SNAPSHOT, snapshots)):
            if len(ids):
                columns.place[tier, ids] = pools[form].places.pop(len(ids))
                columns.state[tier, ids] = _PRESENT

    def lease(self, entries: Ids, generations: Ids | None = None) -> Receipt:
        """See ``Allocator.lease``; nothing has happened since the entries were found."""
        self.entries.leases[entries] += 1
        known = self.entries.generation.take(entries) if generations is None else generations
        return self.leases.issue(entries, known)

    def release(self, receipt: Receipt) -> None:
        """See ``Allocator.release``; of what is published nothing is freed."""
        ids, columns = receipt.entries, self.entries
        self.leases.close(receipt)
        columns.leases[ids] -= 1
        hidden = ~columns.published.take(ids)
        if hidden.any():
            self._settle(ids[hidden])

    def _clear(self, tier: Tier, ids: Int32[np.ndarray, " n"]) -> None:
        """See ``Allocator._clear``; all of them have a place there."""
        if not len(ids):
            return
        columns = self.entries
        columns.state[tier, ids] = TierState.ABSENT
        places = columns.place[tier, ids]
        columns.place[tier, ids] = NONE
        snapshots = columns.form.take(ids) == _SNAPSHOT
        if snapshots.any():
            self.pools[tier][_SNAPSHOT].places.push(places[snapshots])
            places = places[~snapshots]
        self.pools[tier][_BLOCK].places.push(places)

    def touch(self, entries: Ids, when: float | None = None) -> None:
        """See ``Allocator.touch``."""
        columns = self.entries
        columns.used[entries] = self._clock() if when is None else when
        columns.hits[entries] += 1
        columns.floor[entries] = self._floor[columns.form.take(entries)]

    def attach(self, entries: Ids, parents: Ids) -> None:
        """See ``Allocator.attach``; blocks of one chain, so that no two have one parent."""
        columns = self.entries
        columns.published[entries] = True
        columns.parent[entries] = parents
        columns.children[parents[parents != NONE]] += 1

    def attach_snapshots(self, entries: Ids, blocks: Ids) -> None:
        """See ``Allocator.attach_snapshots``."""
        columns = self.entries
        columns.published[entries] = True
        columns.parent[entries] = blocks
        columns.snapshot[blocks] = entries


class _TrustedTable(DigestTable):
    """The table without a look whether what is entered or removed is there."""

    def insert(self, ids: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """See ``DigestTable.insert``; a block behind the end of a match is in no table."""
        placed = self._place(ids)
        self._live += int(np.count_nonzero(placed))
        return placed

    def remove(self, ids: Int[np.ndarray, " n"]) -> None:
        """See ``DigestTable.remove``."""
        self._slots[self._slots_of(ids)] = _GONE
        self._live -= ids.size
        self._gone += ids.size
        if self._gone > self._slots.size // 4:
            self._rebuild()


class TrustedDirectory(Directory):
    """The directory without the checks of what is published, and without looking twice.

    The same look-up gives the same match until something is published or lost.
    """

    _changes = 0
    """Counts what was published and lost."""
    _seen: tuple[TokenChain | None, int, int] = (None, 0, 0)
    """The chain that was looked up last, its blocks then, and ``_changes`` then."""

    def __init__(self, allocator: Allocator, identity: Identity, **options: Any) -> None:
        """See ``Directory``."""
        super().__init__(allocator, identity, **options)
        self._table = _TrustedTable(max(1, len(self.entries)), self.entries.digest)

    def register(self, chain: TokenChain, namespace: str = "") -> None:
        """See ``Directory.register``; of a chain that a replay has made of this very identity."""
        self._found[chain] = NOTHING

    def find(self, chain: TokenChain) -> Match:
        """See ``Directory.find``."""
        last, blocks, changes = self._seen
        if last is chain and changes == self._changes:
            match = self._found[chain]
            if len(match.entries) < blocks or chain.blocks == blocks:
                return match
        match = super().find(chain)
        self._seen = (chain, chain.blocks, self._changes)
        return match

    def publish(
        self, chain: TokenChain, first: int, entries: Int[np.ndarray, " n"]
    ) -> Int32[np.ndarray, " n"]:
        """See ``Directory.publish``."""
        before = self.find(chain)
        stands = super().publish(chain, first, entries)
        self._changes += 1
        run = np.concatenate([before.entries[:first], stands])
        if len(run) == chain.blocks and NONE not in stands[-1:]:
            # All of it is there now, as the next look-up would find.
            generations = self.entries.generation.take(run)
            self._found[chain] = Match(
                entries=run, generations=generations, collisions=0, blame=None
            )
            self._seen = (chain, chain.blocks, self._changes)
        return stands

    def _require_whole(
        self, ids: Int32[np.ndarray, " n"], form: Form, *, anywhere: bool = False
    ) -> None:
        """They are: a replay publishes what it has just made."""

    def _forget(self, ids: Int32[np.ndarray, " n"], cause: str) -> None:
        self._changes += 1
        super()._forget(ids, cause)
