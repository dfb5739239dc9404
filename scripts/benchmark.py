r"""Measures speed as ratios within one run.

    python scripts/benchmark.py decode --peer transformers llama.cpp \
        --json docs/benchmarks/decode.json
    python scripts/benchmark.py control --peer vllm sglang --json docs/benchmarks/control.json
    python scripts/benchmark.py reuse --peer llama.cpp --json docs/benchmarks/reuse.json
    python scripts/benchmark.py engine --json docs/benchmarks/engine.json
    python scripts/benchmark.py schemes --json docs/benchmarks/schemes.json
    python scripts/benchmark.py tiers --json docs/benchmarks/tiers.json
    python scripts/benchmark.py kernels --json docs/benchmarks/kernels.json
    python scripts/benchmark.py serve --json docs/benchmarks/serve.json
    python scripts/benchmark.py observe --json docs/benchmarks/observe.json

``decode``: prefill and decode rates and cache bytes per token of a random 43 M model, and the cost
of a decode step as the context grows. ``control``: planning against a million blocks.
``reuse``: time to first token when prompts share a beginning. ``engine``: many requests together,
time between tokens while prompts arrive, and the engine's own share of a turn. ``schemes``: the
hybrid cache, the generic one and no reuse. ``tiers``: prefixes from host memory and disk.
``kernels``: each operation alone, beside a plain copy. ``serve``: what HTTP adds to a request.
``observe``: what metrics and events take of a turn. Rounds of the sides alternate; medians count.
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import benchmark_control
import benchmark_decode
import benchmark_engine
import benchmark_kernels
import benchmark_observe
import benchmark_reuse
import benchmark_schemes
import benchmark_tiers
import command_line
import jax
from benchmark_model import random_model

from models.deepseek_v4.runtime import DeepseekV4Runtime

Result = dict[str, Any]


class Command(NamedTuple):
    """A subcommand."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace], Result]
    report: Callable[[Result], int | None]
    """Prints the result; the exit status, where that may be another than 0."""


def _engine(args: argparse.Namespace) -> Result:
    return benchmark_engine.measure(DeepseekV4Runtime(random_model(args.seed)), args)


def _schemes(args: argparse.Namespace) -> Result:
    return benchmark_schemes.measure(random_model(args.seed), args)


def _tiers(args: argparse.Namespace) -> Result:
    return benchmark_tiers.measure(DeepseekV4Runtime(random_model(args.seed)), args)


def _serve(args: argparse.Namespace) -> Result:
    import benchmark_serve  # which needs the extra that the others do without

    return benchmark_serve.measure(args)


def _report_serve(result: Result) -> None:
    import benchmark_serve

    benchmark_serve.report(result)


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens of a request")
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--tile", type=int, default=64)
    parser.add_argument("--spread", type=float, default=0.05, help="seconds in which all arrive")


COMMANDS = {
    "decode": Command(
        "prefill, decode and cache bytes of one sequence",
        benchmark_decode.add_arguments,
        benchmark_decode.measure,
        benchmark_decode.report,
    ),
    "control": Command(
        "planning and block bookkeeping, no model",
        benchmark_control.add_arguments,
        benchmark_control.measure,
        benchmark_control.report,
    ),
    "reuse": Command(
        "time to first token with shared beginnings",
        benchmark_reuse.add_arguments,
        benchmark_reuse.measure,
        benchmark_reuse.report,
    ),
    "engine": Command(
        "many requests together in one engine",
        benchmark_engine.add_arguments,
        _engine,
        benchmark_engine.report,
    ),
    "schemes": Command(
        "hybrid cache, generic cache and no reuse",
        benchmark_schemes.add_arguments,
        _schemes,
        benchmark_schemes.report,
    ),
    "tiers": Command(
        "host memory and disk beside the device",
        benchmark_tiers.add_arguments,
        _tiers,
        benchmark_tiers.report,
    ),
    "kernels": Command(
        "each kernel operation alone",
        benchmark_kernels.add_arguments,
        benchmark_kernels.measure,
        benchmark_kernels.report,
    ),
    "serve": Command(
        "what the HTTP server adds to a request", _add_serve_arguments, _serve, _report_serve
    ),
    "observe": Command(
        "what metrics and events take of a turn",
        benchmark_observe.add_arguments,
        benchmark_observe.measure,
        benchmark_observe.report,
    ),
}


def main() -> int:
    """Measures what the subcommand names, prints it and writes it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command.help)
        command.add_arguments(one)
        one.add_argument("--seed", type=int, default=0)
        one.add_argument("--json", metavar="FILE", help="write the result here too")
    args = parser.parse_args(sys.argv[1:])
    command_line.use_compilation_cache()
    command = COMMANDS[args.command]
    machine = {
        "device": command_line.device_name(),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
    }
    result = {**machine, **command.measure(args)}
    status = command.report(result) or 0
    command_line.write_json(args.json, result)
    return status


if __name__ == "__main__":
    command_line.run(main)
