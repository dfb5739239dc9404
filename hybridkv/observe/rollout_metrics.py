"""The metrics of a rollout, beside those of its engines: what ``RolloutCounters`` has, by name."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hybridkv.observe.metric import Metric, MetricsOf, Sample
from hybridkv.observe.rollout import RolloutStage
from hybridkv.observe.rollout_counters import RolloutCounters

ROW = "Rollout"
Read = Callable[[RolloutCounters], Iterable[Sample]]
_ROLLOUT = MetricsOf[RolloutCounters]("hybridkv_rollout_")
_one = _ROLLOUT.one
_counter = functools.partial(_ROLLOUT.counter, row=ROW)
_gauge = functools.partial(_ROLLOUT.gauge, row=ROW)


def _by_name(value: Callable[[RolloutCounters], Mapping[str, float]]) -> Read:
    return lambda counters: [((name,), n) for name, n in value(counters).items()]


def _by_value(value: Callable[[RolloutCounters], Mapping[Any, float]]) -> Read:
    return lambda counters: [((each.value,), n) for each, n in value(counters).items()]


ROLLOUT_METRICS: tuple[Metric, ...] = (
    _gauge(
        "stage",
        "1 at the stage that the rollout is at, 0 at the others.",
        lambda c: [((stage.value,), float(stage is c.state.stage)) for stage in RolloutStage],
        "stage",
    ),
    _gauge(
        "percent",
        "Requests that reuse is to serve, of 100.",
        _one(lambda c: c.state.percent),
    ),
    _gauge(
        "rolled_back",
        "1 while it is back by itself and no person has gone forward since.",
        _one(lambda c: float(c.state.rolled_back)),
    ),
    _counter(
        "rollbacks",
        "Times that it went back by itself, by cause.",
        _by_value(lambda c: c.rollbacks),
        "cause",
    ),
    _counter(
        "served", "Requests by the scheme that served them.", _by_name(lambda c: c.served), "scheme"
    ),
    _counter(
        "restarted",
        "Requests that a rollback moved to the safe path.",
        _one(lambda c: c.restarted),
    ),
    _counter(
        "eligible",
        "Requests that a fault of the reuse path could meet.",
        _one(lambda c: c.eligible),
    ),
    _counter("sampled", "Of those, requests that were to run twice.", _one(lambda c: c.sampled)),
    _gauge("running", "Requests that run twice now.", _one(lambda c: c.running)),
    _counter("compared", "Requests of which both runs were compared.", _one(lambda c: c.compared)),
    _counter(
        "mismatches",
        "Of those, requests whose bits differed from a cold run.",
        _one(lambda c: c.mismatches),
        over="compared",
    ),
    _counter(
        "dropped",
        "Sampled requests that were not compared, by reason.",
        _by_value(lambda c: c.dropped),
        "reason",
    ),
    _gauge(
        "coverage_ratio",
        "Compared / eligible requests.",
        _one(lambda c: c.coverage),
        unit="percentunit",
    ),
    _counter("faults", "Times that an engine raised.", _by_name(lambda c: c.faults), "scheme"),
    _counter(
        "turns",
        "Turns of engines that serve, and of those that serve nothing between them.",
        _by_name(lambda c: {"served": c.served_turns, "shadow": c.shadow_turns}),
        "role",
    ),
    _counter(
        "unwritten",
        "Times that a rollback could not be written to the state file.",
        _one(lambda c: c.unwritten),
    ),
)
