"""A server over the toy engine, made only for the tests that ask for it."""

import pytest
from engines import toy_lab


@pytest.fixture
def world():
    """As new; afterwards nothing runs and nothing is open."""
    from served import State, World  # which need the extra that other tests here do without

    lab = toy_lab()
    lab.renew()
    world = World(lab)
    lab.change(text=world.text)
    lab.engine.on_turn.append(world.ended)
    yield world
    world.turns.set()
    lab.engine.on_turn.remove(world.ended)
    left = world.thread.open, lab.engine.waiting
    ready = world.thread.state is State.READY
    assert world.thread.close(timeout_s=10)
    lab.renew()
    assert not ready or left == (0, 0)
