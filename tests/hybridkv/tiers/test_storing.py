"""Copies go down in the order of a prefix, push out nothing of it, and end."""

import itertools

import numpy as np
import pytest
from fake_device import BLOCK, MOVED, World, ids_of, pools, quick_segments

from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.transitions import TierState
from hybridkv.tiers.faults import Fault, Planned, Point, Schedule
from hybridkv.tiers.storing import PAUSE_S


@pytest.fixture(autouse=True)
def quick():
    with quick_segments():
        yield


def leading(flags):
    """Whether no True comes after a False."""
    return sorted(flags, reverse=True) == list(flags)


def faults(point, fault=Fault.NO_SPACE, *nth):
    """Of the first time, or of those that are given."""
    return Schedule([Planned(point=point, fault=fault, nth=n) for n in nth or (1,)])


def test_a_tier_always_has_the_beginning_of_a_prefix(tmp_path):
    ids = ids_of(11, 1)
    world = World(host=pools(16), disk=pools(16), path=tmp_path / "s")
    world.publish(ids, snapshots=(4, 11))
    run, seen = world.run(ids), set()
    while world.mover.busy:
        world.mover.turn()
        for worker in world.workers:
            worker.step()
        for tier in (Tier.HOST, Tier.DISK):
            there = world.there(run, tier)
            assert leading(there)
            seen.add((tier, sum(there)))
    assert {(Tier.HOST, 3), (Tier.HOST, 11), (Tier.DISK, 11)} <= seen
    assert world.there(world.snapshots(ids), Tier.DISK) == [True, True]


def test_a_parent_is_on_disk_before_its_child_is_written(tmp_path):
    """One prefix goes on from another that is on its way."""
    ids = ids_of(9, 1)
    world = World(disk=pools(32), path=tmp_path / "s")
    world.publish(ids[: 4 * BLOCK])
    world.mover.turn()
    world.publish(ids)
    world.stored()
    assert world.mover.counters.failed_stores[Tier.DISK] == 0
    assert all(world.there(world.run(ids), Tier.DISK))
    assert [x.extension.first for x in world.mover.store.extensions()] == [0, 4]


@pytest.mark.parametrize("host", [2, 5])
def test_a_prefix_larger_than_the_host_keeps_its_beginning_there(host):
    ids = ids_of(8, 1)
    world = World(host=pools(host))
    world.publish(ids)
    world.stored()
    there = world.there(world.run(ids), Tier.HOST)
    assert leading(there)
    assert sum(there) == host // MOVED * MOVED
    assert world.mover.counters.no_room[Tier.HOST] > 0
    assert world.mover.counters.stored[Tier.HOST] == sum(there)


def test_a_prefix_with_more_snapshots_than_the_host_has_places_keeps_the_deepest():
    ids = ids_of(8, 1)
    world = World(host=pools(16, 2))
    world.publish(ids, snapshots=range(1, 9))
    world.stored()
    there = world.there(world.snapshots(ids), Tier.HOST)
    assert there == [False] * 6 + [True] * 2
    assert world.mover.counters.stored[Tier.HOST] == 8 + 2


def test_a_prefix_with_more_snapshots_than_the_disk_has_places_keeps_the_deepest(tmp_path):
    ids = ids_of(8, 1)
    world = World(disk=pools(16, 2), path=tmp_path / "s")
    world.publish(ids, snapshots=range(1, 9))
    world.stored()
    there = world.there(world.snapshots(ids), Tier.DISK)
    assert there == [False] * 6 + [True] * 2
    assert world.mover.store.snapshots == 2


def test_a_conversation_that_grows_keeps_its_newest_snapshot():
    ids = ids_of(10, 1)
    world = World(host=pools(16, 1))
    for blocks in (3, 6, 10):
        world.publish(ids[: blocks * BLOCK], snapshots=(blocks,))
        world.stored()
        assert world.there(world.snapshots(ids[: blocks * BLOCK]), Tier.HOST)[-1]


@pytest.mark.parametrize(("prefixes", "blocks", "host", "slow"), [(3, 8, 23, 2), (5, 4, 7, 5)])
def test_a_host_smaller_than_what_waits_keeps_nothing_from_the_disk(
    tmp_path, prefixes, blocks, host, slow
):
    """Also when copies take longer than turns: each prefix is copied once, then written."""
    world = World(
        device=pools(64, 16), host=pools(host), disk=pools(64), path=tmp_path / "s", debug=False
    )
    for seed in range(prefixes):
        world.publish(ids_of(blocks, seed), snapshots=(blocks,))
    for turn in itertools.count():
        assert turn < 300
        world.mover.turn()
        if not world.mover.busy:
            break
        if turn % slow == 0:
            for worker in world.workers:
                worker.step()
    everything = prefixes * (blocks + 1)
    assert world.mover.counters.stored[Tier.DISK] == everything
    assert world.mover.counters.stored[Tier.HOST] <= everything


def test_what_finds_no_room_because_all_is_leased_is_left_where_it_is():
    old, new = ids_of(6, 1), ids_of(6, 2)
    world = World(host=pools(6))
    world.publish(old)
    world.stored()
    held = world.allocator.lease(world.run(old))
    world.publish(new)
    world.stored()
    assert all(world.there(world.run(old), Tier.HOST))
    assert not any(world.there(world.run(new), Tier.HOST))
    assert all(world.there(world.run(new), Tier.DEVICE))
    world.allocator.release(held)
    world.at_rest()


def test_a_flush_begins_with_the_deepest_and_ends_in_time():
    world = World(host=pools(64))
    for seed, blocks in enumerate((2, 9, 5)):
        world.publish(ids_of(blocks, seed))
    assert not world.mover.flush(timeout_s=0.01)  # nobody works
    filling = np.flatnonzero(world.entries.state[Tier.HOST] == TierState.FILLING)
    assert set(filling.tolist()) <= set(world.run(ids_of(9, 1)).tolist())
    assert filling.size
    world.at_rest()
    assert world.count(Tier.HOST) == 16


def test_the_deepest_is_on_disk_first_when_time_is_short(tmp_path):
    world = World(device=pools(64), host=pools(64), disk=pools(64), path=tmp_path / "s")
    prompts = [ids_of(blocks, seed) for seed, blocks in enumerate((2, 9, 5))]
    for ids in prompts:
        world.publish(ids)
    assert not world.mover.flush(timeout_s=0.01)
    world.settle(lambda: world.count(Tier.DISK) > 0)
    assert [any(world.there(world.run(ids), Tier.DISK)) for ids in prompts] == [False, True, False]


def test_the_oldest_goes_when_too_many_wait():
    world = World(host=pools(64), queue=2)
    prompts = [ids_of(3, seed) for seed in range(4)]
    for ids in prompts:
        world.publish(ids)
    assert world.mover.counters.dropped_prefixes == 2
    world.stored()
    assert [all(world.there(world.run(ids), Tier.HOST)) for ids in prompts] == [False, False, 1, 1]


def test_a_prefix_that_grows_while_it_waits_counts_once():
    world = World(host=pools(64), queue=1)
    chain = world.publish(ids_of(3, 1))
    for _ in range(5):
        world.mover.published(chain)
    assert world.mover.counters.dropped_prefixes == 0
    world.stored()


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_after_a_write_that_failed_nothing_is_written_for_a_while(tmp_path, tier):
    point = Point.HOST_STORE if tier == Tier.HOST else Point.DISK_STORE
    more = {"host": pools(16)} if tier == Tier.HOST else {"disk": pools(16), "path": tmp_path / "s"}
    world = World(faults=faults(point), **more)
    first, second, third = (ids_of(3, seed) for seed in range(3))
    world.publish(first)
    world.stored()
    assert world.mover.counters.failed_stores[tier] == 1
    assert "No space left" in world.mover.counters.last_error
    assert world.count(tier) == 0
    world.publish(second)
    world.stored()
    assert world.count(tier) == 0
    world.device.now += PAUSE_S
    world.publish(third)
    world.at_rest()
    assert all(all(world.there(world.run(ids), tier)) for ids in (first, second, third))
    assert world.mover.counters.dropped_prefixes == 0


def test_what_waits_while_writing_pauses_is_written_after_it_and_flush_says_so(tmp_path):
    world = World(disk=pools(64), path=tmp_path / "s", faults=faults(Point.DISK_STORE))
    prompts = [ids_of(3, seed) for seed in range(5)]
    for ids in prompts:
        world.publish(ids)
    assert not world.mover.flush(timeout_s=0.0)
    world.stored()
    assert world.mover.queued == {Tier.HOST: 0, Tier.DISK: 5}
    assert not world.mover.flush(timeout_s=0.01)
    world.device.now += 2 * PAUSE_S
    assert not world.mover.flush(timeout_s=0.0)  # it waits still, though nothing pauses
    world.stored()
    assert [all(world.there(world.run(ids), Tier.DISK)) for ids in prompts] == [True] * 5
    counters = world.mover.counters
    assert (counters.failed_stores[Tier.DISK], counters.dropped_prefixes) == (1, 0)
    assert world.mover.flush(timeout_s=0.01)


def test_a_prefix_whose_write_failed_lets_the_others_go_before_it(tmp_path):
    world = World(
        disk=pools(64), path=tmp_path / "s", faults=faults(Point.DISK_STORE, Fault.NO_SPACE, 1, 2)
    )
    prompts = [ids_of(3, seed) for seed in range(3)]
    for ids in prompts:
        world.publish(ids)
    world.stored()
    world.device.now += 2 * PAUSE_S
    world.settle(lambda: world.count(Tier.DISK) > 0 or not world.mover.busy)
    assert world.mover.counters.failed_stores[Tier.DISK] == 2
    world.device.now += 2 * PAUSE_S
    world.settle(lambda: world.count(Tier.DISK) > 0)
    assert [any(world.there(world.run(ids), Tier.DISK)) for ids in prompts] == [0, 0, 1]


def test_what_finds_no_place_in_the_queue_while_writing_pauses_is_counted(tmp_path):
    world = World(disk=pools(64), path=tmp_path / "s", queue=2, faults=faults(Point.DISK_STORE))
    for seed in range(4):
        world.publish(ids_of(3, seed))
        world.stored()
    assert world.mover.queued == {Tier.HOST: 0, Tier.DISK: 2}
    assert world.mover.counters.dropped_prefixes == 2
    world.device.now += 2 * PAUSE_S
    world.stored()
    assert world.count(Tier.DISK) == 2 * 3
    assert not world.mover.close(timeout_s=0.01)  # not all that was published is stored


@pytest.mark.parametrize("nth", [1, 2])
def test_a_copy_that_fails_leaves_what_was_copied_before(nth):
    """Three words of a job: the second job fails at its first word."""
    ids = ids_of(9, 1)
    world = World(host=pools(16), faults=faults(Point.HOST_STORE, Fault.NO_SPACE, 3 * nth - 2))
    world.publish(ids)
    world.stored()
    there = world.there(world.run(ids), Tier.HOST)
    assert leading(there[: 3 * nth])
    assert not any(there[3 * nth - 3 : 3 * nth])
    world.at_rest()


def test_a_device_that_cannot_be_read_leaves_no_places_behind(tmp_path):
    ids = ids_of(6, 1)
    world = World(host=pools(16), disk=pools(16), path=tmp_path / "s")

    def broken(*_):
        raise RuntimeError("the device is gone")

    world.publish(ids)
    works, world.device.read_blocks = world.device.read_blocks, broken
    with pytest.raises(RuntimeError, match="is gone"):
        world.mover.turn()
    assert world.mover.counters.dropped_prefixes == 1
    world.device.read_blocks = works
    world.at_rest()
    assert world.allocator.pools[Tier.HOST][Form.BLOCK].used == 0
    world.publish(ids)
    world.at_rest()
    assert world.count(Tier.HOST) == 6


def test_what_is_not_of_a_cold_run_goes_to_the_host_and_never_to_the_disk(tmp_path):
    ids = ids_of(8, 1)
    world = World(host=pools(16), disk=pools(16), path=tmp_path / "s")
    world.publish(ids, snapshots=(4, 8))
    run = world.run(ids)
    world.device.inexact = {int(run[5]), int(world.snapshots(ids)[0])}
    world.stored()
    assert all(world.there(run, Tier.HOST))
    assert world.there(run, Tier.DISK) == [True] * 5 + [False] * 3
    assert not any(world.there(world.snapshots(ids), Tier.DISK))
    assert world.mover.store.blocks == 5


def test_bytes_are_those_at_the_gather_whatever_the_place_is_used_for_then():
    """The worker copies after the owner went on."""
    ids = ids_of(3, 1)
    world = World(host=pools(16))
    world.publish(ids)
    world.mover.turn()
    for place in world.entries.place[Tier.DEVICE, world.run(ids)].tolist():
        world.device.pool[Form.BLOCK][place] = np.zeros(1, np.uint32)
    world.stored()
    world.evict()
    assert world.bring(ids).shared == 3 * BLOCK


def test_what_lost_its_place_on_disk_leaves_the_store(tmp_path):
    old, new = ids_of(6, 1), ids_of(6, 2)
    world = World(disk=pools(8, 2), path=tmp_path / "s")
    world.publish(old, snapshots=(6,))
    world.stored()
    world.publish(new, snapshots=(6,))
    world.stored()
    assert world.count(Tier.DISK) == world.mover.store.blocks + world.mover.store.snapshots
    assert world.mover.store.blocks == 8
    assert all(world.there(world.run(new), Tier.DISK))
    assert world.mover.store.verify() == []


def test_what_was_left_alone_goes_with_what_it_stands_on(tmp_path):
    """A store with more blocks than there are places now, which others need."""
    old, new = ids_of(8, 1), ids_of(4, 2)
    world = World(disk=pools(16), path=tmp_path / "s")
    world.publish(old, snapshots=(8,))
    world.stored()
    world.restart(disk=pools(5, 1))
    assert len(world.run(old)) == 5
    assert world.mover.store.blocks == 8
    world.publish(new)
    world.at_rest()
    assert world.mover.counters.failed_stores[Tier.DISK] == 0
    assert all(world.there(world.run(new), Tier.DISK))
    assert world.mover.store.blocks == 5
    assert world.mover.store.snapshots == 0


def test_a_store_with_fewer_places_than_a_prompt_takes_its_beginning(tmp_path):
    ids = ids_of(9, 1)
    world = World(disk=pools(5), path=tmp_path / "s")
    world.publish(ids)
    world.stored()
    assert world.there(world.run(ids), Tier.DISK) == [True] * 5 + [False] * 4


def test_a_store_whose_bytes_are_used_up_gives_up_what_is_worth_least(tmp_path):
    """Places are left, bytes are not: an old prefix goes, the new one is stored whole."""
    old, new = ids_of(8, 1), ids_of(8, 2)
    world = World(disk=pools(64), path=tmp_path / "s")
    world.publish(old)
    world.stored()
    store = world.mover.store
    store._capacity = store.bytes_used + 1000
    world.publish(new)
    world.stored()
    assert all(world.there(world.run(new), Tier.DISK))
    assert not any(world.there(world.run(old), Tier.DISK))
    assert store.bytes_used <= store._capacity
    assert world.mover.flush(timeout_s=1.0)


def test_a_prefix_larger_than_the_store_is_not_tried_for_ever(tmp_path):
    world = World(disk=pools(64), path=tmp_path / "s")
    world.mover.store._capacity = world.mover.store.bytes_used + 1000
    world.publish(ids_of(8, 1))
    world.stored()
    counters = world.mover.counters
    assert (counters.failed_stores[Tier.DISK], counters.dropped_prefixes) == (1, 1)
    world.device.now += 2 * PAUSE_S
    assert not world.mover.flush(timeout_s=0.01)
    assert counters.failed_stores[Tier.DISK] == 1


def test_what_lost_its_place_while_others_are_removed_is_not_taken_for_stored(tmp_path):
    """It is still in the store when its prefix is stored again, and is removed after that."""
    ids = ids_of(8, 1)
    world = World(disk=pools(16), path=tmp_path / "s")
    world.publish(ids)
    world.stored()
    world.allocator.evict(blocks=2, tier=Tier.DISK)
    world.mover.turn()  # its removal waits for the writer
    world.allocator.evict(blocks=2, tier=Tier.DISK)
    world.mover.published(world.chain(ids))
    world.stored()
    run, store = world.run(ids), world.mover.store
    assert all(world.there(run, Tier.DISK))
    digests = world.entries.digest[run]
    assert all(store.find(digest.tobytes()) is not None for digest in digests)


def test_snapshots_are_not_stored_before_the_blocks_whose_write_failed(tmp_path):
    """Somebody still reads the blocks, so that their places are given back later."""
    ids = ids_of(6, 1)
    world = World(disk=pools(64), path=tmp_path / "s")
    store = world.mover.store
    store._capacity = store.bytes_used + 1000
    world.publish(ids, snapshots=(3, 6))
    reader = world.allocator.lease(world.run(ids))
    world.stored()
    store._capacity = None
    world.device.now += 2 * PAUSE_S
    world.mover.published(world.chain(ids))
    world.stored()
    assert "StoreFullError" in world.mover.counters.last_error
    assert world.mover.counters.failed_stores[Tier.DISK] == 1
    world.allocator.release(reader)
    world.mover.published(world.chain(ids))
    world.stored()
    assert all(world.there(world.run(ids), Tier.DISK))
    assert world.there(world.snapshots(ids), Tier.DISK) == [True, True]
