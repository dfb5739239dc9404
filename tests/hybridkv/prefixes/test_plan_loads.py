"""Where loads are open, the cheapest exact way over all tiers is taken and nothing else loaded."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from fake_device import FakeDevice, pools
from geometries import HOMOGENEOUS, toy_geometry
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.blocks.entries import NONE, Form, Tier, kind_bits
from hybridkv.blocks.transitions import TierState
from hybridkv.kinds import Kind
from hybridkv.prefixes.cost import CostModel
from hybridkv.prefixes.losses import Cause
from hybridkv.prefixes.needs import block_kinds, replay_start, snapshot_kinds
from hybridkv.prefixes.plan import Action, Miss, Outcome, Plan, PlanOptions, plan_prefix
from hybridkv.state.packing import snapshot_spans, words_of

GEOMETRY = toy_geometry()
FLAT = dataclasses.replace(HOMOGENEOUS, cells_per_block=GEOMETRY.block_tokens)
BLOCK = GEOMETRY.block_tokens
DEVICE, HOST, DISK = Tier
ANY = [c for n in (1, 2, 3) for c in itertools.combinations(Tier, n)]
IDS = np.random.default_rng(0).integers(0, 50, 200).astype(np.uint32)
SNAPSHOT_BYTES = 4 * words_of(snapshot_spans(GEOMETRY))


class Tiers(FakeDevice):
    """Published entries, each whole on the tiers that it is told."""

    def __init__(self, where, snapshots, geometry=GEOMETRY):
        room = pools(32, 32)
        super().__init__(device=room, host=room, disk=room, geometry=geometry, debug=False)
        self.prompt = IDS[: len(where) * BLOCK + 5]
        chain = self.chain(self.prompt)
        places = self.allocator.reserve(blocks=chain.blocks, snapshots=len(snapshots))
        own = self.allocator.take(places, Form.BLOCK, chain.blocks)
        self.allocator.commit(own.entries, self.kinds[Form.BLOCK])
        self.directory.publish(chain, 0, own.entries)
        for entry, tiers in zip(own.entries.tolist(), where, strict=True):
            self.put(entry, tiers)
        for blocks, tiers in snapshots.items():
            one = self.allocator.take(places, Form.SNAPSHOT, 1)
            self.allocator.commit(one.entries, self.kinds[Form.SNAPSHOT])
            self.directory.publish_snapshot(chain, blocks * BLOCK, int(one.entries[0]))
            self.put(int(one.entries[0]), tiers)
            self.allocator.release(one)
        self.allocator.release(own)
        self.allocator.cancel(places)
        self.run = own.entries

    def chain(self, ids):
        chain = self.directory.chain()
        chain.extend(ids)
        return chain

    def put(self, entry, tiers):
        one = np.array([entry], np.int32)
        block = self.allocator.entries.form[entry] == Form.BLOCK
        many = {"blocks": 1} if block else {"snapshots": 1}
        for tier in set(tiers) - {DEVICE}:
            receipt = self.allocator.fill(self.allocator.reserve(tier=tier, **many), one)
            self.allocator.commit(one, int(self.allocator.entries.kinds[entry]), tier)
            self.allocator.release(receipt)
        if DEVICE not in tiers:
            self.allocator.drain(one, DEVICE)

    def plan(self, options, ideal=None, tokens=None):
        ids = self.prompt if tokens is None else IDS[:tokens]
        return plan_prefix(self.directory, self.chain(ids), self.geometry, options, ideal=ideal)


@st.composite
def worlds(draw, geometry=GEOMETRY):
    count = draw(st.integers(1, 10))
    where = draw(st.lists(st.sampled_from(ANY), min_size=count, max_size=count))
    snapshots = {}
    if snapshot_kinds(geometry):
        snapshots = draw(st.dictionaries(st.integers(1, count), st.sampled_from(ANY), max_size=5))
    world = Tiers(where, snapshots, geometry)
    columns = world.allocator.entries
    for entry in draw(st.lists(st.sampled_from(range(count + len(snapshots))), max_size=1)):
        kind = draw(st.sampled_from([*block_kinds(GEOMETRY), *snapshot_kinds(GEOMETRY)]))
        columns.kinds[entry] &= np.uint8(0xFF ^ kind_bits((kind,)))
    return world


RATES = st.sampled_from([None, 1.0, 7e3, 1e4, 3e4, 1e9])


@st.composite
def choices(draw, snapshot_bytes=SNAPSHOT_BYTES):
    rates = {tier: draw(RATES) for tier in Tier}
    cost = CostModel(
        tile_seconds=draw(st.sampled_from([0.25, 1.0])),
        bytes_per_second={tier: rate for tier, rate in rates.items() if rate},
        queue_seconds=draw(st.sampled_from([0.0, 0.1, 0.6])),
    )
    return PlanOptions(
        tile=draw(st.sampled_from([BLOCK, 2 * BLOCK])),
        snapshot_bytes=snapshot_bytes,
        loads=draw(st.sampled_from([True, True, False])),
        load_snapshots=draw(st.sampled_from([True, True, False])),
        cost=cost,
        replay=draw(st.booleans()),
    )


class Judge:
    """What every way costs, by the words of the design and nothing of the planner."""

    def __init__(self, world, options):
        self.world, self.options, self.cost = world, options, options.cost
        self.columns, self.geometry = world.allocator.entries, world.geometry

    def tier_of(self, entry, *, snapshot=False):
        """The fastest tier that may be used, None for none."""
        open_ = self.options.loads and (not snapshot or self.options.load_snapshots)
        for tier in Tier if open_ else (DEVICE,):
            if self.columns.state[tier, entry] == TierState.PRESENT:
                return tier
        return None

    def has(self, entry, kinds):
        return int(self.columns.kinds[entry]) & kind_bits(kinds) == kind_bits(kinds)

    def whole(self, entry, *, snapshot=False):
        kinds = snapshot_kinds if snapshot else block_kinds
        there = self.tier_of(entry, snapshot=snapshot) is not None
        return there and self.has(entry, kinds(self.geometry))

    def seconds(self, blocks, start, snapshot):
        """Blocks that are read, where computing begins, the snapshot or -1."""
        rates, total, waits = self.cost.bytes_per_second, 0.0, False
        sizes = [(e, self.geometry.block_bytes, False) for e in self.world.run[:blocks].tolist()]
        if snapshot != NONE:
            sizes.append((snapshot, self.options.snapshot_bytes, True))
            if DEVICE in rates:
                total += self.options.snapshot_bytes / rates[DEVICE]
        for entry, size, is_snapshot in sizes:
            tier = self.tier_of(entry, snapshot=is_snapshot)
            if tier is not DEVICE:
                waits = True
                total += size / rates[tier] if tier in rates else 0.0
        tiles = math.ceil((len(self.world.prompt) - start) / self.options.tile)
        return total + waits * self.cost.queue_seconds + tiles * self.cost.tile_seconds

    def ways(self):
        yield self.seconds(0, 0, NONE)
        tile, tokens = self.options.tile, len(self.world.prompt)
        for position in range(tile, tokens, tile):
            blocks = position // BLOCK
            if blocks > len(self.world.run) or not all(map(self.whole, self.world.run[:blocks])):
                return
            if not snapshot_kinds(self.geometry):
                yield self.seconds(blocks, position, NONE)
                continue
            snapshot = int(self.columns.snapshot[self.world.run[blocks - 1]])
            if snapshot != NONE and self.whole(snapshot, snapshot=True):
                yield self.seconds(blocks, position, snapshot)
            if self.options.replay:
                yield self.seconds(blocks, replay_start(self.geometry, position, tile), NONE)


def judged(world, options):
    """The plan, after everything about it was compared with a search over all ways."""
    found, judge = world.plan(options, ideal=len(world.prompt) - 1), Judge(world, options)
    best = min(judge.ways())
    assert found.seconds == pytest.approx(best)
    assert sum(loss.tokens for loss in found.losses) == found.ideal - (
        found.start if isinstance(found, Plan) else 0
    )
    if isinstance(found, Miss):
        return found
    blocks = found.shared // BLOCK
    assert found.entries.tolist() == world.run[:blocks].tolist()
    used = [*found.entries.tolist(), *[found.snapshot] * (found.snapshot != NONE)]
    away = [e for e in used if judge.columns.state[DEVICE, e] != TierState.PRESENT]
    assert found.loads.tolist() == away
    assert not away or options.loads
    assert all(map(judge.whole, found.entries))
    assert judge.seconds(blocks, found.start, found.snapshot) == pytest.approx(best)
    if found.snapshot != NONE:
        assert judge.columns.position[found.snapshot] == found.start <= found.shared
        assert judge.whole(found.snapshot, snapshot=True)
    elif found.start and snapshot_kinds(world.geometry):
        assert options.replay
        assert found.start == found.known_from
        assert found.start <= replay_start(world.geometry, found.shared, options.tile)
    assert (found.outcome is Outcome.LOAD_THEN_REUSE) == bool(away)
    assert (Kind.DISK_PREFIX in found.needs) == any(
        judge.columns.state[:DISK, e].max() != TierState.PRESENT for e in away
    )
    return found


@settings(max_examples=100, deadline=None)
@given(worlds(), choices())
def test_the_plan_is_the_cheapest_of_all_exact_ways(world, options):
    judged(world, options)


@settings(max_examples=40, deadline=None)
@given(worlds(FLAT), choices(0))
def test_the_plan_is_the_cheapest_in_a_homogeneous_model_too(world, options):
    judged(world, options)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 10), st.sets(st.integers(1, 10)), choices())
def test_with_everything_on_the_device_loads_change_nothing(count, snapshots, options):
    there = {n: (DEVICE,) for n in snapshots if n <= count}
    world = Tiers([(DEVICE,)] * count, there)
    one, two = (
        world.plan(dataclasses.replace(options, loads=loads), ideal=count * BLOCK)
        for loads in (False, True)
    )
    for field in dataclasses.fields(one):
        np.testing.assert_array_equal(
            getattr(one, field.name), getattr(two, field.name), err_msg=field.name
        )


def lost(plan):
    return {loss.cause: loss.tokens for loss in plan.losses}


COST = CostModel(tile_seconds=1.0, bytes_per_second={HOST: 1e9, DISK: 1e9})
OPTIONS = PlanOptions(tile=BLOCK, snapshot_bytes=SNAPSHOT_BYTES, loads=True, cost=COST)


def with_rates(**rates):
    cost = dataclasses.replace(COST, bytes_per_second={Tier[k]: v for k, v in rates.items()})
    return dataclasses.replace(OPTIONS, cost=cost)


@pytest.mark.parametrize("tier", [HOST, DISK])
def test_what_is_elsewhere_is_loaded_and_said_to_be(tier):
    found = judged(Tiers([(tier,)] * 8, {8: (tier,)}), OPTIONS)
    assert (found.start, found.shared, len(found.loads)) == (8 * BLOCK, 8 * BLOCK, 9)
    assert found.needs[Kind.COMPRESSED] is found.needs[Kind.WINDOW] is Action.LOAD
    assert (found.needs.get(Kind.DISK_PREFIX) is Action.LOAD) == (tier == DISK)
    assert found.explain().endswith("load 9 entries first (ideal 132; lost 4 to alignment)")


def test_of_two_copies_the_faster_tier_is_counted():
    world = Tiers([(HOST, DISK)] * 8, {8: (HOST, DISK)})
    slow_disk = judged(world, with_rates(HOST=1e9, DISK=1.0))
    assert len(slow_disk.loads) == 9
    assert Kind.DISK_PREFIX not in slow_disk.needs


def test_nothing_is_loaded_that_is_cheaper_to_compute():
    world = Tiers([(DEVICE,)] * 4 + [(DISK,)] * 4, {4: (DEVICE,), 8: (DISK,)})
    found = judged(world, with_rates(DISK=1.0))
    assert not len(found.loads)
    assert (found.start, found.shared) == (4 * BLOCK, 4 * BLOCK)
    assert lost(found) == {Cause.ALIGNMENT: 4, Cause.POLICY: 4 * BLOCK}


def test_a_far_snapshot_is_not_loaded_where_a_replay_is_shorter():
    world = Tiers([(DEVICE,)] * 8, {8: (DISK,)})
    slow, fast = judged(world, with_rates(DISK=1.0)), judged(world, OPTIONS)
    assert (slow.snapshot, len(slow.loads)) == (NONE, 0)
    assert slow.shared == 8 * BLOCK
    assert fast.loads.tolist() == [fast.snapshot]
    assert lost(slow)[Cause.POLICY] == 8 * BLOCK - slow.start


def test_what_is_not_brought_any_more_is_blamed_on_its_slowness():
    """A plan without loads, after one that came too late."""
    world = Tiers([(DEVICE,)] * 4 + [(DISK,)] * 4, {4: (DEVICE,), 8: (DISK,)})
    found = judged(world, dataclasses.replace(OPTIONS, loads=False))
    assert lost(found) == {Cause.ALIGNMENT: 4, Cause.LOAD_TOO_SLOW: 4 * BLOCK}
    nothing = judged(Tiers([(DISK,)] * 4, {}), dataclasses.replace(OPTIONS, loads=False))
    assert isinstance(nothing, Miss)
    assert lost(nothing) == {Cause.ALIGNMENT: 4, Cause.LOAD_TOO_SLOW: 4 * BLOCK}


def test_a_device_without_places_for_snapshots_loads_none():
    world = Tiers([(HOST,)] * 8, {8: (HOST,)})
    found = judged(world, dataclasses.replace(OPTIONS, load_snapshots=False))
    assert found.snapshot == NONE
    assert len(found.loads) == 8
    assert found.needs[Kind.WINDOW] is Action.REPLAY


def test_what_the_state_does_not_need_is_shared_as_far_as_it_is_here():
    """The snapshot stands early; blocks behind it are shared up to the first that is elsewhere."""
    world = Tiers([(DEVICE,)] * 6 + [(DISK,)] * 2, {4: (DEVICE,)})
    options = dataclasses.replace(with_rates(DISK=1.0), replay=False)
    found = judged(world, options)
    assert (found.start, found.shared, len(found.loads)) == (4 * BLOCK, 6 * BLOCK, 0)


def test_a_wait_in_the_queue_is_counted_once():
    world = Tiers([(DEVICE,)] * 7 + [(HOST,)], {8: (HOST,)})
    cost = CostModel(tile_seconds=1.0, queue_seconds=0.25)
    found = judged(world, dataclasses.replace(OPTIONS, cost=cost))
    assert found.seconds == 1.25
    alone = judged(Tiers([(DEVICE,)] * 8, {8: (HOST,)}), dataclasses.replace(OPTIONS, cost=cost))
    assert alone.seconds == 1.25
