"""The Grafana dashboard, made from the tables of metrics: one panel a metric.

    python -m hybridkv.observe.dashboard > docs/dashboards/hybridkv.json

No panel can name a metric that does not exist, and every metric is on some panel.
"""

import json
import sys
from typing import Any

from hybridkv.observe.metric import Metric, Type
from hybridkv.observe.rollout_metrics import ROLLOUT_METRICS
from hybridkv.observe.table import AGE, METRICS

SCHEMA_VERSION = 39
"""Of dashboards, as Grafana 10 and later write it; newer ones migrate it."""
WIDTH, HEIGHT, ACROSS = 8, 7, 3
"""Of a panel in the grid, which is 24 wide, and panels in a row."""
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_QUANTILES = (0.5, 0.95, 0.99)
_SELECT = '{job=~"$job"}'


def expressions(metric: Metric) -> list[tuple[str, str]]:
    """What a panel asks for: PromQL and the legend."""
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels)
    by = f" by ({', '.join(metric.labels)})" if metric.labels else ""
    name = f"{metric.name}{_SELECT}"
    if metric.type is Type.HISTOGRAM:
        buckets = f"{metric.name}_bucket{_SELECT}"
        inner = ", ".join(("le", *metric.labels))
        return [
            (
                f"histogram_quantile({q}, sum by ({inner}) (rate({buckets}[$__rate_interval])))",
                f"p{q * 100:g} {legend}".strip(),
            )
            for q in _QUANTILES
        ]
    if metric.type is Type.GAUGE:
        return [(name, legend or "now")]
    rate = f"sum{by} (rate({name}[$__rate_interval]))"
    if not metric.over:
        return [(rate, legend or "a second")]
    under = f"sum (rate({metric.over}{_SELECT}[$__rate_interval]))"
    return [(f"{rate} / on() group_left() {under}", legend or "share")]


def title(name: str) -> str:
    """A metric's name in words."""
    words = name.removeprefix("hybridkv_").removesuffix("_total").replace("_", " ")
    return words[0].upper() + words[1:]


def _panel(number: int, x: int, y: int, metric: Metric) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": title(metric.name),
        "description": metric.help,
        "datasource": dict(_SOURCE),
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": metric.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": dict(_SOURCE),
                "expr": query,
                "legendFormat": legend,
            }
            for at, (query, legend) in enumerate(expressions(metric))
        ],
    }


def _row(number: int, y: int, name: str) -> dict[str, Any]:
    return {
        "id": number,
        "type": "row",
        "title": name,
        "collapsed": False,
        "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
        "panels": [],
    }


AGE_METRIC = Metric(
    name=AGE,
    type=Type.GAUGE,
    help="Age of the numbers: 0 but where a turn takes longer than a scrape waits.",
    read=lambda numbers: (),
    row="Requests",
    unit="s",
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it: ``POST /api/dashboards/db`` or Dashboards > Import."""
    panels: list[dict[str, Any]] = []
    y, every = 0, (*METRICS, AGE_METRIC, *ROLLOUT_METRICS)
    for name in dict.fromkeys(metric.row for metric in every):
        panels.append(_row(len(panels) + 1, y, name))
        y += 1
        metrics = [metric for metric in every if metric.row == name]
        for at, metric in enumerate(metrics):
            place = (at % ACROSS) * WIDTH, y + at // ACROSS * HEIGHT
            panels.append(_panel(len(panels) + 1, *place, metric))
        y += -(-len(metrics) // ACROSS) * HEIGHT
    return {
        "uid": "hybridkv",
        "title": "hybridkv",
        "tags": ["hybridkv"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": []},
        "templating": {"list": [_datasource(), _job()]},
        "panels": panels,
    }


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "type": "datasource",
        "query": "prometheus",
        "label": "Data source",
    }


def _job() -> dict[str, Any]:
    query = "label_values(hybridkv_prompts_total, job)"
    return {
        "name": "job",
        "type": "query",
        "label": "Job",
        "datasource": dict(_SOURCE),
        "query": {"query": query, "refId": "job"},
        "definition": query,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "refresh": 2,
    }


def text() -> str:
    """The dashboard as it stands in ``docs/dashboards/hybridkv.json``."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
