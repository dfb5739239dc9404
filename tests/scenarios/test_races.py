"""Between a decision and its use, between computing and being seen."""

import numpy as np
import pytest
from shelves import Shelf

from hybridkv.blocks.leases import StaleEntry
from hybridkv.blocks.pools import NoRoom
from hybridkv.errors import UserError
from hybridkv.prefixes.plan import Miss, Plan
from hybridkv.prefixes.policy import DEFAULT, DENSE, NEVER
from scenarios.runs import (
    GEOMETRY,
    TILE,
    counting_runner,
    joined,
    plan_on,
    request,
    smaller,
    start_of,
    tokens,
    used,
)


def test_b106_a_lease_has_no_end_but_its_release():
    shelf, ids = Shelf(GEOMETRY, blocks=4), tokens(65, 1)
    shelf.store(ids)
    found = plan_on(shelf, ids)
    receipt = shelf.allocator.lease(found.entries, found.generations)
    shelf.now += 1e9
    with pytest.raises(NoRoom):
        shelf.allocator.reserve(blocks=1)
    assert shelf.allocator.entries.generation[found.entries].tolist() == [1] * 4
    shelf.allocator.release(receipt)
    shelf.allocator.cancel(shelf.allocator.reserve(blocks=4))
    assert isinstance(plan_on(shelf, ids), Miss)


@pytest.mark.parametrize("same_tokens", [False, True])
def test_b108_what_was_found_and_then_given_to_another_prompt_is_not_acquired(same_tokens):
    shelf, ids = Shelf(GEOMETRY, blocks=4), tokens(65, 1)
    shelf.store(ids)
    found = plan_on(shelf, ids)
    shelf.allocator.evict(blocks=4)
    shelf.store(ids if same_tokens else tokens(64, 2))
    with pytest.raises(StaleEntry, match="was taken again"):
        shelf.allocator.lease(found.entries, found.generations)
    assert not shelf.allocator.leases.open


def test_b108_the_chain_that_remembers_a_match_does_not_trust_what_was_taken_again():
    shelf, ids = Shelf(GEOMETRY, blocks=4), tokens(65, 1)
    chain = shelf.store(ids)
    assert len(shelf.directory.find(chain).entries) == 4
    shelf.allocator.evict(blocks=4)
    other = shelf.store(tokens(64, 2))
    assert len(shelf.directory.find(chain).entries) == 0
    assert len(shelf.directory.find(other).entries) == 4


def test_b109_nothing_is_seen_while_it_is_computed(bench):
    ids, after, namespace = bench.ids(70), bench.ids(4), bench.namespace()
    cold, runner = bench.cold(ids, after), bench.runner
    writer = runner.start(ids, namespace=namespace, policy=DENSE)
    for _ in range(3):
        assert isinstance(bench.plan(ids, namespace), Miss)
        runner.tile(writer)
    reader = bench.run(ids, after, namespace)
    assert reader.start == 0
    assert reader.continues(cold)
    runner.prefill(writer)
    runner.finish(writer)
    warm = bench.run(ids, after, namespace)
    assert warm.start == 64
    assert warm.continues(cold)


def test_b113_an_immediate_repetition_sees_what_was_just_computed(bench):
    ids, after, namespace = bench.ids(50), bench.ids(6), bench.namespace()
    cold, runner = bench.cold(ids, after), bench.runner
    first = runner.start(ids, max_new_tokens=7, namespace=namespace, policy=DEFAULT)
    runner.prefill(first)  # and not finished
    second = bench.run(ids, after, namespace)
    assert second.start == 48
    assert second.continues(cold)
    runner.finish(first)


@pytest.mark.parametrize("tiles", [0, 1, 2, 3])
def test_b116_a_producer_that_is_cancelled_leaves_whole_blocks_or_none(bench, tiles):
    ids, after, namespace = bench.ids(70), bench.ids(4), bench.namespace()
    cold, runner = bench.cold(ids, after), bench.runner
    one, two = (runner.start(ids, namespace=namespace, policy=DENSE) for _ in range(2))
    runner.tile(two)
    for _ in range(tiles):
        runner.tile(one)
    runner.finish(one)
    warm = bench.run(ids, after, namespace)
    assert warm.start == tiles * TILE
    assert warm.continues(cold)
    runner.prefill(two)
    runner.finish(two)
    assert bench.run(ids, after, namespace).continues(cold)


def test_b116_tokens_of_a_prompt_that_is_not_complete_are_not_decoded():
    """Rows of other tokens must not be published as those of the prompt."""
    runner = counting_runner(blocks=20)
    sequence = runner.start(tokens(100, 1), max_new_tokens=4)
    runner.tile(sequence)
    with pytest.raises(UserError):
        runner.decode({sequence: 1})
    runner.finish(sequence)


def test_two_writers_of_one_prompt_under_pressure_keep_one_copy():
    runner = counting_runner(blocks=30)
    ids = tokens(150, 1)
    one, two = runner.start(ids), runner.start(ids)
    runner.prefill(one)
    runner.prefill(two)
    runner.finish(one)
    runner.finish(two)
    assert used(runner) == 9
    for seed in range(2, 6):
        request(runner, tokens(150, seed))
    assert start_of(request(runner, ids)) in (0, 144)


def test_eviction_between_a_miss_and_its_publication_leaves_the_bits_right(bench):
    """Two writers of one prompt; what the first published is evicted before the second ends."""
    ids, after, namespace = bench.ids(70), bench.ids(4), bench.namespace()
    cold, runner = bench.cold(ids, after), bench.runner
    two = runner.start(ids, namespace=namespace, policy=DENSE)
    bench.run(ids, after, namespace, policy=DENSE)
    runner.tile(two)
    with smaller(runner, blocks=runner.allocator.pools[0][0].capacity - len(two.own.entries)):
        assert isinstance(bench.plan(ids, namespace), Miss)
        runner.prefill(two)
        runner.finish(two)
    found = bench.plan(ids, namespace)
    assert isinstance(found, Plan)
    warm = bench.run(ids, after, namespace)
    assert warm.start == 64
    assert warm.continues(cold)


def test_a_restore_does_not_read_what_is_evicted_right_after_it(bench):
    ids, after, namespace = bench.ids(70), bench.ids(4), bench.namespace()
    cold, runner = bench.cold(ids, after), bench.runner
    bench.run(ids, after, namespace, policy=DEFAULT)
    pools = runner.allocator.pools[0]

    def crowd_out(sequence):
        """All snapshots and all blocks but the sequence's own go, and others overwrite them."""
        free = pools[0].capacity - len(sequence.own.entries) - len(sequence.shared.entries)
        with smaller(runner, blocks=free, snapshots=pools[1].capacity):
            bench.spoil_blocks(np.setdiff1d(np.arange(400), bench.places(sequence)))

    warm = bench.run(ids, after, namespace, prepare=crowd_out)
    assert warm.start == 64
    assert warm.continues(cold)
    assert bench.run(joined(ids, bench.ids(3)), after, namespace, policy=NEVER).start in (0, 32)
