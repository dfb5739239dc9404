"""Folders that are no stores, or cease to be: nothing of anybody else's is touched, a line is said.

What ``verify.py faults`` found once is here by itself, without a model.
"""

import shutil

import pytest
import stores
from stores import extension, open_store, tokens

from hybridkv.tiers.faults import Fault, Planned, Point, Schedule
from hybridkv.tiers.store import header as store_header
from hybridkv.tiers.store.folder import Folder, may_pass, one_line
from hybridkv.tiers.store.records import Damaged, StoreError, StoreWriteError

IDS = tokens(6)


@pytest.fixture
def path(tmp_path):
    """A store of 3 blocks and a snapshot."""
    with open_store(tmp_path / "store") as store:
        stores.commit(store, extension(IDS[:12], snapshots=[3]))
    return tmp_path / "store"


def planned(point: Point, fault: Fault, nth: int = 1) -> Schedule:
    return Schedule([Planned(point=point, fault=fault, nth=nth)], delay_s=0.0)


@pytest.mark.parametrize("name", ["segments", "snapshots", "manifests"])
def test_a_folder_with_such_names_and_no_record_is_not_made_a_store(tmp_path, name):
    mine = tmp_path / "store" / name / "part_1"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    with pytest.raises(StoreError, match=r"is not a prefix store \(it has no store.json\)"):
        open_store(tmp_path / "store")
    assert mine.read_text() == "mine"


def test_a_process_that_died_while_it_made_a_store_blocks_nobody(tmp_path):
    left = tmp_path / "store" / store_header.UNFINISHED
    left.parent.mkdir()
    left.write_text("half")
    with open_store(tmp_path / "store") as store:
        assert not left.exists()
        stores.commit(store, extension(IDS))
        assert store.verify() == []


def test_a_file_in_the_place_of_a_folder_is_one_line(path):
    shutil.rmtree(path / "segments")
    (path / "segments").write_text("")
    with pytest.raises(StoreError, match=r"can't open the store .*: mend that"):
        open_store(path)
    open_store(path, writable=False).close()  # all of it is missing, which is a miss


@pytest.mark.parametrize("again", [False, True], ids=["deleted", "replaced"])
def test_nothing_is_written_where_the_store_is_no_more(path, again):
    with open_store(path) as store:
        shutil.rmtree(path)
        if again:
            open_store(path).close()
        for change in (
            lambda: stores.commit(store, extension(IDS)),
            lambda: store.remove([]),
            store.compact,
        ):
            with pytest.raises(StoreWriteError, match="was deleted or replaced"):
                change()
        assert path.exists() == again
    with open_store(path) as store:
        assert (store.blocks, store.problems) == (0, ())


def test_what_was_stored_twice_goes_with_the_next_writer(path):
    with open_store(path, faults=planned(Point.READ_MANIFEST, Fault.PERMISSION)) as store:
        assert store.blocks == 0
        stores.commit(store, extension(IDS, snapshots=[3]))
    with open_store(path) as store:
        assert store.verify() == []
        assert [len(x) for x in stores.read(store)] == [6, 1]
    assert len(list((path / "manifests").iterdir())) == 1


def test_what_lacks_a_file_and_was_stored_again_goes_with_the_next_writer(path):
    (lost,) = (path / "snapshots").iterdir()
    shutil.rmtree(lost)
    with open_store(path) as store:
        assert (store.blocks, [x.kind.value for x in store.problems]) == (0, ["missing"])
        stores.commit(store, extension(IDS, snapshots=[3]))
    with open_store(path) as store:
        assert [len(x) for x in stores.read(store)] == [6, 1]
        assert store.verify() == []


def test_of_what_is_stored_twice_in_part_nothing_goes(path):
    """The one with more blocks is used; the other one has a snapshot that is nowhere else."""
    with open_store(path, faults=planned(Point.READ_MANIFEST, Fault.PERMISSION)) as store:
        stores.commit(store, extension(IDS))
    with open_store(path) as store:
        assert [len(x) for x in stores.read(store)] == [6, 0]
        assert [problem.kind.value for problem in store.problems] == ["duplicate"]
    assert len(list((path / "manifests").iterdir())) == 2


@pytest.mark.parametrize("fault", [Fault.SHORT_WRITE, Fault.FLIPPED_BIT])
def test_a_manifest_that_can_not_be_rewritten_is_as_before(path, fault):
    faults = planned(Point.WRITE_MANIFEST, fault)
    with open_store(path, faults=faults) as store:
        last = store.find(extension(IDS[:12]).digest(2))
        (snapshot,) = store.extensions()[0].snapshot_ids
        with pytest.raises(StoreWriteError):
            store.remove([last], [snapshot])
        assert faults.missed == ()
        assert [len(x) for x in stores.read(store)] == [3, 1]
    with open_store(path) as store:
        assert store.verify() == []
        assert [len(x) for x in stores.read(store)] == [3, 1]


@pytest.mark.parametrize(
    ("fault", "passes"),
    [(Fault.PERMISSION, True), (Fault.LOST_FILE, False), (Fault.FLIPPED_BIT, False)],
)
def test_bytes_that_could_only_not_be_read_may_be_whole(path, fault, passes):
    with open_store(path, faults=planned(Point.READ_SNAPSHOT, fault)) as store:
        (name,) = store.extensions()[0].snapshot_ids
        with pytest.raises(Damaged) as caught:
            store.read_snapshot(name)
        assert caught.value.may_pass == passes


def test_causes_are_found_in_long_messages():
    error = ValueError("OUT_OF_RANGE: Failed writing: Failed to write 9 bytes: File too large [..]")
    assert one_line(error) == "File too large"
    assert not may_pass(error)
    assert may_pass(ValueError("UNAVAILABLE: try again"))
    assert not may_pass(FileNotFoundError(2, "No such file"))


def test_sizes_pass_over_what_is_deleted_meanwhile(path, monkeypatch):
    real = store_header.pathlib.Path.lstat

    def lstat(self):
        if self.name == "zarr.json":
            raise FileNotFoundError(self)
        return real(self)

    everything = Folder(path).sizes()
    monkeypatch.setattr(store_header.pathlib.Path, "lstat", lstat)
    found = Folder(path).sizes()
    assert found == {k: v for k, v in everything.items() if not k.endswith("zarr.json")}
