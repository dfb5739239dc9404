"""Random publishing, evicting, loading, leaving and damage, with workers in any order.

Every word that is written to the device is compared with what was published under its digest, at
the moment it is written; the bookkeeping is walked after every step; at the end all is at rest.
"""

import contextlib
import pathlib
import tempfile

import numpy as np
from fake_device import BLOCK, World, pools, quick_segments
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.pools import NoRoom
from hybridkv.blocks.transitions import TierState
from hybridkv.prefixes.plan import Plan
from hybridkv.tiers.tickets import RestoreState

PROMPTS = (0, 0, 0, 0, 0, 0), (0, 0, 0, 1, 1), (1, 1, 1, 1), (0, 1)
PATHS = st.sampled_from(PROMPTS)
"""The kind of each block: few, so that prompts share beginnings and come again."""
MOST_HELD = 3


def ids(path: tuple[int, ...]) -> np.ndarray:
    return np.append(np.repeat(np.asarray(path, np.uint32), BLOCK), np.uint32(7))


class MoverMachine(RuleBasedStateMachine):
    """A device of 14 blocks, a host of 8, a disk of 12; fewer snapshots than blocks."""

    @initialize(host=st.booleans(), disk=st.booleans())
    def make(self, host, disk):
        self.quick = quick_segments()
        self.quick.__enter__()
        self.folder = tempfile.TemporaryDirectory()
        more = {"host": pools(8, 3)} if host or not disk else {}
        if disk:
            more |= {"disk": pools(12, 4), "path": pathlib.Path(self.folder.name) / "s"}
        # What is dead is written anew at once, whatever is under way.
        compact = {"compact_share": 0.001}
        self.world = World(device=pools(14, 4), debug=False, moves_a_turn=2, **compact, **more)
        self.held, self.resets = [], 0
        for path in PROMPTS[:2]:
            self.publish(path, {3, len(path)}, True)

    @rule(path=PATHS, snapshots=st.sets(st.integers(1, 6), max_size=2), stored=st.booleans())
    def publish(self, path, snapshots, stored):
        with contextlib.suppress(NoRoom):
            self.world.publish(ids(path), snapshots=sorted(n for n in snapshots if n <= len(path)))
            if stored:
                self.world.stored()
                self.world.evict()

    @rule(tier=st.sampled_from(Tier), blocks=st.integers(1, 6), snapshots=st.integers(0, 2))
    def evict(self, tier, blocks, snapshots):
        if tier == Tier.DEVICE:
            self.world.evict()  # all, so that something has to be loaded
            return
        allocator = self.world.allocator
        blocks = min(blocks, allocator.evictable(Form.BLOCK, tier))
        snapshots = min(snapshots, allocator.evictable(Form.SNAPSHOT, tier))
        allocator.evict(blocks=blocks, snapshots=snapshots, tier=tier)

    @precondition(lambda self: len(self.held) < MOST_HELD)
    @rule(path=PATHS, ahead=st.booleans())
    def begin(self, path, ahead):
        plan = self.world.plan(ids(path))
        if ahead and isinstance(plan, Plan):
            self.world.mover.wanted(plan)
        try:
            hold = self.world.hold(ids(path))
        except NoRoom:
            return
        self.held.append((hold, self.world.mover.begin(hold)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data):
        self.world.end(*self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @rule(turns=st.integers(1, 12))
    def go_on(self, turns):
        for _ in range(turns):
            self.world.mover.turn()
            for worker in self.world.workers:
                worker.step()

    @rule(number=st.integers(0, 2), job=st.integers(0, 3))
    def work(self, number, job):
        """Jobs of a worker in order, but for loads, of which any may be the most urgent."""
        worker = self.world.workers[number]
        worker.step(job if number == 0 and job < len(worker.jobs) else None)

    @rule(tier=st.sampled_from([Tier.HOST, Tier.DISK]), data=st.data())
    def damage(self, tier, data):
        columns = self.world.entries
        whole = np.flatnonzero(
            columns.published & (columns.state[tier] == TierState.PRESENT)
        ).tolist()
        if not whole:
            return
        entry = data.draw(st.sampled_from(whole))
        if tier == Tier.HOST:
            self.world.damage_host(entry, data.draw(st.integers(0, 100)))
        elif self.on_disk(entry):
            self.world.damage_disk(entry)

    def on_disk(self, entry):
        store, digest = self.world.mover.store, self.world.entries.digest[entry].tobytes()
        block = self.world.entries.form[entry] == Form.BLOCK
        return (store.find(digest) if block else store.find_snapshot(digest)) is not None

    @precondition(lambda self: self.resets < 2)
    @rule()
    def reset(self):
        self.held.clear()  # an engine ends its requests first
        self.world.reset()
        self.resets += 1

    @invariant()
    def everything_is_in_order(self):
        if not hasattr(self, "world"):
            return
        self.world.device.check()
        for hold, ticket in self.held:
            if ticket is not None and ticket.state() is RestoreState.READY:
                assert all(self.world.there(hold.plan.loads, Tier.DEVICE))

    def teardown(self):
        if not hasattr(self, "world"):
            return
        world = self.world
        world.settle(lambda: all(t is None or t.state().value != "pending" for _, t in self.held))
        for hold, ticket in self.held:
            world.end(hold, ticket)
        world.at_rest()
        world.evict()
        for path in PROMPTS:
            world.bring(ids(path))
        world.at_rest()
        for tier in (Tier.HOST, Tier.DISK):
            assert world.count(tier) <= sum(p.used for p in world.allocator.pools[tier].values())
        if world.mover.store is not None:
            whole = world.entries.published & (world.entries.state[Tier.DISK] == TierState.PRESENT)
            assert all(self.on_disk(entry) for entry in np.flatnonzero(whole).tolist())
            # What is written while the bookkeeping is begun anew is found at the next start.
            store = world.mover.store
            assert self.resets or store.blocks + store.snapshots == world.count(Tier.DISK)
        world.mover.close(timeout_s=0.01)
        self.folder.cleanup()
        self.quick.__exit__(None, None, None)


TestMoverMachine = MoverMachine.TestCase
TestMoverMachine.settings = settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
