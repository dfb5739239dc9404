"""Compilations after warm-up are counted, named, and refused where that is asked for."""

import contextlib
import gc
import threading

import jax
import numpy as np
import pytest

from hybridkv.engine import guard as guards
from hybridkv.engine.guard import COMPILATION, CompiledAfterWarmUp, CompileGuard


def compile_once(name: str = "something_new") -> None:
    """One compilation, under a name."""

    def function(x):
        return x + 1

    function.__name__ = name
    jax.jit(function)(np.ones(3, np.float32))


@pytest.fixture
def guard():
    guard = CompileGuard(mode="raise")
    guard.arm()
    yield guard
    guard.disarm()


def test_a_guard_counts_from_the_moment_it_is_armed():
    guard = CompileGuard()
    compile_once()
    assert guard.count == 0
    guard.arm()
    assert guard.count == 0
    compile_once("first")
    compile_once("second")
    assert guard.count == 2
    assert [("first" in a, "second" in a) for a in guard.names] == [(True, False), (False, True)]
    guard.disarm()
    compile_once()
    assert guard.count == 2


def test_what_is_compiled_already_does_not_count(guard):
    warm = jax.jit(lambda x: x * 5)
    with guard.paused():
        warm(np.ones(3, np.float32))
    for value in range(5):
        warm(np.full(3, value, np.float32))
    assert guard.check() == 0
    warm(np.ones(4, np.float32))
    assert guard.count == 1


def test_raising_names_what_was_compiled_once(guard):
    compile_once("my_step")
    compile_once("my_other_step")
    with pytest.raises(CompiledAfterWarmUp, match=r"^2 compiled after warm-up: .*my_step.*my_oth"):
        guard.check()
    assert guard.check() == 0  # told once
    compile_once("a_third")
    with pytest.raises(CompiledAfterWarmUp, match=r"^1 compiled .*: .*a_third") as error:
        guard.check()
    assert "my_step" not in str(error.value)
    assert "\n" not in str(error.value)


def test_counting_never_raises_and_tells_what_is_new():
    guard = CompileGuard(mode="count")
    guard.arm()
    compile_once()
    compile_once()
    assert guard.check() == 2
    assert guard.check() == 0
    compile_once()
    assert guard.check() == 1
    assert guard.count == 3


def test_names_are_bounded_and_the_count_is_not(guard):
    for number in range(guards.NAMES_KEPT + 4):
        jax.monitoring.record_event_duration_secs(COMPILATION, 0.0, fun_name=f"f{number}")
    jax.monitoring.record_event_duration_secs(COMPILATION, 0.0)
    jax.monitoring.record_event_duration_secs("/jax/other", 0.0, fun_name="other")
    assert guard.count == guards.NAMES_KEPT + 5
    assert len(guard.names) == guards.NAMES_KEPT
    assert guard.names[-2:] == (f"f{guards.NAMES_KEPT + 3}", "?")
    with pytest.raises(
        CompiledAfterWarmUp, match=r"^21 compiled .*: the latest 16 are f5, .*, \?;"
    ):
        guard.check()


def test_pauses_nest_and_end_with_an_error(guard):
    with guard.paused():
        with guard.paused():
            compile_once()
        compile_once()
    assert guard.count == 0
    with contextlib.suppress(ZeroDivisionError), guard.paused():
        compile_once()
        raise ZeroDivisionError
    compile_once()
    assert guard.count == 1


def test_a_pause_holds_for_its_own_thread(guard):
    with guard.paused():
        thread = threading.Thread(target=compile_once)
        thread.start()
        thread.join()
    assert guard.count == 1


def test_guards_count_on_their_own_and_are_forgotten_when_dropped(guard):
    other = CompileGuard()
    other.arm()
    with other.paused():
        compile_once()
    assert (guard.count, other.count) == (1, 0)
    gc.collect()
    before = len(guards._guards)
    del other
    gc.collect()
    assert len(guards._guards) == before - 1
    compile_once()
    assert guard.count == 2


def test_arming_counts_nothing_in_other_guards_and_listens_once(guard):
    for _ in range(3):
        CompileGuard().arm()
    guard.arm()
    assert guard.count == 0
    compile_once()
    assert guard.count == 1


def test_a_guard_listens_again_after_listeners_were_lost(guard):
    jax.monitoring.unregister_event_duration_listener(guards._on_event)
    compile_once()
    assert guard.count == 0
    guard.arm()
    compile_once()
    assert guard.count == 1


def test_a_jax_that_reports_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(guards, "COMPILATION", "/an/event/that/never/comes")
    with pytest.raises(RuntimeError, match="does not report /an/event"):
        CompileGuard().arm()
    # The test registered a second listener: events would count twice.
    jax.monitoring.unregister_event_duration_listener(guards._on_event)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode must be 'raise' or 'count', got 'warn'"):
        CompileGuard(mode="warn")  # type: ignore[arg-type]


def test_making_another_engine_is_no_concern_of_a_guard(guard):
    with guards.warming_up(), guards.warming_up():
        compile_once()
    assert guard.check() == 0
    compile_once()
    assert guard.count == 1
    guard.disarm()
