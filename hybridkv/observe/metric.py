"""What a metric is, and short ways to write one down."""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from hybridkv.blocks.entries import Form, Tier
from hybridkv.kinds import Kind
from hybridkv.observe.numbers import Numbers
from hybridkv.tiers.durations import Durations

Labels = tuple[str, ...]
Sample = tuple[Labels, float | Durations]
Read = TypeVar("Read")
"""What a metric is read from."""


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


@dataclasses.dataclass(frozen=True)
class MetricsOf(Generic[Read]):
    """Writes down the metrics that are read from one sort of numbers."""

    prefix: str
    """Of every name, with what parts it from the rest."""

    def one(self, value: Callable[[Read], float]) -> Callable[[Read], Iterable[Sample]]:
        """What is read for a metric without labels."""
        return lambda numbers: [((), value(numbers))]

    def counter(
        self,
        name: str,
        help: str,
        read: Callable[[Read], Iterable[Sample]],
        *labels: str,
        row: str,
        unit: str = "cps",
        over: str = "",
    ) -> Metric:
        """A counter; ``over`` is another one's name without prefix and ending."""
        return Metric(
            name=f"{self.prefix}{name}_total",
            type=Type.COUNTER,
            help=help,
            read=read,
            labels=labels,
            row=row,
            unit=unit,
            over=f"{self.prefix}{over}_total" if over else "",
        )

    def gauge(
        self,
        name: str,
        help: str,
        read: Callable[[Read], Iterable[Sample]],
        *labels: str,
        row: str,
        unit: str = "short",
    ) -> Metric:
        """A gauge."""
        full = f"{self.prefix}{name}"
        return Metric(
            name=full, type=Type.GAUGE, help=help, read=read, labels=labels, row=row, unit=unit
        )

    def histogram(
        self,
        name: str,
        help: str,
        read: Callable[[Read], Iterable[Sample]],
        *labels: str,
        row: str,
    ) -> Metric:
        """A histogram of seconds."""
        full = f"{self.prefix}{name}_seconds"
        return Metric(
            name=full, type=Type.HISTOGRAM, help=help, read=read, labels=labels, row=row, unit="s"
        )


def tier_name(tier: Tier) -> str:
    """As labels and events write it."""
    return tier.name.lower()


def form_name(form: Form) -> str:
    """As labels and events write it."""
    return form.name.lower()


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


_ENGINE = MetricsOf[Numbers]("hybridkv_")
one, counter, gauge, histogram = _ENGINE.one, _ENGINE.counter, _ENGINE.gauge, _ENGINE.histogram
"""Of an engine; see ``MetricsOf``."""
