"""A prefix in a folder is what its record says, or a line says why not."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from hybridkv.kinds import Kind
from hybridkv.prefixes.identity import Identity
from hybridkv.tiers import record
from hybridkv.tiers.record import PrefixRefused, PrefixWords
from hybridkv.tiers.store import json as store_json

BLOCK = 16
IDENTITY = Identity(geometry="g", weights="w", layout="l", numerics="n", extra=(("a", "é"),))


def make(count=3, positions=(16, 48), **changes):
    rng = np.random.default_rng(0)
    parts = {
        "identity": IDENTITY,
        "root": IDENTITY.root("tenant"),
        "block_tokens": BLOCK,
        "block_spans": {Kind.COMPRESSED: slice(0, 12), Kind.INDEXER: slice(12, 17)},
        "snapshot_spans": {Kind.WINDOW: slice(0, 9), Kind.TAIL: slice(9, 20)},
        "tokens": rng.integers(0, 99, count * BLOCK).astype(np.uint32),
        "blocks": rng.integers(0, 2**32, (count, 17), np.uint32),
        "positions": positions,
        "snapshots": rng.integers(0, 2**32, (len(positions), 20), np.uint32),
    }
    return PrefixWords(**(parts | changes))


PREFIX = make()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("prefix") / "one"
    path.mkdir()
    record.write(path, PREFIX)
    return path


@pytest.fixture
def folder(written, tmp_path):
    """A copy to damage."""
    return shutil.copytree(written, tmp_path / "copy")


def same(a, b):
    for field in dataclasses.fields(PrefixWords):
        np.testing.assert_equal(getattr(a, field.name), getattr(b, field.name))


def refused(path, part=""):
    with pytest.raises(PrefixRefused) as caught:
        record.read(path)
    assert "\n" not in str(caught.value)
    assert part in str(caught.value)


def rewritten(folder, **changes):
    """The record with other fields and a right checksum."""
    file = folder / record.FILE
    body = store_json.decode(file.read_bytes())
    file.write_bytes(store_json.encode(body | changes))


def test_it_comes_back_as_it_was(written):
    back = record.read(written)
    same(back, PREFIX)
    assert back.nbytes == 4 * (3 * 17 + 2 * 20 + 48)


@pytest.mark.parametrize(
    "prefix",
    [
        make(positions=()),
        make(snapshot_spans={}, positions=(), snapshots=np.empty((0, 0), np.uint32)),
        make(blocks=np.zeros((3, 17), np.uint32)),
    ],
    ids=["no snapshot", "no state", "zeros"],
)
def test_a_prefix_without_a_kind_or_of_zeros_comes_back(prefix, tmp_path):
    record.write(tmp_path, prefix)
    same(record.read(tmp_path), prefix)


def test_many_blocks_are_several_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "_ARRAY_BYTES", 2 * 17 * 4)
    prefix = make(count=5, positions=(80,))
    record.write(tmp_path, prefix)
    names = sorted(path.name for path in (tmp_path / "state").iterdir())
    assert names == ["blocks_0", "blocks_1", "blocks_2", "snapshot_0"]
    same(record.read(tmp_path), prefix)


def test_a_flipped_bit_anywhere_is_found(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 1 + 2 * 3
    rng, flips = np.random.default_rng(0), 0
    for file in files:
        data = file.read_bytes()
        for at in {0, len(data) - 1, *rng.integers(0, len(data), 6).tolist()}:
            changed = bytearray(data)
            changed[at] ^= 1 << int(rng.integers(8))
            file.write_bytes(bytes(changed))
            refused(folder)
            flips += 1
        file.write_bytes(data)
    same(record.read(folder), PREFIX)
    assert flips >= 40


def test_a_file_that_is_short_missing_or_too_many_is_found(folder):
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        data = file.read_bytes()
        file.write_bytes(data[:-1])
        refused(folder)
        file.unlink()
        refused(folder)
        file.write_bytes(data)
    (folder / "state" / "more").write_bytes(b"x")
    refused(folder, "more or fewer files")


def test_what_describes_an_array_is_also_digested(folder):
    """Of the same length and the same meaning to TensorStore."""
    file = folder / "state" / "blocks_0" / "zarr.json"
    data = file.read_bytes()
    value = json.loads(data)
    changed = json.dumps(dict(reversed(value.items())), separators=(",", ":")).encode()
    assert len(changed) == len(data)
    assert changed != data
    file.write_bytes(changed)
    refused(folder, "zarr.json does not have its digest")


def test_a_damaged_kind_is_named(folder):
    chunk = folder / "state" / "snapshot_1" / "c" / "0"
    data = bytearray(chunk.read_bytes())
    data[-1] ^= 1
    chunk.write_bytes(bytes(data))
    refused(folder, "TAIL of snapshot 1")


def test_a_folder_without_a_record_holds_no_prefix(folder, tmp_path):
    (folder / record.FILE).unlink()
    for path in (folder, tmp_path / "nowhere"):
        refused(path, "holds no prefix")
    (folder / record.FILE).write_text(json.dumps({"format": record.FORMAT}))
    refused(folder, "checksum")


def test_a_link_is_not_followed(folder, tmp_path):
    shutil.move(folder / "state", tmp_path / "elsewhere")
    (folder / "state").symlink_to(tmp_path / "elsewhere")
    refused(folder, "is not there")


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("version", 2, "version"),
        ("positions", [16, 47], "ends of blocks"),
        ("positions", [16], ""),
        ("block_tokens", 24, ""),
        ("block_tokens", 2**40, "block_tokens"),
        ("block_words", {"compressed": 12, "indexer": 2**40}, "smaller"),
        ("block_words", {"compressed": 17}, "other kinds"),
        ("block_words", {"unknown": 17}, ""),
        ("blocks", [3, 3], "more or fewer blocks"),
        ("blocks", [-1, 4], ""),
        ("files", {"../../etc/passwd": [1, ""]}, "more or fewer files"),
        ("identity", {"geometry": "g"}, "identity"),
        ("root", "00", "root"),
        ("digests", "", "digests"),
        ("block_checks", {}, "other kinds"),
    ],
)
def test_a_record_with_a_right_checksum_and_wrong_fields_is_refused(folder, field, value, part):
    rewritten(folder, **{field: value})
    refused(folder, part)


def test_what_can_not_be_written_is_one_line(tmp_path):
    (tmp_path / "state").write_text("a file where a folder should be")
    with pytest.raises(PrefixRefused, match="can't write the prefix") as caught:
        record.write(tmp_path, PREFIX)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / record.FILE).exists()
