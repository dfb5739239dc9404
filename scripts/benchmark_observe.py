"""What being observed costs a turn: of the hot path, while nobody asks and while somebody does.

One engine computes prompts and decodes a full batch; what metrics and events do on its thread is
timed where it happens and compared with the turns themselves, so that noise of the turns does not
hide it. Prompts publish their blocks, so that each of their turns has something to tell; decoding
has nothing. A scraper reads the metrics page far more often than Prometheus would, and both event
streams are served; what another thread does for them is not in the figures.
"""

import argparse
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
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
from hybridkv.state.capacity import Capacity
from models.deepseek_v4.checkpoint import load_model
from models.deepseek_v4.runtime import DeepseekV4Runtime

MOST = 0.01
"""Share of a turn that observing may cost."""
SHARES = {
    "share": "decoding, nobody asks",
    "scraped_share": "decoding, pages are read",
    "prompt_share": "prompts, every turn publishes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument("--slots", type=int, default=8, help="requests that run together")
    parser.add_argument("--context", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--turns", type=int, default=400, help="turns of each part that decodes")
    parser.add_argument("--scrape-s", type=float, default=0.5, help="between two scrapes")


def _check(args: argparse.Namespace) -> None:
    if min(args.slots, args.context, args.turns) < 1 or args.scrape_s <= 0:
        raise UserError("--slots, --context, --turns and --scrape-s must be positive")


class Timed:
    """A callback with the time that it has taken, and what of it its thread computed."""

    def __init__(self, call: Callable[..., None]) -> None:
        self.call, self.seconds, self.cpu = call, 0.0, 0.0

    def __call__(self, *given: Any) -> None:
        """Calls it."""
        began, computed = time.perf_counter(), time.thread_time()
        self.call(*given)
        self.cpu += time.thread_time() - computed
        self.seconds += time.perf_counter() - began


@contextlib.contextmanager
def _timed(callbacks: list[Any]) -> Iterator[list[Timed]]:
    """The callbacks of a list with their times, and as they were afterwards."""
    timed = [Timed(call) for call in callbacks]
    callbacks[:] = timed
    yield timed
    callbacks[:] = [each.call for each in timed]


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


def _submit(engine: Engine, args: argparse.Namespace, rng: np.random.Generator) -> None:
    """A full batch of new prompts that then goes on decoding for all parts."""
    for _ in range(args.slots):
        ids = rng.integers(0, engine.runner.model.vocab_size, args.context).astype(np.int32)
        engine.submit(Request(prompt=ids, max_new_tokens=3 * args.turns))


def _prefilling(engine: Engine) -> bool:
    return any(not task.output.pieces for task in engine._tasks.values())


def _turns(engine: Engine, more: Callable[[int], bool]) -> tuple[float, dict[str, float]]:
    """Seconds of a turn, and of them in metrics and events, as long as there are to be more."""
    runner = engine.runner
    with (
        _timed(engine.on_turn) as (metrics, flush),
        _timed(runner.allocator.on_touched) as touched,
        _timed(runner.directory.on_publish) as published,
    ):
        began, count = time.perf_counter(), 0
        while more(count):
            engine.step()
            count += 1
        seconds = time.perf_counter() - began
    events = (flush, *touched, *published)
    return seconds / count, {
        "metrics": metrics.seconds / count,
        "events": sum(each.seconds for each in events) / count,
        "events_cpu": sum(each.cpu for each in events) / count,
    }


def _spent(parts: dict[str, float]) -> float:
    return parts["metrics"] + parts["events"]


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


def _scraped(engine: Engine, args: argparse.Namespace) -> tuple[float, dict[str, float], int]:
    """As ``_turns`` while a thread reads pages; and how many it read."""
    ended, pages = threading.Event(), 0

    def scrape() -> None:
        nonlocal pages
        while not ended.wait(args.scrape_s):
            exposition(engine)
            pages += 1

    thread = threading.Thread(target=scrape)
    thread.start()
    turn, spent = _turns(engine, lambda count: count < args.turns)
    ended.set()
    thread.join()
    return turn, spent, pages


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All parts, as JSON.

    Raises:
      UserError: a number is not positive.
    """
    from hybridkv.observe.publisher import EventOptions, EventPublisher, StreamOptions

    _check(args)
    engine, rng = _engine(args), np.random.default_rng(args.seed)
    reader_of(engine)
    streams = [
        StreamOptions(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
        for _ in range(2)
    ]
    with EventPublisher(engine, EventOptions(router=streams[0], entries=streams[1])) as events:
        _submit(engine, args, rng)  # to have run everything once
        _turns(engine, lambda _: _prefilling(engine))
        engine.reset()
        _submit(engine, args, rng)
        before = events.sent("router")
        prompt_turn, prompts = _turns(engine, lambda _: _prefilling(engine))
        events.drain()
        messages = events.sent("router") - before
        turn, quiet = _turns(engine, lambda count: count < args.turns)
        scraped_turn, scraped, pages = _scraped(engine, args)
        tokens = args.slots * _note_seconds()
        counted, geometry = engine.counters.prompts, engine.runner.model.geometry
        plan = engine.runner.plan(engine.runner.chain(np.arange(args.context) % 7))
        account = _each(lambda: counted.plus(plan, geometry), 2000)
        lock = _each(lambda: _lock(engine))
        engine.reset()
    always = tokens + lock
    return {
        "slots": args.slots,
        "context": args.context,
        "turns": args.turns,
        "turn_us": turn * 1e6,
        "metrics_us": quiet["metrics"] * 1e6,
        "events_us": quiet["events"] * 1e6,
        "tokens_us": tokens * 1e6,
        "lock_us": lock * 1e6,
        "share": (_spent(quiet) + always) / turn,
        "pages": pages,
        "scraped_turn_us": scraped_turn * 1e6,
        "scraped_events_us": scraped["events"] * 1e6,
        "scraped_metrics_us": scraped["metrics"] * 1e6,
        "scraped_share": (_spent(scraped) + always) / scraped_turn,
        "prompt_turn_us": prompt_turn * 1e6,
        "prompt_events_us": prompts["events"] * 1e6,
        "prompt_events_cpu_us": prompts["events_cpu"] * 1e6,
        "prompt_messages": messages,
        "prompt_us": account * 1e6,
        "prompt_share": (_spent(prompts) + always + account) / prompt_turn,
        "most": MOST,
    }


def report(result: dict[str, Any]) -> int:
    """Prints tables; 1 where observing costs more than its share, else 0."""
    rows = [
        ("a turn that decodes", f"{result['turn_us']:,.1f}"),
        ("metrics, nobody asks", f"{result['metrics_us']:,.2f}"),
        (
            f"metrics, {result['pages']} pages read meanwhile",
            f"{result['scraped_metrics_us']:,.2f}",
        ),
        ("events, nothing published", f"{result['events_us']:,.2f}"),
        (f"notes of {result['slots']} tokens", f"{result['tokens_us']:,.2f}"),
        ("the turn's lock", f"{result['lock_us']:,.2f}"),
        ("a turn of prompts", f"{result['prompt_turn_us']:,.1f}"),
        (
            f"events, {result['prompt_messages']} messages told",
            f"{result['prompt_events_us']:,.2f}",
        ),
        ("of that computing, not waiting", f"{result['prompt_events_cpu_us']:,.2f}"),
        ("a prompt's account, once a prompt", f"{result['prompt_us']:,.2f}"),
    ]
    command_line.print_table("what observing costs", ["part of a turn", "µs"], rows)
    for name, words in SHARES.items():
        print(f"{words}: {result[name]:.3%} of a turn (at most {result['most']:.0%})")
    return int(max(result[name] for name in SHARES) > result["most"])
