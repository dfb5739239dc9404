"""The tables that ``replay.py`` prints."""

from collections.abc import Mapping, Sequence
from typing import Any

import command_line
from rich.console import Console

from hybridkv.replay.trace import Trace

WIDTH = 150
"""Columns of a table that is written to a file."""
MOST_SKIPPED = 20
"""Skipped lines that are shown; all are in the JSON."""


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table as wide as it needs where nobody's terminal is in the way."""
    console = Console()
    wide = console if console.is_terminal else Console(width=WIDTH)
    command_line.print_table(title, columns, rows, console=wide)


def print_skipped(name: str, skipped: Sequence[object]) -> None:
    """Every line that was skipped, up to ``MOST_SKIPPED``, and how many there are."""
    if not skipped:
        return
    for each in skipped[:MOST_SKIPPED]:
        print(f"{name}, {each}")
    more = len(skipped) - MOST_SKIPPED
    print(f"{len(skipped)} lines skipped" + (f", {more} of them not shown" if more > 0 else ""))


def print_report(report: Mapping[str, Any], trace: Trace) -> None:
    """All tables of a report."""
    runs = report["runs"]
    print(
        f"{trace.name}: {len(trace):,} requests, {int(trace.prompt.sum()):,} prompt tokens, "
        f"{int(trace.output.sum()):,} generated, {trace.arrival[-1]:,.0f} s; {report['model']} on "
        f"{report['hardware']}"
    )
    _hits(runs)
    _lost(runs)
    _times(runs)
    _memory(runs)
    advice = report.get("recommendation")
    if advice:
        print(f"recommendation: {advice['headline']}")
        for reason in advice["reasons"]:
            print(f"  - {reason}")


def _name(run: Mapping[str, Any]) -> str:
    return f"{run['scheme']}, {run['policy']}" if run["bytes"]["snapshot"] else run["scheme"]


def _hits(runs: Sequence[Mapping[str, Any]]) -> None:
    _table(
        "hits: shares of the prompt tokens, then of the ideal; restorable: without a replay",
        [
            "scheme, policy",
            "ideal",
            "found",
            "reused",
            "of ideal",
            "restorable",
            "lost whole",
            "refused",
        ],
        [
            (
                _name(run),
                f"{run['ideal_token_hit_ratio']:.2%}",
                f"{run['found_token_ratio']:.2%}",
                f"{run['token_hit_ratio']:.2%}",
                f"{run['reused_share']:.2%}",
                f"{run['restorable_share']:.2%}",
                f"{run['hits_lost_whole']:,}",
                f"{run['refused_requests']:,}",
            )
            for run in runs
        ],
    )


def _lost(runs: Sequence[Mapping[str, Any]]) -> None:
    causes = sorted({cause for run in runs for cause in run["lost_tokens"]})
    _table(
        "lost tokens by cause: ideal = reused + their sum",
        ["scheme, policy", "ideal", "reused", *causes],
        [
            (
                _name(run),
                f"{run['ideal_tokens']:,}",
                f"{run['reused_tokens']:,}",
                *(f"{run['lost_tokens'].get(cause, 0):,}" for cause in causes),
            )
            for run in runs
        ],
    )


def _times(runs: Sequence[Mapping[str, Any]]) -> None:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    _table(
        "time to first token, s, with the queue and on an idle server (modelled); "
        "utilisation above 98 %: the queue grows to the end",
        [
            "scheme, policy",
            "p50",
            "p95",
            "p99",
            "idle p50",
            "p95",
            "p99",
            "utilisation",
            "ms/request",
        ],
        [
            (
                _name(run),
                *(seconds(run[key][q]) for key in ("ttft_s", "ttft_alone_s") for q in QUANTILES),
                f"{run['utilisation']:.0%}",
                f"{1e3 * run['device_seconds_per_request']:,.0f}",
            )
            for run in runs
        ],
    )


QUANTILES = ("p50", "p95", "p99")


def _memory(runs: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for run in runs:
        for tier, kinds in run["peak_bytes"].items():
            places = run["places"][tier]
            by_kind = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in kinds.items())
            rows.append(
                (
                    _name(run),
                    tier,
                    f"{places['blocks'] * 512 / 1e6:,.1f}",
                    f"{places['snapshots']:,}",
                    by_kind,
                )
            )
    _table(
        "memory: places of each tier, and the most that was in them",
        ["scheme, policy", "tier", "M tokens", "snapshots", "peak, GB by kind"],
        rows,
    )
