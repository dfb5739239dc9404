"""A writer that dies or fails anywhere leaves a store that is whole."""

import errno
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
import stores
from hand_workers import Hook
from places import REPOSITORY
from stores import Crash, extension, open_store, tokens

from hybridkv.tiers.faults import NO_FAULTS, SENSIBLE, Fault, Planned, Point, Schedule
from hybridkv.tiers.store import segments
from hybridkv.tiers.store.records import Damaged, StoreError, StoreWriteError

IDS = tokens(7)
WRITES = [
    *((Point.WRITE_SEGMENT, nth) for nth in (1, 2)),
    *((Point.WRITE_SNAPSHOT, nth) for nth in (1, 2)),
    (Point.WRITE_MANIFEST, 1),
]


def schedule(point: Point, fault: Fault, nth: int = 1) -> Schedule:
    return Schedule([Planned(point=point, fault=fault, nth=nth)], crash=stores.crash, delay_s=0.001)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A store with a parent of 3 blocks and a snapshot."""
    path = tmp_path_factory.mktemp("whole") / "store"
    with open_store(path) as store:
        stores.commit(store, extension(IDS[:12], snapshots=[3]))
    return path


@pytest.fixture
def path(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "store")


def child():
    """4 blocks, which are 2 segments, and 2 snapshots."""
    return extension(IDS, first=3, snapshots=[5, 7])


def assert_whole(path, blocks: int, snapshots: int) -> None:
    """All or nothing is there, to a reader at once and to the next writer."""
    with open_store(path, writable=False) as reader:
        assert [len(x) for x in stores.read(reader)] == [blocks, snapshots]
        assert reader.problems == ()
    with open_store(path) as store:
        assert [len(x) for x in stores.read(store)] == [blocks, snapshots]
        assert store.verify() == []
        assert store.bytes_used == sum(stores.files(path).values())


@pytest.mark.parametrize(("point", "nth"), [*WRITES, (Point.COMMITTED, 1)])
def test_after_a_crash_all_of_a_commit_is_there_or_nothing(path, point, nth):
    faults = schedule(point, Fault.CRASH, nth)
    with open_store(path, faults=faults) as store, pytest.raises(Crash):
        stores.commit(store, child())
    assert faults.missed == ()
    assert_whole(path, *((7, 3) if point is Point.COMMITTED else (3, 1)))


@pytest.mark.parametrize(("point", "nth"), WRITES[1::2] + WRITES[4:])
@pytest.mark.parametrize(
    "fault", sorted(SENSIBLE[Point.WRITE_SEGMENT] - {Fault.CRASH}, key=lambda x: x.value)
)
def test_a_write_that_fails_leaves_nothing_and_can_be_tried_again(path, point, nth, fault):
    before = stores.files(path)
    faults = schedule(point, fault, nth)
    with open_store(path, faults=faults) as store:
        if fault is Fault.DELAY:
            stores.commit(store, child())
        else:
            with pytest.raises(StoreWriteError) as caught:
                stores.commit(store, child())
            assert "\n" not in str(caught.value)
            assert stores.files(path) == before
            assert store.bytes_used == sum(before.values())
            assert store.blocks == 3
            stores.commit(store, child())
        assert faults.missed == ()
        assert store.blocks == 7
    assert_whole(path, 7, 3)


def test_what_could_not_be_deleted_goes_with_the_next_write(path):
    faults = Schedule(
        [
            Planned(point=Point.WRITE_SNAPSHOT, fault=Fault.NO_SPACE),
            Planned(point=Point.DELETE, fault=Fault.PERMISSION),
        ]
    )
    with open_store(path, faults=faults) as store:
        before = stores.files(path)
        with pytest.raises(StoreWriteError, match="No space left"):
            stores.commit(store, child())
        assert stores.files(path) != before
        stores.commit(store, child())
        assert store.verify() == []
        assert store.bytes_used == sum(stores.files(path).values())


def test_what_orbax_leaves_behind_when_it_fails_goes_too(path, monkeypatch):
    def fails(folder, leaf, array):
        unfinished = folder.with_name(f"{folder.name}.orbax-checkpoint-tmp")
        unfinished.mkdir()
        (unfinished / "zarr.json").write_bytes(b"x")
        raise ValueError("RESOURCE_EXHAUSTED: Failed writing:\n No space left on device [x='y']")

    before = stores.files(path)
    with open_store(path) as store:
        monkeypatch.setattr(segments, "save", fails)
        with pytest.raises(StoreWriteError, match=r"\(No space left on device\)"):
            stores.commit(store, child())
        assert stores.files(path) == before


@pytest.mark.parametrize(
    ("point", "nth"), [(Point.WRITE_MANIFEST, 1), (Point.DELETE, 1), (Point.DELETE, 2)]
)
@pytest.mark.parametrize("fault", [Fault.CRASH, Fault.PERMISSION])
def test_a_removal_that_stops_half_way_leaves_what_is_whole(path, point, nth, fault):
    with open_store(path) as store:
        more = stores.commit(store, child())
    with open_store(path, faults=schedule(point, fault, nth)) as store:
        first = store.extensions()[0]
        # The child goes as a whole, the parent becomes shorter.
        blocks = (*more.blocks, *first.blocks[1:])
        failed = (point, nth, fault) != (Point.DELETE, 2, Fault.PERMISSION)
        snapshots = (*more.snapshot_ids, *first.snapshot_ids)
        if failed:
            with pytest.raises((Crash, StoreWriteError)):
                store.remove(blocks, snapshots)
        else:
            store.remove(blocks, snapshots)
            assert len(store.problems) == 1  # a folder that stays until the next opening
    left = {
        (Point.DELETE, 1): (7, 3),
        (Point.DELETE, 2): (1, 0),
        (Point.WRITE_MANIFEST, 1): (3, 1),
    }
    with open_store(path, writable=False) as reader:
        assert (reader.blocks, reader.snapshots) == left[point, nth]
    assert_whole(path, *left[point, nth])


@pytest.mark.parametrize("fault", [Fault.CRASH, Fault.NO_SPACE])
@pytest.mark.parametrize(
    ("point", "nth"),
    [(Point.WRITE_SEGMENT, 1), (Point.COMPACT, 1), (Point.WRITE_MANIFEST, 2), (Point.DELETE, 1)],
)
def test_a_compaction_that_stops_half_way_loses_nothing(tmp_path, point, nth, fault):
    if fault not in SENSIBLE[point]:
        fault = Fault.PERMISSION
    path = tmp_path / "store"
    with open_store(path) as store:
        for seed in range(2):
            stored = stores.commit(store, extension(tokens(3, seed)))
            store.remove(stored.blocks[1:])
        store._faults = schedule(point, fault, nth)
        if (point, fault) == (Point.DELETE, Fault.PERMISSION):
            store.compact()
            assert len(store.problems) == 1
        else:
            with pytest.raises((Crash, StoreWriteError)):
                store.compact()
        assert store._faults.missed == ()
        if fault is not Fault.CRASH:
            assert len(stores.read(store)[0]) == 2
            store.compact()
    assert_whole(path, 2, 0)


def test_all_that_a_manifest_names_is_forced_to_the_disk_before_it_is_written(path, monkeypatch):
    """After a power cut a manifest that is there finds its files, at their sizes."""
    synced, force = set(), os.fsync

    def fsync(handle: int) -> None:
        force(handle)
        synced.add(os.fstat(handle)[1:3])  # inode and device

    def must_be_synced(_: int) -> None:
        new = below() - before
        assert {x.name for x in new} >= {"commit_success.txt", "_METADATA", "zarr.json", "0"}
        way = {parent for x in new for parent in x.parents if parent.is_relative_to(path)}
        assert [x for x in new | way if x.stat()[1:3] not in synced] == []

    def below() -> set[pathlib.Path]:
        return {x for group in ("segments", "snapshots") for x in (path / group).rglob("*")}

    monkeypatch.setattr("os.fsync", fsync)
    with open_store(path) as store:
        before = below()
        store._faults = Hook(Point.WRITE_MANIFEST, must_be_synced)
        more = stores.commit(store, child())
        assert store._faults.reached == 1
        store._faults = NO_FAULTS
        store.remove(more.blocks[1:], more.snapshot_ids)
        before = below()
        synced.clear()
        store._faults = Hook(Point.WRITE_MANIFEST, must_be_synced)
        assert store.compact() > 0
        assert store._faults.reached == 1


def test_what_can_not_be_forced_to_the_disk_is_not_committed(path, monkeypatch):
    def fails(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = stores.files(path)
    with open_store(path) as store:
        monkeypatch.setattr("os.fsync", fails)
        with pytest.raises(StoreWriteError, match="Input/output error"):
            stores.commit(store, child())
        assert stores.files(path) == before
        monkeypatch.undo()
        stores.commit(store, child())
    assert_whole(path, 7, 3)


READS = (Point.OPEN, Point.LIST, Point.READ_MANIFEST, Point.READ_SEGMENT, Point.READ_SNAPSHOT)


@pytest.mark.parametrize(
    ("point", "fault"),
    [(p, f) for p in READS for f in Fault if f in SENSIBLE[p] - {Fault.CRASH}],
)
def test_a_read_that_fails_is_a_miss_and_never_wrong_words(path, point, fault):
    faults = schedule(point, fault)
    if point in (Point.OPEN, Point.LIST) and fault is not Fault.DELAY:
        with pytest.raises(StoreError) as caught:
            open_store(path, writable=False, faults=faults)
        assert "\n" not in str(caught.value)
    else:
        with open_store(path, writable=False, faults=faults) as reader:
            missed = 3 - reader.blocks
            try:
                stores.read(reader)
            except Damaged:
                missed += 1
            assert (missed > 0) == (fault is not Fault.DELAY)
    assert faults.missed == ()
    if fault is not Fault.LOST_FILE:
        assert_whole(path, 3, 1)


def test_a_process_that_is_killed_gives_the_lock_back(path):
    code = f"""
import sys
sys.path.insert(0, {str(REPOSITORY / "tests")!r})
import stores
assert not {{"tensorstore", "orbax"}} & set(sys.modules)
from hybridkv.tiers.faults import Fault, Planned, Point, Schedule
faults = Schedule([Planned(point=Point.WRITE_MANIFEST, fault=Fault.CRASH)])
store = stores.open_store(sys.argv[1], faults=faults)
stores.commit(store, stores.extension(stores.tokens(7), first=3))
"""
    ended = subprocess.run([sys.executable, "-c", code, str(path)], cwd=REPOSITORY, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert_whole(path, 3, 1)
