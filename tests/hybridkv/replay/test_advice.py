"""Recommendations follow from lengths and reuse, and say where they would turn."""

import dataclasses

import numpy as np
import pytest

from hybridkv.prefixes.policy import DENSE
from hybridkv.replay import advice
from hybridkv.replay.advice import Load, advise, break_even_context, break_even_reuse
from hybridkv.replay.catalog import load_hardware, load_model
from hybridkv.replay.run import RunOptions, replay, summary
from hybridkv.replay.schemes import SchemeName
from hybridkv.replay.trace import BLOCK, Builder

FLASH, V6E = load_model("v4-flash"), load_hardware("v6e-8")


def traffic(*, prompt, output, reuse, requests=40, every=1.0):
    """Each prompt repeats the first ``reuse`` blocks of the one before."""
    builder, fresh = Builder(), iter(range(10**9))
    blocks = [next(fresh) for _ in range(prompt)]
    for number in range(requests):
        blocks = blocks[:reuse] + [next(fresh) for _ in range(prompt - reuse)]
        builder.add(number * every, prompt * BLOCK, output, blocks)
    return builder.build("made")


def results_of(trace):
    return {name: replay(trace, FLASH, V6E, RunOptions(scheme=name)) for name in SchemeName}


def test_short_queries_without_reuse_stay_generic():
    told = advise(results_of(traffic(prompt=4, output=20, reuse=0)))
    assert (told.scheme, told.adopt, told.policy) == (SchemeName.GENERIC, False, None)
    assert told.headline == "stay with the generic scheme"
    assert told.numbers["break_even_context_tokens"] > 4 * BLOCK


def test_long_prompts_with_reuse_adopt_with_numbers():
    results = results_of(traffic(prompt=200, output=100, reuse=195, every=8.0))
    told = advise(results)
    assert (told.scheme, told.policy) == (SchemeName.HYBRID, "default")
    budget = told.numbers["budgets"]
    # All that is reused is what the last prompt left behind: 195 blocks and one state at its end.
    assert budget["blocks"] >= 195
    assert budget["bytes"] == budget["by_tier"]["device"]
    assert budget["missing"] == 0
    seconds = told.numbers["device_seconds_per_request"]
    assert seconds["generic"] > 1.1 * seconds["hybrid"]
    assert any("99%" in reason for reason in told.reasons)


def test_requests_that_generic_cannot_hold_decide_alone():
    results = results_of(traffic(prompt=2, output=5, reuse=0, requests=20))
    generic = dataclasses.replace(results[SchemeName.GENERIC], refused=1)
    told = advise(results | {SchemeName.GENERIC: generic}, margin=10.0)
    assert told.scheme is SchemeName.HYBRID
    assert "cannot hold 1 of 21 requests" in told.reasons[0]


def test_break_evens_are_where_the_margin_is_crossed():
    results = results_of(traffic(prompt=2, output=2, reuse=0, requests=2))
    hybrid, generic = (results[n].server for n in (SchemeName.HYBRID, SchemeName.GENERIC))
    load = Load(prompt=8192, output=100, reused=0.0, running=4)

    def ratio(**fields):
        same = dataclasses.replace(load, **fields)
        return advice.request_seconds(generic, same) / advice.request_seconds(hybrid, same)

    context = break_even_context(hybrid, generic, load, 0.1)
    assert ratio(prompt=context) >= 1.1 > ratio(prompt=context - BLOCK)
    assert break_even_context(hybrid, hybrid, load, 0.1) is None
    share = break_even_reuse(hybrid, generic, dataclasses.replace(load, prompt=2048), 0.1, 0.0)
    assert 0 < share < 0.3
    assert break_even_reuse(hybrid, generic, load, 0.0, 0.0) == 0.0
    assert ratio(prompt=10**6) == np.inf


def test_the_cheapest_policy_in_bytes_among_equals_is_recommended():
    trace = traffic(prompt=40, output=100, reuse=36, every=4.0)
    results = results_of(trace)
    dense = replay(trace, FLASH, V6E, RunOptions(policy_name="dense", policy=DENSE))
    told = advise(results, [dense])
    assert told.policy == "default"
    assert dense.cache.written > 2 * results[SchemeName.HYBRID].cache.written


def test_a_summary_balances_and_is_plain_json():
    trace = traffic(prompt=30, output=10, reuse=20)
    result = replay(trace, FLASH, V6E, RunOptions())
    told = summary(result)
    assert told["ideal_tokens"] == told["reused_tokens"] + sum(told["lost_tokens"].values())
    assert told["token_hit_ratio"] == told["reused_tokens"] / told["prompt_tokens"]
    assert told["reused_share"] == told["reused_tokens"] / told["ideal_tokens"]
    assert 0 < told["restorable_share"] <= told["reused_share"]
    times = told["ttft_s"]
    assert 0 < times["p50"] <= times["p95"] <= times["p99"]
    stored = told["timeline"]["stored_bytes"]["device"]
    assert stored == sorted(stored)
    assert stored[-1] == sum(told["peak_bytes"]["device"].values())


@pytest.mark.parametrize("tile", [0, 100, 700])
def test_a_tile_is_a_multiple_of_a_block(tile):
    with pytest.raises(ValueError, match="multiple of 512"):
        RunOptions(tile=tile)
