"""Which requests are run twice, how soon that finds a fault, and what counts as other bits."""

import dataclasses
import math

import numpy as np
import pytest
from scenarios.runs import GEOMETRY

from hybridkv.engine.requests import Finish, Output, Piece
from hybridkv.engine.runner import RunnerOptions
from hybridkv.errors import UserError
from hybridkv.observe.shadow import (
    Mismatch,
    ShadowOptions,
    Verdict,
    cold_sizes,
    compare,
    engine_bytes,
    requests_until_caught,
)
from hybridkv.state.cache import cache_bytes
from hybridkv.state.capacity import Capacity
from hybridkv.tiers.options import TierOptions

PROMPTS = np.random.default_rng(0).integers(0, 60000, (20000, 6)).astype(np.int32)


def sampled(options: ShadowOptions, prompts=PROMPTS, namespace: str = "") -> np.ndarray:
    return np.array([options.sampled(namespace, row) for row in prompts])


def test_a_share_of_requests_is_sampled_the_same_ones_every_time():
    first = sampled(ShadowOptions(share=0.1, salt="a"))
    deviation = math.sqrt(0.1 * 0.9 * len(PROMPTS))
    assert abs(first.sum() - 0.1 * len(PROMPTS)) < 4 * deviation
    again = sampled(ShadowOptions(share=0.1, salt="a"), PROMPTS[:500].astype(np.int64))
    assert (again == first[:500]).all()


def test_what_a_share_takes_in_a_larger_one_takes_in_too():
    few, more = (sampled(ShadowOptions(share=s), PROMPTS[:3000]) for s in (0.05, 0.2))
    assert few.any()
    assert (few <= more).all()
    assert sampled(ShadowOptions(share=1.0), PROMPTS[:100]).all()
    assert not sampled(ShadowOptions(share=0.0), PROMPTS[:100]).any()


def test_salt_namespace_and_purpose_draw_anew():
    prompts = PROMPTS[:3000]
    base = sampled(ShadowOptions(share=0.5), prompts)
    others = [
        sampled(ShadowOptions(share=0.5, salt="b"), prompts),
        sampled(ShadowOptions(share=0.5), prompts, namespace="b"),
        np.array([ShadowOptions().place("serve", "", row) < 0.5 for row in prompts]),
    ]
    for other in others:
        assert 0.45 < (other == base).mean() < 0.55
    ab, ba = (ShadowOptions(salt=s).place("x", n, prompts[0]) for s, n in (("a", "b"), ("ab", "")))
    assert ab != ba


def test_prompts_with_a_common_beginning_fall_together_where_that_is_asked():
    options = ShadowOptions(share=0.5, first_tokens=4)
    grown = np.concatenate([PROMPTS[:500, :4], PROMPTS[500:1000]], axis=1)
    assert (sampled(options, PROMPTS[:500]) == sampled(options, grown)).all()
    apart = sampled(ShadowOptions(share=0.5), PROMPTS[:500])
    assert (apart != sampled(ShadowOptions(share=0.5), grown)).any()


@pytest.mark.parametrize("share", [0.001, 0.01, 0.05, 0.25, 0.5, 0.9, 0.99, 1.0])
def test_the_bound_is_the_least_number_that_suffices(share):
    bound = requests_until_caught(share)
    assert 1 - (1 - share) ** bound >= 0.99 - 1e-12
    assert bound == 1 or 1 - (1 - share) ** (bound - 1) < 0.99


def test_the_bound_in_numbers():
    assert [requests_until_caught(s) for s in (1.0, 0.25, 0.05, 0.01)] == [1, 17, 90, 459]
    assert requests_until_caught(0.1, 0.999) == 66
    assert requests_until_caught(0.9, 0.99) == 2  # exactly: no step over by rounding
    for share, probability in ((0.0, 0.9), (1.1, 0.9), (0.5, 1.0), (0.5, 0.0)):
        with pytest.raises(UserError):
            requests_until_caught(share, probability)


@pytest.mark.parametrize("share", [0.05, 0.25])
def test_sampling_by_hash_keeps_the_bound(share):
    """Of runs of affected requests as long as the bound, 1 % at most have none that is sampled."""
    bound = requests_until_caught(share)
    hits = sampled(ShadowOptions(share=share, salt="bound"))
    runs = hits[: len(hits) // bound * bound].reshape(-1, bound)
    missed = (~runs.any(axis=1)).mean()
    assert missed <= 0.01 + 3 * math.sqrt(0.01 * 0.99 / len(runs))


def output(tokens=(1, 2), digest="d", finish=Finish.LENGTH, exact=True) -> Output:
    pieces = [Piece(token=token, text="") for token in tokens]
    return Output(prompt_tokens=3, pieces=pieces, finish=finish, logits_digest=digest, exact=exact)


def compared(one: Output, other: Output) -> Mismatch | Verdict:
    return compare([one], [other], namespace="n", tokens=np.arange(3))


def test_equal_means_tokens_and_digest():
    assert compared(output(), output()) is Verdict.EQUAL
    only_logits = compared(output(), output(digest="e"))
    assert isinstance(only_logits, Mismatch)
    assert only_logits.first_token is None
    assert "only logits differ" in str(only_logits)
    second = compared(output((1, 3)), output(digest="e"))
    assert (second.first_token, second.sample) == (1, 0)
    longer = compared(output((1, 2, 3)), output())
    assert longer.first_token == 2


def test_two_runs_without_digests_are_not_equal():
    assert isinstance(compared(output(digest=None), output(digest=None)), Mismatch)


def test_a_failure_that_the_cold_run_has_not_is_a_mismatch():
    failed = output((), finish=Finish.FAILED, digest=None)
    found = compared(failed, output())
    assert isinstance(found, Mismatch)
    assert "failed where the cold run is length" in str(found)
    assert compared(failed, failed) is Verdict.INCOMPLETE
    assert compared(output(), failed) is Verdict.INCOMPLETE


@pytest.mark.parametrize("finish", [Finish.CANCELLED, Finish.TIMED_OUT, Finish.HANDED_OFF])
def test_what_ended_early_says_nothing(finish):
    early = output((1,), digest="e", finish=finish)
    assert compared(early, output()) is Verdict.INCOMPLETE
    assert compared(output(), early) is Verdict.INCOMPLETE


def test_what_says_itself_that_it_is_not_exact_is_no_mismatch():
    assert compared(output(digest="e", exact=False), output()) is Verdict.INEXACT
    assert compared(output(), output(digest="e", exact=False)) is Verdict.INEXACT
    pairs = [output(exact=False), output(digest="e")], [output(), output()]
    found = compare(*pairs, namespace="", tokens=np.arange(3))
    assert isinstance(found, Mismatch)
    assert found.sample == 1


def test_a_mismatch_names_its_prompt_without_showing_it():
    found = compared(output(), output(digest="e"))
    other = compare([output()], [output(digest="e")], namespace="m", tokens=np.arange(3))
    assert len(found.prompt) == 16
    assert found.prompt != other.prompt


@pytest.mark.parametrize(
    "wrong",
    [{"share": 1.5}, {"share": float("nan")}, {"every": -1}, {"concurrent": 0}, {"longest_s": 0}],
)
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(UserError):
        ShadowOptions(**wrong)


def test_the_sizes_of_a_cold_engine_keep_nothing_and_cost_what_is_said():
    capacity = Capacity(blocks=400, slots=3, blocks_per_sequence=12)
    sizes = RunnerOptions(capacity=capacity, snapshots=50, tiers=TierOptions())
    cold = cold_sizes(sizes)
    assert (cold.reuse, cold.ledger, cold.tiers, cold.snapshots) == (False, False, None, 0)
    assert cold.capacity == dataclasses.replace(capacity, blocks=36)
    pools = sum(cache_bytes(GEOMETRY, cold.capacity).values())
    assert 0 <= engine_bytes(GEOMETRY, cold) - pools < engine_bytes(GEOMETRY, sizes) - pools
    small = RunnerOptions(capacity=dataclasses.replace(capacity, blocks=20), snapshots=1)
    assert cold_sizes(small).capacity.blocks == 20
