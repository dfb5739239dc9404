"""What two sequences share is never written, and rings are never shared."""

import jax
import numpy as np
import pytest

from hybridkv.blocks.entries import Tier
from hybridkv.prefixes.plan import Miss
from hybridkv.prefixes.policy import DEFAULT, DENSE
from scenarios.runs import joined, lost


@pytest.mark.parametrize("common", [1, 4, 8, 15])
def test_b094_a_wrapped_ring_of_another_prompt_is_not_rewound(bench, common):
    donor, after = bench.ids(40), bench.ids(4)
    ids = joined(donor[:common], (donor[common:] + 1) % 64)
    cold, namespace = bench.cold(ids, after), bench.namespace()
    bench.run(donor, after, namespace, policy=DENSE)
    warm = bench.run(ids, after, namespace)
    assert isinstance(warm.plan, Miss)
    assert lost(warm.plan) == {("alignment", None): common}
    assert warm.continues(cold)


def test_b096_a_reader_of_a_part_never_reads_the_rest(bench):
    donor, after = bench.ids(60), bench.ids(4)
    ids = joined(donor[:20], (donor[20:] + 1) % 64)
    cold, namespace = bench.cold(ids, after), bench.namespace()
    bench.run(donor, after, namespace, policy=DENSE)
    runner = bench.runner
    rest = runner.directory.find(runner.chain(donor, namespace=namespace)).entries[1:]
    places = runner.allocator.entries.place[Tier.DEVICE, rest]
    warm = bench.run(ids, after, namespace, prepare=lambda _: bench.spoil_blocks(places))
    assert (warm.shared, len(warm.plan.entries)) == (16, 1)
    assert warm.continues(cold)
    runner.directory.withdraw(rest_of(runner, donor, namespace), "spoiled")


def rest_of(runner, ids, namespace):
    """All blocks but the first of a prompt, with what stands on them."""
    entries = runner.directory.find(runner.chain(ids, namespace=namespace)).entries[1:]
    snapshots = runner.allocator.entries.snapshot[entries]
    return np.concatenate([entries, snapshots[snapshots >= 0]])


def test_b097_a_sequence_has_one_length_for_all_layers(bench):
    leaves, _ = jax.tree_util.tree_flatten_with_path(bench.runner.cache)
    integers = {jax.tree_util.keystr(path): x for path, x in leaves if x.dtype == np.int32}
    assert set(integers) == {".block_table", ".lengths"}
    ids, after = bench.ids(50), bench.ids(0)
    namespace = bench.namespace()
    bench.run(ids, after, namespace, policy=DEFAULT)
    warm = bench.run(ids, after, namespace)
    assert int(bench.runner.cache.lengths[warm.slot]) == 50


def test_b098_a_restore_leaves_every_layer_what_it_is(bench):
    def form(runner):
        leaves, tree = jax.tree.flatten((runner.cache, runner.snapshots))
        return tree, [(x.shape, x.dtype) for x in leaves]

    before = form(bench.runner)
    ids, after, namespace = bench.ids(90), bench.ids(20), bench.namespace()
    bench.run(ids, after, namespace, policy=DENSE)
    bench.run(ids, after, namespace)
    assert form(bench.runner) == before


def test_b100_what_a_reader_does_after_a_hit_does_not_reach_the_next(bench):
    ids, after = bench.ids(40), bench.ids(20)
    cold, namespace = bench.cold(ids, after), bench.namespace()
    bench.run(ids, after, namespace, policy=DEFAULT)
    runner = bench.runner
    one = runner.start(ids, max_new_tokens=40, namespace=namespace)
    runner.prefill(one)
    bench.decode(one, bench.ids(30))
    second = bench.run(ids, after, namespace)
    assert (second.start, second.slot != one.slot) == (32, True)
    assert second.continues(cold)
    runner.finish(one)
    assert bench.run(ids, after, namespace).continues(cold)
