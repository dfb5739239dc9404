"""A request that waits for its prefix keeps its room, has no slot, and stalls nobody."""

import numpy as np
import pytest
from engines import BLOCKS, SLOTS, TILE, FakeRestores, FakeTicket, ids_of, same, task_of
from scenarios.runs import used

from hybridkv.engine.requests import Finish
from hybridkv.engine.restores import RestoreState
from hybridkv.engine.scheduler import Stage
from hybridkv.prefixes.policy import DENSE

IDS, NEW = ids_of(5 * TILE + 3, seed=1), 6
OTHER = ids_of(20, seed=2)


def for_ids(hold):
    return hold.chain.length == len(IDS)


def loads(lab, tokens):
    """Puts a prefix into the cache, as a load would, on the thread that owns it."""

    def load(hold):
        runner = lab.engine.runner
        sequence = runner.start(hold.chain.tokens[:tokens].astype(np.int32), policy=DENSE)
        runner.prefill(sequence)
        runner.finish(sequence)

    return load


def restoring(lab, **more):
    """A request that is being restored, and its restores."""
    restores = FakeRestores(lab.time, begins=for_ids, **more)
    lab.change(restores=restores, restore_s=1.0)
    handle = lab.submit(IDS, NEW)
    lab.steps(1)
    assert task_of(handle).stage is Stage.RESTORING
    return handle, restores


def test_what_was_loaded_is_found_and_the_bits_are_those_of_a_cold_run(lab):
    alone = lab.alone(IDS, NEW)
    handle, restores = restoring(lab, load=loads(lab, 4 * TILE))
    lab.steps(3)
    assert not handle.output.tokens
    assert task_of(handle).sequence is None
    lab.time.now += 0.5
    lab.finish(handle)
    assert same(handle.output, alone)
    assert (handle.output.reused, handle.output.computed) == (4 * TILE, len(IDS) - 4 * TILE)
    assert [ticket.cancels for ticket in restores.tickets] == [1]
    counters = lab.engine.counters
    assert (counters.restores, counters.failed_restores, counters.late_restores) == (1, 0, 0)
    assert counters.reused_tokens == 4 * TILE


@pytest.mark.parametrize("end", [RestoreState.READY, RestoreState.FAILED])
def test_one_that_brings_nothing_is_computed_and_not_tried_again(lab, end):
    alone = lab.alone(IDS, NEW)
    handle, restores = restoring(lab, end=end)
    lab.time.now += 0.5
    lab.finish(handle)
    assert same(handle.output, alone)
    assert handle.output.reused == 0
    assert len(restores.tickets) == 1
    assert lab.engine.counters.failed_restores == (end is RestoreState.FAILED)


def test_a_late_one_is_given_up_at_its_deadline_and_computed(lab):
    alone = lab.alone(IDS, NEW)
    handle, restores = restoring(lab, after_s=100.0)
    began = lab.time.now
    lab.time.now = began + 0.99
    lab.steps(2)
    assert task_of(handle).stage is Stage.RESTORING
    lab.time.now = began + 1.0
    lab.finish(handle)
    assert same(handle.output, alone)
    assert restores.tickets[0].cancels == 1
    assert lab.engine.counters.late_restores == 1
    assert lab.time.now < began + 50


def test_a_deadline_comes_by_itself_where_there_is_nothing_else_to_do(lab):
    handle, _ = restoring(lab, after_s=100.0)
    began = lab.time.now
    lab.finish(handle)
    assert handle.output.finish is Finish.LENGTH
    assert 0.99 <= lab.time.now - began < 2.0


@pytest.mark.parametrize("how", ["cancelled", "timed out"])
def test_one_that_ends_while_it_waits_gives_its_room_back(lab, how):
    restores = FakeRestores(lab.time, after_s=100.0)
    lab.change(restores=restores, restore_s=100.0)
    handle = lab.submit(IDS, NEW, timeout_s=3.0)
    lab.steps(2)
    assert lab.engine.runner.allocator.available(0) < BLOCKS
    if how == "cancelled":
        assert handle.cancel()
    else:
        lab.time.now += 3.0
        lab.steps(1)
        assert handle.output.finish is Finish.TIMED_OUT
    assert restores.tickets[0].cancels == 1
    assert lab.engine.runner.allocator.available(0) == BLOCKS


def test_the_batch_goes_on_meanwhile(lab):
    """Every turn with something to compute computes; all slots are there for others."""
    alone = lab.alone(OTHER, 8)
    handle, _ = restoring(lab, after_s=0.9)
    others = [lab.submit(OTHER, 8) for _ in range(SLOTS)]
    turns = 0
    while not all(other.done for other in others):
        assert lab.engine.step(), "a turn went by for nothing"
        turns += 1
    assert turns < 20
    assert all(same(other.output, alone) for other in others)
    assert task_of(handle).stage is Stage.RESTORING
    lab.finish(handle)


def test_its_room_is_held_and_given_back(lab):
    runner = lab.engine.runner
    handle, _ = restoring(lab, after_s=0.9)
    needs = -(-(len(IDS) + NEW) // TILE)
    assert runner.allocator.available(0) == BLOCKS - needs
    assert runner.free_slots == SLOTS
    big = lab.submit(ids_of(180, seed=5), 8)
    second = lab.submit(ids_of(180, seed=6), 8)
    lab.steps(2)
    assert task_of(big).stage is Stage.PREFILLING
    assert task_of(second).stage is Stage.WAITING  # 6 + 12 + 12 blocks of 24
    assert used(runner) == 12
    lab.finish(handle, big, second)
    assert {h.output.finish for h in (handle, big, second)} == {Finish.LENGTH}


def test_many_that_are_restored_and_do_not_fit_together_all_end(lab):
    """Each holds all it needs while it waits, or nothing."""
    lab.change(restores=FakeRestores(lab.time, after_s=0.2), restore_s=1.0)
    handles = [lab.submit(ids_of(100 + 7 * i, seed=i), 10) for i in range(9)]
    lab.finish(*handles, limit=5000)
    assert all(h.output.finish is Finish.LENGTH for h in handles)


def test_nothing_is_evicted_for_one_that_cannot_be_seated(lab):
    """Its restore is over and all slots are taken: it waits without holding room."""
    lab.submit(ids_of(9 * TILE, seed=8), 1).result()
    lab.change(restores=FakeRestores(lab.time, begins=for_ids), restore_s=1.0)
    others = [lab.submit(ids_of(4, seed=60 + i), 60) for i in range(SLOTS)]
    lab.steps(2)
    evicted = []
    lab.engine.runner.allocator.on_evict.append(lambda ids, tier, cause: evicted.extend(ids))
    handle = lab.submit(IDS, 60)
    task_of(handle).restored = True  # it was tried, and others used what that gave back
    lab.steps(3)
    assert task_of(handle).stage is Stage.WAITING
    assert not evicted
    lab.finish(handle, *others)


@pytest.mark.parametrize("where", ["begin", "state"])
def test_restores_that_raise_cost_a_hit_and_nothing_else(lab, monkeypatch, where):
    alone, other = lab.alone(IDS, NEW), lab.alone(OTHER, NEW)

    def broken(*_):
        raise OSError("the store is gone")

    restores = FakeRestores(lab.time, begins=for_ids)
    lab.change(restores=restores, restore_s=1.0)
    target = FakeRestores if where == "begin" else FakeTicket
    monkeypatch.setattr(target, where, broken)
    handles = [lab.submit(IDS, NEW), lab.submit(OTHER, NEW)]
    lab.finish(*handles)
    assert same(handles[0].output, alone)
    assert same(handles[1].output, other)
    counters = lab.engine.counters
    assert counters.failed_restores >= 1
    assert counters.last_restore_error == "OSError: the store is gone"
