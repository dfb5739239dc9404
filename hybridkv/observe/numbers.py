r"""Numbers of one engine at one moment, for whoever serves them from another thread.

    engine's thread   --turn--><tell>--turn--><tell>--turn-->        idle: nobody holds turn_lock
                                  |  answers if asked                     |
    another thread    read(): asks, waits ----+---> Numbers    or takes the lock and looks itself

A turn costs one test of a flag while nobody asks. Numbers are copies of counts and are never
changed, so that sums in them agree: what is counted in one turn is there as a whole or not at all.
Where a turn takes longer than a reader waits, it gets the numbers of the last time, and their age.
"""

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import FORM_BITS, Form, Tier, kinds_of
from hybridkv.blocks.transitions import TierState
from hybridkv.engine.accounts import PromptTotals
from hybridkv.engine.counters import EngineCounters
from hybridkv.engine.engine import Engine
from hybridkv.engine.requests import Finish
from hybridkv.engine.scheduler import Stage
from hybridkv.geometry import Geometry
from hybridkv.kinds import Kind
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds
from hybridkv.state.generic import generic_geometry
from hybridkv.state.snapshot import snapshot_bytes
from hybridkv.tiers.counters import TierCounters
from hybridkv.tiers.durations import Durations


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolNumbers:
    """Places of one form on one tier."""

    capacity: int
    used: int
    """Places that entries have."""
    reserved: int
    """Places that are promised and not taken yet."""
    published: int
    """Used places of entries that the directory shows and whose bytes are whole there."""
    idle: int
    """Those of them that nobody leases."""
    evictable: int
    """Those of them that could be given up now, one after the other."""

    @property
    def occupancy(self) -> float:
        """Used places over all places; 0 where there are none."""
        return self.used / self.capacity if self.capacity else 0.0

    @property
    def fragmentation(self) -> float:
        """1 - largest allocatable / free; 0 where nothing is free.

        Free is what nobody uses: places without an entry or a promise, and idle ones. The largest
        allocatable is the largest reservation that would succeed now: places without an entry or a
        promise, and evictable ones. The two differ by idle entries that something in use stands on.
        """
        available = self.capacity - self.used - self.reserved
        free = available + self.idle
        return 1.0 - (available + self.evictable) / free if free else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """One engine at one moment."""

    taken: float
    """``time.monotonic()``."""
    counters: EngineCounters
    """A copy."""
    tiers: TierCounters
    """A copy; zeros where there are no tiers."""
    stages: Mapping[Stage, int]
    slots: int
    free_slots: int
    idle_queue: int
    store_queues: Mapping[Tier, int]
    pools: Mapping[tuple[Form, Tier], PoolNumbers]
    """Of every form and tier that has places."""
    block_tokens: int
    place_bytes: Mapping[Kind, int]
    """Bytes of each kind in one place: of a block, or of a snapshot."""
    raw_token_bytes: int
    """Bytes of one token as uniform raw rows (``hybridkv.state.generic``)."""
    store_bytes: int
    """Bytes of all files of the store."""

    @property
    def prompts(self) -> PromptTotals:
        """What became of the tokens of prompts."""
        return self.counters.prompts

    @property
    def queue(self) -> int:
        """Requests that wait for a seat: new, parked or restoring."""
        return sum(self.stages[s] for s in (Stage.WAITING, Stage.PARKED, Stage.RESTORING))

    def stored_bytes(self, kind: Kind, tier: Tier) -> int:
        """Bytes of a kind in used places of a tier; of DISK_PREFIX, those of the whole store."""
        if kind is Kind.DISK_PREFIX:
            return self.store_bytes if tier == Tier.DISK else 0
        form = Form.BLOCK if kind in kinds_of(FORM_BITS[Form.BLOCK]) else Form.SNAPSHOT
        pool = self.pools.get((form, tier))
        return pool.used * self.place_bytes.get(kind, 0) if pool is not None else 0

    def compression(self, tier: Tier) -> float:
        """Raw bytes / stored bytes of a tier; 0 where nothing is stored.

        Raw are the tokens of its blocks as uniform raw rows; stored are its blocks and snapshots,
        on the disk all files of the store.
        """
        stored = sum(self.stored_bytes(kind, tier) for kind in self.place_bytes)
        stored = self.store_bytes if tier == Tier.DISK else stored
        return self.raw_bytes(tier) / stored if stored else 0.0

    def raw_bytes(self, tier: Tier) -> int:
        """Bytes that the tokens of a tier's blocks would take as uniform raw rows."""
        pool = self.pools.get((Form.BLOCK, tier))
        return pool.used * self.block_tokens * self.raw_token_bytes if pool is not None else 0

    @property
    def index_mismatch(self) -> float:
        """Blocks refused for their index / blocks looked up; 0 where none was."""
        refused = self.prompts.refused + self.tiers.refused[Kind.INDEXER]
        return refused / self.prompts.looked_up if self.prompts.looked_up else 0.0

    @property
    def tail_recomputation(self) -> float:
        """Prompts whose sequence state was recomputed / prompts with a hit; 0 before the first."""
        return self.prompts.rebuilt / self.prompts.hits if self.prompts.hits else 0.0


def measure(engine: Engine) -> Numbers:
    """An engine's numbers. On its thread, or under its ``turn_lock``; walks all entries."""
    runner, allocator = engine.runner, engine.runner.allocator
    geometry, mover = runner.model.geometry, runner.mover
    store = mover.store if mover is not None else None
    tiers = TierCounters() if mover is None else mover.counters
    return Numbers(
        taken=time.monotonic(),
        counters=dataclasses.replace(
            engine.counters,
            ended={finish: engine.counters.ended[finish] for finish in Finish},
            first_token=engine.counters.first_token.copy(),
            between_tokens=engine.counters.between_tokens.copy(),
            restore_seconds=_copies(engine.counters.restore_seconds),
        ),
        tiers=_copied(tiers),
        stages=engine.stages(),
        slots=runner.sizes.capacity.slots,
        free_slots=runner.free_slots,
        idle_queue=engine.idle_queued,
        store_queues=dict(mover.queued) if mover is not None else {},
        pools=_pools(allocator),
        block_tokens=geometry.block_tokens,
        place_bytes=_place_bytes(geometry),
        raw_token_bytes=_raw_token_bytes(geometry),
        store_bytes=store.bytes_used if store is not None else 0,
    )


def _copies(durations: Mapping[str, Durations]) -> dict[str, Durations]:
    return {key: each.copy() for key, each in durations.items()}


def _copied(tiers: TierCounters) -> TierCounters:
    fields: dict[str, Any] = {
        name: dict(value) for name, value in vars(tiers).items() if isinstance(value, dict)
    }
    fields["load_seconds"] = {tier: each.copy() for tier, each in tiers.load_seconds.items()}
    return dataclasses.replace(tiers, **fields)


def _pools(allocator: Allocator) -> dict[tuple[Form, Tier], PoolNumbers]:
    columns, found = allocator.entries, {}
    unleased = columns.leases == 0
    for tier in Tier:
        shown = columns.published & (columns.state[tier] == TierState.PRESENT)
        for form in Form:
            pool = allocator.pools[tier][form]
            if not pool.capacity:
                continue
            here = shown & (columns.form == form)
            found[form, tier] = PoolNumbers(
                capacity=pool.capacity,
                used=pool.used,
                reserved=pool.reserved,
                published=int(np.count_nonzero(here)),
                idle=int(np.count_nonzero(here & unleased)),
                evictable=allocator.evictable(form, tier),
            )
    return found


def _place_bytes(geometry: Geometry) -> dict[Kind, int]:
    rows = {k: int(v * geometry.block_tokens) for k, v in geometry.bytes_per_token.items()}
    states = snapshot_bytes(geometry) if snapshot_kinds(geometry) else {}
    wanted = (*block_kinds(geometry), *snapshot_kinds(geometry))
    return {kind: size for kind, size in {**rows, **states}.items() if kind in wanted}


def _raw_token_bytes(geometry: Geometry) -> int:
    """Of a model with one attention kind its rows are raw already."""
    raw = generic_geometry(geometry) if snapshot_kinds(geometry) else geometry
    return int(sum(raw.bytes_per_token.values()))


class Reader:
    """Numbers of one engine for other threads."""

    def __init__(self, engine: Engine) -> None:
        """Registers itself at ``engine.on_turn``. Use ``reader_of``: one an engine is enough."""
        self._engine = weakref.ref(engine)
        self._wanted = False
        self._answered = threading.Event()
        self._one = threading.Lock()
        self._last: Numbers | None = None
        engine.on_turn.append(self._tell)

    def _tell(self) -> None:
        """On the engine's thread, after each turn."""
        if self._wanted:
            engine = self._engine()
            assert engine is not None
            self._last, self._wanted = measure(engine), False
            self._answered.set()

    def read(self, *, wait_s: float = 2.0) -> Numbers:
        """Numbers of now; where a turn takes longer than ``wait_s``, of the last time.

        From any thread, also the engine's own between turns.

        Raises:
          TimeoutError: the first turn that is ever waited for takes longer.
        """
        engine = self._engine()
        if engine is None:
            raise ReferenceError("the engine is gone")
        with self._one:
            if not self._look(engine.turn_lock, lambda: measure(engine), wait_s):
                self._wanted = False
                if self._last is None:
                    raise TimeoutError(f"the engine's turn takes longer than {wait_s} s")
            assert self._last is not None
            return self._last

    def _look(self, lock: threading.Lock, now: Callable[[], Numbers], wait_s: float) -> bool:
        """Whether there are new numbers: the engine's answer, or what is seen while it is idle."""
        self._answered.clear()
        self._wanted = True
        end = time.monotonic() + wait_s
        while True:
            if lock.acquire(blocking=False):
                try:
                    self._wanted = False
                    self._last = now()
                finally:
                    lock.release()
                return True
            if self._answered.wait(min(0.01, max(end - time.monotonic(), 0.0))):
                return True
            if time.monotonic() >= end:
                return False


_READERS: "weakref.WeakKeyDictionary[Engine, Reader]" = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def reader_of(engine: Engine) -> Reader:
    """The engine's reader; made on the first call, from any thread."""
    with _MAKING:
        if engine not in _READERS:
            _READERS[engine] = Reader(engine)
        return _READERS[engine]
