"""The abort matrix: a request may end at any stage, in any way, and leaves nothing held."""

import dataclasses

import numpy as np
import pytest
from engines import SLOTS, TILE, FakeRestores, ids_of, same, task_of
from scenarios.runs import assert_at_rest

from hybridkv.blocks.entries import Form, Tier
from hybridkv.engine.requests import Finish
from hybridkv.engine.sampling import SamplingOptions
from hybridkv.engine.scheduler import Stage

VICTIM, NEW = ids_of(6 * TILE + 5, seed=1), 8
NEIGHBOURS = [ids_of(37, seed=2), ids_of(20, seed=3)]
STAGES = (
    "waiting",
    "waiting without room",
    "following",
    "restoring",
    "prefilling 0",
    "prefilling 1",
    "prefilling 3",
    "decoding 1",
    "decoding 5",
    "parked",
)
LONG = 40
"""New tokens of a neighbour that must outlive the victim."""


@pytest.fixture(params=["cancelled", "timed out", "cancelled twice", "reset"])
def abort(lab, request):
    """Ends a handle in one of the ways; which way."""

    def end(handle):
        if request.param == "timed out":
            lab.time.now += 1000.0
            lab.engine.step()
            return Finish.TIMED_OUT
        if request.param == "reset":
            lab.engine.reset()
            return Finish.CANCELLED
        assert handle.cancel()
        if request.param == "cancelled twice":
            assert not handle.cancel()
            assert not lab.engine.cancel(handle)
        return Finish.CANCELLED

    end.resets = request.param == "reset"
    return end


def victim(lab, **more):
    return lab.submit(VICTIM, NEW, timeout_s=1000.0, **more)


def reach(lab, stage):
    """The victim at a stage, and its neighbours."""
    name, _, count = stage.partition(" ")
    if name == "waiting":
        fillers = SLOTS if not count else 2
        new = LONG if not count else 192 - 40  # so much room that the pool has none
        neighbours = [lab.submit(ids_of(37, seed=2 + 30 * i), new) for i in range(fillers)]
        lab.steps(1)
        handle = victim(lab)
        lab.steps(2)
        assert task_of(handle).stage is Stage.WAITING
        assert task_of(handle).refused_at >= 0
        return handle, neighbours
    if name == "following":
        leader = lab.submit(np.concatenate([VICTIM[: 5 * TILE], ids_of(30, seed=4)]), LONG)
        lab.steps(1)
        handle = victim(lab)
        lab.steps(1)
        assert task_of(handle).follows
        return handle, [leader]
    if name == "restoring":
        begins = lambda hold: len(hold.chain.tokens) == len(VICTIM)  # noqa: E731
        lab.change(restores=FakeRestores(lab.time, after_s=500.0, begins=begins), restore_s=900.0)
    neighbours = [lab.submit(ids, LONG) for ids in NEIGHBOURS]
    handle = victim(lab)
    task = task_of(handle)
    if name == "prefilling":
        at = int(count) * TILE
        lab.until(lambda: task.sequence is not None and task.sequence.computed == at)
    elif name in ("decoding", "parked"):
        lab.until(lambda: len(task.output.pieces) == int(count or 3))
    else:
        lab.until(lambda: task.stage is Stage.RESTORING)
        lab.steps(2)
    if name == "parked":
        neighbours.append(lab.submit(NEIGHBOURS[0], 60, priority=1))
        lab.until(lambda: task.stage is Stage.PARKED)
    return handle, neighbours


@pytest.mark.parametrize("stage", STAGES)
def test_a_request_ends_at_any_stage_and_leaves_nothing(lab, abort, stage, monkeypatch):
    lab.alone(VICTIM, NEW)
    if stage == "prefilling 0":  # seated, and no tile of it computed: its turn is not finished
        monkeypatch.setattr(lab.engine, "_tile", lambda tasks: None)
    handle, neighbours = reach(lab, stage)
    ticket = task_of(handle).ticket
    before = list(handle.output.tokens)
    finish = abort(handle)
    monkeypatch.undo()
    assert handle.output.finish is finish
    assert handle.done
    task = task_of(handle)
    assert task.hold is task.ticket is task.sequence is task.parked is task.leader is None
    assert handle.output.tokens[: len(before)] == before
    if ticket is not None:
        assert ticket.cancels == 1
    tokens = list(handle.output.tokens)
    assert not handle.cancel()
    if not abort.resets:
        new = [task_of(h).request.max_new_tokens for h in neighbours]
        lab.finish(*neighbours)
        alone = [lab_alone(lab, task_of(h).prompt, n) for h, n in zip(neighbours, new, strict=True)]
        assert all(same(h.output, one) for h, one in zip(neighbours, alone, strict=True))
    assert handle.output.tokens == tokens, "it went on after its end"
    lab.engine.drain()
    assert_at_rest(lab.engine.runner)
    lab.change()
    again = lab.submit(VICTIM, NEW).result()
    assert same(again, lab_alone(lab, VICTIM, NEW))


def lab_alone(lab, ids, new):
    """Not while anything is in the engine: the others have ended."""
    lab.engine.drain()
    assert_at_rest(lab.engine.runner)
    return lab.alone(ids, new)


def test_an_end_that_came_before_is_not_undone(lab):
    handle = lab.submit(VICTIM, 2, timeout_s=5.0)
    handle.result()
    finished = handle.output.finish, list(handle.output.tokens)
    assert not handle.cancel()
    lab.time.now += 10.0
    lab.steps(2)
    assert (handle.output.finish, handle.output.tokens) == finished == (Finish.LENGTH, finished[1])
    assert lab.engine.counters.ended[Finish.CANCELLED] == 0


def test_an_end_while_idle_work_runs_takes_nothing_from_it(lab):
    first = lab.submit(VICTIM, 40)
    lab.finish(first)
    lab.engine.step()
    assert lab.engine._idle.holds_room
    handle = lab.submit(NEIGHBOURS[0], 4)
    assert handle.cancel()
    assert lab.engine._idle.holds_room
    lab.engine.drain()
    assert lab.engine._idle.counters.interruptions == 0
    assert lab.engine.generated_use.published > 0


def test_idle_work_is_forgotten_at_a_reset(lab):
    lab.submit(VICTIM, 40).result()
    lab.engine.step()
    assert lab.engine._idle.holds_room
    lab.engine.reset()
    assert not lab.engine._idle.pending
    assert lab.engine.runner.free_slots == SLOTS
    assert_at_rest(lab.engine.runner)


@pytest.mark.parametrize("ended", [0, 1, 2])
def test_samples_are_cancelled_together_whatever_they_have_reached(lab, ended):
    sampling = SamplingOptions(temperature=2.0, seed=3)
    stop = ()
    if ended:
        seeds = [dataclasses.replace(sampling, seed=3 + i) for i in range(ended)]
        stop = tuple(lab.alone(VICTIM, NEW, how).tokens[2] for how in seeds)
    handle = lab.submit(VICTIM, NEW, sampling=sampling, samples=4, stop_tokens=stop)
    lab.until(lambda: sum(o.finish is not None for o in handle.outputs) >= ended)
    if not ended:
        lab.steps(2)
    assert handle.cancel()
    finishes = [output.finish for output in handle.outputs]
    assert Finish.CANCELLED in finishes
    assert set(finishes) <= {Finish.CANCELLED, Finish.STOP}
    assert lab.engine.waiting == 0


def test_a_time_that_runs_out_is_counted_from_submission(lab):
    handle = lab.submit(VICTIM, NEW, timeout_s=2.0)
    lab.time.now += 1.9
    lab.steps(2)
    assert not handle.done
    lab.time.now += 0.1
    lab.steps(1)
    assert handle.output.finish is Finish.TIMED_OUT
    assert handle.output.computed == 2 * TILE


def test_a_cancelled_prompt_is_found_up_to_its_last_whole_block(lab):
    handle = lab.submit(VICTIM, NEW)
    lab.steps(2)
    handle.cancel()
    columns = lab.engine.runner.allocator.entries
    blocks = columns.published & (columns.form == Form.BLOCK)
    assert np.count_nonzero(blocks) == 2
    assert (columns.place[Tier.DEVICE, blocks] >= 0).all()
    again = lab.submit(VICTIM, NEW).result()
    assert same(again, lab.alone(VICTIM, NEW))


def test_cancel_inside_progress_and_between_pieces(lab):
    one = lab.submit(VICTIM, NEW)
    pieces = one.pieces()
    first = [next(pieces) for _ in range(3)]
    assert one.cancel()
    assert list(pieces) == []
    assert [piece.token for piece in first] == one.output.tokens
