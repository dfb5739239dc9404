"""Rows are read from the file that has them, into memory that nobody holds any more."""

import dataclasses
import shutil
import threading

import jax
import numpy as np
import pytest
import stores
from stores import extension, open_store, tokens

from hybridkv.tiers.store import json as store_json
from hybridkv.tiers.store import segments
from hybridkv.tiers.store.buffers import ALIGNMENT, Buffers
from hybridkv.tiers.store.records import Damaged
from hybridkv.tiers.store.writing import Writer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """7 blocks, which are 3 segments, and 2 snapshots."""
    path = tmp_path_factory.mktemp("whole") / "store"
    with open_store(path) as store:
        stores.commit(store, extension(tokens(7), snapshots=[3, 7]))
    return path


@pytest.fixture
def path(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "store")


def address(array) -> int:
    return array.ctypes.data


# ---- memory


def test_every_row_is_contiguous_and_aligned():
    for words in (1, 8, 16, 17, 112_456):
        rows = Buffers(3, words).take(2)
        assert rows.shape == (2, words)
        assert all(row.flags.c_contiguous and address(row) % ALIGNMENT == 0 for row in rows)


@pytest.mark.parametrize(
    "view",
    [
        lambda rows: rows,
        lambda rows: rows[1],
        lambda rows: rows[2, 3:].view(np.uint8),
        lambda rows: rows[1].data,
        lambda rows: np.asarray(rows[1].data.cast("B")),
    ],
)
def test_memory_is_used_again_when_nobody_holds_it_and_not_before(view):
    buffers = Buffers(3, 20)
    rows = buffers.take(3)
    rows[:] = 0x07070707
    first, held = address(rows), view(rows)
    del rows
    other = buffers.take(3)
    other[:] = 0
    assert address(other) != first
    assert np.asarray(held).view(np.uint8).min() == 7
    assert buffers.idle == 0
    del held
    assert buffers.idle == 1
    assert address(buffers.take(1)) == first


def test_an_array_of_jax_that_is_the_row_itself_keeps_the_memory():
    buffers = Buffers(2, 64)
    row = buffers.take(2)[1]
    row[:] = 7
    array = jax.block_until_ready(jax.device_put(row))
    del row
    for _ in range(3):
        buffers.take(2)[:] = 9
    assert set(np.asarray(array).tolist()) == {7}


def test_idle_memory_is_bounded():
    small, large = Buffers(1, 4), Buffers(1, 10 * 2**20)
    held = [small.take(1) for _ in range(50)]
    held += [large.take(1) for _ in range(5)]  # 40 MiB each, of which no page is touched
    held.clear()
    assert (small.idle, large.idle) == (8, 2)
    small.clear()
    assert small.idle == 0


# ---- reading


def test_what_a_writer_wrote_is_read_without_tensorstore(path, monkeypatch):
    monkeypatch.setattr(segments, "start_read", None)
    with open_store(path, writable=False) as reader:
        assert [len(x) for x in stores.read(reader)] == [7, 2]


def test_a_manifest_that_names_no_rows_is_read_with_tensorstore(path, monkeypatch):
    (file,) = (path / "manifests").iterdir()
    told = store_json.decode(file.read_bytes())
    for folder in told["folders"].values():
        del folder["raw"]
    file.write_bytes(store_json.encode(told))
    read, count = segments.start_read, []
    monkeypatch.setattr(segments, "start_read", lambda *x: count.append(x) or read(*x))
    with open_store(path) as store:
        assert [len(x) for x in stores.read(store)] == [7, 2]
        assert len(count) == 3 + 2
        assert store.verify() == []


def test_rows_that_lie_elsewhere_than_the_manifest_says_are_a_miss(path):
    (file,) = (path / "manifests").iterdir()
    told = store_json.decode(file.read_bytes())
    for folder in told["folders"].values():
        folder["raw"]["offset"] += 4
    file.write_bytes(store_json.encode(told))
    with open_store(path, writable=False) as reader:
        assert reader.blocks == 7
        (stored,) = reader.extensions()
        with pytest.raises(Damaged, match="COMPRESSED bytes are not"):
            next(reader.read_segments([stored.blocks[0].segment]))
        with pytest.raises(Damaged, match="WINDOW bytes are not"):
            reader.read_snapshot(stored.snapshot_ids[0])


@pytest.mark.parametrize("digests", [True, False])
def test_a_file_that_changed_its_size_under_an_open_store_is_a_miss(path, digests):
    with open_store(path, writable=False, digests=digests) as reader:
        stores.read(reader)
        (stored,) = reader.extensions()
        name = stored.blocks[0].segment
        chunk = path / "segments" / name / "state/blocks/c/0/0"
        good = chunk.read_bytes()
        for bad in (b"", good[:50], good[:-1], good + b"x"):
            chunk.write_bytes(bad)
            with pytest.raises(Damaged, match=f"it has {len(bad)} bytes, not {len(good)}"):
                next(reader.read_segments([name]))
        chunk.unlink()
        with pytest.raises(Damaged, match="No such file"):
            next(reader.read_segments([name]))
        chunk.write_bytes(good)
        stores.read(reader)


def test_rows_that_someone_holds_are_not_written_by_later_reads(path):
    with open_store(path, writable=False) as reader:
        (stored,) = reader.extensions()
        names = [place.segment for place in stored.blocks]
        held = [
            rows[place.index]
            for place, (_, rows) in zip(stored.blocks, reader.read_segments(names), strict=True)
        ]
        snapshots = [reader.read_snapshot(id_) for id_ in stored.snapshot_ids]
        for _ in range(3):
            stores.read(reader)
        for number, row in enumerate(held):
            want = stores.block_words(stored.extension.digest(number))
            np.testing.assert_array_equal(row, want)
            with pytest.raises(ValueError, match="read-only"):
                row[0] = 0
        for at, words in zip(stored.extension.snapshots, snapshots, strict=True):
            np.testing.assert_array_equal(words, stores.snapshot_words(at.digest))


def test_many_threads_may_read_while_the_store_is_closed(path):
    reader = open_store(path, writable=False)
    failed = []

    def read():
        try:
            for _ in range(20):
                stores.read(reader)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        reader.close()
    for thread in threads:
        thread.join()
    assert failed == []


# ---- where the rows are


@pytest.mark.parametrize(
    ("around", "offset"), [((b"", b""), 0), ((b"", b"index"), 0), ((b"index", b""), 5)]
)
def test_a_writer_finds_rows_at_either_end_of_a_file(path, around, offset):
    rows = np.arange(12, dtype=np.uint32).reshape(3, 4)
    folder = path / "segments" / "x"
    folder.mkdir()
    (folder / "a").write_bytes(bytes(100))
    (folder / "b").write_bytes(rows.tobytes().join(around))
    (folder / "c").write_bytes(b"short")
    with open_store(path, writable=False) as reader:
        writer = Writer(reader._folder, reader.layout, reader._faults)
        files = reader._folder.records("segments/x")
        raw = writer._raw("segments/x", files, rows)
        assert dataclasses.astuple(raw) == ("b", offset, 48)
        assert writer._raw("segments/x", files, rows + np.uint32(1)) is None


def test_compaction_and_removal_keep_what_is_known_of_rows(tmp_path, monkeypatch):
    path = tmp_path / "store"
    with open_store(path) as store:
        for seed in range(2):
            stored = stores.commit(store, extension(tokens(3, seed)))
            store.remove(stored.blocks[1:])
        store.compact()
    monkeypatch.setattr(segments, "start_read", None)
    with open_store(path, writable=False) as reader:
        assert len(stores.read(reader)[0]) == 2
