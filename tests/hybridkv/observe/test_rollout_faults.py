"""A shadow engine that raises is its own fault: told, counted, judged, and seen by no client."""

import pytest
from scenarios.runs import CountingModel, tokens

from hybridkv.engine.engine import Engine, EngineOptions
from hybridkv.engine.requests import Finish, Request
from hybridkv.engine.runner import RunnerOptions
from hybridkv.errors import UserError
from hybridkv.observe.rollout import RollbackCause, RolloutStage
from hybridkv.observe.rollout_counters import Dropped
from hybridkv.observe.rollout_engines import MOST_FAULTS
from hybridkv.observe.rollout_file import Rollout
from hybridkv.observe.rollout_schemes import RolloutOptions, RolloutSchemes
from hybridkv.observe.shadow import ShadowOptions, cold_sizes
from hybridkv.observe.thresholds import Thresholds
from hybridkv.prefixes.identity import Identity
from hybridkv.state.batch import StepOptions
from hybridkv.state.capacity import Capacity

OFF, SHADOW, PERCENT, FULL = RolloutStage
TILE, SLOTS = 16, 2
WHO = {"by": "ada", "reason": "a test"}


def make_engine(*, cold: bool) -> Engine:
    capacity = Capacity(blocks=60, slots=SLOTS, blocks_per_sequence=20)
    sizes = RunnerOptions(capacity=capacity, snapshots=12)
    model = CountingModel()
    return Engine(
        model,
        StepOptions(tile=TILE),
        cold_sizes(sizes) if cold else sizes,
        EngineOptions(digests=True, probe=False),
        identity=Identity.of_geometry(model.geometry, weights="none", numerics="here"),
    )


@pytest.fixture(scope="module")
def compiled():
    return {"hybrid": make_engine(cold=False), "cold": make_engine(cold=True)}


@pytest.fixture
def engines(compiled):
    for engine in compiled.values():
        engine.reset()
    return dict(compiled)


def schemes(engines, stage, **thresholds) -> RolloutSchemes:
    rollout = Rollout()
    for to in (SHADOW, PERCENT, FULL):
        if rollout.state.stage is not stage:
            rollout.forward(to, percent=50.0 if to is PERCENT else None, **WHO)
    options = RolloutOptions(
        shadow=ShadowOptions(share=1.0), thresholds=Thresholds(**thresholds), refresh_s=0.0
    )
    return RolloutSchemes(engines, rollout, options)


def ask(seed: int) -> Request:
    return Request(prompt=tokens(40, seed), max_new_tokens=4)


def raising(monkeypatch, engine, where="advance", error=RuntimeError) -> None:
    def fail(*_, **__):
        raise error("planted")

    owner = engine if where == "submit" else engine.runner
    monkeypatch.setattr(owner, where, fail)


@pytest.mark.parametrize("where", ["tiles", "advance", "submit"])
def test_a_reuse_engine_that_raises_beside_is_rolled_back_and_touches_no_answer(
    engines, monkeypatch, caplog, where
):
    (alone,) = engines["cold"].run([ask(1)])
    run = schemes(engines, SHADOW)
    raising(monkeypatch, engines["hybrid"], where)
    (output,) = run.run([ask(1)])
    run.drain()
    run.step()
    assert (output.finish, output.tokens) == (Finish.LENGTH, alone.tokens)
    assert output.logits_digest == alone.logits_digest
    counters = run.counters
    assert (counters.faults, counters.mismatches) == ({"hybrid": 1, "cold": 0}, 0)
    assert (counters.dropped[Dropped.FAULT], counters.running) == (1, 0)
    assert counters.sampled == counters.compared + sum(counters.dropped.values()) == 1
    assert (run.rollout.state.stage, run.rollout.state.rolled_back) == (OFF, True)
    assert counters.rollbacks[RollbackCause.FAULT] == 1
    assert "reuse path raised 1 times, RuntimeError" in run.rollout.state.reason
    assert "planted" in caplog.text
    assert not engines["hybrid"].waiting
    assert engines["hybrid"].runner.free_slots == SLOTS


def test_a_cold_engine_that_raises_is_told_and_reuse_goes_on_unless_told_otherwise(
    engines, monkeypatch
):
    run = schemes(engines, FULL)
    with monkeypatch.context() as patch:
        raising(patch, engines["cold"])
        (output,) = run.run([ask(1)])
        run.drain()
    assert output.finish is Finish.LENGTH
    assert (run.stage, run.counters.faults["cold"], run.counters.compared) == (FULL, 1, 0)
    run.run([ask(2)])
    run.drain()
    assert run.counters.compared == 1, "it was emptied and compares again"
    run = schemes(engines, FULL, cold_faults=1)
    raising(monkeypatch, engines["cold"])
    run.run([ask(3)])
    run.drain()
    run.step()
    assert run.counters.rollbacks[RollbackCause.FAULT] == 1


def test_an_engine_that_raises_again_and_again_is_left_alone(engines, monkeypatch):
    run = schemes(engines, SHADOW, faults=None)
    steps = []

    def fail():
        steps.append(1)
        raise RuntimeError("planted")

    monkeypatch.setattr(engines["hybrid"], "step", fail)
    for seed in range(MOST_FAULTS + 2):
        run.run([ask(seed)])
        run.drain()
    assert len(steps) == MOST_FAULTS
    assert run.stage is OFF
    assert run.rollout.state.stage is SHADOW, "no threshold was set"


def test_one_that_cannot_be_emptied_is_left_alone_at_once(engines, monkeypatch):
    run = schemes(engines, SHADOW, faults=None)
    with monkeypatch.context() as patch:
        raising(patch, engines["hybrid"])
        patch.setattr(engines["hybrid"], "reset", lambda: 1 / 0)
        (output,) = run.run([ask(1)])
        run.drain()
    assert output.finish is Finish.LENGTH
    assert (run.stage, run.counters.faults["hybrid"]) == (OFF, 1)
    assert run.counters.dropped[Dropped.FAULT] == 1


def test_a_serving_engine_that_raises_raises_and_rolls_back_with_the_next_turn(
    engines, monkeypatch
):
    run = schemes(engines, FULL)
    with monkeypatch.context() as patch:
        raising(patch, engines["hybrid"])
        handle = run.submit(ask(1))
        with pytest.raises(RuntimeError, match="planted"):
            handle.result()
    run.reset()
    assert (handle.output.finish, run.waiting, run.counters.running) == (Finish.CANCELLED, 0, 0)
    run.step()
    assert run.counters.rollbacks[RollbackCause.FAULT] == 1
    (output,) = run.run([ask(1)])
    assert output.finish is Finish.LENGTH
    assert run.counters.served == {"hybrid": 1, "cold": 1}


def test_what_other_threads_are_told_adds_up_and_does_not_change(engines):
    run = schemes(engines, FULL)
    handle = run.submit(ask(1))
    run.step()
    told = run.told
    assert told.sampled == told.compared + sum(told.dropped.values()) + told.running == 1
    while not handle.done or run.counters.running:
        run.step()
    assert (told.compared, run.told.compared) == (0, 1)
    assert told.served is not run.counters.served


@pytest.mark.parametrize("name", ["faults", "cold_faults"])
def test_no_faults_at_all_cannot_be_a_threshold(name):
    with pytest.raises(UserError, match=f"{name} is 0"):
        Thresholds(**{name: 0})
