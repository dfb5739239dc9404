"""Many requests in one engine: rates, evenness of tokens, and what a turn costs beside its steps.

Everything is built before the guard is armed: one engine, one generator with one slot, and a second
cache for the bare loop, which runs the engine's own executables. The sides of a comparison take
turns; medians count.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import command_line
import jax
import numpy as np

from hybridkv.arithmetic import cdiv
from hybridkv.engine.engine import Engine
from hybridkv.engine.generate import Generator
from hybridkv.engine.guard import CompileGuard
from hybridkv.engine.handle import Handle
from hybridkv.engine.requests import Request
from hybridkv.engine.runner import RunnerOptions
from hybridkv.engine.sampling import Sampler, SamplingBatch, SamplingOptions
from hybridkv.engine.steps import prompt_tiles
from hybridkv.errors import UserError
from hybridkv.state import leaf
from hybridkv.state.batch import DecodeBatch, StepOptions
from hybridkv.state.cache import Cache, assign_in_order
from hybridkv.state.capacity import Capacity
from models.deepseek_v4.runtime import DeepseekV4Runtime

SPARE = 8
"""Tokens beyond those that are measured."""
QUEUED = 2
"""Prompts kept on their way where one is always to be computed: one runs, one waits."""
BARS = {
    "times_one_request": ("times one request in the same engine", ">=", 3.0),
    "times_generator": ("times a generator with one slot", ">=", 3.0),
    "p99_over_p50": ("time between tokens, p99 / p50, prompts all the time", "<=", 2.0),
    "overhead": ("share of a decoding turn that is the engine's own", "<=", 0.10),
    "compilations": ("compilations", "<=", 0),
}
"""What is asked: words, and a bound."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sizes of the measurement."""
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--context", type=int, default=1000, help="tokens of a prompt that decodes")
    parser.add_argument("--tokens", type=int, default=48, help="turns measured a round and side")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tile", type=int, default=128)
    parser.add_argument("--turns", type=int, default=300, help="turns with prompts arriving")
    parser.add_argument("--streams", type=int, default=4, help="requests that decode meanwhile")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of an arriving prompt")
    parser.add_argument("--prompt-new", type=int, default=4, help="new tokens of an arriving one")
    parser.add_argument("--busy", type=float, default=0.5, help="share of time with a prompt")
    parser.add_argument("--requests", type=int, default=24, help="requests of the mixed run")


def _check(args: argparse.Namespace) -> None:
    if not 1 <= args.streams < args.slots:
        raise UserError(
            f"--streams is {args.streams}: give 1 to {args.slots - 1}, prompts need a slot too"
        )
    if not 0.0 < args.busy < 1.0:
        raise UserError(f"--busy is {args.busy}: give a share between 0 and 1")
    for name in ("context", "tokens", "rounds", "prompt", "prompt_new", "requests"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1")
    if args.turns < 2:
        raise UserError(f"--turns is {args.turns}: give at least 2, a gap has two ends")


class Bench:
    """What is measured; nothing compiles after this."""

    def __init__(self, runtime: DeepseekV4Runtime, args: argparse.Namespace) -> None:
        self.args, self.runtime = args, runtime
        self.rng = np.random.default_rng(args.seed)
        self.options = StepOptions(tile=args.tile, sequential=jax.default_backend() == "cpu")
        # The first of several prompts decodes while the others are computed.
        self.while_starting = args.slots * cdiv(args.context, args.tile) + SPARE
        tokens = max(args.context + self.while_starting + max(args.tokens, args.turns), args.prompt)
        each = Capacity.for_tokens(runtime.geometry, tokens=tokens + args.prompt_new + SPARE)
        capacity = Capacity(
            blocks=2 * args.slots * each.blocks,  # what was published stays a while
            slots=args.slots,
            blocks_per_sequence=each.blocks_per_sequence,
        )
        self.generator = Generator(
            runtime, self.options, capacity_tokens=args.context + args.tokens + SPARE
        )
        self.bare = Bare(runtime, capacity)
        self.engine = Engine(
            runtime, self.options, RunnerOptions(capacity=capacity, snapshots=8 * args.slots)
        )
        self.prompts = [self.ids(args.context) for _ in range(args.slots)]
        self.guard = CompileGuard()
        self.guard.arm()

    def ids(self, length: int) -> np.ndarray:
        """Random tokens."""
        return self.rng.integers(0, self.runtime.vocab_size, length).astype(np.int32)

    def start(self, count: int, turns: int) -> list[Handle]:
        """Requests that all decode now, and go on for ``turns`` more turns at least."""
        new = self.while_starting + turns
        handles = [
            self.engine.submit(Request(prompt=prompt, max_new_tokens=new))
            for prompt in self.prompts[:count]
        ]
        while not all(handle.output.pieces for handle in handles):
            self.engine.step()
            self._check_running(handles)
        return handles

    def stop(self, handles: Sequence[Handle]) -> None:
        """Ends them; what they published stays, so that the next start is short."""
        self._check_running(handles)
        for handle in handles:
            handle.cancel()

    def _check_running(self, handles: Sequence[Handle]) -> None:
        ended = [handle.output for handle in handles if handle.done]
        if ended:
            raise RuntimeError(f"a measured request ended: {ended[0].finish}, {ended[0].reason}")

    def turn(self, tokens: int) -> float:
        """Seconds of one turn that gives exactly so many tokens and computes no prompt."""
        counters = self.engine.counters
        before = (counters.new_tokens + tokens, counters.tile_steps)
        began = time.perf_counter()
        self.engine.step()
        seconds = time.perf_counter() - began
        if (counters.new_tokens, counters.tile_steps) != before:
            raise RuntimeError(f"a turn was to decode {tokens} requests and nothing else")
        return seconds


class Bare:
    """The executables of a decoding turn in a loop, with all arguments on the device already."""

    def __init__(self, runtime: DeepseekV4Runtime, capacity: Capacity) -> None:
        slots, vocab = capacity.slots, runtime.vocab_size
        cache = assign_in_order(Cache.init(runtime.geometry, capacity))
        self.cache = jax.device_put(cache, leaf.placement())
        self.sampler = Sampler(vocab_size=vocab, slots=slots)
        self.state = self.sampler.warm_up(
            self.sampler.init_state(leaf.placement()), slots, placement=leaf.placement()
        )
        self.batch = DecodeBatch(
            tokens=jax.device_put(np.arange(slots, dtype=np.int32) % vocab),
            active=jax.device_put(np.ones(slots, bool)),
        )
        self.rows = SamplingBatch.of([SamplingOptions()] * slots)
        self.positions = jax.device_put(np.zeros(slots, np.int32))

    def fill(self, engine: Engine, prompts: Sequence[np.ndarray]) -> None:
        """Consumes a prompt a slot."""
        steps = engine.runner.steps
        for slot, prompt in enumerate(prompts):
            for batch in prompt_tiles(prompt, slot, steps.options, len(prompts)):
                _, self.cache = steps.tile(batch, self.cache)
        jax.block_until_ready(self.cache)

    def turn(self, engine: Engine) -> float:
        """Seconds of a decode step and the choice of its tokens."""
        began = time.perf_counter()
        logits, self.cache = engine.runner.steps.decode(self.batch, self.cache)
        sampled, self.state = self.sampler.sample(logits, self.positions, self.rows, self.state)
        jax.block_until_ready(sampled)
        return time.perf_counter() - began


def measure_rates(bench: Bench) -> dict[str, Any]:
    """Decode rates of all slots together, of one request alone, and of a generator."""
    args = bench.args

    def in_engine(count: int) -> list[float]:
        handles = bench.start(count, args.tokens)
        seconds = [bench.turn(count) for _ in range(args.tokens)]
        bench.stop(handles)
        return seconds

    def generated() -> list[float]:
        stream = bench.generator.stream(bench.prompts[0], max_new_tokens=args.tokens + 1)
        next(stream)
        seconds, began = [], time.perf_counter()
        for _ in stream:
            now = time.perf_counter()
            seconds.append(now - began)
            began = now
        return seconds

    sides: dict[str, Callable[[], list[float]]] = {
        "together": lambda: in_engine(args.slots),
        "one_request": lambda: in_engine(1),
        "generator": generated,
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, side in sides.items():
            seconds[name] += side()
    rates = {
        name: (args.slots if name == "together" else 1) / _median(values)
        for name, values in seconds.items()
    }
    return {
        "turn_ms": {name: 1e3 * _median(values) for name, values in seconds.items()},
        "tokens_per_second": rates,
        "times_one_request": rates["together"] / rates["one_request"],
        "times_generator": rates["together"] / rates["generator"],
    }


def measure_overhead(bench: Bench) -> dict[str, Any]:
    """A turn that decodes every slot against its executables alone, one after the other."""
    args = bench.args
    bench.bare.fill(bench.engine, bench.prompts)
    handles = bench.start(args.slots, args.turns)
    turns, bare = [], []
    for number in range(args.turns):
        if number % 2:  # neither always runs in the other's wake
            bare.append(bench.bare.turn(bench.engine))
        turns.append(bench.turn(args.slots))
        if not number % 2:
            bare.append(bench.bare.turn(bench.engine))
    bench.stop(handles)
    turn, alone = _median(turns), _median(bare)
    return {
        "turn_ms": 1e3 * turn,
        "bare_ms": 1e3 * alone,
        "overhead_ms": 1e3 * (turn - alone),
        "overhead": (turn - alone) / turn,
    }


Due = Callable[[float, int], bool]
"""(seconds now, prompts on their way) to whether another one arrives now."""


def always(now: float, on_their_way: int) -> bool:
    """Prompts so that one is computed in every turn."""
    del now
    return on_their_way < QUEUED


def poisson(rng: np.random.Generator, rate: float) -> Due:
    """Prompts that arrive ``rate`` times a second, whatever became of those before."""
    following = time.perf_counter() + rng.exponential(1 / rate)

    def due(now: float, on_their_way: int) -> bool:
        nonlocal following
        del on_their_way
        if now < following:
            return False
        following += rng.exponential(1 / rate)
        return True

    return due


def measure_streams(bench: Bench, due: Due) -> dict[str, Any]:
    """Time between the tokens of streams that decode while prompts arrive.

    A token's time is read after the turn that gave it, so a gap is a whole turn, scheduling
    and submissions between two turns included.
    """
    args, counters = bench.args, bench.engine.counters
    streams = bench.start(args.streams, args.turns)
    arrived: list[Handle] = []
    given, times = [len(s.output.pieces) for s in streams], [0.0] * len(streams)
    gaps: list[float] = []
    with_tile: list[bool] = []
    for number in range(args.turns):
        on_their_way = sum(not handle.done for handle in arrived)
        while due(time.perf_counter(), on_their_way):
            request = Request(prompt=bench.ids(args.prompt), max_new_tokens=args.prompt_new)
            arrived.append(bench.engine.submit(request))
            on_their_way += 1
        tiles = counters.tile_steps
        bench.engine.step()
        now = time.perf_counter()
        for which, stream in enumerate(streams):
            if len(stream.output.pieces) == given[which]:
                continue
            if number:  # the first token's predecessor was not timed
                gaps.append(now - times[which])
                with_tile.append(counters.tile_steps > tiles)
            given[which], times[which] = len(stream.output.pieces), now
    bench.stop(streams)
    ended = sum(handle.done for handle in arrived)
    for handle in arrived:
        handle.cancel()
    return _gaps(np.array(gaps), np.array(with_tile)) | {
        "prompts_arrived": len(arrived),
        "prompts_ended": ended,
    }


def _gaps(gaps: np.ndarray, with_tile: np.ndarray) -> dict[str, Any]:
    """Percentiles of seconds between tokens, and what the two sorts of turns take."""
    p50, p99 = (float(x) for x in np.percentile(gaps, (50, 99)))
    result: dict[str, Any] = {
        "tokens": len(gaps),
        "p50_ms": 1e3 * p50,
        "p99_ms": 1e3 * p99,
        "p99_over_p50": p99 / p50,
        "share_of_tokens_beside_a_tile": float(np.mean(with_tile)),
        "share_of_time_beside_a_tile": float(gaps[with_tile].sum() / gaps.sum()),
    }
    for name, sort in (("with_tile_ms", with_tile), ("without_tile_ms", ~with_tile)):
        result[name] = 1e3 * _median(gaps[sort]) if sort.any() else None
    return result


def measure_arrivals(bench: Bench) -> dict[str, Any]:
    """Streams while prompts arrive without a pause, and at a rate that leaves pauses."""
    args = bench.args
    full = measure_streams(bench, always)
    seconds = full["with_tile_ms"] / 1e3 * cdiv(args.prompt, args.tile)
    rate = args.busy / seconds
    part = measure_streams(bench, poisson(bench.rng, rate))
    part |= {"rate_per_second": rate, "asked_share_of_time": args.busy}
    with_tile, without = part["with_tile_ms"], part["without_tile_ms"]
    if with_tile and without:
        part["tile_over_decode_turn"] = (with_tile - without) / without
        part["note"] = (
            f"two sorts of turns: {without:.1f} ms without a tile, {with_tile:.1f} ms with one. "
            f"A tile step costs {part['tile_over_decode_turn']:.1f} such turns, so p50 and p99 "
            "fall into different sorts where prompts come and go"
        )
    return {"always": full, "poisson": part}


def measure_mixed(bench: Bench) -> dict[str, Any]:
    """Requests of many lengths, all submitted at once; half of them share a beginning."""
    args, rng, engine = bench.args, bench.rng, bench.engine
    engine.reset()
    head = bench.ids(cdiv(args.context, 2))
    requests = []
    for number in range(args.requests):
        length = int(rng.integers(max(args.context // 4, 1), args.context + 1))
        prompt = bench.ids(length)
        if number % 2 and length > 1:
            prompt = np.concatenate([head, prompt])[:length]
        new = int(rng.integers(max(args.tokens // 4, 1), args.tokens + 1))
        requests.append(Request(prompt=prompt, max_new_tokens=new))
    before = (engine.counters.new_tokens, engine.counters.computed_tokens)
    began = time.perf_counter()
    outputs = engine.run(requests)
    seconds = time.perf_counter() - began
    new, computed = (
        after - earlier
        for after, earlier in zip(
            (engine.counters.new_tokens, engine.counters.computed_tokens), before, strict=True
        )
    )
    prompts = sum(output.prompt_tokens for output in outputs)
    return {
        "requests": len(requests),
        "seconds": seconds,
        "prompt_tokens": prompts,
        "reused_tokens": sum(output.reused for output in outputs),
        "computed_tokens": computed,
        "new_tokens": new,
        "new_tokens_per_second": new / seconds,
        "tokens_per_second": (prompts + new) / seconds,
    }


def measure(runtime: DeepseekV4Runtime, args: argparse.Namespace) -> dict[str, Any]:
    """Everything, with the bars.

    Raises:
      UserError: a size is out of its range.
    """
    _check(args)
    bench = Bench(runtime, args)
    rates = measure_rates(bench)
    overhead = measure_overhead(bench)
    arrivals = measure_arrivals(bench)
    mixed = measure_mixed(bench)
    probe = bench.engine.probe
    result: dict[str, Any] = {
        "slots": args.slots,
        "context": args.context,
        "rounds": args.rounds,
        "tile": args.tile,
        "sequential": bench.options.sequential,
        "probe": probe.detail if probe is not None else None,
        "decode": rates,
        "overhead": overhead,
        "streams": args.streams,
        "prompt": args.prompt,
        "turns": args.turns,
        "between_tokens": arrivals,
        "mixed": mixed,
        "compilations": bench.guard.count,
        "compiled": list(bench.guard.names),
    }
    values = {
        "times_one_request": rates["times_one_request"],
        "times_generator": rates["times_generator"],
        "p99_over_p50": arrivals["always"]["p99_over_p50"],
        "overhead": overhead["overhead"],
        "compilations": result["compilations"],
    }
    result["bars"] = {
        name: {
            "value": values[name],
            "bar": bar,
            "met": values[name] >= bar if sense == ">=" else values[name] <= bar,
        }
        for name, (_, sense, bar) in BARS.items()
    }
    return result


def report(result: dict[str, Any]) -> None:
    """Prints tables."""
    command_line.print_table(
        f"{result['slots']} requests at {result['context']} tokens on {result['device']}",
        ["what", "measured", "bar", "met"],
        [
            (words, f"{row['value']:.3g}", f"{sense} {bar:g}", "yes" if row["met"] else "NO")
            for name, (words, sense, bar) in BARS.items()
            for row in [result["bars"][name]]
        ],
    )
    decode, overhead, mixed = result["decode"], result["overhead"], result["mixed"]
    command_line.print_table(
        "decoding",
        ["side", "turn, ms", "tokens/s"],
        [
            (name, f"{ms:.2f}", f"{decode['tokens_per_second'][name]:.1f}")
            for name, ms in decode["turn_ms"].items()
        ]
        + [
            ("together, beside the bare loop", f"{overhead['turn_ms']:.2f}", "-"),
            ("bare loop of the same steps", f"{overhead['bare_ms']:.2f}", "-"),
        ],
    )
    command_line.print_table(
        f"time between tokens of {result['streams']} streams, ms",
        ["prompts", "p50", "p99", "p99/p50", "turn without tile", "with tile", "time beside tiles"],
        [
            (
                name,
                f"{row['p50_ms']:.1f}",
                f"{row['p99_ms']:.1f}",
                f"{row['p99_over_p50']:.2f}",
                *("-" if row[x] is None else f"{row[x]:.1f}" for x in SORTS),
                f"{row['share_of_time_beside_a_tile']:.0%}",
            )
            for name, row in result["between_tokens"].items()
        ],
    )
    print(result["between_tokens"]["poisson"].get("note", ""))
    print(
        f"mixed run of {mixed['requests']} requests: {mixed['tokens_per_second']:.1f} tokens/s, "
        f"{mixed['new_tokens_per_second']:.1f} new ones/s, {mixed['reused_tokens']} of "
        f"{mixed['prompt_tokens']} prompt tokens reused"
    )


SORTS = ("without_tile_ms", "with_tile_ms")


def _median(values: Any) -> float:
    return float(np.median(values))
