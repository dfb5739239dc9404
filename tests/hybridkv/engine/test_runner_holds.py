"""What a start holds while it makes room for the rest, and where it then sits."""

import numpy as np
import pytest
from toy import prompt, toy_options, toy_runtime

from hybridkv.blocks.entries import Tier
from hybridkv.engine.runner import Runner, RunnerOptions
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.plan import Plan
from hybridkv.state.capacity import Capacity

TILE = 16


@pytest.fixture(scope="module")
def runner():
    runtime = toy_runtime()
    capacity = Capacity(blocks=10, slots=2, blocks_per_sequence=10)
    return Runner(
        runtime,
        toy_options(tile=TILE),
        RunnerOptions(capacity=capacity, snapshots=4, debug=True),
        identity=Identity.of_geometry(runtime.geometry, weights="toy", numerics="here"),
    )


def store(runner, ids, namespace):
    sequence = runner.start(ids, namespace=namespace)
    runner.prefill(sequence)
    runner.finish(sequence)


def test_blocks_and_snapshot_of_a_plan_are_leased_while_room_is_made(runner, monkeypatch):
    ids = prompt(64, seed=34)
    store(runner, ids, "held")
    longer = np.concatenate([ids, prompt(20, seed=35)])
    plan = runner.plan(runner.chain(longer, namespace="held"), namespace="held")
    assert isinstance(plan, Plan)
    assert plan.snapshot >= 0
    named, reserve, seen = [*plan.entries, plan.snapshot], runner.allocator.reserve, []

    def watched(**counts):
        seen.append(runner.allocator.entries.leases[named].tolist())
        return reserve(**counts)

    monkeypatch.setattr(runner.allocator, "reserve", watched)
    sequence = runner.start(longer, namespace="held")
    monkeypatch.undo()
    assert seen == [[1] * len(named)]
    runner.finish(sequence)
    assert (runner.allocator.entries.leases == 0).all()


def test_a_block_table_holds_places_of_the_pool_and_not_numbers_of_entries(runner):
    """Snapshots have entries too, so that after the first the two kinds of numbers part."""
    store(runner, prompt(40, seed=36), "places")
    sequence = runner.start(prompt(60, seed=37), namespace="places")
    entries = np.concatenate([sequence.shared.entries, sequence.own.entries])
    places = runner.allocator.entries.place[Tier.DEVICE, entries]
    assert (entries != places).any()
    table = np.asarray(runner.cache.block_table[sequence.slot])
    np.testing.assert_array_equal(table[: len(entries)], places)
    assert (table[len(entries) :] == runner.sizes.capacity.blocks).all()
    runner.finish(sequence)
