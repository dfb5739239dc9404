"""Groups of different sizes must not make legitimate hits impossible."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from geometries import toy_geometry
from shelves import Shelf

from hybridkv.geometry import LayerGeometry
from hybridkv.prefixes.plan import Miss, Plan
from hybridkv.prefixes.policy import DEFAULT, ENDS
from scenarios.runs import (
    GEOMETRY,
    TILE,
    counting_runner,
    joined,
    plan_on,
    request,
    start_of,
    tokens,
)

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 4096)


def stored(ids, *, policy=DEFAULT, geometry=GEOMETRY, tile=TILE, **sizes):
    """A shelf that holds what a cold run of ``ids`` leaves behind."""
    shelf = Shelf(geometry, **sizes)
    shelf.store(ids, snapshots=written(policy, len(ids), tile))
    return shelf


def written(policy, length, tile=TILE):
    return policy.positions(tokens=length, start=0, exact_from=0, shared=0, tile=tile)


@pytest.mark.parametrize("window", [2, 7, 512, 4095])
def test_b032_a_group_that_does_not_bound_reuse_does_not_join_the_lcm(window):
    layers = (*GEOMETRY.layers, LayerGeometry(window=window))
    geometry = dataclasses.replace(GEOMETRY, layers=layers)
    assert geometry.block_tokens == 16
    ids = tokens(256, 1)
    shelf = stored(ids, geometry=geometry)
    assert plan_on(shelf, ids).start == 240


@pytest.mark.parametrize("cells", [1, 2, 4])
def test_b033_the_minimum_hit_is_told_before_anything_runs(cells):
    geometry = dataclasses.replace(toy_geometry((4, 16)), cells_per_block=cells)
    assert geometry.minimum_hit(16 * cells) == 16 * cells
    shelf = stored(tokens(200, 1), geometry=geometry, tile=16 * cells)
    assert isinstance(plan_on(shelf, tokens(200, 1)[: 16 * cells], tile=16 * cells), Miss)
    found = plan_on(shelf, tokens(200, 1)[: 16 * cells + 1], tile=16 * cells)
    assert found.shared == 16 * cells


GROUPS = [g for n in (1, 2, 3) for g in itertools.combinations(SIZES, n)] + [(3, 5), (6, 4, 10)]


@pytest.mark.parametrize("tiles", [1, 3])
def test_b033_the_minimum_hit_of_any_groups_is_the_measured_one(tiles):
    for group in GROUPS:
        geometry = toy_geometry(group)
        tile = tiles * geometry.block_tokens
        least = geometry.minimum_hit(tile)
        assert least == tiles * math.lcm(*group)
        ids = tokens(2 * least, 3)
        shelf = stored(ids, geometry=geometry, tile=tile, blocks=2 * tiles, snapshots=2)
        hits = [length for length in (least - 1, least, least + 1) if length]
        found = [isinstance(plan_on(shelf, ids[:length], tile=tile), Plan) for length in hits]
        assert found == [length > least for length in hits], group
        assert plan_on(shelf, ids[: least + 1], tile=tile).shared == least, group


def test_b034_a_common_prefix_that_is_not_aligned_gives_the_last_aligned_position():
    ids = tokens(80, 1)
    shelf = stored(ids)
    assert plan_on(shelf, joined(ids[:37], tokens(43, 2))).shared == 32
    coarse = stored(ids, tile=32)
    assert plan_on(coarse, joined(ids[:37], tokens(43, 2)), tile=32).shared == 32


@pytest.mark.parametrize("groups", [(4, 16), (1, 2, 4, 16), (0, 4, 8, 16, 16)])
@pytest.mark.parametrize("blocks", [2, 3, 5, 8])
def test_b037_more_groups_do_not_drop_more_than_the_last_block(groups, blocks):
    ids = tokens(16 * blocks, 1)
    shelf = stored(ids, geometry=toy_geometry(groups))
    assert plan_on(shelf, ids).start == len(ids) - 16


def test_b038_a_state_that_is_past_the_last_position_is_not_stepped_back_from():
    ids = tokens(80, 1)
    shelf = Shelf(GEOMETRY)
    shelf.store(ids, snapshots=(64, 80))
    found = plan_on(shelf, ids[:64])
    assert (found.shared, found.snapshot) == (48, -1)
    assert found.start == found.known_from == 16
    assert (plan_on(shelf, ids[:64], replay=False).start) == 0


def test_b040_a_prompt_that_parts_in_the_last_block_finds_the_state_before_it():
    ids = tokens(64, 1)
    shelf = stored(ids)
    assert plan_on(shelf, joined(ids[:61], tokens(3, 2))).start == 48


def test_b041_sessions_that_fit_together_keep_what_they_have():
    runner = counting_runner(blocks=50, slots=1, debug=False)
    sessions = [tokens(10 * 16 - 1, seed) for seed in range(4)]
    for turn in range(3):
        for ids in sessions:
            reused = start_of(request(runner, ids))
            assert reused == (144 if turn else 0)


def test_b042_the_third_of_three_prompts_that_share_a_beginning_resumes_at_its_end(bench):
    head, after, namespace = bench.ids(48), bench.ids(4), bench.namespace()
    prompts = [joined(head, bench.ids(n)) for n in (25, 20, 5)]
    cold = [bench.cold(ids, after) for ids in prompts]
    warm = [bench.run(ids, after, namespace, policy=DEFAULT) for ids in prompts]
    assert [run.start for run in warm] == [0, 16, 48]
    assert warm[1].shared == 48
    assert all(ours.continues(theirs) for ours, theirs in zip(warm, cold, strict=True))


def test_b044_a_fork_before_it_does_not_cost_a_prompt_its_last_state():
    ids = tokens(96, 1)
    shelf = stored(ids)
    shelf.store(joined(ids[:40], tokens(30, 2)), snapshots=(64,))
    shelf.now += 1
    shelf.allocator.touch(shelf.directory.find(shelf.chain(ids)).entries)
    shelf.allocator.evict(blocks=2)
    assert plan_on(shelf, joined(ids, tokens(5, 3))).start == 96


def test_b045_thirty_turns_reuse_the_whole_turn_before_with_a_tenth_of_the_states():
    runner = counting_runner(blocks=80, slots=1, per_sequence=60, snapshots=3)
    ids, before = tokens(200, 1), 0
    for turn in range(30):
        plan = request(runner, ids, decoded=10)
        assert start_of(plan) == before // 16 * 16
        before = len(ids)
        ids = joined(ids, tokens(20, turn + 2))


def test_b046_states_behind_a_block_without_one_are_found():
    shelf = Shelf(GEOMETRY)
    ids = tokens(81, 1)
    shelf.store(ids, snapshots=(32, 64))
    assert plan_on(shelf, ids).start == 64
    assert plan_on(shelf, ids, replay=False).start == 64


def test_b048_windows_of_any_size_leave_the_block_at_its_size():
    widths = (5, 9, 56)
    layers = tuple(dataclasses.replace(GEOMETRY.layers[0], window=w) for w in widths)
    geometry = dataclasses.replace(GEOMETRY, layers=layers + GEOMETRY.layers[1:2])
    assert (geometry.block_tokens, geometry.minimum_hit(4)) == (4, 4)
    ids = tokens(30, 1)
    shelf = stored(ids, geometry=geometry, tile=4)
    assert plan_on(shelf, ids, tile=4).start == 28


@pytest.mark.parametrize("length", [32, 33, 47, 64])
def test_b049_a_prompt_that_keeps_only_its_ends_finds_one_when_it_is_sent_again(length):
    ids = tokens(length, 1)
    assert plan_on(stored(ids, policy=ENDS), ids).start == (length - 1) // 16 * 16


def test_b050_the_end_of_the_prompt_is_kept_not_that_of_its_answer():
    runner = counting_runner(blocks=20)
    ids = tokens(40, 1)
    request(runner, ids, decoded=8)
    assert start_of(request(runner, joined(ids, tokens(12, 2)))) == 32


def test_b052_a_prompt_that_hits_early_still_keeps_its_own_end():
    runner = counting_runner(blocks=20)
    ids = tokens(60, 1)
    assert start_of(request(runner, ids[:17])) == 0
    assert start_of(request(runner, ids)) == 16
    assert start_of(request(runner, ids)) == 48
    assert np.count_nonzero(runner.allocator.entries.snapshot >= 0) == 2
