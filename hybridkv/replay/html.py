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
:root { color-scheme: light dark; --ink: #1c2733; --soft: #5b6773; --paper: #ffffff;
        --line: #d7dde3; --advice: #eef5ee; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9ee; --soft: #a3afba; --paper: #161b21; --line: #3a444e; --advice: #1d2b20; }
}
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; padding: 0 1em;
       color: var(--ink); background: var(--paper); }
h1 { overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { padding: .25em .6em; border-bottom: 1px solid var(--line); text-align: right;
         white-space: nowrap; vertical-align: top; }
th { white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child, td.text, th.text { text-align: left; }
td.text { white-space: normal; }
.advice { background: var(--advice); border-left: 4px solid #3c8d40; padding: .6em 1em; }
.note { color: var(--soft); }
.js-plotly-plot text { fill: var(--ink) !important; }
.js-plotly-plot .gridlayer path, .js-plotly-plot .zerolinelayer path {
  stroke: var(--line) !important; }
"""
COLOURS = {"hybrid": "#0072b2", "homogeneous": "#d55e00", "generic": "#009e73"}
"""By scheme, told apart by the colour-blind too, on white and on black."""
OTHERS = ("#cc79a7", "#e69f00", "#56b4e9", "#8a8f98")
"""Of more policies of one scheme, and of causes."""
DASHES = {"device": "solid", "host": "dash", "disk": "dot"}
QUANTILES = ("p50", "p95", "p99")
_GB = 1e9


def write_report(path: str | pathlib.Path, report: Mapping[str, Any]) -> None:
    """Writes the report of ``scripts/replay.py``'s JSON.

    Raises:
      UserError: plotly is not installed, or the file can't be written.
    """
    go, to_html, script = require_plotly()
    runs = report["runs"]
    figures = [
        _lines(go, runs, "Memory over time", "GB, logarithmic", _memory, log=True),
        _lines(go, runs, "Reused of all prompt tokens so far", "percent", _hits),
        _lines(go, runs, "Time to first token, with the queue", "seconds", _first),
        _losses(go, runs),
        _percentiles(go, runs, "ttft_s", "with the queue"),
        _percentiles(go, runs, "ttft_alone_s", "on an idle server"),
    ]
    config = {"displayModeBar": False, "responsive": True}
    parts = [
        figure
        if isinstance(figure, str)
        else to_html(
            figure, full_html=False, include_plotlyjs=False, default_height=380, config=config
        )
        for figure in figures
    ]
    title = f"Replay of {html.escape(report['trace']['name'])}"
    page = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
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


def require_plotly() -> tuple[Any, Any, str]:
    """What a report is made with; to be asked before a replay takes minutes.

    Raises:
      UserError: it is not installed.
    """
    try:
        return _plotly()
    except ImportError as error:
        raise UserError(
            "an HTML report needs plotly: pip install -e '.[report]' (or plotly)"
        ) from error


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
            *(f"{of} {q}, s" for of in ("TTFT", "idle") for q in QUANTILES),
            "utilisation",
        ],
        *(
            [
                _name(run),
                f"{run['ideal_token_hit_ratio']:.2%}",
                f"{run['token_hit_ratio']:.2%}",
                f"{run['reused_share']:.1%}",
                f"{run['restorable_share']:.1%}",
                *(_seconds(run[of][q]) for of in ("ttft_s", "ttft_alone_s") for q in QUANTILES),
                f"{run['utilisation']:.0%}",
            ]
            for run in report["runs"]
        ),
    ]
    over = [_name(run) for run in report["runs"] if run["overloaded"]]
    note = "TTFT: time to first token, with the queue, and on an idle server."
    if over:
        note += (
            f" The server cannot keep up under {html.escape('; '.join(over))}: with the queue, "
            "times there say how long the trace is."
        )
    return [*parts, _table(rows), f"<p class='note'>{note}</p>"]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _table(rows: Sequence[Sequence[str]], text: Sequence[int] = ()) -> str:
    """A table whose first row is its head; columns in ``text`` are of words."""

    def row(cells: Sequence[str], tag: str) -> str:
        kinds = [" class='text'" if at in text else "" for at in range(len(cells))]
        each = zip(cells, kinds, strict=True)
        inside = "".join(f"<{tag}{kind}>{html.escape(x)}</{tag}>" for x, kind in each)
        return f"<tr>{inside}</tr>"

    head, *body = rows
    lines = "".join([row(head, "th"), *(row(cells, "td") for cells in body)])
    return f"<div class='wide'><table>{lines}</table></div>"


def _figure(go: Any, title: str, unit: str, **layout: Any) -> Any:
    """An empty figure that shows on any paper."""
    figure = go.Figure()
    figure.update_layout(
        title=title,
        yaxis_title=unit,
        template="plotly_white",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 70, "r": 20, "t": 50, "b": 50},
        showlegend=True,
        **layout,
    )
    return figure


def _colours(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """One for each run: its scheme's, and others for more policies of one."""
    more, taken, colours = iter(OTHERS * len(runs)), set(), []
    for run in runs:
        first = run["scheme"] not in taken
        colours.append(COLOURS[run["scheme"]] if first else next(more))
        taken.add(run["scheme"])
    return colours


def _lines(
    go: Any, runs: Sequence[Mapping[str, Any]], title: str, unit: str, of: Any, log: bool = False
) -> Any:
    figure = _figure(go, title, unit, xaxis_title="seconds of the trace")
    if log:
        figure.update_yaxes(type="log", dtick=1)
    for run, colour in zip(runs, _colours(runs), strict=True):
        for tier, values in of(run).items():
            figure.add_scatter(
                x=run["timeline"]["seconds"],
                y=values,
                mode="lines",
                name=f"{_name(run)}: {tier}" if tier else _name(run),
                line={"color": colour, "dash": DASHES.get(tier, "solid"), "width": 2},
            )
    return figure


def _memory(run: Mapping[str, Any]) -> dict[str, list[float]]:
    stored = run["timeline"]["stored_bytes"]
    return {tier: [x / _GB for x in values] for tier, values in stored.items()}


def _hits(run: Mapping[str, Any]) -> dict[str, list[float]]:
    return {"": [100 * x for x in run["timeline"]["hit_ratio_so_far"]]}


def _first(run: Mapping[str, Any]) -> dict[str, list[float]]:
    return {"": run["timeline"]["ttft_s"]}


def _losses(go: Any, runs: Sequence[Mapping[str, Any]]) -> Any:
    causes = sorted({cause for run in runs for cause in run["lost_tokens"]})
    if not causes:
        return "<p>Nothing that had been computed before was computed again.</p>"
    figure = _figure(go, "Lost tokens by cause", "percent of the prompt tokens", barmode="stack")
    colours = (*OTHERS, *COLOURS.values()) * len(causes)
    for cause, colour in zip(causes, colours, strict=False):
        lost = [run["lost_tokens"].get(cause, 0) / max(run["prompt_tokens"], 1) for run in runs]
        figure.add_bar(
            x=[_name(run) for run in runs],
            y=[100 * share for share in lost],
            name=cause.replace("_", " "),
            marker_color=colour,
        )
    return figure


def _percentiles(go: Any, runs: Sequence[Mapping[str, Any]], of: str, where: str) -> Any:
    figure = _figure(go, f"Time to first token {where}", "seconds")
    for run, colour in zip(runs, _colours(runs), strict=True):
        values = [run[of][quantile] for quantile in QUANTILES]
        shown = ["" if value is None else f"{value:,.2f}" for value in values]
        figure.add_bar(
            x=QUANTILES,
            y=values,
            text=shown,
            textposition="outside",
            name=_name(run),
            marker_color=colour,
        )
    return figure


def _sources(report: Mapping[str, Any]) -> list[str]:
    rows = [["number", "value", "unit", "source"]]
    for each in report["inputs"]:
        rows.append([each["name"], f"{each['value']:,g}", each["unit"], each["source"]])
    return ["<h2>What is modelled, and from where</h2>", _table(rows, text=(2, 3))]
