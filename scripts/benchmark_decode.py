"""Prefill and decode rates and cache bytes of one sequence, beside those of peers.

A decode step is measured at growing contexts too. The sides take turns, several within a round.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from typing import Any

import benchmark_model
import command_line
import jax
import jax.numpy as jnp
import numpy as np
from benchmark_peers import PEERS, Peer, open_peers

from hybridkv.engine.steps import Steps, prompt_tiles
from hybridkv.errors import UserError
from hybridkv.state.batch import DecodeBatch, StepOptions
from hybridkv.state.cache import Cache, assign_in_order
from hybridkv.state.capacity import Capacity
from models.deepseek_v4.runtime import DeepseekV4Runtime

PARTS = 4
"""Turns that the sides take within the decoded tokens of a round."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of the measurement, and with whom it is shared."""
    parser.add_argument(
        "--peer", nargs="+", default=[], choices=list(PEERS), help="measure these in turn with ours"
    )
    parser.add_argument(
        "--peer-defaults",
        action="store_true",
        help="measure llama.cpp with its own half-precision cache and flash attention too",
    )
    parser.add_argument(
        "--peer-python", default=sys.executable, help="a Python with the peers extra"
    )
    parser.add_argument("--context", type=int, default=3000)
    parser.add_argument(
        "--longest", type=int, default=16000, help="last context of the growth table"
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens decoded a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tile", type=int, default=256)


class Ours:
    """hybridkv on the default device: one sequence."""

    def __init__(self, runtime: DeepseekV4Runtime, tile: int, capacity: int) -> None:
        cpu = jax.default_backend() == "cpu"
        self.options = StepOptions(tile=tile, sequential=cpu)
        self.steps = Steps(runtime, self.options)
        self.geometry, self.vocab = runtime.geometry, runtime.vocab_size
        self.capacity = Capacity.for_tokens(runtime.geometry, tokens=capacity)
        self.active = jnp.ones((1,), bool)
        self.cache = self.steps.warm_up(self.empty())

    def empty(self) -> Cache:
        """A new, empty cache."""
        return assign_in_order(Cache.init(self.geometry, self.capacity))

    def prefill(self, ids: np.ndarray) -> dict[str, Any]:
        """Consumes a prompt from position 0."""
        began = time.perf_counter()
        for batch in prompt_tiles(ids, 0, self.options, slots=1):
            logits, self.cache = self.steps.tile(batch, self.cache)
        out = np.asarray(logits[0])
        return {"seconds": time.perf_counter() - began, "logits": out}

    def decode(self, ids: np.ndarray) -> dict[str, Any]:
        """Consumes tokens one by one."""
        seconds = []
        tokens = [jax.device_put(np.asarray([token], np.int32)) for token in ids]
        for token in tokens:  # on the device already, as a sampler leaves them
            began = time.perf_counter()
            batch = DecodeBatch(tokens=token, active=self.active)
            logits, self.cache = self.steps.decode(batch, self.cache)
            out = np.asarray(logits[0])
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds, "logits": out}


def median(values: list[float]) -> float:
    """The median."""
    return float(np.median(values))


def measure_rates(
    ours: Ours, peers: dict[str, Peer], args: argparse.Namespace, rng: np.random.Generator
) -> dict[str, Any]:
    """Prefill and decode seconds at ``args.context``, sides taking turns.

    A decode figure is the median over parts of the mean of a part, on every side: llama.cpp tells
    no more than that.
    """
    ids = rng.integers(0, ours.vocab, args.context).astype(np.int32)
    sides: dict[str, Ours | Peer] = {"hybridkv": ours, **peers}
    prefill: dict[str, list[float]] = {name: [] for name in sides}
    decode: dict[str, list[float]] = {name: [] for name in sides}
    apart = dict.fromkeys(peers, 0.0)
    for _ in range(args.rounds):
        last = {}
        for name, side in sides.items():
            answer = side.prefill(ids)
            prefill[name].append(answer["seconds"])
            last[name] = log_probabilities(answer["logits"])
        new = rng.integers(0, ours.vocab, args.tokens).astype(np.int32)
        for part in np.array_split(new, min(PARTS, args.tokens)):
            for name, side in sides.items():
                decode[name].append(float(np.mean(side.decode(part)["seconds"])))
        for name in peers:
            difference = float(np.abs(last["hybridkv"] - last[name]).max())
            apart[name] = max(apart[name], difference)
    result: dict[str, Any] = {"context": args.context, "rounds": args.rounds}
    for name in sides:
        result[name] = {
            "prefill_tokens_per_second": args.context / median(prefill[name]),
            "decode_tokens_per_second": 1 / median(decode[name]),
        }
    result["ratio"] = {
        name: {
            "prefill": median(prefill[name]) / median(prefill["hybridkv"]),
            "decode": median(decode[name]) / median(decode["hybridkv"]),
        }
        for name in peers
    }
    result["prefill_log_probabilities_max_abs_difference"] = apart
    return result


def log_probabilities(logits: Any) -> np.ndarray:
    """float64 ``[vocab]``; log-probabilities stay as they are."""
    values = np.asarray(logits, np.float64)
    return values - np.logaddexp.reduce(values)


def measure_bytes(ours: Ours, peers: dict[str, Peer], context: int) -> dict[str, Any]:
    """Bytes that a sequence of ``context`` tokens holds, over ``context``."""
    by_kind = {k.value: v for k, v in ours.geometry.cache_bytes(context).items()}
    result: dict[str, Any] = {
        "hybridkv": {"bytes": by_kind, "bytes_per_token": sum(by_kind.values()) / context}
    }
    for name, peer in peers.items():
        held = peer.cache_bytes()
        if held is not None:
            result[name] = {"bytes": held, "bytes_per_token": held / context}
    return result


def measure_growth(ours: Ours, args: argparse.Namespace, rng: np.random.Generator) -> list[Any]:
    """Median decode milliseconds at growing contexts, visited in turn."""
    lengths = sorted({min(n, args.longest) for n in (1000, 3000)} | {args.longest})
    ids = rng.integers(0, ours.vocab, args.longest).astype(np.int32)
    caches = {}
    for length in lengths:
        ours.cache = ours.empty()
        ours.prefill(ids[:length])
        caches[length] = ours.cache
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    for _ in range(args.rounds):
        for length in lengths:
            ours.cache = caches[length]
            seconds[length] += ours.decode(rng.integers(0, ours.vocab, 16))["seconds"]
            caches[length] = ours.cache
    base = median(seconds[lengths[0]])
    return [
        {
            "context": length,
            "decode_ms": 1e3 * median(values),
            "ratio_to_first": median(values) / base,
        }
        for length, values in seconds.items()
    ]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Rates and bytes of all sides at one context, and our decode step as the context grows.

    Raises:
      UserError: a size below 1, or a peer that cannot run.
    """
    if min(args.context, args.longest, args.tokens, args.rounds) < 1:
        raise UserError("--context, --longest, --tokens and --rounds must be at least 1")
    model = benchmark_model.random_model(args.seed)
    runtime = DeepseekV4Runtime(model)
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if args.peer:
            benchmark_model.write(model, folder)
        peers = open_peers(args, folder, stack)
        ours = Ours(runtime, args.tile, max(args.longest, args.context) + 512)
        rates = measure_rates(ours, peers, args, rng)
        held = measure_bytes(ours, peers, args.context)
    return {
        "peers": {name: peer.about for name, peer in peers.items()},
        "parameters": sum(x.size for x in runtime.params),
        "tile": args.tile,
        **rates,
        "cache": held,
        "growth": measure_growth(ours, args, rng),
    }


def report(result: dict[str, Any]) -> None:
    """Both tables."""
    rows = []
    for side in ("hybridkv", *result["peers"]):
        cells = [side]
        for step in ("prefill", "decode"):
            ratio = result["ratio"].get(side)
            cells.append(f"{result[side][f'{step}_tokens_per_second']:.1f}")
            cells.append(f"{ratio[step]:.2f}x" if ratio else "-")
        held = result["cache"].get(side)
        rows.append((*cells, f"{held['bytes_per_token']:.0f}" if held else "-"))
    command_line.print_table(
        f"{result['parameters'] / 1e6:.1f} M parameters on {result['device']}, tokens a second at "
        f"{result['context']} tokens; ratios are ours to each",
        ["side", "prefill", "ratio", "decode", "ratio", "cache bytes a token"],
        rows,
    )
    command_line.print_table(
        "one decode step as the context grows",
        ["tokens", "ms", "to the first"],
        [
            (g["context"], f"{g['decode_ms']:.2f}", f"{g['ratio_to_first']:.2f}x")
            for g in result["growth"]
        ],
    )
