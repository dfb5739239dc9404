"""A store gives back what was committed, to any process, whole or not at all."""

import dataclasses
import os

import numpy as np
import pytest
import stores
from hand_workers import Hook
from stores import commit, extension, open_store, tokens

from hybridkv import geometry
from hybridkv.errors import UserError
from hybridkv.kinds import Kind
from hybridkv.prefixes.identity import Identity
from hybridkv.tiers.faults import Fault, Planned, Point, Schedule
from hybridkv.tiers.store import Store
from hybridkv.tiers.store import header as store_header
from hybridkv.tiers.store import json as store_json
from hybridkv.tiers.store.records import (
    Damaged,
    ProblemKind,
    StoreError,
    StoreFullError,
    StoreLayout,
    StoreWriteError,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def store(path):
    with open_store(path) as store:
        yield store


def digests(what) -> set[bytes]:
    return {what.digest(i) for i in range(what.blocks)}


def test_what_was_committed_is_there_after_opening_again(path):
    ids = tokens(7)
    with open_store(path) as store:
        stored = commit(store, extension(ids, snapshots=[2, 7]))
        assert [p.index for p in stored.blocks] == [0, 1, 2, 0, 1, 2, 0]
    with open_store(path, writable=False) as store:
        blocks, snapshots = stores.read(store)
        (found,) = store.extensions()
        assert blocks == digests(extension(ids))
        assert len(snapshots) == 2
        np.testing.assert_array_equal(found.extension.tokens, ids)
        assert [at.position for at in found.extension.snapshots] == [8, 28]
        assert (found.blocks, found.snapshot_ids) == (stored.blocks, stored.snapshot_ids)
        assert store.problems == ()
        assert store.verify() == []
        assert store.bytes_used == sum(stores.files(path).values())


def test_orbax_alone_can_load_a_segment_and_a_snapshot(store, path):
    from orbax.checkpoint import v1 as ocp

    what = extension(tokens(2), snapshots=[2])
    stored = commit(store, what)
    segment = ocp.load(path / "segments" / stored.blocks[0].segment)
    np.testing.assert_array_equal(segment["blocks"][1], stores.block_words(what.digest(1)))
    snapshot = ocp.load(path / "snapshots" / stored.snapshot_ids[0])
    np.testing.assert_array_equal(snapshot["snapshot"], stores.snapshot_words(what.digest(1)))


def test_committing_writes_without_a_word(store, caplog):
    commit(store, extension(tokens(1)))
    assert caplog.records == []


def test_committing_twice_writes_nothing_the_second_time(store, path):
    what = extension(tokens(4), snapshots=[4])
    first = commit(store, what)
    before = stores.files(path)
    again = commit(store, what)
    assert stores.files(path) == before
    assert (again.blocks, again.snapshot_ids) == (first.blocks, first.snapshot_ids)


def test_only_what_is_new_of_an_extension_is_written(store):
    ids = tokens(7)
    first = commit(store, extension(ids[:20], snapshots=[5]))
    more = commit(store, extension(ids, snapshots=[3, 5, 7]))
    assert more.blocks[:5] == first.blocks
    assert more.snapshot_ids[1] == first.snapshot_ids[0]
    assert store.blocks == 7
    assert store.snapshots == 3
    assert [x.extension.first for x in store.extensions()] == [0, 5]
    stores.read(store)


def test_parents_come_before_children_and_branches_share_them(store):
    a, b = tokens(6), tokens(6)
    b[12:] += 1
    commit(store, extension(a[:12]))
    commit(store, extension(a, first=3))
    commit(store, extension(b, first=3, snapshots=[6]))
    assert [x.extension.first for x in store.extensions()] == [0, 3, 3]
    assert len(stores.read(store)[0]) == 9


def test_snapshots_alone_are_an_extension(path):
    ids = tokens(5)
    with open_store(path) as store:
        commit(store, extension(ids))
        alone = dataclasses.replace(extension(ids, first=5, snapshots=[4, 2]))
        commit(store, alone)
        assert store.blocks == 5
    with open_store(path) as store:
        assert len(stores.read(store)[1]) == 2
        last = store.extensions()[-1].extension
        assert (last.blocks, last.first, len(last.snapshots)) == (0, 4, 2)


def test_namespaces_do_not_meet(store):
    commit(store, extension(tokens(2), namespace="a"))
    commit(store, extension(tokens(2), namespace="b"))
    assert store.blocks == 4


def test_find_knows_places_by_digest(store):
    what = extension(tokens(2), snapshots=[1])
    stored = commit(store, what)
    assert store.find(what.digest(1)) == stored.blocks[1]
    assert store.find_snapshot(what.digest(0)) == stored.snapshot_ids[0]
    assert store.find(bytes(32)) is None
    assert store.find_snapshot(what.digest(1)) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"parent": bytes(32)}, "root as its parent"),
        ({"first": 1}, "root as its parent"),
        ({"tokens": tokens(2) + np.uint32(1)}, "block 0"),
        ({"tokens": tokens(1)}, "tokens"),
        ({"digests": np.zeros((0, 32), np.uint8), "tokens": tokens(0)}, "neither"),
    ],
)
def test_an_extension_that_contradicts_itself_is_refused(store, change, words):
    what = dataclasses.replace(extension(tokens(2)), **change)
    with pytest.raises(StoreError, match=words):
        commit(store, what)
    assert store.blocks == 0


def test_a_snapshot_stands_on_the_block_it_names(store):
    what = extension(tokens(2), snapshots=[2])
    at = what.snapshots[0]
    for wrong in (
        dataclasses.replace(at, position=4),
        dataclasses.replace(at, position=7),
        dataclasses.replace(at, position=12),
        dataclasses.replace(at, digest=bytes(32)),
    ):
        with pytest.raises(StoreError, match="snapshot"):
            commit(store, dataclasses.replace(what, snapshots=(wrong,)))


def test_a_child_without_its_parent_is_refused(store):
    with pytest.raises(StoreError, match="commit that first"):
        commit(store, extension(tokens(4), first=2))
    with pytest.raises(StoreError, match="commit that first"):
        commit(store, extension(tokens(4), first=4, snapshots=[4]))


def test_words_of_another_shape_are_refused(store):
    what = extension(tokens(1))
    for wrong in ([np.zeros(7, np.uint32)], [np.zeros(8, np.int32)], []):
        with pytest.raises(StoreError, match=r"give (uint32 \[8\]|each)"):
            store.commit(what, wrong, [])


def test_a_kind_with_no_words_is_not_a_kind_that_is_absent(path):  # B212
    spans = {Kind.WINDOW: slice(0, 0), Kind.TAIL: slice(0, 0)}
    empty = dataclasses.replace(stores.LAYOUT, snapshot_spans=spans)
    absent = dataclasses.replace(stores.LAYOUT, snapshot_spans={})
    what = extension(tokens(2), snapshots=[2])
    with open_store(path, layout=empty) as store:
        stored = commit(store, what)
        assert store.read_snapshot(stored.snapshot_ids[0]).shape == (0,)
        assert store.verify() == []
    with open_store(path, layout=empty) as store:
        assert store.layout.snapshot_spans == spans
        assert store.snapshots == 1
        assert store.find_snapshot(what.digest(0)) is None
        store.remove([], stored.snapshot_ids)
        assert store.snapshots == 0
    with pytest.raises(StoreError, match="other snapshot_spans"):
        open_store(path, layout=absent)


def test_blocks_without_words_are_kept_too(path):
    layout = dataclasses.replace(stores.LAYOUT, block_spans={})
    with open_store(path, layout=layout) as store:
        stored = commit(store, extension(tokens(4)))
    with open_store(path, layout=layout) as store:
        assert store.blocks == 4
        ((_, rows),) = store.read_segments([stored.blocks[0].segment])
        assert rows.shape == (3, 0)


# ---- removal and compaction


def test_leaves_go_and_their_segment_with_the_last_of_its_blocks(store, path):
    what = extension(tokens(7), snapshots=[7])
    stored = commit(store, what)
    store.remove(stored.blocks[5:], stored.snapshot_ids)
    assert store.blocks == 5
    assert {x.segment for x in stored.blocks[:5]} == set(os.listdir(path / "segments"))
    assert os.listdir(path / "snapshots") == []
    assert store.bytes_used == sum(stores.files(path).values())
    store.remove(stored.blocks[:5])
    assert set(stores.files(path)) == {"store.json"}
    store.remove(stored.blocks, stored.snapshot_ids)  # what is gone is passed over


def test_a_parent_outlives_its_children_and_its_snapshot(store, path):
    ids = tokens(6)
    stored = commit(store, extension(ids[:12], snapshots=[3]))
    child = commit(store, extension(ids, first=3))
    before = stores.files(path)
    for blocks, snapshots in (
        (stored.blocks[1:2], ()),
        (stored.blocks[2:], stored.snapshot_ids),
        ((*stored.blocks[2:], *child.blocks), ()),
    ):
        with pytest.raises(StoreError, match="remove its children"):
            store.remove(blocks, snapshots)
    assert stores.files(path) == before
    store.remove((*stored.blocks[2:], *child.blocks), stored.snapshot_ids)
    assert store.blocks == 2


def test_the_deepest_of_several_snapshots_of_a_manifest_without_blocks_goes_alone(path):
    ids = tokens(6)
    with open_store(path) as store:
        whole = commit(store, extension(ids)).extension
        commit(store, extension(ids, first=6, snapshots=[2, 4]))
        store.remove((), [store.find_snapshot(whole.digest(3))])
        assert store.find_snapshot(whole.digest(3)) is None
    with open_store(path) as store:
        assert store.problems == ()
        assert [len(x) for x in stores.read(store)] == [6, 1]
        store.remove((), [store.find_snapshot(whole.digest(1))])
        assert (store.blocks, store.snapshots) == (6, 0)


def test_manifests_forget_a_block_before_the_disk_does(store, path):
    stored = commit(store, extension(tokens(3), snapshots=[3]))
    store._faults = Schedule([Planned(point=Point.DELETE, fault=Fault.CRASH)], crash=stores.crash)
    with pytest.raises(stores.Crash):
        store.remove((), stored.snapshot_ids)
    assert os.listdir(path / "snapshots") == list(stored.snapshot_ids)
    with open_store(path, writable=False) as reader:
        assert reader.snapshots == 0
        strays = reader.verify()  # Orbax's files, which nobody refers to
        assert strays
        assert {x.kind for x in strays} == {ProblemKind.UNREFERENCED}
    store.close()
    with open_store(path) as again:
        assert os.listdir(path / "snapshots") == []
        assert again.verify() == []


def test_compaction_moves_what_is_alive_out_of_segments_that_are_mostly_dead(path):
    with open_store(path) as store:
        kept = []
        for seed in range(4):
            stored = commit(store, extension(tokens(3, seed)))
            store.remove(stored.blocks[1:])
            kept.append(extension(tokens(1, seed)))
        full = commit(store, extension(tokens(2, 9)))
        store.remove(full.blocks[1:])  # half alive: stays
        before, dead = store.bytes_used, store.dead_bytes
        freed = store.compact()
        assert 0 < freed == before - store.bytes_used
        assert freed / 2 < dead < 2 * freed  # about
        assert store.dead_bytes == 0
        assert store.bytes_used == sum(stores.files(path).values())
        assert len(os.listdir(path / "segments")) == 3  # 3 + 1 blocks, and the half one
        assert store.find(full.extension.digest(0)) == full.blocks[0]
        assert store.verify() == []
        assert store.compact() == 0
        want = set().union(*(digests(x) for x in kept), {full.extension.digest(0)})
        assert stores.read(store)[0] == want
    with open_store(path) as store:
        assert stores.read(store)[0] == want


@pytest.mark.parametrize("short", [0, 1], ids=["room for one segment", "a byte less"])
def test_compaction_never_takes_more_than_the_capacity(path, short):
    seen = []
    with open_store(path) as store:
        for seed in range(6):
            stored = commit(store, extension(tokens(3, seed)))
            store.remove(stored.blocks[1:])
        before, dead = store.bytes_used, store.dead_bytes
        segment = sum(stores.files(path / "segments" / stored.blocks[0].segment).values())
    with open_store(path, capacity_bytes=before + segment - short) as store:
        store._faults = Hook(Point.COMPACT, lambda _: seen.append(sum(stores.files(path).values())))
        freed = store.compact()
        assert (freed > 0, store.dead_bytes) == ((False, dead) if short else (True, 0))
        assert max(seen, default=0) <= store.capacity_bytes
        assert len(os.listdir(path / "segments")) == (6 if short else 2)
        assert store.verify() == []
        assert len(stores.read(store)[0]) == 6
        store.compact(beyond_capacity=True)
        assert store.dead_bytes == 0


def test_a_compaction_that_stops_keeps_the_segments_that_were_done(path):
    with open_store(path) as store:
        for seed in range(6):
            stored = commit(store, extension(tokens(3, seed)))
            store.remove(stored.blocks[1:])
        fault = Planned(point=Point.WRITE_SEGMENT, fault=Fault.NO_SPACE, nth=2)
        store._faults = Schedule([fault])
        with pytest.raises(StoreWriteError, match="No space left"):
            store.compact()
        assert len(os.listdir(path / "segments")) == 1 + 3
        assert store.bytes_used == sum(stores.files(path).values())
        assert store.compact() > 0
        assert len(os.listdir(path / "segments")) == 2
        assert len(stores.read(store)[0]) == 6


def test_compaction_leaves_a_damaged_segment_alone_and_says_so(store, path):
    stored = commit(store, extension(tokens(3)))
    store.remove(stored.blocks[1:])
    chunk = path / "segments" / stored.blocks[0].segment / "state/blocks/c/0/0"
    chunk.write_bytes(bytes(chunk.stat().st_size))
    for _ in range(2):
        assert store.compact() == 0
        assert store.find(stored.extension.digest(0)) == stored.blocks[0]
        (problem,) = store.problems  # once, however often it is tried
        assert problem.kind is ProblemKind.DAMAGED
        assert problem.file == f"segments/{stored.blocks[0].segment}"


def test_a_store_that_is_full_says_so_and_stays_as_it_is(path):
    with open_store(path, capacity_bytes=9_000) as store:
        commit(store, extension(tokens(3)))
        before = stores.files(path)
        big = extension(tokens(300, 5))
        with pytest.raises(StoreFullError, match="remove prefixes first"):
            commit(store, big)
        assert stores.files(path) == before
    with open_store(path) as store:
        assert store.capacity_bytes == 9_000


# ---- several processes


def test_a_second_writer_is_refused_and_readers_are_not(store, path):
    commit(store, extension(tokens(2)))
    with pytest.raises(StoreError, match="writable=False"):
        open_store(path)
    with open_store(path, writable=False) as reader:
        assert len(stores.read(reader)[0]) == 2
        with pytest.raises(StoreError, match="writable=True"):
            commit(reader, extension(tokens(3)))
        with pytest.raises(StoreError, match="writable=True"):
            reader.remove((), ())
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        commit(store, extension(tokens(3)))
    open_store(path).close()


def test_a_reader_sees_what_a_writer_adds_and_removes(store, path):
    ids = tokens(6)
    first = commit(store, extension(ids[:12], snapshots=[3]))
    with open_store(path, writable=False) as reader:
        assert reader.refresh() == ((), ())
        more = commit(store, extension(ids, first=3))
        added, vanished = reader.refresh()
        assert [x.id for x in added] == [more.id]
        assert vanished == ()
        assert len(stores.read(reader)[0]) == 6
        store.remove(more.blocks, first.snapshot_ids)
        with pytest.raises(Damaged):
            reader.read_snapshot(first.snapshot_ids[0])
        added, vanished = reader.refresh()
        assert [x.id for x in added] == [first.id]
        assert {x.id for x in vanished} == {first.id, more.id}
        assert reader.problems == ()
        assert reader.snapshots == 0
        assert store.refresh() == ((), ())


def test_rows_that_died_since_are_still_verified(store, path):
    stored = commit(store, extension(tokens(3)))
    chunk = path / "segments" / stored.blocks[0].segment / "state/blocks/c/0/0"
    reader = open_store(path, writable=False)
    store.remove(stored.blocks[2:])
    reader.refresh()
    data = bytearray(chunk.read_bytes())
    data[2 * 32 + 28] ^= 1  # last word of row 2, which is INDEXER
    chunk.write_bytes(data)
    for each in (store, reader):
        with pytest.raises(Damaged) as caught:
            next(each.read_segments([stored.blocks[0].segment]))
        assert caught.value.kind is Kind.INDEXER
    store._digests = False
    assert next(store.read_segments([stored.blocks[0].segment]))[1].shape == (3, 8)


# ---- opening


def test_a_store_of_another_identity_is_refused_with_the_parts(store, path):
    other = stores.with_identity(weights="x", extra=(("adapter", "a"),))
    with pytest.raises(StoreError, match=r"\(weights, extra.adapter differ\)"):
        open_store(path, identity=other, writable=False)


def test_a_writer_that_was_refused_holds_no_lock(store, path):
    store.close()
    with pytest.raises(StoreError) as refused:
        open_store(path, identity=stores.with_identity(weights="x"))
    open_store(path).close()
    assert refused.value.__traceback__ is not None  # alive until here, with all it refers to


def test_without_digests_a_lost_array_is_a_miss_and_not_zeros(store, path):
    stored = commit(store, extension(tokens(1), snapshots=[1]))
    with open_store(path, writable=False, digests=False) as reader:
        assert len(stores.read(reader)[0]) == 1
        for chunk in [*path.glob("segments/*/state/blocks/c/0/0"), *path.glob("snapshots/**/c/0")]:
            chunk.unlink()
        with pytest.raises(Damaged):
            next(reader.read_segments([stored.blocks[0].segment]))
        with pytest.raises(Damaged):
            reader.read_snapshot(stored.snapshot_ids[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_spans": {Kind.COMPRESSED: slice(0, 8)}}, "other block_spans"),
        ({"snapshot_spans": {Kind.WINDOW: slice(0, 7)}}, "other snapshot_spans"),
        ({"block_tokens": 8}, "other block_tokens"),
    ],
)
def test_a_store_of_another_layout_is_refused(store, path, change, words):
    with pytest.raises(StoreError, match=words):
        open_store(path, layout=dataclasses.replace(stores.LAYOUT, **change), writable=False)


def test_a_store_that_lacks_a_kind_is_refused(path):  # B006, B008
    old = dataclasses.replace(stores.LAYOUT, block_spans={Kind.COMPRESSED: slice(0, 8)})
    open_store(path, layout=old).close()
    with pytest.raises(StoreError, match="no INDEXER"):
        open_store(path)


def test_a_layout_that_lacks_a_kind_of_the_geometry_is_refused(path):  # B006
    layers = (geometry.LayerGeometry(window=4, ratio=4, overlap=True, indexed=True),)
    shape = geometry.Geometry(layers=layers, row_width=8, index_width=4)
    identity = Identity.of_geometry(shape, weights="w", numerics="n")
    open_store(path, identity=identity).close()
    for kind in (Kind.COMPRESSED, Kind.INDEXER, Kind.WINDOW, Kind.TAIL):
        blocks, snapshots = (
            {k: slice(0, 8) for k in spans if k is not kind}
            for spans in (stores.LAYOUT.block_spans, stores.LAYOUT.snapshot_spans)
        )
        for spans in (blocks, snapshots):
            if len(spans) == 2:
                spans[list(spans)[1]] = slice(8, 9)
        layout = StoreLayout(block_tokens=4, block_spans=blocks, snapshot_spans=snapshots)
        with pytest.raises(StoreError, match=f"no {kind.name}"):
            open_store(path.parent / kind.name, identity=identity, layout=layout)
        assert not (path.parent / kind.name).exists()


@pytest.mark.parametrize(
    "spans",
    [
        {Kind.COMPRESSED: slice(0, 4), Kind.INDEXER: slice(5, 8)},
        {Kind.COMPRESSED: slice(0, 4), Kind.INDEXER: slice(3, 8)},
        {Kind.COMPRESSED: slice(0, 8, 2)},
        {Kind.WINDOW: slice(0, 8)},
    ],
)
def test_words_that_no_kind_or_two_kinds_own_are_refused(spans):
    with pytest.raises(UserError, match=r"without gaps|it may have"):
        dataclasses.replace(stores.LAYOUT, block_spans=spans)


def test_segment_blocks_of_a_store_stay(store, path):
    store.close()
    with open_store(path, layout=dataclasses.replace(stores.LAYOUT, segment_blocks=5)) as again:
        assert again.layout.segment_blocks == 3


def test_another_version_is_refused(store, path):
    store.close()
    file = path / "store.json"
    body = store_json.decode(file.read_bytes()) | {"version": store_header.STORE_VERSION + 1}
    file.write_bytes(store_json.encode(body))
    with pytest.raises(StoreError, match="version 2, not 1"):
        open_store(path)


def test_what_is_no_store_is_refused_and_left_alone(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "cat.jpg").write_bytes(b"meow")
    with pytest.raises(StoreError, match="not a prefix store"):
        open_store(folder)
    assert os.listdir(folder) == ["cat.jpg"]
    with pytest.raises(StoreError, match="is a file"):
        open_store(folder / "cat.jpg")
    for options in ({"create": False}, {"writable": False}):
        with pytest.raises(StoreError, match="no store at"):
            open_store(tmp_path / "nothing", **options)
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "empty").mkdir()
    open_store(tmp_path / "empty").close()


def test_a_half_deleted_store_is_refused(store, path):
    commit(store, extension(tokens(1)))
    store.close()
    (path / "store.json").unlink()
    with pytest.raises(StoreError, match=r"it has no store\.json"):
        open_store(path)


def test_a_store_opens_without_the_model(store, path):
    commit(store, extension(tokens(2), snapshots=[1]))
    with Store.open_as_is(path) as reader:
        assert reader.identity == stores.IDENTITY
        assert reader.layout == stores.LAYOUT
        assert [len(x) for x in stores.read(reader)] == [2, 1]
        assert not reader.writable


@pytest.mark.parametrize("fault", [Fault.PERMISSION, Fault.NO_SPACE])
def test_a_folder_that_can_not_be_written_can_be_read(store, path, fault):
    commit(store, extension(tokens(1)))
    store.close()
    faults = Schedule([Planned(point=Point.LOCK, fault=fault)])
    with pytest.raises(StoreError, match="open it with writable=False"):
        open_store(path, faults=faults)
    with open_store(path, writable=False) as reader:
        assert reader.blocks == 1


def test_a_wrong_capacity_is_refused(path):
    with pytest.raises(StoreError, match="give bytes"):
        open_store(path, capacity_bytes=-1)


def test_an_unreadable_folder_is_one_line(store, path):
    commit(store, extension(tokens(1)))
    for point in (Point.OPEN, Point.LIST):
        faults = Schedule([Planned(point=point, fault=Fault.PERMISSION)])
        with pytest.raises(StoreError, match="Permission denied") as caught:
            open_store(path, writable=False, faults=faults)
        assert "\n" not in str(caught.value)


def test_a_failed_write_is_a_store_error_that_a_caller_can_count():
    assert issubclass(StoreFullError, StoreWriteError)
    assert issubclass(StoreWriteError, StoreError)
