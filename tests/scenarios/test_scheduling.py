"""Who is admitted, preempted and served when, through the engine."""

import collections
import dataclasses

import jax
import numpy as np
import pytest
from compiling import compilations
from engines import Time, ids_of, make_engine, same, task_of

from hybridkv.blocks.entries import Form
from hybridkv.blocks.pools import NeverFits
from hybridkv.engine.requests import Finish, Request
from hybridkv.engine.scheduler import SchedulerOptions, Stage
from hybridkv.errors import UserError
from hybridkv.prefixes.policy import DENSE
from hybridkv.state import leaf
from hybridkv.state.batch import StepOptions
from scenarios.counting import BLOCKS, LANES, SLOTS, pool_of
from scenarios.runs import CountingModel, assert_at_rest, joined, tokens, used


def stage(handle):
    return task_of(handle).stage


def seated(*handles):
    return [stage(handle) in (Stage.PREFILLING, Stage.DECODING) for handle in handles]


# Preemption.


@pytest.mark.parametrize("tiles", [1, 2, 3])
def test_b128_a_preempted_prompt_starts_over_with_a_state_of_its_own(lab, tiles):
    """Its old slot has the state of the middle of its prompt, or another's."""
    ids, other = ids_of(70, seed=1), ids_of(40, seed=2)
    alone, neighbour = lab.alone(ids, 8), lab.alone(other, 8)
    first = lab.submit(ids, 8)
    task = task_of(first)
    lab.until(lambda: task.sequence is not None and task.sequence.computed == 16 * tiles)
    slot = task.sequence.slot
    lab.engine.seating.preempt(task)
    taker = lab.submit(other, 8, priority=3)
    lab.steps(1)
    assert task_of(taker).sequence.slot == slot
    lab.finish(first, taker)
    assert same(first.output, alone)
    assert same(taker.output, neighbour)


def test_b129_sequences_that_skip_stop_and_end_at_every_step_keep_their_bits(lab):
    """Three transitions, each in every turn: some wait, some are parked, some end early."""
    prompts = [ids_of(20 + 9 * i, seed=i) for i in range(5)]
    alone = [lab.alone(ids, 20) for ids in prompts]
    handles = [lab.submit(ids, 20, priority=i % 3) for i, ids in enumerate(prompts)]
    for turn in range(200):
        if all(handle.done for handle in handles):
            break
        running = [h for h in handles if not h.done and stage(h) is Stage.DECODING]
        if running and turn % 3 == 0:
            lab.engine.seating.preempt(task_of(running[turn % len(running)]))
        if turn % 4 == 0:
            ended = lab.submit(ids_of(18, seed=50 + turn), 5, priority=4)
            lab.steps(turn % 3)
            ended.cancel()
        lab.engine.step()
        slots = [t.sequence.slot for t in lab.engine._tasks.values() if t.sequence is not None]
        free = lab.engine.runner.slots.free
        assert sorted([*slots, *free]) == [0, 1, 2]
    assert all(same(h.output, one) for h, one in zip(handles, alone, strict=True))
    assert lab.engine.counters.preemptions > 10


@pytest.mark.parametrize("length", [3, 16, 20, 70])
def test_b130_the_next_request_of_a_slot_starts_from_nothing(lab, length):
    ids = ids_of(length, seed=3)
    alone = lab.alone(ids, 10)
    before = lab.submit(ids_of(90, seed=4), 7)
    lab.until(lambda: stage(before) is Stage.DECODING)
    slot = task_of(before).sequence.slot
    lab.finish(before)
    cache = lab.engine.runner.cache
    spoilt = jax.tree.map(
        lambda x: jax.device_put(np.full(x.shape, np.nan, x.dtype), leaf.placement()),
        cache.sequence,
    )
    lab.engine.runner.cache = dataclasses.replace(cache, sequence=spoilt)
    handle = lab.submit(ids, 10)
    lab.steps(1)
    assert task_of(handle).ended or task_of(handle).sequence.slot == slot
    lab.finish(handle)
    assert same(handle.output, alone)


def test_b132_what_was_matched_is_not_kept_by_one_that_found_no_room(counting):
    head = tokens(8 * 16, 1)
    counting.submit(head, 1).result()
    with pool_of(counting, 20):
        holder = counting.submit(tokens(6 * 16, 2), 16)
        counting.steps(1)
        leases = counting.engine.runner.allocator.entries.leases.copy()
        slots = counting.engine.runner.free_slots
        waiting = counting.submit(joined(head, tokens(5 * 16, 3)), 16)
        for _ in range(4):
            counting.engine.seating.version += 1  # as if somebody had given something back
            counting.engine._settle(counting.time.now)
            assert task_of(waiting).refused_at == counting.engine.seating.version
            now = counting.engine.runner.allocator.entries.leases
            np.testing.assert_array_equal(now, leases)
            assert counting.engine.runner.free_slots == slots
        counting.finish(holder, waiting)
        assert waiting.output.reused == 8 * 16
    assert_at_rest(counting.engine.runner)


# Admission.


def test_b133_two_that_fit_only_one_after_the_other_both_end(counting):
    """Each shares the half of what it needs: neither may hold that and wait for the rest."""
    with pool_of(counting, 20):
        heads = tokens(8 * 16, 1), tokens(8 * 16, 2)
        for head in heads:
            counting.submit(head, 1).result()
        one = counting.submit(joined(heads[0], tokens(7 * 16, 3)), 16)
        two = counting.submit(joined(heads[1], tokens(3 * 16, 4)), 16)
        counting.steps(1)
        assert seated(one, two) == [True, False]
        assert task_of(two).hold is None
        counting.finish(one, two, limit=100)


def test_b134_the_tokens_to_come_are_promised_with_the_prompt(counting):
    with pool_of(counting, 7):
        one = counting.submit(tokens(4 * 16, 1), 16)
        two = counting.submit(tokens(3 * 16, 2), 16)
        counting.steps(1)
        assert seated(one, two) == [True, False]
        counting.finish(one, two, limit=100)
        assert len(one.output.tokens) == len(two.output.tokens) == 16


def test_b136_the_smallest_engine_serves_what_fits_it_and_does_not_spin():
    time = Time()
    sizes = {"blocks": 1, "slots": 1, "per_sequence": 1, "snapshots": 0}
    engine = make_engine(CountingModel(), StepOptions(tile=16), time=time, **sizes)
    outputs = engine.run([Request(prompt=tokens(15, i), max_new_tokens=1) for i in range(3)])
    assert [output.finish for output in outputs] == [Finish.LENGTH] * 3
    assert engine.counters.turns == 3
    with pytest.raises(UserError, match="the capacity is 16"):
        engine.submit(Request(prompt=tokens(16, 1), max_new_tokens=1))
    with pytest.raises(ValueError, match="at least 1"):
        make_engine(CountingModel(), StepOptions(tile=16), time=time, **sizes | {"blocks": 0})


def test_b137_a_prompt_may_be_much_longer_than_the_window(counting):
    output = counting.submit(tokens(22 * 16, 1), 16).result()
    assert output.finish is Finish.LENGTH
    window = counting.engine.runner.cache.sequence.window
    assert all(x.shape[1] == 8 for x in window.layers)


@pytest.mark.parametrize(("over", "together"), [(0, True), (1, False)])
def test_b138_what_needs_exactly_what_is_left_is_admitted_and_one_more_waits(
    counting, over, together
):
    with pool_of(counting, 10):
        held = counting.submit(tokens(3 * 16, 1), 16)
        counting.steps(1)
        exact = counting.submit(tokens(5 * 16 + over, 2), 16)
        counting.steps(1)
        assert seated(held, exact) == [True, together]
        assert used(counting.engine.runner) <= 10
        counting.finish(held, exact)


def test_b140_no_step_is_given_a_sequence_without_tokens(counting, monkeypatch):
    """Also where room runs out in the middle of prompts, and prompts end at tile boundaries."""
    runner, counts = counting.engine.runner, collections.Counter()
    tiles, advance = runner.tiles, runner.advance

    def watched_tiles(sequences):
        before = [sequence.computed for sequence in sequences]
        logits = tiles(sequences)
        assert sequences
        assert all(s.computed > b for s, b in zip(sequences, before, strict=True))
        counts["tiles"] += 1
        return logits

    def watched_advance(given):
        assert given
        counts["decode"] += 1
        return advance(given)

    monkeypatch.setattr(runner, "tiles", watched_tiles)
    monkeypatch.setattr(runner, "advance", watched_advance)
    counting.change(scheduler=SchedulerOptions(token_budget=3 * 16 * LANES))
    with pool_of(counting, 9):
        lengths = (1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 1, 16, 32)
        handles = [counting.submit(tokens(length, length), 3) for length in lengths]
        for turn in range(300):
            counting.engine.step()
            if turn == 5:
                handles[3].cancel()
            if turn % 3 == 0:
                running = [t for t in counting.engine._tasks.values() if t.sequence is not None]
                for task in running[:1]:
                    counting.engine.seating.preempt(task)
        counting.finish(*handles)
    assert counts["tiles"] > 5
    assert counts["decode"] > 5


def test_b141_one_that_can_never_fit_is_refused_and_the_others_go_on(counting):
    other = counting.submit(tokens(40, 1), 8)
    counting.steps(1)
    with pytest.raises(NeverFits, match="31 blocks never fit DEVICE, which has 24"):
        counting.submit(tokens(30 * 16, 2), 1)
    with pytest.raises(UserError, match="the capacity is 640"):
        counting.submit(tokens(40 * 16, 2), 1)
    assert other.result().finish is Finish.LENGTH
    # The last request alone, and it takes all there is.
    assert counting.submit(tokens(BLOCKS * 16 - 16, 3), 16).result().finish is Finish.LENGTH


def test_b142_every_lane_gets_prompt_tokens_in_every_turn(counting):
    """What a turn may compute is counted in tiles, so that a long prompt takes a lane and not
    all of them."""
    handles = [counting.submit(tokens(5 * 16 + 3, seed), 4) for seed in range(LANES)]
    for turn in range(1, 6):
        counting.engine.step()
        assert [task_of(h).sequence.computed for h in handles] == [16 * turn] * LANES
    assert counting.engine.counters.tile_steps == 5
    counting.finish(*handles)


def test_b142_tokens_left_of_the_budget_go_to_all_prompts(counting):
    counting.change(scheduler=SchedulerOptions(token_budget=2 * 16 * LANES))
    handles = [counting.submit(tokens(5 * 16 + 3, seed), 4) for seed in range(LANES)]
    counting.engine.step()
    assert [task_of(h).sequence.computed for h in handles] == [32] * LANES
    short = [counting.submit(tokens(3, 70 + i), 4) for i in range(2)]
    assert not any(h.done for h in handles)
    counting.finish(*handles, *short)


def test_b144_states_of_earlier_turns_are_held_by_nobody(counting):
    ids = tokens(20, 1)
    runner = counting.engine.runner
    with pool_of(counting, 16):
        for turn in range(30):
            if len(ids) + 4 > 15 * 16:
                break
            output = counting.submit(ids, 4, policy=DENSE).result()
            assert not runner.allocator.leases.open
            assert used(runner) <= 16
            ids = joined(ids, np.array(output.tokens, np.int32), tokens(9, turn + 2))
        counting.engine.drain()
        assert used(runner, Form.SNAPSHOT) <= len(ids) // 16


def test_b146_blocks_that_all_share_are_counted_once(counting):
    head = tokens(4 * 16, 1)
    counting.submit(head, 1).result()
    with pool_of(counting, 8):
        sharers = [counting.submit(joined(head, tokens(10, seed)), 6) for seed in range(2, 6)]
        counting.steps(1)
        assert seated(*sharers) == [True] * SLOTS
        assert used(counting.engine.runner) == 4 + 4
        assert counting.engine.runner.allocator.entries.leases.max() == SLOTS
        counting.finish(*sharers)


# Counts.


def test_b154_nothing_is_lost_with_many_requests(counting):
    runner = counting.engine.runner
    rng = np.random.default_rng(0)
    handles = []
    for number in range(150):
        head = tokens(5 * 16, number % 4)[: rng.integers(0, 81)]
        ids = joined(head, tokens(int(rng.integers(1, 60)), number))
        handles.append(counting.submit(ids, int(rng.integers(1, 9)), priority=number % 3))
        counting.steps(int(rng.integers(0, 4)))
        counting.time.now += 0.1
        if number % 7 == 0:
            handles[int(rng.integers(len(handles)))].cancel()
        pool = runner.allocator.pools[0][Form.BLOCK]
        assert pool.used + pool.available + pool.reserved == BLOCKS
    counting.finish(*handles, limit=5000)
    counting.engine.drain()
    assert_at_rest(runner)
    runner.allocator.evict(blocks=runner.allocator.evictable(Form.BLOCK))
    assert used(runner) == used(runner, Form.SNAPSHOT) == 0


def test_b222_one_that_starts_over_counts_as_one_that_reused_once(counting):
    """What it finds of its own first attempt was computed by it."""
    head = tokens(3 * 16, 1)
    counting.submit(head, 1).result()
    counting.engine.counters.computed_tokens = 0
    ids = joined(head, tokens(6 * 16, 2))
    handle = counting.submit(ids, 4)
    for _ in range(2):
        counting.steps(2)
        counting.engine.seating.preempt(task_of(handle))
    counting.finish(handle)
    output, counters = handle.output, counting.engine.counters
    assert output.preemptions == 2
    assert counters.reused_tokens == output.reused == 3 * 16
    assert counters.computed_tokens == output.computed >= len(ids) - 3 * 16


# Topology.


def test_b196_b197_a_mixed_run_compiles_nothing_and_keeps_every_shape(lab):
    """Hits, misses, evictions, preemptions, cancellations, idle work, followers, samples."""
    runner = lab.engine.runner

    def topology():
        leaves, shape = jax.tree.flatten((runner.cache, runner.snapshots))
        return shape, [(x.shape, x.dtype, x.sharding) for x in leaves]

    before = topology()
    head = ids_of(96, seed=1)
    with compilations() as compiled:
        handles = []
        for number in range(14):
            ids = joined(head[: 16 * (number % 7)], ids_of(3 + 5 * number, seed=number))
            more = {"samples": 2} if number % 5 == 0 else {"policy": DENSE}
            handles.append(lab.submit(ids, 1 + 2 * number, priority=number % 3, **more))
            lab.steps(number % 4)
            if number % 4 == 3:
                handles[-2].cancel()
        lab.finish(*handles)
        lab.engine.drain()
        lab.submit(joined(head, ids_of(9)), 3).result()
    assert not compiled
    assert topology() == before
    assert lab.engine.counters.preemptions > 0
    assert lab.engine.counters.followed > 0


# Whole sequences of requests.


def test_b001_a_prompt_comes_back_to_a_slot_that_others_used(lab):
    ids, other = ids_of(40, seed=1), ids_of(40, seed=2)
    alone = lab.alone(ids, 4)
    for turn, prompt in enumerate([ids, other, ids]):
        output = lab.submit(prompt, 4).result()
        assert output.reused == (0, 0, 32)[turn]
    assert same(output, alone)


def test_the_third_of_a_fan_out_hits_what_all_share(lab):
    head = ids_of(96, seed=1)
    prompts = [joined(head, ids_of(7, seed=i)) for i in range(2, 5)]
    alone = [lab.alone(ids, 4) for ids in prompts]
    outputs = [lab.submit(ids, 4).result() for ids in prompts]
    assert all(same(a, b) for a, b in zip(outputs, alone, strict=True))
    assert outputs[2].reused == 96


def test_thirty_growing_turns_reuse_all_whole_tiles_with_their_answers(counting):
    ids, before = tokens(20, 1), 0
    for turn in range(30):
        output = counting.submit(ids, 4).result()
        counting.engine.drain()
        assert output.reused >= max(before - 1, 0) // 16 * 16
        before = len(ids) + 4
        ids = joined(ids, np.array(output.tokens, np.int32), tokens(7, turn + 2))
    assert counting.engine.counters.compilations == 0


def test_b045_an_agent_alone_and_beside_others_reuses_its_turns(lab):
    """Each turn has the bits of a cold run, while others come and go."""
    ids = ids_of(20, seed=1)
    for turn in range(6):
        alone = lab.alone(ids, 6) if turn in (3, 5) else None
        if alone is None:
            lab.submit(ids_of(30, seed=90 + turn), 3)
        handle = lab.submit(ids, 6)
        lab.finish(handle)
        lab.engine.drain()
        if alone is not None:
            assert same(handle.output, alone)
        ids = joined(ids, np.array(handle.output.tokens, np.int32), ids_of(8, seed=turn))
