r"""Bytes between device, host and disk against plain copies and reads of the same bytes.

    Shelf (a cache of random bytes, no model) --- Mover --- host arrays, store
    disk to host     Store.read_segments, read_snapshot    |  readinto of the same files, in order
    host to device   Load.bring: verify, copy a move       |  device_put of the same arrays
    through a mover  begin ... READY, written to the cache |  the same copies and writes, in a loop
    device to host   published ... all copies pinned       |  the same gathers and copies, in a loop

The two sides of a line take turns, digests are on, and a ratio is ours to the plain side's. One
thread, but for the mover's workers.
"""

import argparse
import collections
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import Form, Tier, kind_bits
from hybridkv.blocks.eviction import LeastRecentlyUsed
from hybridkv.blocks.leases import Receipt
from hybridkv.blocks.pools import PoolSizes, Reservation
from hybridkv.engine.steps import MOVED_BLOCKS
from hybridkv.geometry import Geometry
from hybridkv.prefixes.directory import Directory
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds
from hybridkv.prefixes.plan import Plan, PlanOptions, plan_prefix
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity
from hybridkv.state.packing import (
    block_spans,
    put_blocks,
    put_snapshot,
    snapshot_spans,
    take_blocks,
    take_snapshot,
    words_of,
)
from hybridkv.state.snapshot import Snapshots
from hybridkv.tiers.loading import Bringer, Load, Part
from hybridkv.tiers.mover import Mover
from hybridkv.tiers.options import TierOptions
from hybridkv.tiers.store import Store
from hybridkv.tiers.tickets import RestoreState

PAST = np.iinfo(np.int32).max
"""A place that no pool has: what is written there is dropped."""
TIMEOUT_S = 120.0
DATA_BYTES = 4096
"""Files of a store that are larger hold blocks or a snapshot; the others are notes about them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hold:
    """What a request would hold while it waits; see ``hybridkv.tiers.tickets.Held``."""

    chain: TokenChain
    plan: Plan
    reservation: Reservation
    shared: Receipt


class Shelf:
    """A cache of random bytes under a mover: what owns the device, without a model."""

    def __init__(self, geometry: Geometry, *, blocks: int, snapshots: int, seed: int) -> None:
        self.geometry, self.moved_blocks = geometry, MOVED_BLOCKS
        self.device = jax.devices()[0]
        here = jax.sharding.SingleDeviceSharding(self.device)
        capacity = Capacity(blocks=blocks, slots=1, blocks_per_sequence=blocks)
        self._cache = Cache.init(geometry, capacity, here)
        self._snapshots = Snapshots.init(geometry, snapshots, here)
        self._take, self._take_one = jax.jit(take_blocks), jax.jit(take_snapshot)
        self._put = jax.jit(put_blocks, donate_argnums=0)
        self._put_one = jax.jit(put_snapshot, donate_argnums=0)
        self.sizes = PoolSizes(blocks=blocks, snapshots=snapshots)
        self.allocator = Allocator(
            dict.fromkeys(Tier, self.sizes), policy=LeastRecentlyUsed(), clock=time.monotonic
        )
        self.identity = Identity.of_geometry(geometry, weights="random", numerics="none")
        self._kinds = {
            Form.BLOCK: kind_bits(block_kinds(geometry)),
            Form.SNAPSHOT: kind_bits(snapshot_kinds(geometry)),
        }
        self.directory = Directory(
            self.allocator,
            self.identity,
            block_tokens=geometry.block_tokens,
            required_kinds=self._kinds[Form.BLOCK] | self._kinds[Form.SNAPSHOT],
        )
        self._rng = np.random.default_rng(seed)

    @property
    def exact(self) -> Callable[[np.ndarray], np.ndarray]:
        """Whether each entry is that of a cold run: all are."""
        return lambda entries: np.ones(len(entries), bool)

    def read_blocks(self, places: np.ndarray) -> Sequence[jax.Array]:
        """Starts to copy a move of blocks out."""
        return self._take(self._cache, jax.device_put(places.astype(np.int32)))

    def write_blocks(self, blocks: Sequence[jax.Array], places: np.ndarray) -> None:
        """Starts to write a move of blocks."""
        at = jax.device_put(places.astype(np.int32))
        self._cache = self._put(self._cache, tuple(blocks), at)

    def read_snapshot(self, place: int) -> jax.Array:
        """Starts to copy a snapshot out."""
        return self._take_one(self._snapshots, jax.device_put(np.int32(place)))

    def write_snapshot(self, words: jax.Array, place: int) -> None:
        """Starts to write a snapshot."""
        at = jax.device_put(np.int32(place))
        self._snapshots = self._put_one(self._snapshots, words, at)

    def wait(self) -> None:
        """Until everything that was started is done."""
        jax.block_until_ready((self._cache, self._snapshots))

    def fill(self, blocks: int, snapshots: int) -> TokenChain:
        """Publishes one prefix of random bytes, with so many snapshots, evenly spaced."""
        size = self.geometry.block_tokens
        chain = self.directory.chain()
        chain.extend(self._rng.integers(0, 1000, blocks * size + 1).astype(np.uint32))
        reservation = self.allocator.reserve(blocks=blocks, snapshots=snapshots)
        taken = self.allocator.take(reservation, Form.BLOCK, blocks)
        places = self.allocator.entries.place[Tier.DEVICE]
        for first in range(0, blocks, MOVED_BLOCKS):
            at = places[taken.entries[first : first + MOVED_BLOCKS]]
            words = tuple(self._random(Form.BLOCK) for _ in range(MOVED_BLOCKS))
            self.write_blocks(words, padded(at))
        self.allocator.commit(taken.entries, self._kinds[Form.BLOCK])
        self.directory.publish(chain, 0, taken.entries)
        for number in range(snapshots):
            one = self.allocator.take(reservation, Form.SNAPSHOT, 1)
            self.write_snapshot(self._random(Form.SNAPSHOT), int(places[one.entries[0]]))
            self.allocator.commit(one.entries, self._kinds[Form.SNAPSHOT])
            position = (number + 1) * blocks // snapshots * size
            self.directory.publish_snapshot(chain, position, int(one.entries[0]))
            self.allocator.release(one)
        self.allocator.cancel(reservation)
        self.allocator.release(taken)
        self.wait()
        return chain

    def _random(self, form: Form) -> jax.Array:
        spans = block_spans if form == Form.BLOCK else snapshot_spans
        size = words_of(spans(self.geometry))
        words = self._rng.integers(0, 2**32, size, dtype=np.uint32)
        return jax.device_put(words, jax.sharding.SingleDeviceSharding(self.device))

    def hold(self, chain: TokenChain) -> Hold:
        """What a request for the whole chain holds; its plan loads what is not on the device."""
        options = PlanOptions(tile=self.geometry.block_tokens, loads=True)
        plan = plan_prefix(self.directory, chain, self.geometry, options)
        if not isinstance(plan, Plan):
            raise RuntimeError(f"a stored prefix was not found: {plan.reason}")
        forms = self.allocator.entries.form[plan.loads]
        blocks = int((forms == Form.BLOCK).sum())
        shared = self.allocator.lease(plan.entries, plan.generations)
        reservation = self.allocator.reserve(blocks=blocks, snapshots=len(forms) - blocks)
        return Hold(chain=chain, plan=plan, reservation=reservation, shared=shared)

    def drop(self, hold: Hold) -> None:
        """Gives back what ``hold`` took."""
        self.allocator.cancel(hold.reservation)
        self.allocator.release(hold.shared)


def padded(places: np.ndarray) -> np.ndarray:
    """Places of a move, int32 ``[MOVED_BLOCKS]``."""
    return np.pad(places, (0, MOVED_BLOCKS - len(places)), constant_values=PAST)


def evict(allocator: Allocator, tier: Tier) -> None:
    """Makes a tier give up all that it can."""
    for form in (Form.BLOCK, Form.SNAPSHOT):
        while count := allocator.evictable(form, tier):
            allocator.evict(**{"blocks" if form == Form.BLOCK else "snapshots": count}, tier=tier)


def finish(mover: Mover) -> None:
    """Lets a mover store all that waits.

    Raises:
      RuntimeError: it did not, so that nothing could be measured.
    """
    if not mover.flush(timeout_s=TIMEOUT_S) or any(mover.counters.failed_stores.values()):
        raise RuntimeError(
            f"the tiers did not store a prefix: {mover.counters.last_error or TIMEOUT_S}"
        )


# Files.


def data_files(path: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Of a store, those that hold blocks and snapshots, sorted."""
    base = pathlib.Path(path)
    found = sorted(x for x in base.rglob("*") if "c" in x.relative_to(base).parts)
    return [x for x in found if x.is_file() and x.stat().st_size > DATA_BYTES]


def drop_caches(files: Sequence[pathlib.Path]) -> bool:
    """Makes the operating system forget files that it wrote; False where it can't be asked to."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return True


class Reads:
    """A store's blocks and snapshots, read by it and read plainly: the same files in one order."""

    def __init__(self, store: Store) -> None:
        self._store = store
        stored = store.extensions()
        self._segments = list(dict.fromkeys(x.segment for each in stored for x in each.blocks))
        self._snapshots = list(dict.fromkeys(id_ for each in stored for id_ in each.snapshot_ids))
        by_folder = {x.relative_to(store.path).parts[1]: x for x in data_files(store.path)}
        self.files = [by_folder[id_] for id_ in (*self._segments, *self._snapshots)]
        sizes = [file.stat().st_size for file in self.files]
        self.bytes = sum(sizes)
        self._buffer = np.ones(max(sizes), np.uint8)  # written to, so that it is there

    def ours(self) -> None:
        """Verified, into arrays of their own."""
        for _ in self._store.read_segments(self._segments):
            pass
        for id_ in self._snapshots:
            self._store.read_snapshot(id_)

    def plain(self) -> None:
        """One file after the other, into one buffer."""
        for file in self.files:
            with open(file, "rb", buffering=0) as handle:
                handle.readinto(self._buffer.data)


# Measurements.

Side = Callable[[], None]


def alternate(
    sides: Mapping[str, Side], rounds: int, before: Callable[[], Any] | None = None
) -> dict[str, list[float]]:
    """Seconds of each side in each round; who goes first changes; ``before`` is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            if before is not None:
                before()
            began = time.perf_counter()
            sides[name]()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def rates(seconds: Mapping[str, Sequence[float]], size: int) -> dict[str, float]:
    """GB/s of both sides, medians, and ours to the plain one."""
    ours, plain = (float(np.median(seconds[name])) for name in ("ours", "plain"))
    return {
        "bytes": size,
        "gb_per_second": size / ours / 1e9,
        "plain_gb_per_second": size / plain / 1e9,
        "ratio": plain / ours,
    }


class Moves:
    """One prefix on all three tiers, and the ways of its bytes."""

    def __init__(self, geometry: Geometry, path: pathlib.Path, args: argparse.Namespace) -> None:
        self._rounds = args.rounds
        snapshots = max(args.blocks // 32, 1)
        self.shelf = Shelf(geometry, blocks=args.blocks, snapshots=snapshots, seed=args.seed)
        options = TierOptions(host=self.shelf.sizes, disk=self.shelf.sizes, path=path)
        self.mover = Mover(self.shelf, options, self.shelf.identity)
        self.chain = self.shelf.fill(args.blocks, snapshots)
        began = time.perf_counter()
        self.mover.published(self.chain)
        finish(self.mover)
        self.store_seconds = time.perf_counter() - began
        assert self.mover.store is not None
        self.reads = Reads(self.mover.store)

    def close(self) -> None:
        """Ends the mover."""
        self.mover.close(timeout_s=TIMEOUT_S)

    def disk_to_host(self) -> dict[str, Any]:
        """With the page cache, and without."""
        sides = {"ours": self.reads.ours, "plain": self.reads.plain}
        for side in sides.values():
            side()
        warm = rates(alternate(sides, 3 * self._rounds), self.reads.bytes)
        result: dict[str, Any] = {"files": len(self.reads.files), "warm": warm, "cold": None}
        if drop_caches(self.reads.files):
            seconds = alternate(sides, self._rounds, lambda: drop_caches(self.reads.files))
            result["cold"] = rates(seconds, self.reads.bytes)
        return result

    def host_to_device(self) -> dict[str, Any]:
        """Staged: verified and copied, not yet written to the cache."""
        hold, parts = self._on_host()
        here = jax.sharding.SingleDeviceSharding(self.shelf.device)
        moves = [_host_words(part) for part in parts]
        kept = self.mover.options.staged

        def bring(bringer: Bringer) -> None:
            load = Load(parts, hold.shared, staged=len(parts))
            load.ready = collections.deque(maxlen=kept)  # as if they were written meanwhile
            load.bring(bringer, MOVED_BLOCKS)

        def plain() -> None:
            staged: collections.deque[Any] = collections.deque(maxlen=kept)
            for arrays in moves:
                staged.append(jax.block_until_ready(jax.device_put(arrays, here)))

        sides: dict[str, Side] = {
            "ours": lambda: bring(self._bringer(digests=True)),
            "unverified": lambda: bring(self._bringer(digests=False)),
            "plain": plain,
        }
        seconds = alternate(sides, 3 * self._rounds)
        self.shelf.drop(hold)
        size = sum(x.nbytes for arrays in moves for x in arrays)
        unverified = rates(seconds | {"ours": seconds["unverified"]}, size)
        return rates(seconds, size) | {"unverified": unverified}

    def _bringer(self, *, digests: bool) -> Bringer:
        """As the mover's own, with or without digests."""
        mover = self.mover
        return Bringer(
            mover._host,
            mover.store,
            self.shelf.device,
            mover._prefetched,
            digests=digests,
            faults=mover.options.faults,
        )

    def _on_host(self) -> tuple[Hold, list[Part]]:
        """The prefix is on the host and not on the device; what a load of it would move."""
        self._evict_device()
        hold = self.shelf.hold(self.chain)
        return hold, self.mover._parts(hold.plan.loads)

    def load(self) -> None:
        """All of the prefix, through the mover: until it is written to the cache."""
        hold = self.shelf.hold(self.chain)
        ticket = self.mover.begin(hold)
        while ticket is not None and ticket.state() is RestoreState.PENDING:
            if not self.mover.turn():
                time.sleep(1e-4)
        if ticket is None or ticket.state() is not RestoreState.READY:
            raise RuntimeError(f"a load failed: {self.mover.counters.last_error}")
        ticket.cancel()
        self.shelf.drop(hold)
        self.shelf.wait()

    def through_mover(self) -> dict[str, Any]:
        """From the host, and from disk, to the cache; against the same copies and writes."""
        hold, parts = self._on_host()
        self.shelf.drop(hold)
        here = jax.sharding.SingleDeviceSharding(self.shelf.device)
        moves = [(part.form, _host_words(part)) for part in parts]

        def plain() -> None:
            for form, arrays in moves:
                words = jax.device_put(arrays, here)
                if form == Form.SNAPSHOT:
                    self.shelf.write_snapshot(words[0], PAST)
                else:
                    filled = [*words, *words[:1] * (MOVED_BLOCKS - len(words))]
                    self.shelf.write_blocks(filled, np.arange(MOVED_BLOCKS))
            self.shelf.wait()

        sides = {"ours": self.load, "plain": plain}
        size = sum(x.nbytes for _, arrays in moves for x in arrays)
        prepare = self._evict_device
        result = {"host": rates(alternate(sides, self._rounds, prepare), size)}
        seconds = alternate({"ours": self.load}, self._rounds, self._only_disk)
        disk = size / float(np.median(seconds["ours"]))
        return result | {"disk_gb_per_second": disk / 1e9}

    def _evict_device(self) -> None:
        evict(self.shelf.allocator, Tier.DEVICE)

    def _only_disk(self) -> None:
        for tier in (Tier.DEVICE, Tier.HOST):
            evict(self.shelf.allocator, tier)

    def device_to_host(self) -> dict[str, Any]:
        """Gathered, copied, and a digest a kind; against the same without digests, in a loop."""
        allocator = self.shelf.allocator
        self._evict_device()
        self.load()
        pinned = jax.sharding.SingleDeviceSharding(self.shelf.device, memory_kind="pinned_host")
        run = self.shelf.directory.find(self.chain).entries
        snapshots = self.shelf.directory.snapshot_at(run)
        places = allocator.entries.place[Tier.DEVICE]

        def ours() -> None:
            self.mover.published(self.chain)
            finish(self.mover)

        def plain() -> None:
            keep = []
            for first in range(0, len(run), MOVED_BLOCKS):
                at = padded(places[run[first : first + MOVED_BLOCKS]])
                words = list(self.shelf.read_blocks(at))[: len(run) - first]
                keep.append(jax.block_until_ready(jax.device_put(words, pinned)))
            for entry in snapshots[snapshots >= 0]:
                words = [self.shelf.read_snapshot(int(places[entry]))]
                keep.append(jax.block_until_ready(jax.device_put(words, pinned)))

        def before() -> None:
            evict(allocator, Tier.HOST)

        size = self.reads.bytes
        return rates(alternate({"ours": ours, "plain": plain}, self._rounds, before), size)


def _host_words(part: Part) -> list[Any]:
    return [source.host.words for source in part.sources if source.host is not None]


def measure(geometry: Geometry, path: pathlib.Path, args: argparse.Namespace) -> dict[str, Any]:
    """All ways of the bytes of one geometry."""
    moves = Moves(geometry, path, args)
    try:
        host = moves.host_to_device()
        through = moves.through_mover()
        back = moves.device_to_host()
        disk = moves.disk_to_host()
    finally:
        moves.close()
    return {
        "block_bytes": 4 * words_of(block_spans(geometry)),
        "snapshot_bytes": 4 * words_of(snapshot_spans(geometry)),
        "store_gb_per_second": moves.reads.bytes / moves.store_seconds / 1e9,
        "disk_to_host": disk,
        "host_to_device": host,
        "through_mover": through,
        "device_to_host": back,
    }
