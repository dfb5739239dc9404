"""Measures speed as ratios within one run.

    python scripts/benchmark.py decode --peer transformers --json docs/benchmarks/decode.json
    python scripts/benchmark.py control --peer vllm sglang --json docs/benchmarks/control.json
    python scripts/benchmark.py reuse --peer llama.cpp --json docs/benchmarks/reuse.json

``decode``: prefill and decode rates and cache bytes per token of a random 43 M model, and the cost
of a decode step as the context grows. ``control``: planning against a million blocks.
``reuse``: time to first token when prompts share a beginning. Rounds of the sides alternate;
medians count.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

import benchmark_control
import benchmark_reuse
import command_line
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from peer_process import PeerProcess

from hybridkv.engine.steps import Steps, prompt_tiles
from hybridkv.state.batch import DecodeBatch, StepOptions
from hybridkv.state.cache import Cache, assign_in_order
from hybridkv.state.capacity import Capacity
from models.deepseek_v4.config import HASHED, HEAVY, SLIDING, SPARSE, parse_config
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.runtime import DeepseekV4Runtime
from models.deepseek_v4.weights import save_safetensors

KINDS = [SLIDING, SLIDING, SPARSE, HEAVY, SPARSE, HEAVY, SPARSE, HEAVY]
ROPE_SHARE = 0.25
MODEL: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "float32",
    "vocab_size": 4096,
    "hidden_size": 512,
    "num_hidden_layers": len(KINDS),
    "layer_types": KINDS,
    "compress_rates": {SPARSE: 4, HEAVY: 128},
    "mlp_layer_types": [HASHED] * 2 + ["moe"] * 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 32,
    "partial_rotary_factor": ROPE_SHARE,
    "q_lora_rank": 256,
    "o_groups": 4,
    "o_lora_rank": 128,
    "sliding_window": 128,
    "index_n_heads": 16,
    "index_head_dim": 64,
    "index_topk": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "pad_token_id": None,
}


class Ours:
    """hybridkv on the default device: one sequence."""

    def __init__(self, runtime: DeepseekV4Runtime, tile: int, capacity: int) -> None:
        cpu = jax.default_backend() == "cpu"
        self.options = StepOptions(tile=tile, sequential=cpu)
        self.steps = Steps(runtime, self.options)
        self.geometry = runtime.geometry
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


PEERS = {"transformers": "transformers_peer.py", "llama.cpp": "llama_cpp_peer.py"}


class Peer(PeerProcess):
    """A peer process; see ``peers/transformers_peer.py`` and ``peers/llama_cpp_peer.py``."""

    def __init__(self, name: str, python: str, folder: str, threads: int) -> None:
        super().__init__(
            python,
            PEERS[name],
            {"folder": folder, "threads": threads},
            "install the peers extra (pip install 'hybridkv[peers]') or name a Python that has it "
            "with --peer-python",
        )

    def prefill(self, ids: np.ndarray) -> dict[str, Any]:
        """Consumes a prompt into an empty cache."""
        return self.ask({"call": "prefill", "ids": ids.tolist()})

    def decode(self, ids: np.ndarray) -> dict[str, Any]:
        """Consumes tokens one by one."""
        return self.ask({"call": "decode", "ids": ids.tolist()})

    def prompt(self, ids: np.ndarray, *, reuse: bool) -> dict[str, Any]:
        """Time to the first token of a prompt, with the peer's own prefix reuse or without."""
        answer = self.ask({"call": "prompt", "ids": ids.tolist(), "reuse": reuse})
        return {"seconds": answer["first_token_seconds"], "reused": answer["cached"]}

    def cache_bytes(self) -> int:
        """Bytes the cache holds now."""
        return self.ask({"call": "cache_bytes"})["bytes"]


def median(values: list[float]) -> float:
    """The median."""
    return float(np.median(values))


def measure_rates(
    ours: Ours, peer: Peer | None, args: argparse.Namespace, rng: np.random.Generator
) -> dict[str, Any]:
    """Prefill and decode seconds at ``args.context``, sides taking turns."""
    ids = rng.integers(0, MODEL["vocab_size"], args.context).astype(np.int32)
    sides: dict[str, Any] = {"hybridkv": ours} | ({"transformers": peer} if peer else {})
    prefill: dict[str, list[float]] = {name: [] for name in sides}
    decode: dict[str, list[float]] = {name: [] for name in sides}
    difference = 0.0
    for _ in range(args.rounds):
        last = {}
        for name, side in sides.items():
            answer = side.prefill(ids)
            prefill[name].append(answer["seconds"])
            last[name] = np.asarray(answer["logits"])
        new = rng.integers(0, MODEL["vocab_size"], args.tokens).astype(np.int32)
        for part in np.array_split(new, 4):
            for name, side in sides.items():
                decode[name] += side.decode(part)["seconds"]
        if peer:
            apart = np.abs(last["hybridkv"] - last["transformers"]).max()
            difference = max(difference, float(apart))
    result: dict[str, Any] = {"context": args.context, "rounds": args.rounds}
    for name in sides:
        result[name] = {
            "prefill_tokens_per_second": args.context / median(prefill[name]),
            "decode_tokens_per_second": 1 / median(decode[name]),
        }
    if peer:
        result["ratio"] = {
            "prefill": median(prefill["transformers"]) / median(prefill["hybridkv"]),
            "decode": median(decode["transformers"]) / median(decode["hybridkv"]),
        }
        result["prefill_logits_max_abs_difference"] = difference
    return result


def measure_bytes(ours: Ours, peer: Peer | None, context: int) -> dict[str, Any]:
    """Bytes that a sequence of ``context`` tokens holds, over ``context``."""
    by_kind = {k.value: v for k, v in ours.geometry.cache_bytes(context).items()}
    result: dict[str, Any] = {
        "hybridkv": {"bytes": by_kind, "bytes_per_token": sum(by_kind.values()) / context}
    }
    if peer:
        held = peer.cache_bytes()
        result["transformers"] = {"bytes": held, "bytes_per_token": held / context}
    return result


def measure_growth(ours: Ours, args: argparse.Namespace, rng: np.random.Generator) -> list[Any]:
    """Median decode milliseconds at growing contexts, visited in turn."""
    lengths = sorted({min(n, args.longest) for n in (1000, 3000)} | {args.longest})
    ids = rng.integers(0, MODEL["vocab_size"], args.longest).astype(np.int32)
    caches = {}
    for length in lengths:
        ours.cache = ours.empty()
        ours.prefill(ids[:length])
        caches[length] = ours.cache
    seconds: dict[int, list[float]] = {length: [] for length in lengths}
    for _ in range(args.rounds):
        for length in lengths:
            ours.cache = caches[length]
            seconds[length] += ours.decode(rng.integers(0, MODEL["vocab_size"], 16))["seconds"]
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


def decode(args: argparse.Namespace) -> int:
    """The ``decode`` subcommand."""
    model = DeepseekV4(parse_config(MODEL), nnx.Rngs(args.seed))
    runtime = DeepseekV4Runtime(model)
    rng = np.random.default_rng(args.seed)
    peer = None
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(MODEL))
        if args.peer:
            save_safetensors(model, pathlib.Path(folder) / "model.safetensors")
            peer = Peer(args.peer, args.peer_python, folder, os.cpu_count() or 1)
        try:
            ours = Ours(runtime, args.tile, max(args.longest, args.context) + 512)
            rates = measure_rates(ours, peer, args, rng)
            held = measure_bytes(ours, peer, args.context)
        finally:
            if peer:
                peer.close()
    growth = measure_growth(ours, args, rng)
    result = {
        "device": command_line.device_name(),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "peer": peer.about if peer else None,
        "parameters": sum(x.size for x in runtime.params),
        "tile": args.tile,
        **rates,
        "cache": held,
        "growth": growth,
    }
    _report_decode(result)
    command_line.write_json(args.json, result)
    return 0


def _report_decode(result: dict[str, Any]) -> None:
    sides = [name for name in ("hybridkv", "transformers") if name in result]
    ratio = result.get("ratio", {})

    def row(what: str, values: list[str], times: float | None) -> tuple[str, ...]:
        return (what, *values, f"{times:.2f}x" if times else "-")

    rates = [
        row(
            f"{step} tokens/s at {result['context']} tokens",
            [f"{result[s][f'{step}_tokens_per_second']:.1f}" for s in sides],
            ratio.get(step),
        )
        for step in ("prefill", "decode")
    ]
    held = row(
        "cache bytes a token",
        [f"{result['cache'][s]['bytes_per_token']:.0f}" for s in sides],
        None,
    )
    title = f"{result['parameters'] / 1e6:.1f} M parameters on {result['device']}"
    command_line.print_table(title, ["", *sides, "ratio"], [*rates, held])
    command_line.print_table(
        "one decode step as the context grows",
        ["tokens", "ms", "to the first"],
        [
            (g["context"], f"{g['decode_ms']:.2f}", f"{g['ratio_to_first']:.2f}x")
            for g in result["growth"]
        ],
    )


CONTROL_BARS = {
    "plan_cold_hashing_ms": ("plan of 1,048,576 tokens, hashed anew, ms", 20.0),
    "plan_last_block_new_ms": ("the same when only the last block is new, ms", 3.0),
    "reserve_lease_free_ms": ("reserve, lease and free 8,192 blocks, ms", 3.0),
    "bytes_an_entry": ("bytes an entry", 200.0),
}


def control(args: argparse.Namespace) -> int:
    """The ``control`` subcommand."""
    result = {"cores": os.cpu_count(), **benchmark_control.measure(args)}
    peers = result["peers"]
    columns = [f"{name} {peer['version']}" for name, peer in peers.items()]
    command_line.print_table(
        f"bookkeeping with {result['blocks_published']:,} published blocks",
        ["what", "hybridkv", "bar", *(c for name in columns for c in (name, "ratio"))],
        [
            (
                name,
                f"{result[key]:.2f}",
                f"{bar:g}",
                *(
                    cell
                    for peer in peers.values()
                    for cell in (f"{peer[key]:.2f}", f"{peer['ratio'][key]:.2f}x")
                ),
            )
            for key, (name, bar) in CONTROL_BARS.items()
        ],
    )
    command_line.write_json(args.json, result)
    return 0


def reuse(args: argparse.Namespace) -> int:
    """The ``reuse`` subcommand."""
    model = DeepseekV4(parse_config(MODEL), nnx.Rngs(args.seed))
    peer = None
    with tempfile.TemporaryDirectory() as folder:
        if args.peer:
            (pathlib.Path(folder) / "config.json").write_text(json.dumps(MODEL))
            save_safetensors(model, pathlib.Path(folder) / "model.safetensors")
            peer = Peer(args.peer, args.peer_python, folder, os.cpu_count() or 1)
        try:
            result = benchmark_reuse.measure(DeepseekV4Runtime(model), peer, args)
        finally:
            if peer:
                peer.close()
    result["peer"] = peer.about if peer else None
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
    command_line.write_json(args.json, {"device": command_line.device_name(), **result})
    return 0


def main() -> int:
    """Dispatches to the subcommand."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("decode", help="prefill, decode and cache bytes of one sequence")
    one.add_argument("--peer", choices=["transformers"], help="measure it in turn with ours")
    one.add_argument("--peer-python", default=sys.executable, help="a Python with the peers extra")
    one.add_argument("--context", type=int, default=3000)
    one.add_argument("--longest", type=int, default=16000, help="last context of the growth table")
    one.add_argument("--tokens", type=int, default=64, help="tokens decoded a round")
    one.add_argument("--rounds", type=int, default=5)
    one.add_argument("--tile", type=int, default=256)
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--json", metavar="FILE", help="write the result here too")
    one.set_defaults(run=decode)
    two = commands.add_parser("control", help="planning and block bookkeeping, no model")
    two.add_argument("--blocks", type=int, default=1_000_000, help="entries of the directory")
    two.add_argument("--repeats", type=int, default=11, help="rounds, whose medians count")
    two.add_argument(
        "--peer",
        nargs="+",
        default=[],
        choices=benchmark_control.PEERS,
        help="measure these in turn with ours",
    )
    two.add_argument("--peer-python", default=sys.executable, help="a Python that has the peers")
    two.set_defaults(run=control)
    three = commands.add_parser("reuse", help="time to first token with shared beginnings")
    three.add_argument("--rounds", type=int, default=3)
    three.add_argument("--tile", type=int, default=128)
    three.add_argument("--peer", choices=["llama.cpp"], help="measure it in turn with ours")
    three.add_argument(
        "--peer-python", default=sys.executable, help="a Python with the peers extra"
    )
    three.set_defaults(run=reuse)
    for some in (two, three):
        some.add_argument("--seed", type=int, default=0)
        some.add_argument("--json", metavar="FILE", help="write the result here too")
    args = parser.parse_args(sys.argv[1:])
    command_line.use_compilation_cache()
    return args.run(args)


if __name__ == "__main__":
    command_line.run(main)
