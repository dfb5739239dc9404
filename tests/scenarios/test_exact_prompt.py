"""The same prompt again: all but its last tokens are reused, and at least one is computed."""

import numpy as np
import pytest
from shelves import Shelf

from hybridkv.prefixes.policy import DEFAULT, NEVER
from scenarios.runs import GEOMETRY, counting_runner, plan_on, request, start_of, tokens

LENGTHS = (32, 33, 47, 48, 49, 63, 64, 65)
"""Of every remainder that matters: 0, 1 and 15 tokens past a block."""


@pytest.mark.parametrize("length", LENGTHS)
def test_b070_a_prompt_that_is_there_in_full_still_computes_its_last_token(bench, length):
    ids, after = bench.ids(length), bench.ids(6)
    cold, namespace = bench.cold(ids, after), bench.namespace()
    bench.run(ids, after, namespace, policy=DEFAULT)
    again = bench.run(ids, after, namespace)
    assert again.start == (length - 1) // 16 * 16
    assert len(again.logits) == length - again.start >= 1
    assert again.continues(cold)


@pytest.mark.parametrize("length", [40, 48, 49])
def test_b072_a_repetition_ends_with_as_many_tokens_as_it_has(bench, length):
    ids, after = bench.ids(length), bench.ids(3)
    namespace = bench.namespace()
    bench.run(ids, after, namespace, policy=DEFAULT)
    runner = bench.runner
    sequence = runner.start(ids, max_new_tokens=4, namespace=namespace)
    runner.prefill(sequence)
    assert int(runner.cache.lengths[sequence.slot]) == sequence.computed == length
    bench.decode(sequence, after)
    assert int(runner.cache.lengths[sequence.slot]) == sequence.computed == length + 3
    runner.finish(sequence)


def test_b073_a_ring_that_has_wrapped_is_replaced_and_not_trimmed(bench):
    ids, after = bench.ids(40), bench.ids(9)
    cold, namespace = bench.cold(ids, after), bench.namespace()
    for policy, start in ((NEVER, 0), (DEFAULT, 0), (NEVER, 32)):
        bench.spoil_slots()
        warm = bench.run(ids, after, namespace, policy=policy)
        assert warm.start == start
        assert warm.continues(cold)


@pytest.mark.parametrize("length", [32, 40, 64])
def test_b074_a_state_before_the_last_token_was_taken_while_the_prompt_passed_it(length):
    shelf, ids = Shelf(GEOMETRY), tokens(length, 1)
    positions = DEFAULT.positions(tokens=length, start=0, exact_from=0, shared=0, tile=16)
    assert (length - 1) // 16 * 16 in positions
    shelf.store(ids, snapshots=positions)
    found = plan_on(shelf, ids, replay=False)
    assert found.start == (length - 1) // 16 * 16
    assert found.snapshot >= 0


@pytest.mark.parametrize("blocks", [1, 2, 5, 9])
def test_b076_a_last_tile_of_one_token_gives_the_bits_of_a_longer_one(bench, blocks):
    ids, after = bench.ids(16 * blocks + 9), bench.ids(2)
    longer, namespace = bench.cold(ids, after), bench.namespace()
    bench.run(ids, after, namespace, policy=DEFAULT)
    short = bench.run(ids[: 16 * blocks + 1], after, namespace)
    assert (short.start, len(short.logits)) == (16 * blocks, 1)
    assert np.isfinite(short.logits).all()
    np.testing.assert_array_equal(short.logits[0], longer.logits[16 * blocks])


def test_b077_a_nearly_complete_hit_is_restored_like_any_other(bench):
    ids, after = bench.ids(33), bench.ids(9)
    cold, namespace = bench.cold(ids, after), bench.namespace()
    bench.run(ids, after, namespace, policy=DEFAULT)
    bench.spoil_slots()
    warm = bench.run(ids, after, namespace)
    assert (warm.start, warm.plan.snapshot >= 0) == (32, True)
    assert bench.runner.allocator.entries.position[warm.plan.snapshot] == 32
    assert warm.continues(cold)


@pytest.mark.parametrize("tile", [16, 32, 48])
def test_every_repetition_reuses_all_whole_tiles_before_its_last_token(tile):
    runner = counting_runner(blocks=80, tile=tile, debug=False)
    for length in (*range(1, 4), *range(15, 19), *range(30, 35), 47, 48, 49, 64, 65, 96, 97):
        ids = tokens(length, length)
        assert start_of(request(runner, ids)) == 0
        assert start_of(request(runner, ids)) == (length - 1) // tile * tile
