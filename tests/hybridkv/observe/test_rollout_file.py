"""A state file outlives processes and is shared by them; what cannot be read means off."""

import logging
import threading

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hybridkv.observe.rollout import (
    BACK,
    FORWARD,
    LONGEST_HISTORY,
    ORDER,
    RollbackCause,
    RolloutError,
    RolloutStage,
    RolloutState,
    forward,
)
from hybridkv.observe.rollout_file import Rollout, RolloutFile

OFF, SHADOW, PERCENT, FULL = RolloutStage
WHO = {"by": "ada", "reason": "a test"}
MISMATCH = RollbackCause.MISMATCH


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rollout.json"


def brought_to(path, stage=FULL, **more) -> Rollout:
    rollout = Rollout(path, **more)
    for to, percent in ((SHADOW, None), (PERCENT, 10.0), (FULL, None)):
        if rollout.state.stage is not stage:
            rollout.forward(to, percent=percent, **WHO)
    return rollout


def test_a_restart_does_not_undo_a_rollback(path):
    rollout = brought_to(path)
    rollout.roll_back(MISMATCH, "other bits")
    for _ in range(2):
        again = Rollout(path)
        assert (again.state.stage, again.state.rolled_back) == (OFF, True)
        assert again.state.reason == "other bits"
    assert again.state == rollout.state


def test_without_a_file_the_state_is_this_process_own(tmp_path):
    rollout = brought_to(None)
    assert rollout.roll_back(MISMATCH, "x").stage is OFF
    assert not rollout.refresh()
    assert not list(tmp_path.iterdir())


def test_another_process_change_is_seen(path):
    server, person = brought_to(path, SHADOW), RolloutFile(path)
    assert not server.refresh()
    person.change(lambda state: forward(state, PERCENT, now=0.0, percent=3.0, **WHO))
    assert server.refresh()
    assert (server.state.stage, server.state.percent) == (PERCENT, 3.0)


def test_a_rollback_is_of_what_the_file_says_and_not_of_what_was_known(path):
    server = brought_to(path, PERCENT)
    RolloutFile(path).change(lambda state: forward(state, FULL, now=0.0, **WHO))
    server.roll_back(MISMATCH, "x")
    state = RolloutFile(path).read()
    assert (state.stage, state.history[-1].before, state.rollbacks) == (OFF, FULL, 1)


def test_a_step_forward_does_not_step_over_a_rollback(path):
    server = brought_to(path, SHADOW)
    server.roll_back(MISMATCH, "x")
    with pytest.raises(RolloutError, match="does not go forward to percent"):
        Rollout(path).forward(PERCENT, percent=1.0, **WHO)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}', "\xff" * 3])
def test_a_file_that_cannot_be_read_means_off_and_stays_as_it_is(path, content, caplog):
    server = brought_to(path)
    path.write_text(content, encoding="latin-1")
    assert server.refresh()
    assert (server.state.stage, server.state.rolled_back) == (OFF, True)
    assert server.state.history[-1].cause is RollbackCause.STATE_FILE
    assert Rollout(path).state.stage is OFF
    with pytest.raises(RolloutError, match="not written yet"):
        server.forward(SHADOW, **WHO)
    server.refresh()
    assert path.read_text(encoding="latin-1") == content
    assert sum(
        "is not the state" in x.message or "cannot read" in x.message for x in caplog.records
    )


def test_a_file_that_comes_back_does_not_undo_the_rollback(path):
    server, whole = brought_to(path), path.read_text()
    path.write_text("{")
    server.refresh()
    path.write_text(whole)
    server.refresh()
    assert RolloutFile(path).read().stage is OFF
    assert (server.state.stage, server.state.rolled_back) == (OFF, True)
    assert server.forward(SHADOW, **WHO).stage is SHADOW


def test_a_file_that_is_gone_means_off_and_is_written_again(path):
    server = brought_to(path)
    path.unlink()
    assert server.refresh()
    assert server.state.stage is OFF
    server.refresh()
    assert RolloutFile(path).read() == server.state
    assert "is gone" in server.state.reason


def test_a_rollback_that_cannot_be_written_holds_and_is_written_later(path, monkeypatch, caplog):
    server = brought_to(path)
    with monkeypatch.context() as patch:

        def full(self, state):
            raise OSError(28, "No space left on device")

        patch.setattr(RolloutFile, "_write", full)
        assert server.roll_back(MISMATCH, "x").stage is OFF
        assert not server.refresh()
        assert (server.state.stage, server.unwritten) == (OFF, 2)
        assert RolloutFile(path).read().stage is FULL
    assert [x.levelno for x in caplog.records].count(logging.ERROR) == 1
    server.refresh()
    assert RolloutFile(path).read() == server.state
    assert server.state.stage is OFF


def test_a_server_does_not_wait_for_the_lock_of_a_person(path):
    server, file = brought_to(path), RolloutFile(path)
    with file._lock:
        ended = threading.Event()

        def roll_back():
            server.roll_back(MISMATCH, "x")
            ended.set()

        threading.Thread(target=roll_back, daemon=True).start()
        assert ended.wait(5.0)
        assert (server.state.stage, server.unwritten) == (OFF, 1)
    server.refresh()
    assert RolloutFile(path).read().stage is OFF


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    server, before = brought_to(path, SHADOW), path.read_text()

    def fails(handle):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(RolloutError, match="cannot write"):
        server.forward(PERCENT, percent=1.0, **WHO)
    assert path.read_text() == before
    assert {x.name for x in path.parent.iterdir()} <= {path.name, f"{path.name}.lock"}


def test_a_folder_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(RolloutError, match="cannot write"):
        Rollout(tmp_path / "none" / "state.json").forward(SHADOW, **WHO)


def test_a_rollback_is_logged_with_its_cause(path, caplog):
    brought_to(path).roll_back(MISMATCH, "2 of 7")
    line = caplog.records[-1]
    assert line.levelno == logging.WARNING
    assert "full -> off" in line.getMessage()
    assert "for mismatch: 2 of 7" in line.getMessage()


def test_rollbacks_go_to_off_or_shadow(path):
    assert brought_to(path, to=SHADOW).roll_back(MISMATCH, "x").stage is SHADOW
    with pytest.raises(RolloutError, match="off or shadow, not to full"):
        Rollout(path, to=FULL)


stages = st.sampled_from(RolloutStage)


class Life(RuleBasedStateMachine):
    """One file, a server that restarts, and a person elsewhere; a model of one stage beside."""

    folder = None
    """Of the files; each run has its own."""
    count = 0

    def __init__(self):
        super().__init__()
        Life.count += 1
        self.path = Life.folder / f"{Life.count}.json"
        self.server = Rollout(self.path)
        self.stage, self.percent, self.held, self.revision = OFF, 0.0, False, 0

    def moved(self, stage, percent):
        fixed = {OFF: 0.0, SHADOW: 0.0, FULL: 100.0}
        self.stage, self.percent = stage, fixed.get(stage, percent)

    def asks(self, table, step, to, percent):
        grows = percent > self.percent if table is FORWARD else percent < self.percent
        allowed = to in table[self.stage] and (to is not self.stage or grows)
        try:
            step(to, percent=percent if to is PERCENT else None, **WHO)
        except RolloutError:
            assert not allowed
            return
        assert allowed
        self.moved(to, percent)
        self.held = self.held and table is BACK

    @rule(to=stages, percent=st.integers(1, 99), elsewhere=st.booleans())
    def forward(self, to, percent, elsewhere):
        person = Rollout(self.path) if elsewhere else self.server
        self.asks(FORWARD, person.forward, to, float(percent))

    @rule(to=stages, percent=st.integers(1, 99), elsewhere=st.booleans())
    def back(self, to, percent, elsewhere):
        person = Rollout(self.path) if elsewhere else self.server
        self.asks(BACK, person.back, to, float(percent))

    @rule()
    def threshold(self):
        self.server.roll_back(MISMATCH, "x")
        if self.stage is not OFF:
            self.moved(OFF, 0.0)
            self.held = True

    @rule()
    def restart(self):
        self.server = Rollout(self.path)

    @rule()
    def damage(self):
        if self.stage is OFF:
            return
        self.path.write_text("{")
        self.server.refresh()
        self.path.unlink()
        self.moved(OFF, 0.0)
        self.held = True

    @invariant()
    def server_and_file_agree_with_the_model(self):
        self.server.refresh()
        state = self.server.state
        assert (state.stage, state.percent) == (self.stage, self.percent)
        assert state.rolled_back == self.held
        assert RolloutFile(self.path).read() == state
        assert len(state.history) <= LONGEST_HISTORY
        assert state.revision >= self.revision
        self.revision = state.revision
        for change in state.history:
            went = ORDER.index(change.after) - ORDER.index(change.before)
            assert went <= 1
            assert (change.cause is not None) <= (went < 0)


def test_a_random_life_keeps_server_file_and_model_together(tmp_path):
    Life.folder = tmp_path
    Life.TestCase.settings = settings(
        max_examples=20, stateful_step_count=20, deadline=None, derandomize=True
    )
    Life.TestCase().runTest()


def test_the_first_state_is_off():
    assert RolloutState().stage is OFF
