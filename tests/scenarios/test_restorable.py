"""A hit is more than its blocks: each kind must be there, be right, and belong to this prompt."""

import dataclasses

import jax
import numpy as np
import pytest
from shelves import Shelf
from toy import digest

from hybridkv.blocks.entries import Form, kind_bits
from hybridkv.kinds import Kind
from hybridkv.prefixes import identity
from hybridkv.prefixes.directory import PublishError
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds
from hybridkv.prefixes.plan import Action, Miss
from hybridkv.prefixes.policy import DEFAULT, DENSE, NEVER
from hybridkv.state.snapshot import Snapshots, snapshot_bytes
from scenarios.runs import GEOMETRY, TILE, joined, plan_on, smaller, tokens


def test_b001_a_slot_that_served_another_prompt_gives_cold_bits(bench):
    ids, other, after = bench.ids(40), bench.ids(40), bench.ids(4)
    cold, namespace = bench.cold(ids, after), bench.namespace()
    first = bench.run(ids, after, namespace, policy=DEFAULT)
    between = bench.run(other, after, namespace)
    third = bench.run(ids, after, namespace)
    assert first.slot == between.slot == third.slot
    assert third.start == 32
    assert third.continues(cold)


def test_b001_without_a_stored_state_the_new_ring_is_rebuilt(bench):
    ids, after = bench.ids(70), bench.ids(4)
    cold, namespace = bench.cold(ids, after), bench.namespace()
    bench.run(ids, after, namespace, policy=NEVER)
    bench.spoil_slots()
    warm = bench.run(ids, after, namespace)
    assert (warm.shared, warm.start, warm.plan.snapshot) == (64, 32, -1)
    assert warm.continues(cold)


def test_b002_tokens_whose_window_rows_left_with_their_slot_are_not_handed_out(bench):
    ids, after = bench.ids(48), bench.ids(4)
    longer = joined(ids, bench.ids(3))
    cold, namespace = bench.cold(longer, after), bench.namespace()
    bench.run(ids, after, namespace, policy=DEFAULT)
    bench.spoil_slots()
    warm = bench.run(longer, after, namespace)
    assert warm.start == 48
    assert warm.continues(cold)


def test_b004_the_first_row_after_the_boundary_pools_the_tokens_before_it(bench):
    donor = bench.ids(48)
    ids = joined(donor[:32], bench.ids(5))

    def row_of_a_run(namespace):
        sequence = bench.runner.start(ids, namespace=namespace, policy=NEVER)
        bench.runner.prefill(sequence)
        rows = [bench.rows(sequence, layer)[8] for layer in (1, 3)]
        bench.runner.finish(sequence)
        return sequence, np.stack(rows)

    _, cold = row_of_a_run(bench.namespace())
    namespace = bench.namespace()
    bench.run(donor, bench.ids(0), namespace, policy=DENSE)
    bench.spoil_slots()
    sequence, warm = row_of_a_run(namespace)
    assert sequence.start == 32
    assert digest(warm) == digest(cold)


def test_b004_a_state_without_its_overlap_is_not_resumed_from(bench):
    donor, after = bench.ids(48), bench.ids(4)
    ids = joined(donor[:32], bench.ids(5))
    cold, namespace = bench.cold(ids, after), bench.namespace()
    bench.run(donor, bench.ids(0), namespace, policy=DENSE)
    entries = bench.runner.allocator.entries
    match = bench.runner.directory.find(bench.runner.chain(ids, namespace=namespace))
    snapshot = entries.snapshot[match.entries[1]]
    entries.kinds[snapshot] &= np.uint8(0xFF ^ kind_bits((Kind.TAIL,)))
    warm = bench.run(ids, after, namespace)
    assert warm.start == 16
    assert any(loss.kind is Kind.TAIL for loss in warm.plan.losses)
    assert warm.continues(cold)


def test_b008_a_block_without_index_rows_is_never_a_hit():
    shelf, ids = Shelf(GEOMETRY), tokens(60, 1)
    chain = shelf.store(ids, snapshots=(48,))
    block = shelf.directory.find(chain).entries[0]
    shelf.allocator.entries.kinds[block] = kind_bits((Kind.COMPRESSED,))
    found = plan_on(shelf, ids, ideal=59)
    assert isinstance(found, Miss)
    assert found.kind is Kind.INDEXER


def test_b008_entries_of_an_older_layout_are_found_by_nobody(monkeypatch):
    now = Identity.of_geometry(GEOMETRY, weights="w", numerics="n")
    monkeypatch.setattr(identity, "LAYOUT_VERSION", identity.LAYOUT_VERSION + 1)
    later = Identity.of_geometry(GEOMETRY, weights="w", numerics="n")
    assert now.differences(later) == ("layout",)
    assert now.root("a") != later.root("a")


def test_b016_blocks_and_slots_are_numbered_apart(bench):
    ids, after = bench.ids(60), bench.ids(4)
    cold, namespace = bench.cold(ids, after), bench.namespace()
    first = bench.run(ids, after, namespace, policy=DEFAULT)
    others = [bench.runner.start(bench.ids(40), namespace=bench.namespace()) for _ in range(2)]
    bench.spoil_open_cells()
    with smaller(bench.runner, blocks=8):
        places = []
        warm = bench.run(
            ids, after, namespace, prepare=lambda sequence: places.append(bench.places(sequence))
        )
    assert warm.slot != first.slot
    assert warm.slot not in places[0].tolist()
    assert warm.start == 48
    assert warm.continues(cold)
    for other in others:
        bench.runner.finish(other)


@pytest.mark.parametrize("present", [Kind.WINDOW, Kind.TAIL])
def test_b017_a_state_of_which_one_part_was_stored_is_not_published(present):
    shelf = Shelf(GEOMETRY)
    chain = shelf.store(tokens(32, 1))
    reservation = shelf.allocator.reserve(snapshots=1)
    receipt = shelf.allocator.take(reservation, Form.SNAPSHOT, 1)
    shelf.allocator.cancel(reservation)
    with pytest.raises(PublishError, match="PRESENT"):
        shelf.directory.publish_snapshot(chain, 32, int(receipt.entries[0]))
    shelf.allocator.commit(receipt.entries, kind_bits((present,)))
    with pytest.raises(PublishError, match="lacks a required kind"):
        shelf.directory.publish_snapshot(chain, 32, int(receipt.entries[0]))
    shelf.allocator.release(receipt)
    assert plan_on(shelf, tokens(33, 1)).snapshot == -1


def test_b021_blocks_that_hit_do_not_say_that_there_is_a_state():
    shelf, ids = Shelf(GEOMETRY), tokens(40, 2)
    shelf.store(ids)
    found = plan_on(shelf, ids, replay=False)
    assert (found.shared, found.start, found.snapshot) == (32, 0, -1)
    assert found.needs[Kind.COMPRESSED] is Action.READY
    assert found.needs[Kind.WINDOW] is Action.REPLAY


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 127, 128, 129])
def test_b022_a_restore_is_exact_around_every_boundary(bench, length):
    ids, after = bench.ids(length), bench.ids(9)
    cold, namespace = bench.cold(ids, after), bench.namespace()
    bench.run(ids, after, namespace, policy=DENSE)
    bench.spoil_slots()
    warm = bench.run(ids, after, namespace)
    assert warm.start == (length - 1) // TILE * TILE
    assert warm.continues(cold)


def test_b024_restoring_one_sequence_leaves_those_that_run_alone(bench):
    prompts, after = [bench.ids(64), bench.ids(61)], bench.ids(12)
    cold = [bench.cold(ids, after) for ids in prompts]
    stored, namespace = bench.ids(70), bench.namespace()
    bench.run(stored, after, namespace, policy=DEFAULT)
    live = [bench.runner.start(ids, max_new_tokens=13, namespace=namespace) for ids in prompts]
    for sequence in live:
        bench.runner.prefill(sequence)
    rows = [[], []]
    for number, token in enumerate(after):
        logits = bench.runner.decode(dict.fromkeys(live, int(token)))
        for own, sequence in zip(rows, live, strict=True):
            own.append(logits[sequence])
        if number == 5:
            assert bench.run(stored, after, namespace).start == 64
    for own, sequence, expected in zip(rows, live, cold, strict=True):
        assert digest(np.stack(own)) == digest(expected.after)
        bench.runner.finish(sequence)


def test_b028_a_state_is_window_rows_and_overlaps_and_nothing_else():
    declared = Snapshots.declare(GEOMETRY, 1)
    ring = 8 * 16 * 4
    main, index = 2 * 4 * 16 * 4, 2 * 4 * 8 * 4
    assert snapshot_bytes(GEOMETRY) == {Kind.WINDOW: 4 * ring, Kind.TAIL: 2 * (main + index)}
    assert [overlap is not None for overlap in declared.main] == [False, True, False, True]
    kinds = {*block_kinds(GEOMETRY), *snapshot_kinds(GEOMETRY)}
    assert kinds == {Kind.COMPRESSED, Kind.INDEXER, Kind.WINDOW, Kind.TAIL}


def test_b029_a_compressor_without_overlap_stores_no_state_and_needs_none(bench):
    only_heavy = dataclasses.replace(GEOMETRY, layers=(GEOMETRY.layers[2],))
    assert snapshot_bytes(only_heavy)[Kind.TAIL] == 0
    assert snapshot_kinds(only_heavy) == (Kind.WINDOW,)
    ids, after = bench.ids(45), bench.ids(20)
    cold, namespace = bench.cold(ids, after), bench.namespace()
    bench.run(ids, after, namespace, policy=DEFAULT)
    warm = bench.run(ids, after, namespace, prepare=lambda _: bench.spoil_open_cells())
    assert warm.start == 32
    assert warm.continues(cold)


def test_a_state_stored_inside_a_replay_is_a_cold_runs(bench):
    """Snapshots at every tile, written by a prompt that itself replays."""
    ids, after = bench.ids(120), bench.ids(4)
    namespace = bench.namespace()
    bench.run(joined(ids[:96], bench.ids(2)), after, namespace, policy=NEVER)
    replaying = bench.run(ids, after, namespace, policy=DENSE)
    assert (replaying.start, replaying.shared) == (64, 96)
    for position in range(TILE, 97, TILE):
        fork = joined(ids[:position], bench.ids(7))
        warm, cold = bench.run(fork, after, namespace), bench.cold(fork, after)
        assert warm.continues(cold), f"resumed at {warm.start} of {position}"


def test_every_leaf_of_the_cache_belongs_to_one_kind(bench):
    cache = bench.runner.cache
    parts = (cache.compressed, cache.indexer, cache.sequence.window, cache.sequence.tails)
    leaves = sum(len(jax.tree.leaves(part)) for part in parts)
    assert len(jax.tree.leaves(cache)) == leaves + 2  # block table and lengths
