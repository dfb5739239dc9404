"""Host and disk tiers: bytes a second, decoding while loads run, first tokens, plans and policies.

    moves     bytes of this model and of V4-Flash against plain copies and reads of the same bytes
    decode    tokens a second of a full batch while prefixes are loaded
    first     time to first token from every tier, and from disk after a restart
    plans     the planner's choices against the best in hindsight
    policies  bytes and first tokens by snapshot policy, on this model
    traces    the same on public traces with V4-Flash bytes: ``benchmark_policies``, a model

Everything is a ratio within one run; the parts are in files of their own.
"""

import argparse
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import benchmark_policies
import benchmark_tiers_moves
import benchmark_tiers_plans
import benchmark_tiers_requests
import command_line

from hybridkv.errors import UserError
from models.deepseek_v4.runtime import DeepseekV4Runtime

PARTS = ("moves", "decode", "first", "plans", "policies", "traces")
BARS: dict[str, tuple[str, str, float]] = {
    "flash_disk_cold": ("V4-Flash blocks, disk to host, page cache dropped, to a read", ">=", 0.8),
    "flash_disk_warm": ("the same, page cache warm", ">=", 0.8),
    "model_disk_cold": ("this model's blocks, disk to host, page cache dropped", ">=", 0.8),
    "model_disk_warm": ("the same, page cache warm", ">=", 0.8),
    "flash_host": ("V4-Flash blocks, host to device, to a copy", ">=", 0.8),
    "flash_host_unverified": ("the same without digests", ">=", 0.8),
    "model_host": ("this model's blocks, host to device, to a copy", ">=", 0.8),
    "model_host_unverified": ("the same without digests", ">=", 0.8),
    "decode_host": ("decoding slower while loads from host run, share", "<=", 0.10),
    "decode_disk": ("decoding slower while loads from disk run, share", "<=", 0.10),
    "first_host": ("first token from host, share of cold", "<=", 0.05),
    "first_disk": ("first token from disk after a restart, share of cold", "<=", 0.10),
    "compilations": ("compilations after warm-up", "<=", 0),
    "trace_gigabytes": ("V4-Flash, most GB a million tokens on the traces", "<=", 4.1),
    "trace_restore": ("the same policy's restore cost, most times the dense one's", "<=", 1.1),
}
"""What is asked: words, and a bound."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of the measurement."""
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="only these")
    parser.add_argument("--tokens", type=int, default=32000, help="tokens of a prompt of 'first'")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tile", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=256, help="blocks of 'moves'")
    parser.add_argument("--slots", type=int, default=8, help="requests that decode")
    parser.add_argument("--turns", type=int, default=8, help="turns of a window of 'decode'")
    parser.add_argument("--windows", type=int, default=11, help="windows of each sort")
    parser.add_argument(
        "--positions", type=int, nargs="+", default=[512, 2048, 8192], help="hits of 'plans'"
    )
    parser.add_argument(
        "--policy-tokens", type=int, default=8192, help="tokens of a prompt of 'policies'"
    )
    parser.add_argument("--folder", type=pathlib.Path, help="where stores are made; else temporary")


def _check(args: argparse.Namespace) -> None:
    for name in ("tokens", "rounds", "blocks", "slots", "turns", "windows", "policy_tokens"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1")
    if min(args.positions) < args.tile:
        raise UserError(f"--positions must be at least a tile, {args.tile} tokens")


def measure(runtime: DeepseekV4Runtime, args: argparse.Namespace) -> dict[str, Any]:
    """All parts that are asked for, with the bars.

    Raises:
      UserError: a size is out of its range.
    """
    _check(args)
    result: dict[str, Any] = {"tile": args.tile, "rounds": args.rounds, "parts": list(args.parts)}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        base = pathlib.Path(folder)
        if "moves" in args.parts:
            result["moves"] = {
                name: benchmark_tiers_moves.measure(geometry, base / name, args)
                for name, geometry in (
                    ("flash", benchmark_policies.packed_flash()),
                    ("model", runtime.geometry),
                )
            }
        if set(args.parts) & {"decode", "first", "plans", "policies"}:
            result |= _with_engine(runtime, base / "engine", args)
    if "traces" in args.parts:
        result["traces"] = _traces(benchmark_policies.measure())
    result["bars"] = judge(values_of(result))
    return result


def _with_engine(
    runtime: DeepseekV4Runtime, path: pathlib.Path, args: argparse.Namespace
) -> dict[str, Any]:
    """The parts that need an engine, in one."""
    lab = benchmark_tiers_requests.Lab(runtime, path, args)
    parts = {
        "first": benchmark_tiers_requests.measure_first_token,
        "decode": benchmark_tiers_requests.measure_decoding,
        "plans": benchmark_tiers_plans.measure_choices,
        "policies": benchmark_tiers_plans.measure_policies,
    }
    try:
        result = {name: part(lab) for name, part in parts.items() if name in args.parts}
        return result | {"compilations": lab.compilations}
    finally:
        lab.engine.close(timeout_s=benchmark_tiers_moves.TIMEOUT_S)


def _traces(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Of the trace model, what a policy stores and costs."""
    return {
        name: {
            "verdict": trace["verdict"],
            "policies": {
                policy: {
                    key: row[key]
                    for key in ("gb_per_million", "restore_ratio", "first_token_ratio_of_hits")
                }
                for policy, row in trace["policies"].items()
            },
        }
        for name, trace in measured["traces"].items()
    }


def values_of(result: Mapping[str, Any]) -> dict[str, float]:
    """What has a bar, of the parts that were measured."""
    values: dict[str, float] = {}
    for name, moves in result.get("moves", {}).items():
        for how in ("cold", "warm"):
            if moves["disk_to_host"][how] is not None:
                values[f"{name}_disk_{how}"] = moves["disk_to_host"][how]["ratio"]
        values[f"{name}_host"] = moves["host_to_device"]["ratio"]
        values[f"{name}_host_unverified"] = moves["host_to_device"]["unverified"]["ratio"]
    if "decode" in result:
        for name in ("host", "disk"):
            values[f"decode_{name}"] = result["decode"]["sides"][name]["falls_by"]
    if "first" in result:
        sides = result["first"]["sides"]
        values["first_host"] = sides["host"]["share_of_cold"]
        values["first_disk"] = sides["disk, restarted"]["share_of_cold"]
    if "compilations" in result:
        values["compilations"] = result["compilations"]
    verdicts = [trace["verdict"] for trace in result.get("traces", {}).values()]
    if verdicts:
        values["trace_gigabytes"] = max(each["gb_per_million"] for each in verdicts)
        values["trace_restore"] = max(each["restore_ratio"] for each in verdicts)
    return values


def judge(values: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """Values beside their bars, in the order of the bars."""
    return {
        name: {
            "value": values[name],
            "bar": bar,
            # Limits of bytes are kept exactly; rounding must not make one fail.
            "met": values[name] >= bar if sense == ">=" else values[name] <= bar + 1e-9,
        }
        for name, (_, sense, bar) in BARS.items()
        if name in values
    }


def report(result: Mapping[str, Any]) -> None:
    """Prints tables of the parts that were measured."""
    command_line.print_table(
        f"tiers on {result['device']}",
        ["what", "measured", "bar", "met"],
        [
            (words, f"{row['value']:.3g}", f"{sense} {bar:g}", "yes" if row["met"] else "NO")
            for name, (words, sense, bar) in BARS.items()
            if (row := result["bars"].get(name)) is not None
        ],
    )
    reports = {
        "moves": _report_moves,
        "decode": _report_decode,
        "first": _report_first,
        "plans": _report_plans,
        "policies": _report_policies,
        "traces": _report_traces,
    }
    for name, part in reports.items():
        if name in result:
            part(result[name])


def _report_moves(moves: Mapping[str, Any]) -> None:
    rows = []
    for name, measured in moves.items():
        lines = {
            "disk to host, page cache dropped": measured["disk_to_host"]["cold"],
            "disk to host, page cache warm": measured["disk_to_host"]["warm"],
            "host to device, staged": measured["host_to_device"],
            "the same without digests": measured["host_to_device"]["unverified"],
            "host to device, written to the cache": measured["through_mover"]["host"],
            "device to host": measured["device_to_host"],
        }
        rows += [
            (
                f"{name}: {what}",
                f"{line['gb_per_second']:.2f}",
                f"{line['plain_gb_per_second']:.2f}",
                f"{line['ratio']:.2f}x",
            )
            for what, line in lines.items()
            if line is not None
        ]
        for what, rate in (
            (
                "disk to the cache, through the mover",
                measured["through_mover"]["disk_gb_per_second"],
            ),
            ("stored, on the host and on disk", measured["store_gb_per_second"]),
        ):
            rows.append((f"{name}: {what}", f"{rate:.2f}", "-", "-"))
    sizes = ", ".join(
        f"{name}: {each['block_bytes']:,} a block, {each['snapshot_bytes']:,} a snapshot"
        for name, each in moves.items()
    )
    command_line.print_table(
        f"GB/s, digests on; bytes of {sizes}", ["what", "ours", "plain", "ratio"], rows
    )


def _report_decode(decode: Mapping[str, Any]) -> None:
    command_line.print_table(
        f"{decode['slots']} requests decode while {decode['loaded_tokens']} tokens are loaded over "
        "and over",
        ["loads from", "tokens/s", "turn, ms", "slower by", "loads", "entries brought"],
        [
            (
                name,
                f"{side['tokens_per_second']:.1f}",
                f"{side['turn_ms']:.2f}",
                f"{side['falls_by']:.1%}",
                side["loads_ended"],
                side["entries_brought"],
            )
            for name, side in decode["sides"].items()
        ],
    )


def _report_first(first: Mapping[str, Any]) -> None:
    command_line.print_table(
        f"time to first token of {first['tokens']} tokens; the engine of the restart took "
        f"{first['opening_seconds']:.1f} s to open",
        ["from", "reused", "seconds", "of cold"],
        [
            (name, side["reused"], f"{side['seconds']:.3f}", f"{side['share_of_cold']:.4f}")
            for name, side in first["sides"].items()
        ],
    )


def _report_plans(plans: Mapping[str, Any]) -> None:
    count = len(plans["cells"])
    command_line.print_table(
        f"choices of the planner: the best of {count} in {plans['best_chosen']}, regret "
        f"{plans['mean_regret']:.1%} on average, {plans['largest_regret']:.1%} at most, "
        f"{plans['regret_of_all']:.1%} of the time of all",
        ["blocks on", "hit", "snapshot", "chosen", "s", "expected", "regret"],
        [
            (
                cell["tier"],
                cell["position"],
                cell["snapshot"],
                cell["chosen"],
                f"{cell['chosen_seconds']:.3f}",
                f"{cell['expected_seconds']:.3f}",
                f"{cell['regret']:.0%}" + (f" to {cell['best']}" if cell["regret"] else ""),
            )
            for cell in plans["cells"]
        ],
    )


def _report_policies(policies: Mapping[str, Any]) -> None:
    rows = policies["policies"]
    whats = list(next(iter(rows.values()))["share_of_cold"])
    command_line.print_table(
        f"this model, prompts of {policies['tokens']} tokens, {policies['cold_seconds']:.2f} s "
        "cold; first tokens as a share of that",
        ["policy", "snapshots", "GB/M", *whats],
        [
            (
                name,
                row["snapshots"],
                f"{row['gb_per_million']:.2f}",
                *(f"{row['share_of_cold'][what]:.3f}" for what in whats),
            )
            for name, row in rows.items()
        ],
    )


def _report_traces(traces: Mapping[str, Any]) -> None:
    names = list(next(iter(traces.values()))["policies"])
    command_line.print_table(
        "V4-Flash on traces, a model: GB a million tokens, restore to dense, TTFT of hits to dense",
        ["policy", *traces],
        [
            (
                name,
                *(
                    f"{row['gb_per_million']:.2f} {row['restore_ratio']:.2f} "
                    f"{row['first_token_ratio_of_hits']:.3f}"
                    for trace in traces.values()
                    for row in [trace["policies"][name]]
                ),
            )
            for name in names
        ],
    )
