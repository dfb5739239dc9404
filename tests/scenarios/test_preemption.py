"""Sequences that stop, skip steps, or give their slot to others."""

import numpy as np
import pytest
from toy import digest

from hybridkv.prefixes.policy import NEVER
from scenarios.runs import TILE


@pytest.mark.parametrize("tiles", [1, 2])
def test_b128_a_prompt_that_begins_again_begins_from_nothing(bench, tiles):
    ids, after = bench.ids(60), bench.ids(6)
    cold, runner = bench.cold(ids, after), bench.runner
    first = runner.start(ids, namespace=bench.namespace(), policy=NEVER)
    for _ in range(tiles):
        runner.tile(first)
    runner.finish(first)
    again = bench.run(ids, after, bench.namespace())
    assert (again.slot, again.start) == (first.slot, 0)
    assert again.continues(cold)


def test_b129_a_sequence_that_skips_steps_keeps_its_state(bench):
    ids, other, after = bench.ids(37), bench.ids(60), bench.ids(20)
    cold, runner = bench.cold(ids, after), bench.runner
    waiting = runner.start(ids, max_new_tokens=21, namespace=bench.namespace())
    runner.prefill(waiting)
    rows = []
    for number, token in enumerate(after):
        if number % 5 == 0:
            bench.run(other, after[:3], bench.namespace())
        rows.append(runner.decode({waiting: int(token)})[waiting])
    assert digest(np.stack(rows)) == digest(cold.after)
    runner.finish(waiting)


def test_b129_a_sequence_may_end_in_any_step(bench):
    runner, free = bench.runner, sorted(bench.runner.slots.free)
    for tiles, decoded in ((0, 0), (1, 0), (3, 0), (3, 5)):
        sequence = runner.start(bench.ids(40), max_new_tokens=8, namespace=bench.namespace())
        for _ in range(tiles):
            runner.tile(sequence)
        bench.decode(sequence, bench.ids(decoded))
        runner.finish(sequence)
        assert sorted(runner.slots.free) == free


@pytest.mark.parametrize("length", [3, 16, 20, 70])
def test_b130_the_next_sequence_of_a_slot_starts_from_nothing(bench, length):
    ids, after = bench.ids(length), bench.ids(20)
    cold = bench.cold(ids, after)
    before = bench.run(bench.ids(100), bench.ids(7), bench.namespace())
    bench.spoil_slots()
    warm = bench.run(ids, after, bench.namespace())
    assert warm.slot == before.slot
    assert warm.continues(cold)


def test_a_sequence_taken_up_in_another_slot_and_other_blocks_goes_on_with_its_bits(bench):
    ids, after = bench.ids(5 * TILE + 3), bench.ids(8)
    cold, namespace, runner = bench.cold(ids, after), bench.namespace(), bench.runner
    first = runner.start(ids, namespace=namespace)
    for _ in range(4):
        runner.tile(first)
    runner.finish(first)
    blocking = runner.start(bench.ids(30), namespace=bench.namespace())
    assert blocking.slot == first.slot
    warm = bench.run(ids, after, namespace)
    assert warm.slot != first.slot
    assert warm.shared == 4 * TILE
    assert warm.continues(cold)
    runner.finish(blocking)
