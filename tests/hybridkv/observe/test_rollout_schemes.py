"""What serves at each stage, what runs beside it and at what cost, and what a rollback does."""

import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bookkeeping import give_up
from scenarios.runs import GEOMETRY, CountingModel, tokens, used

from hybridkv.blocks.entries import Form, Tier
from hybridkv.engine.engine import Engine, EngineOptions
from hybridkv.engine.generated import Publish
from hybridkv.engine.requests import Finish, Request
from hybridkv.engine.runner import RunnerOptions
from hybridkv.engine.scheduler import Stage
from hybridkv.errors import UserError
from hybridkv.observe.rollout import RollbackCause, RolloutStage
from hybridkv.observe.rollout_counters import Dropped
from hybridkv.observe.rollout_file import Rollout, RolloutFile
from hybridkv.observe.rollout_handle import Diverged, UnderWay
from hybridkv.observe.rollout_schemes import RolloutOptions, RolloutSchemes
from hybridkv.observe.shadow import ShadowOptions, cold_sizes
from hybridkv.observe.thresholds import Side, Thresholds
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.losses import Cause
from hybridkv.state import leaf
from hybridkv.state.batch import StepOptions
from hybridkv.state.capacity import Capacity

OFF, SHADOW, PERCENT, FULL = RolloutStage
TILE, SLOTS = 16, 2
WHO = {"by": "ada", "reason": "a test"}
ALL = ShadowOptions(share=1.0)
LONG = 4 * TILE + 5


class Off(CountingModel):
    """Its logits are off by a number, and its choice by another, that can be changed later."""

    def __init__(self) -> None:
        super().__init__()
        self.off_by(0.0)

    def off_by(self, logits: float, token: int = 0) -> None:
        here = leaf.placement()
        values = np.float32(logits), np.int32(token)
        self.params = tuple(jax.device_put(value, here) for value in values)

    def tile_step(self, params, batch, cache, options):
        logits, cache = super().tile_step(params, batch, cache, options)
        return self._off(params, logits), cache

    def decode_step(self, params, batch, cache, options):
        logits, cache = super().decode_step(params, batch, cache, options)
        return self._off(params, logits), cache

    def _off(self, params, logits):
        likeliest = jnp.arange(logits.shape[-1]) == params[1]
        return logits + params[0] + jnp.where(likeliest, 1.0, 0.0)[None]


class Time:
    """Seconds that pass when a step is computed."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


TIME = Time()


def make_engine(*, numerics: str = "here", cold: bool = False, **options) -> Engine:
    capacity = Capacity(blocks=60, slots=SLOTS, blocks_per_sequence=20)
    sizes = RunnerOptions(capacity=capacity, snapshots=12)
    model = Off()
    return Engine(
        model,
        StepOptions(tile=TILE),
        cold_sizes(sizes) if cold else sizes,
        EngineOptions(**({"digests": True, "probe": False, "strict": True} | options)),
        identity=Identity.of_geometry(model.geometry, weights="none", numerics=numerics),
        clock=TIME,
        sleep=lambda seconds: None,
    )


@pytest.fixture(scope="module")
def compiled():
    made = {
        "hybrid": make_engine(),
        "cold": make_engine(cold=True),
        "generic": make_engine(numerics="other", cold=True, digests=False),
    }
    for engine in made.values():
        engine._guard.arm()  # what the others compiled is none of its compilations
    return made


@pytest.fixture
def engines(compiled):
    TIME.now = 100.0
    for engine in compiled.values():
        engine.runner.model.off_by(0.0)
        engine.reset()
    yield dict(compiled)
    for engine in compiled.values():
        assert not engine.waiting
        engine.drain()
        assert engine.runner.free_slots == SLOTS
        assert engine.counters.compilations == 0


def at(stage: RolloutStage, path=None, percent: float = 50.0, **more) -> Rollout:
    rollout = Rollout(path, **more)
    for to in (SHADOW, PERCENT, FULL):
        if rollout.state.stage is not stage:
            rollout.forward(to, percent=percent if to is PERCENT else None, **WHO)
    return rollout


def schemes(engines, stage, *, shadow=ALL, safe="cold", percent=50.0, path=None, **options):
    rollout = at(stage, path, percent)
    return RolloutSchemes(
        engines, rollout, RolloutOptions(shadow=shadow, **options), safe=safe, clock=TIME
    )


def ask(seed: int = 0, length: int = LONG, new: int = 3, **more) -> Request:
    return Request(prompt=tokens(length, seed), max_new_tokens=new, **more)


def served(schemes) -> dict[str, int]:
    return {name: count for name, count in schemes.counters.served.items() if count}


def accounted(schemes) -> bool:
    counters = schemes.counters
    dropped = sum(counters.dropped.values())
    return counters.sampled == counters.compared + dropped + counters.running


# Stages.


def test_off_serves_by_the_safe_path_alone(engines):
    run = schemes(engines, OFF)
    outputs = run.run([ask(1), ask(1)])
    assert served(run) == {"cold": 2}
    assert (run.counters.eligible, engines["hybrid"].waiting) == (0, 0)
    assert all(output.reused == 0 for output in outputs)


@pytest.mark.parametrize("safe", ["cold", "generic"])
def test_in_shadow_the_safe_path_serves_and_reuse_is_compared_with_a_cold_run(engines, safe):
    run = schemes(engines, SHADOW, safe=safe)
    found = engines["hybrid"].counters.reused_tokens
    for _ in range(2):
        handle = run.submit(ask(1))
        run.drain()
        assert (handle.output.finish, handle.output.reused) == (Finish.LENGTH, 0)
    assert served(run) == {safe: 2}
    assert engines["hybrid"].counters.reused_tokens - found == 4 * TILE
    assert (run.counters.eligible, run.counters.compared, run.counters.mismatches) == (2, 2, 0)
    assert run.counters.coverage == 1.0


def test_a_fault_in_shadow_is_seen_by_nobody(engines):
    run = schemes(engines, SHADOW, safe="generic")
    engines["hybrid"].runner.model.off_by(1.0)
    handle = run.submit(ask(1))
    run.drain()
    assert handle.output.finish is Finish.LENGTH
    assert run.rollout.state.stage is OFF
    assert run.counters.rollbacks[RollbackCause.MISMATCH] == 1
    run.run([ask(2)])
    assert served(run) == {"generic": 2}


def test_percent_serves_the_same_share_every_time(engines):
    requests = [ask(seed, length=TILE + 2, new=1) for seed in range(30)]
    taken = {}
    for percent in (60.0, 20.0):
        run = schemes(engines, PERCENT, percent=percent, shadow=ShadowOptions(share=0.0))
        taken[percent] = {n for n, r in enumerate(requests) if run._scheme_of(r) == "hybrid"}
    assert taken[20.0] < taken[60.0]
    assert 0 < len(taken[20.0]) < 15
    run.run(requests)
    assert served(run) == {"hybrid": len(taken[20.0]), "cold": 30 - len(taken[20.0])}


def test_only_what_reuse_serves_is_checked_in_percent(engines):
    run = schemes(engines, PERCENT)
    for seed in range(12):
        run.submit(ask(seed, length=TILE + 2, new=1))
        run.drain()
    assert 0 < served(run)["hybrid"] < 12
    assert run.counters.eligible == run.counters.compared == served(run)["hybrid"]


def test_cold_runs_find_nothing_and_leave_nothing(engines):
    run, cold = schemes(engines, FULL), engines["cold"]
    for _ in range(3):
        run.submit(ask(1))
        assert run.shadows()[0]["cold"].output.publish is Publish.NEVER
        run.drain()
    assert run.counters.sampled == 3
    assert (used(cold.runner), used(cold.runner, Form.SNAPSHOT)) == (0, 0)
    assert cold.runner.ledger is None
    assert cold.counters.prompts.hits == 0
    assert engines["hybrid"].counters.prompts.hits > 0


# Rolling back.


def test_the_first_affected_request_rolls_back_where_all_are_sampled(engines, tmp_path, caplog):
    path = tmp_path / "state.json"
    run = schemes(engines, FULL, path=path)
    for _ in range(2):
        run.submit(ask(1))
        run.drain()
    assert (run.stage, run.counters.compared) == (FULL, 2)
    engines["hybrid"].runner.model.off_by(1.0)
    run.submit(ask(1))
    run.drain()
    assert (run.stage, run.counters.mismatches) == (OFF, 1)
    assert RolloutFile(path).read().history[-1].cause is RollbackCause.MISMATCH
    assert "only logits differ; reuse 64 of 69 tokens" in run.rollout.state.reason
    assert "only logits differ" in str(run.mismatches[-1])
    warnings = [x.getMessage() for x in caplog.records if x.levelno == logging.WARNING]
    assert any("full -> off" in line for line in warnings)
    before = engines["hybrid"].counters.submitted
    run.run([ask(1), ask(2)])
    assert served(run) == {"hybrid": 3, "cold": 2}
    assert engines["hybrid"].counters.submitted == before


def test_it_stays_back_over_a_restart_until_a_person_goes_forward(engines, tmp_path):
    path = tmp_path / "state.json"
    first = schemes(engines, FULL, path=path)
    engines["hybrid"].runner.model.off_by(1.0)
    first.submit(ask(1))
    first.drain()
    engines["hybrid"].runner.model.off_by(0.0)
    again = RolloutSchemes(engines, Rollout(path), RolloutOptions(shadow=ALL), clock=TIME)
    again.run([ask(1)])
    assert (again.stage, served(again)) == (OFF, {"cold": 1})
    RolloutFile(path).change(lambda state: at(SHADOW).state)
    again.run([ask(1)])
    assert again.stage is OFF, "the file is looked at once a second"
    TIME.now += 1.0
    again.run([ask(1)])
    assert again.stage is SHADOW
    again.drain()
    assert (again.counters.compared, again.counters.mismatches) == (1, 0)


def test_wrong_bytes_are_forgotten_before_reuse_serves_again(engines):
    shadow = ShadowOptions(share=1.0, every=1)
    run = schemes(engines, FULL, shadow=shadow, under_way=UnderWay.FINISH)
    reuse = engines["hybrid"]
    run.run([ask(1), ask(1)])
    run.drain()
    assert used(reuse.runner) > 0
    slow = run.submit(ask(2, new=60))
    run.step()
    reuse.runner.model.off_by(1.0)
    bad = run.submit(ask(1))
    while run.rollout.state.stage is not OFF:
        run.step()
    assert bad.done
    assert not slow.done
    run.rollout.forward(SHADOW, **WHO)
    run.submit(ask(3))
    assert run.stage is OFF, "one is still under way there"
    run.drain()
    assert slow.output.finish is Finish.LENGTH
    assert run.stage is SHADOW
    assert used(reuse.runner) == 0
    reuse.runner.model.off_by(0.0)
    run.submit(ask(3))
    run.drain()
    assert run.stage is SHADOW, "what was seen before counts no more"


def test_what_was_stored_may_be_kept(engines):
    run = schemes(engines, FULL, forget=False)
    engines["hybrid"].runner.model.off_by(1.0)
    run.submit(ask(1))
    run.drain()
    assert run.stage is OFF
    assert used(engines["hybrid"].runner) > 0


@pytest.mark.parametrize(
    ("under_way", "restarted"),
    [(UnderWay.FINISH, set()), (UnderWay.UNSEEN, {1, 2}), (UnderWay.RESTART, {0, 1, 2})],
)
def test_nothing_under_way_is_lost(engines, under_way, restarted):
    """One is decoding and two have no token yet when the stage goes back."""
    run = schemes(engines, FULL, under_way=under_way, shadow=ShadowOptions(share=1.0, concurrent=1))
    handles = [run.submit(ask(0, new=20))]
    while not handles[0].output.pieces:
        run.step()
    handles += [run.submit(ask(seed, new=20)) for seed in (1, 2)]
    run.rollout.roll_back(RollbackCause.MISSES, "a test's")
    run.step()
    assert {n for n, handle in enumerate(handles) if handle.restarted} == restarted
    assert run.counters.restarted == len(restarted)
    run.drain()
    assert all(handle.output.finish is Finish.LENGTH for handle in handles)
    assert [len(handle.output.tokens) for handle in handles] == [20, 20, 20]
    assert accounted(run)


def restarted_after(run, engines, count: int, token: int):
    """A stream that gave so many tokens when its request was started over."""
    handle = run.submit(ask(1, length=3, new=9))
    stream = iter(handle)
    given = list(itertools.islice(stream, count))
    engines["cold"].runner.model.off_by(0.0, token)
    run.rollout.roll_back(RollbackCause.MISSES, "a test's")
    return handle, given, stream


def test_a_stream_goes_on_behind_what_it_gave(engines):
    run = schemes(engines, FULL, under_way=UnderWay.RESTART, shadow=ShadowOptions(share=0.0))
    handle, given, stream = restarted_after(run, engines, 4, token=0)
    assert given + list(stream) == handle.output.tokens
    assert (handle.restarted, len(handle.output.tokens)) == (True, 9)


def test_a_stream_says_where_what_it_gave_is_not_what_the_safe_path_gives(engines):
    run = schemes(engines, FULL, under_way=UnderWay.RESTART, shadow=ShadowOptions(share=0.0))
    handle, given, stream = restarted_after(run, engines, 4, token=7)
    with pytest.raises(Diverged, match="new token 0 was given out"):
        list(stream)
    assert handle.result().tokens == [7] * 9
    assert given == [0] * 4


def test_a_request_that_has_no_time_left_is_not_started_over(engines):
    run = schemes(engines, FULL, under_way=UnderWay.RESTART, shadow=ShadowOptions(share=0.0))
    handles = [run.submit(ask(1, new=9, timeout_s=limit)) for limit in (5.0, 50.0)]
    run.step()
    TIME.now += 10.0
    run.rollout.roll_back(RollbackCause.MISSES, "a test's")
    run.step()
    assert [handle.restarted for handle in handles] == [False, True]
    (task,) = handles[1].tasks
    assert task.request.timeout_s == pytest.approx(40.0)
    while run.waiting:
        TIME.now += 1.0
        run.step()
    assert handles[0].output.finish is Finish.TIMED_OUT
    assert handles[1].output.first_token_s > 0
    assert run.judge.p99()[RollbackCause.FIRST_TOKEN, Side.SAFE] == 0, "it has waited twice"


@pytest.mark.parametrize("stage", [SHADOW, FULL])
def test_losing_what_was_stored_rolls_back(engines, stage):
    thresholds = Thresholds(misses={Cause.EVICTED: 0.3}, least_prompts=2)
    run = schemes(engines, stage, thresholds=thresholds)
    allocator = engines["hybrid"].runner.allocator
    for _ in range(2):
        run.run([ask(1)])
        run.drain()
    assert run.stage is stage
    give_up(allocator, Tier.DEVICE)
    run.run([ask(1)])
    run.drain()
    assert run.stage is OFF
    assert run.counters.rollbacks[RollbackCause.MISSES] == 1


@pytest.mark.parametrize("where", ["tiles", "advance"])
def test_reuse_that_is_slower_than_the_safe_path_rolls_back(engines, monkeypatch, where):
    thresholds = Thresholds(least_seconds=100)
    run = schemes(engines, PERCENT, thresholds=thresholds, shadow=ShadowOptions(share=0.0))
    for name, seconds in (("hybrid", 0.5), ("cold", 0.1)):
        runner = engines[name].runner
        real = getattr(runner, where)

        def slow(work, real=real, seconds=seconds):
            TIME.now += seconds
            return real(work)

        monkeypatch.setattr(runner, where, slow)
    count, new = 0, 1 if where == "tiles" else 31
    while run.stage is PERCENT and count < 400:
        run.run([ask(count, length=2, new=new)])
        count += 1
    cause = {"tiles": RollbackCause.FIRST_TOKEN, "advance": RollbackCause.BETWEEN_TOKENS}[where]
    assert run.counters.rollbacks[cause] == 1
    assert 200 / max(new - 1, 1) <= count < 400 / max(new - 1, 1)
    assert "more than" in run.rollout.state.reason


def test_a_person_going_back_takes_reuse_out_at_once(engines):
    run = schemes(engines, FULL)
    handle = run.submit(ask(1))
    run.rollout.back(OFF, **WHO)
    run.drain()
    assert handle.output.finish is Finish.LENGTH
    assert handle.restarted
    assert run.counters.rollbacks == dict.fromkeys(RollbackCause, 0)
    assert run.counters.dropped[Dropped.STAGE] == 1
    run.run([ask(2)])
    assert served(run) == {"hybrid": 1, "cold": 1}


# What shadow runs may cost.


def test_more_than_may_run_twice_at_once_are_dropped_and_counted(engines):
    run = schemes(engines, FULL, shadow=ShadowOptions(share=1.0, concurrent=2))
    handles = [run.submit(ask(seed)) for seed in range(5)]
    assert (run.counters.running, run.counters.dropped[Dropped.BUSY]) == (2, 3)
    assert accounted(run)
    run.drain()
    assert all(handle.output.finish is Finish.LENGTH for handle in handles)
    assert (run.counters.compared, run.counters.running) == (2, 0)
    assert run.counters.coverage == pytest.approx(0.4)
    assert accounted(run)


@pytest.mark.parametrize("every", [1, 4, 0])
def test_an_engine_that_only_shadows_gets_one_turn_in_so_many(engines, every, monkeypatch):
    run = schemes(engines, FULL, shadow=ShadowOptions(share=1.0, every=every))
    turns = []
    for name, engine in engines.items():

        def step(name=name, real=engine.step):
            turns.append(name)
            return real()

        monkeypatch.setattr(engine, "step", step)
    run.submit(ask(1, length=12 * TILE, new=4))
    handle = run.submit(ask(2, length=3, new=60))
    while not handle.done:
        run.step()
    reuse, cold = turns.count("hybrid"), turns.count("cold")
    assert cold == (reuse // every if every else 0)
    assert run.counters.shadow_turns <= cold
    run.drain()
    assert run.counters.compared == 2


def test_shadow_runs_end_when_a_served_request_needs_their_slot(engines):
    """The cold engine serves too: who is served starts in the turn in which it would without."""
    run = schemes(engines, PERCENT, percent=50.0)
    by = {name: [] for name in ("hybrid", "cold")}
    for seed in range(20):
        by[run._scheme_of(ask(seed, new=30))].append(ask(seed, new=30))
    checked = [run.submit(request) for request in by["hybrid"][:2]]
    while any(runs["cold"].tasks[0].stage is not Stage.DECODING for runs in run.shadows()):
        run.step()
    assert engines["cold"].runner.free_slots == 0
    handle = run.submit(by["cold"][0])
    run.step()
    assert handle.tasks[0].sequence is not None
    assert (run.counters.dropped[Dropped.ROOM], run.counters.running) == (1, 1)
    run.drain()
    assert (run.counters.compared, engines["cold"].counters.preemptions) == (1, 0)
    assert all(each.output.finish is Finish.LENGTH for each in (*checked, handle))
    assert accounted(run)


def test_a_served_prompt_is_computed_before_those_of_shadow_runs(engines):
    run = schemes(engines, PERCENT, percent=50.0)
    long = {"length": 12 * TILE, "new": 1}
    by = {run._scheme_of(ask(seed, **long)): ask(seed, **long) for seed in range(20)}
    run.submit(by["hybrid"])
    run.step()
    shadow = run.shadows()[0]["cold"].tasks[0]
    handle = run.submit(by["cold"])
    run.step()
    before = shadow.sequence.computed
    while not handle.done:
        assert shadow.sequence.computed == before
        run.step()
    run.drain()
    assert run.counters.compared == 1


def test_no_shadow_run_begins_where_served_requests_have_all_slots(engines):
    run = schemes(engines, PERCENT, percent=50.0)
    by = {name: [] for name in ("hybrid", "cold")}
    for seed in range(20):
        by[run._scheme_of(ask(seed))].append(ask(seed))
    for request in (*by["cold"][:SLOTS], by["hybrid"][0]):
        run.submit(request)
    assert run.counters.dropped[Dropped.ROOM] == 1
    run.drain()


def test_a_shadow_run_that_takes_too_long_is_given_up(engines):
    run = schemes(engines, FULL, shadow=ShadowOptions(share=1.0, every=0, longest_s=5.0))
    run.submit(ask(1))
    TIME.now += 6.0
    run.drain()
    assert (run.counters.dropped[Dropped.LATE], run.counters.compared) == (1, 0)


def test_what_the_other_engine_does_not_take_is_dropped_or_served_by_the_safe_path(engines):
    run = schemes(engines, FULL)
    small = engines["cold"].runner
    whole, small.require_fits = small.require_fits, engines["cold"].runner.require_fits

    def refuses(tokens):
        if tokens > 30:
            raise UserError("too large")
        return whole(tokens)

    small.require_fits = refuses
    try:
        handle = run.submit(ask(1))
        run.drain()
    finally:
        del small.require_fits
    assert handle.output.finish is Finish.LENGTH
    assert run.counters.dropped[Dropped.REFUSED] == 1
    reuse = engines["hybrid"].runner
    reuse.require_fits = refuses
    try:
        run.run([ask(1)])
    finally:
        del reuse.require_fits
    assert served(run) == {"hybrid": 1, "cold": 1}
    with pytest.raises(UserError, match="capacity"):
        run.submit(ask(1, length=5000))


def test_a_client_that_leaves_takes_its_shadow_run_along(engines):
    run = schemes(engines, FULL)
    handle = run.submit(ask(1, new=40))
    run.step()
    assert handle.cancel()
    assert not handle.cancel()
    assert (handle.output.finish, run.waiting) == (Finish.CANCELLED, 0)
    assert run.counters.dropped[Dropped.CANCELLED] == 1
    assert not any(engine.waiting for engine in engines.values())


def test_an_output_that_says_it_is_not_exact_is_no_mismatch(engines):
    run = schemes(engines, FULL)
    engines["hybrid"].runner.model.off_by(1.0)
    handle = run.submit(ask(1))
    handle.output.exact = False
    run.drain()
    assert run.stage is FULL
    assert run.counters.dropped[Dropped.INEXACT] == 1


def test_samples_of_one_request_are_compared_each(engines):
    run = schemes(engines, FULL)
    handle = run.submit(ask(1, samples=2))
    run.drain()
    assert len(handle.outputs) == 2
    assert (run.counters.compared, run.counters.mismatches) == (1, 0)


# What cannot be meant.


def test_engines_that_cannot_be_compared_are_refused(engines):
    rollout = Rollout()
    for wrong, says in (
        ({"hybrid": engines["hybrid"]}, "no scheme 'cold'"),
        (engines | {"cold": engines["hybrid"]}, "can reuse"),
        (engines | {"cold": engines["generic"]}, "digests=True"),
    ):
        with pytest.raises(UserError, match=says):
            RolloutSchemes(wrong, rollout)
    with pytest.raises(UserError, match="its own safe path"):
        RolloutSchemes(engines, rollout, safe="hybrid")
    other, cold = engines["generic"], engines["cold"]
    options, other.options = other.options, cold.options
    try:
        with pytest.raises(UserError, match="another model or other steps"):
            RolloutSchemes(engines | {"cold": other}, rollout)
    finally:
        other.options = options


def test_text_needs_a_tokenizer_and_is_encoded_once_for_all(engines):
    with pytest.raises(UserError, match="pass text="):
        schemes(engines, FULL).submit(Request(prompt="abc"))

    class Letters:
        def encode(self, text):
            return np.array([ord(letter) % 60 for letter in text], np.int32)

    run = RolloutSchemes(engines, at(FULL), RolloutOptions(shadow=ALL), text=Letters(), clock=TIME)
    run.submit(Request(prompt="abc", max_new_tokens=2))
    run.drain()
    assert run.counters.compared == 1


def test_prompts_may_come_once(engines):
    run = schemes(engines, PERCENT)
    handle = run.submit(Request(prompt=iter(range(20)), max_new_tokens=2))
    run.drain()
    assert handle.output.prompt_tokens == 20
    with pytest.raises(UserError, match="integer"):
        run.submit(Request(prompt=[0.5], max_new_tokens=2))


def test_the_geometry_is_that_of_the_toy_model():
    assert GEOMETRY.block_tokens == TILE
