"""A report of replays as one HTML file that needs no network: plots, tables, sources.

Plotly makes the plots; it is the extra ``report`` and is imported when a report is asked for.
"""

import html
import importlib
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from hybridkv.errors import UserError

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em;
       color: #1c2733; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: .25em .8em; border-bottom: 1px solid #d7dde3; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.advice { background: #eef5ee; border-left: 4px solid #3c8d40; padding: .6em 1em; }
small { color: #5b6773; }
"""
_GB = 1e9


def write_report(path: str | pathlib.Path, report: Mapping[str, Any]) -> None:
    """Writes the report of ``scripts/replay.py``'s JSON.

    Raises:
      UserError: plotly is not installed, or the file can't be written.
    """
    try:
        go, to_html, script = _plotly()
    except ImportError as error:
        raise UserError(
            "an HTML report needs plotly: pip install 'hybridkv[report]' (or plotly)"
        ) from error
    runs = report["runs"]
    figures = [
        _lines(go, runs, "Memory over time", "GB", lambda run: _memory(run)),
        _lines(
            go, runs, "Reused share of the prompt tokens so far", "share", lambda run: _hits(run)
        ),
        _lines(go, runs, "Time to first token", "s", lambda run: _first(run)),
        _losses(go, runs),
        _percentiles(go, runs),
    ]
    parts = [
        to_html(figure, full_html=False, include_plotlyjs=False, default_height=380)
        for figure in figures
    ]
    title = f"Replay of {html.escape(report['trace']['name'])}"
    page = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{title}</title><style>{STYLE}</style>",
        f"<script>{script}</script></head><body>",
        f"<h1>{title}</h1>",
        *_head(report),
        *parts,
        *_sources(report),
        "</body></html>",
    ]
    try:
        pathlib.Path(path).write_text("\n".join(page), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _plotly() -> tuple[Any, Any, str]:
    """The module of figures, the function that makes HTML of one, and the script that draws it."""
    names = ("graph_objects", "io", "offline")
    objects, io, offline = (importlib.import_module(f"plotly.{name}") for name in names)
    return objects, io.to_html, offline.get_plotlyjs()


def _name(run: Mapping[str, Any]) -> str:
    return str(run["scheme"]) + (f", {run['policy']}" if run["bytes"]["snapshot"] else "")


def _head(report: Mapping[str, Any]) -> list[str]:
    trace = report["trace"]
    parts = [
        f"<p>{trace['requests']:,} requests, {trace['prompt_tokens']:,} prompt tokens, "
        f"{len(trace['skipped'])} of {trace['lines']:,} lines skipped; "
        f"{html.escape(report['model'])} on {html.escape(report['hardware'])}.</p>"
    ]
    advice = report.get("recommendation")
    if advice:
        lines = "".join(f"<li>{html.escape(each)}</li>" for each in advice["reasons"])
        headline = html.escape(advice["headline"])
        parts.append(f"<div class='advice'><strong>{headline}</strong><ul>{lines}</ul></div>")
    rows = [
        [
            "",
            "ideal",
            "reused",
            "of the ideal",
            "restorable",
            "TTFT p50",
            "p95",
            "p99",
            "utilisation",
        ],
        *(
            [
                _name(run),
                f"{run['ideal_token_hit_ratio']:.2%}",
                f"{run['token_hit_ratio']:.2%}",
                f"{run['reused_share']:.1%}",
                f"{run['restorable_share']:.1%}",
                *(_seconds(run["ttft_s"][q]) for q in ("p50", "p95", "p99")),
                f"{run['utilisation']:.0%}",
            ]
            for run in report["runs"]
        ),
    ]
    return [*parts, _table(rows)]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    lines = ["<table><tr>" + "".join(f"<th>{html.escape(x)}</th>" for x in head) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{html.escape(x)}</td>" for x in row) + "</tr>" for row in body]
    return "".join(lines) + "</table>"


def _lines(go: Any, runs: Sequence[Mapping[str, Any]], title: str, unit: str, of: Any) -> Any:
    figure = go.Figure()
    for run in runs:
        for name, values in of(run).items():
            seconds = run["timeline"]["seconds"]
            figure.add_scatter(x=seconds, y=values, mode="lines", name=f"{_name(run)}{name}")
    figure.update_layout(
        title=title, xaxis_title="s", yaxis_title=unit, template="plotly_white", showlegend=True
    )
    return figure


def _memory(run: Mapping[str, Any]) -> dict[str, list[float]]:
    stored = run["timeline"]["stored_bytes"]
    return {f": {tier}": [x / _GB for x in values] for tier, values in stored.items()}


def _hits(run: Mapping[str, Any]) -> dict[str, list[float]]:
    return {"": run["timeline"]["hit_ratio_so_far"]}


def _first(run: Mapping[str, Any]) -> dict[str, list[float]]:
    return {"": run["timeline"]["ttft_s"]}


def _losses(go: Any, runs: Sequence[Mapping[str, Any]]) -> Any:
    figure = go.Figure()
    causes = sorted({cause for run in runs for cause in run["lost_tokens"]})
    for cause in causes:
        shares = [run["lost_tokens"].get(cause, 0) / max(run["prompt_tokens"], 1) for run in runs]
        figure.add_bar(x=[_name(run) for run in runs], y=shares, name=cause)
    figure.update_layout(
        title="Lost tokens by cause",
        barmode="stack",
        yaxis_title="share of the prompt tokens",
        template="plotly_white",
        showlegend=True,
    )
    return figure


def _percentiles(go: Any, runs: Sequence[Mapping[str, Any]]) -> Any:
    figure = go.Figure()
    for quantile in ("p50", "p95", "p99"):
        values = [run["ttft_s"][quantile] for run in runs]
        figure.add_bar(x=[_name(run) for run in runs], y=values, name=quantile)
    figure.update_layout(
        title="Time to first token by scheme", yaxis_title="s", template="plotly_white"
    )
    return figure


def _sources(report: Mapping[str, Any]) -> list[str]:
    rows = [["number", "value", "unit", "source"]]
    for each in report["inputs"]:
        rows.append([each["name"], f"{each['value']:,g}", each["unit"], each["source"]])
    return ["<h2>What is modelled, and from where</h2>", _table(rows)]
