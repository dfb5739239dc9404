"""``verify.py crash`` and ``faults`` in parts, and that they can fail."""

import collections
import random
import shutil
import signal
import sys

import pytest
from engines import toy_lab
from places import REPOSITORY
from stores import extension, open_store, tokens

sys.path.insert(0, str(REPOSITORY / "scripts"))

import fault_folders
import verify_crash
import verify_faults
from fault_lab import Lab

from hybridkv.tiers.faults import SENSIBLE, Fault, Planned, Point, Schedule
from hybridkv.tiers.host import HostTier


@pytest.fixture(scope="module")
def lab():
    """Around the engine that other tests compile too, which is as before afterwards."""
    shared = toy_lab()
    shared.renew()  # what others have compiled in this process is none of its compilations
    engine = shared.engine
    sizes, counters = engine.runner.sizes, engine.counters
    lab = Lab(engine)
    yield lab
    lab.attach(None)
    engine.runner.sizes, engine.counters = sizes, counters
    shared.renew()


@pytest.fixture(scope="module")
def template(lab, tmp_path_factory):
    path = tmp_path_factory.mktemp("faults") / "template"
    verify_faults.make_template(lab, path)
    return path


def trial(lab, template, tmp_path, *planned: Planned) -> verify_faults.Outcome:
    path = shutil.copytree(template, tmp_path / "store")
    return verify_faults.Trial(lab, path, Schedule(planned)).run()


def test_without_faults_all_is_right_and_every_point_is_reached(lab, template, tmp_path):
    outcome = trial(lab, template, tmp_path)
    assert outcome.wrong == []
    assert (outcome.told, outcome.problems) == (0, 0)
    assert outcome.outputs == 17
    assert set(outcome.reached) == set(Point)


def test_several_faults_at_once_change_no_output(lab, template, tmp_path):
    outcome = trial(
        lab,
        template,
        tmp_path,
        Planned(point=Point.READ_SEGMENT, fault=Fault.FLIPPED_BIT, nth=2),
        Planned(point=Point.HOST_LOAD, fault=Fault.FLIPPED_BIT, nth=3),
        Planned(point=Point.WRITE_SNAPSHOT, fault=Fault.SHORT_WRITE, nth=2),
        Planned(point=Point.HANDOFF_IMPORT, fault=Fault.SHORT_READ),
    )
    assert outcome.wrong == []
    assert outcome.missed == ()
    assert outcome.told >= 3


def test_wrong_bytes_that_nobody_verifies_are_found(lab, template, tmp_path, monkeypatch):
    monkeypatch.setattr(HostTier, "verify", lambda self, held: None)
    flip = Planned(point=Point.HOST_LOAD, fault=Fault.FLIPPED_BIT)
    outcome = trial(lab, template, tmp_path, flip)
    assert any("other logits" in line or "wrong tokens" in line for line in outcome.wrong)


def test_a_folder_that_is_no_store_is_said_and_a_miss(lab, template, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    case = fault_folders.Case(name="no store")
    fault_folders._engine(lab, case, lambda: None, path=tmp_path)
    assert case.wrong == []
    assert "is not a prefix store" in case.line
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_each_sensible_fault_is_scheduled_but_crashes():
    reached = collections.Counter(dict.fromkeys(Point, 9))
    planned = [one for (one,) in verify_faults.schedules(reached)]
    for point, faults in SENSIBLE.items():
        assert {x.fault for x in planned if x.point is point} == faults - {Fault.CRASH}
    assert {x.nth for x in planned} == {1, 6}


def test_a_storm_is_the_same_for_the_same_seed():
    reached = collections.Counter(dict.fromkeys(Point, 9))
    first, again, other = (verify_faults.storm(random.Random(s), reached) for s in (1, 1, 2))
    assert first == again != other


def test_a_fault_that_nothing_tells_of_is_wrong():
    planned = Planned(point=Point.READ_SEGMENT, fault=Fault.FLIPPED_BIT)
    outcome = verify_faults.Outcome(planned=(planned,))
    assert verify_faults._single(outcome) == ["nothing tells of it"]


@pytest.fixture
def origin(tmp_path):
    """A store that a writer does over: two extensions, one on the other."""
    path, ids = tmp_path / "origin", tokens(8)
    import stores

    with open_store(path) as store:
        stores.commit(store, extension(ids[:20], snapshots=[3, 5]))
        stores.commit(store, extension(ids, first=5, snapshots=[8]))
    return path


def test_a_killed_writer_leaves_one_of_the_states(origin, tmp_path):
    states = verify_crash.states(verify_crash.record(origin))
    assert [len(blocks) for blocks, _ in states] == [0, 5, 8, 2, 2, 5, 8]
    writer = verify_crash.WriterProcess(origin)
    try:
        whole = writer.crash(tmp_path / "whole")
        assert (whole["done"], whole["signal"]) == (6, 0)
        assert whole["reached"]["write_manifest"] == 5
        for point, nth, done in ((Point.WRITE_MANIFEST, 2, 1), (Point.COMMITTED, 2, 1)):
            path = tmp_path / point.value
            answer = writer.crash(path, point=point.value, nth=nth)
            assert (answer["done"], answer["signal"]) == (done, signal.SIGKILL)
            with open_store(path, writable=False) as store:
                assert verify_crash.state_of(store) == states[done + (point is Point.COMMITTED)]
    finally:
        writer.close()


def test_half_of_a_commit_would_be_seen(origin):
    verifier = object.__new__(verify_crash.Verifier)
    verifier.states = verify_crash.states(verify_crash.record(origin))
    blocks, snapshots = verifier.states[1]
    half = (frozenset(sorted(blocks)[:3]), frozenset())
    assert verifier._half_visible(half, 0)
    assert verifier._half_visible((blocks, frozenset()), 1)
    assert not verifier._half_visible((blocks, snapshots), 0)
    assert not verifier._half_visible(verifier.states[2], 1)
    between = (verifier.states[2][0] - {extension(tokens(8)).digest(7)}, verifier.states[3][1])
    assert not verifier._half_visible(between, 2)  # a removal is of several manifests
