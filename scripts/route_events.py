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

from hybridkv.engine.engine import Engine, EngineOptions
from hybridkv.engine.requests import Request
from hybridkv.engine.runner import RunnerOptions
from hybridkv.errors import UserError
from hybridkv.observe.publisher import EventOptions, EventPublisher, StreamOptions
from hybridkv.observe.routing import PrefixIndex, Router
from hybridkv.observe.subscriber import Gap, Subscriber
from hybridkv.prefixes.policy import DEFAULT, NEVER
from hybridkv.state.batch import StepOptions
from hybridkv.state.capacity import Capacity
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


def _engine() -> Engine:
    steps = StepOptions(tile=TILE, key_block=8, index_block=16, expert_rows=4, sequential=True)
    capacity = Capacity(blocks=BLOCKS, slots=SLOTS, blocks_per_sequence=PER_SEQUENCE)
    sizes = RunnerOptions(capacity=capacity, snapshots=SNAPSHOTS)
    return Engine(DeepseekV4Runtime(toy_model()), steps, sizes, EngineOptions(probe=False))


def serve(connection: Connection) -> None:
    """Runs an engine: (tokens, new tokens, whether to keep states) come, what was reused goes."""
    engine = _engine()
    streams = {
        name: StreamOptions(
            endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", topic=name
        )
        for name in STREAMS
    }
    options = EventOptions(router=streams["router"], entries=streams["entries"])
    with EventPublisher(engine, options) as events:
        connection.send(
            {name: (events.endpoint(name), events.endpoint(name, replay=True)) for name in STREAMS}
        )
        while (asked := connection.recv()) is not None:
            tokens, new, keeps = asked
            policy = DEFAULT if keeps else NEVER
            (output,) = engine.run([Request(prompt=tokens, max_new_tokens=new, policy=policy)])
            engine.drain()
            events.flush()
            events.drain()
            told = [events.sent(name) for name in STREAMS]
            connection.send((output.reused, output.computed, told))
    engine.close()


class Remote:
    """An engine in another process or thread, and the subscriptions to its events."""

    def __init__(self, *, threads: bool) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        runs: Any = threading.Thread if threads else spawn.Process
        self._runs = runs(target=serve, args=(theirs,), daemon=True)
        self._runs.start()
        self._subscribers: dict[str, Subscriber] = {}

    def connect(self) -> None:
        """Waits until it is there, and subscribes."""
        for name, (endpoint, replay) in self._connection.recv().items():
            self._subscribers[name] = Subscriber(endpoint, replay, topic=name)

    def ask(self, tokens: np.ndarray, *, new: int = 4, keeps: bool = True) -> tuple[int, int]:
        """Runs a request: tokens that were reused, and computed."""
        self._connection.send((tokens, new, keeps))
        reused, computed, self._told = self._connection.recv()
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
