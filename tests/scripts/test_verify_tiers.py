"""``verify.py restore --tiers`` at a small size, and that it can fail.

Its runner and its engine are those of other tests, given tiers, so that nothing is compiled; what
it does in new processes is done here after a restart in the same one.
"""

import functools
import json
import sys

import commands
import jax
import numpy as np
import pytest
from engines import toy_lab
from places import REPOSITORY
from scenarios.runs import toy_runner
from tiered import give_tiers, take_tiers

sys.path.insert(0, str(REPOSITORY / "scripts"))

import tier_lab
import tier_restarts
import verify
import verify_engine
import verify_restore

from hybridkv.engine.cache_side import CacheSide
from hybridkv.errors import UserError

ALL = ("restore", "--tiers", "device,host,disk", "--model", "deepseek_v4")


class Killed(BaseException):
    """The process is gone."""


@pytest.fixture
def one_process(monkeypatch):
    """A restart is another mover over the same store, with empty bookkeeping."""
    runner, lab = toy_runner(), toy_lab()
    lab.renew()

    def make_runner(model, *, tiers, cost):
        give_tiers(runner, tiers)
        return runner

    def make_engine(runtime, blocks, snapshots, *, debug, tiers, cost):
        lab.renew()
        lab.engine.seating.restores = give_tiers(lab.engine.runner, tiers)
        return lab.engine

    def spawn(mode, job, folder, *, killed=False):
        job = json.loads(json.dumps(job))
        if mode != "talk":
            done = {"cells": tier_restarts.cells, "resume": tier_restarts.resume}[mode]
            return json.loads(json.dumps(done(job, folder)))
        with pytest.raises(Killed):
            tier_restarts.talk(job, folder, folder / "result.json")
        return json.loads((folder / "result.json").read_text())

    def kill():
        raise Killed

    monkeypatch.setattr(verify_restore, "make_runner", make_runner)
    monkeypatch.setattr(verify_engine, "make_engine", make_engine)
    monkeypatch.setattr(tier_restarts, "spawn", spawn)
    monkeypatch.setattr(tier_restarts, "kill_process", kill)
    yield
    for each in (runner, lab.engine.runner):
        take_tiers(each)
    lab.renew()


call = functools.partial(commands.call, verify.main)


@pytest.mark.usefixtures("one_process")
def test_cells_of_every_tier_and_policy_equal_cold_runs(monkeypatch, capsys, tmp_path):
    file = tmp_path / "out.json"
    code, out, _ = call(
        monkeypatch, capsys, *ALL, "--policies", "full,none", "--cells", 60, "--json", file
    )
    result = json.loads(file.read_text())
    assert (code, result["ok"], result["wrong"]) == (0, True, [])
    rows = {(row["tier"], row["policy"]): row for row in result["rows"]}
    tiers = ("device", "host", "disk", "mixed", "restarted")
    assert set(rows) == {(tier, policy) for tier in tiers for policy in ("full", "none")}
    assert {row["cells"] for row in rows.values()} == {6}
    for tier in tiers:
        assert rows[tier, "full"]["copied"] > 0
        assert rows[tier, "none"]["copied"] == 0
    assert sum(rows[tier, "none"]["replayed"] for tier in tiers) > 8
    talks = {talk["policy"]: talk for talk in result["conversations"]}
    assert set(talks) == {"full", "none"}
    assert talks["none"]["replayed"] > 0
    assert "restarted" in out


@pytest.mark.usefixtures("one_process")
def test_bytes_that_are_others_on_the_device_are_found(monkeypatch, capsys, tmp_path):
    real = CacheSide.write_blocks

    def forgets(self, blocks, places):
        nothing = np.zeros(blocks[0].shape, blocks[0].dtype)
        real(self, [jax.device_put(nothing, x.sharding) for x in blocks], places)

    monkeypatch.setattr(CacheSide, "write_blocks", forgets)
    file = tmp_path / "out.json"
    code, _, _ = call(
        monkeypatch, capsys, "restore", "--tiers", "device,host", "--policies", "full",
        "--cells", 24, "--model", "deepseek_v4", "--json", file,
    )  # fmt: skip
    assert code == 1
    rows = {row["tier"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["device"]["mismatches"] == 0
    assert rows["host"]["mismatches"] > 0
    assert rows["host"]["other plans"] == rows["host"]["compiled"] == 0


def test_a_process_that_is_to_be_killed_is(tmp_path):
    """Really: with nothing to do."""
    nothing = {"models": [], "policies": {}, "tiers": [0, 1, 2]}
    with pytest.raises(UserError, match="the new process for talk ended with -9"):
        tier_restarts.spawn("talk", nothing, tmp_path)
    assert json.loads((tmp_path / "talk.result.json").read_text()) == {"unbroken": {}, "turns": {}}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tiers", "device,moon"], "--tiers has 'moon': give some of device,host,disk"),
        (["--tiers", ""], "--tiers has ''"),
        (["--tiers", "host,disk"], "--tiers lacks device"),
        (["--tiers", "device", "--policies", "fullest"], "--policies has 'fullest': give all, or"),
        (["--tiers", "device", "--policies", ""], "--policies has ''"),
        (["--policies", "all"], "add --tiers"),
    ],
)
def test_bad_lists_are_refused_by_one_line(monkeypatch, capsys, arguments, words):
    code, out, err = call(monkeypatch, capsys, "restore", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_what_is_written_is_read_again_as_it_was():
    fork = tier_lab.Fork(
        position=16,
        ids=np.arange(3, dtype=np.int32),
        after=np.arange(2, dtype=np.int32),
        tiles=("a", "b"),
        decoded="c",
    )
    cell = tier_lab.Cell(fork=3, state=True, neighbours=False)
    written = tier_restarts.Written(
        policy="full",
        namespace="n",
        ids=fork.ids,
        blocks=11,
        snapshots=(16, 32),
        cells=((fork, cell),),
    )
    value = json.loads(json.dumps(written.to_json()))
    again = tier_restarts.Written.from_json(value)
    assert again.to_json() == written.to_json()
    assert again.cells[0][1] == cell
    assert again.snapshots == (16, 32)
