"""A load brings whole entries in order, ends anywhere, and what came before stays."""

import time

import numpy as np
import pytest
from fake_device import BLOCK, MOVED, World, ids_of, pools, quick_segments
from hand_workers import Hook

from hybridkv.blocks.entries import Form, Tier
from hybridkv.tiers.faults import Fault, Planned, Point, Schedule
from hybridkv.tiers.loading import SegmentRows
from hybridkv.tiers.tickets import RestoreState

IDS = ids_of(8, 1)


@pytest.fixture(autouse=True)
def quick():
    with quick_segments():
        yield


def below(tier, path, ids=IDS, snapshots=(8,), **options):
    """A world whose prompt is on one tier below the device only."""
    if tier == Tier.HOST:
        world = World(host=pools(32), **options)
    else:
        world = World(disk=pools(32), path=path / "s", **options)
    world.publish(ids, snapshots=snapshots)
    world.stored()
    world.evict()
    assert world.count(Tier.DEVICE) == 0
    return world


def words_of_every_part(world, ids=IDS):
    return world.mover._parts(world.plan(ids).loads)


def test_blocks_come_by_moves_in_order_and_snapshots_last(tmp_path):
    world = below(Tier.HOST, tmp_path)
    parts = words_of_every_part(world)
    assert [(part.form, len(part.sources)) for part in parts] == [
        (Form.BLOCK, MOVED),
        (Form.BLOCK, MOVED),
        (Form.BLOCK, 2),
        (Form.SNAPSHOT, 1),
    ]
    blocks = np.concatenate([part.entries for part in parts[:-1]])
    assert blocks.tolist() == world.run(IDS).tolist()


@pytest.mark.parametrize(
    ("fault", "point"),
    [
        (Fault.LOST_FILE, Point.DISK_LOAD),
        (Fault.PERMISSION, Point.DISK_LOAD),
        (Fault.FLIPPED_BIT, Point.READ_SEGMENT),
        (Fault.SHORT_READ, Point.READ_SEGMENT),
        (Fault.FLIPPED_BIT, Point.HOST_LOAD),
    ],
)
def test_a_read_that_fails_makes_a_plan_shorter(tmp_path, fault, point):
    """The fourth block of eight, the first of the second move, can't be read."""
    tier = Tier.HOST if point == Point.HOST_LOAD else Tier.DISK
    world = below(tier, tmp_path)
    # Points are reached once a block, but segments are read whole, and after each other.
    faults = Schedule([Planned(point=point, fault=fault, nth=2 if "segment" in point.value else 4)])
    if tier == Tier.DISK and fault is Fault.LOST_FILE:
        faults = Hook(
            point, lambda nth: (_ for _ in ()).throw(FileNotFoundError()) if nth == 4 else 0
        )
    world.mover._bringer._faults = faults
    if world.mover.store is not None:
        world.mover.store._faults = faults
    hold, ticket = world.begin(IDS)
    world.settle(lambda: ticket.state() is not RestoreState.PENDING)
    assert ticket.state() is RestoreState.FAILED
    world.end(hold, ticket)
    assert world.use(IDS).shared == MOVED * BLOCK
    assert world.mover.counters.failed_loads == 1
    assert world.mover.counters.spoiled[tier] == (1 if tier == Tier.HOST else MOVED)
    assert world.mover.counters.last_error
    world.at_rest()
    # It is not tried again, and what is computed anew is stored anew.
    assert not len(world.plan(IDS).loads)
    world.publish(IDS, snapshots=(8,))
    world.stored()
    world.evict()
    assert world.start_of(IDS) == 8 * BLOCK


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
@pytest.mark.parametrize("after", [0, 1, 4, 8, 9])
def test_a_load_given_up_in_the_middle_writes_nothing_afterwards(tmp_path, tier, after):
    """The request is cancelled while a worker reads the part after so many entries."""
    world = below(tier, tmp_path)
    hold, ticket = world.begin(IDS)
    left = []

    def leave(nth):
        if nth == after + 1 and not left:
            world.end(hold, ticket)
            left.append(world.device.writes)

    point = Point.HOST_LOAD if tier == Tier.HOST else Point.DISK_LOAD
    world.mover._bringer._faults = Hook(point, leave)
    world.workers[0].step()
    if not left:
        world.end(hold, ticket)
        left.append(world.device.writes)
    for _ in range(3):
        world.mover.turn()
    assert left == [world.device.writes]
    assert world.allocator.available(Form.BLOCK) == world.device.sizes[Tier.DEVICE].blocks
    assert world.mover.counters.given_up == 1
    world.at_rest()
    assert world.start_of(IDS) == 8 * BLOCK  # nothing is spoiled by it


def test_parts_that_were_written_before_a_load_is_given_up_stay(tmp_path):
    world = below(Tier.HOST, tmp_path, moves_a_turn=1)
    hold, ticket = world.begin(IDS)
    world.workers[0].step()
    world.mover.turn()
    assert ticket.state() is RestoreState.PENDING
    world.end(hold, ticket)
    world.at_rest()
    assert world.there(world.run(IDS), Tier.DEVICE) == [True] * MOVED + [False] * 5
    assert world.use(IDS).shared == MOVED * BLOCK


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-3)


def test_no_more_is_staged_than_it_is_told_and_leaving_ends_the_wait(tmp_path):
    world = below(Tier.HOST, tmp_path, by_hand=False, staged=2, moves_a_turn=1)
    hold, ticket = world.begin(IDS)
    (load,) = ticket.loads
    wait_for(lambda: len(load.ready) == 2)
    time.sleep(0.05)
    assert len(load.ready) == 2
    world.mover.turn()
    wait_for(lambda: len(load.ready) == 2)
    world.end(hold, ticket)
    wait_for(load.future.done)
    assert world.mover.close(timeout_s=5)
    world.device.check()


def test_threads_bring_everything(tmp_path):
    for tier in (Tier.HOST, Tier.DISK):
        world = below(tier, tmp_path, by_hand=False, staged=1)
        assert world.start_of(IDS) == 8 * BLOCK
        assert world.mover.counters.loaded[tier] == 9
        assert world.mover.bytes_per_second[tier] > 0
        assert world.mover.close(timeout_s=5)


def test_rows_of_a_segment_are_let_go_when_the_last_was_asked_for():
    arrays = iter([("a", np.zeros((2, 1))), ("b", np.ones((1, 1)))])
    rows = SegmentRows(arrays, {"a": 2, "b": 1})
    assert rows.row("a", 1) == 0
    assert rows.row("b", 0) == 1
    assert list(rows._held) == ["a"]
    rows.row("a", 0)
    assert not rows._held


def test_a_part_of_both_tiers_counts_as_the_slower_one(tmp_path):
    """Of the first move one block is on the host too."""
    world = World(host=pools(32), disk=pools(32), path=tmp_path / "s")
    world.publish(IDS)
    world.stored()
    world.evict()
    world.allocator.evict(blocks=7, tier=Tier.HOST)
    hold, ticket = world.begin(IDS)
    (load,) = ticket.loads
    world.settle(lambda: ticket.state() is RestoreState.READY)
    assert load.bytes == {Tier.HOST: 0, Tier.DISK: 8 * world.device.geometry.block_bytes}
    assert world.mover.counters.loaded == {Tier.DEVICE: 0, Tier.HOST: 1, Tier.DISK: 7}
    world.end(hold, ticket)
    world.at_rest()


def test_without_digests_nothing_is_compared_and_with_them_every_kind_is(tmp_path):
    for digests in (True, False):
        world = below(Tier.HOST, tmp_path, digests=digests)
        compared = []
        world.mover._host.verify = compared.append
        assert world.start_of(IDS) == 8 * BLOCK
        assert len(compared) == (9 if digests else 0)
