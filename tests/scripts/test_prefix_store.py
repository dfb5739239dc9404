"""The store's command line: what is there, what is wrong, and less of it."""

import functools
import json
import sys
import time

import commands
import pytest
import stores
from places import REPOSITORY
from stores import extension, open_store, tokens

sys.path.insert(0, str(REPOSITORY / "scripts"))

import prefix_store


@pytest.fixture
def call(monkeypatch, capsys):
    return functools.partial(commands.call, prefix_store.main, monkeypatch, capsys)


@pytest.fixture
def path(tmp_path):
    """A parent, its child, and an extension of its own that is the youngest but one."""
    path = tmp_path / "store"
    with open_store(path) as store:
        ids = tokens(5)
        stores.commit(store, extension(ids[:12], snapshots=[3]))
        stores.commit(store, extension(tokens(2, 7)))
        stores.commit(store, extension(ids, first=3))
    return path


def test_list_shows_every_extension(call, path, tmp_path):
    code, out, _ = call("list", path, "--json", tmp_path / "told.json")
    assert code == 0
    assert "7 blocks, 1 snapshots" in out
    told = json.loads((tmp_path / "told.json").read_text())
    assert sorted((x["tokens"], x["blocks"], x["snapshots"]) for x in told["extensions"]) == [
        (8, 2, 0),
        (12, 3, 1),
        (20, 2, 0),
    ]
    for row in told["extensions"]:
        assert row["id"] in out
    child = next(x for x in told["extensions"] if x["tokens"] == 20)
    parent = next(x for x in told["extensions"] if x["tokens"] == 12)
    assert child["parent"] == parent["id"][:8]


def test_inspect_shows_one_extension(call, path):
    with open_store(path, writable=False) as store:
        wanted = next(x for x in store.extensions() if x.snapshot_ids)
    code, out, _ = call("inspect", path, wanted.id[:10])
    assert code == 0
    assert wanted.snapshot_ids[0] in out
    assert wanted.blocks[0].segment in out
    code, out, err = call("inspect", path, "nothing")
    assert (code, out) == (2, "")
    assert "0 extensions" in err


def test_verify_names_each_damaged_file_and_fails(call, path):
    code, out, _ = call("verify", path)
    assert code == 0
    assert "no problems" in out
    chunk = next(path.glob("segments/*/state/blocks/c/0/0"))
    chunk.write_bytes(bytes(chunk.stat().st_size))
    (path / "stray").write_bytes(b"")
    code, out, _ = call("verify", path)
    assert code == 1
    assert sorted(out.splitlines()) == [
        f"{chunk.relative_to(path)}: damaged: its checksum does not fit its bytes",
        "stray: unreferenced: no manifest refers to it",
    ]
    (path / "store.json").write_bytes(b"{}")
    code, out, _ = call("verify", path)
    assert (code, len(out.splitlines())) == (1, 1)


def test_prune_takes_leaves_first_and_of_those_the_oldest(call, path):
    def left() -> list[int]:
        with open_store(path, writable=False) as store:
            return sorted(x.extension.end for x in store.extensions())

    with open_store(path, writable=False) as store:
        size = store.bytes_used
    code, out, _ = call("prune", path, "--to-bytes", size - 1)
    assert code == 0
    assert left() == [3, 5]  # the parent is older, but has a child
    call("prune", path, "--to-bytes", size // 2)
    assert left() == [3]
    call("prune", path, "--older-than", 3600)
    assert left() == [3]
    code, out, _ = call("prune", path, "--older-than", 0)
    assert "1 extensions removed" in out
    assert left() == []


def test_prune_keeps_what_a_younger_extension_goes_on_from(call, tmp_path, monkeypatch):
    path, now = tmp_path / "aged", time.time()
    with open_store(path) as store:
        for what, age in ((extension(tokens(3)), 100), (extension(tokens(5), first=3), 10)):
            monkeypatch.setattr(time, "time", lambda age=age: now - age)
            stores.commit(store, what)
    monkeypatch.setattr(time, "time", lambda: now)
    assert "0 extensions removed" in call("prune", path, "--older-than", 50)[1]
    assert "2 extensions removed" in call("prune", path, "--older-than", 5)[1]


def test_prune_discards_what_is_damaged(call, path):
    manifest = next((path / "manifests").iterdir())
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert call("verify", path)[0] == 1
    assert call("prune", path, "--damaged")[0] == 0
    assert call("verify", path)[0] == 0


def test_prune_removes_a_segment_with_a_byte_that_changed_and_nothing_else(call, path):
    with open_store(path, writable=False) as store:
        (child,) = (x for x in store.extensions() if x.extension.first == 3)
    chunk = path / "segments" / child.blocks[0].segment / "state" / "blocks" / "c" / "0" / "0"
    data = bytearray(chunk.read_bytes())
    data[0] ^= 1
    chunk.write_bytes(data)
    assert call("verify", path)[0] == 1
    code, out, _ = call("prune", path, "--damaged")
    assert (code, ", 0 bytes freed" in out) == (0, False)
    assert call("verify", path)[0] == 0
    with open_store(path, writable=False) as store:
        assert tuple(map(len, stores.read(store))) == (3 + 2, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["prewarm", "/nowhere/store", "--prompts", "x", "--context", "-500"], "--context must be"),
        (["list", "/nowhere/store"], "no store at"),
        (["inspect", "/nowhere/store", "0"], "no store at"),
        (["verify", "/nowhere/store"], "no store at"),
        (["prune", "/nowhere/store", "--to-bytes", "0"], "no store at"),
        (["verify", __file__], "is a file"),
        (["list", str(REPOSITORY / "scripts")], "not a prefix store"),
        (["verify", str(REPOSITORY / "scripts")], "not a prefix store"),
    ],
)
def test_bad_input_is_one_line(call, arguments, words):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_prune_refuses_what_it_can_not_do(call, path):
    for arguments, words in (
        ([], "nothing to prune"),
        (["--to-bytes", -1], "at least 0"),
        (["--older-than", -1], "at least 0"),
    ):
        code, _, err = call("prune", path, *arguments)
        assert code == 2
        assert words in err
    with open_store(path):
        code, _, err = call("prune", path, "--to-bytes", 0)
    assert code == 2
    assert "another writer" in err
