"""The disk tier: which places of the allocator stand for what in a store, and who finds it again.

    store (manifests) --adopt--> entries PRESENT on DISK, published     at the start, and on refresh
    entries freed on DISK --dropped--> to_remove --writer's worker--> store.remove

A place says nothing by itself: blocks and snapshots are found in the store by the digest of the
tokens they end at. Belongs to the thread of the allocator; the store itself may be read by any.
"""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import NONE, Form, Tier, kind_bits
from hybridkv.blocks.transitions import TierState
from hybridkv.geometry import Geometry
from hybridkv.kinds import Kind
from hybridkv.prefixes.directory import Directory
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds
from hybridkv.tiers.store import Store
from hybridkv.tiers.store.records import Extension, StoredExtension, StoreWriteError

MOST_UNREAD = 3
"""Reads of one entry that may fail until its bytes leave the store, though they may be whole."""


@dataclasses.dataclass(kw_only=True)
class Removals:
    """What nobody keeps any more, by the digest of the tokens that it ends at or stands on."""

    blocks: list[bytes] = dataclasses.field(default_factory=list)
    snapshots: list[bytes] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.blocks or self.snapshots)

    def apply(self, store: Store, *, compact_share: float | None) -> StoreWriteError | None:
        """Removes them, then compacts the store if so much of it is dead. On the writer's thread.

        Args:
          store: which they are in.
          compact_share: beyond which share of dead bytes it is compacted; None for not now.

        Returns:
          Why it could not be compacted: what was to be removed is gone all the same.

        Raises:
          StoreWriteError: a file could not be changed; may be tried again.
        """
        blocks = [place for x in self.blocks if (place := store.find(x)) is not None]
        snapshots = [id_ for x in self.snapshots if (id_ := store.find_snapshot(x)) is not None]
        store.remove(blocks, snapshots, with_children=True)
        if compact_share is None or store.dead_bytes <= compact_share * store.bytes_used:
            return None
        try:
            store.compact()
        except StoreWriteError as error:
            return error
        return None


class DiskTier:
    """The bookkeeping of one store."""

    def __init__(
        self, store: Store, allocator: Allocator, directory: Directory, geometry: Geometry
    ) -> None:
        """Registers itself at ``allocator.on_freed``."""
        self.store = store
        self._allocator, self._directory = allocator, directory
        self._kinds = {
            Form.BLOCK: kind_bits(block_kinds(geometry)),
            Form.SNAPSHOT: kind_bits(snapshot_kinds(geometry)),
        }
        self._digests: dict[Form, dict[int, bytes]] = {form: {} for form in Form}
        """What stands at each place."""
        self.to_remove = Removals()
        self._unread: collections.Counter[tuple[Form, bytes]] = collections.Counter()
        """How often what stands at a digest could not be read."""
        self.left_alone = 0
        """Blocks of the store that found no place."""
        allocator.on_freed.append(self._dropped)

    def digest(self, entry: int) -> bytes:
        """Of the tokens up to an entry."""
        return self._directory.entries.digest[entry].tobytes()

    def committed(self, entries: Int32[np.ndarray, " n"]) -> None:
        """The bytes of FILLING entries are in the store."""
        columns = self._allocator.entries
        for form in Form:
            some = entries[columns.form[entries] == form]
            if not some.size:
                continue
            self._allocator.commit(some, self._kinds[form], Tier.DISK)
            for entry in some.tolist():
                self._digests[form][int(columns.place[Tier.DISK, entry])] = self.digest(entry)

    def adopt(self, stored: tuple[StoredExtension, ...]) -> int:
        """Publishes what is in the store; parents come first. Returns the blocks that are new.

        Where the directory has a block already, the store's is one more copy of it.
        """
        return sum(self._adopt(each) for each in stored)

    def vanished(self, stored: tuple[StoredExtension, ...]) -> None:
        """Another process removed these; what is still there of them is adopted again later."""
        digests = [d for each in stored for d in each.extension.digests]
        digests = [d for d in digests if self.store.find(d.tobytes()) is None]
        ids = self._entries_of(digests)
        under = [at.digest for each in stored for at in each.extension.snapshots]
        under = [d for d in under if self.store.find_snapshot(d) is None]
        snapshots = self._directory.snapshot_at(
            self._entries_of([np.frombuffer(d, np.uint8) for d in under])
        )
        self.lost(np.concatenate([ids, snapshots[snapshots != NONE]]))

    def _entries_of(self, digests: Sequence[np.ndarray]) -> Int32[np.ndarray, " n"]:
        """Published blocks under some digests; those that are not are left out."""
        if not digests:
            return np.empty(0, np.int32)
        ids = self._directory.entry_of(np.stack(digests))
        return ids[ids != NONE]

    def lost(self, entries: Int32[np.ndarray, " n"]) -> None:
        """The store's copies can't be used: forgets them, and what stands on nothing else."""
        columns = self._allocator.entries
        there = entries[columns.state[Tier.DISK, entries] == TierState.PRESENT]
        spoil(self._allocator, self._directory, there, Tier.DISK)

    def keep(self, entries: Int32[np.ndarray, " n"]) -> None:
        """These could not be read: whatever becomes of them and of what stands on them, the store
        keeps the bytes, so that a later start finds them again, or whoever stores the same tokens.

        Not after ``MOST_UNREAD`` times: what never can be read leaves the store, and is written
        anew by whoever computes it.
        """
        columns, often = self._allocator.entries, []
        for entry in entries.tolist():
            key = Form(columns.form[entry]), self.digest(entry)
            self._unread[key] += 1
            if self._unread[key] >= MOST_UNREAD:
                del self._unread[key]
                often.append(entry)
        above = self._directory.above
        for entry in np.setdiff1d(above(entries), above(np.asarray(often, np.int32))).tolist():
            form, place = Form(columns.form[entry]), int(columns.place[Tier.DISK, entry])
            self._digests[form].pop(place, None)

    def _adopt(self, stored: StoredExtension) -> int:
        extension = stored.extension
        ids = self._directory.entry_of(extension.digests)
        known = int((ids != NONE).sum())
        new = self._adopt_blocks(extension, known) if known < len(ids) else 0
        self._copies(ids[:known])
        for at in extension.snapshots:
            self._adopt_snapshot(np.frombuffer(at.digest, np.uint8))
        return new

    def _adopt_blocks(self, extension: Extension, known: int) -> int:
        """Blocks from ``known`` on, as many as there are places."""
        first = extension.first + known
        digests, tokens = extension.digests, extension.tokens
        wanted = len(digests) - known
        count = min(wanted, self._allocator.available(Form.BLOCK, Tier.DISK))
        self.left_alone += wanted - count
        previous = digests[known - 1].tobytes() if known else extension.parent
        if first:
            parent = self._directory.entry_of(np.frombuffer(previous, np.uint8)[None])[0]
            count = count if parent != NONE else 0
        if not count:
            return 0
        size = self._directory.block_tokens
        reservation = self._allocator.reserve(blocks=count, tier=Tier.DISK)
        receipt = self._allocator.take(reservation, Form.BLOCK, count)
        self._allocator.cancel(reservation)
        entries = receipt.entries
        self._allocator.entries.digest[entries] = digests[known : known + count]
        self.committed(entries)
        part = tokens[known * size : (known + count) * size]
        self._directory.adopt(previous, first, part, entries)
        self._allocator.release(receipt)
        return count

    def _adopt_snapshot(self, digest: np.ndarray) -> None:
        block = int(self._directory.entry_of(digest[None])[0])
        if block == NONE:
            return
        columns = self._allocator.entries
        standing = int(columns.snapshot[block])
        if standing != NONE:
            self._copies(np.array([standing], np.int32))
            return
        if not self._allocator.available(Form.SNAPSHOT, Tier.DISK):
            return
        reservation = self._allocator.reserve(snapshots=1, tier=Tier.DISK)
        receipt = self._allocator.take(reservation, Form.SNAPSHOT, 1)
        self._allocator.cancel(reservation)
        columns.digest[receipt.entries] = digest
        self.committed(receipt.entries)
        self._directory.adopt_snapshot(block, int(receipt.entries[0]))
        self._allocator.release(receipt)

    def _copies(self, ids: Int32[np.ndarray, " n"]) -> None:
        """One more copy of entries that are published already."""
        columns = self._allocator.entries
        ids = ids[columns.state[Tier.DISK, ids] == TierState.ABSENT]
        for form in Form:
            some = ids[columns.form[ids] == form]
            some = some[: self._allocator.available(form, Tier.DISK)]
            if not some.size:
                continue
            counts = {"blocks": some.size} if form == Form.BLOCK else {"snapshots": some.size}
            reservation = self._allocator.reserve(tier=Tier.DISK, **counts)
            receipt = self._allocator.fill(reservation, some)
            self._allocator.cancel(reservation)
            self.committed(some)
            self._allocator.release(receipt)

    def _dropped(self, tier: Tier, form: Form, places: Int32[np.ndarray, " n"]) -> None:
        """The allocator freed places; what stood there may leave the store."""
        if tier != Tier.DISK:
            return
        for place in places.tolist():
            digest = self._digests[form].pop(place, None)
            if digest is None or not self.store.writable:
                continue
            removals = self.to_remove
            (removals.blocks if form == Form.BLOCK else removals.snapshots).append(digest)


def spoil(
    allocator: Allocator,
    directory: Directory,
    entries: Int32[np.ndarray, " n"],
    tier: Tier,
    kind: Kind | None = None,
) -> None:
    """One tier's copies of entries can't be used: they go, and with them what has no other.

    ``kind`` is to blame, or the tier's own where it is not known.
    """
    columns = allocator.entries
    entries = np.unique(entries)
    copies = (columns.state[:, entries] == TierState.PRESENT).sum(axis=0)
    others = entries[copies > 1]
    if others.size:
        allocator.drain(others, tier)
    alone = entries[(copies == 1) & columns.published[entries]]
    if alone.size:
        directory.withdraw(directory.above(alone), f"evicted:{(kind or tier_kind(tier)).value}")


def tier_kind(tier: Tier) -> Kind:
    """The kind to blame for what a tier lost."""
    return Kind.DISK_PREFIX if tier == Tier.DISK else Kind.COMPRESSED
