"""Every state that a small world of the allocator can reach, with ``check`` after each event.

The world: two requests and one mover that copies between tiers act on the real ``Allocator``, one
event at a time and in every order, also where a call must be refused; a refused call must leave
everything as it was. By default the device has 2 blocks and 1 snapshot, the host 1 block and the
disk 1 snapshot, so that a block and the snapshot on it lie on different tiers.

Reductions, which bound the world and say what it means that it is complete:

- Entry ids, places, serials and the two requests are interchangeable: states that differ only in
  such names are one. Generations, clocks, uses and digests are left out of a state.
- Which leaf goes first is chosen freely (one event for each choice) instead of by a policy, so that
  what holds here holds under every policy.
- At most ``ids`` entries live at once, by default 2 blocks and a snapshot in any mixture. A call
  names one entry, except that a reader leases a published entry with all that leads to it.
- A request is idle, or writes (one reservation, the entries it took), or reads (one receipt), and
  cancels a reservation once it is spent. That it reads and writes at once adds nothing, since the
  allocator does not know who holds a lease; the other request plays that part.
- The mover copies or drains published entries, one copy at a time. It leases, reserves and fills in
  one event, and gives its leases back in the event that commits or aborts the copy.

Detaching, splitting and resets, longer calls and larger pools are left to tests with random events.
"""

import dataclasses
import hashlib
import itertools
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from jaxtyping import Float64, Int32

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import FORM_BITS, NONE, Entries, EntryError, Form, Tier
from hybridkv.blocks.invariants import InvariantError, check
from hybridkv.blocks.leases import LeaseError, Receipt
from hybridkv.blocks.pools import NoRoom, PoolSizes, Reservation, ReservationError
from hybridkv.blocks.transitions import TierState, TransitionError

SIZES: Mapping[Tier, PoolSizes] = {
    Tier.DEVICE: PoolSizes(blocks=2, snapshots=1),
    Tier.HOST: PoolSizes(blocks=1, snapshots=0),
    Tier.DISK: PoolSizes(blocks=0, snapshots=1),
}
REQUESTS = 2
_ASKED = ({"blocks": 1}, {"blocks": 1, "snapshots": 1})
"""What a request may reserve at once."""
_Reached = dict[bytes, tuple[bytes, "_Event"] | None]
"""Each state and how it was reached first: from which one, by which event."""
_REFUSALS = (NoRoom, ReservationError, EntryError, LeaseError, TransitionError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exploration:
    """What was found; every state passed ``check``."""

    states: int
    """Distinct states, the empty one included."""
    transitions: int
    """Events that happened, over all states."""
    refused: int
    """Events that the allocator refused, leaving the state as it was."""
    complete: bool
    """Whether no state was left unexplored."""


class ChosenFirst:
    """An eviction policy that gives up one entry before all others."""

    def __init__(self) -> None:
        self.entry = NONE

    def value(
        self, entries: Entries, ids: Int32[np.ndarray, " n"], now: float
    ) -> Float64[np.ndarray, " n"]:
        """0 for the chosen entry, 1 for others."""
        return np.where(ids == self.entry, 0.0, 1.0)


def _no_clock() -> float:
    return 0.0


@dataclasses.dataclass
class _Actor:
    """A request, or the mover: what it holds."""

    reservation: Reservation | None = None
    receipts: list[Receipt] = dataclasses.field(default_factory=list)

    def holds(self, entry: int) -> bool:
        return any(entry in receipt.entries for receipt in self.receipts)


class _World:
    """An allocator and the actors on it."""

    def __init__(self, sizes: Mapping[Tier, PoolSizes], requests: int) -> None:
        self.policy = ChosenFirst()
        self.allocator = Allocator(sizes, policy=self.policy, clock=_no_clock)
        self.requests = [_Actor() for _ in range(requests)]
        self.mover = _Actor()

    # Events of a request.

    def reserve(self, number: int, first: int, asked: Mapping[str, int]) -> None:
        self.policy.entry = first
        self.requests[number].reservation = self.allocator.reserve(
            blocks=asked.get("blocks", 0), snapshots=asked.get("snapshots", 0)
        )

    def take(self, number: int, form: Form) -> None:
        """A request whose reservation is spent cancels it at once."""
        actor = self.requests[number]
        assert actor.reservation is not None
        actor.receipts.append(self.allocator.take(actor.reservation, form, 1))
        if not any(self.allocator.reservations.remaining(actor.reservation).values()):
            self.cancel(number)

    def cancel(self, number: int) -> None:
        actor = self.requests[number]
        assert actor.reservation is not None
        self.allocator.cancel(actor.reservation)
        actor.reservation = None

    def lease(self, number: int, ids: tuple[int, ...]) -> None:
        self.requests[number].receipts.append(self.allocator.lease(np.asarray(ids, np.int32)))

    def release(self, number: int, at: int) -> None:
        self.allocator.release(self.requests[number].receipts[at])
        del self.requests[number].receipts[at]

    def commit(self, entry: int, tier: Tier) -> None:
        form = Form(self.allocator.entries.form[entry])
        self.allocator.commit(_one(entry), FORM_BITS[form], tier)
        self._moved(entry)

    def abort(self, entry: int, tier: Tier) -> None:
        self.allocator.abort(_one(entry), tier)
        self._moved(entry)

    def _moved(self, entry: int) -> None:
        if self.mover.holds(entry):
            self.allocator.release(self.mover.receipts.pop())

    # Events of nobody in particular.

    def attach(self, entry: int, parent: int) -> None:
        self.allocator.attach(_one(entry), _one(parent))

    def attach_snapshot(self, entry: int, block: int) -> None:
        self.allocator.attach_snapshot(entry, block)

    def evict(self, form: Form, tier: Tier, first: int) -> None:
        self.policy.entry = first
        before = self.allocator.available(form, tier)
        self.allocator.evict(**_count(form), tier=tier)
        if self.allocator.available(form, tier) <= before:
            raise InvariantError("an eviction freed no place")

    def fill(self, entry: int, tier: Tier, first: int) -> None:
        """A copy begins. Leases before it reserves, since that may evict what it copies."""
        self.policy.entry = first
        held = self.allocator.lease(_one(entry))
        try:
            form = Form(self.allocator.entries.form[entry])
            reservation = self.allocator.reserve(**_count(form), tier=tier)
            try:
                self.mover.receipts.append(self.allocator.fill(reservation, _one(entry)))
            finally:
                self.allocator.cancel(reservation)
        finally:
            self.allocator.release(held)

    def drain(self, entry: int, tier: Tier) -> None:
        self.allocator.drain(_one(entry), tier)


_Event = tuple[str, tuple[object, ...]]


def _one(entry: int) -> Int32[np.ndarray, " 1"]:
    return np.asarray([entry], np.int32)


def _count(form: Form) -> dict[str, int]:
    return {"blocks": 1} if form == Form.BLOCK else {"snapshots": 1}


# Which events there are in a state, refused ones among them.


def _events(world: _World, ids: int) -> Iterator[_Event]:
    columns = world.allocator.entries
    live = np.flatnonzero(columns.state.any(axis=0)).tolist()
    yield from _request_events(world, live, ids)
    for entry in live:
        yield from _entry_events(world, entry, live)
    for tier, form in _pools(world):
        yield from (("evict", (form, tier, first)) for first in _first(world, form, tier))


def _request_events(world: _World, live: list[int], ids: int) -> Iterator[_Event]:
    columns = world.allocator.entries
    for number, actor in enumerate(world.requests):
        yield from (("release", (number, at)) for at in range(len(actor.receipts)))
        if actor.reservation is not None:
            yield "cancel", (number,)
            if len(live) < ids:
                yield from (("take", (number, form)) for form in Form)
        elif not actor.receipts:
            for asked in _ASKED:
                for first in _first(world, Form.BLOCK, Tier.DEVICE):
                    yield "reserve", (number, first, asked)
            for entry in live:
                if columns.published[entry]:
                    yield "lease", (number, _prefix(columns, entry))


def _entry_events(world: _World, entry: int, live: list[int]) -> Iterator[_Event]:
    columns = world.allocator.entries
    form, published = columns.form[entry], bool(columns.published[entry])
    for tier, of_form in _pools(world):
        if form != of_form:
            continue
        yield "commit", (entry, tier)
        yield "abort", (entry, tier)
        if published:
            yield "drain", (entry, tier)
            if columns.state[tier, entry] == TierState.ABSENT and not world.mover.receipts:
                yield from (("fill", (entry, tier, first)) for first in _first(world, form, tier))
    yield "attach", (entry, NONE)
    for other in live if not published else ():
        yield ("attach" if form == Form.BLOCK else "attach_snapshot"), (entry, other)


def _pools(world: _World) -> Iterator[tuple[Tier, Form]]:
    for tier, forms in world.allocator.pools.items():
        yield from ((tier, form) for form, pool in forms.items() if pool.capacity)


def _first(world: _World, form: Form, tier: Tier) -> list[int]:
    """Entries that may be given up first; one stands for all where there is no choice."""
    columns = world.allocator.entries
    idle = columns.published & (columns.form == form) & (columns.leases == 0)
    idle &= columns.state[tier] == TierState.PRESENT
    return np.flatnonzero(idle).tolist() or [NONE]


def _prefix(columns: Entries, entry: int) -> tuple[int, ...]:
    """What a reader leases to read up to an entry."""
    path = [entry]
    while columns.parent[path[-1]] != NONE:
        path.append(int(columns.parent[path[-1]]))
    return tuple(path)


# States.


def _state(world: _World) -> bytes:
    """A digest of what a world is, up to names: equal for states that differ only in those."""
    orders = itertools.permutations(world.requests)
    named = min(_named(world, [*order, world.mover]) for order in orders)
    return hashlib.blake2b(repr(named).encode(), digest_size=16).digest()


def _named(world: _World, actors: list[_Actor]) -> tuple[object, ...]:
    allocator = world.allocator
    columns = allocator.entries
    live = np.flatnonzero(columns.state.any(axis=0)).tolist()
    facts = _facts(columns, live, actors)
    below: dict[int, list[int]] = {entry: [] for entry in (NONE, *live)}
    for entry in live:
        below.setdefault(int(columns.parent[entry]), []).append(entry)

    def tree(entry: int) -> tuple[object, ...]:
        return facts[entry], tuple(sorted(map(tree, below[entry])))

    pools = tuple((len(p.places), p.reserved) for f in allocator.pools.values() for p in f.values())
    left = tuple(_left(allocator, actor) for actor in actors)
    return pools, len(allocator.ids), left, tuple(sorted(map(tree, below[NONE])))


def _facts(
    columns: Entries, live: list[int], actors: list[_Actor]
) -> dict[int, tuple[object, ...]]:
    """What is true of each entry alone, and which receipts name it."""
    own = [
        columns.form[live].tolist(),
        columns.kinds[live].tolist(),
        columns.state[:, live].T.tolist(),
        columns.leases[live].tolist(),
        columns.published[live].tolist(),
        columns.children[live].tolist(),
        (columns.snapshot[live] != NONE).tolist(),
    ]
    # Entries of one receipt are given back together: named by what the receipt holds.
    held: dict[int, list[list[int]]] = {entry: [[] for _ in actors] for entry in live}
    for number, actor in enumerate(actors):
        for receipt in actor.receipts:
            ids = receipt.entries.tolist()
            for entry in ids:
                held[entry][number].append(len(ids))
    return {e: (*row, held[e]) for e, *row in zip(live, *own, strict=True)}


def _left(allocator: Allocator, actor: _Actor) -> tuple[int, ...]:
    if actor.reservation is None:
        return ()
    left = allocator.reservations.left.get(actor.reservation.serial, {})
    return tuple(left.get(form, NONE) for form in Form)


def _content(allocator: Allocator) -> tuple[object, ...]:
    """All that a refused call must leave alone."""
    pools = [pool for forms in allocator.pools.values() for pool in forms.values()]
    lists = [allocator.ids, *(pool.places for pool in pools)]
    return (
        [array.tobytes() for _, array in allocator.entries.columns()],
        [numbers.free.tobytes() for numbers in lists],
        [pool.reserved for pool in pools],
        list(allocator.leases.open),
        [dict(left) for left in allocator.reservations.left.values()],
    )


# Exploring.


def explore(
    sizes: Mapping[Tier, PoolSizes] = SIZES,
    *,
    ids: int = 3,
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Exploration:
    """Visits every state that can be reached from the empty one, breadth first.

    Args:
      sizes: places of each tier.
      ids: most entries that live at once.
      limit: stops after so many states were expanded; None: when there are no more.
      progress: told states found and states left, now and then.

    Raises:
      InvariantError: a state is wrong, or a refused event changed something; a note on it lists the
        events that lead there.
    """
    world = _World(sizes, REQUESTS)
    check(world.allocator)
    start = _state(world)
    reached: _Reached = {start: None}
    left = deque([(start, pickle.dumps(world))])
    expanded = happened = refused = 0
    while left and (limit is None or expanded < limit):
        state, saved = left.popleft()
        expanded += 1
        if progress and expanded % 100 == 0:
            progress(len(reached), len(left))
        world = pickle.loads(saved)
        before = _content(world.allocator)
        for event in list(_events(world, ids)):
            try:
                if not _happens(world, event):
                    refused += 1
                    _demand_same(before, _content(world.allocator))
                    continue
                happened += 1
                after = _state(world)
                if after not in reached:
                    check(world.allocator)
                    reached[after] = (state, event)
                    left.append((after, pickle.dumps(world)))
            except InvariantError as error:
                error.add_note("after: " + "; ".join(_path(reached, state, event)))
                raise
            world = pickle.loads(saved)
    return Exploration(
        states=len(reached), transitions=happened, refused=refused, complete=not left
    )


def _happens(world: _World, event: _Event) -> bool:
    name, arguments = event
    try:
        getattr(world, name)(*arguments)
    except _REFUSALS:
        return False
    return True


def _demand_same(before: tuple[object, ...], after: tuple[object, ...]) -> None:
    if before != after:
        raise InvariantError("a refused event changed the state")


def _path(reached: _Reached, state: bytes, event: _Event) -> list[str]:
    """The events from the empty state, the last one included."""
    events = [event]
    before = reached[state]
    while before is not None:
        state, event = before
        events.append(event)
        before = reached[state]
    return [f"{name}{arguments}" for name, arguments in reversed(events)]
