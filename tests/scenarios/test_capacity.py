"""All that a request will need is promised at once, or nothing is held and it waits."""

import numpy as np
import pytest

from hybridkv.blocks.entries import Form
from hybridkv.blocks.pools import NeverFits, NoRoom
from hybridkv.engine.sequence import NoSlot
from hybridkv.errors import UserError
from hybridkv.prefixes.policy import DENSE
from hybridkv.state.capacity import Capacity
from scenarios.runs import (
    assert_at_rest,
    counting_runner,
    joined,
    request,
    start_of,
    tokens,
    used,
)


def test_b133_two_that_fit_only_one_after_the_other_both_end():
    runner = counting_runner(blocks=20)
    heads = tokens(8 * 16, 1), tokens(8 * 16, 2)
    for head in heads:
        request(runner, head)
    one = runner.start(joined(heads[0], tokens(8 * 16 - 1, 3)))
    assert (len(one.shared.entries), len(one.own.entries)) == (8, 8)
    leases = runner.allocator.entries.leases.copy()
    with pytest.raises(NoRoom):
        runner.start(joined(heads[1], tokens(4 * 16 - 1, 4)))
    np.testing.assert_array_equal(runner.allocator.entries.leases, leases)
    runner.prefill(one)
    runner.finish(one)
    two = runner.start(joined(heads[1], tokens(4 * 16 - 1, 4)))
    runner.prefill(two)
    runner.finish(two)
    assert_at_rest(runner)


def test_b134_the_tokens_to_come_are_promised_with_the_prompt():
    runner = counting_runner(blocks=7)
    one = runner.start(tokens(4 * 16, 1), max_new_tokens=16)
    assert len(one.own.entries) == 5
    with pytest.raises(NoRoom):
        runner.start(tokens(2 * 16, 2), max_new_tokens=16)
    runner.prefill(one)
    for _ in range(16):
        runner.decode({one: 1})
    runner.finish(one)
    two = runner.start(tokens(2 * 16, 2), max_new_tokens=16)
    runner.prefill(two)
    runner.finish(two)
    assert_at_rest(runner)


@pytest.mark.parametrize("name", ["blocks", "slots", "blocks_per_sequence"])
def test_b136_a_pool_too_small_for_anything_is_refused_when_it_is_made(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        Capacity(**{"blocks": 4, "slots": 1, "blocks_per_sequence": 4} | {name: 0})


def test_b137_a_prompt_may_be_much_longer_than_the_window():
    runner = counting_runner(blocks=20, slots=1)
    sequence = runner.start(tokens(300, 1))
    runner.prefill(sequence)
    assert all(x.shape[1] == 8 for x in runner.cache.sequence.window.layers)
    runner.finish(sequence)


def test_b138_a_prompt_that_needs_exactly_what_is_left_is_admitted_and_one_more_is_not():
    runner = counting_runner(blocks=10)
    held = runner.start(tokens(3 * 16, 1), max_new_tokens=1)
    assert len(held.own.entries) == 4
    with pytest.raises(NoRoom):
        runner.start(tokens(6 * 16, 2), max_new_tokens=1)
    exact = runner.start(tokens(6 * 16 - 1, 2), max_new_tokens=1)
    assert used(runner) == 10
    for sequence in (held, exact):
        runner.prefill(sequence)
        runner.finish(sequence)
    assert_at_rest(runner)


def test_b140_no_step_is_given_a_sequence_without_tokens():
    runner = counting_runner(blocks=40)
    for length in (1, 2, 15, 16, 17, 31, 32, 33, 48, 49):
        for _ in range(2):
            sequence = runner.start(tokens(length, 1))
            while sequence.computed < length:
                before = sequence.computed
                runner.tile(sequence)
                assert before < sequence.computed <= min(before + 16, length)
            runner.finish(sequence)


def test_b141_a_prompt_that_can_never_fit_is_refused_alone():
    runner = counting_runner(blocks=6, per_sequence=12)
    other = runner.start(tokens(40, 1))
    with pytest.raises(NeverFits, match="12 blocks never fit DEVICE, which has 6"):
        runner.start(tokens(12 * 16 - 1, 2))
    with pytest.raises(UserError, match="the capacity is 192"):
        runner.start(tokens(13 * 16, 2))
    runner.prefill(other)
    runner.finish(other)
    assert_at_rest(runner)


def test_b141_a_prompt_that_can_never_fit_is_refused_although_its_beginning_is_there():
    """Waiting would be for ever: nothing else runs, and what it shares counts too."""
    runner = counting_runner(blocks=10, per_sequence=14)
    ids = tokens(11 * 16 - 1, 1)
    request(runner, ids[: 5 * 16])
    with pytest.raises(NeverFits):
        runner.start(ids)


def test_b144_states_of_earlier_turns_are_held_by_nobody():
    runner = counting_runner(blocks=60, slots=1, per_sequence=60, snapshots=4)
    ids = tokens(40, 1)
    for turn in range(30):
        request(runner, ids, policy=DENSE)
        assert_at_rest(runner)
        assert used(runner, Form.SNAPSHOT) <= 4
        assert used(runner) == len(ids) // 16
        ids = joined(ids, tokens(20, turn + 2))


def test_b146_blocks_that_all_share_are_counted_once():
    runner = counting_runner(blocks=9, slots=4)
    head = tokens(4 * 16, 1)
    request(runner, head)
    sharers = [runner.start(joined(head, tokens(10, seed))) for seed in range(2, 6)]
    assert used(runner) == 4 + 4
    assert runner.allocator.entries.leases.max() == 4
    for sequence in sharers:
        runner.prefill(sequence)
        runner.finish(sequence)
    assert_at_rest(runner)


def test_many_that_wait_for_room_all_end():
    """Requests of random sizes over a pool of one and a half: whoever does not fit waits."""
    runner = counting_runner(blocks=18, slots=3, per_sequence=12, debug=False)
    rng = np.random.default_rng(0)
    waiting = [tokens(int(rng.integers(1, 12 * 16 - 8)), seed % 7) for seed in range(60)]
    running, ended, refused = [], 0, 0
    for _ in range(5000):
        if waiting:
            try:
                running.append(runner.start(waiting[-1], max_new_tokens=8))
                waiting.pop()
            except (NoRoom, NoSlot):
                refused += 1
        if running:
            sequence = running[int(rng.integers(len(running)))]
            if sequence.computed < sequence.prompt_tokens:
                runner.tile(sequence)
            else:
                runner.finish(sequence)
                running.remove(sequence)
                ended += 1
    assert (ended, len(running), len(waiting)) == (60, 0, 0)
    assert refused > 0
    assert_at_rest(runner)


def test_reuse_is_the_same_whether_a_request_waited_or_not():
    runner = counting_runner(blocks=12)
    ids = tokens(60, 1)
    request(runner, ids)
    held = runner.start(tokens(120, 2))
    for _ in range(3):
        with pytest.raises(NoRoom):
            runner.start(joined(ids, tokens(60, 3)))
    runner.finish(held)
    assert start_of(request(runner, joined(ids, tokens(60, 3)))) == 48
