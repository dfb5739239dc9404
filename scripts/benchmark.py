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
import contextlib
import json
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

import benchmark_control
import benchmark_engine
import benchmark_kernels
import benchmark_observe
import benchmark_reuse
import benchmark_schemes
import benchmark_tiers
import command_line
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from peer_process import PeerProcess

from hybridkv.engine.steps import Steps, prompt_tiles
from hybridkv.errors import UserError
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
DEFAULTS = "llama.cpp defaults"
"""The side of llama.cpp with its own half-precision cache and flash attention."""
PARTS = 4
"""Turns that the sides take within the decoded tokens of a round."""


class Peer(PeerProcess):
    """A peer process; see ``peers/transformers_peer.py`` and ``peers/llama_cpp_peer.py``."""

    def __init__(
        self, name: str, python: str, folder: str, threads: int, **start: int | bool
    ) -> None:
        super().__init__(
            python,
            PEERS[name],
            {"folder": folder, "threads": threads, **start},
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

    def cache_bytes(self) -> int | None:
        """Bytes the cache holds now; None where the peer does not say."""
        return self.ask({"call": "cache_bytes"})["bytes"]


class LlamaCpp(Peer):
    """llama.cpp at its own decode rate, within one request of its server."""

    def decode(self, ids: np.ndarray) -> dict[str, Any]:
        """Mean seconds of as many tokens as ``ids``; it goes on with its own likeliest ones."""
        answer = self.ask({"call": "generate", "count": len(ids) + 1})
        return {"seconds": [answer["seconds"]]}

    def cache_bytes(self) -> int | None:
        """Its server does not say."""
        return None


def open_peers(
    args: argparse.Namespace, folder: str, stack: contextlib.ExitStack
) -> dict[str, Peer]:
    """A process for each side that is not ours, ended with ``stack``.

    Raises:
      UserError: a peer cannot run, or ``--peer-defaults`` has nothing to act on.
    """
    if args.peer_defaults and "llama.cpp" not in args.peer:
        raise UserError("--peer-defaults is an option of llama.cpp: give --peer llama.cpp too")
    threads = os.cpu_count() or 1
    context = args.context + args.tokens + 512
    peers: dict[str, Peer] = {}
    for name in [*dict.fromkeys(args.peer), *([DEFAULTS] if args.peer_defaults else [])]:
        if name == "transformers":
            peers[name] = Peer(name, args.peer_python, folder, threads)
        else:
            peers[name] = LlamaCpp(
                "llama.cpp",
                args.peer_python,
                folder,
                threads,
                context=context,
                defaults=name == DEFAULTS,
            )
        stack.callback(peers[name].close)
    return peers


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
    ids = rng.integers(0, MODEL["vocab_size"], args.context).astype(np.int32)
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
        new = rng.integers(0, MODEL["vocab_size"], args.tokens).astype(np.int32)
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
    if min(args.context, args.longest, args.tokens, args.rounds) < 1:
        raise UserError("--context, --longest, --tokens and --rounds must be at least 1")
    model = DeepseekV4(parse_config(MODEL), nnx.Rngs(args.seed))
    runtime = DeepseekV4Runtime(model)
    rng = np.random.default_rng(args.seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(MODEL))
        if args.peer:
            save_safetensors(model, pathlib.Path(folder) / "model.safetensors")
        peers = open_peers(args, folder, stack)
        ours = Ours(runtime, args.tile, max(args.longest, args.context) + 512)
        rates = measure_rates(ours, peers, args, rng)
        held = measure_bytes(ours, peers, args.context)
    growth = measure_growth(ours, args, rng)
    result = {
        **_machine(),
        "peers": {name: peer.about for name, peer in peers.items()},
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


def engine(args: argparse.Namespace) -> int:
    """The ``engine`` subcommand."""
    model = DeepseekV4(parse_config(MODEL), nnx.Rngs(args.seed))
    result = {**_machine(), **benchmark_engine.measure(DeepseekV4Runtime(model), args)}
    benchmark_engine.report(result)
    command_line.write_json(args.json, result)
    return 0


def schemes(args: argparse.Namespace) -> int:
    """The ``schemes`` subcommand."""
    model = DeepseekV4(parse_config(MODEL), nnx.Rngs(args.seed))
    result = {**_machine(), **benchmark_schemes.measure(model, args)}
    benchmark_schemes.report(result)
    command_line.write_json(args.json, result)
    return 0


def tiers(args: argparse.Namespace) -> int:
    """The ``tiers`` subcommand."""
    model = DeepseekV4(parse_config(MODEL), nnx.Rngs(args.seed))
    result = {**_machine(), **benchmark_tiers.measure(DeepseekV4Runtime(model), args)}
    benchmark_tiers.report(result)
    command_line.write_json(args.json, result)
    return 0


def kernels(args: argparse.Namespace) -> int:
    """The ``kernels`` subcommand."""
    result = {**_machine(), **benchmark_kernels.measure(args)}
    benchmark_kernels.report(result)
    command_line.write_json(args.json, result)
    return 0


def serve(args: argparse.Namespace) -> int:
    """The ``serve`` subcommand."""
    import benchmark_serve  # which needs the extra that the others do without

    result = {**_machine(), **benchmark_serve.measure(args)}
    benchmark_serve.report(result)
    command_line.write_json(args.json, result)
    return 0


def observe(args: argparse.Namespace) -> int:
    """The ``observe`` subcommand; exit status 1 where it costs more than its share."""
    result = {**_machine(), **benchmark_observe.measure(args)}
    command_line.write_json(args.json, result)
    return benchmark_observe.report(result)


def _serve_parser(commands: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        "serve", help="what the HTTP server adds to a request"
    )
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens of a request")
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--tile", type=int, default=64)
    parser.add_argument("--spread", type=float, default=0.05, help="seconds in which all arrive")
    parser.set_defaults(run=serve)
    return parser


def _machine() -> dict[str, Any]:
    return {
        "device": command_line.device_name(),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
    }


def main() -> int:
    """Dispatches to the subcommand."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("decode", help="prefill, decode and cache bytes of one sequence")
    one.add_argument(
        "--peer", nargs="+", default=[], choices=list(PEERS), help="measure these in turn with ours"
    )
    one.add_argument(
        "--peer-defaults",
        action="store_true",
        help="measure llama.cpp with its own half-precision cache and flash attention too",
    )
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
    four = commands.add_parser("engine", help="many requests together in one engine")
    benchmark_engine.add_arguments(four)
    four.set_defaults(run=engine)
    five = commands.add_parser("schemes", help="hybrid cache, generic cache and no reuse")
    benchmark_schemes.add_arguments(five)
    five.set_defaults(run=schemes)
    six = commands.add_parser("tiers", help="host memory and disk beside the device")
    benchmark_tiers.add_arguments(six)
    six.set_defaults(run=tiers)
    seven = commands.add_parser("kernels", help="each kernel operation alone")
    benchmark_kernels.add_arguments(seven)
    seven.set_defaults(run=kernels)
    eight = _serve_parser(commands)
    nine = commands.add_parser("observe", help="what metrics and events take of a turn")
    benchmark_observe.add_arguments(nine)
    nine.set_defaults(run=observe)
    for some in (two, three, four, five, six, seven, eight, nine):
        some.add_argument("--seed", type=int, default=0)
        some.add_argument("--json", metavar="FILE", help="write the result here too")
    args = parser.parse_args(sys.argv[1:])
    command_line.use_compilation_cache()
    return args.run(args)


if __name__ == "__main__":
    command_line.run(main)
