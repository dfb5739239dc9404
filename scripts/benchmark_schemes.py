"""The three ways to keep a hybrid model's past, on the same weights and prompts.

    hybrid    the five kinds, prefix reuse through blocks and snapshots
    generic   uniform raw rows (``hybridkv.state.generic``), prefix reuse through blocks alone
    off       the kinds of ``hybrid``, nothing is reused

``off`` decodes with the executables of ``hybrid``: where their rates differ, it is noise.
"""

import argparse
import dataclasses
import time
from typing import Any

import command_line
import jax
import numpy as np
from benchmark_control import flash

from hybridkv import formats
from hybridkv.arithmetic import cdiv
from hybridkv.engine.runner import Runner, RunnerOptions
from hybridkv.engine.steps import prompt_tiles
from hybridkv.errors import UserError
from hybridkv.geometry import Geometry
from hybridkv.state.batch import DecodeBatch, StepOptions
from hybridkv.state.cache import Cache, assign_in_order
from hybridkv.state.capacity import Capacity
from hybridkv.state.generic import generic_geometry
from hybridkv.state.snapshot import snapshot_bytes
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.runtime import DeepseekV4GenericRuntime, DeepseekV4Runtime

SCHEMES = ("hybrid", "generic", "off")
REUSE = ("hybrid", "generic")
LENGTHS = {"1k": 2**10, "4k": 2**12, "16k": 2**14, "64k": 2**16, "1M": 2**20}
"""Tokens of the sequences whose bytes are counted."""
REQUESTS = 3
Runners = dict[str, Runner]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of the measurement."""
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[1000, 4000, 16000], help="decode rates at these"
    )
    parser.add_argument("--tokens", type=int, default=16, help="tokens decoded a round and context")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tile", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=3200, help="tokens of each prompt of reuse")
    parser.add_argument("--shared", type=int, default=3000, help="that they have in common")


def _check(args: argparse.Namespace) -> None:
    for name in ("tokens", "rounds", "prompt"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1")
    if not 0 < args.shared < args.prompt:
        raise UserError(f"--shared is {args.shared}: give 1 to {args.prompt - 1}")
    if min(args.contexts) < 1:
        raise UserError("--contexts are numbers of tokens: give at least 1")


def make_runner(model: DeepseekV4, name: str, args: argparse.Namespace) -> Runner:
    """A runner of one scheme with one slot, and room for the longest context and for a round."""
    runtime = (DeepseekV4GenericRuntime if name == "generic" else DeepseekV4Runtime)(model)
    block = runtime.geometry.block_tokens
    longest = cdiv(max(args.contexts) + args.rounds * args.tokens, block)
    prompt = cdiv(args.prompt + args.tile, block)
    capacity = Capacity(
        blocks=max(longest, (REQUESTS + 1) * prompt),
        slots=1,
        blocks_per_sequence=max(longest, prompt),
    )
    options = StepOptions(tile=args.tile, sequential=jax.default_backend() == "cpu")
    sizes = RunnerOptions(
        capacity=capacity, snapshots=4 * (REQUESTS + 1), reuse=name in REUSE, ledger=False
    )
    return Runner(runtime, options, sizes)


class Decoding:
    """One sequence that decodes: the runner's executables on a cache of its own."""

    def __init__(self, runner: Runner, prompt: np.ndarray) -> None:
        self.steps = runner.steps
        self.cache = assign_in_order(Cache.init(runner.model.geometry, runner.sizes.capacity))
        self.active = jax.device_put(np.ones(1, bool))
        for batch in prompt_tiles(prompt, 0, runner.options, slots=1):
            logits, self.cache = self.steps.tile(batch, self.cache)
        self.logits = np.asarray(logits)[0]
        """After the prompt."""

    def decode(self, token: int) -> float:
        """Seconds until the logits after one more token are on the host."""
        ids = jax.device_put(np.array([token], np.int32))
        began = time.perf_counter()
        batch = DecodeBatch(tokens=ids, active=self.active)
        logits, self.cache = self.steps.decode(batch, self.cache)
        np.asarray(logits)
        return time.perf_counter() - began


def bytes_by_length(geometry: Geometry) -> dict[str, int]:
    """Bytes of one sequence in whole blocks, and of one snapshot."""
    held = {name: sum(geometry.cache_bytes(n).values()) for name, n in LENGTHS.items()}
    return held | {"snapshot": sum(snapshot_bytes(geometry).values())}


def measure_bytes(runners: Runners) -> dict[str, Any]:
    """Of this model, and of V4-Flash in the release's row formats and in float32."""
    plain = flash()
    packed = dataclasses.replace(
        plain,
        window_format=formats.FP8_ROPE16,
        row_format=formats.FP8_ROPE16,
        index_format=formats.MXFP4,
    )
    models = {name: bytes_by_length(x.model.geometry) for name, x in runners.items()}
    models["off"]["snapshot"] = 0  # it never writes one
    return {
        "tokens": LENGTHS,
        "model": models,
        "v4_flash": {
            "hybrid, packed rows": bytes_by_length(packed),
            "hybrid, float32 rows": bytes_by_length(plain),
            "generic": bytes_by_length(generic_geometry(plain)),
        },
    }


def measure_decode(
    runners: Runners, args: argparse.Namespace, rng: np.random.Generator
) -> dict[str, Any]:
    """Median milliseconds of a decoded token by scheme and context, visited in turn."""
    vocab = next(iter(runners.values())).model.vocab_size
    longest = rng.integers(0, vocab, max(args.contexts)).astype(np.int32)
    sequences = {
        (name, context): Decoding(runner, longest[:context])
        for name, runner in runners.items()
        for context in args.contexts
    }
    seconds: dict[tuple[str, int], list[float]] = {key: [] for key in sequences}
    for _ in range(args.rounds):
        tokens = rng.integers(0, vocab, args.tokens)
        for key, sequence in sequences.items():
            seconds[key] += [sequence.decode(int(token)) for token in tokens]
    ms = {
        name: {str(n): 1e3 * float(np.median(seconds[name, n])) for n in args.contexts}
        for name in runners
    }
    apart = (
        np.abs(sequences["generic", n].logits - sequences["hybrid", n].logits).max()
        for n in args.contexts
    )
    return {
        "ms": ms,
        "tokens_per_second": {
            name: {n: 1e3 / value for n, value in row.items()} for name, row in ms.items()
        },
        "generic_logits_max_abs_difference": float(max(apart)),
    }


def request(runner: Runner, ids: np.ndarray, namespace: str) -> dict[str, Any]:
    """Seconds to the logits of a prompt's last token, and what was not computed for it."""
    began = time.perf_counter()
    sequence = runner.start(ids, namespace=namespace)
    runner.prefill(sequence)
    seconds = time.perf_counter() - began
    runner.finish(sequence)
    return {"seconds": seconds, "reused": sequence.start, "computed": len(ids) - sequence.start}


def measure_reuse(
    runners: Runners, args: argparse.Namespace, rng: np.random.Generator
) -> list[dict[str, Any]]:
    """Prompts that share a beginning, in order, on every scheme in turn; new ones each round."""
    vocab = next(iter(runners.values())).model.vocab_size
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    cold: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(args.rounds):
        head = rng.integers(0, vocab, args.shared)
        ends = rng.integers(0, vocab, (REQUESTS, args.prompt - args.shared))
        prompts = [np.concatenate([head, end]).astype(np.int32) for end in ends]
        for name, runner in runners.items():
            runner.reset()
            cold[name].append(request(runner, prompts[0], "cold")["seconds"])
        for which, prompt in enumerate(prompts):
            for name, runner in runners.items():
                rows.setdefault((name, which), []).append(request(runner, prompt, "shared"))
    lines = []
    for (name, which), same in rows.items():
        middle = {key: float(np.median([row[key] for row in same])) for key in same[0]}
        lines.append(
            {
                "scheme": name,
                "request": which + 1,
                "reused": int(middle["reused"]),
                "computed": int(middle["computed"]),
                "seconds": middle["seconds"],
                "share_of_cold": middle["seconds"] / float(np.median(cold[name])),
            }
        )
    return sorted(lines, key=lambda line: (line["request"], SCHEMES.index(line["scheme"])))


def measure(model: DeepseekV4, args: argparse.Namespace) -> dict[str, Any]:
    """Bytes, decode rates and reuse of all schemes.

    Raises:
      UserError: a size is out of its range.
    """
    _check(args)
    args.contexts = sorted(set(args.contexts))
    rng = np.random.default_rng(args.seed)
    runners = {name: make_runner(model, name, args) for name in SCHEMES}
    return {
        "tile": args.tile,
        "rounds": args.rounds,
        "minimum_hit": {
            name: runner.model.geometry.minimum_hit(args.tile) for name, runner in runners.items()
        },
        "bytes": measure_bytes(runners),
        "decode": measure_decode(runners, args, rng),
        "prompt": args.prompt,
        "shared": args.shared,
        "reuse": measure_reuse(runners, args, rng),
    }


def report(result: dict[str, Any]) -> None:
    """Prints tables."""
    held = result["bytes"]
    for title, schemes in (("this model", held["model"]), ("V4-Flash", held["v4_flash"])):
        command_line.print_table(
            f"MiB of one sequence, {title}",
            ["scheme", *held["tokens"], "a snapshot"],
            [
                (name, *(f"{row[n] / 2**20:,.1f}" for n in (*held["tokens"], "snapshot")))
                for name, row in schemes.items()
            ],
        )
    rates = result["decode"]["tokens_per_second"]
    command_line.print_table(
        f"decoded tokens/s by context on {result['device']}",
        ["scheme", *next(iter(rates.values()))],
        [(name, *(f"{value:.1f}" for value in row.values())) for name, row in rates.items()],
    )
    command_line.print_table(
        f"prompts of {result['prompt']} tokens that share {result['shared']}",
        ["scheme", "request", "reused", "computed", "seconds", "of cold"],
        [
            (
                row["scheme"],
                row["request"],
                row["reused"],
                row["computed"],
                f"{row['seconds']:.3f}",
                f"{row['share_of_cold']:.3f}",
            )
            for row in result["reuse"]
        ],
    )
