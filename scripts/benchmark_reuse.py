"""Time to first token when prompts share a beginning, as a share of a cold run.

Each round has prompts of its own, so that nothing of an earlier round is found; within a round the
policies, the peer and the cold runs take turns.
"""

import argparse
import time
from typing import Any

import jax
import numpy as np

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


def measure(
    runtime: DeepseekV4Runtime, peer: Any | None, args: argparse.Namespace
) -> dict[str, Any]:
    """Medians over rounds, by case, side and request."""
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
