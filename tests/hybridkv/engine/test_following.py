"""Prompts with a common beginning that come together compute it once."""

import numpy as np
import pytest
from engines import TILE, ids_of, same, task_of

from hybridkv.engine.requests import Finish
from hybridkv.engine.scheduler import Stage

HEAD = ids_of(6 * TILE, seed=1)
ONE = np.concatenate([HEAD, ids_of(20, seed=2)])
TWO = np.concatenate([HEAD, ids_of(9, seed=3)])


def together(lab, *prompts, **more):
    """The first is being computed when the others come."""
    handles = [lab.submit(prompts[0], 6, **more)]
    lab.steps(1)
    return [*handles, *(lab.submit(ids, 6, **more) for ids in prompts[1:])]


def test_the_second_computes_only_what_differs(lab):
    alone = [lab.alone(ids, 6) for ids in (ONE, TWO)]
    handles = [lab.submit(ids, 6) for ids in (ONE, TWO)]  # in the same turn
    lab.finish(*handles)
    assert [handle.output.computed for handle in handles] == [len(ONE), 9]
    assert lab.engine.counters.followed == 1
    for handle, one in zip(handles, alone, strict=True):
        assert same(handle.output, one)


def test_several_follow_one(lab):
    prompts = [ONE, TWO, *(np.concatenate([HEAD, ids_of(5, seed=i)]) for i in (4, 5))]
    alone = [lab.alone(ids, 6) for ids in prompts]
    handles = together(lab, *prompts)
    lab.finish(*handles)
    assert [handle.output.computed for handle in handles] == [len(ONE), 9, 5, 5]
    for handle, one in zip(handles, alone, strict=True):
        assert same(handle.output, one)


@pytest.mark.parametrize("tiles", [1, 3, 5])
@pytest.mark.parametrize("how", ["cancelled", "preempted"])
def test_a_follower_goes_on_where_its_leader_stops_half_way(lab, tiles, how):
    alone = [lab.alone(ids, 6) for ids in (ONE, TWO)]
    leader, follower = together(lab, ONE, TWO)
    task = task_of(leader)
    lab.until(lambda: task.sequence.computed == tiles * TILE)
    lab.engine._settle(lab.time.now)
    assert task_of(follower).follows
    if how == "cancelled":
        leader.cancel()
    else:
        lab.engine.seating.preempt(task)
    lab.finish(leader, follower)
    assert same(follower.output, alone[1])
    assert follower.output.computed <= len(TWO)
    if how == "preempted":
        assert same(leader.output, alone[0])


def test_a_leader_that_fails_leads_nobody_astray(lab, monkeypatch):
    alone = lab.alone(TWO, 6)
    leader, follower = together(lab, ONE, TWO)
    lab.until(lambda: task_of(leader).stage is Stage.DECODING)
    lab.engine._end(task_of(leader), Finish.FAILED, "a test's")
    lab.finish(follower)
    assert same(follower.output, alone)


def test_what_is_too_short_to_be_worth_it_is_not_waited_for(lab):
    leader, other = together(lab, ONE, np.concatenate([HEAD[:10], ids_of(40, seed=6)]))
    lab.steps(1)
    assert task_of(other).stage is Stage.PREFILLING
    assert lab.engine.counters.followed == 0
    lab.finish(leader, other)


def test_where_a_fork_gets_a_snapshot_one_tile_is_worth_following_for(lab):
    ids = np.concatenate([HEAD[: 2 * TILE], ids_of(9, seed=6)])
    alone = lab.alone(ids, 6)
    leader, follower = together(lab, ONE, ids)
    lab.finish(leader, follower)
    assert same(follower.output, alone)
    assert follower.output.computed == 9
    assert lab.engine.counters.followed == 1


def test_namespaces_do_not_follow_each_other(lab):
    one = lab.submit(ONE, 3, namespace="a")
    lab.steps(1)
    two = lab.submit(TWO, 3, namespace="b")
    lab.finish(one, two)
    assert lab.engine.counters.followed == 0
    assert two.output.computed == len(TWO)


def test_one_that_follows_lets_others_pass(lab):
    leader, follower = together(lab, ONE, TWO)
    other = lab.submit(ids_of(8, seed=9), 2)
    lab.time.now += 5.0  # past everybody's patience
    lab.steps(2)
    assert task_of(follower).follows
    assert task_of(other).stage is not Stage.WAITING
    lab.finish(leader, follower, other)


def test_one_whose_prompt_is_the_beginning_of_another_follows_too(lab):
    alone = lab.alone(HEAD, 6)
    leader, follower = together(lab, ONE, HEAD)
    lab.finish(leader, follower)
    assert same(follower.output, alone)
    assert follower.output.computed == TILE  # the last token's tile


def test_a_short_common_beginning_is_followed_too_since_its_fork_gets_a_snapshot(lab):
    """A replay up to it would begin at the first token."""
    head = ids_of(2 * TILE, seed=7)
    prompts = [np.concatenate([head, ids_of(3 * TILE + 5, seed=i)]) for i in (8, 9)]
    alone = [lab.alone(ids, 6) for ids in prompts]
    handles = [lab.submit(ids, 6) for ids in prompts]
    lab.finish(*handles)
    assert handles[1].output.plan.replayed == 0
    assert handles[1].output.reused == 2 * TILE
    for handle, one in zip(handles, alone, strict=True):
        assert same(handle.output, one)
