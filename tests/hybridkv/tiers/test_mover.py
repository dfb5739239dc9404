"""What a plan wants comes to the device as it was published, or not at all."""

import numpy as np
import pytest
from fake_device import BLOCK, MOVED, World, ids_of, pools, quick_segments
from hand_workers import Hook

from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.pools import NoRoom
from hybridkv.blocks.transitions import TierState
from hybridkv.prefixes.plan import Miss
from hybridkv.tiers.faults import Point
from hybridkv.tiers.tickets import RestoreState

IDS = ids_of(8, 1)
READY, PENDING, FAILED = RestoreState.READY, RestoreState.PENDING, RestoreState.FAILED


@pytest.fixture(autouse=True)
def quick():
    with quick_segments():
        yield


@pytest.fixture
def world():
    """A prompt that is on the host only."""
    world = World(host=pools(32))
    world.publish(IDS, snapshots=(8,))
    world.stored()
    world.evict()
    return world


@pytest.mark.parametrize("tiers", ["host", "disk", "both"])
def test_what_was_stored_and_evicted_comes_back_word_for_word(tmp_path, tiers):
    options = {"host": pools(32)} if tiers != "disk" else {}
    options |= {"disk": pools(32), "path": tmp_path / "s"} if tiers != "host" else {}
    world = World(**options)
    for seed in (1, 2):
        world.publish(ids_of(8, seed), snapshots=(4, 8))
    world.stored()
    world.evict()
    assert world.count(Tier.DEVICE) == 0
    for seed in (2, 1):
        assert world.start_of(ids_of(8, seed)) == 8 * BLOCK
    world.at_rest()
    tier = Tier.DISK if tiers == "disk" else Tier.HOST
    assert world.mover.counters.loaded[tier] == 2 * 9
    assert world.mover.counters.loads == 2


def test_a_copy_keeps_an_entry_published_and_without_one_it_is_lost():
    world = World(host=pools(3, 0))
    world.publish(IDS, snapshots=(8,))
    world.stored()
    world.evict()
    assert len(world.run(IDS)) == MOVED
    assert world.bring(IDS).shared == MOVED * BLOCK


def test_a_plan_that_names_nothing_begins_nothing(world):
    other = ids_of(8, 2)
    hold, ticket = world.begin(other)
    assert isinstance(hold.plan, Miss)
    assert ticket is None
    world.drop(hold)
    world.start_of(IDS)
    hold, ticket = world.begin(IDS)  # all on the device
    assert ticket is None
    world.drop(hold)


def test_what_is_being_loaded_is_given_up_by_no_tier(world):
    hold, ticket = world.begin(IDS)
    for tier in (Tier.HOST, Tier.DEVICE):
        with pytest.raises(NoRoom):
            world.allocator.evict(blocks=1, tier=tier)
    world.settle(lambda: ticket.state() is READY)
    with pytest.raises(NoRoom):
        world.allocator.evict(blocks=1)  # the request is not seated yet
    world.end(hold, ticket)
    world.evict()


def test_a_ticket_is_ready_when_the_last_entry_is_there_and_not_before(world):
    world.mover.options = world.mover.options.__class__(host=pools(32), moves_a_turn=1)
    hold, ticket = world.begin(IDS)
    world.workers[0].step()
    states = []
    while ticket.state() is PENDING:
        states.append(sum(world.there(hold.plan.loads, Tier.DEVICE)))
        assert world.plan(IDS, loads=False).tokens == len(IDS)  # never an exception
        world.mover.turn()
    assert states == [0, 3, 6, 8]
    assert ticket.state() is READY
    world.end(hold, ticket)
    world.at_rest()


def test_two_requests_share_one_load_and_one_of_them_may_leave(world):
    first, one = world.begin(IDS)
    second, two = world.begin(np.concatenate([IDS[: 8 * BLOCK], ids_of(1, 7)]))
    assert one.loads == two.loads
    assert len(world.workers[0].jobs) == 1
    world.end(first, one)
    assert two.state() is PENDING
    world.settle(lambda: two.state() is not PENDING)
    assert two.state() is READY
    assert world.mover.counters.given_up == 0
    assert world.mover.counters.loaded[Tier.HOST] == 9
    world.end(second, two)
    world.at_rest()


def test_a_longer_prompt_loads_what_a_shorter_one_does_not(world):
    long = IDS
    short = IDS[: 4 * BLOCK + 1]
    first, one = world.begin(short)
    second, two = world.begin(long)
    assert len(two.loads) == 2
    assert len(one.loads) == 1
    world.end(first, one)  # the longer one still waits for it
    world.settle(lambda: two.state() is not PENDING)
    assert two.state() is READY
    world.end(second, two)
    assert world.use(long).start == 8 * BLOCK
    world.at_rest()


def test_the_last_who_leaves_ends_a_load_and_its_room_is_free_at_once(world):
    first, one = world.begin(IDS)
    second, two = world.begin(IDS)
    for hold, ticket in ((first, one), (second, two)):
        world.end(hold, ticket)
        ticket.cancel()  # once more is nothing
    assert world.mover.counters.given_up == 1
    assert world.allocator.available(Form.BLOCK) == world.device.sizes[Tier.DEVICE].blocks
    assert not world.mover.busy
    world.workers[0].step()
    world.mover.turn()
    assert world.device.writes == 0
    world.at_rest()


@pytest.mark.parametrize("then", ["turn", "close"])
def test_what_fails_when_nobody_waits_any_more_is_told(world, then):
    hold, ticket = world.begin(IDS)

    def leave_and_fail(nth):
        if nth == 2:
            world.end(hold, ticket)
            raise OSError("the disk went away")

    world.mover._bringer._faults = Hook(Point.HOST_LOAD, leave_and_fail)
    world.workers[0].step()
    getattr(world.mover, then)()
    counters = world.mover.counters
    assert (counters.given_up, counters.failed_loads) == (1, 1)
    assert "the disk went away" in counters.last_error
    assert sum(counters.spoiled.values()) == 0
    world.mover.turn()
    assert counters.failed_loads == 1
    world.at_rest()


def test_what_is_staged_when_a_load_is_cancelled_is_not_written(world):
    hold, ticket = world.begin(IDS)
    world.workers[0].step()  # all of it is staged
    world.end(hold, ticket)
    world.publish(ids_of(20, 3))  # others take the places
    world.mover.turn()
    assert world.device.writes == 0
    world.at_rest()


def test_a_part_that_comes_between_two_questions_is_not_lost(world):
    """The worker ends just after it was seen that nothing is ready."""
    hold, ticket = world.begin(IDS)
    (load,) = ticket.loads
    real, worker = load.future, world.workers[0]

    class Late:
        def done(self):
            now = real.done()
            worker.step()
            return now

        def __getattr__(self, name):
            return getattr(real, name)

    class Empty(type(load.ready)):
        asked = 0

        def __bool__(self):
            empty = len(self) == 0
            self.asked += 1
            if self.asked % 2 == 0:  # the first asks what is to be written
                worker.step()
            return not empty

    load.ready, load.future = Empty(), Late()
    world.settle(lambda: ticket.state() is not PENDING)
    assert ticket.state() is READY
    world.end(hold, ticket)
    world.at_rest()


def test_a_turn_writes_no_more_than_it_may(world):
    world.mover.options = world.mover.options.__class__(host=pools(32), moves_a_turn=2)
    hold, ticket = world.begin(IDS)
    world.workers[0].step()
    world.mover.turn()
    assert world.device.writes == 2 * MOVED
    world.mover.turn()
    assert world.device.writes == 9
    world.end(hold, ticket)


def test_allowances_add_up_to_a_move_and_what_is_not_used_is_not_kept_for_long(world):
    world.mover.options = world.mover.options.__class__(host=pools(32), moves_a_turn=2)
    hold, ticket = world.begin(IDS)
    world.workers[0].step()
    written = []
    for _ in range(5):
        world.mover.turn(allowance=0.5)
        written.append(world.device.writes)
    assert written == [0, MOVED, MOVED, 2 * MOVED, 2 * MOVED]
    world.mover.turn(allowance=100.0)  # no more than two moves, whatever is allowed
    assert world.device.writes == 9
    world.end(hold, ticket)


def test_loads_of_one_turn_are_written_in_their_order_and_none_starves():
    world = World(host=pools(64), moves_a_turn=1)
    prompts = [ids_of(4, seed) for seed in range(3)]
    for ids in prompts:
        world.publish(ids)
    world.stored()
    world.evict()
    requests = [world.begin(ids) for ids in prompts]
    world.settle(lambda: all(ticket.state() is READY for _, ticket in requests), turns=20)
    for hold, ticket in requests:
        world.end(hold, ticket)
    world.at_rest()


def test_a_device_that_refuses_a_write_ends_the_load_and_nothing_else(world):
    real, calls = world.device.write_blocks, []

    def broken(blocks, places):
        calls.append(places)
        if len(calls) == 2:
            raise RuntimeError("the device is gone")
        real(blocks, places)

    world.device.write_blocks = broken
    hold, ticket = world.begin(IDS)
    world.settle(lambda: ticket.state() is not PENDING)
    assert ticket.state() is FAILED
    world.end(hold, ticket)
    assert world.use(IDS).shared == MOVED * BLOCK
    assert world.mover.counters.failed_loads == 1
    assert world.mover.counters.last_error == "the device is gone"
    world.at_rest()
    assert world.start_of(IDS) == 8 * BLOCK  # the copies on the host are as good as before


def test_a_snapshot_that_can_not_be_read_costs_a_replay_and_not_the_blocks(world):
    snapshot = world.snapshots(IDS)
    world.damage_host(snapshot[0])
    plan = world.bring(IDS)
    assert plan.shared == 8 * BLOCK
    assert plan.snapshot == -1
    assert world.mover.counters.spoiled[Tier.HOST] == 1
    assert len(world.run(IDS)) == 8
    world.at_rest()


def test_damage_is_found_once_and_takes_with_it_what_stands_on_it(world):
    run = world.run(IDS)
    world.damage_host(run[4], word=-1)
    assert world.bring(IDS).shared == 3 * BLOCK
    assert world.mover.counters.failed_loads == world.mover.counters.spoiled[Tier.HOST] == 1
    assert len(world.run(IDS)) == 4  # block 3 is whole on the host
    assert not len(world.snapshots(IDS))
    assert world.bring(IDS).shared == 4 * BLOCK
    assert world.mover.counters.failed_loads == 1
    cause = world.device.directory.lost_cause(world.chain(IDS).digests[4])
    assert cause == "evicted:indexer"  # whose the last word is
    world.at_rest()


def test_damage_on_the_host_is_no_loss_where_the_disk_has_it(tmp_path):
    world = World(host=pools(32), disk=pools(32), path=tmp_path / "s")
    world.publish(IDS, snapshots=(8,))
    world.stored()
    world.evict()
    world.damage_host(world.run(IDS)[0])
    assert isinstance(world.bring(IDS), Miss)
    assert len(world.run(IDS)) == 8
    assert world.start_of(IDS) == 8 * BLOCK
    assert world.mover.counters.loaded[Tier.DISK] == 1
    world.at_rest()


def test_another_request_whose_parent_was_damaged_is_told_so(world):
    """Two loads: the first brings what the second stands on, and fails."""
    short = IDS[: 3 * BLOCK + 1]
    world.damage_host(world.run(IDS)[1])
    first, one = world.begin(short)
    second, two = world.begin(IDS)
    world.settle(lambda: one.state() is not PENDING and two.state() is not PENDING)
    assert (one.state(), two.state()) == (FAILED, FAILED)
    world.end(first, one)
    world.end(second, two)
    world.at_rest()
    assert len(world.run(IDS)) == 1


def test_how_fast_a_tier_is_is_measured_and_smoothed(world):
    assert Tier.HOST not in world.mover.bytes_per_second
    world.start_of(IDS)
    once = world.mover.bytes_per_second[Tier.HOST]
    assert once > 0
    world.mover._measure(Tier.HOST, 2 * once)
    assert once < world.mover.bytes_per_second[Tier.HOST] < 2 * once


def test_a_reset_ends_loads_and_forgets_the_host(world):
    world.begin(IDS)
    world.workers[0].step()
    world.reset()
    assert not world.mover.busy
    assert world.mover.host_bytes == 0
    assert isinstance(world.plan(IDS), Miss)
    while world.workers[0].step():
        pass
    world.mover.turn()
    assert world.device.writes == 0
    world.publish(IDS, snapshots=(8,))
    world.stored()
    world.evict()
    assert world.start_of(IDS) == 8 * BLOCK


def test_a_load_that_is_dropped_tells_who_waits(world):
    hold, ticket = world.begin(IDS)
    world.mover.drop()
    assert ticket.state() is FAILED
    world.end(hold, ticket)
    world.at_rest()


def test_a_closed_mover_begins_nothing_and_keeps_nobody_waiting(world):
    hold, ticket = world.begin(IDS)
    assert not world.mover.close(timeout_s=0.01)  # the load did not end
    assert ticket.state() is FAILED
    world.end(hold, ticket)
    hold, ticket = world.begin(IDS)
    assert ticket is None
    world.drop(hold)
    world.publish(ids_of(3, 9))
    assert not world.mover.turn()
    assert not world.mover.busy
    assert not world.mover.close(timeout_s=0.01)  # nothing became better
    world.device.check()


def test_host_bytes_are_those_of_what_is_held(world):
    words = 8 * world.device.words[Form.BLOCK] + world.device.words[Form.SNAPSHOT]
    assert world.mover.host_bytes == 4 * words == world.mover.counters.stored_bytes[Tier.HOST]
    world.allocator.evict(blocks=8, tier=Tier.HOST)
    assert world.mover.host_bytes == 0
    assert world.entries.state[Tier.HOST].max() == TierState.ABSENT
