"""A request may end at any time, before and after others depend on it."""

import numpy as np
import pytest
from engines import FakeRestores, FakeTicket, ids_of, same, task_of

from hybridkv.engine.requests import Finish
from hybridkv.engine.restores import RestoreState
from hybridkv.engine.scheduler import Stage
from scenarios.counting import BLOCKS, SLOTS
from scenarios.runs import assert_at_rest, joined, tokens, used


class WatchedTicket(FakeTicket):
    """Its blocks must still be promised when it ends: what it writes, it writes to them."""

    def cancel(self):
        allocator = self.restores.runner.allocator
        assert self.hold.reservation.serial in allocator.reservations.left
        assert self.hold.shared.serial in allocator.leases.open
        super().cancel()


class WatchedRestores(FakeRestores):
    def __init__(self, runner, time, **more):
        super().__init__(time, **more)
        self.runner = runner

    def begin(self, hold):
        self.tickets.append(WatchedTicket(self, hold))
        return self.tickets[-1]


@pytest.mark.parametrize("how", ["cancel", "time out", "deadline", "reset", "end"])
def test_a_load_is_ended_before_its_blocks_are_given_back(counting, how):
    """The part of B105 and B118 that is an engine's: fence, then free."""
    engine = counting.engine
    head = tokens(64, 1)
    counting.submit(head, 1).result()
    restores = WatchedRestores(engine.runner, counting.time, after_s=0.5)
    counting.change(restores=restores, restore_s=0.2 if how == "deadline" else 10.0)
    handle = counting.submit(joined(head, tokens(40, 2)), 4, timeout_s=5.0)
    counting.steps(2)
    assert task_of(handle).stage is Stage.RESTORING
    if how == "cancel":
        handle.cancel()
    elif how == "reset":
        engine.reset()
    else:
        counting.time.now += {"time out": 5.0, "deadline": 0.2, "end": 0.5}[how]
        counting.steps(1)
    assert [ticket.cancels for ticket in restores.tickets] == [1]
    counting.finish(handle)
    ended = {"cancel": Finish.CANCELLED, "reset": Finish.CANCELLED, "time out": Finish.TIMED_OUT}
    assert handle.output.finish is ended.get(how, Finish.LENGTH)
    assert_at_rest(engine.runner)


@pytest.mark.parametrize("first", ["completion", "abort"])
def test_a_load_that_completes_beside_its_abort_gives_back_once(counting, first):
    restores = WatchedRestores(counting.engine.runner, counting.time, after_s=0.5)
    counting.change(restores=restores, restore_s=10.0)
    handle = counting.submit(tokens(40, 2), 4)
    counting.steps(1)
    if first == "completion":
        counting.time.now += 1.0
        counting.engine.seating.poll(counting.engine._tasks.values())
        assert task_of(handle).stage is Stage.WAITING
        handle.cancel()
    else:
        handle.cancel()
        counting.time.now += 1.0
        counting.steps(2)
    assert restores.tickets[0].cancels == 1
    assert counting.engine.runner.allocator.available(0) == BLOCKS


@pytest.mark.parametrize("end", list(RestoreState)[1:])
def test_a_load_that_fails_or_brings_nothing_strands_nobody(counting, end):
    """The part of B148 and B149 that is an engine's."""
    counting.change(restores=FakeRestores(counting.time, after_s=0.0, end=end), restore_s=10.0)
    handles = [counting.submit(tokens(30, seed), 3) for seed in range(2 * SLOTS)]
    counting.finish(*handles, limit=60)
    assert all(h.output.finish is Finish.LENGTH for h in handles)


@pytest.mark.parametrize("tiles", [0, 1, 3, 5])
def test_b116_a_producer_that_is_cancelled_leaves_whole_blocks_or_none(lab, tiles):
    """Two requests with one beginning; whoever goes first is cancelled in the middle."""
    head = ids_of(96, seed=1)
    one, two = (joined(head, ids_of(7, seed=seed)) for seed in (2, 3))
    alone = lab.alone(two, 6)
    first, second = lab.submit(one, 6), lab.submit(two, 6)
    if tiles:
        lab.until(lambda: task_of(first).sequence is not None)
        lab.until(lambda: task_of(first).sequence.computed == 16 * tiles)
        assert task_of(second).follows
    else:
        lab.engine._settle(lab.time.now)  # seated, and nothing computed
    first.cancel()
    assert used(lab.engine.runner) == tiles
    lab.finish(second)
    assert same(second.output, alone)


def test_b109_nothing_is_seen_while_it_is_computed(lab):
    ids = ids_of(70, seed=1)
    alone = lab.alone(ids, 4)
    runner = lab.engine.runner
    writer = lab.submit(ids, 4)
    for _ in range(4):
        lab.steps(1)
        assert runner.plan(runner.chain(ids)).tokens == 70
        assert used(runner) == 5
        assert not runner.allocator.entries.published.any()
    lab.finish(writer)
    assert same(lab.submit(ids, 4).result(), alone)


def test_b160_requests_that_never_run_keep_nothing(counting):
    """Submitted, some matched and restoring, and cancelled before a tile, 32 times over."""
    head = tokens(64, 1)
    counting.submit(head, 1).result()
    counting.change(restores=FakeRestores(counting.time, after_s=9.0), restore_s=10.0)
    runner = counting.engine.runner
    before = used(runner)
    for round_ in range(32):
        handles = [counting.submit(joined(head, tokens(20, s)), 8) for s in range(3)]
        if round_ % 2:
            counting.engine._settle(counting.time.now)
        assert all(handle.cancel() for handle in handles)
        assert used(runner) == before
        assert_at_rest(runner)


def test_b113_an_immediate_repetition_sees_what_was_just_computed(lab):
    ids = ids_of(50, seed=1)
    alone = lab.alone(ids, 6)
    first = lab.submit(ids, 6)
    lab.until(lambda: task_of(first).stage is Stage.DECODING)
    second = lab.submit(ids, 6)  # the first still decodes
    lab.finish(first, second)
    assert second.output.reused == 48
    assert same(second.output, alone)


def test_everybody_may_be_cancelled_at_once(lab):
    handles = [lab.submit(ids_of(30 + 5 * i, seed=i), 9, priority=i % 3) for i in range(9)]
    lab.steps(5)
    for handle in handles:
        handle.cancel()
    assert not lab.engine.step()
    assert np.count_nonzero(lab.engine.runner.allocator.entries.leases) == 0
    assert lab.engine.runner.free_slots == 3
