import dataclasses

import numpy as np
import pytest
from geometries import HOMOGENEOUS, toy_geometry
from hypothesis import given, settings
from hypothesis import strategies as st
from shelves import Shelf
from toy import prompt

from hybridkv.blocks.entries import Form, Tier, kind_bits
from hybridkv.kinds import Kind
from hybridkv.prefixes.cost import CostModel
from hybridkv.prefixes.losses import Cause
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds
from hybridkv.prefixes.plan import Action, Miss, Outcome, Plan, PlanOptions, plan_prefix
from hybridkv.prefixes.policy import SnapshotPolicy

GEOMETRY = toy_geometry()
TILE = 16
IDS = prompt(200, seed=1)
OPTIONS = PlanOptions(tile=TILE)


def plan(shelf, ids, options=OPTIONS, ideal=None, **more):
    return plan_prefix(
        shelf.directory, shelf.chain(ids), shelf.geometry, options, ideal=ideal, **more
    )


def lost(decision):
    return {(loss.cause, loss.kind): loss.tokens for loss in decision.losses}


@pytest.fixture
def shelf():
    return Shelf(GEOMETRY)


def test_an_empty_directory_is_a_miss_that_says_so(shelf):
    miss = plan(shelf, IDS)
    assert isinstance(miss, Miss)
    assert miss.outcome is Outcome.COLD
    assert miss.explain() == (
        "compute all 200 tokens: of its first tile 0 tokens are stored (never_published)"
    )


def test_a_prompt_without_a_tile_boundary_before_its_last_token_is_a_miss(shelf):
    shelf.store(IDS, snapshots=(16,))
    for length in (1, 15, 16):
        miss = plan(shelf, IDS[:length])
        assert isinstance(miss, Miss), length
        assert "multiple of 16" in miss.reason


def test_a_snapshot_at_the_last_boundary_is_copied(shelf):
    shelf.store(IDS, snapshots=(192,))
    found = plan(shelf, IDS)
    assert isinstance(found, Plan)
    assert (found.start, found.shared, found.replayed) == (192, 192, 0)
    assert found.outcome is Outcome.REUSE
    assert len(found.entries) == 12
    assert found.needs == {
        Kind.COMPRESSED: Action.READY,
        Kind.INDEXER: Action.READY,
        Kind.WINDOW: Action.COPY,
        Kind.TAIL: Action.COPY,
    }
    assert found.known_from == 0
    assert found.explain() == "reuse 192 of 200 tokens, copy the snapshot at 192"


@pytest.mark.parametrize(("length", "start"), [(193, 192), (192, 176), (191, 176), (17, 16)])
def test_at_least_the_last_token_is_computed(shelf, length, start):
    shelf.store(IDS, snapshots=tuple(range(16, 193, 16)))
    assert plan(shelf, IDS[:length]).start == start


def test_without_a_snapshot_the_cone_is_replayed(shelf):
    shelf.store(IDS)
    found = plan(shelf, IDS)
    cone = GEOMETRY.replay_tokens(192)
    assert found.shared == 192
    assert found.start == (192 - cone) // TILE * TILE
    assert found.outcome is Outcome.REBUILD
    assert found.needs[Kind.WINDOW] is found.needs[Kind.TAIL] is Action.REPLAY
    assert found.known_from == found.start


def test_an_earlier_snapshot_within_the_cone_is_a_shorter_way_than_replaying_it(shelf):
    shelf.store(IDS, snapshots=(176,))
    found = plan(shelf, IDS)
    assert (found.start, found.shared, found.known_from) == (176, 192, 0)
    assert found.snapshot >= 0
    assert found.explain() == (
        "reuse 176 of 200 tokens, copy the snapshot at 176, replay 16 tokens up to 192"
    )


def test_an_earlier_snapshot_before_the_cone_is_not_used(shelf):
    shelf.store(IDS, snapshots=(32,))
    found = plan(shelf, IDS)
    assert found.snapshot == -1
    assert found.start > 32


def test_replay_can_be_switched_off(shelf):
    shelf.store(IDS, snapshots=(32,))
    found = plan(shelf, IDS, dataclasses.replace(OPTIONS, replay=False))
    assert (found.start, found.shared) == (32, 192)


def test_a_replay_from_the_first_token_reuses_nothing_and_shares_the_blocks(shelf):
    shelf.store(IDS[:32])
    found = plan(shelf, np.concatenate([IDS[:32], IDS[:20]]))
    assert (found.start, found.shared, found.reused) == (0, 32, 0)
    assert found.outcome is Outcome.REBUILD
    assert found.known_from == 0


@pytest.mark.parametrize("kind", [Kind.COMPRESSED, Kind.INDEXER])
def test_a_block_that_lacks_a_kind_ends_the_plan_before_it_and_is_blamed(shelf, kind):
    chain = shelf.store(IDS, snapshots=(96, 112, 192))
    block = shelf.directory.find(chain).entries[6]
    shelf.allocator.entries.kinds[block] &= np.uint8(0xFF ^ kind_bits((kind,)))
    found = plan(shelf, IDS, ideal=199)
    assert (found.start, found.shared) == (96, 96)
    assert lost(found) == {(Cause.ALIGNMENT, None): 7, (Cause.EVICTED, kind): 96}


@pytest.mark.parametrize("kind", [Kind.WINDOW, Kind.TAIL])
def test_a_snapshot_that_lacks_a_kind_is_not_copied_and_the_kind_is_blamed(shelf, kind):
    chain = shelf.store(IDS, snapshots=(176, 192))
    entry = shelf.directory.snapshot_at(shelf.directory.find(chain).entries)[-1]
    shelf.allocator.entries.kinds[entry] &= np.uint8(0xFF ^ kind_bits((kind,)))
    found = plan(shelf, IDS, ideal=199)
    assert (found.start, found.shared) == (176, 192)
    assert lost(found) == {(Cause.ALIGNMENT, None): 7, (Cause.EVICTED, kind): 16}


def test_the_first_block_missing_a_kind_is_a_miss_that_names_it(shelf):
    chain = shelf.store(IDS)
    block = shelf.directory.find(chain).entries[0]
    shelf.allocator.entries.kinds[block] &= np.uint8(0xFF ^ kind_bits((Kind.INDEXER,)))
    miss = plan(shelf, IDS, ideal=199)
    assert isinstance(miss, Miss)
    assert miss.kind is Kind.INDEXER
    assert miss.reason == "indexer is missing from position 0 on"
    assert sum(loss.tokens for loss in miss.losses) == 199


def test_an_evicted_snapshot_is_told_from_one_that_never_was(shelf):
    shelf.store(IDS, snapshots=(192,))
    shelf.allocator.evict(snapshots=1)
    found = plan(shelf, IDS, ideal=199)
    assert lost(found)[Cause.EVICTED, Kind.WINDOW] == 192 - found.start
    other = prompt(200, seed=2)
    shelf.store(other)
    found = plan(shelf, other, ideal=199)
    assert lost(found)[Cause.NO_SNAPSHOT, Kind.WINDOW] == 192 - found.start


def test_evicted_blocks_are_blamed(shelf):
    shelf.store(IDS, snapshots=(128,))
    shelf.allocator.evict(blocks=4)
    found = plan(shelf, IDS, ideal=199)
    assert found.start == 128
    assert lost(found) == {
        (Cause.ALIGNMENT, None): 7,
        (Cause.EVICTED, Kind.COMPRESSED): 64,
    }


def test_tokens_that_were_computed_and_never_published_are_told(shelf):
    shelf.store(IDS[:100], snapshots=(96,))
    found = plan(shelf, IDS, ideal=150)
    assert lost(found) == {(Cause.ALIGNMENT, None): 6, (Cause.NEVER_PUBLISHED, None): 48}
    assert found.explain().endswith("(ideal 150; lost 6 to alignment, 48 to never_published)")


def test_blocks_finer_than_a_tile_are_lost_to_alignment(shelf):
    shelf.store(IDS[:112], snapshots=(64, 96))
    found = plan(shelf, IDS, PlanOptions(tile=32), ideal=112)
    assert (found.start, found.shared) == (96, 96)
    assert lost(found) == {(Cause.ALIGNMENT, None): 16}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"geometry": "other"}, Cause.LAYOUT),
        ({"layout": "other"}, Cause.LAYOUT),
        ({"weights": "other"}, Cause.LAYOUT),
        ({"numerics": "other"}, Cause.NUMERICS),
    ],
)
def test_a_foreign_identity_is_a_miss_that_names_the_part(shelf, change, cause):
    shelf.store(IDS, snapshots=(192,))
    foreign = dataclasses.replace(shelf.identity, **change)
    miss = plan(shelf, IDS, identity=foreign, ideal=199)
    assert isinstance(miss, Miss)
    assert next(iter(change)) in miss.reason
    assert lost(miss) == {(cause, None): 199}


def test_namespaces_share_nothing(shelf):
    shelf.store(IDS, snapshots=(192,), namespace="a")
    assert isinstance(plan(shelf, IDS), Miss)


def test_a_copy_that_costs_more_than_computing_is_not_made(shelf):
    shelf.store(IDS, snapshots=(192,))
    cost = CostModel(tile_seconds=1.0, bytes_per_second={Tier.DEVICE: 1.0})
    options = PlanOptions(tile=TILE, cost=cost, snapshot_bytes=1000)
    found = plan(shelf, IDS, options, ideal=199)
    assert found.snapshot == -1
    assert lost(found)[Cause.POLICY, None] == 192 - found.start
    cheap = dataclasses.replace(options, snapshot_bytes=1)
    assert plan(shelf, IDS, cheap).start == 192
    assert plan(shelf, IDS, cheap).seconds == 2.0


def test_in_a_homogeneous_model_a_hit_means_reuse():
    shelf = Shelf(dataclasses.replace(HOMOGENEOUS, cells_per_block=4))
    shelf.store(IDS)
    found = plan(shelf, IDS)
    assert (found.start, found.shared) == (192, 192)
    assert found.outcome is Outcome.REUSE
    assert found.needs == {Kind.COMPRESSED: Action.READY}
    assert found.known_from == 0


def test_planning_changes_nothing(shelf):
    shelf.store(IDS, snapshots=(192,))
    entries = shelf.allocator.entries
    before = {
        name: column.copy()
        for name, column in vars(entries).items()
        if isinstance(column, np.ndarray)
    }
    plan(shelf, IDS)
    for name, column in before.items():
        np.testing.assert_array_equal(getattr(entries, name), column, err_msg=name)
    assert (entries.leases == 0).all()


POLICIES = st.builds(
    SnapshotPolicy, ends=st.booleans(), forks=st.booleans(), every=st.integers(0, 3)
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 190), st.sampled_from([16, 32, 48]), POLICIES, st.integers(0, 2**16))
def test_what_a_writer_keeps_is_what_a_reader_needs(tokens, tile, policy, seed):
    """A prompt that goes on from any position a writer kept finds every kind there."""
    shelf, ids = Shelf(GEOMETRY), prompt(tokens, seed=seed)
    kept = policy.positions(tokens=tokens, start=0, exact_from=0, shared=0, tile=tile)
    shelf.store(ids, snapshots=kept)
    for position in kept:
        found = plan(shelf, np.concatenate([ids[:position], IDS[:5]]), PlanOptions(tile=tile))
        assert found.start == found.shared == position
        assert set(found.needs) == {*block_kinds(GEOMETRY), *snapshot_kinds(GEOMETRY)}
        assert Action.REPLAY not in found.needs.values()


def test_a_plan_names_generations_that_a_lease_checks(shelf):
    shelf.store(IDS, snapshots=(192,))
    found = plan(shelf, IDS)
    receipt = shelf.allocator.lease(found.entries, found.generations)
    shelf.allocator.release(receipt)
    assert shelf.allocator.entries.form[found.snapshot] == Form.SNAPSHOT
