"""The rollout's command line, and that planted faults are caught and rolled back bit for bit."""

import functools
import json
import sys

import commands
import pytest
from engines import toy_lab
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import rollout
import verify_shadow

from hybridkv.engine.engine import Engine, EngineOptions
from hybridkv.observe import shadow
from hybridkv.observe.rollout import RollbackCause
from hybridkv.observe.rollout_file import Rollout
from hybridkv.observe.shadow import cold_sizes


@pytest.fixture
def call(monkeypatch, capsys):
    return functools.partial(commands.call, rollout.main, monkeypatch, capsys)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.json"


def who(reason: str = "a test") -> tuple[str, ...]:
    return ("--by", "ada", "--reason", reason)


def test_forward_back_and_show(call, path, tmp_path):
    code, out, _ = call("forward", path, "--to", "shadow", *who("first [look]"))
    assert (code, "stage shadow" in out, "[look]" in out) == (0, True, True)
    code, out, _ = call("forward", path, "--to", "percent", "--percent", 2.5, *who())
    assert (code, "reuse serves 2.5 %" in out) == (0, True)
    Rollout(path).roll_back(RollbackCause.MISMATCH, "other bits")
    code, out, _ = call("show", path, "--json", tmp_path / "shown.json")
    assert code == 0
    assert "rolled back, until a person goes forward: other bits" in out
    shown = json.loads((tmp_path / "shown.json").read_text())
    assert (shown["stage"], shown["rolled_back"]) == ("off", True)
    code, out, _ = call("forward", path, "--to", "shadow", *who())
    assert (code, "rolled back, until" in out) == (0, False)
    code, out, _ = call("back", path, "--to", "off", *who())
    assert (code, "stage off" in out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("show", "STATE"), "there is no state at"),
        (("back", "STATE", "--to", "off", *who()), "is not back from off"),
        (("forward", "STATE", "--to", "full", *who()), "the next stage is shadow"),
        (("forward", "STATE", "--to", "shadow", "--by", "", "--reason", "x"), "who decides"),
        (("forward", "STATE", "--to", "shadow", "--by", "ada"), "required: --reason"),
        (("forward", "STATE", "--to", "most", *who()), "invalid choice: 'most'"),
        (("forward", "STATE", "--to", "shadow", "--percent", "x", *who()), "invalid float"),
        (("sideways", "STATE"), "invalid choice"),
        ((), "required: command"),
        (("show", "BROKEN"), "is not the state of a rollout"),
        (("forward", "BROKEN", "--to", "shadow", *who()), "is not the state of a rollout"),
        (("forward", "NONE/state", "--to", "shadow", *who()), "there is no folder"),
    ],
)
def test_bad_input_is_one_line_and_status_2(call, tmp_path, arguments, says):
    broken = tmp_path / "BROKEN"
    broken.write_text('{"version": 1, "stage": "full"}')
    named = [str(tmp_path / x) if x[:4] in ("STAT", "BROK", "NONE") else x for x in arguments]
    code, out, err = call(*named)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1
    assert {x.name for x in tmp_path.iterdir()} <= {"BROKEN", "BROKEN.lock", "STATE.lock"}


@pytest.fixture(scope="module")
def engines():
    """The engine that other tests compile too, which is as before afterwards, and a cold one."""
    lab = toy_lab()
    lab.renew()
    reuse = lab.engine
    runner, options = reuse.runner, EngineOptions(digests=True)
    cold = Engine(
        runner.model,
        runner.options,
        cold_sizes(runner.sizes),
        options,
        identity=runner.identity,
        clock=lab.time,
    )
    reuse._guard.arm()  # what the other compiled is none of its compilations
    yield {"hybrid": reuse, "cold": cold}
    lab.renew()


def test_a_fault_in_each_kinds_restore_is_caught_within_the_bound(
    call, engines, monkeypatch, tmp_path
):
    real, file = verify_shadow.check, tmp_path / "check.json"
    monkeypatch.setattr(verify_shadow, "check", lambda **more: real(engines, **more))
    code, out, _ = call("check", "--json", file)
    told = json.loads(file.read_text())
    assert (code, told["ok"], "NO" in out) == (0, True, False)
    by_kind = {}
    for row in told["rows"]:
        by_kind.setdefault(row["kind"], []).append(row)
    for kind in ("window", "tail", "compressed", "indexer", "host tier", "disk tier"):
        for row in by_kind[kind]:
            assert (row["caught"], row["rolled_back"], row["stage_after"]) == (True, True, "off")
            assert 1 <= row["affected"] <= row["bound"]
            assert row["share"] < 1 or row["affected"] == 1
            assert row["asked"] <= 3 * row["bound"], "the fault changes few answers"
    assert {row["stage"] for row in by_kind["window"]} == {"shadow", "full"}
    assert by_kind["none"][0]["compared"] == 9
    for name in ("host", "disk"):
        assert by_kind[f"none, {name} tier"][0]["loaded"] >= 8 * verify_shadow.TILES


def test_a_fault_that_nobody_compares_is_missed(engines, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(shadow, "_mismatch", lambda *_: shadow.Verdict.EQUAL)
    traffic = verify_shadow.Traffic(engines, tmp_path, 0)
    row = verify_shadow.Row(kind="window", stage="full", share=1.0, bound=1)
    with verify_shadow.faulty(engines["hybrid"], verify_shadow.FAULTS["window"]):
        traffic.run(row, 3)
    assert (row.affected, row.stage_after) == (3, "full")
    assert not verify_shadow.report([row])
    out = capsys.readouterr().out
    assert "NO" in out
    assert "not in 3" in out
