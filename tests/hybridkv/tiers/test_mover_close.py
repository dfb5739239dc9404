"""The end of a mover: in its time, honest about what was stored, and never two writers."""

import threading
import time

import pytest
from fake_device import World, ids_of, pools, quick_segments
from hand_workers import Hook

from hybridkv.blocks.entries import Tier
from hybridkv.tiers.faults import Point
from hybridkv.tiers.store import Store
from hybridkv.tiers.store.records import StoreError

IDS = ids_of(6, 1)


@pytest.fixture(autouse=True)
def quick():
    with quick_segments():
        yield


def test_a_writer_that_is_late_keeps_the_store_to_itself_until_it_ends(tmp_path):
    """Another writer would delete the segments it has not finished as orphans."""
    path, go, at = tmp_path / "s", threading.Event(), threading.Event()

    def compacts(nth):
        at.set()
        assert go.wait(20)

    faults = Hook(Point.COMPACT, compacts)
    world = World(disk=pools(32), path=path, by_hand=False, faults=faults, compact_share=0.01)
    world.publish(IDS)
    world.stored()
    world.allocator.evict(blocks=2, tier=Tier.DISK)
    assert not world.mover.close(timeout_s=0.2)
    assert at.is_set()
    with pytest.raises(StoreError, match="another writer"):
        Store.open_as_is(path, writable=True)
    go.set()
    assert not world.mover.close(timeout_s=20)  # waits for it, and says the same
    with Store.open_as_is(path, writable=True) as store:
        assert (store.blocks, store.problems, store.verify()) == (4, (), [])
        list(store.read_segments({x.segment for e in store.extensions() for x in e.blocks}))


def test_all_workers_together_have_the_time_that_was_given(tmp_path):
    go, world = threading.Event(), World(disk=pools(32), path=tmp_path / "s", by_hand=False)
    for worker in world.workers:
        worker.submit(lambda: go.wait(20))
    began = time.monotonic()
    assert not world.mover.close(timeout_s=1.5)
    assert time.monotonic() - began < 2.9
    go.set()
    assert world.mover.close(timeout_s=20)


def test_no_time_is_enough_where_nobody_works(tmp_path):
    world = World(disk=pools(32), path=tmp_path / "s", by_hand=False)
    assert world.mover.close(timeout_s=0.0)
    Store.open_as_is(tmp_path / "s", writable=True).close()


@pytest.mark.parametrize("host", [0, 32])
def test_a_device_that_cannot_be_read_any_more_keeps_nothing_open(tmp_path, host):
    world = World(host=pools(host), disk=pools(32), path=tmp_path / "s", by_hand=False)

    def broken(places):
        raise RuntimeError("the device is gone")

    world.publish(IDS)
    world.publish(ids_of(5, 2))
    world.device.read_blocks = broken
    assert not world.mover.close(timeout_s=20)
    assert world.mover.counters.last_error == "RuntimeError: the device is gone"
    assert not any(worker._thread.is_alive() for worker in world.workers)
    Store.open_as_is(tmp_path / "s", writable=True).close()
    assert not world.mover.close(timeout_s=20)


def test_turns_that_fail_do_not_keep_a_flush_beyond_its_time(tmp_path):
    world = World(disk=pools(32), path=tmp_path / "s", by_hand=False)

    def broken():
        raise RuntimeError("the books are wrong")

    world.publish(IDS)
    world.mover._storing.turn = broken
    assert not world.mover.flush(timeout_s=0.05)
    assert "the books are wrong" in world.mover.counters.last_error
    del world.mover._storing.turn
    assert world.mover.flush(timeout_s=20)
