"""Whatever happens to the files of a store: right bytes, or a miss with a reason."""

import json
import os
import shutil

import numpy as np
import pytest
import stores
from stores import extension, open_store, tokens

from hybridkv.tiers.store import json as store_json
from hybridkv.tiers.store import segments
from hybridkv.tiers.store import verify as store_verify
from hybridkv.tiers.store.folder import Folder
from hybridkv.tiers.store.records import Damaged, ProblemKind, StoreError


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A parent of 3 blocks with a snapshot, and a child of 2 with another."""
    path = tmp_path_factory.mktemp("whole") / "store"
    with open_store(path) as store:
        stores.commit(store, extension(tokens(3), snapshots=[3]))
        stores.commit(store, extension(tokens(5), first=3, snapshots=[5]))
    return path


@pytest.fixture
def path(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "store")


def manifests(path):
    """The parent's and the child's manifest."""
    found = sorted((path / "manifests").iterdir(), key=lambda x: body(x)["first"])
    assert [body(x)["first"] for x in found] == [0, 3]
    return found


def body(file):
    return store_json.decode(file.read_bytes())


def problems(path):
    return store_verify.verify(Folder(path))


def use(path) -> int:
    """Reads all that a store offers; the number of misses. Wrong words fail."""
    with open_store(path, writable=False) as store:
        misses = 0
        for stored in store.extensions():
            inner = stored.extension
            for place, number in zip(stored.blocks, range(inner.blocks), strict=True):
                try:
                    ((_, rows),) = store.read_segments([place.segment])
                    want = stores.block_words(inner.digest(number))
                    np.testing.assert_array_equal(rows[place.index], want)
                except Damaged:
                    misses += 1
            for id_, at in zip(stored.snapshot_ids, inner.snapshots, strict=True):
                try:
                    words = store.read_snapshot(id_)
                    np.testing.assert_array_equal(words, stores.snapshot_words(at.digest))
                except Damaged:
                    misses += 1
        return misses + 5 + 2 - store.blocks - store.snapshots


def test_the_undamaged_store_has_no_problems(path):
    assert problems(path) == []
    assert use(path) == 0


@pytest.mark.parametrize("where", [0.0, 0.5, 0.999])
def test_every_flipped_byte_is_found_and_never_read(path, where):
    sizes = stores.files(path)
    assert len(sizes) > 1 + 2 + 4 * 2  # Orbax writes notes of its own beside each array
    data_files = 0
    for name, size in sizes.items():
        if not size:
            continue
        file = path / name
        good = file.read_bytes()
        bad = bytearray(good)
        bad[int(size * where)] ^= 1 << (size % 8)
        file.write_bytes(bad)
        assert name in {problem.file for problem in problems(path)}, name
        if name == "store.json":
            with pytest.raises(StoreError, match=r"store\.json"):
                open_store(path, writable=False)
        else:
            misses = use(path)
            data_files += misses > 0
        file.write_bytes(good)
    # Manifests and arrays; Orbax's own notes, as what ends an array's file, are never needed.
    assert data_files == (2 + 4 if where < 0.9 else 2)
    assert problems(path) == []


@pytest.mark.parametrize("how", ["truncated", "missing", "longer", "folder", "link"])
def test_every_file_that_is_not_there_as_it_was_is_found_and_never_read(path, tmp_path, how):
    for name in stores.files(path):
        file = path / name
        good = file.read_bytes()
        if how == "truncated":
            if not good:
                continue
            file.write_bytes(good[:-1])
        elif how == "longer":
            file.write_bytes(good + b"0")
        else:
            file.unlink()
        if how == "folder":
            file.mkdir()
        elif how == "link":
            (tmp_path / "outside").write_bytes(good)
            file.symlink_to(tmp_path / "outside")
        if name == "store.json":
            with pytest.raises(StoreError):
                open_store(path, writable=False)
        else:
            assert use(path) > 0 or not name.startswith(("segments", "snapshots"))
            if name.startswith("manifests") and how in ("missing", "folder"):
                assert problems(path)  # its files, which nobody refers to
            else:
                told = {x.file for x in problems(path)}
                assert name in told or {x for x in told if x.startswith("manifests")}, name
        if file.is_dir():
            file.rmdir()
        file.unlink(missing_ok=True)
        file.write_bytes(good)
    assert problems(path) == []


def test_a_folder_that_is_a_link_out_of_the_store_is_not_used(path, tmp_path):
    name = next((path / "segments").iterdir())
    shutil.move(name, tmp_path / "outside")
    name.symlink_to(tmp_path / "outside")
    assert use(path) > 0


def test_reading_deletes_nothing(path):  # B202
    before = stores.files(path)
    (chunk,) = [x for x in path.glob("segments/*/state/blocks/c/0/0")][:1]
    chunk.write_bytes(bytes(chunk.stat().st_size))
    before = stores.files(path)
    assert use(path) > 0
    assert stores.files(path) == before


def test_a_segment_that_another_one_replaced_is_a_miss(path):  # B202
    one, two = sorted((path / "snapshots").iterdir())
    shutil.rmtree(one)
    shutil.copytree(two, one)
    assert use(path) == 1


def test_without_its_parent_an_extension_is_left_out_until_it_is_back(path):
    parent, child = manifests(path)
    data = parent.read_bytes()
    parent.unlink()
    with open_store(path, writable=False) as reader:
        assert reader.extensions() == ()
        (problem,) = reader.problems
        assert (problem.kind, problem.file) == (
            ProblemKind.NO_PARENT,
            f"manifests/{child.name}",
        )
        parent.write_bytes(data)
        added, _ = reader.refresh()
        assert len(added) == 2
        assert reader.problems == ()


def test_a_damaged_manifest_keeps_its_files_until_someone_discards_it(path):
    _, child = manifests(path)
    child.write_bytes(child.read_bytes()[:-1])
    before = stores.files(path)
    with open_store(path) as store:
        assert stores.files(path) == before
        assert [x.file for x in store.problems] == [f"manifests/{child.name}"]
        assert store.discard_problems() > 0
        assert store.problems == ()
        assert store.verify() == []
        assert store.blocks == 3
        assert store.bytes_used == sum(stores.files(path).values())
        stores.commit(store, extension(tokens(5), first=3, snapshots=[5]))
        assert store.blocks == 5


@pytest.mark.parametrize(
    ("where", "how", "left"),
    [
        ("parent's segment", "flipped", (0, 0)),
        ("child's segment", "flipped", (3, 1)),
        ("parent's snapshot", "flipped", (5, 1)),
        ("child's segment", "gone", (3, 1)),
        ("parent's snapshot", "gone", (5, 1)),
    ],
)
def test_discarding_takes_damaged_files_with_what_goes_on_from_them(path, where, how, left):
    parent, child = (body(x)["folders"] for x in manifests(path))
    told = child if where.startswith("child") else parent
    folder = path / next(x for x in told if x.startswith(where.split()[1]))
    leaf = "blocks" if "segment" in where else "snapshot"
    file = next(x for x in folder.rglob("0*") if x.is_file() and leaf in str(x))
    with open_store(path) as store:
        damage(file, how)
        assert store.discard_problems() > 0
        assert (store.blocks, store.snapshots) == left
        assert (store.problems, store.verify()) == ((), [])
        assert tuple(map(len, stores.read(store))) == left
        assert store.bytes_used == sum(stores.files(path).values())
        stores.commit(store, extension(tokens(5), snapshots=[3, 5]))
        assert tuple(map(len, stores.read(store))) == (5, 2)


def damage(file, how):
    if how == "gone":
        file.unlink()
        return
    data = bytearray(file.read_bytes())
    data[3] ^= 1
    file.write_bytes(data)


def test_two_manifests_of_one_block_are_one_too_many(path):
    parent, _ = manifests(path)
    other = "0" * 32
    copy = body(parent) | {"id": other}
    (path / "manifests" / f"{other}.json").write_bytes(store_json.encode(copy))
    with open_store(path, writable=False) as reader:
        assert reader.blocks == 5
        assert [x.kind for x in reader.problems] == [ProblemKind.DUPLICATE]


def folder_of(told, group="segments"):
    return next(name for name in told["folders"] if name.startswith(group))


def rename_folder(told, name):
    told["folders"][name] = told["folders"].pop(folder_of(told))


def rename_file(told, name):
    files = told["folders"][folder_of(told)]["files"]
    files[name] = files.pop("state/blocks/c/0/0")


def raw(told, **changes):
    told["folders"][folder_of(told)]["raw"].update(changes)


def resize(told, size):
    told["folders"][folder_of(told)]["files"]["state/blocks/c/0/0"][0] = size


HOSTILE = {
    "folder above": lambda x: rename_folder(x, "segments/../../outside"),
    "absolute folder": lambda x: rename_folder(x, "/etc"),
    "other group": lambda x: rename_folder(x, "manifests/" + "0" * 32),
    "file above": lambda x: rename_file(x, "../../../../etc/passwd"),
    "absolute file": lambda x: rename_file(x, "/etc/passwd"),
    "file with dots": lambda x: rename_file(x, "state/./blocks/c/0/0"),
    "empty name": lambda x: rename_file(x, ""),
    "huge file": lambda x: resize(x, 2**47),
    "larger file": lambda x: resize(x, 10**40),
    "negative file": lambda x: resize(x, -1),
    "file of True bytes": lambda x: resize(x, True),
    "small file": lambda x: resize(x, 1),
    "huge segment": lambda x: x["folders"][folder_of(x)].update(rows=10**9),
    "more rows than bytes": lambda x: x["folders"][folder_of(x)].update(files={}),
    "many files": lambda x: x["folders"][folder_of(x)]["files"].update(
        {f"f{i}": [0, "0" * 32] for i in range(100)}
    ),
    "rows in a file that is not listed": lambda x: raw(x, path="state/blocks/c/0/1"),
    "rows in a file above": lambda x: raw(x, path="../../../../etc/passwd"),
    "rows in no file": lambda x: raw(x, path=["state/blocks/c/0/0"]),
    "rows before a file": lambda x: raw(x, offset=-4),
    "rows past a file": lambda x: raw(x, offset=24),
    "rows in half": lambda x: raw(x, offset=0.5),
    "more bytes than rows": lambda x: raw(x, bytes=100),
    "rows without a range": lambda x: x["folders"][folder_of(x)].update(raw={}),
    "a range of rows that is text": lambda x: x["folders"][folder_of(x)].update(raw="all"),
    "folders missing": lambda x: x.pop("folders"),
    "one folder missing": lambda x: x["folders"].pop(folder_of(x)),
    "one folder more": lambda x: x["folders"].update(
        {"snapshots/" + "0" * 32: x["folders"][folder_of(x, "snapshots")]}
    ),
    "id of another": lambda x: x.update(id="0" * 32),
    "segment outside": lambda x: x.update(segments=["../" + "0" * 32]),
    "row outside": lambda x: x.update(index=[0, 1, 3]),
    "negative row": lambda x: x.update(index=[0, 1, -1]),
    "row twice": lambda x: x.update(index=[0, 1, 1]),
    "rows swapped": lambda x: x.update(index=[1, 0, 2]),
    "fewer rows": lambda x: x.update(index=[0, 1]),
    "places no list": lambda x: x.update(index={"0": 0}),
    "other tokens": lambda x: x.update(tokens=store_json.to_base64(bytes(48))),
    "tokens cut": lambda x: x.update(tokens=store_json.to_base64(bytes(47))),
    "tokens no base64": lambda x: x.update(tokens="\N{SNOWMAN}"),
    "no digests": lambda x: x.update(digests=""),
    "root of another": lambda x: x.update(root="0" * 64),
    "identity of another": lambda x: x.update(identity="0" * 64),
    "first elsewhere": lambda x: x.update(first=1),
    "huge first": lambda x: x.update(first=2**70),
    "checks missing": lambda x: x["checks"].pop("indexer"),
    "one kind more": lambda x: x["checks"].update(window=x["checks"]["indexer"]),
    "checks cut": lambda x: x["checks"].update(indexer=""),
    "snapshot check missing": lambda x: x["snapshots"][0]["checks"].pop("tail"),
    "snapshot elsewhere": lambda x: x["snapshots"][0].update(position=8),
    "snapshot in a block": lambda x: x["snapshots"][0].update(position=11),
    "snapshots no list": lambda x: x.update(snapshots=7),
    "snapshot id outside": lambda x: x["snapshots"][0].update(id="../x"),
    "never written": lambda x: x.update(written=-1),
    "other format": lambda x: x.update(format="pickle"),
    "other version": lambda x: x.update(version=2),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_that_lies_is_left_out_with_a_reason(path, name):
    parent, child = manifests(path)
    told = body(parent)
    HOSTILE[name](told)
    parent.write_bytes(store_json.encode(told))
    if name == "rows swapped":  # every field is right: what is read is not
        assert use(path) == 3
        return
    with open_store(path, writable=False) as reader:
        assert reader.extensions() == ()
        files = {x.file for x in reader.problems}
        assert files == {f"manifests/{parent.name}", f"manifests/{child.name}"}
        assert all(len(str(x).splitlines()) == 1 for x in reader.problems)
    assert problems(path)


def test_a_child_that_claims_another_place_than_its_parents_end_is_left_out(path):
    _, child = manifests(path)
    told = body(child)
    told["first"] += 1
    told["snapshots"][0]["position"] += stores.BLOCK
    child.write_bytes(store_json.encode(told))
    with open_store(path, writable=False) as reader:
        assert reader.blocks == 3
        assert [x.kind for x in reader.problems] == [ProblemKind.FOREIGN]


def test_a_manifest_that_claims_a_folder_of_another_is_left_out(path):
    parent, child = manifests(path)
    told, other = body(child), body(parent)
    name = folder_of(other, "snapshots")
    told["folders"][name] = other["folders"][name]
    child.write_bytes(store_json.encode(told))
    with open_store(path) as store:
        assert store.blocks == 3
        assert [x.kind for x in store.problems] == [ProblemKind.FOREIGN]
    assert (path / name).exists()


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1]", b"\x80\x04K\x01.", b"[" * 100_000, store_json.encode({})]
)
def test_what_is_no_manifest_is_left_out(path, data):
    _, child = manifests(path)
    child.write_bytes(data)
    framed = store_json.encode({}).replace(b"{}", data)
    for attempt in (data, framed):
        child.write_bytes(attempt)
        with open_store(path, writable=False) as reader:
            assert reader.blocks == 3
            assert len(reader.problems) == 1


def test_an_array_that_claims_other_shapes_is_not_read(path):
    array = next(path.glob("segments/*"))
    note = array / "state/blocks/zarr.json"
    good = json.loads(note.read_text())
    shape = tuple(good["shape"])
    assert segments.start_read(array, "blocks", shape).result().shape == shape
    huge = json.loads(json.dumps(good))
    huge["chunk_grid"]["configuration"]["chunk_shape"] = [2**20, 2**20]
    huge["codecs"][0]["configuration"]["chunk_shape"] = [2**20, 2**20]
    for changed in (good | {"shape": [2**30, 8]}, good | {"data_type": "int32"}, huge):
        note.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=r"not uint32|larger than its shape"):
            segments.start_read(array, "blocks", shape)


def test_a_stray_file_is_told_and_leftovers_of_a_writer_are_removed(path):
    leftovers = [
        path / "segments" / ("0" * 32) / "x",
        path / "segments" / ("1" * 32 + ".orbax-checkpoint-tmp") / "x",
        path / "snapshots" / ("2" * 32) / "x",
        path / "manifests" / ("3" * 32 + ".json.__lock"),
    ]
    for file in leftovers:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"x")
    stray = path / "manifests" / "readme.txt"
    stray.write_bytes(b"x")
    assert len(problems(path)) == 5
    with open_store(path, writable=False) as reader:
        assert reader.blocks == 5
    assert all(file.exists() for file in leftovers)
    with open_store(path) as store:
        assert store.blocks == 5
    assert not any(file.exists() for file in leftovers)
    assert [x.file for x in problems(path)] == ["manifests/readme.txt"]
    assert os.listdir(path / "segments") != []


def test_verify_tells_how_far_it_is(path):
    told = []
    store_verify.verify(Folder(path), lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 0
    assert [done for done, _ in told] == sorted(done for done, _ in told)
