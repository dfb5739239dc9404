"""The allocator against a model of dicts and sets, ``check`` after every rule.

The model says what each entry is, who holds it, how many places are free or promised and which
entries can go; which of them goes first is the policy's, so the model reads what went from the
allocator and checks that it was allowed to.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import FORM_BITS, NONE, EntryError, Form, Tier
from hybridkv.blocks.eviction import LeastRecentlyUsed, SecondsPerByte
from hybridkv.blocks.invariants import check
from hybridkv.blocks.leases import (
    DoubleRelease,
    LeaseError,
    ReleasedAfterEviction,
    StaleEntry,
    StaleReceipt,
)
from hybridkv.blocks.pools import NeverFits, NoRoom, PoolSizes, Reservation, ReservationError
from hybridkv.blocks.transitions import TierState, TransitionError

SIZES = {
    Tier.DEVICE: PoolSizes(blocks=5, snapshots=2),
    Tier.HOST: PoolSizes(blocks=2, snapshots=1),
}
TIERS = tuple(SIZES)
POLICIES = (
    LeastRecentlyUsed(),
    SecondsPerByte(block_seconds=1.0, block_bytes=3, snapshot_seconds=2.0, snapshot_bytes=1),
)
FILLING, PRESENT, DRAINING = TierState.FILLING, TierState.PRESENT, TierState.DRAINING
pick = st.integers(0, 63)
"""Which of the things there are, modulo how many."""
few = st.integers(0, 3)
rarely = st.integers(0, 5).map(lambda n: n == 5)
tiers = st.sampled_from(TIERS)


@dataclasses.dataclass
class Thing:
    """What the model knows of an entry that has a place somewhere."""

    form: Form
    generation: int
    state: dict[Tier, TierState]
    leases: int = 0
    published: bool = False
    parent: int = NONE
    kinds: int = 0

    def whole(self, tier=None):
        return self.state.get(tier) == PRESENT if tier is not None else PRESENT in self.values

    @property
    def values(self):
        return self.state.values()


@dataclasses.dataclass
class Held:
    """A receipt and what the model knows of it."""

    receipt: object
    entries: list[int]
    void: bool = False
    generations: tuple = ()


def ids(entries):
    return np.asarray(entries, np.int32)


def size(tier, form):
    return SIZES[tier].blocks if form == Form.BLOCK else SIZES[tier].snapshots


class Model(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.allocator = Allocator(SIZES, policy=POLICIES[0], clock=self.tick)
        self.allocator.on_evict.append(self.evicted)
        self.things: dict[int, Thing] = {}
        self.left: dict[Reservation, dict[Form, int]] = {}
        self.cancelled: list[Reservation] = []
        self.held: list[Held] = []
        self.returned: list[Held] = []
        self.seen: list[tuple[int, int]] = []
        """(entry, generation) of what lived at some time."""
        self.told: list[int] = []
        """What the callbacks heard in the current call."""

    def tick(self):
        self.now += 1.0
        return self.now

    def evicted(self, entries, tier, cause):
        for entry in entries.tolist():
            assert self.things[entry].published
            assert bool(self.allocator.entries.published[entry])
            assert cause == (
                "evicted:compressed"
                if self.things[entry].form == Form.BLOCK
                else "evicted:snapshot"
            )
        self.told += entries.tolist()

    # The model's view.

    def used(self, tier, form):
        return sum(t.form == form and tier in t.state for t in self.things.values())

    def promised(self, tier, form):
        return sum(n[form] for r, n in self.left.items() if r.tier == tier)

    def free(self, tier, form):
        return size(tier, form) - self.used(tier, form) - self.promised(tier, form)

    def children(self, entry):
        return [
            e
            for e, t in self.things.items()
            if t.published and t.parent == entry and t.form == Form.BLOCK
        ]

    def snapshot(self, entry):
        return next(
            (
                e
                for e, t in self.things.items()
                if t.published and t.parent == entry and t.form == Form.SNAPSHOT
            ),
            NONE,
        )

    def can_go(self, tier, form):
        """Ids that the tier can give up, by trying: the largest set closed under the rules."""
        idle = {
            e
            for e, t in self.things.items()
            if t.published and t.form == form and t.whole(tier) and not t.leases
        }
        if form == Form.SNAPSHOT:
            return idle
        while True:
            keep = {e for e in idle if not self.may_leave(e, tier, idle)}
            if not keep:
                return idle
            idle -= keep

    def may_leave(self, entry, tier, going):
        """Whether a block can be given up once all of ``going`` that stand on it are."""
        above = self.snapshot(entry)
        if above != NONE and self.things[above].leases:
            return False
        lost = not self.copied(entry, tier)
        for child in self.children(entry):
            here = tier in self.things[child].state
            if here and child not in going:
                return False
            if lost and (not here or self.copied(child, tier)):
                return False
        return True

    def copied(self, entry, tier):
        return any(s == PRESENT for t, s in self.things[entry].state.items() if t != tier)

    def settle(self, entries):
        for entry in entries:
            thing = self.things[entry]
            if thing.leases:
                continue
            for tier, state in list(thing.state.items()):
                if not (state == PRESENT and thing.published):
                    del thing.state[tier]
            if not thing.state:
                del self.things[entry]

    # Choosing.

    def some(self, at, count, right=None, anything=True):
        """Up to ``count`` distinct entries that live; only ``right`` ones unless ``anything``."""
        every = [e for e in sorted(self.things) if anything or right(self.things[e])]
        every = every or sorted(self.things)
        return [every[(at + i) % len(every)] for i in range(min(count, len(every)))]

    def alive(self, at, right=None, anything=True):
        return (*self.some(at, 1, right, anything), NONE)[0]

    def reserve(self, tier, blocks=0, snapshots=0):
        """A reservation that fits, or None."""
        before = len(self.left)
        self.make_room(blocks, snapshots, tier, False)
        return list(self.left)[-1] if len(self.left) > before else None

    # Whole stories, so that interesting states are common.

    @initialize(
        lengths=st.lists(st.integers(1, 3), max_size=3),
        under=pick,
        snapshots=st.integers(0, 7),
        copies=st.lists(st.integers(0, 63), max_size=2),
    )
    def begin(self, lengths, under, snapshots, copies):
        for i, length in enumerate(lengths):
            self.store(length, under, bool(snapshots >> i & 1), False)
        for at in copies if self.things else ():
            self.copy(at, Tier.HOST, at % 6)

    @rule(length=st.integers(1, 3), under=pick, snapshot=st.booleans(), keep=rarely)
    def store(self, length, under, snapshot, keep):
        """A request computes and publishes a few blocks and perhaps a snapshot at their end."""
        path = self.path(under)
        if path:
            self.hold(self.allocator.lease(ids(path)), path)
            for one in path:
                self.things[one].leases += 1
        reservation = self.reserve(Tier.DEVICE, length, int(snapshot))
        if reservation is not None:
            self.take(-1, Form.BLOCK, length, True)
            blocks = self.held[-1].entries
            self.publish(blocks, [(*path, NONE)[0], *blocks[:-1]])
            if snapshot:
                self.take(-1, Form.SNAPSHOT, 1, True)
                self.stand(self.held[-1].entries[0], blocks[-1])
                if not keep:
                    self.release(-1)
            self.cancel(-1)
            if not keep:
                self.release(-1)
        if path and not (keep and reservation):
            self.release(-1)

    def path(self, at):
        """A published block that is whole on the device, and those before it; or nothing."""
        every = [
            e
            for e, t in sorted(self.things.items())
            if t.published and t.form == Form.BLOCK and t.whole(Tier.DEVICE)
        ]
        at %= len(every) + 1
        path = every[at : at + 1]
        while path and self.things[path[-1]].parent != NONE:
            path.append(self.things[path[-1]].parent)
        return path

    @precondition(lambda self: any(t.published for t in self.things.values()))
    @rule(entry=pick, tier=tiers, end=st.integers(0, 5))
    def copy(self, entry, tier, end):
        """An entry is copied to another tier, or the copy fails or stays on its way."""
        entry = self.alive(
            entry, lambda t: t.published and t.whole() and tier not in t.state, False
        )
        thing = self.things[entry]
        if not thing.published or tier in thing.state or not thing.whole():
            return
        self.hold(self.allocator.lease(ids([entry])), [entry])
        thing.leases += 1
        held = self.held[-1]
        form = thing.form
        if self.reserve(tier, int(form == Form.BLOCK), int(form == Form.SNAPSHOT)) is not None:
            self.fill(-1, sorted(self.things).index(entry), 1)
            self.cancel(-1)
            if end == 0:
                self.abort_all([entry], tier)
            elif end > 1:
                self.commit_all([entry], tier)
            if end != 1:
                self.release(-1)
            if end > 3:
                self.drain_all([entry], next(t for t in thing.state if t != tier))
        self.release(self.held.index(held))

    # Room.

    @rule(
        blocks=st.sampled_from((0, 1, 1, 2, 3, 6)),
        snapshots=st.sampled_from((0, 0, 1, 2, 3)),
        tier=tiers,
        evicting=st.booleans(),
    )
    def make_room(self, blocks, snapshots, tier, evicting):
        wanted = {Form.BLOCK: blocks, Form.SNAPSHOT: snapshots}
        act = self.allocator.evict if evicting else self.allocator.reserve
        if not evicting and any(n > size(tier, f) for f, n in wanted.items()):
            with pytest.raises(NeverFits):
                act(blocks=blocks, snapshots=snapshots, tier=tier)
            return
        missing = {f: n if evicting else max(0, n - self.free(tier, f)) for f, n in wanted.items()}
        can_go = {f: self.can_go(tier, f) for f in wanted}
        if any(missing[f] > len(can_go[f]) for f in wanted):
            with pytest.raises(NoRoom) as refused:
                act(blocks=blocks, snapshots=snapshots, tier=tier)
            form = refused.value.form
            assert missing[form] > len(can_go[form]) == refused.value.evictable
            assert refused.value.free == self.free(tier, form)
            return
        reservation = act(blocks=blocks, snapshots=snapshots, tier=tier)
        self.expect_gone(tier, missing, can_go)
        if not evicting:
            self.left[reservation] = wanted

    def expect_gone(self, tier, missing, can_go):
        """Takes over what went, after checking that it was allowed to and no more than needed."""
        columns = self.allocator.entries
        gone = {e for e, t in self.things.items() if tier in t.state and not columns.state[tier, e]}
        lost = {e for e in self.things if not columns.state[:, e].any()}
        assert sorted(self.told) == sorted(lost)
        assert len(self.told) == len(lost)
        self.told.clear()
        blocks = {e for e in gone if self.things[e].form == Form.BLOCK}
        snapshots = gone - blocks
        assert blocks <= can_go[Form.BLOCK]
        assert snapshots <= can_go[Form.SNAPSHOT]
        assert len(blocks) == missing[Form.BLOCK]
        under = {self.snapshot(b) for b in blocks} & snapshots
        assert len(snapshots) == max(missing[Form.SNAPSHOT], len(under))
        for entry in blocks:
            assert (
                not [c for c in self.children(entry) if tier in self.things[c].state]
                or set(c for c in self.children(entry) if tier in self.things[c].state) <= blocks
            )
            above = self.snapshot(entry)
            assert above == NONE or tier not in self.things[above].state or above in gone
        for entry in lost - gone:
            thing = self.things[entry]
            assert thing.form == Form.SNAPSHOT
            assert thing.parent in lost
        for entry in lost:
            assert not set(self.children(entry)) - lost
        for entry in gone - lost:
            del self.things[entry].state[tier]
        for entry in lost:
            del self.things[entry]

    @precondition(lambda self: self.left)
    @rule(at=pick)
    def cancel(self, at):
        reservation = list(self.left)[at % len(self.left)]
        self.allocator.cancel(reservation)
        del self.left[reservation]
        self.cancelled.append(reservation)

    @precondition(lambda self: self.cancelled or self.returned)
    @rule(at=pick)
    def use_twice(self, at):
        if self.cancelled:
            reservation = self.cancelled[at % len(self.cancelled)]
            with pytest.raises(ReservationError):
                self.allocator.cancel(reservation)
            with pytest.raises(ReservationError):
                self.allocator.take(reservation, Form.BLOCK, 1)
        if self.returned:
            receipt = self.returned[at % len(self.returned)].receipt
            with pytest.raises(DoubleRelease):
                self.allocator.release(receipt)
            with pytest.raises(DoubleRelease):
                self.allocator.split(receipt, np.zeros(receipt.entries.shape, bool))

    # Entries.

    @precondition(lambda self: any(any(left.values()) for left in self.left.values()))
    @rule(at=pick, form=st.sampled_from(Form), count=st.integers(1, 3), whole=st.booleans())
    def take(self, at, form, count, whole):
        reservation = list(self.left)[at % len(self.left)]
        if at >= 8 and self.left[reservation][form]:
            count = min(count, self.left[reservation][form])
        if count > self.left[reservation][form]:
            with pytest.raises(ReservationError):
                self.allocator.take(reservation, form, count)
            return
        receipt = self.allocator.take(reservation, form, count)
        self.left[reservation][form] -= count
        taken = receipt.entries.tolist()
        for entry, generation in zip(taken, receipt.generations.tolist(), strict=True):
            assert entry not in self.things
            assert (entry, generation) not in self.seen
            self.seen.append((entry, generation))
            self.things[entry] = Thing(
                form=form, generation=generation, state={reservation.tier: FILLING}, leases=1
            )
        self.hold(receipt, taken)
        if whole:
            self.commit_all(taken, reservation.tier)

    def hold(self, receipt, entries):
        assert receipt.entries.tolist() == entries
        self.held.append(Held(receipt, entries, generations=tuple(receipt.generations.tolist())))

    def commit_all(self, entries, tier):
        for form in Form:
            some = [e for e in entries if self.things[e].form == form]
            self.allocator.commit(ids(some), FORM_BITS[form], tier)
            for entry in some:
                self.things[entry].state[tier] = PRESENT
                self.things[entry].kinds = FORM_BITS[form]

    @precondition(lambda self: self.left and self.things)
    @rule(at=pick, entry=pick, count=st.integers(1, 2))
    def fill(self, at, entry, count):
        reservation = list(self.left)[at % len(self.left)]
        tier, some = reservation.tier, self.some(entry, count)
        things = [self.things[e] for e in some]
        counts = {f: sum(t.form == f for t in things) for f in Form}
        expected = None
        if any(tier in t.state for t in things):
            expected = TransitionError
        elif not all(t.whole() for t in things):
            expected = EntryError
        elif any(counts[f] > self.left[reservation][f] for f in Form):
            expected = ReservationError
        if expected:
            with pytest.raises(expected):
                self.allocator.fill(reservation, ids(some))
            return
        self.hold(self.allocator.fill(reservation, ids(some)), some)
        for thing in things:
            thing.state[tier] = FILLING
            thing.leases += 1
            self.left[reservation][thing.form] -= 1

    @precondition(lambda self: self.things)
    @rule(entry=pick, count=st.integers(1, 2), tier=tiers, wrong=rarely, anything=rarely)
    def commit(self, entry, count, tier, wrong, anything):
        some = self.some(entry, count, lambda t: t.state.get(tier) == FILLING, anything)
        things = [self.things[e] for e in some]
        kinds = FORM_BITS[Form(things[0].form ^ wrong)]
        expected = None
        if any(t.state.get(tier) != FILLING for t in things):
            expected = TransitionError
        elif any(kinds & ~FORM_BITS[t.form] or t.kinds not in (0, kinds) for t in things):
            expected = EntryError
        if expected:
            with pytest.raises(expected):
                self.allocator.commit(ids(some), kinds, tier)
            return
        self.allocator.commit(ids(some), kinds, tier)
        for thing in things:
            thing.state[tier], thing.kinds = PRESENT, kinds

    @precondition(lambda self: self.things)
    @rule(entry=pick, count=st.integers(1, 2), tier=tiers, anything=rarely)
    def abort(self, entry, count, tier, anything):
        some = self.some(entry, count, lambda t: t.state.get(tier) == FILLING, anything)
        if any(self.things[e].state.get(tier) != FILLING for e in some):
            with pytest.raises(TransitionError):
                self.allocator.abort(ids(some), tier)
            return
        self.abort_all(some, tier)

    def abort_all(self, some, tier):
        self.allocator.abort(ids(some), tier)
        for entry in some:
            self.things[entry].state[tier] = DRAINING
        self.settle(some)

    @precondition(lambda self: any(len(t.state) > 1 for t in self.things.values()))
    @rule(entry=pick, count=st.integers(1, 2), tier=tiers, anything=rarely)
    def drain(self, entry, count, tier, anything):
        some = self.some(entry, count, lambda t: t.whole(tier) and len(t.state) > 1, anything)
        things = [self.things[e] for e in some]
        expected = None
        if not all(t.whole(tier) for t in things):
            expected = TransitionError
        elif not all(self.copied(e, tier) for e in some):
            expected = EntryError
        if expected:
            with pytest.raises(expected):
                self.allocator.drain(ids(some), tier)
            return
        self.drain_all(some, tier)

    def drain_all(self, some, tier):
        self.allocator.drain(ids(some), tier)
        for entry in some:
            self.things[entry].state[tier] = DRAINING
        self.settle(some)

    # Leases.

    @precondition(lambda self: self.things)
    @rule(entry=pick, count=st.integers(1, 3), expected=st.booleans())
    def lease(self, entry, count, expected):
        some = self.some(entry, count)
        things = [self.things[e] for e in some]
        generations = ids([t.generation for t in things]) if expected else None
        if not all(set(t.values) - {DRAINING} for t in things):
            with pytest.raises(EntryError):
                self.allocator.lease(ids(some), generations)
            return
        self.hold(self.allocator.lease(ids(some), generations), some)
        for thing in things:
            thing.leases += 1

    @precondition(lambda self: self.seen)
    @rule(at=pick, by_generation=st.booleans())
    def lease_what_was_seen(self, at, by_generation):
        entry, generation = self.seen[at % len(self.seen)]
        thing = self.things.get(entry)
        if thing is not None and thing.generation == generation:
            return
        if by_generation and generation != self.allocator.entries.generation[entry]:
            with pytest.raises(StaleEntry):
                self.allocator.lease(ids([entry]), ids([generation]))
        elif thing is None:
            with pytest.raises(EntryError):
                self.allocator.lease(ids([entry]), ids([generation]) if by_generation else None)

    @precondition(lambda self: self.held)
    @rule(at=pick)
    def release(self, at):
        held = self.held.pop(at % len(self.held))
        self.returned.append(held)
        if held.void:
            self.release_void(held)
            return
        self.allocator.release(held.receipt)
        for entry in held.entries:
            self.things[entry].leases -= 1
        self.settle(held.entries)

    def release_void(self, held):
        now = self.allocator.entries.generation[held.entries].tolist()
        if not held.entries:
            self.allocator.release(held.receipt)
        elif tuple(now) != held.generations:
            with pytest.raises(StaleReceipt):
                self.allocator.release(held.receipt)
        else:
            with pytest.raises(ReleasedAfterEviction):
                self.allocator.release(held.receipt)

    @precondition(lambda self: self.held)
    @rule(at=pick, bits=st.integers(0, 7))
    def split(self, at, bits):
        at %= len(self.held)
        held = self.held[at]
        mask = np.asarray([bits >> i & 1 for i in range(len(held.entries))], bool)
        if held.void:
            with pytest.raises(LeaseError):
                self.allocator.split(held.receipt, mask)
            return
        parts = self.allocator.split(held.receipt, mask)
        self.returned.append(self.held.pop(at))
        for receipt, flags in zip(parts, (mask, ~mask), strict=True):
            self.hold(receipt, [e for e, f in zip(held.entries, flags, strict=True) if f])

    @precondition(lambda self: self.things)
    @rule(entry=pick)
    def touch(self, entry):
        self.allocator.touch(ids([self.alive(entry)]))

    # Publication.

    @precondition(lambda self: any(t.form == Form.BLOCK for t in self.things.values()))
    @rule(entry=pick, count=st.integers(1, 3), parent=pick, anything=rarely)
    def attach(self, entry, count, parent, anything):
        some = self.some(
            entry,
            count,
            lambda t: t.form == Form.BLOCK and not t.published and t.whole(),
            anything,
        )
        path = self.path(parent)
        first = self.alive(parent) if anything else (*path, NONE)[0]
        parents = [first, *some[:-1]]
        right = all(
            self.things[e].form == Form.BLOCK
            and not self.things[e].published
            and self.things[e].whole()
            for e in some
        )
        if first != NONE:
            above = self.things[first]
            right &= above.published and above.form == Form.BLOCK and above.whole()
        if not right:
            with pytest.raises(EntryError):
                self.allocator.attach(ids(some), ids(parents))
            return
        self.publish(some, parents)

    def publish(self, blocks, parents):
        self.allocator.attach(ids(blocks), ids(parents))
        for one, under in zip(blocks, parents, strict=True):
            self.things[one].published, self.things[one].parent = True, under

    @precondition(lambda self: any(t.form == Form.SNAPSHOT for t in self.things.values()))
    @rule(entry=pick, block=pick, anything=rarely)
    def attach_snapshot(self, entry, block, anything):
        entry = self.alive(entry, lambda t: t.form == Form.SNAPSHOT and not t.published, anything)
        block = self.alive(block, lambda t: t.published and t.form == Form.BLOCK, anything)
        thing, under = self.things[entry], self.things[block]
        right = thing.form == Form.SNAPSHOT and not thing.published and thing.whole()
        right = right and under.published
        right = right and under.form == Form.BLOCK and self.snapshot(block) == NONE
        if not right:
            with pytest.raises(EntryError):
                self.allocator.attach_snapshot(entry, block)
            return
        self.stand(entry, block)

    def stand(self, snapshot, block):
        self.allocator.attach_snapshot(snapshot, block)
        self.things[snapshot].published, self.things[snapshot].parent = True, block

    @precondition(lambda self: any(t.published for t in self.things.values()))
    @rule(entry=pick, count=st.integers(1, 3), anything=rarely)
    def detach(self, entry, count, anything):
        some = self.some(entry, count, lambda t: t.published, anything)
        if not anything:
            some = self.over(some[0]) if self.things[some[0]].published else some
        standing = {c for e in some for c in (*self.children(e), self.snapshot(e))} - {NONE}
        if not all(self.things[e].published for e in some) or standing - set(some):
            with pytest.raises(EntryError):
                self.allocator.detach(ids(some))
            return
        self.allocator.detach(ids(some))
        for one in some:
            self.things[one].published, self.things[one].parent = False, NONE
        self.settle(some)

    def over(self, entry):
        """A published entry and all that stands on it."""
        if entry == NONE:
            return []
        above = [e for c in self.children(entry) for e in self.over(c)]
        return [entry, *self.over(self.snapshot(entry)), *above]

    @precondition(lambda self: len(self.seen) > 4)
    @rule(really=pick)
    def reset(self, really):
        if really % 4:
            return
        self.allocator.reset()
        shown = {e for e, t in self.things.items() if t.published}
        assert sorted(self.told) == sorted(shown)
        self.told.clear()
        self.things.clear()
        self.cancelled += self.left
        self.left.clear()
        for held in self.held:
            held.void = True

    @rule(policy=st.sampled_from(POLICIES))
    def change_policy(self, policy):
        self.allocator._policy = policy

    # After every rule.

    @invariant()
    def agrees(self):
        check(self.allocator)
        columns = self.allocator.entries
        assert np.flatnonzero(columns.state.any(axis=0)).tolist() == sorted(self.things)
        for entry, thing in self.things.items():
            assert columns.form[entry] == thing.form
            assert columns.generation[entry] == thing.generation
            states = {t: TierState(columns.state[t, entry]) for t in Tier}
            assert {t: s for t, s in states.items() if s} == thing.state
            assert columns.leases[entry] == thing.leases
            assert columns.published[entry] == thing.published
            assert columns.parent[entry] == thing.parent
            assert columns.children[entry] == len(self.children(entry))
            assert columns.snapshot[entry] == self.snapshot(entry)
            assert columns.kinds[entry] == thing.kinds
        for tier in TIERS:
            for form in Form:
                assert self.allocator.available(form, tier) == self.free(tier, form)
                assert self.allocator.evictable(form, tier) == len(self.can_go(tier, form))
        assert self.told == []


TestAllocatorAgainstAModel = Model.TestCase
TestAllocatorAgainstAModel.settings = settings(
    max_examples=2000,
    stateful_step_count=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
