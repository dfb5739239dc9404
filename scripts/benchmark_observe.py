"""What being observed costs a turn: of the hot path, while nobody asks and while somebody does.

    python scripts/benchmark_observe.py --json docs/benchmarks/observe.json

One engine decodes a full batch; what metrics and events do on its thread is timed where it happens
and compared with the turns themselves, so that noise of the turns does not hide it. A scraper reads
the metrics page far more often than Prometheus would, and both event streams are served.
"""

import argparse
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import command_line
import numpy as np

from hybridkv.engine.counters import EngineCounters
from hybridkv.engine.engine import Engine
from hybridkv.engine.generate import default_options
from hybridkv.engine.requests import Output, Piece, Request
from hybridkv.engine.runner import RunnerOptions
from hybridkv.errors import UserError
from hybridkv.observe.numbers import reader_of
from hybridkv.observe.prometheus import exposition
from hybridkv.observe.publisher import EventOptions, EventPublisher, StreamOptions
from hybridkv.state.capacity import Capacity
from models.deepseek_v4.checkpoint import load_model
from models.deepseek_v4.runtime import DeepseekV4Runtime

MOST = 0.01
"""Share of a turn that observing may cost."""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=8, help="requests that decode together")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--turns", type=int, default=400, help="turns of each part")
    parser.add_argument("--scrape-s", type=float, default=0.5, help="between two scrapes")
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    args = parser.parse_args(argv)
    if min(args.slots, args.context, args.turns) < 1 or args.scrape_s <= 0:
        raise UserError("--slots, --context, --turns and --scrape-s must be positive")
    return args


class Timed:
    """A callback with the time that it has taken."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call, self.seconds = call, 0.0

    def __call__(self) -> None:
        """Calls it."""
        began = time.perf_counter()
        self._call()
        self.seconds += time.perf_counter() - began


def _engine(args: argparse.Namespace) -> Engine:
    runtime = DeepseekV4Runtime(load_model(command_line.DEFAULT_CHECKPOINT))
    steps = default_options(runtime)
    tokens = args.context + 3 * args.turns + 2 * steps.tile
    one = Capacity.for_tokens(runtime.geometry, tokens=tokens)
    slots = args.slots
    capacity = Capacity(
        blocks=one.blocks * (slots + 1), slots=slots, blocks_per_sequence=one.blocks_per_sequence
    )
    return Engine(runtime, steps, RunnerOptions(capacity=capacity, snapshots=64))


def _decoding(engine: Engine, args: argparse.Namespace) -> None:
    """A full batch that goes on decoding for all parts."""
    rng = np.random.default_rng(1)
    for _ in range(args.slots):
        ids = rng.integers(0, engine.runner.model.vocab_size, args.context).astype(np.int32)
        engine.submit(Request(prompt=ids, max_new_tokens=3 * args.turns))
    while any(task.output.first_token_s == 0 for task in engine._tasks.values()):
        engine.step()


def _turns(engine: Engine, count: int) -> tuple[float, dict[str, float]]:
    """Seconds of a turn, and of them in each callback."""
    plain = list(engine.on_turn)
    timed = [Timed(call) for call in plain]
    engine.on_turn[:] = timed
    began = time.perf_counter()
    for _ in range(count):
        engine.step()
    seconds = time.perf_counter() - began
    engine.on_turn[:] = plain
    names = ["metrics", "events"]
    return seconds / count, {
        name: each.seconds / count for name, each in zip(names, timed, strict=False)
    }


def _each(call: Callable[[], Any], count: int = 20_000) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def _lock(engine: Engine) -> None:
    with engine.turn_lock:
        pass


def _note_seconds() -> float:
    """Seconds to note one token."""
    counters = EngineCounters()
    output = Output(prompt_tokens=1, pieces=[Piece(token=1, text="")] * 2, last_token_s=0.02)
    return _each(lambda: counters.note_token(output, 0.01))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All parts, as JSON."""
    engine = _engine(args)
    reader_of(engine)
    streams = [
        StreamOptions(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
        for _ in range(2)
    ]
    with EventPublisher(engine, EventOptions(router=streams[0], entries=streams[1])):
        _decoding(engine, args)
        turn, quiet = _turns(engine, args.turns)
        ended, pages = threading.Event(), 0

        def scrape() -> None:
            nonlocal pages
            while not ended.wait(args.scrape_s):
                exposition(engine)
                pages += 1

        thread = threading.Thread(target=scrape)
        thread.start()
        scraped_turn, scraped = _turns(engine, args.turns)
        ended.set()
        thread.join()
        tokens = args.slots * _note_seconds()
        prompts, geometry = engine.counters.prompts, engine.runner.model.geometry
        plan = engine.runner.plan(engine.runner.chain(np.arange(args.context) % 7))
        prompt = _each(lambda: prompts.plus(plan, geometry), 2000)
        lock = _each(lambda: _lock(engine))
        engine.reset()
        cost = quiet["metrics"] + quiet["events"] + tokens + lock
        scraped_cost = sum(scraped.values()) + tokens + lock
        return {
            "cores": os.cpu_count(),
            "device": command_line.device_name(),
            "slots": args.slots,
            "turn_us": turn * 1e6,
            "metrics_us": quiet["metrics"] * 1e6,
            "events_us": quiet["events"] * 1e6,
            "tokens_us": tokens * 1e6,
            "lock_us": lock * 1e6,
            "prompt_us": prompt * 1e6,
            "share": cost / turn,
            "pages": pages,
            "scraped_metrics_us": scraped["metrics"] * 1e6,
            "scraped_share": scraped_cost / scraped_turn,
        }


def main(argv: list[str] | None = None) -> int:
    """Measures and prints; exit status 1 where observing costs more than its share."""
    args = parse(argv)
    command_line.use_compilation_cache()
    result = measure(args)
    rows = [
        ("a turn", f"{result['turn_us']:,.1f}"),
        ("metrics, nobody asks", f"{result['metrics_us']:,.2f}"),
        ("events, nothing published", f"{result['events_us']:,.2f}"),
        (f"notes of {args.slots} tokens", f"{result['tokens_us']:,.2f}"),
        ("the turn's lock", f"{result['lock_us']:,.2f}"),
        ("a prompt's account, once a prompt", f"{result['prompt_us']:,.2f}"),
        (
            f"metrics, {result['pages']} pages read meanwhile",
            f"{result['scraped_metrics_us']:,.2f}",
        ),
    ]
    command_line.print_table("what observing costs", ["part of a turn", "µs"], rows)
    shares = {name: result[name] for name in ("share", "scraped_share")}
    for name, share in shares.items():
        print(f"{name}: {share:.3%} of a turn (at most {MOST:.0%})")
    command_line.write_json(args.json, result)
    return 1 if max(shares.values()) > MOST else 0


if __name__ == "__main__":
    command_line.run(main)
