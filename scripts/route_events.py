r"""Two engines and a router that sends a request where its prefix can be resumed.

    python scripts/route_events.py
    python scripts/route_events.py --threads --documents 2

    engine A --events--> router --request--> the engine that computes the fewest tokens
    engine B --events--/

Each engine is a process (with ``--threads`` a thread) with the TOY model and its own cache; the
router knows nothing of them but their events: the blocks, in the shape of vLLM's KV events, and
what resuming on them costs. One document is first prepared to show the difference: engine A has
more blocks of it, and engine B a sequence state. The exit status is 1 where an engine reused
something else than its events promised.
"""

import argparse
import multiprocessing
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import command_line
import numpy as np

from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.transitions import TierState
from hybridkv.engine.engine import Engine, EngineOptions
from hybridkv.engine.requests import Request
from hybridkv.engine.runner import RunnerOptions
from hybridkv.errors import UserError
from hybridkv.observe.metric import tier_name
from hybridkv.observe.publisher import EventOptions, EventPublisher, StreamOptions
from hybridkv.observe.routing import PrefixIndex, Router
from hybridkv.observe.subscriber import Gap, Subscriber
from hybridkv.prefixes.policy import DEFAULT, NEVER
from hybridkv.state.batch import StepOptions
from hybridkv.state.capacity import Capacity
from hybridkv.tiers.options import TierOptions
from models.deepseek_v4.runtime import DeepseekV4Runtime
from models.deepseek_v4.toy import TOY, toy_model

TILE, BLOCKS, SNAPSHOTS, PER_SEQUENCE, SLOTS = 16, 96, 24, 16, 2
NAMES = ("A", "B")
STREAMS = ("router", "entries")
_WAIT_S = 10.0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=3, help="each is asked about three times")
    parser.add_argument("--threads", action="store_true", help="engines in this process")
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    args = parser.parse_args(argv)
    if args.documents < 1:
        raise UserError(f"--documents must be at least 1, got {args.documents}")
    return args


# An engine.


def _engine(tiers: TierOptions | None = None) -> Engine:
    steps = StepOptions(tile=TILE, key_block=8, index_block=16, expert_rows=4, sequential=True)
    capacity = Capacity(blocks=BLOCKS, slots=SLOTS, blocks_per_sequence=PER_SEQUENCE)
    sizes = RunnerOptions(capacity=capacity, snapshots=SNAPSHOTS, tiers=tiers)
    return Engine(DeepseekV4Runtime(toy_model()), steps, sizes, EngineOptions(probe=False))


def two_streams(**more: Any) -> EventOptions:
    """Both streams on free ports of this machine."""
    streams = {
        name: StreamOptions(
            endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", topic=name
        )
        for name in STREAMS
    }
    return EventOptions(router=streams["router"], entries=streams["entries"], **more)


class Commands:
    """What can be asked of an engine by name; everything was told when an answer comes."""

    def __init__(self, engine: Engine, events: EventPublisher) -> None:
        self._engine, self._events = engine, events

    def endpoints(self) -> dict[str, tuple[str | None, str | None]]:
        """By stream: where it is, and where its gaps are asked for."""
        found = self._events.endpoint
        return {name: (found(name), found(name, replay=True)) for name in STREAMS}

    def run(self, tokens: np.ndarray, new: int, keeps: bool) -> tuple[int, int]:
        """A request, with states or without: tokens that were reused, and computed."""
        policy = DEFAULT if keeps else NEVER
        (output,) = self._engine.run([Request(prompt=tokens, max_new_tokens=new, policy=policy)])
        self._engine.drain()
        return output.reused, output.computed

    def evict(self, tier: Tier) -> None:
        """Takes everything that is idle from a tier, once slower tiers have their copies."""
        runner = self._engine.runner
        if runner.mover is not None:
            runner.mover.flush(timeout_s=_WAIT_S)
        for form, many in ((Form.SNAPSHOT, "snapshots"), (Form.BLOCK, "blocks")):
            can_go = runner.allocator.evictable(form, tier)
            runner.allocator.evict(tier=tier, **{many: can_go})

    def has(self, tokens: np.ndarray) -> dict[str, int]:
        """By tier, the blocks of a prompt that the directory has there from the first one on."""
        runner = self._engine.runner
        run = runner.directory.find(runner.chain(tokens)).entries
        here = runner.allocator.entries.state[:, run] == TierState.PRESENT
        return {tier_name(tier): int(here[tier].cumprod().sum()) for tier in Tier}

    def announce(self) -> None:
        """Tells everything again."""
        self._events.announce_all()

    def told(self) -> list[int]:
        """By stream, the messages so far."""
        self._events.flush()
        self._events.drain()
        return [self._events.sent(name) for name in STREAMS]


def serve(connection: Connection, options: EventOptions, tiers: TierOptions | None) -> None:
    """Runs an engine until None comes: a command's name and arguments come, its answer goes."""
    engine = _engine(tiers)
    with EventPublisher(engine, options) as events:
        commands = Commands(engine, events)
        while (asked := connection.recv()) is not None:
            name, *given = asked
            answer = getattr(commands, name)(*given)
            connection.send((answer, commands.told()))
    engine.close()


class Remote:
    """An engine in another process or thread, and the subscriptions to its events."""

    def __init__(
        self,
        *,
        threads: bool,
        options: EventOptions | None = None,
        tiers: TierOptions | None = None,
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        runs: Any = threading.Thread if threads else spawn.Process
        given = (theirs, options or two_streams(), tiers)
        self._runs = runs(target=serve, args=given, daemon=True)
        self._runs.start()
        self._subscribers: dict[str, Subscriber] = {}
        self._told: list[int] = []

    def command(self, name: str, *given: Any) -> Any:
        """One of ``Commands``, and its answer."""
        self._connection.send((name, *given))
        answer, self._told = self._connection.recv()
        return answer

    def connect(self) -> None:
        """Waits until it is there, and subscribes."""
        for name, (endpoint, replay) in self.command("endpoints").items():
            self._subscribers[name] = Subscriber(endpoint, replay, topic=name)

    def ask(self, tokens: np.ndarray, *, new: int = 4, keeps: bool = True) -> tuple[int, int]:
        """Runs a request: tokens that were reused, and computed."""
        reused, computed = self.command("run", tokens, new, keeps)
        return reused, computed

    def read(self, index: PrefixIndex) -> None:
        """Everything that was told up to the last request."""
        for (name, subscriber), last in zip(self._subscribers.items(), self._told, strict=True):
            take = index.take_router if name == "router" else index.take_entries
            end = time.monotonic() + _WAIT_S
            while subscriber.expected < last and time.monotonic() < end:
                for message in (*subscriber.receive(timeout_s=0.05), *subscriber.catch_up()):
                    if isinstance(message, Gap):
                        index.forget()
                    else:
                        take(message.payload)

    def close(self) -> None:
        """Ends it."""
        self._connection.send(None)
        self._runs.join()
        for subscriber in self._subscribers.values():
            subscriber.close()


# Traffic.


def traffic(documents: int) -> list[tuple[str, np.ndarray]]:
    """Questions about documents, in turn: what they are called, and their tokens."""
    rng = np.random.default_rng(11)
    lengths = [96 + 16 * number for number in range(documents)]
    texts = [rng.integers(0, TOY.vocab_size, length).astype(np.int32) for length in lengths]
    found = []
    for turn in range(3):
        for number, text in enumerate(texts):
            question = rng.integers(0, TOY.vocab_size, 9).astype(np.int32)
            title = f"text {number + 1}, {turn + 1}"
            found.append((title, np.concatenate([text, question])))
    return found


def prepared() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A prompt, the part that engine A gets without states, and the part that B gets with them."""
    rng = np.random.default_rng(12)
    text = rng.integers(0, TOY.vocab_size, 160).astype(np.int32)
    return text, text[:145], text[:129]


def route(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs everything; one row a request."""
    remotes = {name: Remote(threads=args.threads) for name in NAMES}
    router, load, rows = Router(NAMES), dict.fromkeys(NAMES, 0), []
    try:
        for remote in remotes.values():
            remote.connect()
        prompt, longer, resumable = prepared()
        remotes["A"].ask(longer, keeps=False)
        remotes["B"].ask(resumable)
        for name, remote in remotes.items():
            remote.read(router.indexes[name])
        for title, tokens in [("prepared", prompt), *traffic(args.documents)]:
            scores = router.scores(tokens)
            name, score = router.choose(tokens, load)
            longest = max(scores, key=lambda each: (scores[each].matched, -load[each]))
            reused, computed = remotes[name].ask(tokens)
            remotes[name].read(router.indexes[name])
            load[name] += computed
            rows.append(
                {
                    "request": title,
                    "tokens": len(tokens),
                    **{f"match {x}": scores[x].matched for x in NAMES},
                    **{f"reuse {x}": scores[x].reused for x in NAMES},
                    "longest": longest,
                    "sent to": name,
                    "promised": score.reused,
                    "reused": reused,
                }
            )
    finally:
        for remote in remotes.values():
            remote.close()
    return rows


def main(argv: list[str] | None = None) -> int:
    """Routes, and prints where each request went."""
    args = parse(argv)
    command_line.use_compilation_cache()
    rows = route(args)
    command_line.print_table(
        "requests, and where their prefix was", list(rows[0]), [list(row.values()) for row in rows]
    )
    total, reused = (sum(row[key] for row in rows) for key in ("tokens", "reused"))
    print(f"{reused:,} of {total:,} prompt tokens were reused")
    command_line.write_json(args.json, rows)
    wrong = [row for row in rows if row["promised"] != row["reused"]]
    for row in wrong:
        print(f"{row['request']}: {row['promised']} promised and {row['reused']} reused")
    return 1 if wrong else 0


if __name__ == "__main__":
    command_line.run(main)
