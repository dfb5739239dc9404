"""``verify.py restore``, ``poison`` and ``knockout`` at a small size, and that they can fail."""

import functools
import json
import sys

import commands
import jax
import numpy as np
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import verify
import verify_restore

import hybridkv.engine.steps as steps_module

call = functools.partial(commands.call, verify.main)


def test_restored_cells_equal_cold_runs(monkeypatch, capsys, tmp_path):
    file = tmp_path / "out.json"
    code, out, _ = call(monkeypatch, capsys, "restore", "--cells", 16, "--json", file)
    result = json.loads(file.read_text())
    assert code == 0
    assert result["ok"]
    assert {row["mode"] for rows in result["cells"].values() for row in rows} == {"copy", "replay"}
    assert "llama" in out


def test_poisoned_cells_equal_cold_runs(monkeypatch, capsys):
    code, _, _ = call(monkeypatch, capsys, "poison", "--cells", 8, "--model", "deepseek_v4")
    assert code == 0


def test_every_part_that_is_knocked_out_is_blamed(monkeypatch, capsys):
    code, out, _ = call(monkeypatch, capsys, "knockout", "--repeats", 1)
    assert code == 0
    assert "NO" not in out


def test_a_snapshot_that_is_not_copied_is_found(monkeypatch, capsys):
    real = steps_module.admit

    def forgets(cache, snapshots, slot, table, length, place):
        nothing = jax.tree.map(lambda x: x * 0, snapshots)
        return real(cache, nothing, slot, table, length, place)

    monkeypatch.setattr(steps_module, "admit", forgets)
    code, _, _ = call(monkeypatch, capsys, "restore", "--cells", 8, "--model", "deepseek_v4")
    assert code == 1


def test_a_digest_is_of_the_bits():
    assert verify_restore.digest(np.float32(0.0)) != verify_restore.digest(np.float32(-0.0))


def test_bad_counts_are_refused(monkeypatch, capsys):
    code, _, err = call(monkeypatch, capsys, "restore", "--cells", 0)
    assert code == 2
    assert "must be at least 1" in err
