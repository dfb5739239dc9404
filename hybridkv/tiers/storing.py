r"""Copies of published prefixes on their way down: device to host, then to disk.

    published(chain) --> for the host --gather (owner)--> worker: pin, digest --> HOST
                             \--> for the disk --> writer: one extension, manifest last --> DISK

In the order of the prefix, so that what a tier has of one is always its beginning; while room is
made for a prefix its own blocks are leased, and its snapshots that are deeper, so that it never
pushes out itself. A prefix is copied to the host once, then written: a host that is too small for
all that waits must not keep them from the disk. What finds no room is left where it is: nothing
here is ever waited for. After a write that failed, prefixes wait for the tier to be tried again;
what is given up is counted. The owner's thread, but for the workers' jobs.
"""

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32, UInt32

from hybridkv.blocks.entries import NONE, EntryError, Form, Tier
from hybridkv.blocks.leases import Receipt
from hybridkv.blocks.pools import NeverFits, NoRoom, PoolSizes
from hybridkv.blocks.transitions import TierState
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.tiers.counters import TierCounters
from hybridkv.tiers.device import DeviceSide
from hybridkv.tiers.disk import DiskTier, Removals, spoil
from hybridkv.tiers.faults import Faults, Point
from hybridkv.tiers.host import DamagedHostBytes, HostTier, HostWords
from hybridkv.tiers.store.records import Extension, SnapshotAt, StoreFullError, StoreWriteError
from hybridkv.tiers.worker import Future, Worker

MOST_BLOCKS = 64
"""Blocks of one extension: how much one commit writes, and holds in host memory."""
_IN_FLIGHT = 2
"""Jobs of each worker that are prepared ahead."""
PAUSE_S = 30.0
"""After a write that failed nothing is written for so long, after a compaction none is begun."""
NO_ENTRIES = np.empty(0, np.int32)


_Prefixes = collections.OrderedDict[int, TokenChain]
"""What waits, by identity of the chain, the next one first."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    """Entries that are FILLING on a tier while a worker has their bytes."""

    receipt: Receipt
    future: Future[Any]
    """Of HostWords on their way to the host, of sizes in bytes on their way to the disk."""
    chain: TokenChain
    """Of the prefix that they are part of."""


class Storing:
    """What waits to be stored, and what is under way."""

    def __init__(
        self,
        device: DeviceSide,
        host: HostTier,
        disk: DiskTier | None,
        *,
        sizes: PoolSizes,
        compact_share: float,
        copier: Worker,
        writer: Worker,
        limit: int,
        counters: TierCounters,
        clock: Callable[[], float],
        faults: Faults,
    ) -> None:
        self._device, self._host, self._disk = device, host, disk
        self._has_host, self._compact_share = sizes.blocks > 0, compact_share
        self._writes = disk is not None and disk.store.writable
        self._copier, self._writer, self._limit = copier, writer, limit
        self._counters, self._clock, self._faults = counters, clock, faults
        self._for_host: _Prefixes = collections.OrderedDict()
        self._for_disk: _Prefixes = collections.OrderedDict()
        self._to_host: collections.deque[_Job] = collections.deque()
        self._to_disk: collections.deque[_Job] = collections.deque()
        self._removing: tuple[Removals, Future[StoreWriteError | None]] | None = None
        self._compact_from = -float("inf")
        self._paused_until = dict.fromkeys(Tier, -float("inf"))

    @property
    def paused(self) -> bool:
        """Whether nothing is stored now because a write has failed."""
        return max(self._paused_until.values()) > self._clock()

    @property
    def whole(self) -> bool:
        """Whether nothing waits, no prefix was ever dropped, and no write has failed lately."""
        waits = self._for_host or self._for_disk
        return not (waits or self._counters.dropped_prefixes or self.paused)

    @property
    def busy(self) -> bool:
        """Whether something is under way, or waits for what is not paused."""
        waits = self._for_host and not self._held(Tier.HOST)
        waits = waits or (self._for_disk and not self._held(Tier.DISK))
        under_way = self._to_host or self._to_disk or self._removing
        return bool(waits or under_way) or self._must_remove

    @property
    def queued(self) -> Mapping[Tier, int]:
        """Prefixes that wait, by the tier they wait for."""
        return {Tier.HOST: len(self._for_host), Tier.DISK: len(self._for_disk)}

    def add(self, chain: TokenChain) -> None:
        """A prefix of the chain was published."""
        self._for_host[id(chain)] = chain
        self._for_host.move_to_end(id(chain))
        self._for_disk.pop(id(chain), None)
        while len(self._for_host) + len(self._for_disk) > self._limit:
            (self._for_disk or self._for_host).popitem(last=False)
            self._counters.dropped_prefixes += 1

    def deepest_first(self) -> None:
        """Orders what waits by how much would have to be computed again."""
        self._for_host, self._for_disk = (
            collections.OrderedDict(sorted(waiting.items(), key=lambda item: -item[1].blocks))
            for waiting in (self._for_host, self._for_disk)
        )

    def turn(self) -> bool:
        """Ends what is done and starts what is next; whether anything moved."""
        moved = self._collect(self._to_host, Tier.HOST, self._kept)
        moved += self._collect(self._to_disk, Tier.DISK, self._written)
        moved += self._removed()
        moved += self._next_to_host()
        moved += self._next_to_disk()
        self._tidy()
        return moved > 0

    def _next_to_host(self) -> bool:
        """Starts one copy to the host; a prefix that needs none waits for the disk from then on."""
        while self._for_host and len(self._to_host) < _IN_FLIGHT and not self._held(Tier.HOST):
            key, chain = self._for_host.popitem(last=False)
            with self._leased(chain) as run:
                if self._may(Tier.HOST) and self._start_host(chain, run):
                    self._for_host[key] = chain
                    self._for_host.move_to_end(key, last=False)
                    return True
            if self._writes:
                self._for_disk[key] = chain
        return False

    def _next_to_disk(self) -> bool:
        """Starts to write one extension: its parent has to be committed before the next one.

        Not while something is removed: what lost its place since then would be found in the store
        by this write, and removed after it.
        """
        while self._for_disk and not self._to_disk and self._removing is None:
            if self._held(Tier.DISK):
                return False
            key, chain = self._for_disk.popitem(last=False)
            with self._leased(chain) as run:
                state = self._device.allocator.entries.state[Tier.HOST, run]
                copied = (state == TierState.FILLING).any()  # soon it is read from there
                started = not copied and self._start_disk(chain, run)
            if copied or started:
                self._for_disk[key] = chain
                self._for_disk.move_to_end(key, last=False)
                return started
        return False

    @contextlib.contextmanager
    def _leased(self, chain: TokenChain) -> Iterator[Int32[np.ndarray, " run"]]:
        """What is published of a chain, which nothing pushes out; an error drops the prefix."""
        run = self._device.directory.find(chain).entries
        held = self._device.allocator.lease(run)
        try:
            yield run
        except BaseException:
            self._counters.dropped_prefixes += 1
            raise
        finally:
            self._device.allocator.release(held)

    def _may(self, tier: Tier) -> bool:
        there = self._has_host if tier == Tier.HOST else self._writes
        return there and not self._pauses(tier)

    def _pauses(self, tier: Tier) -> bool:
        return self._clock() < self._paused_until[tier]

    def _held(self, tier: Tier) -> bool:
        """Whether what waits for a tier waits for the end of its pause.

        Where there is a disk, what waits for the host goes on to it instead.
        """
        return self._pauses(tier) and (tier == Tier.DISK or not self._writes)

    # To the host.

    def _start_host(self, chain: TokenChain, run: Int32[np.ndarray, " n"]) -> bool:
        columns, moved = self._device.allocator.entries, self._device.moved_blocks
        blocks = self._missing(run, Tier.HOST)[:moved]
        if blocks.size and self._copy(chain, blocks, self._gathered(blocks)):
            return True
        standing = self._standing(run)
        snapshots = self._missing(standing, Tier.HOST)[-1:]
        if not snapshots.size:
            return False
        place = int(columns.place[Tier.DEVICE, snapshots[0]])
        deeper = _behind(standing, snapshots)
        return self._copy(chain, snapshots, lambda: [self._device.read_snapshot(place)], deeper)

    def _missing(self, ids: Int32[np.ndarray, " n"], tier: Tier) -> Int32[np.ndarray, " m"]:
        """Those that are whole on the device and nowhere on the tier."""
        state = self._device.allocator.entries.state
        there = state[Tier.DEVICE, ids] == TierState.PRESENT
        return ids[there & (state[tier, ids] == TierState.ABSENT)]

    def _standing(self, run: Int32[np.ndarray, " n"]) -> Int32[np.ndarray, " m"]:
        """Snapshots on a run of blocks."""
        snapshots = self._device.directory.snapshot_at(run)
        return snapshots[snapshots != NONE]

    def _gathered(self, blocks: Int32[np.ndarray, " n"]) -> Callable[[], Sequence[jax.Array]]:
        place = self._device.allocator.entries.place[Tier.DEVICE]
        moved = self._device.moved_blocks

        def gather() -> Sequence[jax.Array]:
            words: list[jax.Array] = []
            for first in range(0, blocks.size, moved):
                part = place[blocks[first : first + moved]]
                padded = np.pad(part, (0, moved - part.size), mode="edge")
                words += self._device.read_blocks(padded)[: part.size]
            return words

        return gather

    def _copy(
        self,
        chain: TokenChain,
        entries: Int32[np.ndarray, " n"],
        gather: Callable[[], Sequence[jax.Array]],
        keep: Int32[np.ndarray, " k"] = NO_ENTRIES,
    ) -> bool:
        receipt = self._fill(entries, Tier.HOST, keep)
        if receipt is None:
            return False
        form = Form(self._device.allocator.entries.form[entries[0]])
        with self._aborted_by_errors(receipt, Tier.HOST):
            words = gather()

        def pin() -> Sequence[HostWords]:
            return [self._pinned(form, each) for each in words]

        future = self._copier.submit(pin)
        self._to_host.append(_Job(receipt=receipt, future=future, chain=chain))
        return True

    def _pinned(self, form: Form, words: jax.Array) -> HostWords:
        """On the copier's thread."""
        held = self._host.pin(form, words)
        reached = self._faults.reach(Point.HOST_STORE, held.words)
        return held if reached is held.words else dataclasses.replace(held, words=reached)

    def _kept(self, job: _Job) -> None:
        """The bytes of a job are in pinned memory."""
        allocator, entries = self._device.allocator, job.receipt.entries
        places, kinds = (
            allocator.entries.place[Tier.HOST, entries],
            allocator.entries.kinds[entries],
        )
        for place, held in zip(places.tolist(), job.future.result(), strict=True):
            self._host.keep(place, held)
            self._counters.stored_bytes[Tier.HOST] += held.words.nbytes
        allocator.commit(entries, int(kinds[0]), Tier.HOST)
        self._counters.stored[Tier.HOST] += len(entries)

    # To the disk.

    def _start_disk(self, chain: TokenChain, run: Int32[np.ndarray, " n"]) -> bool:
        disk = self._disk
        assert disk is not None
        first, blocks, snapshots = self._next_extension(run)
        if not blocks.size and not snapshots.size:
            return False
        receipt, snapshots = self._fill_extension(run, blocks, snapshots)
        if receipt is None:
            return False
        extension = self._extension(chain, first, blocks, snapshots)
        with self._aborted_by_errors(receipt, Tier.DISK):
            words = [self._bytes(entry) for entry in self._in_moves(blocks, snapshots)]
        self._tidy()  # before it, which may need the room
        store, count = disk.store, blocks.size

        def write() -> Sequence[int]:
            self._faults.reach(Point.DISK_STORE, path=store.path)
            arrays = [self._array(each) for part in words for each in part]
            store.commit(extension, arrays[:count], arrays[count:])
            return [each.nbytes for each in arrays]

        future = self._writer.submit(write)
        self._to_disk.append(_Job(receipt=receipt, future=future, chain=chain))
        return True

    def _fill_extension(
        self,
        run: Int32[np.ndarray, " n"],
        blocks: Int32[np.ndarray, " b"],
        snapshots: Int32[np.ndarray, " m"],
    ) -> tuple[Receipt | None, Int32[np.ndarray, " k"]]:
        """Places for blocks and for all snapshots, or the deepest, or none, as there is room."""
        standing = self._standing(run)
        for count in dict.fromkeys((snapshots.size, min(1, snapshots.size), 0)):
            some = snapshots[snapshots.size - count :]
            entries = np.concatenate([blocks, some])
            receipt = self._fill(entries, Tier.DISK, _behind(standing, some))
            if receipt is not None or entries.size == 0:
                return receipt, some
        return None, snapshots

    def _next_extension(
        self, run: Int32[np.ndarray, " n"]
    ) -> tuple[int, Int32[np.ndarray, " n"], Int32[np.ndarray, " m"]]:
        """(number of the first block, blocks, snapshots) that the disk has not: from the first
        missing block on, as far as all are exact and whole above the disk.
        """
        state = self._device.allocator.entries.state
        there = state[Tier.DISK, run] == TierState.PRESENT  # not while a place is given back
        first = run.size if there.all() else int(np.argmin(there))
        room = self._disk_room()
        self._counters.no_room[Tier.DISK] += not room and first < run.size
        blocks = run[first : first + room]
        fit = self._storable(blocks)
        blocks = blocks[: blocks.size if fit.all() else int(np.argmin(fit))]
        snapshots = self._standing(run[: first + blocks.size])
        return first, blocks, snapshots[self._storable(snapshots)]

    def _disk_room(self) -> int:
        """Blocks that one extension may have: a store that is nearly full takes what fits."""
        allocator = self._device.allocator
        room = allocator.available(Form.BLOCK, Tier.DISK)
        if room < MOST_BLOCKS:
            room += allocator.evictable(Form.BLOCK, Tier.DISK)
        return min(room, MOST_BLOCKS)

    def _storable(self, ids: Int32[np.ndarray, " n"]) -> np.ndarray:
        """Exact, whole on the device or the host, and nowhere on disk."""
        state = self._device.allocator.entries.state[:, ids]
        whole = (state[: Tier.DISK] == TierState.PRESENT).any(axis=0)
        return whole & (state[Tier.DISK] == TierState.ABSENT) & self._device.exact(ids)

    def _extension(
        self,
        chain: TokenChain,
        first: int,
        blocks: Int32[np.ndarray, " n"],
        snapshots: Int32[np.ndarray, " m"],
    ) -> Extension:
        size, end = chain.block_tokens, first + blocks.size
        columns = self._device.allocator.entries
        return Extension(
            root=chain.root,
            parent=chain.digests[first - 1].tobytes() if first else chain.root,
            first=first,
            tokens=chain.tokens[first * size : end * size],
            digests=chain.digests[first:end],
            snapshots=tuple(
                SnapshotAt(
                    position=int(columns.position[entry]), digest=columns.digest[entry].tobytes()
                )
                for entry in snapshots.tolist()
            ),
        )

    def _in_moves(
        self, blocks: Int32[np.ndarray, " n"], snapshots: Int32[np.ndarray, " m"]
    ) -> list[Int32[np.ndarray, " k"]]:
        """Neighbours with one source each, at most a move of blocks."""
        state = self._device.allocator.entries.state[Tier.HOST]
        parts: list[list[int]] = []
        for entry in blocks.tolist():
            on_host = state[entry] == TierState.PRESENT
            last = parts[-1] if parts else []
            same = last and len(last) < self._device.moved_blocks
            if same and (state[last[-1]] == TierState.PRESENT) == on_host:
                last.append(entry)
            else:
                parts.append([entry])
        return [np.asarray(part, np.int32) for part in [*parts, *([s] for s in snapshots.tolist())]]

    def _array(self, words: HostWords | jax.Array) -> UInt32[np.ndarray, " words"]:
        """On the writer's thread. What was damaged on the host gets no digest that hides it."""
        if isinstance(words, HostWords):
            self._host.verify(words)
            return np.asarray(words.words)
        return np.asarray(words)

    def _bytes(self, entries: Int32[np.ndarray, " n"]) -> Sequence[HostWords | jax.Array]:
        columns = self._device.allocator.entries
        if (columns.state[Tier.HOST, entries] == TierState.PRESENT).all():
            places = columns.place[Tier.HOST, entries].tolist()
            form = Form(columns.form[entries[0]])
            return [self._host.at(form, place) for place in places]
        if columns.form[entries[0]] == Form.SNAPSHOT:
            return [self._device.read_snapshot(int(columns.place[Tier.DEVICE, entries[0]]))]
        return self._gathered(entries)()

    def _written(self, job: _Job) -> None:
        """A job's extension is committed."""
        assert self._disk is not None
        self._counters.stored_bytes[Tier.DISK] += sum(job.future.result())
        self._disk.committed(job.receipt.entries)
        self._counters.stored[Tier.DISK] += len(job.receipt.entries)

    @property
    def _must_remove(self) -> bool:
        disk = self._disk
        return disk is not None and bool(disk.to_remove) and self._may(Tier.DISK)

    def _tidy(self) -> None:
        """Removes from the store what lost its place, also when nothing is written."""
        disk = self._disk
        if disk is None or self._removing or not self._must_remove:
            return
        removals, disk.to_remove = disk.to_remove, Removals()
        share = self._compact_share if self._clock() >= self._compact_from else None
        future = self._writer.submit(lambda: removals.apply(disk.store, compact_share=share))
        self._removing = removals, future

    def _removed(self) -> int:
        """Ends a removal; one that failed is tried again, with what came since.

        A compaction that failed is not: with the removals of a while later another one begins.
        """
        if self._removing is None or not self._removing[1].done():
            return 0
        assert self._disk is not None
        (removals, future), self._removing = self._removing, None
        error = future.exception()
        if error is not None:
            self._failed(Tier.DISK, error)
            self._disk.to_remove.blocks += removals.blocks
            self._disk.to_remove.snapshots += removals.snapshots
        elif (uncompacted := future.result()) is not None:
            self._counters.note_failed_store(Tier.DISK, uncompacted)
            self._compact_from = self._clock() + PAUSE_S
        return 1

    # Both.

    def _fill(
        self,
        entries: Int32[np.ndarray, " n"],
        tier: Tier,
        keep: Int32[np.ndarray, " k"] = NO_ENTRIES,
    ) -> Receipt | None:
        """A place on the tier for each entry, which takes none from ``keep``; None for no room."""
        allocator = self._device.allocator
        held = allocator.lease(keep)
        blocks = int((allocator.entries.form[entries] == Form.BLOCK).sum())
        try:
            reservation = allocator.reserve(
                blocks=blocks, snapshots=len(entries) - blocks, tier=tier
            )
        except (NoRoom, NeverFits):
            self._counters.no_room[tier] += 1
            return None
        finally:
            allocator.release(held)
        receipt = allocator.fill(reservation, entries)
        allocator.cancel(reservation)
        return receipt

    @contextlib.contextmanager
    def _aborted_by_errors(self, receipt: Receipt, tier: Tier) -> Iterator[None]:
        """What can't be read from where it is leaves no places behind."""
        try:
            yield
        except BaseException:
            self._device.allocator.abort(receipt.entries, tier)
            self._device.allocator.release(receipt)
            raise

    def _collect(
        self, jobs: collections.deque[_Job], tier: Tier, end: Callable[[_Job], None]
    ) -> int:
        """Ends the jobs that are done, in order; one that failed leaves nothing behind."""
        count = 0
        while jobs and jobs[0].future.done():
            job = jobs.popleft()
            error = job.future.exception()
            if error is None:
                error = self._ended(job, end)
            if error is not None:
                entries = job.receipt.entries
                state = self._device.allocator.entries.state[tier, entries]
                self._device.allocator.abort(entries[state == TierState.FILLING], tier)
                self._failed(tier, error)
            self._device.allocator.release(job.receipt)
            if error is not None:
                self._put_back(job, tier, error)
            count += 1
        return count

    def _put_back(self, job: _Job, tier: Tier, error: BaseException) -> None:
        """The prefix of a copy that failed goes behind the others, or is dropped for good."""
        waiting = self._for_host if tier == Tier.HOST else self._for_disk
        key, full = id(job.chain), isinstance(error, StoreFullError)
        if isinstance(error, DamagedHostBytes):
            self._spoiled(job.receipt.entries)  # the next copy is made of what is left
        elif full and self._make_disk_room(job.chain, len(job.receipt.entries)):
            return
        elif tier == Tier.HOST or (isinstance(error, OSError | StoreWriteError) and not full):
            if key in waiting:  # it is not, where more of it was published since
                waiting.move_to_end(key)
        elif waiting.pop(key, None) is not None:
            self._counters.dropped_prefixes += 1

    def _make_disk_room(self, chain: TokenChain, wanted: int) -> bool:
        """The store's bytes are used up: gives up what is worth least, so that it is tried again.

        False where nothing but the prefix itself could go: writing pauses as after any failure.
        """
        allocator = self._device.allocator
        held = allocator.lease(self._device.directory.find(chain).entries)
        try:
            count = min(allocator.evictable(Form.BLOCK, Tier.DISK), wanted)
            if count:
                allocator.evict(blocks=count, tier=Tier.DISK)
                self._paused_until[Tier.DISK] = -float("inf")
        finally:
            allocator.release(held)
        return count > 0

    @staticmethod
    def _ended(job: _Job, end: Callable[[_Job], None]) -> Exception | None:
        """Ends a job; the reason, where the books refuse it."""
        try:
            end(job)
        except EntryError as error:
            return error
        return None

    def _failed(self, tier: Tier, error: BaseException) -> None:
        self._counters.note_failed_store(tier, error)
        if not isinstance(error, DamagedHostBytes):  # those say nothing of the tier they went to
            self._paused_until[tier] = self._clock() + PAUSE_S

    def _spoiled(self, entries: Int32[np.ndarray, " n"]) -> None:
        """Forgets the copies on the host that are not what was put away."""
        columns, damaged = self._device.allocator.entries, []
        here = columns.state[Tier.HOST, entries] == TierState.PRESENT
        for entry in entries[here].tolist():
            held = self._host.at(Form(columns.form[entry]), int(columns.place[Tier.HOST, entry]))
            try:
                self._host.verify(held)
            except DamagedHostBytes:
                damaged.append(entry)
        self._counters.spoiled[Tier.HOST] += len(damaged)
        ids = np.asarray(damaged, np.int32)
        spoil(self._device.allocator, self._device.directory, ids, Tier.HOST)


def _behind(
    standing: Int32[np.ndarray, " n"], snapshots: Int32[np.ndarray, " m"]
) -> Int32[np.ndarray, " k"]:
    """Of the snapshots on a run, those deeper than the first of some."""
    return standing[int(np.argmax(standing == snapshots[0])) + 1 :] if snapshots.size else standing
