"""What a metric is, and short ways to write one down."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hybridkv.blocks.entries import Form, Tier
from hybridkv.kinds import Kind
from hybridkv.observe.numbers import Numbers
from hybridkv.tiers.durations import Durations

Labels = tuple[str, ...]
Sample = tuple[Labels, float | Durations]


class Type(enum.Enum):
    """As Prometheus names them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric."""

    name: str
    """With ``hybridkv_``; a counter's ends in ``_total``."""
    type: Type
    help: str
    """What it counts; of a ratio, numerator / denominator."""
    read: Callable[[Any], Iterable[Sample]]
    """From ``Numbers``; of a rollout's, from ``RolloutCounters``."""
    labels: Labels = ()
    row: str = ""
    """Of the dashboard."""
    unit: str = "short"
    """Of the dashboard's panel, in Grafana's words."""
    over: str = ""
    """A counter that the panel divides its rate by."""


def tier_name(tier: Tier) -> str:
    """As labels and events write it."""
    return tier.name.lower()


def form_name(form: Form) -> str:
    """As labels and events write it."""
    return form.name.lower()


def one(value: Callable[[Numbers], float]) -> Callable[[Numbers], Iterable[Sample]]:
    """Of a metric without labels."""
    return lambda numbers: [((), value(numbers))]


def duration(value: Callable[[Numbers], Durations]) -> Callable[[Numbers], Iterable[Sample]]:
    """Of a histogram without labels."""
    return lambda numbers: [((), value(numbers))]


def by_tier(
    value: Callable[[Numbers], Mapping[Tier, float]],
) -> Callable[[Numbers], Iterable[Sample]]:
    """One sample a tier."""
    return lambda numbers: [((tier_name(t),), n) for t, n in value(numbers).items()]


def by_kind(
    value: Callable[[Numbers], Mapping[Kind, float]],
) -> Callable[[Numbers], Iterable[Sample]]:
    """Every kind, so that what never happened is 0 and not missing."""
    return lambda numbers: [((k.value,), value(numbers).get(k, 0)) for k in Kind]


def pools(value: Callable[[Numbers, Form, Tier], float]) -> Callable[[Numbers], Iterable[Sample]]:
    """One sample a form and tier that have places."""
    return lambda numbers: [
        ((form_name(form), tier_name(tier)), value(numbers, form, tier))
        for form, tier in numbers.pools
    ]


def counter(
    name: str,
    help: str,
    read: Callable[[Numbers], Iterable[Sample]],
    *labels: str,
    row: str,
    unit: str = "cps",
    over: str = "",
) -> Metric:
    """A counter; ``over`` is another one's name without prefix and ending."""
    return Metric(
        name=f"hybridkv_{name}_total",
        type=Type.COUNTER,
        help=help,
        read=read,
        labels=labels,
        row=row,
        unit=unit,
        over=f"hybridkv_{over}_total" if over else "",
    )


def gauge(
    name: str,
    help: str,
    read: Callable[[Numbers], Iterable[Sample]],
    *labels: str,
    row: str,
    unit: str = "short",
) -> Metric:
    """A gauge."""
    return Metric(
        name=f"hybridkv_{name}",
        type=Type.GAUGE,
        help=help,
        read=read,
        labels=labels,
        row=row,
        unit=unit,
    )


def histogram(
    name: str,
    help: str,
    read: Callable[[Numbers], Iterable[Sample]],
    *labels: str,
    row: str,
) -> Metric:
    """A histogram of seconds."""
    return Metric(
        name=f"hybridkv_{name}_seconds",
        type=Type.HISTOGRAM,
        help=help,
        read=read,
        labels=labels,
        row=row,
        unit="s",
    )
