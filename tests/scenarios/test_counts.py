"""Claims are counted and given back once; what is free, used and promised is always everything."""

import numpy as np
import pytest
from shelves import Shelf

from hybridkv.blocks.entries import NONE, EntryError, Form, Tier, kind_bits
from hybridkv.blocks.invariants import check
from hybridkv.blocks.leases import DoubleRelease, LeaseError, ReleasedAfterEviction
from hybridkv.blocks.pools import NoRoom
from hybridkv.blocks.transitions import TierState, TransitionError
from hybridkv.kinds import Kind
from hybridkv.prefixes.plan import Miss, Plan
from hybridkv.prefixes.policy import DENSE
from scenarios.runs import (
    GEOMETRY,
    assert_at_rest,
    counting_runner,
    joined,
    plan_on,
    request,
    tokens,
    used,
)


def everything(allocator):
    """Places of each pool, by what they are."""
    return [
        (pool.used, pool.reserved, pool.available, pool.capacity)
        for forms in allocator.pools.values()
        for pool in forms.values()
    ]


def test_b132_a_prompt_that_matched_and_found_no_room_leaves_nothing_behind():
    runner = counting_runner(blocks=10)
    head = tokens(5 * 16, 1)
    request(runner, head)
    held = runner.start(tokens(5 * 16 - 1, 2))
    before, slots = everything(runner.allocator), list(runner.slots.free)
    for _ in range(10):
        with pytest.raises(NoRoom):
            runner.start(joined(head, tokens(4 * 16, 3)))
        assert everything(runner.allocator) == before
        assert runner.slots.free == slots
    runner.finish(held)
    assert_at_rest(runner)


def test_b152_claims_of_sharers_that_fork_and_end_in_any_order_come_out_even():
    runner = counting_runner(blocks=40, slots=4)
    rng, trunk = np.random.default_rng(1), tokens(100, 1)
    running = []
    for number in range(120):
        cut = int(rng.integers(0, 100))
        while len(running) == 4 or (running and rng.random() < 0.4):
            runner.finish(running.pop(int(rng.integers(len(running)))))
        try:
            running.append(runner.start(joined(trunk[:cut], tokens(30, number))))
        except NoRoom:
            continue
        if rng.random() < 0.7:
            runner.prefill(running[-1])
        assert runner.allocator.entries.leases.min() >= 0
    for sequence in running:
        runner.finish(sequence)
    assert_at_rest(runner)


def test_b153_an_entry_that_is_gone_points_at_no_place():
    shelf, ids = Shelf(GEOMETRY, blocks=4), tokens(64, 1)
    chain = shelf.store(ids, snapshots=(32,))
    entries = shelf.directory.find(chain).entries
    columns = shelf.allocator.entries
    places = columns.place[Tier.DEVICE, entries].copy()
    shelf.allocator.evict(blocks=4)
    assert (columns.place[Tier.DEVICE] == NONE).all()
    new = shelf.store(tokens(64, 2))
    taken = columns.place[Tier.DEVICE, shelf.directory.find(new).entries]
    assert sorted(taken) == sorted(places)
    with pytest.raises(EntryError):
        shelf.allocator.detach(np.asarray([entries[0]] * 2))
    check(shelf.allocator)


def test_b154_a_thousand_requests_lose_no_place():
    runner = counting_runner(blocks=30, slots=2, snapshots=5, debug=False)
    rng = np.random.default_rng(0)
    for number in range(1000):
        ids = tokens(int(rng.integers(1, 34)), int(rng.integers(0, 60)))
        request(runner, ids, decoded=number % 2, policy=DENSE if number % 4 == 0 else None)
        for taken, promised, available, capacity in everything(runner.allocator):
            assert taken + promised + available == capacity
        assert not runner.allocator.leases.open
    assert_at_rest(runner)


def test_b156_a_claim_is_given_back_exactly_once():
    shelf, ids = Shelf(GEOMETRY), tokens(65, 1)
    shelf.store(ids)
    found = plan_on(shelf, ids)
    receipt = shelf.allocator.lease(found.entries, found.generations)
    shelf.allocator.release(receipt)
    with pytest.raises(DoubleRelease):
        shelf.allocator.release(receipt)
    assert not shelf.allocator.entries.leases.any()
    assert len(plan_on(shelf, ids).entries) == 4


def test_b157_looking_up_claims_nothing():
    runner = counting_runner(blocks=10)
    ids = tokens(100, 1)
    request(runner, ids)
    for _ in range(50):
        assert isinstance(runner.plan(runner.chain(ids)), Plan)
    assert_at_rest(runner)
    request(runner, tokens(9 * 16 - 1, 2))


def test_b160_prompts_that_were_planned_and_seated_and_never_ran_leave_nothing():
    runner = counting_runner(blocks=12)
    ids = tokens(100, 1)
    request(runner, ids)
    before = everything(runner.allocator)
    for _ in range(32):
        runner.plan(runner.chain(joined(ids, ids)))
        runner.finish(runner.start(joined(ids, tokens(30, 2))))
    assert everything(runner.allocator) == before
    assert_at_rest(runner)
    assert isinstance(runner.plan(runner.chain(joined(ids, tokens(30, 2)))), Plan)


def test_b161_withdrawing_what_another_reads_takes_away_its_visibility_only():
    shelf, ids = Shelf(GEOMETRY), tokens(65, 1)
    chain = shelf.store(ids)
    found = plan_on(shelf, ids)
    reader = shelf.allocator.lease(found.entries, found.generations)
    shelf.directory.withdraw(shelf.directory.find(chain).entries, "policy")
    columns = shelf.allocator.entries
    assert (columns.leases[reader.entries] == 1).all()
    assert (columns.state[Tier.DEVICE, reader.entries] == TierState.PRESENT).all()
    assert isinstance(plan_on(shelf, ids), Miss)
    shelf.allocator.release(reader)
    assert shelf.allocator.available(Form.BLOCK) == 64


@pytest.mark.parametrize("wrong", [[5, 5], [-1, 5], [0, 0, 5, 5], [5, 10**6]])
def test_b162_a_list_with_nothing_or_the_same_entry_twice_is_refused_whole(wrong):
    shelf = Shelf(GEOMETRY)
    shelf.store(tokens(16 * 8, 1))
    ids = np.asarray(wrong)
    before = everything(shelf.allocator)
    for call in (shelf.allocator.lease, shelf.allocator.detach, shelf.allocator.touch):
        with pytest.raises(EntryError):
            call(ids)
    assert everything(shelf.allocator) == before
    check(shelf.allocator)


def test_b164_a_block_that_is_used_again_is_not_found_by_its_old_tokens():
    shelf = Shelf(GEOMETRY, blocks=4, snapshots=2)
    old, new = tokens(64, 1), tokens(64, 2)
    chain = shelf.store(old, snapshots=(64,))
    shelf.store(new)
    assert shelf.directory.find(chain).entries.size == 0
    assert isinstance(plan_on(shelf, joined(old, new[:1])), Miss)
    assert len(plan_on(shelf, joined(new, old[:1])).entries) == 4
    assert len(shelf.directory) == 4


def test_b165_after_a_reset_everything_is_wired_as_at_first():
    shelf, ids = Shelf(GEOMETRY, blocks=4), tokens(65, 1)
    chain = shelf.store(ids, snapshots=(64,))
    found = plan_on(shelf, ids)
    open_ = shelf.allocator.lease(found.entries, found.generations)
    shelf.allocator.reset()
    assert len(shelf.directory) == 0
    assert isinstance(plan_on(shelf, ids), Miss)
    with pytest.raises(ReleasedAfterEviction):
        shelf.allocator.release(open_)
    shelf.store(ids, snapshots=(64,))
    assert plan_on(shelf, ids).start == 64
    shelf.allocator.evict(blocks=4)
    assert shelf.directory.lost_cause(chain.digests[0]) == "evicted:compressed"
    check(shelf.allocator)


def test_an_entry_is_never_freed_twice():
    shelf = Shelf(GEOMETRY, blocks=4)
    reservation = shelf.allocator.reserve(blocks=2)
    receipt = shelf.allocator.take(reservation, Form.BLOCK, 2)
    shelf.allocator.cancel(reservation)
    shelf.allocator.abort(receipt.entries[:1])
    with pytest.raises(TransitionError):
        shelf.allocator.abort(receipt.entries[:1])
    shelf.allocator.commit(receipt.entries[1:], kind_bits((Kind.COMPRESSED, Kind.INDEXER)))
    shelf.allocator.release(receipt)
    with pytest.raises(LeaseError):
        shelf.allocator.release(receipt)
    assert shelf.allocator.available(Form.BLOCK) == 4


def test_the_same_prompt_three_times_at_once_uses_its_blocks_once_at_rest():
    runner = counting_runner(blocks=30)
    ids = tokens(100, 1)
    running = [runner.start(ids) for _ in range(3)]
    for sequence in running:
        runner.prefill(sequence)
    assert used(runner) == 21
    for sequence in running:
        runner.finish(sequence)
    assert used(runner) == 6
    assert_at_rest(runner)
