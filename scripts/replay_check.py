"""Whole traces against figures that another simulator gave: ``replay.py check``.

    ideal        unlimited capacity, a state everywhere
    lru          the same with fewer blocks, the least recently used going first
    restorable   unlimited capacity, states where a policy keeps them, without replays, as the
                 figures were made; then what is reused with them, of which the same is a floor
    tight        1,000 snapshots
    advice       what is recommended: short queries stay generic, long prompts with reuse do not

The figures are those of ``KNOWN``. Where one is a floor, the row says by how much ours is above.
The other simulator has one tier, so that ``ONE_TIER`` is taken to hold everything: with tiers,
states at forks follow what is on the device, which costs 0.03 points of one row.
"""

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import command_line

from hybridkv.prefixes.policy import DEFAULT
from hybridkv.replay.advice import advise
from hybridkv.replay.catalog import load_hardware, load_model
from hybridkv.replay.policies import parse_policy
from hybridkv.replay.pools import Budget, Limit
from hybridkv.replay.run import RunOptions, replay
from hybridkv.replay.schemes import SchemeName
from hybridkv.replay.trace import BLOCK, read_trace

FOLDER = pathlib.Path(__file__).parent.parent / "data" / "traces"
TRACES = {
    "conversation": "mooncake_conversation_trace.jsonl.gz",
    "synthetic": "mooncake_synthetic_trace.jsonl.gz",
    "agent": "cc_weka_merged_512.jsonl.gz",
}
ADVICE = {
    "code": ("azure2023_code.csv.gz", SchemeName.GENERIC),
    "agent": (TRACES["agent"], SchemeName.HYBRID),
}
"""The file, and the scheme that its lengths and its reuse speak for."""
CURVE = (1000, 2000, 5000, 10000, 20000, 30000, 50000)
"""Blocks."""


class Known(NamedTuple):
    """What the other simulator gave for a trace, percent."""

    ideal: float
    lru: tuple[float, ...]
    """At each size of ``CURVE``."""
    restorable: tuple[float, ...]
    """Of each of ``POLICIES``."""
    tight: float
    tokens: int
    """That its cache held for ``tight``."""


KNOWN = {
    "conversation": Known(
        37.3,
        (4.5, 5.5, 11.4, 21.6, 29.3, 33.2, 36.1),
        (93.7, 96.0, 94.7, 97.0, 99.1, 98.0),
        27.6,
        15_400_000,
    ),
    "synthetic": Known(
        65.0,
        (8.6, 14.9, 28.4, 43.1, 58.2, 63.5, 65.0),
        (78.2, 89.5, 88.6, 97.1, 99.4, 98.7),
        56.7,
        15_400_000,
    ),
    "agent": Known(
        96.2,
        (7.6, 29.1, 75.5, 92.6, 95.6, 96.2, 96.2),
        (99.8, 99.8, 99.9, 100.0, 100.0, 100.0),
        95.4,
        10_200_000,
    ),
}
POLICIES = ("ends", "ends+forks", "ends+32k", "ends+8k", "ends+2k", "ends+forks+8k")
SNAPSHOTS = 1000
ONE_TIER = 1e13
"""Bytes of a chip's memory."""
LRU_POINTS = 0.5
"""Within which the curve must lie."""
ROUNDED = 0.05
"""What rounding to one decimal hides."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One replay and what is known of it."""

    trace: str
    part: str
    label: str
    options: RunOptions
    known: float | None
    """Percent."""
    floor: bool = False
    """Whether more is as well."""
    copied: bool = True
    """Whether only stored states count, or replays too."""
    within: float = ROUNDED + 1e-6

    def ok(self, got: float) -> bool:
        """Whether ``got`` percent agrees."""
        if self.known is None:
            return True
        return got >= self.known - self.within and (self.floor or got <= self.known + self.within)


def _options(policy: str, capacity: int | Limit, **others: Any) -> RunOptions:
    snapshots = others.pop("snapshots", None)
    return RunOptions(
        policy_name=policy,
        policy=parse_policy(policy),
        budget=Budget(tokens=capacity, snapshots=snapshots),
        **others,
    )


def cases(trace: str, parts: Sequence[str]) -> list[Case]:
    """All of one trace."""
    known = KNOWN[trace]
    every: list[Case] = []

    def add(
        part: str, label: str, options: RunOptions, percent: float | None, *, copied: bool = True
    ) -> None:
        # The default also keeps a state for exact repetitions: more than the figure is its due.
        floor = part == "tight" or not copied or options.policy == DEFAULT
        within = LRU_POINTS if part == "lru" else ROUNDED + 1e-6
        every.append(
            Case(
                trace=trace,
                part=part,
                label=label,
                options=options,
                known=percent,
                floor=floor,
                copied=copied,
                within=within,
            )
        )

    add("ideal", "unlimited", _options("dense", Limit.NONE, eviction="lru"), known.ideal)
    for blocks, percent in zip(CURVE, known.lru, strict=True):
        label = f"{blocks * BLOCK / 1e6:.2f} M tokens"
        add("lru", label, _options("dense", blocks * BLOCK, eviction="lru"), percent)
    rows = dict(zip(POLICIES, known.restorable, strict=True))
    for policy, percent in rows.items():
        add("restorable", policy, _options(policy, Limit.NONE, replay=False), percent)
    replayed = {"default": rows["ends+forks"], "thinned": None, "none": None}
    for name, least in replayed.items():
        label = f"{name}, replays too"
        add("restorable", label, _options(name, Limit.NONE), least, copied=False)
    for eviction in ("lru", "value"):
        options = _options("default", known.tokens, snapshots=SNAPSHOTS, eviction=eviction)
        add("tight", f"default, {SNAPSHOTS:,} snapshots, {eviction}", options, known.tight)
    options = _options("default", known.tokens, snapshots=SNAPSHOTS, eviction="lru", replay=False)
    # Told and not judged: the floor is the default's, which replays.
    add("tight", f"default, {SNAPSHOTS:,} snapshots, lru, copied only", options, None)
    return [case for case in every if case.part in parts]


def measure(case: Case) -> dict[str, Any]:
    """One row."""
    result = replay(
        read_trace(FOLDER / TRACES[case.trace]),
        load_model("v4-flash"),
        dataclasses.replace(load_hardware("v6e-8"), hbm_bytes=ONE_TIER),
        case.options,
    )
    ratio = result.hit_ratio
    if case.part == "restorable":
        ratio = result.restorable_share if case.copied else result.reused_share
    lost = sum(result.cache.lost.values())
    balanced = result.ideal_tokens == result.reused_tokens + lost
    return {
        "trace": case.trace,
        "part": case.part,
        "what": case.label,
        "known_percent": case.known,
        "percent": 100 * ratio,
        "ideal_percent": 100 * result.ideal_ratio,
        "lost_tokens": dict(result.cache.lost),
        "every_lost_token_is_blamed": balanced,
        "ok": balanced and case.ok(100 * ratio),
        "cpu_seconds": result.seconds,
    }


def measure_advice(trace: str) -> dict[str, Any]:
    """What is recommended for one trace, with all that was told."""
    model, hardware = load_model("v4-flash"), load_hardware("v6e-8")
    requests = read_trace(FOLDER / ADVICE[trace][0])
    results = {
        name: replay(requests, model, hardware, RunOptions(scheme=name)) for name in SchemeName
    }
    told = advise(results)
    return {
        "trace": trace,
        "known": ADVICE[trace][1],
        "scheme": str(told.scheme),
        "headline": told.headline,
        "reasons": list(told.reasons),
        "numbers": told.numbers,
        "ok": told.scheme == ADVICE[trace][1],
    }


def check(names: Sequence[str], parts: Sequence[str], jobs: int) -> dict[str, Any]:
    """All rows of some traces, in ``jobs`` processes."""
    every = [case for name in names if name in TRACES for case in cases(name, parts)]
    asked = [name for name in names if name in ADVICE and "advice" in parts]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        told = [pool.submit(measure_advice, name) for name in asked]
        rows = list(pool.map(measure, every))
        advice = [each.result() for each in told]
    return {"rows": rows, "advice": advice, "ok": all(row["ok"] for row in (*rows, *advice))}


def report(result: Mapping[str, Any]) -> None:
    """One table a trace."""
    rows = result["rows"]
    for name in dict.fromkeys(row["trace"] for row in rows):
        command_line.print_table(
            f"{name}: percent of the prompt tokens, of the ideal for restorable",
            ["", "", "known", "ours", "by", "ok", "CPU s"],
            [
                (
                    row["part"],
                    row["what"],
                    "-" if row["known_percent"] is None else f"{row['known_percent']:.1f}",
                    f"{row['percent']:.2f}",
                    "-"
                    if row["known_percent"] is None
                    else f"{row['percent'] - row['known_percent']:+.2f}",
                    "yes" if row["ok"] else "NO",
                    f"{row['cpu_seconds']:.0f}",
                )
                for row in rows
                if row["trace"] == name
            ],
        )


def report_advice(result: Mapping[str, Any]) -> None:
    """Each recommendation with its reasons."""
    for row in result["advice"]:
        verdict = "as expected" if row["ok"] else f"NOT as expected: {row['known']}"
        print(f"{row['trace']}: {row['headline']} ({verdict})")
        for reason in row["reasons"]:
            print(f"  - {reason}")


def run(arguments: Sequence[str]) -> int:
    """Checks, prints, and writes where asked to; 1 where something disagrees."""
    parser = argparse.ArgumentParser(
        prog="replay.py check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parts = ("ideal", "lru", "restorable", "tight", "advice")
    names = tuple(dict.fromkeys((*TRACES, *ADVICE)))
    parser.add_argument("--trace", nargs="+", choices=names, default=list(names))
    parser.add_argument("--part", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    args = parser.parse_args(arguments)
    result = check(args.trace, args.part, max(args.jobs, 1))
    report(result)
    report_advice(result)
    command_line.write_json(args.json, result)
    return 0 if result["ok"] else 1
