"""Bytes on their way to the device: what counts as there, and how a load ends."""

import numpy as np
import pytest
from fake_device import BLOCK, World, ids_of, pools
from hand_workers import Hook

from hybridkv.blocks.entries import NONE, Form, Tier, kind_bits
from hybridkv.kinds import Kind
from hybridkv.prefixes.plan import Action, Miss
from hybridkv.tiers.faults import Point
from hybridkv.tiers.tickets import RestoreState

IDS = ids_of(8, 1)
END = 8 * BLOCK


def on_host(*, snapshots=(8,), **options):
    world = World(host=pools(16), **options)
    world.publish(IDS, snapshots=snapshots)
    world.stored()
    world.evict()
    return world


def test_b020_blocks_that_are_elsewhere_are_no_hit_where_the_state_is_nowhere():
    world = on_host(snapshots=())
    assert (
        isinstance(world.plan(IDS, replay=False), Miss) or not world.plan(IDS, replay=False).start
    )
    rebuilt = world.plan(IDS)
    assert rebuilt.start < rebuilt.shared == END
    assert rebuilt.needs[Kind.WINDOW] is Action.REPLAY
    assert rebuilt.reused == rebuilt.start


@pytest.mark.parametrize("kind", [Kind.COMPRESSED, Kind.INDEXER])
def test_b020_blocks_that_lack_a_kind_elsewhere_are_no_hit(kind):
    world = on_host(snapshots=(3, 8))
    world.entries.kinds[world.run(IDS)[3]] &= np.uint8(0xFF ^ kind_bits((kind,)))
    plan = world.plan(IDS)
    assert (plan.start, plan.shared, len(plan.loads)) == (3 * BLOCK, 3 * BLOCK, 4)


@pytest.mark.parametrize("kind", [Kind.WINDOW, Kind.TAIL])
def test_b020_a_state_that_lacks_a_kind_elsewhere_is_no_hit(kind):
    world = on_host(snapshots=(3, 8))
    world.entries.kinds[world.snapshots(IDS)[-1]] &= np.uint8(0xFF ^ kind_bits((kind,)))
    assert world.plan(IDS, replay=False).start == 3 * BLOCK
    assert world.plan(IDS).snapshot == NONE


def test_b102_nothing_is_read_before_all_kinds_of_it_are_there():
    """The state comes last; a part is there with all of its kinds or not at all."""
    world = on_host(moves_a_turn=1)
    hold, ticket = world.begin(IDS)
    world.workers[0].step()
    reached = []
    while ticket.state() is RestoreState.PENDING:
        world.device.check()  # what counts as present has every word
        now = world.plan(IDS, loads=False)
        reached.append(getattr(now, "shared", 0))
        assert getattr(now, "snapshot", NONE) == NONE
        world.mover.turn()
    assert reached == [0, 3 * BLOCK, 6 * BLOCK, END]
    assert world.plan(IDS, loads=False).start == END
    world.end(hold, ticket)
    world.at_rest()


def test_b102_a_request_with_a_shared_load_waits_for_all_that_it_needs():
    """The other one needs less and is ready earlier."""
    world = on_host(snapshots=(3, 8), moves_a_turn=1)
    second, two = world.begin(IDS[: 3 * BLOCK + 1])
    first, one = world.begin(IDS)
    assert set(two.loads) < set(one.loads)
    seen = []
    for _ in range(8):
        seen.append((one.state().value, two.state().value))
        world.mover.turn()
        world.workers[0].step()
    assert ("pending", "ready") in seen
    assert seen[-1] == ("ready", "ready")
    world.end(first, one)
    world.end(second, two)
    world.at_rest()


@pytest.mark.parametrize(
    "when", ["before the worker", "in the worker", "before it is written", "half way", "at its end"]
)
def test_b105_an_aborted_load_frees_its_blocks_once_and_writes_nothing_after(when):
    world = on_host(moves_a_turn=1)
    hold, ticket = world.begin(IDS)
    if when == "in the worker":
        world.mover._bringer._faults = Hook(
            Point.HOST_LOAD, lambda nth: world.end(hold, ticket) if nth == 4 else None
        )
    if when != "before the worker":
        world.workers[0].step()
    if when in ("half way", "at its end"):
        world.mover.turn()
    if when == "at its end":
        world.settle(lambda: ticket.state() is RestoreState.READY)
    if when != "in the worker":
        world.end(hold, ticket)
    writes = world.device.writes
    whole = world.count(Tier.DEVICE)
    assert whole == writes == {"half way": 3, "at its end": 9}.get(when, 0)
    pool = world.allocator.pools[Tier.DEVICE]
    assert pool[Form.BLOCK].used + pool[Form.SNAPSHOT].used == whole
    world.publish(ids_of(20, 2))  # the places are others' now
    for _ in range(5):
        world.workers[0].step()
        world.mover.turn()
    assert world.device.writes == writes
    world.at_rest()


def test_b148_a_load_that_fails_is_told_and_its_room_given_back():
    world = on_host()

    def killed(nth):
        if nth == 4:
            raise ConnectionError("the sender is gone")

    world.mover._bringer._faults = Hook(Point.HOST_LOAD, killed)
    free = world.allocator.available(Form.BLOCK)
    hold, ticket = world.begin(IDS)
    world.settle(lambda: ticket.state() is not RestoreState.PENDING, turns=10)
    assert ticket.state() is RestoreState.FAILED
    assert world.mover.counters.last_error == "ConnectionError: the sender is gone"
    world.end(hold, ticket)
    assert world.allocator.available(Form.BLOCK) == free - 3  # three came before it
    assert world.use(IDS).shared == 3 * BLOCK
    world.at_rest()


def test_b149_a_load_of_nothing_has_ended():
    world = World(host=pools(16))
    world.publish(IDS, snapshots=(8,))
    hold, ticket = world.begin(IDS)
    assert ticket is None
    assert not world.mover.busy or not world.mover._loads
    world.drop(hold)
    assert world.use(IDS).start == END


def test_b149_a_load_whose_last_entry_came_with_another_has_ended():
    world = on_host()
    first, one = world.begin(IDS)
    second, two = world.begin(IDS)
    world.settle(lambda: one.state() is RestoreState.READY)
    world.end(first, one)
    assert two.state() is RestoreState.READY
    world.end(second, two)
    third, three = world.begin(IDS)
    assert three is None
    world.drop(third)
    world.at_rest()


def test_b158_blocks_of_an_aborted_load_wait_for_nobody():
    """The worker never comes back."""
    world = on_host()
    free = world.allocator.available(Form.BLOCK)
    for _ in range(3):
        hold, ticket = world.begin(IDS)
        world.mover.turn()
        assert ticket.state() is RestoreState.PENDING
        world.end(hold, ticket)
        assert world.allocator.available(Form.BLOCK) == free
        assert not world.mover.busy
    assert not world.allocator.leases.open
    assert world.mover.close(timeout_s=0.01)


def test_b158_an_end_that_comes_after_the_abort_is_heard_by_nobody():
    world = on_host()
    hold, ticket = world.begin(IDS)
    world.end(hold, ticket)
    again, other = world.begin(IDS)
    while world.workers[0].step():  # the old one first
        world.mover.turn()
    assert other.state() is RestoreState.READY
    world.end(again, other)
    assert world.device.writes == 9
    world.at_rest()
