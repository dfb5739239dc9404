"""A replay without checks gives the numbers of one in which every call checks what it is handed."""

import dataclasses
import itertools

import numpy as np
import pytest

from hybridkv.blocks.entries import Entries, Tier
from hybridkv.blocks.eviction import LeastRecentlyUsed, SecondsPerByte
from hybridkv.blocks.pools import PoolSizes
from hybridkv.geometry import Geometry, LayerGeometry
from hybridkv.prefixes.cost import CostModel
from hybridkv.prefixes.policy import DEFAULT, DENSE, THINNED
from hybridkv.replay import cache, costs
from hybridkv.replay.cache import CacheOptions
from hybridkv.replay.catalog import load_hardware, load_model
from hybridkv.replay.costs import Server
from hybridkv.replay.schemes import SchemeName, scheme_of
from hybridkv.replay.trace import BLOCK, Builder

GEOMETRY = Geometry(
    layers=(LayerGeometry(window=1024, ratio=4, overlap=True),) * 2, row_width=4, cells_per_block=4
)
ROOMY = {Tier.DEVICE: PoolSizes(blocks=400, snapshots=400)}
TIGHT = {Tier.DEVICE: PoolSizes(blocks=13, snapshots=3)}
TIERS = {
    Tier.DEVICE: PoolSizes(blocks=14, snapshots=4),
    Tier.HOST: PoolSizes(blocks=31, snapshots=6),
    Tier.DISK: PoolSizes(blocks=60, snapshots=20),
}


def grown_trace(seed, requests):
    """Prompts of which most go on from a part of an earlier one; some are asked again at once."""
    rng = np.random.default_rng(seed)
    builder, prompts, fresh = Builder(), [], itertools.count()
    for number in range(requests):
        old = prompts[rng.integers(len(prompts))] if prompts and rng.random() < 0.8 else ()
        shared = old[: rng.integers(len(old) + 1)] if rng.random() < 0.8 else old
        prompts.append((*shared, *(next(fresh) for _ in range(rng.integers(0, 6)))) or (10**6,))
        extra = int(rng.integers(2))
        ids = [*prompts[-1], *([10**7 + number] if extra else [])]
        # Of some, two come at the same time.
        builder.add(float(number // 2), BLOCK * len(prompts[-1]) + 5 * extra, 3, ids)
    return builder.build("made")


def eviction_of(name, scheme):
    if name == "lru":
        return LeastRecentlyUsed()
    value = costs.value_policy(scheme)
    return {
        tier: value(
            block_seconds=1.0, block_bytes=100, snapshot_seconds=3.0, snapshot_bytes=40,
            tier=tier, copied_share=0.3,
        )
        for tier in Tier
    }  # fmt: skip


def outcome(trace, scheme, pools, policy, eviction, *, replay=True, **how):
    scheme = scheme_of(scheme, GEOMETRY)
    rates = {Tier.DEVICE: 1e12, Tier.HOST: 1e7, Tier.DISK: 3e5}
    options = CacheOptions(
        pools=pools,
        policy=policy,
        eviction=eviction_of(eviction, scheme),
        cost=CostModel(tile_seconds=1.0, bytes_per_second=rates, queue_seconds=0.1),
        replay=replay,
        **how,
    )
    return cache.run(scheme, options, trace)


def texts(result):
    """Every field as text, arrays whole."""
    fields = dataclasses.asdict(result)
    return {
        name: {str(key): np.asarray(each).tolist() for key, each in value.items()}
        if isinstance(value, dict)
        else np.asarray(value).tolist()
        for name, value in fields.items()
    }


@pytest.mark.parametrize("scheme", list(SchemeName))
@pytest.mark.parametrize("pools", [ROOMY, TIGHT, TIERS], ids=["roomy", "tight", "tiers"])
@pytest.mark.parametrize("eviction", ["lru", "value"])
def test_numbers_are_those_of_a_replay_that_checks_every_call(scheme, pools, eviction):
    trace = grown_trace(7, 90)
    for policy, replay in ((DEFAULT, True), (THINNED, True), (DENSE, False)):
        if scheme is not SchemeName.HYBRID and policy is not DEFAULT:
            continue
        options = (trace, scheme, pools, policy, eviction)
        fast = texts(outcome(*options, replay=replay))
        assert fast == texts(outcome(*options, replay=replay, checked=True))
        assert sum(fast["reused"]) > 0


def test_uses_are_those_of_all_entries_counted_anew():
    """``debug`` counts them at every hit; so does it walk the invariants of all bookkeeping."""
    outcome(grown_trace(3, 60), "hybrid", TIERS, THINNED, "value", debug=True)


def test_values_of_blocks_alone_are_those_of_the_general_policy():
    model, hardware = load_model("v4-flash"), load_hardware("v6e-8")
    generic = Server(
        model=model, hardware=hardware, scheme=scheme_of("generic", model.geometry), tile=BLOCK
    )
    rng = np.random.default_rng(0)
    entries = Entries(200)
    entries.state[:] = rng.integers(0, 3, entries.state.shape)
    entries.hits[:] = rng.integers(0, 50, 200)
    entries.floor[:] = rng.random(200)
    ids = rng.permutation(200)[:120].astype(np.int32)
    for tier, policy in generic.eviction("value").items():
        assert type(policy) is not SecondsPerByte
        fields = {each.name: getattr(policy, each.name) for each in dataclasses.fields(policy)}
        plain = SecondsPerByte(**fields)
        assert plain.tier is tier
        assert (policy.value(entries, ids, 0.0) == plain.value(entries, ids, 0.0)).all()


@pytest.mark.parametrize("name", list(SchemeName))
def test_the_planner_is_given_the_same_geometry_in_fewer_steps(name):
    for model in (GEOMETRY, load_model("v4-flash").geometry):
        scheme = scheme_of(name, model)
        ours, theirs = scheme.planned, scheme.geometry
        assert ours.block_tokens == theirs.block_tokens
        assert ours.block_bytes == theirs.block_bytes
        for _ in range(2):
            far = -(-theirs.longest_replay_tokens // BLOCK) * BLOCK
            ends = (BLOCK, 3 * BLOCK, far, far + BLOCK)
            assert [ours.replay_tokens(at) for at in ends] == list(map(theirs.replay_tokens, ends))
