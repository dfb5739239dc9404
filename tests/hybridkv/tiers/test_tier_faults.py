"""What tiers make of faults: damage gets no digest, nothing that may be whole is deleted.

What ``verify.py faults`` found once is here by itself, on a device of numpy words.
"""

import errno
import logging
import shutil

import numpy as np
import pytest
from fake_device import BLOCK, World, ids_of, pools, quick_segments

from hybridkv.blocks.entries import Tier
from hybridkv.prefixes.plan import Miss
from hybridkv.tiers.faults import Fault, Faults, Planned, Point, Schedule
from hybridkv.tiers.store.records import StoreError
from hybridkv.tiers.storing import PAUSE_S

IDS = ids_of(8, 1)


@pytest.fixture(autouse=True)
def quick():
    with quick_segments():
        yield


def planned(point: Point, fault: Fault, nth: int = 1) -> Schedule:
    return Schedule([Planned(point=point, fault=fault, nth=nth)], delay_s=0.0)


def test_what_was_damaged_on_the_host_is_not_written_to_the_disk(tmp_path):
    """With a digest of its own it would be decoded from after a restart."""
    faults = planned(Point.HOST_STORE, Fault.FLIPPED_BIT, 2)
    world = World(host=pools(16), disk=pools(32), path=tmp_path / "s", faults=faults)
    world.publish(IDS, snapshots=(4, 8))
    world.stored()
    assert faults.missed == ()
    counters = world.mover.counters
    assert (counters.spoiled[Tier.HOST], counters.failed_stores[Tier.DISK]) == (1, 1)
    assert "DamagedHostBytes" in counters.last_error
    world.publish(IDS, snapshots=(4, 8))  # whoever asks next
    world.stored()
    assert all(world.there(world.run(IDS), Tier.DISK))  # from the device, without a pause
    world.restart(host=pools(0, 0), faults=Schedule())
    assert world.start_of(IDS) == 8 * BLOCK  # every word that is written is compared
    world.at_rest()


@pytest.mark.parametrize("point", [Point.READ_SEGMENT, Point.DISK_LOAD])
def test_what_could_only_not_be_read_stays_in_the_store(tmp_path, point):
    world = World(disk=pools(32), path=tmp_path / "s")
    world.publish(IDS, snapshots=(4, 8))
    world.stored()
    # The first segment is read when the store is opened, to learn how fast it is.
    nth = 2 if point is Point.READ_SEGMENT else 1
    world.restart(faults=planned(point, Fault.PERMISSION, nth))
    world.bring(IDS)
    assert world.mover.counters.spoiled[Tier.DISK] > 0
    assert isinstance(world.plan(IDS), Miss)  # nobody tries it again at once
    world.at_rest()
    assert (world.mover.store.blocks, world.mover.store.snapshots) == (8, 2)
    world.publish(IDS, snapshots=(4, 8))
    world.stored()
    assert all(world.there(world.run(IDS), Tier.DISK))  # found there, not written again
    world.restart(faults=Schedule())
    assert world.start_of(IDS) == 8 * BLOCK


class BadSector(Faults):
    """Segments and snapshots that can't be read, however often it is tried."""

    def __init__(self):
        self.names = frozenset()

    def reach(self, point, data=None, path=None):
        reads = (Point.READ_SEGMENT, Point.READ_SNAPSHOT)
        if point in reads and path.name in self.names:
            raise OSError(errno.EIO, "Input/output error")
        return data


@pytest.mark.parametrize("group", ["segments", "snapshots"])
def test_what_can_never_be_read_is_at_last_written_anew(tmp_path, group):
    faults, other = BadSector(), ids_of(3, 2)
    world = World(disk=pools(32), path=tmp_path / "s", faults=faults)
    for ids in (other, IDS):
        world.publish(ids, snapshots=(len(ids) // BLOCK,))
        world.stored()
    store, digest = world.mover.store, world.chain(IDS).digests[-1].tobytes()
    bad = store.find(digest).segment if group == "segments" else store.find_snapshot(digest)
    faults.names = frozenset([bad])
    ways = []
    for _ in range(5):
        world.evict()
        ways.append((world.start_of(IDS) == 8 * BLOCK, (tmp_path / "s" / group / bad).exists()))
        world.publish(IDS, snapshots=(8,))
        world.stored()
    assert ways == [(False, True)] * 3 + [(True, False)] * 2
    assert store.verify() == []
    world.evict()
    assert world.start_of(other) == 3 * BLOCK
    world.at_rest()


def test_a_removal_that_fails_is_told_and_tried_again(tmp_path):
    faults = planned(Point.WRITE_MANIFEST, Fault.NO_SPACE, 2)
    world = World(disk=pools(32), path=tmp_path / "s", faults=faults)
    world.publish(IDS)
    world.stored()
    world.allocator.evict(blocks=3, tier=Tier.DISK)
    world.stored()
    assert faults.missed == ()
    assert world.mover.counters.failed_stores[Tier.DISK] == 1
    assert world.mover.store.blocks == 8
    assert not world.mover.busy  # nobody waits for the pause
    world.device.now += 2 * PAUSE_S
    world.stored()
    assert world.mover.store.blocks == 5
    assert world.mover.store.verify() == []


def test_reading_ahead_that_fails_is_told(tmp_path):
    world = World(disk=pools(32), path=tmp_path / "s")
    world.publish(IDS, snapshots=(8,))
    world.stored()
    world.restart(faults=planned(Point.READ_SEGMENT, Fault.FLIPPED_BIT, 2))
    world.mover.wanted(world.plan(IDS))
    while any([worker.step() for worker in world.workers]):
        pass
    assert world.mover.counters.failed_prefetches == 1
    assert "bytes are not those that were written" in world.mover.counters.last_error
    assert world.start_of(IDS) == 8 * BLOCK  # the disk had them right


def test_a_folder_that_is_no_store_is_a_line_and_a_miss(tmp_path, caplog):
    (tmp_path / "notes.txt").write_text("mine")
    with caplog.at_level(logging.WARNING, "hybridkv"):
        world = World(host=pools(16), disk=pools(32), path=tmp_path)
    assert "is not a prefix store" in world.mover.unusable
    assert world.mover.unusable in caplog.text
    assert "\n" not in world.mover.unusable
    world.publish(IDS, snapshots=(8,))
    world.stored()
    world.evict()
    assert world.start_of(IDS) == 8 * BLOCK  # from the host
    world.at_rest()
    with pytest.raises(StoreError, match="is not a prefix store"):
        World(disk=pools(32), path=tmp_path, require_store=True)


def test_a_store_that_vanishes_is_not_written_to_any_more(tmp_path):
    world = World(disk=pools(32), path=tmp_path / "s")
    world.publish(IDS)
    world.stored()
    shutil.rmtree(tmp_path / "s")
    world.evict()
    assert world.start_of(IDS) == 0
    other = ids_of(4, 2)
    world.publish(other)
    world.stored()
    assert not (tmp_path / "s").exists()
    assert world.mover.counters.failed_stores[Tier.DISK] >= 1
    assert np.any(world.there(world.run(other), Tier.DEVICE))
    world.at_rest()
