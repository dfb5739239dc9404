r"""The metrics in Prometheus' text format, for an HTTP server that is somewhere else or is ours.

    engine's thread: turn, turn, turn ...            Reader (numbers.py): numbers of one moment
    a server's thread: GET /metrics --> exposition(engine) --^--> bytes

Everything here may be called from any thread, at any time. Nothing runs on the engine's thread but
the copying of numbers when somebody asked, which walks all entries.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from wsgiref.simple_server import WSGIServer

from hybridkv.engine.engine import Engine
from hybridkv.observe.metric import Metric, Type
from hybridkv.observe.numbers import Numbers, reader_of
from hybridkv.observe.rollout_counters import RolloutCounters
from hybridkv.observe.rollout_metrics import ROLLOUT_METRICS
from hybridkv.observe.table import AGE, METRICS
from hybridkv.tiers.durations import BOUNDS, Durations

try:
    import prometheus_client
    from prometheus_client import core, registry
except ImportError as error:
    raise ImportError("metrics need prometheus-client: pip install -e '.[observe]'") from error

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
"""Of ``exposition``."""
Engines = Engine | Mapping[str, Engine]
"""One engine, or several by name: their metrics then have the label ``engine``."""


class Collector(registry.Collector):
    """Reads engines when it is asked to, for a registry that has other collectors too."""

    def __init__(self, engines: Engines, *, wait_s: float = 2.0) -> None:
        """Registers a reader at each engine.

        Args:
          engines: whose metrics.
          wait_s: how long a scrape waits for a turn to end before it serves the last numbers.
        """
        named = engines if isinstance(engines, Mapping) else {"": engines}
        self._labelled = isinstance(engines, Mapping)
        self._readers = {name: reader_of(engine) for name, engine in named.items()}
        self._wait_s = wait_s

    def collect(self) -> Iterator[core.Metric]:
        """All metrics of all engines."""
        numbers = {name: each.read(wait_s=self._wait_s) for name, each in self._readers.items()}
        for metric in METRICS:
            yield self._family(metric, numbers)
        now = time.monotonic()
        age = core.GaugeMetricFamily(
            AGE, "Age of these numbers: 0 but where a turn takes long.", labels=self._names(())
        )
        for name, each in numbers.items():
            age.add_metric(self._values(name, ()), max(now - each.taken, 0.0))
        yield age

    def describe(self) -> Iterable[core.Metric]:
        """Nothing, so that registering reads nothing."""
        return ()

    def _names(self, labels: tuple[str, ...]) -> list[str]:
        return ["engine", *labels] if self._labelled else list(labels)

    def _values(self, name: str, labels: tuple[str, ...]) -> list[str]:
        return [name, *labels] if self._labelled else list(labels)

    def _family(self, metric: Metric, numbers: Mapping[str, Numbers]) -> "_Family":
        names = self._names(metric.labels)
        family = _FAMILIES[metric.type](metric.name, metric.help, labels=names)
        for name, each in numbers.items():
            for labels, value in metric.read(each):
                _add(family, self._values(name, labels), value)
        return family


_FAMILIES: "Mapping[Type, type[_Family]]" = {
    Type.COUNTER: core.CounterMetricFamily,
    Type.GAUGE: core.GaugeMetricFamily,
    Type.HISTOGRAM: core.HistogramMetricFamily,
}


_Family = core.CounterMetricFamily | core.GaugeMetricFamily | core.HistogramMetricFamily


def _add(family: "_Family", labels: list[str], value: float | Durations) -> None:
    if not isinstance(value, Durations):
        assert not isinstance(family, core.HistogramMetricFamily)
        family.add_metric(labels, float(value))
        return
    assert isinstance(family, core.HistogramMetricFamily)
    buckets, count = [], 0
    for bound, each in zip((*map(str, BOUNDS), "+Inf"), value.counts, strict=True):
        count += each
        buckets.append((bound, count))
    family.add_metric(labels, buckets, value.seconds)


class RolloutCollector(registry.Collector):
    """A rollout's own metrics, beside those of its engines."""

    def __init__(self, told: Callable[[], RolloutCounters]) -> None:
        """Reads nothing yet.

        Args:
          told: gives counters that nobody changes any more, such as ``RolloutSchemes.told``.
        """
        self._told = told

    def collect(self) -> Iterator[core.Metric]:
        """All of ``ROLLOUT_METRICS``, of one moment."""
        counters = self._told()
        for metric in ROLLOUT_METRICS:
            family = _FAMILIES[metric.type](metric.name, metric.help, labels=list(metric.labels))
            for labels, value in metric.read(counters):
                _add(family, list(labels), value)
            yield family

    def describe(self) -> Iterable[core.Metric]:
        """Nothing, so that registering reads nothing."""
        return ()


def exposition(
    engines: Engines, *, wait_s: float = 2.0, rollout: RolloutCounters | None = None
) -> bytes:
    """The metrics page, of ``CONTENT_TYPE``. From any thread, for an HTTP server's own handler.

    Args:
      engines: one, or several by name.
      wait_s: as in ``Collector``.
      rollout: of the rollout that chooses among them, where one does; see ``RolloutCollector``.

    Raises:
      TimeoutError: the very first turn takes longer than that.
    """
    own = prometheus_client.CollectorRegistry(auto_describe=False)
    own.register(Collector(engines, wait_s=wait_s))
    if rollout is not None:
        own.register(RolloutCollector(lambda: rollout))
    return prometheus_client.generate_latest(own)


class MetricsServer:
    """A server that runs until it is closed. Made by ``serve_metrics``."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server, self._thread = server, thread

    @property
    def url(self) -> str:
        """Where the page is."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/metrics"

    def close(self) -> None:
        """Ends it and gives the port back."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> "MetricsServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(engines: Engines, port: int, host: str = "127.0.0.1") -> MetricsServer:
    """Serves the metrics page over HTTP from a thread of its own.

    Args:
      engines: one, or several by name.
      port: 0 takes a free one, see ``MetricsServer.url``.
      host: bound to; the page has no authentication, so other hosts than this one are a decision.

    Raises:
      OSError: the port is taken.
    """
    own = prometheus_client.CollectorRegistry(auto_describe=False)
    own.register(Collector(engines))
    server, thread = prometheus_client.start_http_server(port, addr=host, registry=own)
    return MetricsServer(server, thread)
