"""A device of numpy words under a real mover: no model, nothing compiled, workers that obey.

Words follow from the digest they are published under, so that whatever is written to the device is
compared with what ought to be there, at the moment it is written.
"""

import contextlib
import dataclasses
import functools
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
import stores
from bookkeeping import give_up
from geometries import toy_geometry
from hand_workers import Hands

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import NONE, Form, Tier, kind_bits
from hybridkv.blocks.eviction import LeastRecentlyUsed
from hybridkv.blocks.invariants import check
from hybridkv.blocks.leases import Receipt
from hybridkv.blocks.pools import NoRoom, PoolSizes, Reservation
from hybridkv.blocks.transitions import TierState
from hybridkv.geometry import Geometry
from hybridkv.prefixes.directory import Directory
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds
from hybridkv.prefixes.plan import Miss, Plan, PlanOptions, plan_prefix
from hybridkv.state.packing import block_spans, snapshot_spans, words_of
from hybridkv.tiers.mover import Mover, Ticket
from hybridkv.tiers.options import NOTHING, TierOptions
from hybridkv.tiers.store import segments
from hybridkv.tiers.store.folder import Folder

GEOMETRY = toy_geometry()
BLOCK = TILE = GEOMETRY.block_tokens
MOVED = 3


def pools(blocks: int, snapshots: int = 8) -> PoolSizes:
    return PoolSizes(blocks=blocks, snapshots=snapshots)


def ids_of(blocks: int, seed: int = 0, *, rest: int = 3) -> np.ndarray:
    """A prompt of so many whole blocks and a rest."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 100, blocks * BLOCK + rest).astype(np.uint32)


@functools.lru_cache(4096)
def expected(form: Form, digest: bytes, words: int) -> np.ndarray:
    """The words of what is published under a digest."""
    make = stores.block_words if form == Form.BLOCK else stores.snapshot_words
    return make(digest, words)


class Wrong(BaseException):
    """A test failed in the middle of a mover, which survives every Exception."""


class FakeDevice:
    """Implements ``DeviceSide``; a place holds words or nothing."""

    def __init__(
        self,
        *,
        device: PoolSizes,
        host: PoolSizes = NOTHING,
        disk: PoolSizes = NOTHING,
        geometry: Geometry = GEOMETRY,
        debug: bool = True,
    ) -> None:
        self.geometry, self.moved_blocks = geometry, MOVED
        self.device = jax.devices()[0]
        self.now = 0.0
        self.sizes = {Tier.DEVICE: device, Tier.HOST: host, Tier.DISK: disk}
        self.identity = Identity.of_geometry(geometry, weights="w", numerics="n")
        self.words = {
            Form.BLOCK: words_of(block_spans(geometry)),
            Form.SNAPSHOT: words_of(snapshot_spans(geometry)),
        }
        self.kinds = {
            Form.BLOCK: kind_bits(block_kinds(geometry)),
            Form.SNAPSHOT: kind_bits(snapshot_kinds(geometry)),
        }
        self.inexact: set[int] = set()
        self.debug = debug
        self.writes = 0
        self.empty()

    def empty(self) -> None:
        """New bookkeeping: what a process has when it starts."""
        self.allocator = Allocator(
            self.sizes, policy=LeastRecentlyUsed(), clock=self.clock, debug=self.debug
        )
        self.directory = Directory(
            self.allocator,
            self.identity,
            block_tokens=self.geometry.block_tokens,
            required_kinds=self.kinds[Form.BLOCK] | self.kinds[Form.SNAPSHOT],
        )
        self.pool: dict[Form, dict[int, np.ndarray]] = {form: {} for form in Form}
        self.allocator.on_freed.append(self._freed)

    def clock(self) -> float:
        self.now += 1e-3
        return self.now

    def exact(self, entries: np.ndarray) -> np.ndarray:
        return ~np.isin(entries, list(self.inexact))

    def read_blocks(self, places: np.ndarray) -> Sequence[Any]:
        assert len(places) == self.moved_blocks
        return [self.pool[Form.BLOCK][int(place)].copy() for place in places]

    def write_blocks(self, blocks: Sequence[Any], places: np.ndarray) -> None:
        assert len(blocks) == len(places) == self.moved_blocks
        for words, place in zip(blocks, places.tolist(), strict=True):
            if place < self.sizes[Tier.DEVICE].blocks:
                self._write(Form.BLOCK, place, words)

    def read_snapshot(self, place: int) -> Any:
        return self.pool[Form.SNAPSHOT][place].copy()

    def write_snapshot(self, words: Any, place: int) -> None:
        self._write(Form.SNAPSHOT, place, words)

    def _write(self, form: Form, place: int, words: Any) -> None:
        """What is written belongs to one entry that waits for it, and is what it ought to be."""
        columns = self.allocator.entries
        here = (columns.place[Tier.DEVICE] == place) & (columns.form == form)
        owners = np.flatnonzero(here & (columns.state[Tier.DEVICE] == TierState.FILLING))
        if owners.size != 1 or not columns.leases[owners[0]]:
            raise Wrong(f"{form.name} {place} was written and is nobody's to write")
        want = expected(form, columns.digest[owners[0]].tobytes(), self.words[form])
        if not np.array_equal(np.asarray(words), want):
            raise Wrong(f"entry {owners[0]} was given other words than were published")
        self.pool[form][place] = np.asarray(words)
        self.writes += 1

    def _freed(self, tier: Tier, form: Form, places: np.ndarray) -> None:
        for place in places.tolist() if tier == Tier.DEVICE else ():
            self.pool[form].pop(place, None)

    def compute(self, entries: np.ndarray, digests: Sequence[bytes]) -> None:
        """Writes the words that belong to the digests, as steps do."""
        columns = self.allocator.entries
        for entry, digest in zip(entries.tolist(), digests, strict=True):
            form = Form(columns.form[entry])
            place = int(columns.place[Tier.DEVICE, entry])
            self.pool[form][place] = expected(form, digest, self.words[form])

    def check(self) -> None:
        """The invariants, and every word on the device."""
        check(self.allocator)
        columns = self.allocator.entries
        here = columns.published & (columns.state[Tier.DEVICE] == TierState.PRESENT)
        for entry in np.flatnonzero(here).tolist():
            form, place = Form(columns.form[entry]), int(columns.place[Tier.DEVICE, entry])
            want = expected(form, columns.digest[entry].tobytes(), self.words[form])
            np.testing.assert_array_equal(self.pool[form][place], want)


@dataclasses.dataclass(eq=False)
class FakeHold:
    """What ``Runner.hold`` takes."""

    chain: TokenChain
    plan: Plan | Miss
    shared: Receipt
    snapshot: Receipt | None
    reservation: Reservation


class World:
    """A device, its mover, and what an engine does with them."""

    def __init__(
        self,
        *,
        device: PoolSizes = PoolSizes(blocks=32, snapshots=8),
        host: PoolSizes = NOTHING,
        disk: PoolSizes = NOTHING,
        path: pathlib.Path | None = None,
        geometry: Geometry = GEOMETRY,
        by_hand: bool = True,
        debug: bool = True,
        **options: Any,
    ) -> None:
        """Workers by hand never wait, so that by default a load may stage all of itself."""
        self.device = FakeDevice(
            device=device, host=host, disk=disk, geometry=geometry, debug=debug
        )
        staged = {"staged": 10_000, "moves_a_turn": 10_000} if by_hand else {}
        self.options = TierOptions(host=host, disk=disk, path=path, **staged | options)
        self.by_hand = by_hand
        self.plan_options = PlanOptions(tile=geometry.block_tokens, loads=True)
        self.mover = self.start()

    def start(self) -> Mover:
        """A mover over the device's bookkeeping as it is."""
        workers = mock.patch("hybridkv.tiers.mover.Worker", Hands)
        with workers if self.by_hand else contextlib.nullcontext():
            return Mover(
                self.device, self.options, self.device.identity, clock=lambda: self.device.now
            )

    def restart(self, **changes: Any) -> None:
        """Another process on the same store, after an end in good order."""
        self.at_rest()
        assert self.mover.close(timeout_s=0.01)
        self.options = dataclasses.replace(self.options, **changes)
        self.device.sizes |= {Tier.HOST: self.options.host, Tier.DISK: self.options.disk}
        self.device.inexact = set()
        self.device.empty()
        self.mover = self.start()

    def reset(self) -> None:
        """As ``Runner.reset``."""
        self.mover.drop()
        self.device.inexact = set()
        self.device.empty()
        self.mover.bind()

    @property
    def allocator(self) -> Allocator:
        return self.device.allocator

    @property
    def entries(self) -> Any:
        return self.device.allocator.entries

    def chain(self, ids: np.ndarray, namespace: str = "") -> TokenChain:
        chain = self.device.directory.chain(namespace)
        chain.extend(ids)
        return chain

    def run(self, ids: np.ndarray, namespace: str = "") -> np.ndarray:
        """Entries of the blocks that are published."""
        return self.device.directory.find(self.chain(ids, namespace)).entries

    def snapshots(self, ids: np.ndarray, namespace: str = "") -> np.ndarray:
        found = self.device.directory.snapshot_at(self.run(ids, namespace))
        return found[found != NONE]

    def there(self, entries: np.ndarray, tier: Tier) -> list[bool]:
        return (self.entries.state[tier, entries] == TierState.PRESENT).tolist()

    def evict(self, tier: Tier = Tier.DEVICE) -> None:
        """Makes a tier give up all that it can."""
        give_up(self.allocator, tier)

    def count(self, tier: Tier) -> int:
        """Published entries that are whole on a tier."""
        whole = self.entries.published & (self.entries.state[tier] == TierState.PRESENT)
        return int(np.count_nonzero(whole))

    # Computing and publishing.

    def publish(
        self, ids: np.ndarray, *, snapshots: Sequence[int] = (), namespace: str = ""
    ) -> TokenChain:
        """Computes what is not on the device already and publishes it; snapshots by blocks.

        Raises:
          NoRoom: nothing was published.
        """
        chain, allocator = self.chain(ids, namespace), self.allocator
        run = self.device.directory.find(chain).entries
        here = np.array(self.there(run, Tier.DEVICE), bool)
        shared = run[: len(run) if here.all() else int(np.argmin(here))]
        held, first = allocator.lease(shared), len(shared)
        try:
            room = allocator.reserve(blocks=chain.blocks - first, snapshots=len(snapshots))
        except NoRoom:
            allocator.release(held)
            raise
        own = allocator.take(room, Form.BLOCK, chain.blocks - first)
        allocator.touch(shared)
        self.device.compute(own.entries, [d.tobytes() for d in chain.digests[first:]])
        if own.entries.size:
            allocator.commit(own.entries, self.device.kinds[Form.BLOCK])
            self.device.directory.publish(chain, first, own.entries)
        for blocks in snapshots:
            one = allocator.take(room, Form.SNAPSHOT, 1)
            self.device.compute(one.entries, [chain.digests[blocks - 1].tobytes()])
            allocator.commit(one.entries, self.device.kinds[Form.SNAPSHOT])
            self.device.directory.publish_snapshot(chain, blocks * BLOCK, int(one.entries[0]))
            allocator.release(one)
        allocator.cancel(room)
        allocator.release(own)
        allocator.release(held)
        self.mover.published(chain)
        return chain

    # Bringing.

    def plan(self, ids: np.ndarray, namespace: str = "", **changes: Any) -> Plan | Miss:
        return plan_prefix(
            self.device.directory,
            self.chain(ids, namespace),
            self.device.geometry,
            dataclasses.replace(self.plan_options, **changes),
        )

    def hold(self, ids: np.ndarray, namespace: str = "", **changes: Any) -> FakeHold:
        """As ``Runner.hold``, which raises NoRoom and holds nothing then."""
        allocator, plan = self.allocator, self.plan(ids, namespace, **changes)
        entries, loads = np.empty(0, np.int32), np.empty(0, np.int32)
        receipts = []
        if isinstance(plan, Plan):
            entries, loads = plan.entries, plan.loads
        receipts.append(allocator.lease(entries))
        if isinstance(plan, Plan) and plan.snapshot >= 0:
            receipts.append(allocator.lease(np.array([plan.snapshot], np.int32)))
        brought = int((self.entries.form[loads] == Form.BLOCK).sum())
        total = -(-(len(ids) + 1) // self.device.geometry.block_tokens)
        try:
            reservation = allocator.reserve(
                blocks=total - len(entries) + brought, snapshots=len(loads) - brought
            )
        except NoRoom:
            for receipt in receipts:
                allocator.release(receipt)
            raise
        return FakeHold(
            chain=self.chain(ids, namespace),
            plan=plan,
            shared=receipts[0],
            snapshot=receipts[1] if len(receipts) > 1 else None,
            reservation=reservation,
        )

    def drop(self, hold: FakeHold) -> None:
        self.allocator.cancel(hold.reservation)
        self.allocator.release(hold.shared)
        if hold.snapshot is not None:
            self.allocator.release(hold.snapshot)

    def begin(self, ids: np.ndarray, namespace: str = "") -> tuple[FakeHold, Ticket | None]:
        hold = self.hold(ids, namespace)
        return hold, self.mover.begin(hold)

    def end(self, hold: FakeHold, ticket: Ticket | None) -> None:
        """As an engine does when a restore is over, whatever became of it."""
        if ticket is not None:
            ticket.cancel()
        self.drop(hold)

    def bring(self, ids: np.ndarray, namespace: str = "") -> Plan | Miss:
        """Waits for what can be brought; the plan that is carried out then."""
        hold, ticket = self.begin(ids, namespace)
        self.settle(self._over(ticket))
        self.end(hold, ticket)
        return self.use(ids, namespace)

    def use(self, ids: np.ndarray, namespace: str = "") -> Plan | Miss:
        """What a prompt reuses of the device now, every word of it compared."""
        self.device.check()
        hold = self.hold(ids, namespace, loads=False)
        plan = hold.plan
        if isinstance(plan, Plan):
            assert not len(plan.loads)
            self.allocator.touch(plan.entries)
            if plan.snapshot >= 0:
                self.allocator.touch(np.array([plan.snapshot], np.int32))
        self.drop(hold)
        return plan

    def start_of(self, ids: np.ndarray, namespace: str = "") -> int:
        """Tokens that a prompt reuses after whatever can be brought was."""
        plan = self.bring(ids, namespace)
        return plan.start if isinstance(plan, Plan) else 0

    @staticmethod
    def _over(ticket: Ticket | None) -> Callable[[], bool]:
        return lambda: ticket is None or ticket.state().value != "pending"

    # Damage.

    def damage_host(self, entry: int, word: int = 0) -> None:
        """One bit of an entry's copy on the host is another."""
        form, place = Form(self.entries.form[entry]), int(self.entries.place[Tier.HOST, entry])
        held = self.mover._host.at(form, place)
        words = np.array(held.words)
        words[word] ^= 1
        self.mover._host.keep(place, dataclasses.replace(held, words=words))

    def damage_disk(self, entry: int, byte: int = -1) -> pathlib.Path:
        """One bit of an entry's words is another in the file that has them; the file."""
        store, digest = self.mover.store, self.entries.digest[entry].tobytes()
        assert store is not None
        size, first = 4 * self.device.words[Form(self.entries.form[entry])], 0
        if self.entries.form[entry] == Form.BLOCK:
            place = store.find(digest)
            assert place is not None
            file, first = store.path / "segments" / place.segment / "blocks", place.index * size
        else:
            file = store.path / "snapshots" / str(store.find_snapshot(digest)) / "snapshot"
        data = bytearray(file.read_bytes())
        data[first + byte % size] ^= 1
        file.write_bytes(data)
        return file

    # Getting on.

    @property
    def workers(self) -> tuple[Any, ...]:
        return self.mover._loader, self.mover._copier, self.mover._writer

    def settle(self, until: Callable[[], bool] | None = None, *, turns: int = 3000) -> None:
        """Turns, and all that workers have to do, until it holds or nothing is left."""
        until = until or (lambda: not self.mover.busy)
        for _ in range(turns):
            if until():
                return
            moved = self.mover.turn()
            if not self.by_hand and not moved:
                time.sleep(1e-3)
            elif self.by_hand:
                while any([worker.step() for worker in self.workers]):
                    pass
        raise AssertionError(f"not within {turns} turns")

    def stored(self) -> None:
        """Everything that waits is stored, or can't be."""
        self.settle()

    def at_rest(self) -> None:
        """Nothing is held by anyone, and all words are right."""
        self.mover.turn()
        self.settle()
        self.device.check()
        assert not self.allocator.leases.open
        assert not self.allocator.reservations.left
        assert not self.mover.busy


@contextlib.contextmanager
def quick_segments() -> Iterator[None]:
    """Stores write plain files in place of Orbax checkpoints, which take 20 ms each.

    Nothing waits until they are on the disk.
    """

    def save(path: pathlib.Path, leaf: str, array: np.ndarray) -> None:
        path.mkdir(parents=True)
        (path / leaf).write_bytes(array.tobytes())

    def start_read(path: pathlib.Path, leaf: str, shape: tuple[int, ...]) -> Any:
        return mock.Mock(
            result=lambda: np.frombuffer((path / leaf).read_bytes(), np.uint32).reshape(shape)
        )

    with (
        mock.patch.object(segments, "save", save),
        mock.patch.object(segments, "start_read", start_read),
        mock.patch.object(Folder, "sync"),
    ):
        yield
