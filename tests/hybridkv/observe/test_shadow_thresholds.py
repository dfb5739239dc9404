"""Windows of fixed size, and what in them makes a rollout go back by itself."""

import itertools

import numpy as np
import pytest

from hybridkv.errors import UserError
from hybridkv.observe.rollout import RollbackCause
from hybridkv.observe.thresholds import Judge, Side, Thresholds
from hybridkv.observe.windows import RecentSums, RecentValues
from hybridkv.prefixes.losses import Cause, Loss
from hybridkv.prefixes.plan import Miss

REUSE, SAFE = Side


def test_percentiles_are_of_the_last_values():
    window, values = RecentValues(100), np.random.default_rng(0).random(250)
    for count, value in enumerate(values, 1):
        window.note(value)
        last = np.sort(values[max(count - 100, 0) : count])
        assert len(window) == len(last)
        for share in (0.5, 0.99, 1.0):
            assert window.percentile(share) == last[int(np.ceil(share * len(last))) - 1]
    window.clear()
    assert (len(window), window.percentile(0.99)) == (0, 0.0)


def test_sums_are_of_the_last_rows():
    sums, rows = RecentSums(7, 2), np.random.default_rng(0).integers(0, 9, (20, 2))
    for count, row in enumerate(rows, 1):
        sums.note(row)
        assert sums.sums.tolist() == rows[max(count - 7, 0) : count].sum(axis=0).tolist()
    sums.clear()
    assert (len(sums), sums.sums.tolist()) == (0, [0, 0])


def miss(ideal: int | None, **lost: int) -> Miss:
    losses = tuple(Loss(cause=Cause(name), kind=None, tokens=count) for name, count in lost.items())
    return Miss(reason="a test's", kind=None, tokens=1000, ideal=ideal, losses=losses, seconds=0.0)


def test_the_first_mismatch_rolls_back_by_default():
    judge = Judge(Thresholds())
    for _ in range(50):
        judge.note_comparison(True)
    assert judge.verdict() is None
    judge.note_comparison(False)
    assert judge.verdict() == (RollbackCause.MISMATCH, "1 of the last 51 comparisons are unequal")


def test_mismatches_count_within_the_window():
    judge = Judge(Thresholds(mismatches=2, window=100, least_seconds=100))
    judge.note_comparison(False)
    for _ in range(99):
        judge.note_comparison(True)
    assert judge.verdict() is None
    judge.note_comparison(False)  # the first goes as this one comes
    assert judge.verdict() is None
    judge.note_comparison(False)
    assert judge.verdict()[0] is RollbackCause.MISMATCH


def seconds(judge: Judge, reuse: float, safe: float, *, count: int = 256, between: bool = False):
    for _ in range(count):
        for side, value in ((REUSE, reuse), (SAFE, safe)):
            (judge.note_between if between else judge.note_first)(side, value)
    return judge.verdict()


@pytest.mark.parametrize(
    ("between", "factor", "cause"),
    [(False, 2.0, RollbackCause.FIRST_TOKEN), (True, 1.5, RollbackCause.BETWEEN_TOKENS)],
)
def test_slower_than_the_factor_rolls_back_and_no_slower_does_not(between, factor, cause):
    slack = Thresholds().slack_s
    limit = factor * 0.1 + slack
    assert seconds(Judge(Thresholds()), limit - 1e-6, 0.1, between=between) is None
    found = seconds(Judge(Thresholds()), limit + 1e-6, 0.1, between=between)
    assert found[0] is cause
    assert f"more than {factor:g} times 0.1 in 256 of the safe path" in found[1]


def test_nothing_is_said_of_few_values_or_without_the_other_side():
    assert seconds(Judge(Thresholds()), 9.0, 0.1, count=199) is None
    judge = Judge(Thresholds())
    for _ in range(1000):
        judge.note_first(REUSE, 9.0)
    assert judge.verdict() is None


def test_an_absolute_limit_needs_no_other_side():
    judge = Judge(Thresholds(first_token_s=5.0))
    for _ in range(256):
        judge.note_first(REUSE, 9.0)
    assert judge.verdict()[0] is RollbackCause.FIRST_TOKEN


def test_one_in_a_hundred_may_be_slow():
    judge = Judge(Thresholds())
    for number in range(300):
        judge.note_first(SAFE, 0.1)
        judge.note_first(REUSE, 9.0 if number % 100 == 0 else 0.1)
    assert judge.verdict() is None


def test_percentiles_are_not_looked_at_after_every_value(monkeypatch):
    judge, looks = Judge(Thresholds()), itertools.count()
    real = RecentValues.percentile
    monkeypatch.setattr(
        RecentValues, "percentile", lambda self, share: (next(looks), real(self, share))[1]
    )
    for _ in range(1000):
        judge.note_first(SAFE, 0.1)
        judge.note_first(REUSE, 0.1)
        assert judge.verdict() is None
    assert next(looks) <= 2 * 1000 / 32


def test_misses_count_by_cause_over_the_ideal():
    judge = Judge(Thresholds(misses={Cause.NO_SNAPSHOT: 0.2}, least_prompts=10))
    for _ in range(9):
        judge.note_plan(miss(100, no_snapshot=50))
    judge.note_plan(miss(0))
    judge.note_plan(miss(None))
    judge.note_plan(None)
    assert judge.verdict() is None, "nine prompts had an ideal"
    judge.note_plan(miss(100, evicted=100))
    cause, why = judge.verdict()
    assert cause is RollbackCause.MISSES
    assert why == "45.0% of ideal tokens are lost to no_snapshot"
    assert judge.miss_shares()[Cause.EVICTED] == pytest.approx(0.1)


def test_misses_that_traffic_decides_are_in_no_sum():
    judge = Judge(Thresholds(miss_share=0.3, misses={}, least_prompts=1))
    judge.note_plan(miss(100, alignment=40, never_published=40, policy=20))
    assert judge.verdict() is None
    judge.note_plan(miss(100, evicted=50, load_too_slow=20))
    assert judge.verdict()[1] == (
        "35.0% of ideal tokens could not be restored: evicted 25.0%, load_too_slow 10.0%"
    )


def test_bytes_that_cannot_be_read_here_roll_back_by_default():
    judge = Judge(Thresholds())
    for number in range(100):
        judge.note_plan(miss(100, layout=100) if number < 2 else miss(100, evicted=100))
    assert judge.verdict()[0] is RollbackCause.MISSES


def test_another_stage_forgets_all_but_what_the_safe_path_takes():
    judge = Judge(Thresholds(misses={Cause.EVICTED: 0.1}, least_prompts=1))
    judge.note_comparison(False)
    judge.note_plan(miss(100, evicted=50))
    seconds(judge, 9.0, 0.1)
    judge.clear()
    assert judge.verdict() is None
    assert judge.p99()[RollbackCause.FIRST_TOKEN, SAFE] == 0.1
    assert judge.p99()[RollbackCause.FIRST_TOKEN, REUSE] == 0.0
    for _ in range(256):
        judge.note_first(REUSE, 9.0)
    assert judge.verdict()[0] is RollbackCause.FIRST_TOKEN


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": 50},
        {"mismatches": 0},
        {"least_seconds": 99},
        {"least_prompts": 2000},
        {"first_token_factor": 0.9},
        {"between_tokens_s": 0.0},
        {"misses": {Cause.EVICTED: 0.0}},
        {"miss_share": float("nan")},
        {"slack_s": -1.0},
    ],
)
def test_thresholds_that_cannot_be_meant_are_refused(wrong):
    with pytest.raises(UserError):
        Thresholds(**wrong)
