"""Numbers that are told are those of tokens that were truly not computed."""

import numpy as np
import pytest
from shelves import Shelf

from hybridkv.blocks.pools import NoRoom
from hybridkv.errors import UserError
from hybridkv.prefixes.plan import Miss
from hybridkv.prefixes.policy import DEFAULT
from scenarios.runs import (
    GEOMETRY,
    assert_at_rest,
    counting_runner,
    joined,
    lost,
    plan_on,
    request,
    start_of,
    tokens,
)


def test_b222_reuse_is_what_is_skipped_and_not_what_matched(bench):
    ids, after, namespace = bench.ids(80), bench.ids(2), bench.namespace()
    bench.run(ids, after, namespace)  # blocks and no state
    runner, steps = bench.runner, []
    sequence = runner.start(ids, namespace=namespace)
    assert (sequence.plan.shared, sequence.plan.reused, sequence.plan.replayed) == (64, 32, 32)
    while sequence.computed < 80:
        before = sequence.computed
        runner.tile(sequence)
        steps.append(sequence.computed - before)
    assert sum(steps) == 80 - sequence.plan.reused
    runner.finish(sequence)


def test_b222_an_attempt_that_was_not_admitted_counts_as_no_use():
    runner = counting_runner(blocks=10)
    ids = tokens(70, 1)
    request(runner, ids)
    held = runner.start(tokens(90, 2))
    entries = runner.allocator.entries
    hits, uses = entries.hits.copy(), entries.used.copy()
    for _ in range(5):
        with pytest.raises(NoRoom):
            runner.start(joined(ids, tokens(30, 3)))
    np.testing.assert_array_equal(entries.hits, hits)
    np.testing.assert_array_equal(entries.used, uses)
    runner.finish(held)


def test_b224_a_prompt_that_was_computed_is_published_and_found():
    runner = counting_runner(blocks=40)
    for seed in range(5):
        ids = tokens(17 + 16 * seed, seed)
        assert isinstance(request(runner, ids), Miss)
        again = request(runner, ids)
        assert start_of(again) == 16 + 16 * seed
        assert again.losses == ()


def test_b224_tokens_that_were_decoded_and_not_published_are_blamed():
    runner = counting_runner(blocks=20)
    ids = tokens(40, 1)
    sequence = runner.start(ids, max_new_tokens=30)
    runner.prefill(sequence)
    answer = tokens(24, 2)
    for token in answer:
        runner.decode({sequence: int(token)})
    runner.finish(sequence)
    found = runner.plan(runner.chain(joined(ids, answer, tokens(5, 3))))
    assert (found.ideal, found.reused) == (64, 32)
    assert lost(found) == {("never_published", None): 32}


@pytest.mark.parametrize(
    "cause",
    [
        "policy",
        "evicted:compressed",
        "withdrawn by hand",
        "evicted:snapshot",
    ],
)
def test_a_plan_behind_withdrawn_blocks_is_a_miss_with_a_reason(cause):
    shelf, ids = Shelf(GEOMETRY), tokens(65, 1)
    chain = shelf.store(ids)
    shelf.directory.withdraw(shelf.directory.find(chain).entries, cause)
    found = plan_on(shelf, ids, ideal=64)
    assert isinstance(found, Miss)
    assert sum(loss.tokens for loss in found.losses) == 64


def test_what_is_said_to_be_computed_was_computed():
    """A conversation's chain that is extended before its turn has ended."""
    runner = counting_runner(blocks=40)
    chain = runner.chain(tokens(40, 1))
    sequence = runner.start(tokens(40, 1), max_new_tokens=9, chain=chain)
    runner.prefill(sequence)
    for _ in range(8):
        runner.decode({sequence: 7})
    other = (np.full(30, 7) + 1).astype(np.int32)
    chain.extend(other)
    runner.finish(sequence)
    assert runner.plan(chain).ideal == 40
    assert_at_rest(runner)


def test_a_plan_is_blamed_in_the_namespace_of_its_chain():
    runner = counting_runner(blocks=20)
    ids = tokens(64, 1)
    request(runner, ids, namespace="a")
    chain = runner.chain(ids, namespace="a")
    with pytest.raises(UserError):
        runner.plan(chain, namespace="b")


def test_a_policy_that_writes_nothing_is_told_from_a_state_that_was_evicted():
    runner = counting_runner(blocks=40, snapshots=1)
    ids = tokens(100, 1)
    request(runner, ids, policy=DEFAULT)
    request(runner, tokens(100, 2), policy=DEFAULT)
    found = runner.plan(runner.chain(ids))
    assert ("evicted", "window") in {(c, k) for c, k in lost(found)}
