"""What is in a store is found again, as far as there are places, and forgotten when it is gone."""

import errno
import os

import numpy as np
import pytest
from fake_device import BLOCK, MOVED, World, ids_of, pools, quick_segments
from hand_workers import Hook

from hybridkv.blocks.entries import Form, Tier
from hybridkv.prefixes.plan import Miss
from hybridkv.tiers.faults import NO_FAULTS, Point
from hybridkv.tiers.storing import PAUSE_S
from hybridkv.tiers.tickets import RestoreState

IDS = ids_of(8, 1)


@pytest.fixture(autouse=True)
def quick():
    with quick_segments():
        yield


@pytest.fixture
def world(tmp_path):
    """A prompt in a store, after a restart."""
    world = World(disk=pools(32), path=tmp_path / "s")
    world.publish(IDS, snapshots=(4, 8))
    world.stored()
    world.restart()
    return world


def reader_of(world, **options):
    options = {"disk": pools(32)} | options
    return World(path=world.options.path, writable=False, **options)


def test_a_restart_finds_everything_and_brings_it(world):
    assert (len(world.run(IDS)), len(world.snapshots(IDS))) == (8, 2)
    assert world.count(Tier.DEVICE) == 0
    assert world.start_of(IDS) == 8 * BLOCK
    world.at_rest()


def test_namespaces_stay_apart_over_a_restart(tmp_path):
    world = World(disk=pools(32), path=tmp_path / "s")
    world.publish(IDS, snapshots=(8,), namespace="a")
    world.stored()
    world.restart()
    assert isinstance(world.bring(IDS), Miss)
    assert isinstance(world.bring(IDS, "b"), Miss)
    assert world.start_of(IDS, "a") == 8 * BLOCK


def test_branches_are_adopted_once_each(tmp_path):
    one, two = IDS.copy(), IDS.copy()
    two[5 * BLOCK :] += 1
    world = World(disk=pools(32), path=tmp_path / "s")
    for ids in (one, two):
        world.publish(ids, snapshots=(8,))
        world.stored()
    world.restart()
    assert world.count(Tier.DISK) == 5 + 3 + 3 + 2
    for ids in (two, one):
        assert world.start_of(ids) == 8 * BLOCK
    world.at_rest()


@pytest.mark.parametrize(("blocks", "snapshots"), [(5, 8), (3, 1), (8, 0), (1, 8)])
def test_fewer_places_than_the_store_has_blocks_take_the_beginnings(world, blocks, snapshots):
    world.restart(disk=pools(blocks, snapshots))
    assert len(world.run(IDS)) == blocks
    assert len(world.snapshots(IDS)) == min(snapshots, (blocks >= 4) + (blocks >= 8))
    assert world.mover._disk.left_alone == 8 - blocks
    assert world.mover.store.blocks == 8
    world.bring(IDS)
    world.at_rest()


def test_what_is_computed_again_of_a_store_is_not_written_twice(world):
    world.restart(disk=pools(5, 1))
    before = world.mover.store.bytes_used
    world.bring(IDS)
    world.publish(IDS, snapshots=(8,))
    world.stored()
    assert world.mover.store.bytes_used == before


def test_a_reset_finds_the_store_again(world):
    world.publish(IDS, snapshots=(8,))
    world.reset()
    assert world.count(Tier.DISK) == 8 + 2
    assert world.start_of(IDS) == 8 * BLOCK
    world.at_rest()


def test_a_reader_sees_what_is_added_when_it_looks_again(world):
    reader, more = reader_of(world), np.concatenate([IDS[: 8 * BLOCK], ids_of(4, 9)])
    assert reader.start_of(IDS) == 8 * BLOCK
    world.publish(more, snapshots=(12,))
    world.publish(ids_of(3, 5))
    world.stored()
    assert len(reader.run(more)) == 8
    assert reader.mover.refresh() == 4 + 3
    assert reader.start_of(more) == 12 * BLOCK
    assert reader.mover.refresh() == 0
    reader.at_rest()


def test_what_a_reader_has_computed_gets_one_more_copy_when_the_writer_stores_it(world):
    other = ids_of(5, 6)
    reader = reader_of(world)
    reader.publish(other, snapshots=(5,))
    reader.stored()  # a reader writes nothing
    assert not any(reader.there(reader.run(other), Tier.DISK))
    world.publish(other, snapshots=(5,))
    world.stored()
    assert reader.mover.refresh() == 0
    assert all(reader.there(reader.run(other), Tier.DISK))
    assert all(reader.there(reader.snapshots(other), Tier.DISK))
    reader.evict()
    assert reader.start_of(other) == 5 * BLOCK
    reader.at_rest()


def test_a_reader_forgets_what_vanished_but_for_what_it_has_itself(world):
    reader = reader_of(world)
    reader.bring(IDS[: 3 * BLOCK + 1])  # of the last four blocks it has no copy
    store = world.mover.store
    digests = world.chain(IDS).digests
    store.remove(
        [store.find(d.tobytes()) for d in digests[4:]],
        [store.find_snapshot(digests[7].tobytes())],
    )
    assert reader.mover.refresh() == 0
    assert len(reader.run(IDS)) == 4
    assert reader.start_of(IDS) == 4 * BLOCK
    assert reader.mover.counters.failed_loads == 0
    store.remove([store.find(digests[0].tobytes())], with_children=True)
    assert (store.blocks, store.snapshots) == (0, 0)
    reader.mover.refresh()
    assert reader.count(Tier.DISK) == 0
    assert len(reader.run(IDS)) == 4  # on the device
    reader.at_rest()


def test_a_reader_forgets_a_snapshot_that_vanished_alone(world):
    reader = reader_of(world)
    store = world.mover.store
    store.remove([], [store.find_snapshot(world.chain(IDS).digests[7].tobytes())])
    reader.mover.refresh()
    assert reader.plan(IDS).snapshot != 8
    assert len(reader.snapshots(IDS)) == 1
    assert reader.bring(IDS).shared == 8 * BLOCK
    assert reader.mover.counters.failed_loads == 0


def test_a_reader_that_did_not_look_again_misses_and_goes_on(world):
    reader = reader_of(world)
    store = world.mover.store
    store.remove([store.find(world.chain(IDS).digests[0].tobytes())], with_children=True)
    assert isinstance(reader.bring(IDS), Miss)
    assert reader.mover.counters.failed_loads == 1
    assert len(reader.run(IDS)) == 0
    reader.at_rest()


def test_places_of_a_store_that_was_compacted_are_asked_for_when_they_are_read(world):
    """Segments move; entries do not know where they are."""
    store = world.mover.store
    other = np.concatenate([IDS[:BLOCK], ids_of(8, 4)])
    world.publish(other)
    world.stored()
    left = [world.entries.digest[entry].tobytes() for entry in world.run(IDS)]
    for _ in range(7):
        world.allocator.evict(blocks=1, tier=Tier.DISK)
    world.at_rest()
    before = [store.find(digest) for digest in left]
    assert store.compact() > 0
    after = [store.find(digest) for digest in left]
    assert sum(a != b for a, b in zip(before, after, strict=True)) > 0
    world.evict()
    for ids in (IDS, other):
        world.bring(ids)
    assert world.mover.counters.failed_loads == 0
    world.at_rest()


def half_evicted(tmp_path, **options):
    """Four blocks of eight and the snapshot on them, the fourth alone in its segment."""
    world = World(disk=pools(32), path=tmp_path / "s", **options)
    world.publish(IDS, snapshots=(4,))
    world.stored()
    world.restart()
    world.allocator.evict(blocks=4, tier=Tier.DISK)
    return world


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_what_is_mostly_dead_is_written_anew_beyond_a_share_of_the_store(tmp_path, share):
    world = half_evicted(tmp_path, compact_share=share)
    store = world.mover.store
    before = store.find(world.chain(IDS).digests[3].tobytes())
    world.settle()
    assert (store.dead_bytes == 0) == (share < 1)
    after = store.find(world.chain(IDS).digests[3].tobytes())
    assert (after == before) == (share == 1)
    assert store.verify() == []
    assert world.start_of(IDS) == 4 * BLOCK
    world.at_rest()


def test_a_compaction_that_fails_is_told_and_keeps_nothing_from_being_written(tmp_path):
    world = World(disk=pools(64), path=tmp_path / "s")
    for seed in range(4):
        world.publish(ids_of(3, seed))
    world.stored()
    full = Hook(Point.WRITE_SEGMENT, fails)
    mover, counters = world.mover, world.mover.counters

    def give_up(block: int, *seeds: int) -> None:
        for seed in seeds:
            world.allocator.drain(world.run(ids_of(3, seed))[[block]], Tier.DISK)
        world.settle()

    mover.store._faults = full
    give_up(2, 0, 1, 2, 3)
    assert full.reached == 0  # most is alive
    give_up(1, 0, 1, 2, 3)
    assert full.reached == counters.failed_stores[Tier.DISK] == 1
    assert "No space left" in counters.last_error
    assert not mover._disk.to_remove
    assert not mover._storing.paused
    world.publish(ids_of(3, 9))
    mover.store._faults = NO_FAULTS
    world.stored()
    assert all(world.there(world.run(ids_of(3, 9)), Tier.DISK))
    mover.store._faults = full
    give_up(0, 0)
    assert full.reached == 1  # not after each removal
    mover.store._faults = NO_FAULTS
    world.device.now += PAUSE_S
    give_up(0, 1)
    assert mover.store.dead_bytes == 0
    assert mover.store.verify() == []
    world.at_rest()


def fails(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("ahead", [False, True], ids=["loaded", "read ahead"])
def test_what_is_wanted_before_a_compaction_is_read_where_it_is_then(tmp_path, ahead):
    world = half_evicted(tmp_path, compact_share=1.0)
    world.settle()
    if ahead:
        world.mover.wanted(world.plan(IDS))
    else:
        hold, ticket = world.begin(IDS)
    assert world.mover.store.compact() > 0
    if ahead:
        world.workers[0].step()
        assert world.mover.counters.prefetched == 2
        assert world.start_of(IDS) == 4 * BLOCK
    else:
        world.settle(lambda: ticket.state() is not RestoreState.PENDING)
        assert ticket.state() is RestoreState.READY
        world.end(hold, ticket)
        assert world.use(IDS).start == 4 * BLOCK
    assert (world.mover.counters.failed_loads, world.mover.counters.failed_prefetches) == (0, 0)
    world.at_rest()


def test_what_was_given_up_before_a_compaction_leaves_the_store_after_it(tmp_path):
    world = half_evicted(tmp_path, compact_share=1.0)
    world.settle()
    world.allocator.evict(snapshots=1, tier=Tier.DISK)
    world.allocator.evict(blocks=1, tier=Tier.DISK)
    assert world.mover.store.compact() > 0
    world.settle()
    assert (world.mover.store.blocks, world.mover.store.snapshots) == (3, 0)
    world.at_rest()


@pytest.mark.parametrize("writable", [True, False])
def test_damage_is_forgotten_once_and_only_a_writer_removes_it(world, writable):
    reader = world if writable else reader_of(world)
    world.damage_disk(int(world.run(IDS)[MOVED]))
    blocks = world.mover.store.blocks
    assert reader.bring(IDS).shared == MOVED * BLOCK
    assert reader.mover.counters.failed_loads == 1
    assert reader.mover.counters.spoiled[Tier.DISK] == MOVED  # a segment
    assert len(reader.run(IDS)) == MOVED
    reader.at_rest()
    assert not len(reader.plan(IDS).loads)
    assert world.mover.store.blocks == (MOVED if writable else blocks)
    assert world.mover.store.snapshots == (0 if writable else 2)
    if not writable:  # another reader finds it for itself, and no file was touched
        assert reader_of(world).bring(IDS).shared == MOVED * BLOCK
        return
    assert world.mover.store.verify() == []
    world.publish(IDS, snapshots=(8,))
    world.stored()
    world.restart()
    assert world.start_of(IDS) == 8 * BLOCK


def test_a_damaged_snapshot_goes_alone(world):
    world.damage_disk(int(world.snapshots(IDS)[-1]))
    assert world.bring(IDS).shared == 8 * BLOCK
    assert world.mover.counters.spoiled[Tier.DISK] == 1
    world.at_rest()
    assert (world.mover.store.blocks, world.mover.store.snapshots) == (8, 1)


def test_what_lost_its_place_just_before_the_end_is_removed_too(tmp_path):
    world = World(disk=pools(32), path=tmp_path / "s", by_hand=False)
    world.publish(IDS, snapshots=(8,))
    world.stored()
    world.allocator.evict(blocks=3, tier=Tier.DISK)
    assert world.mover.close(timeout_s=10)
    world = World(disk=pools(32), path=tmp_path / "s")
    assert len(world.run(IDS)) == 5


def test_a_request_that_waits_for_damage_is_failed_and_holds_nothing(world):
    world.damage_disk(int(world.run(IDS)[0]))
    requests = [world.begin(IDS) for _ in range(3)]
    world.settle(lambda: all(t.state() is not RestoreState.PENDING for _, t in requests))
    assert {t.state() for _, t in requests} == {RestoreState.FAILED}
    for hold, ticket in requests:
        world.end(hold, ticket)
    assert world.allocator.available(Form.BLOCK) == world.device.sizes[Tier.DEVICE].blocks
    world.at_rest()
