r"""One load: entries of other tiers on their way to the device, a move of blocks at a time.

    owner: fill (FILLING) --> worker: read, verify, device_put --> staged --> owner: scatter, commit
                                 |                                   |
                              segments (disk), pinned arrays (host)  +-- at most ``staged`` of them

What is committed stays, wherever the load ends: an entry is whole by itself. A load is shared by
every request that waits for one of its entries and given up when none does any more. ``Load`` is
the owner's, but for ``bring``, which a worker runs.
"""

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Int32, UInt32

from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.leases import Receipt
from hybridkv.kinds import Kind
from hybridkv.tiers.faults import Faults, Point
from hybridkv.tiers.host import DamagedHostBytes, HostTier, HostWords
from hybridkv.tiers.prefetch import Prefetched
from hybridkv.tiers.store.folder import may_pass
from hybridkv.tiers.store.reading import StoreReader
from hybridkv.tiers.store.records import Damaged
from hybridkv.tiers.worker import Future

_LOOK_S = 0.01
"""How often a worker that waits for room looks whether its load is still wanted."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Where one entry's bytes are: ``host``, or on disk; there, where exactly is asked for when
    they are read (``Bringer.placed``), and stands in ``segment`` or ``snapshot``.
    """

    entry: int
    host: HostWords | None = None
    digest: bytes = b""
    """Of the tokens up to it, where its bytes are on disk."""
    segment: str | None = None
    index: int = 0
    """Row of the segment."""
    snapshot: str | None = None

    @property
    def tier(self) -> Tier:
        """Which tier that is."""
        return Tier.HOST if self.host is not None else Tier.DISK


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """What one move brings: blocks, or a snapshot."""

    form: Form
    sources: tuple[Source, ...]

    @property
    def entries(self) -> Int32[np.ndarray, " n"]:
        """Their entries, in order."""
        return np.asarray([source.entry for source in self.sources], np.int32)


class LoadFailed(RuntimeError):  # noqa: N818 - reads as what happened
    """Bytes could not be brought. The cause is the error behind it."""

    def __init__(self, spoiled: Sequence[Source], error: Exception) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.spoiled = tuple(spoiled)
        """Whose bytes can't be used."""
        self.error = error

    @property
    def kind(self) -> Kind | None:
        """The kind whose bytes are wrong; None where nothing could be read."""
        error = self.error
        return error.kind if isinstance(error, Damaged | DamagedHostBytes) else None

    @property
    def may_pass(self) -> bool:
        """Whether the bytes may be whole, and only could not be read now."""
        error = self.error
        if isinstance(error, Damaged):
            return error.may_pass
        if isinstance(error, DamagedHostBytes):
            return False
        # A fault of ours says nothing about the bytes.
        return may_pass(error) if isinstance(error, OSError) else True


class Load:
    """Entries that one request was the first to want."""

    def __init__(self, parts: Sequence[Part], receipt: Receipt, *, staged: int) -> None:
        self.parts, self.receipt = tuple(parts), receipt
        self.entries = np.concatenate([part.entries for part in parts])
        self.waiters = 0
        self.future: Future[None] | None = None
        self.done = 0
        """Parts that are committed."""
        self.ended = False
        self.began = time.perf_counter()
        self.ready: collections.deque[tuple[Part, tuple[jax.Array, ...]]] = collections.deque()
        self.seconds: dict[Tier, float] = {Tier.HOST: 0.0, Tier.DISK: 0.0}
        """Of the worker, by where the bytes were."""
        self.bytes: dict[Tier, int] = {Tier.HOST: 0, Tier.DISK: 0}
        self._placed = self.parts
        """With the places that the worker reads."""
        self._given_up = threading.Event()
        self._error: BaseException | None = None
        self._room = threading.Semaphore(staged)

    @property
    def failure(self) -> BaseException | None:
        """Why nothing more comes, when that is so."""
        future = self.future
        if self._error or future is None or not future.done() or future.cancelled():
            return self._error
        return future.exception()

    def give_up(self, error: BaseException | None = None) -> None:
        """Nothing of it is wanted any more, or can be used."""
        self._error = error
        self._given_up.set()

    def scattered(self) -> None:
        """A staged part was taken."""
        self._room.release()

    def bring(self, bringer: "Bringer", moved: int) -> None:
        """Stages part after part. On a worker.

        Raises:
          LoadFailed: bytes are missing or not what was put away; what is staged is whole.
        """
        with bringer.reading(self.parts):
            self._placed = bringer.placed(self.parts)
            self._bring(bringer, moved)

    def _bring(self, bringer: "Bringer", moved: int) -> None:
        segments = bringer.segments([s for part in self._placed for s in part.sources])
        for part in self._placed:
            while not self._room.acquire(timeout=_LOOK_S):
                if self._given_up.is_set():
                    return
            if self._given_up.is_set():
                return
            began = time.perf_counter()
            words = [self._words(bringer, segments, source) for source in part.sources]
            staged = bringer.start_copy(words)
            for source, each in zip(part.sources, words, strict=True):
                self._verify(bringer, source, each)  # while the copy is on its way
            jax.block_until_ready(staged)
            tier = max(source.tier for source in part.sources)
            self.seconds[tier] += time.perf_counter() - began
            self.bytes[tier] += sum(each.nbytes for each in staged)
            if part.form == Form.BLOCK:
                staged += (staged[0],) * (moved - len(staged))
            self.ready.append((part, staged))

    def _words(
        self, bringer: "Bringer", segments: "SegmentRows", source: Source
    ) -> UInt32[np.ndarray, " words"] | jax.Array:
        try:
            return bringer.words(source, segments)
        except Exception as error:  # whatever a tier raises is a miss
            raise LoadFailed(self._beside(source), error) from error

    def _verify(
        self, bringer: "Bringer", source: Source, words: UInt32[np.ndarray, " words"] | jax.Array
    ) -> None:
        try:
            bringer.verify(source, words)
        except Exception as error:  # as above
            raise LoadFailed(self._beside(source), error) from error

    def _beside(self, source: Source) -> list[Source]:
        """Those that can't be used when one can't: all of its segment."""
        return [
            each
            for part in self._placed
            for each in part.sources
            if each is source or (each.segment is not None and each.segment == source.segment)
        ]


class SegmentRows:
    """The segments of a load, read ahead in the order in which they are first wanted."""

    def __init__(self, arrays: Iterator[tuple[str, np.ndarray]], last: Mapping[str, int]) -> None:
        self._arrays, self._left = arrays, dict(last)
        self._held: dict[str, np.ndarray] = {}

    def row(self, segment: str, index: int) -> UInt32[np.ndarray, " words"]:
        """One block's words; each row is asked for once."""
        while segment not in self._held:
            name, array = next(self._arrays)
            self._held[name] = array
        array = self._held[segment]
        self._left[segment] -= 1
        if not self._left[segment]:
            del self._held[segment]
        return array[index]


class Bringer:
    """What workers need to bring bytes: the tiers, and the device they go to."""

    def __init__(
        self,
        host: HostTier,
        store: StoreReader | None,
        device: jax.Device,
        prefetched: Prefetched,
        *,
        digests: bool,
        faults: Faults,
    ) -> None:
        self._host, self._store = host, store
        self._sharding = jax.sharding.SingleDeviceSharding(device)
        self._prefetched, self._digests, self._faults = prefetched, digests, faults

    def reading(self, parts: Sequence[Part]) -> contextlib.AbstractContextManager[None]:
        """While it is held, places of these parts in the store stay what they are."""
        on_disk = any(source.host is None for part in parts for source in part.sources)
        if self._store is None or not on_disk:
            return contextlib.nullcontext()
        return self._store.reading()

    def placed(self, parts: Sequence[Part]) -> tuple[Part, ...]:
        """The same parts with where their bytes are in the store now."""
        return tuple(
            dataclasses.replace(
                part, sources=tuple(self._place(part.form, s) for s in part.sources)
            )
            for part in parts
        )

    def _place(self, form: Form, source: Source) -> Source:
        if source.host is not None or self._store is None:
            return source
        if form == Form.SNAPSHOT:
            name = self._store.find_snapshot(source.digest)
            return dataclasses.replace(source, snapshot=name or "gone")
        found = self._store.find(source.digest)
        if found is None:
            return dataclasses.replace(source, segment="gone")
        return dataclasses.replace(source, segment=found.segment, index=found.index)

    def segments(self, sources: Sequence[Source]) -> SegmentRows:
        """Of these sources; those that were prefetched are not read again."""
        counts = collections.Counter(s.segment for s in sources if s.segment is not None)
        return SegmentRows(self._read(list(counts)), counts)

    def _read(self, names: list[str]) -> Iterator[tuple[str, np.ndarray]]:
        known = {name: self._prefetched.take(name) for name in names}
        missing = [name for name in names if known[name] is None]
        rest = iter(self._store.read_segments(missing)) if self._store is not None else iter(())
        for name in names:
            array = known[name]
            yield (name, array) if array is not None else next(rest)

    def words(
        self, source: Source, segments: SegmentRows
    ) -> UInt32[np.ndarray, " words"] | jax.Array:
        """Bytes of one entry; those of the host are not verified yet.

        Raises:
          Damaged: those on disk can't be used.
          OSError: by an injected fault.
        """
        if source.host is not None:
            return self._faults.reach(Point.HOST_LOAD, source.host.words)
        self._faults.reach(Point.DISK_LOAD, path=self._store.path if self._store else None)
        if source.segment is not None:
            return segments.row(source.segment, source.index)
        assert self._store is not None
        assert source.snapshot is not None
        return self._store.read_snapshot(source.snapshot)

    def verify(self, source: Source, words: UInt32[np.ndarray, " words"] | jax.Array) -> None:
        """Compares what ``words`` gave for a source of the host; a store has done so by itself.

        Raises:
          DamagedHostBytes: they are not what was put away.
        """
        if source.host is None or not self._digests:
            return
        held = source.host
        if words is not held.words:
            held = dataclasses.replace(held, words=words)
        self._host.verify(held)

    def start_copy(self, words: Sequence[np.ndarray | jax.Array]) -> tuple[jax.Array, ...]:
        """Starts to copy to the device; one call, since each costs as much as a small block."""
        staged: tuple[jax.Array, ...] = jax.device_put(tuple(words), self._sharding)
        return staged
