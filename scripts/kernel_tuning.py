"""Fills the tables of ``pallas_kernels.tuning``: by what a compiler says, or by the clock.

    case x candidates --+--> compiler of a GPU that is not there --> spills, registers --+
                        +--> compiler of a TPU that is not there --> bundles, memory ----+
                        +--> the device that is here --> bits, seconds ------------------+--> table

``compile_for.py tune`` does the first, ``benchmark.py kernels --tune`` the second. A candidate
whose output differs in a bit from that of the defaults is never chosen by the clock.
"""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aot_gpu
import aot_process
import aot_tpu
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
    "attention/tpu": {"buffers": (2, 4, 8)},
    "attention/gather/tpu": {"picks": (32, 64, 128)},
    "index_scores/tpu": {"depth": (3, 6, 9)},
}
"""By operation, the values that are combined."""
GPU_CASES: Mapping[str, str] = {
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
TPU_CASES: Mapping[str, str] = {
    "attention/dense/65536/rows16/bfloat16": "attend",
    "attention/sparse/65536/bfloat16_words": "gather_picks",
    "index_scores/1048576/bfloat16": "pick_rows",
}
CASES: Mapping[str, Mapping[str, str]] = {"gpu": GPU_CASES, "tpu": TPU_CASES}
"""By kind of implementation."""
_OWN_OPERATION = {"gather_picks": "attention/gather/tpu"}
"""Programs with a table entry of their own, beside the operation's."""
WARP = 32
"""Threads of a warp."""
CLEAR = 0.95
"""Of the default's bundles: fewer count as a gain. The compiler does not see what copies wait for,
which is what more of them under way are for."""


def candidates(operation: str) -> list[Choice]:
    """All combinations."""
    values = CANDIDATES[operation]
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def operation_of(name: str, backend: str) -> str:
    """What tables call that which is tuned by a case."""
    program = CASES[backend].get(name, "")
    return _OWN_OPERATION.get(program) or tuned_operation(name, backend)


def asked(name: str, backend: str, kind: str | None = None) -> Asked:
    """What the kernel of a case asks a table for, on a kind of TPU if one is given."""
    case = build(name, backend)
    operation = operation_of(name, backend)
    chip = jax.sharding.AbstractDevice(device_kind=kind or "", platform="tpu", num_cores=1)
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=chip)
    context = jax.sharding.use_abstract_mesh(mesh) if kind else contextlib.nullcontext()
    with table.listening() as heard, context:
        # Through a new function: what jit has traced before is not traced again.
        jax.eval_shape(lambda *x: case.function(*x), *case.arguments)
    return next(x for x in heard if x.operation == operation)


def by_compiler(target: str, python: str | None) -> Table:
    """The table of a device that is not there, by what its compiler knows for sure.

    Raises:
      UserError: no compiler for it.
    """
    platform = target_of(target)[0].platform
    return by_spills(target, python) if platform == "cuda" else by_schedule(target, python)


def by_schedule(target: str, python: str | None) -> Table:
    """The table of a TPU: what clearly takes fewer bundles and fits, the default otherwise.

    Entries say the default too, so that a table shows what was looked at. SparseCores have no
    schedule; without them nothing is gathered there.
    """
    kind = aot_tpu.KINDS[target]
    entries, unseen = [], []
    for name, program in TPU_CASES.items():
        try:
            question = asked(name, "tpu", kind)
        except StopIteration:
            continue
        default = dataclasses.asdict(question.default)
        best = default
        if program in _OWN_OPERATION:
            unseen.append(question.operation)
        else:
            bundles = _bundles(name, program, question, target, python)
            fewest = min(bundles, key=lambda x: bundles[x])
            if bundles[fewest] < CLEAR * bundles[_text(default)]:
                best = json.loads(fewest)
        entries.append(Entry(operation=question.operation, key=dict(question.key), values=best))
    source = (
        f"static: compile_for.py tune --target {target} compiles all candidates; the default where "
        f"none takes under {CLEAR:.0%} of its bundles a trip, because the schedule does not see "
        "waits for copies"
    )
    if unseen:
        source += f"; {', '.join(unseen)}: no schedule is printed, the default is kept"
    return Table(
        device=kind, source=f"{source}; nothing has run on this device", entries=tuple(entries)
    )


def _bundles(
    name: str, program: str, question: Asked, target: str, python: str | None
) -> dict[str, float]:
    """Bundles a trip of the streaming loop by candidate; what does not compile is left out."""
    requests = [
        {"kind": "kernel", "name": name, "implementation": "tpu", "tried": tried}
        for tried in candidates(question.operation)
    ]
    found = {}
    for result in aot_process.compile_cases(target, requests, schedule=True, python=python):
        for kernel in result.get("kernels", ()):
            loop = kernel["streaming"] or kernel["longest"]
            if program in kernel["name"] and loop is not None:
                found[_text(result["tried"])] = float(loop["steady"])
    return found


def _text(choice: Choice) -> str:
    return json.dumps(choice, sort_keys=True)


def by_spills(target: str, python: str | None) -> Table:
    """The table of a GPU: what spills least, the default where that does.

    Spills are memory traffic that a compiler knows of for sure. What it cannot know, such as how
    many warps hide the latency of memory, is left at the default until a clock says otherwise.
    """
    entries = []
    for name, program in GPU_CASES.items():
        question = asked(name, "gpu")
        requests = [
            {"kind": "kernel", "name": name, "implementation": "gpu", "tried": tried}
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
    if here not in CASES:
        raise UserError(f"--tune: there is nothing to tune on {here}, only on a GPU or a TPU")
    entries, rows = [], []
    for name in args.cases or CASES[here]:
        if operation_of(name, here) not in CANDIDATES:
            raise UserError(f"--tune: nothing of {name} is tuned")
        question = asked(name, here)
        best, row = _fastest(name, question, here, args, timed)
        entries += _entry(question, best)
        rows.append({"case": name, "operation": question.operation, "best": best, **row})
    kind = jax.devices()[0].device_kind
    source = f"measured: benchmark.py kernels --tune, {args.rounds} rounds of {args.calls} calls"
    file = args.table or table.file_of(kind)
    table.write(Table(device=kind, source=source, entries=tuple(entries)), file)
    return {"tuned": rows, "table": str(file)}


def _fastest(
    name: str, question: Asked, here: str, args: argparse.Namespace, timed: Callable[..., Any]
) -> tuple[Choice, dict[str, Any]]:
    """The candidate with the lowest median; the defaults where none is faster."""
    default = dataclasses.asdict(question.default)
    case = build(name, here)
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
