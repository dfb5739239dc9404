"""Each kernel operation on the device that is there: how far from float64, and how fast.

    case --real inputs--> each implementation --> output  --> worst error to float64
                                    |
                                    +--> seconds, in turn with a plain copy of as many bytes

The copy is an XLA program that reads and writes arrays whose sizes are the operation's traffic, so
a ratio of 1 is the speed of memory. What is timed is many calls that are dispatched one after the
other, so that a call costs what the device needs for it.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import kernel_checks
import kernel_inputs
import kernel_peer
import kernel_tuning
import numpy as np
from kernel_cases import KernelCase, Traffic, build

from hybridkv.errors import UserError

QUICK = (
    "attention/dense/65536/rows16",
    "attention/sparse/65536",
    "attention/window",
    "index_scores/65536",
    "moves/gather",
    "moves/scatter",
    "compression/overlap",
    "compression/plain",
    "packing/encode/fp8_rope16",
    "packing/decode/fp8_rope16",
)
"""Cases that fit anywhere and end soon."""
FULL = (
    *QUICK,
    "attention/dense/1048576/rows16",
    "attention/sparse/1048576",
    "attention/tile_dense/65536/rows16",
    "attention/tile_sparse/65536",
    "index_scores/1048576",
    "index_scores/tile/65536",
)
"""Cases at the sizes of V4-Flash."""
SCATTER = "moves/scatter"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``benchmark.py kernels``."""
    parser.add_argument("--cases", nargs="+", metavar="CASE", help="names as in kernel_cases.py")
    parser.add_argument("--full", action="store_true", help="all sizes of V4-Flash too")
    parser.add_argument("--implementation", nargs="+", help="default: all that run here")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=10, help="calls of a round, timed together")
    kernel_tuning.add_arguments(parser)
    parser.add_argument(
        "--peer", choices=("tokamax",), help="compare with its references, numerically"
    )
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has it")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Every case by every implementation that runs on this device.

    Raises:
      UserError: unknown case, or an implementation that does not run on this platform.
    """
    if min(args.rounds, args.calls) < 1:
        raise UserError("--rounds and --calls must be at least 1")
    if args.tune and args.peer:
        raise UserError("--tune and --peer are two things: give one")
    if args.tune:
        return dict(kernel_tuning.by_clock(args, _interleaved))
    if args.peer:
        chosen = _implementations(args.implementation)[0]
        return {"peer": kernel_peer.compare(args.peer_python, chosen, args.seed)}
    names = args.cases or (FULL if args.full else QUICK)
    wanted = _implementations(args.implementation)
    rows = [row for name in names for row in _case(name, wanted, args)]
    return {"cases": rows, "rounds": args.rounds, "calls": args.calls}


def _implementations(named: list[str] | None) -> list[str]:
    here = jax.default_backend()
    there = [here, "reference"] if here in ("tpu", "gpu") else ["reference"]
    missing = sorted(set(named or ()) - set(there))
    if missing:
        raise UserError(f"{missing[0]!r} does not run on {here}: use {' or '.join(there)}")
    return list(named or there)


def _case(name: str, wanted: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    operation = name.partition("/")[0]
    abstract = build(name, "reference")
    arguments = kernel_inputs.concrete(abstract, operation, args.seed)
    sides: dict[str, Callable[[], Any]] = {}
    rows: list[dict[str, Any]] = []
    for implementation in wanted:
        row: dict[str, Any] = {"case": name, "implementation": implementation}
        try:
            case = build(name, implementation)
            once = jax.jit(case.function)(*arguments)
            row["error"] = kernel_checks.worst(operation, case, arguments, once)
        except ImportError:
            row["unsupported"] = "not written"
        except NotImplementedError as reason:
            row["unsupported"] = str(reason)
        else:
            run = functools.partial(jax.jit(case.function), *arguments)
            sides[implementation] = _InPlace(case, arguments) if name.startswith(SCATTER) else run
        rows.append(row)
    seconds = _interleaved(sides | {"copy": _copy(abstract.traffic)}, args.rounds, args.calls)
    for row in rows:
        if row["implementation"] in sides:
            row |= _speed(seconds[row["implementation"]], seconds["copy"], abstract)
    return rows


class _InPlace:
    """Calls a function that writes to its first argument: each call has the pool of the last."""

    def __init__(self, case: KernelCase, arguments: tuple[Any, ...]) -> None:
        self._function = jax.jit(case.function, donate_argnums=0)
        self._pool, self._rest = jnp.array(arguments[0]), arguments[1:]

    def __call__(self) -> jax.Array:
        self._pool = self._function(self._pool, *self._rest)
        return self._pool


def _copy(traffic: Traffic) -> Callable[[], Any]:
    """Reads and writes half of the traffic each."""
    size = max((traffic.read_bytes + traffic.write_bytes) // 8, 1)
    source = jnp.arange(size, dtype=jnp.uint32)
    return functools.partial(jax.jit(lambda x: x + jnp.uint32(1)), source)


def _interleaved(
    sides: Mapping[str, Callable[[], Any]], rounds: int, calls: int
) -> dict[str, list[float]]:
    """Seconds a call of each side, round by round in changing order."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        jax.block_until_ready(run())
    for number in range(rounds):
        for name in list(sides)[:: -1 if number % 2 else 1]:
            began = time.perf_counter()
            outputs = [sides[name]() for _ in range(calls)]
            jax.block_until_ready([x for x in outputs if not x.is_deleted()])
            seconds[name].append((time.perf_counter() - began) / calls)
    return seconds


def _speed(own: list[float], copy: list[float], case: KernelCase) -> dict[str, Any]:
    moved = case.traffic.read_bytes + case.traffic.write_bytes
    median = float(np.median(own))
    return {
        "microseconds": 1e6 * median,
        "bytes": moved,
        "gb_per_second": moved / median / 1e9,
        # Neighbours in time: whatever else the machine does slows both.
        "of_copy": float(np.median(np.asarray(copy) / np.asarray(own))),
    }


def report(result: Mapping[str, Any]) -> None:
    """Prints the table."""
    if "peer" in result:
        return kernel_peer.report(result["peer"], result["device"])
    if "tuned" in result:
        return kernel_tuning.report(result)
    command_line.print_table(
        f"kernels on {result['device']}; error is the worst one, to float64",
        ["case", "by", "error", "us", "GB/s", "of a copy"],
        [
            (
                row["case"],
                row["implementation"],
                *(
                    (row["unsupported"][:40], "-", "-", "-")
                    if "unsupported" in row
                    else (
                        f"{row['error']:.1e}",
                        f"{row['microseconds']:.1f}",
                        f"{row['gb_per_second']:.1f}",
                        f"{row['of_copy']:.2f}",
                    )
                ),
            )
            for row in result["cases"]
        ],
    )
