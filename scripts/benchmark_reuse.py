"""Time to first token when prompts share a beginning, as a share of a cold run.

Each round has prompts of its own, so that nothing of an earlier round is found; within a round the
policies, the peer and the cold runs take turns.
"""

import argparse
import contextlib
import os
import sys
import tempfile
import time
from typing import Any

import benchmark_model
import command_line
import jax
import numpy as np
from benchmark_peers import Peer

from hybridkv.engine.runner import Runner, RunnerOptions
from hybridkv.prefixes.policy import DEFAULT, DENSE, SnapshotPolicy
from hybridkv.state.batch import StepOptions
from hybridkv.state.capacity import Capacity
from hybridkv.state.snapshot import snapshot_bytes
from models.deepseek_v4.runtime import DeepseekV4Runtime

POLICIES: dict[str, SnapshotPolicy] = {"dense": DENSE, "default": DEFAULT}
TOKENS = 3200
SHARED = (3000, 1500)
REQUESTS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of the measurement, and with whom it is shared."""
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tile", type=int, default=128)
    parser.add_argument("--peer", choices=["llama.cpp"], help="measure it in turn with ours")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="a Python with the peers extra"
    )


def make_runner(runtime: DeepseekV4Runtime, tile: int, policies: int) -> Runner:
    """Room for one round of both cases under every policy."""
    options = StepOptions(tile=tile, sequential=jax.default_backend() == "cpu")
    each = Capacity.for_tokens(runtime.geometry, tokens=TOKENS + 2 * tile)
    sequences = (REQUESTS + 1) * len(SHARED) * policies
    capacity = Capacity(
        blocks=each.blocks * sequences, slots=1, blocks_per_sequence=each.blocks_per_sequence
    )
    return Runner(runtime, options, RunnerOptions(capacity=capacity, snapshots=40 * sequences))


def request(
    runner: Runner, ids: np.ndarray, namespace: str, policy: SnapshotPolicy
) -> dict[str, Any]:
    """Seconds to the logits of the last prompt token, and what was reused."""
    began = time.perf_counter()
    sequence = runner.start(ids, namespace=namespace, policy=policy)
    runner.prefill(sequence)
    seconds = time.perf_counter() - began
    written = len(sequence.snapshots_at) - sequence.skipped_snapshots
    runner.finish(sequence)
    return {
        "seconds": seconds,
        "reused": sequence.start,
        "snapshots": written,
        "plan": sequence.plan.explain(),
    }


def prompts(rng: np.random.Generator, shared: int, vocab: int) -> list[np.ndarray]:
    """Prompts of ``TOKENS`` tokens of which the first ``shared`` are the same."""
    head = rng.integers(0, vocab, shared)
    return [
        np.concatenate([head, rng.integers(0, vocab, TOKENS - shared)]).astype(np.int32)
        for _ in range(REQUESTS)
    ]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Medians over rounds, by case, side and request.

    Raises:
      UserError: the peer cannot run.
    """
    model = benchmark_model.random_model(args.seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        peer = None
        if args.peer:
            benchmark_model.write(model, folder)
            peer = Peer(args.peer, args.peer_python, folder, os.cpu_count() or 1)
            stack.callback(peer.close)
        result = measure_sides(DeepseekV4Runtime(model), peer, args)
    return {**result, "peer": peer.about if peer else None}


def measure_sides(
    runtime: DeepseekV4Runtime, peer: Any | None, args: argparse.Namespace
) -> dict[str, Any]:
    """``measure`` with what it opens."""
    runner = make_runner(runtime, args.tile, len(POLICIES))
    rng = np.random.default_rng(args.seed)
    rows: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for shared in SHARED:
            ids = prompts(rng, shared, runtime.vocab_size)
            cold = request(runner, ids[0], f"cold {number} {shared}", DEFAULT)
            rows.append({"side": "cold", "shared": shared, "request": 0, **cold})
            for which, prompt in enumerate(ids):
                for name, policy in POLICIES.items():
                    one = request(runner, prompt, f"{name} {number} {shared}", policy)
                    rows.append({"side": name, "shared": shared, "request": which, **one})
                if peer:
                    one = peer.prompt(prompt, reuse=True)
                    rows.append({"side": "llama.cpp", "shared": shared, "request": which, **one})
            if peer:
                one = peer.prompt(ids[0], reuse=False)
                rows.append({"side": "llama.cpp cold", "shared": shared, "request": 0, **one})
    snapshot = sum(snapshot_bytes(runtime.geometry).values())
    return {
        "tile": args.tile,
        "tokens": TOKENS,
        "rounds": args.rounds,
        "snapshot_bytes": snapshot,
        "block_bytes": runtime.geometry.block_bytes,
        "rows": summarise(rows, snapshot),
    }


def summarise(rows: list[dict[str, Any]], snapshot: int) -> list[dict[str, Any]]:
    """One line a case, side and request, with its share of that side's cold run."""

    def median(side: str, shared: int, which: int) -> float:
        return float(
            np.median(
                [
                    r["seconds"]
                    for r in rows
                    if (r["side"], r["shared"], r["request"]) == (side, shared, which)
                ]
            )
        )

    lines = []
    for key in dict.fromkeys((r["side"], r["shared"], r["request"]) for r in rows):
        side, shared, which = key
        same = [r for r in rows if (r["side"], r["shared"], r["request"]) == key]
        base = "llama.cpp cold" if side.startswith("llama.cpp") else "cold"
        seconds = median(side, shared, which)
        line = {
            "side": side,
            "shared": shared,
            "request": which + 1,
            "seconds": seconds,
            "share_of_cold": seconds / median(base, shared, 0),
            "reused": int(np.median([r["reused"] for r in same])),
        }
        if "snapshots" in same[0]:
            line["snapshots"] = int(np.median([r["snapshots"] for r in same]))
            line["snapshot_bytes"] = line["snapshots"] * snapshot
        lines.append(line)
    return lines


def report(result: dict[str, Any]) -> None:
    """One row a case, side and request."""
    command_line.print_table(
        f"time to first token of {result['tokens']} tokens on {command_line.device_name()}",
        ["side", "shared", "request", "reused", "seconds", "of cold", "snapshots", "MB of them"],
        [
            (
                row["side"],
                row["shared"],
                row["request"],
                row["reused"],
                f"{row['seconds']:.3f}",
                f"{row['share_of_cold']:.3f}",
                row.get("snapshots", "-"),
                f"{row['snapshot_bytes'] / 1e6:.1f}" if "snapshot_bytes" in row else "-",
            )
            for row in result["rows"]
        ],
    )
