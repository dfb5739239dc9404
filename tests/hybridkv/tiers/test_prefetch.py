"""Segments are read ahead within a limit, after every load, and are not read again."""

import numpy as np
import pytest
from fake_device import MOVED, World, ids_of, pools, quick_segments

from hybridkv.prefixes.plan import Plan
from hybridkv.tiers.faults import Fault, Planned, Point, Schedule
from hybridkv.tiers.prefetch import Prefetched

SEGMENT = np.zeros(10, np.uint32)


def test_a_segment_is_kept_until_it_is_taken():
    shelf = Prefetched(100)
    shelf.put("a", SEGMENT)
    assert "a" in shelf
    assert shelf.bytes_used == 40
    assert shelf.take("a") is SEGMENT
    assert shelf.take("a") is None
    assert shelf.bytes_used == 0


def test_the_oldest_goes_when_there_is_no_room_and_what_never_fits_is_not_kept():
    shelf = Prefetched(100)
    for name in "abc":
        shelf.put(name, SEGMENT)
    assert ["a" in shelf, "b" in shelf, "c" in shelf] == [False, True, True]
    assert shelf.bytes_used == 80
    shelf.put("large", np.zeros(26, np.uint32))
    assert "large" not in shelf
    assert shelf.bytes_used == 80


def test_the_same_segment_counts_once():
    shelf = Prefetched(100)
    shelf.put("a", SEGMENT)
    shelf.put("a", SEGMENT)
    assert shelf.bytes_used == 40
    shelf.clear()
    assert shelf.bytes_used == 0
    assert "a" not in shelf


@pytest.fixture(autouse=True)
def quick():
    with quick_segments():
        yield


def on_disk(path, *prompts, **options):
    """A world after a restart whose prompts are on disk only."""
    world = World(disk=pools(64), path=path, **options)
    for ids in prompts:
        world.publish(ids, snapshots=(len(ids) // 16,))
    world.stored()
    world.restart(**options)
    return world


def segments_read(world):
    """How often each segment is read from now on."""
    read, real = [], world.mover.store._segment

    def segment(id_, future):
        read.append(id_)
        return real(id_, future)

    world.mover.store._segment = segment
    return read


def ahead(world, ids):
    plan = world.plan(ids)
    assert isinstance(plan, Plan)
    world.mover.wanted(plan)


def test_what_was_read_ahead_is_loaded_and_not_read_again(tmp_path):
    ids = ids_of(7, 1)
    world = on_disk(tmp_path / "s", ids)
    read = segments_read(world)
    ahead(world, ids)
    assert world.workers[0].step()
    assert len(read) == world.mover.counters.prefetched == 3
    assert world.mover._prefetched.bytes_used == 7 * world.device.geometry.block_bytes
    assert world.start_of(ids) == 7 * 16
    assert len(read) == 3
    assert world.mover._prefetched.bytes_used == 0
    world.at_rest()


def test_a_load_that_somebody_waits_for_goes_first(tmp_path):
    first, second = ids_of(7, 1), ids_of(7, 2)
    world = on_disk(tmp_path / "s", first, second)
    ahead(world, first)
    hold, ticket = world.begin(second)
    world.workers[0].step()
    assert world.mover.counters.prefetched == 0
    world.settle(lambda: ticket.state().value == "ready")
    world.end(hold, ticket)
    world.at_rest()


def test_no_more_than_the_limit_is_read_ahead(tmp_path):
    ids = ids_of(12, 1)
    limit = 2 * MOVED * World().device.geometry.block_bytes
    world = on_disk(tmp_path / "s", ids, prefetch_bytes=limit)
    read = segments_read(world)
    ahead(world, ids)
    while world.workers[0].step():
        pass
    assert len(read) == 2
    assert world.mover._prefetched.bytes_used == limit
    assert world.start_of(ids) == 12 * 16
    assert len(read) == 4


def test_what_the_host_has_is_not_read_from_the_disk(tmp_path):
    ids = ids_of(6, 1)
    world = World(host=pools(16), disk=pools(16), path=tmp_path / "s")
    world.publish(ids)
    world.stored()
    world.evict()
    ahead(world, ids)
    assert not world.workers[0].jobs


def test_reading_ahead_that_fails_costs_nothing_but_the_time(tmp_path):
    ids = ids_of(6, 1)
    # The first is read to see how fast the disk is.
    faults = Schedule([Planned(point=Point.READ_SEGMENT, fault=Fault.SHORT_READ, nth=2)])
    world = on_disk(tmp_path / "s", ids, faults=faults)
    ahead(world, ids)
    world.workers[0].step()
    assert faults.done
    assert world.mover.counters.prefetched == 0
    assert world.start_of(ids) == 6 * 16
    world.at_rest()


def test_a_reset_forgets_what_was_read_ahead(tmp_path):
    ids = ids_of(6, 1)
    world = on_disk(tmp_path / "s", ids)
    ahead(world, ids)
    world.workers[0].step()
    assert world.mover._prefetched.bytes_used
    world.reset()
    assert world.mover._prefetched.bytes_used == 0
    assert world.start_of(ids) == 6 * 16
