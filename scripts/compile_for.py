"""Compiles kernels and steps for TPUs and GPUs that are not there, and says what fits and how fast.

compile_for.py step decode --target v6e:8x8 --model v4-flash --slots 32 --context 65536
compile_for.py kernel attention/dense/65536 --target v6e
compile_for.py all --json docs/benchmarks/aot.json
compile_for.py table docs/benchmarks/aot.json
compile_for.py targets
compile_for.py tune --target h100

``make aot`` sets up the compilers (``.venv-tpu``, ``.venv-cuda``) and runs ``all``.
"""

import argparse
import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import aot_models
import aot_process
import aot_report
import aot_tables
import command_line
from aot_steps import StepCase
from rich.console import Console
from targets import GIB, TARGETS, Target, target_of

from hybridkv.errors import UserError
from models.deepseek_v4.cache_formats import CACHE_FORMATS
from pallas_kernels.tuning import table as tuning

WIDTH = 150
"""Of the tables, also where output goes to a file."""
ALL_TARGETS = ("v5e", "v5p", "v6e", "tpu7x", "h100", "b200")
_SIZES: dict[str, Any] = {"slots": 8, "context": 65536, "cells_per_block": 16, "tile": 2048}
ALL_STEPS: tuple[dict[str, Any], ...] = tuple(
    {"step": step, "model": model, **_SIZES}
    for model in ("small", "v4-flash-thin")
    for step in ("decode", "tile")
)
"""Steps of one device, in blocks of 16 rows at ratio 128, which all kernels take."""
TPU_STEPS: tuple[dict[str, Any], ...] = tuple(
    {"step": step, "model": "v4-flash-thin", **sizes, "cache_format": rows}
    for rows, sizes in (
        ("bfloat16_words", {"slots": 8, "context": 65536}),
        ("release_lanes", _SIZES | {"cells_per_block": 4, "tile": 512}),
    )
    for step in ("decode", "tile")
)
"""In blocks of 128 tokens, whose single rows have to be words there; and with packed rows, which
have to fill lanes, in blocks of 4 (with 2,048 tokens a tile tpu7x takes over ten minutes to compile
them)."""
FULL_STEP: dict[str, Any] = {
    "step": "decode",
    "model": "v4-flash",
    "slots": 32,
    "context": 65536,
    "cache_format": "bfloat16_words",
    "data": 8,
    "spread_weights": True,
    "sharded": True,
}
"""Four sequences and eight heads a chip; matrices in 64 parts."""
FULL_TARGET = "v6e:8x8"


def main() -> int:
    """Runs the command line; status 1 where something that was named does not compile or fit."""
    args = _parser().parse_args()
    if args.command == "targets":
        return _targets()
    if args.command == "tune":
        return _tune(args)
    if args.command == "table":
        print(aot_tables.markdown(_read(args.file)["results"]))
        return 0
    results: list[dict[str, Any]] = []
    for target, cases in _requests(args):
        results += aot_process.compile_cases(
            target, cases, schedule=not args.no_schedule, python=args.python
        )
        command_line.write_json(args.json, {"results": results})
    if getattr(args, "peer", None):
        for target in aot_process.PEER_TARGETS:
            chosen = [name for name in aot_process.PEER_CASES if args.only in name]
            results += aot_process.compile_peers(target, chosen, args.peer)
    if args.command == "all":  # tables need no more, and the docs keep the file
        for result in results:
            for kernel in result.get("kernels", ()) if result["kind"] == "kernel" else ():
                kernel.pop("loops", None)
    command_line.write_json(args.json, {"results": results})
    _print(results)
    good = all(x["ok"] and x.get("memory", {"fits": True})["fits"] for x in results)
    return 0 if good or args.command == "all" else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    kernel = commands.add_parser("kernel", help="kernels at V4-Flash sizes, with their schedules")
    kernel.add_argument("names", nargs="+", help="such as attention/dense/65536")
    kernel.add_argument("--implementation", choices=("tpu", "gpu", "reference"))
    kernel.add_argument(
        "--try",
        dest="tried",
        nargs="+",
        metavar="NAME=VALUE",
        default=[],
        help="instead of the tuning table's values, such as warps=4",
    )
    step = commands.add_parser("step", help="a whole step: does it compile, does it fit?")
    step.add_argument("step", choices=("tile", "decode"))
    _step_arguments(step)
    everything = commands.add_parser("all", help="what `make aot` compiles")
    everything.add_argument("--targets", default=",".join(ALL_TARGETS))
    everything.add_argument("--only", default="", help="kernels and steps whose name has this")
    everything.add_argument("--peer", help="interpreter that has tokamax, to compile its kernels")
    everything.add_argument("--full", action=argparse.BooleanOptionalAction, default=True)
    for each in (kernel, step):
        each.add_argument("--target", "--mesh", default="v6e", help="v6e; a slice: v6e:4x4")
    for each in (kernel, step, everything):
        each.add_argument("--json", help="write the results there")
        each.add_argument("--no-schedule", action="store_true", help="compile only, faster")
        each.add_argument("--python", help="interpreter that has the compiler")
    table = commands.add_parser("table", help="the tables of docs/benchmarks.md from a JSON file")
    table.add_argument("file", type=pathlib.Path)
    commands.add_parser("targets", help="what is known about each target")
    tune = commands.add_parser("tune", help="write a tuning table by what the compiler says")
    tune.add_argument("--target", required=True, help="such as v6e or h100")
    tune.add_argument("--table", type=pathlib.Path, help="write it there, not where it is read")
    tune.add_argument("--python", help="interpreter that has the compiler")
    return parser


def _step_arguments(step: argparse.ArgumentParser) -> None:
    step.add_argument(
        "--model", default="v4-flash", help=f"{', '.join(aot_models.NAMED)}, or a config.json"
    )
    step.add_argument("--layers", type=int, help="only the first so many")
    step.add_argument("--slots", type=int, default=8)
    step.add_argument("--context", type=int, default=65536, help="tokens of each slot")
    step.add_argument("--tile", type=int, default=128)
    step.add_argument("--lanes", type=int, default=1)
    step.add_argument("--cells-per-block", type=int, default=1)
    step.add_argument("--dtype", choices=("float32", "bfloat16"))
    step.add_argument("--cache-format", choices=sorted(CACHE_FORMATS))
    step.add_argument("--data", type=int, default=1, help="devices that slots are spread over")
    step.add_argument("--spread-weights", action="store_true", help="split them over those too")
    step.add_argument("--kernels", choices=("tpu", "gpu", "reference"))


def _requests(args: argparse.Namespace) -> list[tuple[str, list[dict[str, Any]]]]:
    """Cases by target.

    Raises:
      UserError: unknown targets or cases.
    """
    if args.command == "kernel":
        target, _ = target_of(args.target)
        chosen = args.implementation or _implementation(target)
        tried = _tried(args.tried)
        cases = [{**_kernel(name, chosen), "tried": tried} for name in args.names]
        return [(args.target, cases)]
    if args.command == "step":
        case = {field.name: getattr(args, field.name) for field in dataclasses.fields(StepCase)}
        return [(args.target, [{"kind": "step", "sharded": ":" in args.target, **case}])]
    requests = [(name, _all(name, args.only)) for name in args.targets.split(",")]
    if args.full and args.only in FULL_TARGET + "decode v4-flash":
        requests.append((FULL_TARGET, [{"kind": "step", **FULL_STEP}]))
    return [(name, cases) for name, cases in requests if cases]


def _all(name: str, only: str) -> list[dict[str, Any]]:
    import kernel_cases

    target, _ = target_of(name)
    chosen = _implementation(target)
    kernels = [
        _kernel(x, chosen if kernel_cases.exists(x, chosen) else "reference")
        for x in kernel_cases.names()
        # Words are for TPUs: a GPU moves any row.
        if only in x and not (target.platform == "cuda" and x.endswith("/bfloat16_words"))
    ]
    steps = [
        {"kind": "step", "sharded": False, **case}
        for case in ALL_STEPS + (TPU_STEPS if target.platform == "tpu" else ())
        if only in f"{case['step']} {case['model']}"
    ]
    return kernels + steps


def _kernel(name: str, implementation: str) -> dict[str, Any]:
    return {"kind": "kernel", "name": name, "implementation": implementation}


def _tried(given: Sequence[str]) -> dict[str, int]:
    values = {}
    for text in given:
        name, _, value = text.partition("=")
        if not name or not value.isdigit():
            raise UserError(f"--try {text}: give NAME=VALUE with a whole number, such as warps=4")
        values[name] = int(value)
    return values


def _implementation(target: Target) -> str:
    return {"tpu": "tpu", "cuda": "gpu"}[target.platform]


def _read(file: pathlib.Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {file}: {error}") from error


def _print(results: Sequence[dict[str, Any]]) -> None:
    kernels = [row for x in results if x["kind"] == "kernel" for row in aot_report.kernel_rows(x)]
    steps = [aot_report.step_row(x) for x in results if x["kind"] == "step"]
    programs = [row for x in results for row in aot_report.program_rows(x)]
    console = Console(width=max(Console().width, WIDTH))
    if kernels:
        command_line.print_table("kernels", aot_report.KERNEL_COLUMNS, kernels, console=console)
    if any(x["kind"] == "kernel" and x.get("kernels") for x in results):
        print(aot_report.NOTE)
    if programs:
        columns = aot_report.PROGRAM_COLUMNS
        command_line.print_table("programs of GPU kernels", columns, programs, console=console)
    if steps:
        command_line.print_table("steps", aot_report.STEP_COLUMNS, steps, console=console)
    for line in aot_report.reasons(results):
        print(line)


def _tune(args: argparse.Namespace) -> int:
    import kernel_tuning

    found = kernel_tuning.by_compiler(args.target, args.python)
    file = args.table or tuning.file_of(found.device)
    tuning.write(found, file)
    rows = [[x.operation, str(dict(x.key)), str(dict(x.values))] for x in found.entries]
    columns = ("operation", "where", "chosen")
    command_line.print_table(f"{found.device}: {file}", columns, rows)
    return 0


def _targets() -> int:
    rows = [
        [
            target.name,
            f"{target.hbm_bytes / GIB:.2f}",
            f"{target.hbm_bandwidth / 1e9:.0f}",
            f"{target.clock / 1e9:.2f}" if target.clock else "",
            target.cores,
        ]
        for target in TARGETS.values()
    ]
    columns = ("target", "HBM GiB", "GB/s", "GHz", "cores")
    command_line.print_table("targets, one device each", columns, rows)
    for target in TARGETS.values():
        print(f"{target.name}: {target.source}")
    return 0


if __name__ == "__main__":
    command_line.run(main)
