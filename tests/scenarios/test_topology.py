"""Shapes, buffers and executables are those of warm-up, whatever happens to sequences."""

import jax
import numpy as np
from compiling import compilations
from toy import digest

from hybridkv.blocks.entries import Tier
from hybridkv.prefixes.plan import Miss, Outcome
from hybridkv.prefixes.policy import DENSE, NEVER
from scenarios.runs import joined, request, smaller


def test_b193_a_ring_holds_a_whole_window_at_every_phase(bench):
    """Prompts that end at every place of the ring, then more tokens than it has rows."""
    for length in range(40, 48):
        ids, after = bench.ids(length), bench.ids(17)
        whole = bench.cold(joined(ids, after), bench.ids(0)).logits
        np.testing.assert_allclose(
            bench.cold(ids, after).after, whole[length:], atol=2e-5, rtol=1e-5
        )
    assert all(x.shape[1] == 8 for x in bench.runner.cache.sequence.window.layers)


def test_b194_a_slot_is_given_a_whole_new_table(bench):
    runner = bench.runner
    long = runner.start(bench.ids(170), namespace=bench.namespace())
    before = np.asarray(runner.cache.block_table)[long.slot].copy()
    runner.prefill(long)
    runner.finish(long)
    short = runner.start(bench.ids(20), namespace=bench.namespace())
    table = np.asarray(runner.cache.block_table)[short.slot]
    assert short.slot == long.slot
    assert (before < 400).sum() == 11
    assert table[:2].tolist() == bench.places(short).tolist()
    assert (table[2:] == 400).all()
    runner.finish(short)


def test_b196_b197_no_way_through_a_prompt_compiles_anything(bench):
    """Hits, misses, copies, replays, evictions, full and empty windows, aborted prompts."""
    runner, head, namespace = bench.runner, bench.ids(96), bench.namespace()
    bench.run(bench.ids(3), bench.ids(1), bench.namespace())
    outcomes = set()
    with compilations() as compiled:
        for number in range(9):
            ids = joined(head[: 96 - 16 * (number % 3)], bench.ids(1 + 5 * number))
            policy = DENSE if number == 3 else NEVER
            run = bench.run(ids, bench.ids(20), namespace, policy=policy)
            outcomes.add(run.plan.outcome)
        for length in (1, 5, 8, 16, 17, 160):
            bench.run(bench.ids(length), bench.ids(3), bench.namespace())
        sequence = runner.start(bench.ids(90), namespace=namespace)
        runner.tile(sequence)
        runner.finish(sequence)
        with smaller(runner, blocks=400, snapshots=100):
            assert isinstance(bench.plan(head, namespace), Miss)
        bench.run(joined(head, bench.ids(3)), bench.ids(3), namespace)
    assert outcomes == {Outcome.COLD, Outcome.REBUILD, Outcome.REUSE}
    assert not compiled


def test_b200_a_step_changes_the_pools_where_they_lie(bench):
    """A copy of a pool for each row would make n steps cost n times the pool."""
    runner, ids, namespace = bench.runner, bench.ids(60), bench.namespace()

    def addresses():
        leaves = jax.tree.leaves((runner.cache.compressed, runner.cache.indexer))
        return [x.unsafe_buffer_pointer() for x in leaves]

    before = addresses()
    bench.run(ids, bench.ids(40), namespace, policy=DENSE)
    assert addresses() == before
    assert bench.run(ids, bench.ids(4), namespace).start == 48
    assert addresses() == before


def test_b200_a_cache_of_any_size_takes_the_same_steps(bench):
    """The executables have no loop and no sum over the capacity: digests say so here too."""
    ids, after = bench.ids(40), bench.ids(4)
    cold = bench.cold(ids, after)
    with smaller(bench.runner, blocks=390, snapshots=100):
        small = bench.cold(ids, after)
    assert digest(small.logits) == digest(cold.logits)
    assert digest(small.after) == digest(cold.after)


def test_idle_slots_take_part_in_no_step(bench):
    runner = bench.runner
    waiting = runner.start(bench.ids(40), namespace=bench.namespace())
    runner.prefill(waiting)
    state = [np.asarray(x)[waiting.slot].copy() for x in jax.tree.leaves(runner.cache.sequence)]
    rows = [bench.rows(waiting, layer) for layer in (1, 2, 3)]
    request(runner, bench.ids(50), decoded=9, namespace=bench.namespace())
    after = [np.asarray(x)[waiting.slot] for x in jax.tree.leaves(runner.cache.sequence)]
    assert all(digest(a) == digest(b) for a, b in zip(state, after, strict=True))
    again = [bench.rows(waiting, layer) for layer in (1, 2, 3)]
    assert all(digest(a) == digest(b) for a, b in zip(rows, again, strict=True))
    assert runner.allocator.entries.place[Tier.DEVICE, waiting.own.entries].min() >= 0
    runner.finish(waiting)
