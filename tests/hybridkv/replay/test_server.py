"""Catalog, schemes, costs and places."""

import dataclasses
import json
import types

import pytest

from hybridkv.blocks.entries import Tier
from hybridkv.blocks.pools import PoolSizes
from hybridkv.errors import UserError
from hybridkv.replay.catalog import known, load_hardware, load_model
from hybridkv.replay.costs import Server
from hybridkv.replay.policies import parse_policy
from hybridkv.replay.pools import Budget, Limit, places
from hybridkv.replay.schemes import SchemeName, scheme_of
from hybridkv.replay.trace import BLOCK

FLASH, V6E = load_model("v4-flash"), load_hardware("v6e-8")


def server(scheme="hybrid", model=FLASH, hardware=V6E, tile=512):
    return Server(
        model=model, hardware=hardware, scheme=scheme_of(scheme, model.geometry), tile=tile
    )


@pytest.mark.parametrize("kind", ["models", "hardware"])
def test_every_number_that_comes_along_states_its_source(kind):
    load = load_model if kind == "models" else load_hardware
    names = known(kind)
    assert len(names) >= 3
    for name in names:
        loaded = load(name)
        assert loaded.name == name
        assert all(value.source and value.unit for value in loaded.values)


def test_bytes_of_flash_are_those_of_the_release():
    sizes = {name: scheme_of(name, FLASH.geometry) for name in SchemeName}
    hybrid, generic, pages = (sizes[n] for n in ("hybrid", "generic", "homogeneous"))
    assert hybrid.block_bytes == BLOCK * 3514.25
    assert hybrid.snapshot_bytes == 3_644_416
    assert generic.block_bytes == BLOCK * 528_384
    assert pages.block_bytes == hybrid.block_bytes + hybrid.snapshot_bytes
    assert [each.has_snapshots for each in (hybrid, generic, pages)] == [True, False, False]


def test_a_model_of_one_kind_has_nothing_but_pages():
    geometry = load_model("llama-70b").geometry
    hybrid, pages = (scheme_of(name, geometry) for name in ("hybrid", "homogeneous"))
    assert hybrid.block_bytes == pages.block_bytes == BLOCK * 80 * 4096
    assert not hybrid.has_snapshots


def test_the_model_of_time_is_near_what_was_measured():
    measured = 707_911 / 73.5
    modelled = server(hardware=load_hardware("h200-2"))
    assert modelled.tile / modelled.tile_first == pytest.approx(measured, rel=0.1)


def test_the_generic_scheme_reads_its_whole_context_in_every_step():
    hybrid, generic = server(), server("generic")
    assert hybrid.tile_first == generic.tile_first
    more = generic.decode_seconds(1, 100_000) - hybrid.decode_seconds(1, 100_000)
    raw = 100_000 * (528_384 - hybrid.context_bytes) - hybrid.sequence_read_bytes
    assert more == pytest.approx(raw / generic.bandwidth)
    assert hybrid.prompt_seconds(0, 1024) < hybrid.prompt_seconds(512, 1536)


def test_more_sequences_hit_more_experts_until_all_are_read():
    one = server()
    read = [one.weights_read(tokens) for tokens in (1, 8, 10_000)]
    assert read[0] < read[1] < read[2]
    assert read[2] == pytest.approx(FLASH.weight_bytes)


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match=r"v4-pro has 940 GB of weights, which do not fit v6e-8"):
        _ = server(model=load_model("v4-pro")).room


def budgeted(budget, *, distinct=10**6, scheme="hybrid", **room):
    """Places with so much room, in blocks beside their share of snapshots."""
    one = server(scheme)
    size = one.scheme.block_bytes + one.scheme.snapshot_bytes / 16
    small = dataclasses.replace(one)
    small.__dict__["room"] = {tier: room[tier.name.lower()] * size + 1 for tier in Tier}
    return dict(places(small, budget, types.SimpleNamespace(distinct=distinct)))


def test_tiers_are_used_when_the_faster_ones_are_too_small():
    room = {"device": 100, "host": 1000, "disk": 5000}
    sized = budgeted(Budget(tokens=50 * BLOCK), **room)
    assert sized == {Tier.DEVICE: PoolSizes(blocks=50, snapshots=50)}
    sized = budgeted(Budget(tokens=500 * BLOCK, snapshots=40), **room)
    assert sized == {
        Tier.DEVICE: PoolSizes(blocks=100, snapshots=6),
        Tier.HOST: PoolSizes(blocks=500, snapshots=40),
    }
    sized = budgeted(Budget(tokens=Limit.NONE), distinct=9000, **room)
    assert [pool.blocks for pool in sized.values()] == [100, 1000, 9000]
    sized = budgeted(Budget(), distinct=9000, **room)
    assert sized[Tier.DISK] == PoolSizes(blocks=5000, snapshots=312)
    sized = budgeted(Budget(), distinct=9000, device=100, host=50, disk=5000)
    assert list(sized) == [Tier.DEVICE, Tier.DISK]


def test_no_places_for_snapshots_where_there_are_none():
    sized = budgeted(
        Budget(tokens=Limit.NONE), distinct=9, scheme="generic", device=9, host=0, disk=0
    )
    assert sized == {Tier.DEVICE: PoolSizes(blocks=9, snapshots=0)}


@pytest.mark.parametrize("fields", [{"tokens": 511}, {"snapshots": -1}, {"tokens_per_snapshot": 1}])
def test_budgets_that_mean_nothing_are_refused(fields):
    with pytest.raises(UserError):
        Budget(**fields)


def test_eviction_orders_by_use_or_by_what_is_saved():
    values = server().eviction("value")
    assert 0 < values[Tier.DEVICE].copied_share < 1
    assert values[Tier.DISK].copied_share == 0
    with pytest.raises(UserError, match="give lru or value"):
        server().eviction("random")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data["values"]["flops"].pop("source"), "flops has no source"),
        (lambda data: data["values"].pop("flops"), "flops missing"),
        (lambda data: data["values"]["flops"].update(value=-1), "give 0 or more"),
        (lambda data: data["values"]["flops"].update(value="many"), "not a number"),
        (lambda data: data["values"]["flops"].update(value=0), "flops must be above 0"),
        (lambda data: data.pop("values"), "values are missing"),
    ],
)
def test_hardware_of_ones_own_needs_every_number_and_its_source(tmp_path, change, words):
    source = {value.name: dataclasses.asdict(value) for value in V6E.values}
    data = {"name": "mine", "values": source}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    assert load_hardware(str(path)).flops == V6E.flops
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=words):
        load_hardware(str(path))


def test_unknown_names_are_answered_with_the_known_ones():
    with pytest.raises(UserError, match=r"no model 'v5': give one of .*v4-flash"):
        load_model("v5")
    with pytest.raises(UserError, match=r"no scheme 'x': give one of homogeneous"):
        scheme_of("x", FLASH.geometry)


def test_policies_by_name_and_by_parts():
    assert parse_policy("dense").every == 1
    mixed = parse_policy("ends+forks+8k")
    assert (mixed.ends, mixed.forks, mixed.period) == (True, True, 8192)
    assert parse_policy("512") == parse_policy("512")
    assert not parse_policy("ends").forks
    for wrong in ("", "ends+", "ends+0", "often"):
        with pytest.raises(UserError, match="no policy"):
            parse_policy(wrong)
