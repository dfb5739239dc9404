"""Who reads a store, and who moves what they read."""

import threading

import pytest

from hybridkv.tiers.store.gate import Gate

WAIT_S = 10.0


class Other:
    """A thread that enters a gate and stays inside until it is told to leave."""

    def __init__(self, enter):
        self.inside, self.leave = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, args=(enter,), daemon=True)
        self.thread.start()

    def _run(self, enter):
        with enter():
            self.inside.set()
            assert self.leave.wait(WAIT_S)

    def end(self):
        self.leave.set()
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


def test_readers_do_not_wait_for_each_other():
    gate = Gate()
    one, two = Other(gate.reading), Other(gate.reading)
    assert one.inside.wait(WAIT_S)
    assert two.inside.wait(WAIT_S)
    one.end()
    two.end()


@pytest.mark.parametrize("first", ["reading", "moving"])
def test_a_mover_is_alone(first):
    gate = Gate()
    one = Other(getattr(gate, first))
    assert one.inside.wait(WAIT_S)
    two = Other(gate.moving if first == "reading" else gate.reading)
    assert not two.inside.wait(0.05)
    one.end()
    assert two.inside.wait(WAIT_S)
    two.end()


def test_a_reader_goes_before_a_mover_that_only_waits():
    """It may be the one for whom the reader inside waits."""
    gate = Gate()
    reader = Other(gate.reading)
    assert reader.inside.wait(WAIT_S)
    mover = Other(gate.moving)
    assert not mover.inside.wait(0.05)
    with gate.reading():
        assert not mover.inside.is_set()
    reader.end()
    assert mover.inside.wait(WAIT_S)
    mover.end()


def test_an_error_inside_leaves_the_gate_open():
    gate = Gate()
    for enter in (gate.reading, gate.moving):
        with pytest.raises(OSError, match="inside"), enter():
            raise OSError("inside")
    with gate.moving():
        pass
