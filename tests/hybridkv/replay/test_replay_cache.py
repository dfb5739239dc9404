"""The replayed bookkeeping, by hand, and against a plain model of the same rules."""

from collections import OrderedDict

import numpy as np
import pytest

from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.eviction import LeastRecentlyUsed
from hybridkv.blocks.pools import PoolSizes
from hybridkv.geometry import Geometry, LayerGeometry
from hybridkv.prefixes.cost import CostModel
from hybridkv.prefixes.policy import DEFAULT, DENSE, ENDS, NEVER, THINNED
from hybridkv.replay import cache
from hybridkv.replay.cache import CacheOptions
from hybridkv.replay.schemes import SchemeName, scheme_of
from hybridkv.replay.trace import BLOCK, Builder

GEOMETRY = Geometry(
    layers=(LayerGeometry(window=1024, ratio=4, overlap=True),) * 2, row_width=4, cells_per_block=4
)
"""A replay of at most 2 x 1023 tokens, so 4 blocks: whole tiles of 512."""
FAST = {tier: 1e15 for tier in Tier}


def trace_of(*prompts, extra=1):
    """Prompts of whole blocks, by number, and ``extra`` tokens more in a block of their own."""
    builder = Builder()
    for number, blocks in enumerate(prompts):
        ids = [*blocks, 10**6 + number] if extra else list(blocks)
        builder.add(float(number), BLOCK * len(blocks) + extra, 3, ids)
    return builder.build("made")


def replayed(trace, policy=DEFAULT, *, scheme="hybrid", pools=None, replay=True, cost=None):
    plan = scheme_of(scheme, GEOMETRY)
    count = trace.distinct
    options = CacheOptions(
        pools=pools or {Tier.DEVICE: PoolSizes(blocks=count, snapshots=count)},
        policy=policy,
        eviction=LeastRecentlyUsed(),
        cost=cost or CostModel(tile_seconds=1.0, bytes_per_second=FAST),
        replay=replay,
        debug=True,
    )
    result = cache.run(plan, options, trace)
    assert result.ideal.sum() == result.reused.sum() + sum(result.lost.values())
    return result


def blocks(array):
    return (array // BLOCK).tolist()


def test_states_everywhere_reuse_the_ideal():
    result = replayed(trace_of((1, 2, 3), (1, 2, 4), (1, 2, 3, 5), (6,)), DENSE)
    assert blocks(result.ideal) == blocks(result.reused) == [0, 2, 3, 0]
    assert result.lost == {}


def test_the_last_partial_block_never_counts_and_a_token_is_always_computed():
    builder = Builder()
    for second in range(2):
        builder.add(second, 2 * BLOCK + 9, 1, [1, 2, 3])
    for second in range(2):
        builder.add(2 + second, 2 * BLOCK, 1, [4, 5])
    result = replayed(builder.build("made"), DENSE)
    assert result.ideal.tolist() == [0, 2 * BLOCK, 0, 2 * BLOCK - 1]
    assert result.reused.tolist() == [0, 2 * BLOCK, 0, BLOCK]
    assert result.lost == {"alignment": BLOCK - 1}


def test_a_fork_without_a_state_is_lost_once_and_found_by_the_third():
    prompts = ((1, 2, 3, 4), (1, 2, 5), (1, 2, 6))
    result = replayed(trace_of(*prompts), replay=False)
    assert blocks(result.reused) == [0, 0, 2]
    assert result.lost == {"no_snapshot(window)": 2 * BLOCK}
    assert replayed(trace_of(*prompts), ENDS, replay=False).lost == {
        "no_snapshot(window)": 4 * BLOCK
    }


def test_a_replay_reuses_all_but_the_cone():
    long = tuple(range(20))
    result = replayed(trace_of((*long, 30), (*long, 40)), NEVER)
    assert blocks(result.ideal) == [0, 20]
    assert blocks(result.reused) == [0, 16]
    assert blocks(result.replayed) == [0, 4]
    assert result.lost == {"no_snapshot(window)": 4 * BLOCK}


@pytest.mark.parametrize("scheme", ["generic", "homogeneous"])
def test_schemes_of_one_kind_find_that_a_hit_means_reuse(scheme):
    result = replayed(trace_of((1, 2, 3, 4), (1, 2, 5)), NEVER, scheme=scheme)
    assert blocks(result.reused) == [0, 2]
    assert result.written == 0
    assert not result.snapshot.any()


def test_what_was_evicted_is_blamed_on_the_kind_and_the_beginning_goes_last():
    pools = {Tier.DEVICE: PoolSizes(blocks=6, snapshots=6)}
    trace = trace_of((1, 2, 3), (4, 5, 6, 7), (1, 2, 3))
    result = replayed(trace, DENSE, pools=pools)
    # 5 of 6 places went to the second prompt, so that the first one's beginning is left.
    assert blocks(result.reused) == [0, 0, 1]
    assert result.lost == {"evicted(compressed)": 2 * BLOCK}


def test_short_snapshots_are_blamed_apart_from_blocks():
    pools = {Tier.DEVICE: PoolSizes(blocks=30, snapshots=1)}
    result = replayed(trace_of((1, 2), (4, 5), (1, 2, 3)), pools=pools, replay=False)
    assert blocks(result.reused) == [0, 0, 0]
    assert result.lost == {"evicted(window)": 2 * BLOCK}


def test_a_prompt_larger_than_the_cache_keeps_its_beginning():
    pools = {Tier.DEVICE: PoolSizes(blocks=3, snapshots=3)}
    result = replayed(trace_of(range(8), range(8)), DENSE, pools=pools)
    assert blocks(result.ideal) == [0, 8]
    assert blocks(result.reused) == [0, 3]
    assert result.not_written > 0


def test_what_the_device_gives_up_is_loaded_from_the_tier_below():
    pools = {
        Tier.DEVICE: PoolSizes(blocks=5, snapshots=5),
        Tier.HOST: PoolSizes(blocks=40, snapshots=40),
    }
    trace = trace_of((1, 2, 3), (4, 5, 6, 7), (8, 9), (1, 2, 3, 11))
    result = replayed(trace, DENSE, pools=pools)
    assert blocks(result.reused) == [0, 0, 0, 3]
    sizes = scheme_of("hybrid", GEOMETRY)
    assert result.loaded[Tier.HOST].tolist() == [
        0,
        0,
        0,
        3 * sizes.block_bytes + sizes.snapshot_bytes,
    ]
    assert result.stored[Tier.DEVICE, Form.BLOCK].max() <= 5
    slow = CostModel(tile_seconds=1.0, bytes_per_second={Tier.HOST: 1.0})
    result = replayed(trace, DENSE, pools=pools, cost=slow)
    assert result.loaded[Tier.HOST].sum() == 0
    assert result.lost == {"policy": 3 * BLOCK}


def test_thinning_withdraws_states_that_longer_prompts_have_passed():
    grown = [range(n) for n in range(1, 25)]
    kept = replayed(trace_of(*grown), DEFAULT).stored[Tier.DEVICE, Form.SNAPSHOT][-1]
    thinned = replayed(trace_of(*grown), THINNED)
    assert thinned.stored[Tier.DEVICE, Form.SNAPSHOT][-1] < kept / 2
    assert blocks(thinned.reused) == list(range(24))


def test_depth_is_the_capacity_that_a_hit_needs():
    trace = trace_of((1, 2, 3), (4, 5), (1, 2, 3), extra=0)
    depth = replayed(trace, DENSE, scheme="homogeneous").depth[Form.BLOCK]
    assert depth.tolist() == [0, 0, 5]
    for places, reused in ((5, 2), (3, 1)):
        pools = {Tier.DEVICE: PoolSizes(blocks=places, snapshots=0)}
        result = replayed(trace, DENSE, scheme="homogeneous", pools=pools)
        assert blocks(result.reused) == [0, 0, reused]


def model_of_lru(trace, places):
    """Blocks reused by each request: one list of places, a request's own blocks last first."""
    kept, reused = OrderedDict(), []
    for request in range(len(trace)):
        numbers = trace.of(request).tolist()
        whole = int(trace.prompt[request] - 1) // BLOCK
        run = 0
        while run < whole and numbers[run] in kept:
            run += 1
        reused.append(run)
        for number in reversed(numbers):
            kept[number] = None
            kept.move_to_end(number)
        while len(kept) > places:
            kept.popitem(last=False)
    return reused


@pytest.mark.parametrize("places", [7, 23, 60])
def test_least_recently_used_is_that_of_a_plain_model(places):
    rng = np.random.default_rng(places)
    prompts, fresh = [], iter(range(10**9))
    for _ in range(120):
        old = prompts[rng.integers(len(prompts))] if prompts and rng.random() < 0.7 else ()
        shared = old[: rng.integers(len(old) + 1)]
        prompts.append((*shared, *(next(fresh) for _ in range(rng.integers(1, 6)))))
    trace = trace_of(*prompts)
    pools = {Tier.DEVICE: PoolSizes(blocks=places, snapshots=places)}
    result = replayed(trace, DENSE, scheme=SchemeName.HOMOGENEOUS, pools=pools)
    assert blocks(result.reused) == model_of_lru(trace, places)


def test_restorable_is_up_to_a_stored_state_whatever_a_replay_adds():
    long = tuple(range(20))
    prompts = ((*long, 30), (*long[:10], 40), (*long, 50))
    copied = replayed(trace_of(*prompts), replay=False)
    assert blocks(copied.restorable) == blocks(copied.reused) == [0, 0, 10]
    rebuilt = replayed(trace_of(*prompts))
    assert blocks(rebuilt.restorable) == [0, 0, 10]
    assert blocks(rebuilt.reused) == [0, 6, 16]
    assert blocks(replayed(trace_of(*prompts), scheme="generic").restorable) == [0, 10, 20]
