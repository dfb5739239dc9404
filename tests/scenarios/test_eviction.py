"""What goes first: leaves before what they stand on, states before blocks, and nothing in use."""

import numpy as np
import pytest
from shelves import Shelf

from hybridkv.blocks.entries import NONE, Form
from hybridkv.blocks.eviction import LeastRecentlyUsed, SecondsPerByte
from hybridkv.blocks.invariants import check
from hybridkv.blocks.pools import NoRoom
from hybridkv.prefixes.plan import Miss, Plan
from scenarios.runs import (
    GEOMETRY,
    counting_runner,
    joined,
    plan_on,
    request,
    start_of,
    tokens,
    used,
)

POLICIES = {
    "lru": LeastRecentlyUsed(),
    "seconds per byte": SecondsPerByte(
        block_seconds=1.0,
        block_bytes=100,
        snapshot_seconds=2.0,
        snapshot_bytes=100,
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_b216_a_short_beginning_that_all_share_outlives_private_ends(policy):
    runner = counting_runner(blocks=8, per_sequence=8, slots=1, eviction=POLICIES[policy])
    head = tokens(32, 1)
    for seed in range(2, 10):
        plan = request(runner, joined(head, tokens(40, seed)))
        assert isinstance(plan, Miss) == (seed == 2)
        if isinstance(plan, Plan):
            assert plan.shared >= 32


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gone", [1, 2, 3])
def test_b217_a_chain_is_given_up_from_its_end(policy, gone):
    runner = counting_runner(blocks=4, per_sequence=4, eviction=POLICIES[policy])
    ids = tokens(64, 1)
    request(runner, ids[:63])
    assert used(runner) == 3
    runner.allocator.evict(blocks=gone)
    found = runner.plan(runner.chain(ids))
    kept = 3 - gone
    assert (found.shared if isinstance(found, Plan) else 0) == 16 * kept
    assert used(runner) == kept


def test_b218_a_parent_that_was_taken_again_is_no_parent():
    shelf = Shelf(GEOMETRY, blocks=4)
    old = shelf.store(tokens(64, 1))
    entries = shelf.directory.find(old).entries
    with pytest.raises(Exception, match="published child that would stay"):
        shelf.directory.withdraw(entries[1:2], "policy")
    shelf.store(tokens(32, 2))
    found = shelf.directory.find(old).entries
    assert found.tolist() == entries[:2].tolist()
    columns = shelf.allocator.entries
    shown = np.flatnonzero(columns.published & (columns.parent != NONE))
    assert columns.published[columns.parent[shown]].all()
    check(shelf.allocator)


def test_b220_what_a_reader_holds_is_not_evicted_however_much_is_asked_for():
    shelf, ids = Shelf(GEOMETRY, blocks=8, snapshots=2), tokens(65, 1)
    shelf.store(ids, snapshots=(64,))
    shelf.store(tokens(64, 2), snapshots=(64,))
    found = plan_on(shelf, ids)
    reader = shelf.allocator.lease(found.entries, found.generations)
    with pytest.raises(NoRoom):
        shelf.allocator.reserve(blocks=5)
    assert isinstance(plan_on(shelf, tokens(65, 2)[:64]), Plan)
    shelf.allocator.cancel(shelf.allocator.reserve(blocks=4))
    assert isinstance(plan_on(shelf, joined(tokens(64, 2), ids[:1])), Miss)
    assert plan_on(shelf, ids).shared == 64
    shelf.allocator.release(reader)


def test_states_go_before_the_blocks_under_them():
    shelf, ids = Shelf(GEOMETRY, snapshots=2), tokens(81, 1)
    shelf.store(ids, snapshots=(32, 64))
    shelf.allocator.cancel(shelf.allocator.reserve(snapshots=2))
    found = plan_on(shelf, ids)
    assert (found.shared, found.snapshot) == (80, -1)


def test_a_block_takes_its_state_along():
    shelf, ids = Shelf(GEOMETRY, blocks=4), tokens(65, 1)
    shelf.store(ids, snapshots=(64,))
    shelf.allocator.evict(blocks=1)
    assert shelf.allocator.available(Form.SNAPSHOT) == 16
    assert plan_on(shelf, ids).shared == 48


def test_a_branch_that_slept_while_others_came_and_went_is_found_or_wholly_gone():
    for others in (1, 4, 12):
        runner = counting_runner(blocks=60, slots=1, per_sequence=12, snapshots=8)
        sleeper = tokens(150, 1)
        request(runner, sleeper)
        for seed in range(2, 2 + others):
            request(runner, tokens(150, seed))
        found = runner.plan(runner.chain(sleeper))
        if others < 5:
            assert start_of(found) == 144
        if isinstance(found, Miss):
            digests = runner.chain(sleeper).digests
            columns = runner.allocator.entries
            held = columns.digest[columns.published]
            assert not any((held == digest).all(axis=1).any() for digest in digests)
