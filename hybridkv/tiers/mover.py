r"""The mover: brings what a plan wants to the device, and stores what was published.

    begin(hold) -> ticket ---+         published(chain) ---> storing ---> host, disk
                             v
    turn(): ready parts -> scatter -> commit        wanted(chain) ---> prefetched segments
                             ^
    workers: read, verify, copy to staging (never the cache)

Two phases: workers touch staging arrays, host memory and disk; the thread that owns the cache calls
everything here, and it alone gathers, scatters and changes the bookkeeping. A load that fails, is
late or is given up leaves entries that are whole by themselves, and the plan that follows finds
them, or finds less.
"""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.transitions import TierState
from hybridkv.kinds import Kind
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.plan import Plan
from hybridkv.state.packing import block_spans, snapshot_spans
from hybridkv.tiers.counters import TierCounters
from hybridkv.tiers.device import DeviceSide
from hybridkv.tiers.disk import DiskTier, spoil
from hybridkv.tiers.faults import Point
from hybridkv.tiers.host import HostTier
from hybridkv.tiers.loading import Bringer, Load, LoadFailed, Part, Source
from hybridkv.tiers.options import TierOptions
from hybridkv.tiers.prefetch import Prefetched
from hybridkv.tiers.store import Store
from hybridkv.tiers.store.records import Damaged, StoredExtension, StoreError, StoreLayout
from hybridkv.tiers.storing import Storing
from hybridkv.tiers.tickets import Held, RestoreState
from hybridkv.tiers.worker import Worker

_LOG = logging.getLogger(__name__)
_SMOOTHING = 0.3
"""Weight of the newest load in the measured bandwidths."""
_PREFETCHED_AT_ONCE = 4
_END_S = 1.0
"""In which threads that have nothing to do can end, also where no time was given for work."""


class Mover:
    """The tiers of one runner."""

    def __init__(
        self,
        device: DeviceSide,
        options: TierOptions,
        identity: Identity,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the store, starts the workers and publishes what is stored.

        A store that can't be used is done without: the line is logged, and stands in ``unusable``.

        Raises:
          StoreError: it can't be used, and ``options.require_store``.
        """
        self.options, self.counters = options, TierCounters()
        self.bytes_per_second: dict[Tier, float] = {}
        """Measured, of bytes from each tier to the device; a tier is missing until it was used."""
        self._device, self._identity, self._clock = device, identity, clock
        self._spans = {
            Form.BLOCK: block_spans(device.geometry),
            Form.SNAPSHOT: snapshot_spans(device.geometry),
        }
        self.unusable = ""
        """Why there is no disk tier although one was asked for; one line."""
        self._store = self._opened()
        self._prefetched = Prefetched(options.prefetch_bytes)
        self._loader, self._copier = Worker("hybridkv-loads"), Worker("hybridkv-copies")
        self._writer = Worker("hybridkv-writes")
        self._closed = self._whole = False
        self._allowed = 0.0
        """Moves that turns with an allowance may write."""
        self.bind()

    def _opened(self) -> Store | None:
        if self.options.path is None:
            return None
        try:
            return self._open()
        except StoreError as error:
            if self.options.require_store:
                raise
            self.unusable = self.counters.last_error = str(error)
            _LOG.warning("no disk tier: %s", error)
            return None

    def _open(self) -> Store:
        options = self.options
        assert options.path is not None
        layout = StoreLayout(
            block_tokens=self._device.geometry.block_tokens,
            block_spans=self._spans[Form.BLOCK],
            snapshot_spans=self._spans[Form.SNAPSHOT],
            segment_blocks=self._device.moved_blocks,
        )
        return Store.open(
            options.path,
            identity=self._identity,
            layout=layout,
            writable=options.writable,
            create=options.writable,
            capacity_bytes=options.disk_bytes,
            digests=options.digests,
            faults=options.faults,
        )

    def bind(self) -> None:
        """Begins anew with the device side's bookkeeping, which is empty; publishes the store."""
        options, device = self.options, self._device
        self._host = HostTier(options.host, self._spans, device.device)
        device.allocator.on_freed.append(self._host.dropped)
        self._disk = None
        if self._store is not None:
            self._disk = DiskTier(self._store, device.allocator, device.directory, device.geometry)
            stored = self._store.extensions()
            self._disk.adopt(stored)
            self._try_disk(stored)
        self._loads: dict[int, Load] = {}
        """By entry, while it is under way."""
        self._left: list[Load] = []
        """Given up while a worker was at them."""
        self._bringer = Bringer(
            self._host,
            self._store,
            device.device,
            self._prefetched,
            digests=options.digests,
            faults=options.faults,
        )
        self._storing = Storing(
            device,
            self._host,
            self._disk,
            sizes=options.host,
            compact_share=options.compact_share,
            copier=self._copier,
            writer=self._writer,
            limit=options.queue,
            counters=self.counters,
            clock=self._clock,
            faults=options.faults,
        )

    def _try_disk(self, stored: Sequence[StoredExtension]) -> None:
        """Times the reading of one segment, so that the first plan knows what a load costs."""
        place = next((x.blocks[0] for x in stored if x.blocks), None)
        if self._store is None or place is None or Tier.DISK in self.bytes_per_second:
            return
        began = time.perf_counter()
        try:
            ((_, rows),) = self._store.read_segments([place.segment])
        except Damaged as error:  # as below
            self.counters.failed_prefetches += 1
            self.counters.last_error = str(error)
            return
        self._measure(Tier.DISK, rows.nbytes / (time.perf_counter() - began))

    @property
    def store(self) -> Store | None:
        """The disk tier's store."""
        return self._store

    @property
    def host_bytes(self) -> int:
        """Bytes of the host tier now."""
        return self._host.bytes_used

    @property
    def busy(self) -> bool:
        """Whether anything is under way, or waits to be stored and is not held by a pause."""
        return self._storing.busy or bool(self._loads)

    @property
    def queued(self) -> Mapping[Tier, int]:
        """Prefixes that wait to be stored, by the tier they wait for."""
        return self._storing.queued

    # Loads.

    def begin(self, hold: Held, *, priority: float = 0.0) -> "Ticket | None":
        """Starts to bring what the hold's plan names; None where it names nothing.

        The hold's leases keep the entries where they are, and its reservation has room for them.
        """
        if self._closed or not isinstance(hold.plan, Plan) or not len(hold.plan.loads):
            return None
        allocator, wanted = self._device.allocator, hold.plan.loads
        absent = allocator.entries.state[Tier.DEVICE, wanted] == TierState.ABSENT
        own = wanted[absent]
        loads = {id(x): x for x in map(self._loads.get, wanted[~absent].tolist()) if x is not None}
        if own.size:
            parts = self._parts(own)
            receipt = allocator.fill(hold.reservation, own)
            load = Load(parts, receipt, staged=self.options.staged)
            self._loads |= dict.fromkeys(own.tolist(), load)
            load.future = self._loader.submit(
                lambda: load.bring(self._bringer, self._device.moved_blocks), priority=priority
            )
            loads[id(load)] = load
        self.counters.loads += 1
        return Ticket(self, wanted, list(loads.values()))

    def _parts(self, entries: np.ndarray) -> list[Part]:
        """Blocks by moves, then snapshots."""
        forms, moved = self._device.allocator.entries.form[entries], self._device.moved_blocks
        blocks, snapshots = entries[forms == Form.BLOCK], entries[forms == Form.SNAPSHOT]
        groups = [(Form.BLOCK, blocks[i : i + moved]) for i in range(0, blocks.size, moved)]
        groups += [(Form.SNAPSHOT, snapshots[i : i + 1]) for i in range(snapshots.size)]
        return [
            Part(form=form, sources=tuple(self._source(form, entry) for entry in part.tolist()))
            for form, part in groups
        ]

    def _source(self, form: Form, entry: int) -> Source:
        columns = self._device.allocator.entries
        if columns.state[Tier.HOST, entry] == TierState.PRESENT:
            place = int(columns.place[Tier.HOST, entry])
            return Source(entry=entry, host=self._host.at(form, place))
        assert self._disk is not None, "a plan loads from a tier that is not there"
        return Source(entry=entry, digest=self._disk.digest(entry))

    def turn(self, *, allowance: float | None = None) -> bool:
        """Once a turn: writes what has come, ends what is done, starts what is next to store.

        Returns whether anything moved. Takes no longer than ``moves_a_turn`` writes. With an
        ``allowance``, in moves, it writes what the allowances of the last turns come to: one move
        every four turns at 0.25.
        """
        limit = self.options.moves_a_turn
        if allowance is not None:
            self._allowed = min(self._allowed + allowance, limit)
            limit = int(self._allowed)
        left, loads = limit, self._under_way()
        while left and (ready := [load for load in loads if load.ready and not load.ended]):
            for load in ready[:left]:  # in turn: a long load does not keep a short one
                self._try_write(load, *load.ready.popleft())
            left -= min(left, len(ready))
        for load in loads:
            # In this order: what comes between the two questions is seen by the second.
            if load.future is not None and load.future.done() and not load.ready:
                self._end(load)
        self._look_after()
        moved = left < limit
        self._allowed = max(self._allowed - (limit - left), 0.0)
        return self._storing.turn() or moved

    def _under_way(self) -> list[Load]:
        return list({id(load): load for load in self._loads.values()}.values())

    def _try_write(self, load: Load, part: Part, staged: Sequence[jax.Array]) -> None:
        """Writes one part, or ends the load: what did not get to the cache was not loaded."""
        try:
            self._write(load, part, staged)
        except Exception as error:  # whatever a device does, the prompt can be computed
            load.give_up(error)
            self._end(load)

    def _write(self, load: Load, part: Part, staged: Sequence[jax.Array]) -> None:
        """Scatters one part and commits it: device order makes its bytes final."""
        allocator, entries = self._device.allocator, part.entries
        places = allocator.entries.place[Tier.DEVICE, entries]
        self.options.faults.reach(Point.DEVICE_WRITE)
        if part.form == Form.BLOCK:
            missing = self._device.moved_blocks - places.size
            padded = np.pad(places, (0, missing), constant_values=np.iinfo(np.int32).max)
            self._device.write_blocks(staged, padded)
        else:
            self._device.write_snapshot(staged[0], int(places[0]))
        allocator.commit(entries, int(allocator.entries.kinds[entries[0]]), Tier.DEVICE)
        load.done += 1
        load.scattered()
        for source in part.sources:
            self.counters.loaded[source.tier] += 1

    def _end(self, load: Load) -> None:
        """Everything that will come has come."""
        if load.ended:
            return
        load.ended = True
        for entry in load.entries.tolist():
            del self._loads[entry]
        # Asked before its failure: a worker that ends between the two is not left unheard.
        unfinished = load.future is not None and not load.future.done()
        allocator, error = self._device.allocator, load.failure
        rest = [part.entries for part in load.parts[load.done :]]
        if rest:
            allocator.abort(np.concatenate(rest), Tier.DEVICE)
        allocator.release(load.receipt)
        load.ready.clear()
        for tier, seconds in load.seconds.items():
            self.counters.loaded_bytes[tier] += load.bytes[tier]
            if seconds > 0:
                self._measure(tier, load.bytes[tier] / seconds)
        if error is None and load.done == len(load.parts):
            slowest = max(source.tier for part in load.parts for source in part.sources)
            self.counters.load_seconds[slowest].note(time.perf_counter() - load.began)
        if error is None:
            self._left += [load] if unfinished else []
            return
        self._note_failed(error)
        if isinstance(error, LoadFailed):
            self._spoiled(error.spoiled, keep=error.may_pass, kind=error.kind)

    def _note_failed(self, error: BaseException) -> None:
        self.counters.failed_loads += 1
        self.counters.last_error = str(error)

    def _look_after(self) -> None:
        """What fails when nobody waits for it is told all the same; its entries may be others."""
        for load in [load for load in self._left if load.future is None or load.future.done()]:
            self._left.remove(load)
            if load.failure is not None:
                self._note_failed(load.failure)

    def _spoiled(self, sources: Sequence[Source], *, keep: bool, kind: Kind | None) -> None:
        """Copies that can't be used are forgotten, so that nobody tries them again.

        They leave the store too, unless they could only not be read, and that not often.
        """
        columns = self._device.allocator.entries
        for tier in (Tier.HOST, Tier.DISK):
            entries = np.asarray([s.entry for s in sources if s.tier == tier], np.int32)
            entries = entries[columns.state[tier, entries] == TierState.PRESENT]
            self.counters.spoiled[tier] += entries.size
            if kind is not None:
                self.counters.refused[kind] += entries.size
            if entries.size and keep and tier == Tier.DISK and self._disk is not None:
                self._disk.keep(entries)
            if entries.size:
                spoil(self._device.allocator, self._device.directory, entries, tier, kind)

    def _measure(self, tier: Tier, rate: float) -> None:
        before = self.bytes_per_second.get(tier, rate)
        self.bytes_per_second[tier] = (1 - _SMOOTHING) * before + _SMOOTHING * rate

    def leave(self, load: Load) -> None:
        """One request fewer waits for a load; the last one ends it."""
        load.waiters -= 1
        if load.waiters or load.ended:
            return
        load.give_up()
        if load.future is not None:
            load.future.cancel()
        self.counters.given_up += load.done < len(load.parts)
        self._end(load)

    def read(self, entries: np.ndarray) -> list[np.ndarray]:
        """Verified words of entries that are whole on another tier, uint32 ``[words]`` each.

        On this thread, waiting: for a copy that leaves the process.

        Raises:
          Damaged: those on disk can't be used.
          DamagedHostBytes: those on the host can't be used.
        """
        forms = self._device.allocator.entries.form[entries]
        pairs = zip(forms.tolist(), entries.tolist(), strict=True)
        parts = [Part(form=Form(f), sources=(self._source(Form(f), entry),)) for f, entry in pairs]
        with self._bringer.reading(parts):
            sources = [part.sources[0] for part in self._bringer.placed(parts)]
            segments, found = self._bringer.segments(sources), []
            for source in sources:
                words = self._bringer.words(source, segments)
                self._bringer.verify(source, words)
                found.append(np.asarray(words))
        return found

    # Reading ahead.

    def wanted(self, plan: Plan) -> None:
        """A request that waits to be admitted would load this: segments are read ahead.

        Later than every load that somebody waits for, and within ``prefetch_bytes``.
        """
        if self._disk is None or not len(plan.loads):
            return
        columns, store = self._device.allocator.entries, self._disk.store
        blocks = plan.loads[columns.form[plan.loads] == Form.BLOCK]
        alone = blocks[columns.state[Tier.HOST, blocks] != TierState.PRESENT]
        one_of: dict[str, bytes] = {}
        """A block of each segment: a segment may be another one when it is read."""
        for digest in map(self._disk.digest, alone.tolist()):
            place = store.find(digest)
            if place is not None:
                one_of.setdefault(place.segment, digest)
        size = self._device.moved_blocks * self._device.geometry.block_bytes
        digests = list(one_of.values())[: self.options.prefetch_bytes // max(size, 1)]
        for first in range(0, len(digests), _PREFETCHED_AT_ONCE):
            some = digests[first : first + _PREFETCHED_AT_ONCE]
            self._loader.submit(functools.partial(self._read_ahead, store, some), priority=-1.0)

    def _read_ahead(self, store: Store, digests: Sequence[bytes]) -> None:
        """Reads the segments of blocks."""
        self.options.faults.reach(Point.PREFETCH)
        try:
            with store.reading():
                found = [place.segment for x in digests if (place := store.find(x)) is not None]
                names = [x for x in dict.fromkeys(found) if x not in self._prefetched]
                for name, array in store.read_segments(names):
                    self._prefetched.put(name, array)
                    self.counters.prefetched += 1
        except Damaged as error:  # the load that needs it finds it too, and acts
            self.counters.failed_prefetches += 1
            self.counters.last_error = str(error)

    # Storing.

    def published(self, chain: TokenChain) -> None:
        """A prefix of the chain was published: it is stored when there is time."""
        if not self._closed:
            self._storing.add(chain)

    def flush(self, *, timeout_s: float) -> bool:
        """Stores what waits, the deepest prefixes first; whether all that ever waited is stored.

        It does not wait for the end of a pause after a write that failed, and is False then. False
        too from then on, once a prefix was dropped (``TierCounters.dropped_prefixes``). What finds
        no room, or is pushed out of memory before its turn, is not missed.
        """
        self._storing.deepest_first()
        end, failed = time.monotonic() + timeout_s, False
        while self.busy and time.monotonic() < end:
            try:
                moved = self.turn()
            except Exception as error:  # whatever a device does, others may still be stored
                moved, failed = False, True
                self.counters.last_error = f"{type(error).__name__}: {error}"
            if not moved:
                time.sleep(1e-3)
        return not (self.busy or failed) and self._storing.whole

    def refresh(self) -> int:
        """A reader looks again at what the writer stored; returns the blocks that are new.

        Raises:
          StoreError: the folder can't be read any more.
        """
        if self._disk is None:
            return 0
        added, vanished = self._disk.store.refresh()
        self._disk.vanished(vanished)
        return self._disk.adopt(added)

    def drop(self) -> None:
        """Ends all loads and forgets what waits; jobs at hand end by themselves."""
        for load in self._under_way():
            load.give_up()
            self._end(load)
        self._prefetched.clear()

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Stores what waits, within a time, and ends; whether all was stored and all has ended.

        A writer that is still at work keeps the store to itself, and gives it back when it ends.
        Closing again waits for that, and stores nothing more.
        """
        end = time.monotonic() + timeout_s
        try:
            if not self._closed:
                self._whole = self.flush(timeout_s=timeout_s)
                self.drop()
        finally:
            ended = self._end_workers(end)
        return self._whole and ended

    def _end_workers(self, end: float) -> bool:
        """Ends them all by one time, but for the moment that a thread needs to end at all."""
        if not self._closed:
            self._closed = True
            if self._store is not None:  # whoever writes there ends it, however late
                self._writer.submit(self._store.close, priority=float("inf"))
        end = max(end, time.monotonic() + _END_S)
        workers = self._loader, self._copier, self._writer
        left = [x for x in workers if not x.close(timeout_s=max(end - time.monotonic(), 0.0))]
        self._look_after()
        return not left


@dataclasses.dataclass(eq=False)
class Ticket:
    """One request's claim on what is brought; see ``tickets.RestoreTicket``."""

    mover: Mover
    entries: np.ndarray
    loads: list[Load]
    cancelled: bool = False

    def __post_init__(self) -> None:
        for load in self.loads:
            load.waiters += 1

    def state(self) -> RestoreState:
        """READY when every entry is on the device, FAILED when one will not come."""
        states = self.mover._device.allocator.entries.state[Tier.DEVICE, self.entries]
        if (states == TierState.PRESENT).all():
            return RestoreState.READY
        ended = all(load.ended for load in self.loads)
        return RestoreState.FAILED if ended else RestoreState.PENDING

    def cancel(self) -> None:
        """Waits for it no longer; what nobody waits for ends here."""
        if self.cancelled:
            return
        self.cancelled = True
        for load in self.loads:
            self.mover.leave(load)
