r"""Replays a trace of requests against the schemes, before anything is changed.

    python scripts/replay.py data/traces/mooncake_synthetic_trace.jsonl.gz \
        --model v4-flash --hardware v6e-8 --html replay.html
    python scripts/replay.py record service.log.jsonl --out mine.jsonl.gz
    python scripts/replay.py check --json docs/benchmarks/replay.json

The directory, eviction and the planner are the real ones; bytes follow from the model's geometry,
seconds are modelled (``docs/replay.md``). A trace has Mooncake's schema (JSON lines) or Azure's
(CSV), plain or compressed with gzip or xz; ``record`` makes one from a log of token ids or hashes.
"""

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import os
import sys
from typing import Any

import command_line
import replay_check
import replay_tables

from hybridkv.errors import UserError
from hybridkv.replay import record
from hybridkv.replay.advice import advise
from hybridkv.replay.catalog import HardwareData, ModelData, known, load_hardware, load_model
from hybridkv.replay.html import require_plotly, write_report
from hybridkv.replay.policies import NAMED, parse_policy
from hybridkv.replay.pools import Budget, Limit
from hybridkv.replay.queueing import QueueOptions
from hybridkv.replay.run import Result, RunOptions, replay, summary
from hybridkv.replay.schemes import SchemeName
from hybridkv.replay.trace import BLOCK, Trace, read_trace

ALL = "all"
LONG = 1000
"""Requests from which on replays are worth a process each."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replay.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", metavar="TRACE", help="JSON lines or CSV, .gz and .xz too")
    parser.add_argument(
        "--model", default="v4-flash", help=f"{', '.join(known('models'))}, or JSON"
    )
    parser.add_argument(
        "--hardware", default="v6e-8", help=f"{', '.join(known('hardware'))}, or JSON"
    )
    parser.add_argument(
        "--scheme",
        choices=[*SchemeName, ALL],
        default=ALL,
        help="one, or all of them and a recommendation (the default)",
    )
    parser.add_argument(
        "--policy",
        default="default",
        help=f"snapshots: {', '.join(NAMED)}; parts such as ends+forks+8k; several with commas",
    )
    parser.add_argument(
        "--capacity-tokens",
        default=Limit.HARDWARE.value,
        metavar="N",
        help="blocks on all tiers together, or unlimited; without it what the hardware holds",
    )
    parser.add_argument("--snapshots", metavar="N", help="on all tiers together, or unlimited")
    parser.add_argument("--eviction", choices=["lru", "value"], default="value")
    parser.add_argument("--no-replay", action="store_true", help="states are copied or lost")
    parser.add_argument("--tile", type=int, default=BLOCK, help="tokens between resume positions")
    parser.add_argument("--slots", type=int, default=64, help="sequences at once")
    parser.add_argument("--tiles-per-turn", type=int, default=4, help="between two decode steps")
    parser.add_argument("--rate", type=float, default=1.0, help="times the trace's request rate")
    parser.add_argument("--margin", type=float, default=0.1, help="what to save to leave generic")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first N")
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    parser.add_argument("--html", metavar="FILE", help="write a report with plots here")
    return parser


def _count(text: str | None, name: str) -> int | None:
    if text is None or text == Limit.NONE.value:
        return None
    try:
        return int(float(text)) if "e" in text.lower() else int(text.replace("_", ""))
    except (ValueError, OverflowError) as error:
        raise UserError(f"--{name} is {text!r}: give a number or unlimited") from error


def budget_of(capacity: str, snapshots: str | None) -> Budget:
    """The budget of both options.

    Raises:
      UserError: one of them is no number.
    """
    if capacity in (Limit.HARDWARE.value, Limit.NONE.value):
        tokens: int | Limit = Limit(capacity)
    else:
        tokens = _count(capacity, "capacity-tokens") or 0
    return Budget(tokens=tokens, snapshots=_count(snapshots, "snapshots"))


def options_of(args: argparse.Namespace) -> list[RunOptions]:
    """What to replay, the first being what the JSON speaks of.

    Raises:
      UserError: an option can't be meant.
    """
    policies = [(name, parse_policy(name)) for name in args.policy.split(",")]
    base = RunOptions(
        eviction=args.eviction,
        budget=budget_of(args.capacity_tokens, args.snapshots),
        replay=not args.no_replay,
        tile=args.tile,
        queue=QueueOptions(slots=args.slots, tiles_per_turn=args.tiles_per_turn, rate=args.rate),
    )
    schemes = list(SchemeName) if args.scheme == ALL else [SchemeName(args.scheme)]
    chosen = []
    for scheme in sorted(schemes, key=lambda each: each is not SchemeName.HYBRID):
        for name, policy in policies if scheme is SchemeName.HYBRID else policies[:1]:
            chosen.append(dataclasses.replace(base, scheme=scheme, policy_name=name, policy=policy))
    return chosen


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def replay_all(
    trace: Trace, model: ModelData, hardware: HardwareData, chosen: list[RunOptions]
) -> list[Result]:
    """All replays of a trace, of a long one as many at once as there are cores."""
    jobs = min(len(chosen), _cores())
    if jobs == 1 or len(trace) < LONG:
        return [replay(trace, model, hardware, options) for options in chosen]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        runs = [pool.submit(replay, trace, model, hardware, options) for options in chosen]
        return [run.result() for run in runs]


def report_of(
    trace: Trace, model: ModelData, hardware: HardwareData, results: list[Result], margin: float
) -> dict[str, Any]:
    """The JSON of some replays: the first one's fields, and all of them under ``runs``."""
    runs = [summary(result) for result in results]
    first = {key: value for key, value in runs[0].items() if key != "timeline"}
    values = [
        {"of": of.name, **dataclasses.asdict(value)}
        for of in (model, hardware)
        for value in of.values
    ]
    report: dict[str, Any] = {
        "trace": {
            "name": trace.name,
            "lines": trace.lines,
            "requests": len(trace),
            "prompt_tokens": int(trace.prompt.sum()),
            "shares_prefixes": trace.shares,
            "skipped": [dataclasses.asdict(each) for each in trace.skipped],
        },
        "skipped_lines": len(trace.skipped),
        "model": model.name,
        "hardware": hardware.name,
        **first,
        "inputs": [
            *values,
            {
                "of": model.name,
                "name": "geometry",
                "value": first["bytes"]["a_token"],
                "unit": "bytes a token in blocks",
                "source": model.geometry_source,
            },
        ],
        "runs": runs,
    }
    by_scheme: dict[SchemeName, Result] = {}
    for result in results:
        by_scheme.setdefault(result.options.scheme, result)
    if {SchemeName.HYBRID, SchemeName.GENERIC} <= set(by_scheme):
        others = [r for r in results[1:] if r.options.scheme is SchemeName.HYBRID]
        advice = advise(by_scheme, others, margin)
        report["recommendation"] = {
            "headline": advice.headline,
            "scheme": str(advice.scheme),
            "policy": advice.policy,
            "adopt": advice.adopt,
            "reasons": list(advice.reasons),
            **advice.numbers,
        }
    return report


def run(args: argparse.Namespace) -> int:
    """Replays one trace and prints what came of it."""
    if args.requests is not None and args.requests < 1:
        raise UserError(f"--requests is {args.requests}: give at least 1")
    if not args.margin >= 0:
        raise UserError(f"--margin is {args.margin}: give 0 or more")
    if args.html:
        require_plotly()
    model, hardware, chosen = load_model(args.model), load_hardware(args.hardware), options_of(args)
    trace = read_trace(args.trace)
    replay_tables.print_skipped(trace.name, trace.skipped)
    if args.requests is not None:
        trace = trace.first(args.requests)
    results = replay_all(trace, model, hardware, chosen)
    report = report_of(trace, model, hardware, results, args.margin)
    replay_tables.print_report(report, trace)
    command_line.write_json(args.json, report)
    if args.html:
        write_report(args.html, report)
    return 0


def run_record(arguments: list[str]) -> int:
    """Makes a trace of a log."""
    parser = argparse.ArgumentParser(
        prog="replay.py record",
        description=record.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("log", metavar="LOG", help="JSON lines, .gz and .xz too")
    parser.add_argument("--out", required=True, metavar="TRACE", help="the trace, .gz to compress")
    args = parser.parse_args(arguments)
    made = record.record(args.log, args.out)
    replay_tables.print_skipped(args.log, made.skipped)
    print(f"{args.out}: {made.requests:,} requests, {made.blocks:,} different blocks")
    return 0


def main() -> int:
    """Replays, records or checks."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["record"]:
        return run_record(arguments[1:])
    if arguments[:1] == ["check"]:
        return replay_check.run(arguments[1:])
    return run(_parser().parse_args(arguments[1:] if arguments[:1] == ["run"] else arguments))


if __name__ == "__main__":
    command_line.run(main)
