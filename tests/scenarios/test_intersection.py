"""The position at which all kinds hold together is searched for, never rounded or overwritten."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from geometries import toy_geometry
from hypothesis import given, settings
from hypothesis import strategies as st
from shelves import Shelf
from toy import digest

from hybridkv.blocks.entries import Tier
from hybridkv.geometry import Geometry, LayerGeometry
from hybridkv.kinds import Kind
from hybridkv.prefixes.checks import Conditions, Intersection, intersection
from hybridkv.prefixes.directory import PublishError
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.plan import Miss
from hybridkv.prefixes.policy import DENSE, NEVER
from scenarios.runs import GEOMETRY, counting_runner, joined, plan_on, request, start_of, tokens

KINDS = (Kind.COMPRESSED, Kind.INDEXER, Kind.WINDOW, Kind.TAIL)


def conditions(positions, held):
    """``held``: kind to the positions at which it holds."""
    flags = {kind: np.isin(positions, held[kind]) for kind in KINDS}
    return Conditions(
        positions=np.asarray(positions),
        blocks={kind: flags[kind] for kind in KINDS[:2]},
        snapshots={kind: flags[kind] for kind in KINDS[2:]},
    )


def test_b053_one_length_for_all_kinds_whatever_their_order():
    held = {
        Kind.COMPRESSED: [16, 32, 48],
        Kind.INDEXER: [16, 32],
        Kind.WINDOW: [16, 32, 48],
        Kind.TAIL: [16, 32, 48],
    }
    found = conditions([16, 32, 48], held)
    backwards = dataclasses.replace(
        found,
        blocks=dict(reversed(found.blocks.items())),
        snapshots=dict(reversed(found.snapshots.items())),
    )
    assert intersection(found) == intersection(backwards) == Intersection(shared=32, snapshot=32)


@pytest.mark.parametrize("windows", [(4, 16), (16, 4)])
def test_b054_no_ring_that_has_wrapped_decides_what_is_reused(windows):
    layers = tuple(LayerGeometry(window=w, ratio=4, overlap=True) for w in windows)
    geometry = Geometry(layers=layers, row_width=16)
    shelf, ids = Shelf(geometry), tokens(66, 1)
    shelf.store(ids)
    found = plan_on(shelf, ids, tile=4)
    reach = sum(w - 1 for w in windows)
    assert (found.start, found.shared) == ((64 - reach) // 4 * 4, 64)
    assert plan_on(shelf, ids, tile=4, replay=False).start == 0


def test_b056_a_state_is_named_by_the_very_position_at_which_it_was_taken():
    runner = counting_runner(blocks=40, tile=32)
    ids = tokens(100, 1)
    sequence = runner.start(ids, policy=DENSE)
    assert sequence.snapshots_at == (32, 64, 96)
    runner.prefill(sequence)
    runner.finish(sequence)
    entry = runner.directory.find(runner.chain(ids)).entries
    standing = runner.directory.snapshot_at(entry)
    assert [16 * (n + 1) for n in np.flatnonzero(standing >= 0)] == [32, 64, 96]
    for position in (24, 0, 112):
        with pytest.raises(PublishError, match="no published block of the chain ends"):
            runner.directory.publish_snapshot(runner.chain(ids), position, int(standing[1]))


def test_b057_a_longer_hit_is_not_cut_to_a_length_at_which_nothing_stands():
    held = {
        Kind.COMPRESSED: [32, 64],
        Kind.INDEXER: [32, 64],
        Kind.WINDOW: [32, 48],
        Kind.TAIL: [32, 48],
    }
    assert intersection(conditions([16, 32, 48, 64], held)).snapshot == 32


def test_b058_the_last_token_rule_searches_again_below_it():
    shelf, ids = Shelf(GEOMETRY), tokens(32, 1)
    shelf.store(ids, snapshots=(16, 32))
    found = plan_on(shelf, ids)
    assert (found.start, found.shared) == (16, 16)
    assert shelf.allocator.entries.position[found.snapshot] == 16


@pytest.mark.parametrize("common", [1, 4, 8, 12, 15])
def test_b060_a_block_is_found_only_by_all_of_its_tokens(common):
    shelf, ids = Shelf(GEOMETRY), tokens(64, 1)
    shelf.store(ids, snapshots=(16, 32, 48))
    other = joined(ids[:common], (ids[common:] + 1) % 64)
    assert isinstance(plan_on(shelf, other), Miss)


def test_b061_a_tile_of_which_only_the_first_block_agrees_is_no_hit():
    shelf, ids = Shelf(GEOMETRY), tokens(64, 1)
    shelf.store(ids, snapshots=(32, 64))
    other = joined(ids[:16], (ids[16:] + 1) % 64, tokens(1, 2))
    assert isinstance(plan_on(shelf, other, tile=32), Miss)
    assert plan_on(shelf, joined(ids, tokens(1, 2)), tile=32).start == 64


def test_b062_a_chain_with_other_blocks_than_the_directory_is_refused():
    shelf = Shelf(GEOMETRY)
    finer = TokenChain(shelf.identity.root(""), 4)
    finer.extend(tokens(32, 1))
    with pytest.raises(ValueError, match=r"directory\.chain"):
        shelf.directory.find(finer)


def test_b064_a_state_stands_at_the_end_of_a_tile_and_not_at_blocks_inside_it():
    runner = counting_runner(blocks=40, tile=48)
    ids = tokens(150, 1)
    request(runner, ids, policy=DENSE)
    entries = runner.allocator.entries
    standing = entries.position[entries.snapshot[entries.snapshot >= 0]]
    assert sorted(standing.tolist()) == [48, 96, 144]
    assert start_of(request(runner, joined(ids[:20], tokens(80, 2)))) == 0


def test_b065_rows_far_behind_the_window_are_attended_to(bench):
    ids, after = bench.ids(150), bench.ids(4)
    cold, namespace = bench.cold(ids, after), bench.namespace()
    bench.run(ids, after, namespace, policy=DENSE)
    runner = bench.runner
    first = runner.directory.find(runner.chain(ids, namespace=namespace)).entries[0]
    place = int(runner.allocator.entries.place[Tier.DEVICE, first])
    pools = runner.cache.compressed.layers
    row = pools[2][place]
    changed = (*pools[:2], pools[2].at[place].set(row + jnp.float32(1)), *pools[3:])
    rows = dataclasses.replace(runner.cache.compressed, layers=changed)
    runner.cache = dataclasses.replace(runner.cache, compressed=rows)
    warm = bench.run(ids, after, namespace)
    assert warm.start == 144
    assert not warm.continues(cold)


@settings(deadline=None, max_examples=200, derandomize=True)
@given(st.lists(st.sets(st.integers(1, 8)), min_size=4, max_size=4))
def test_b068_many_groups_meet_where_a_full_search_finds_them(held):
    positions = [16 * n for n in range(1, 9)]
    where = {kind: [16 * n for n in some] for kind, some in zip(KINDS, held, strict=True)}
    found = intersection(conditions(positions, where))
    blocks = set(where[Kind.COMPRESSED]) & set(where[Kind.INDEXER])
    states = blocks & set(where[Kind.WINDOW]) & set(where[Kind.TAIL])
    assert found.shared == max(blocks, default=0)
    assert found.snapshot == max(states, default=0)


def test_b069_the_state_of_another_branch_is_not_taken(bench):
    trunk, after = bench.ids(24), bench.ids(4)
    one, two = joined(trunk, bench.ids(40)), joined(trunk, bench.ids(40))
    cold, namespace = bench.cold(one, after), bench.namespace()
    bench.run(one, after, namespace, policy=NEVER)
    bench.run(two, after, namespace, policy=DENSE)
    warm = bench.run(one, after, namespace)
    entries = bench.runner.allocator.entries
    assert warm.shared == 48
    assert warm.plan.snapshot == -1 or entries.position[warm.plan.snapshot] == 16
    assert warm.continues(cold)
    assert digest(warm.logits) != digest(bench.run(two, after, namespace).logits)


def test_groups_of_one_size_more_do_not_change_the_plan():
    ids = tokens(64, 1)
    for ratios in ((4, 16), (4, 4, 16, 16), (16, 4)):
        shelf = Shelf(toy_geometry(ratios))
        shelf.store(ids, snapshots=(32, 48))
        assert plan_on(shelf, ids).start == 48
