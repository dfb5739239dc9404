"""Fills the tables of ``pallas_kernels.tuning``: by what a compiler says, or by the clock.

    case x candidates --+--> compiler of a GPU that is not there --> spills, registers --+
                        +--> the device that is here --> bits, seconds ------------------+--> table

``compile_for.py tune`` does the first, ``benchmark.py kernels --tune`` the second. A candidate
whose output differs in a bit from that of the defaults is never chosen by the clock.
"""

import argparse
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aot_gpu
import aot_process
import command_line
import jax
import kernel_inputs
import numpy as np
from kernel_cases import build, tuned_operation
from targets import target_of

from hybridkv.errors import UserError
from pallas_kernels.tuning import table
from pallas_kernels.tuning.table import Asked, Entry, Key, Table

Choice = dict[str, int]
CANDIDATES: Mapping[str, Mapping[str, Sequence[int]]] = {
    "attention/gpu": {"warps": (4, 8, 16), "stages": (2, 3, 4)},
    "index_scores/gpu": {"rows": (64, 128), "warps": (4, 8), "stages": (2, 3, 4)},
    "packing/encode/gpu": {"rows": (8, 16, 32), "warps": (2, 4)},
    "packing/decode/gpu": {"rows": (8, 16, 32), "warps": (2, 4)},
    "moves/gpu": {"part_bytes": (4096, 8192, 16384), "warps": (4, 8)},
}
"""By operation, the values that are combined."""
CASES: Mapping[str, str] = {
    "attention/dense/65536/rows16/bfloat16": "attend",
    "attention/dense/65536/rows16/fp8_rope16": "attend",
    "attention/dense/65536/rows16/float32": "attend",
    "index_scores/65536/bfloat16": "score_rows",
    "index_scores/65536/mxfp4": "score_rows",
    "index_scores/65536/fp8_index": "score_rows",
    "index_scores/65536/float32": "score_rows",
    "packing/encode/fp8_rope16": "encode_rows",
    "packing/decode/fp8_rope16": "decode_rows",
    "moves/gather": "gather_blocks",
}
"""What is tuned, at the sizes of V4-Flash, and the program that is launched with the values."""
WARP = 32
"""Threads of a warp."""
BACKEND = "gpu"


def candidates(operation: str) -> list[Choice]:
    """All combinations."""
    values = CANDIDATES[operation]
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def asked(name: str) -> Asked:
    """What the kernel of a case asks a table for."""
    case = build(name, BACKEND)
    operation = tuned_operation(name, BACKEND)
    with table.listening() as heard:
        # Through a new function: what jit has traced before is not traced again.
        jax.eval_shape(lambda *x: case.function(*x), *case.arguments)
    return next(x for x in heard if x.operation == operation)


def by_compiler(target: str, python: str | None) -> Table:
    """The table of a GPU that is not there: what spills least, the default where that does.

    Spills are memory traffic that a compiler knows of for sure. What it cannot know, such as how
    many warps hide the latency of memory, is left at the default until a clock says otherwise.

    Raises:
      UserError: not a GPU, or no compiler for it.
    """
    if target_of(target)[0].platform != "cuda":
        raise UserError(f"tune: {target} is no GPU, whose compiler counts registers")
    entries = []
    for name, program in CASES.items():
        question = asked(name)
        requests = [
            {"kind": "kernel", "name": name, "implementation": BACKEND, "tried": tried}
            for tried in candidates(question.operation)
        ]
        results = aot_process.compile_cases(target, requests, schedule=True, python=python)
        found = [
            (result["tried"], launched)
            for result in results
            for launched in result.get("programs", ())
            if launched["name"] == program
        ]
        best, _ = min(found, key=lambda x: _cost(x[0], x[1], question.default))
        entries += _entry(question, best)
    source = (
        f"static: the fewest bytes spilled, as counted by compile_for.py tune --target {target}; "
        "nothing has run on this device"
    )
    return Table(device=aot_gpu.device_kind(target), source=source, entries=tuple(entries))


def _cost(tried: Choice, launched: Mapping[str, Any], default: Any) -> tuple[int, int]:
    """Bytes that all threads of a program spill, then how far it is from the default."""
    warps = tried.get("warps", default.warps)
    values = dataclasses.asdict(default)
    changed = sum(value != values[name] for name, value in tried.items())
    return launched["spill_bytes"] * WARP * warps, changed


def _entry(question: Asked, best: Choice) -> list[Entry]:
    """Only what is not the default."""
    default = dataclasses.asdict(question.default)
    values: Key = {name: value for name, value in best.items() if default[name] != value}
    entry = Entry(operation=question.operation, key=dict(question.key), values=values)
    return [entry] if values else []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``benchmark.py kernels`` that are about tuning."""
    parser.add_argument(
        "--tune", action="store_true", help="measure candidates here and write the device's table"
    )
    parser.add_argument("--table", type=pathlib.Path, help="write it there instead")


def by_clock(args: argparse.Namespace, timed: Callable[..., dict[str, list[float]]]) -> Any:
    """Measures all candidates on the device that is here and writes its table.

    Args:
      args: with ``rounds``, ``calls``, ``seed``, ``cases`` and ``table``.
      timed: seconds a call of each side by rounds, the sides taking turns.

    Raises:
      UserError: nothing is tuned on this platform, or a case that is not.
    """
    here = jax.default_backend()
    if here != BACKEND:
        raise UserError(f"--tune: there is nothing to tune on {here}, only on a GPU")
    entries, rows = [], []
    for name in args.cases or CASES:
        if tuned_operation(name, BACKEND) not in CANDIDATES:
            raise UserError(f"--tune: nothing of {name} is tuned")
        question = asked(name)
        best, row = _fastest(name, question, args, timed)
        entries += _entry(question, best)
        rows.append({"case": name, "operation": question.operation, "best": best, **row})
    kind = jax.devices()[0].device_kind
    source = f"measured: benchmark.py kernels --tune, {args.rounds} rounds of {args.calls} calls"
    file = args.table or table.file_of(kind)
    table.write(Table(device=kind, source=source, entries=tuple(entries)), file)
    return {"tuned": rows, "table": str(file)}


def _fastest(
    name: str, question: Asked, args: argparse.Namespace, timed: Callable[..., Any]
) -> tuple[Choice, dict[str, Any]]:
    """The candidate with the lowest median; the defaults where none is faster."""
    default = dataclasses.asdict(question.default)
    case = build(name, BACKEND)
    arguments = kernel_inputs.concrete(case, name.partition("/")[0], args.seed)
    sides: dict[str, Callable[[], Any]] = {}
    choices: dict[str, Choice] = {}
    refused = other_bits = 0
    expected: Any = None
    for tried in [default, *candidates(question.operation)]:
        run = functools.partial(_compiled(case, question.operation, tried), *arguments)
        try:
            bits = _bits(run())
        except (NotImplementedError, jax.errors.JaxRuntimeError):
            refused += 1  # too much memory, for one
            continue
        expected = bits if expected is None else expected
        if not all(map(np.array_equal, bits, expected)):
            other_bits += 1
            continue
        sides[str(tried)], choices[str(tried)] = run, tried
    seconds = {x: float(np.median(y)) for x, y in timed(sides, args.rounds, args.calls).items()}
    if not seconds:
        raise UserError(f"--tune: {name} runs with no candidate")
    best = min(seconds, key=lambda x: seconds[x])
    first = seconds.get(str(default), float("nan"))
    row = {"gain": first / seconds[best], "refused": refused, "other_bits": other_bits}
    return choices[best], {**row, "microseconds": 1e6 * seconds[best]}


def _compiled(case: Any, operation: str, tried: Choice) -> Callable[..., Any]:
    @jax.jit
    def run(*arguments: Any) -> Any:
        with table.trying(operation, **tried):
            return case.function(*arguments)

    return run


def _bits(output: Any) -> list[np.ndarray]:
    return [np.asarray(x).view(np.uint8) for x in jax.tree.leaves(output)]


def report(result: Mapping[str, Any]) -> None:
    """Prints what was chosen by the clock."""
    command_line.print_table(
        f"tuned on {result['device']}, written to {result['table']}",
        ["case", "chosen", "us", "gain", "refused", "other bits"],
        [
            (
                row["case"],
                ", ".join(f"{name} {value}" for name, value in row["best"].items()),
                f"{row['microseconds']:.1f}",
                f"{row['gain']:.2f}",
                row["refused"],
                row["other_bits"],
            )
            for row in result["tuned"]
        ],
    )
