r"""Two engines before a router that is not ours: what it makes of their events.

    python -m venv .venv-router && .venv-router/bin/pip install -r scripts/peers/dynamo_router.txt
    python scripts/check_router.py --peer-python .venv-router/bin/python

    engine A --events over ZeroMQ---------> Dynamo's router --> which engine has most of a prompt
    engine B --events--> relay that loses --^      |
              <---------------- replay socket -----+

The router comes late, blocks go and come back, messages get lost on their way, a copy moves between
tiers, everything is told anew, and an engine is started again. After each step it must have the
blocks that the engines' own directories show, tier by tier, and send a request to the engine that
has most. The exit status is 1 where it does not.
"""

import argparse
import threading
import time
from collections.abc import Callable
from typing import Any

import command_line
import numpy as np
import route_events
import zmq
from peer_process import PeerProcess

from hybridkv.blocks.entries import Tier
from hybridkv.blocks.pools import PoolSizes
from hybridkv.observe.events import Shape
from hybridkv.tiers.options import TierOptions
from models.deepseek_v4.toy import TOY

REMEDY = "make an environment from scripts/peers/dynamo_router.txt and name its Python"
WORKERS = {"A": 1, "B": 2}
HOST = PoolSizes(blocks=64, snapshots=16)
TIERS = {"device": "device_blocks", "host": "host_pinned_blocks"}
"""Ours, and what the router counts there."""
BLOCK = TOY.geometry().block_tokens
SETTLE_S, NUDGES = 1.0, 5


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", required=True, help=REMEDY)
    parser.add_argument("--shape", choices=[x.value for x in Shape], default=Shape.MAP.value)
    parser.add_argument("--threads", action="store_true", help="engines in this process")
    parser.add_argument("--json", metavar="FILE", help="write the result here too")
    return parser.parse_args(argv)


class Relay:
    """Hands messages of a stream on, and loses some when it is told to."""

    def __init__(self, endpoint: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._in, self._out = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        self._in.subscribe(b"")
        self._in.connect(endpoint)
        port = self._out.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.losing, self.lost, self._ended = False, 0, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended:
            if not self._in.poll(20):
                continue
            message = self._in.recv_multipart()
            if self.losing:
                self.lost += 1
            else:
                self._out.send_multipart(message)

    def close(self) -> None:
        """Ends it."""
        self._ended = True
        self._thread.join()
        self._context.destroy(linger=0)


class Fleet:
    """Both engines, the router, and what was seen."""

    def __init__(self, args: argparse.Namespace) -> None:
        options = route_events.two_streams(shape=Shape(args.shape))
        self._start: Callable[[], route_events.Remote] = lambda: route_events.Remote(
            threads=args.threads, options=options, tiers=TierOptions(host=HOST)
        )
        self.engines = {name: self._start() for name in WORKERS}
        self.relay: Relay | None = None
        self.rows: list[dict[str, Any]] = []
        start = {"block_size": BLOCK}
        self._rng = np.random.default_rng(13)
        try:
            self.router = PeerProcess(args.peer_python, "dynamo_router.py", start, REMEDY)
        except Exception:
            self.close()
            raise

    def register(self, name: str) -> None:
        """Tells the router where an engine's events are; engine B's come over the relay."""
        endpoint, replay = self.engines[name].command("endpoints")["router"]
        if name == "B":
            if self.relay is not None:
                self.relay.close()
            self.relay = Relay(endpoint)
            endpoint = self.relay.endpoint
        call = {"call": "register", "worker": WORKERS[name], "events": endpoint, "replay": replay}
        self.router.ask(call)

    def restart(self, name: str) -> None:
        """An engine ends, and another begins in its place with nothing and from message 0."""
        self.router.ask({"call": "remove", "worker": WORKERS[name]})
        self.engines[name].close()
        self.engines[name] = self._start()
        self.register(name)

    def text(self, count: int) -> np.ndarray:
        """A prompt of random tokens that is one longer than ``count`` blocks."""
        length = count * BLOCK + 1
        return self._rng.integers(0, TOY.vocab_size, length).astype(np.int32)

    def nudge(self) -> None:
        """A message of each engine: who misses some notices it by the next."""
        for engine in self.engines.values():
            engine.ask(self.text(1), new=1, keeps=False)

    def lose(self, tokens: np.ndarray) -> np.ndarray:
        """Engine B computes a prompt, and no message of that reaches the router."""
        assert self.relay is not None
        self.relay.losing = True
        self.engines["B"].ask(tokens)
        end = time.monotonic() + SETTLE_S
        while not self.relay.lost and time.monotonic() < end:
            time.sleep(0.01)
        self.relay.losing = False
        return tokens

    def look(self, tokens: np.ndarray) -> dict[str, dict[str, int]]:
        """What the router has of a prompt, by engine and tier."""
        found = self.router.ask({"call": "look", "tokens": tokens.tolist()})["answer"]
        return {
            name: {tier: found.get(str(worker), {}).get(key, 0) for tier, key in TIERS.items()}
            for name, worker in WORKERS.items()
        }

    def truth(self, tokens: np.ndarray) -> dict[str, dict[str, int]]:
        """What the engines themselves have."""
        return {
            name: {
                tier: count
                for tier, count in engine.command("has", tokens).items()
                if tier in TIERS
            }
            for name, engine in self.engines.items()
        }

    def step(
        self,
        title: str,
        tokens: np.ndarray,
        goes_to: str | None,
        *,
        nudges: int = 0,
        unseen: str | None = None,
    ) -> None:
        """Waits until the router has what is true, and asks where a request goes.

        Args:
          title: of the row.
          tokens: of the request.
          goes_to: the engine that has most of them; None where none has any.
          nudges: times that engines may send another message meanwhile.
          unseen: an engine of whose blocks the router can't know yet.
        """
        expected = self.truth(tokens)
        if unseen is not None:
            expected[unseen] = dict.fromkeys(TIERS, 0)
        for again in range(1 + nudges):
            if again:
                self.nudge()
            end = time.monotonic() + SETTLE_S
            while (seen := self.look(tokens)) != expected and time.monotonic() < end:
                time.sleep(0.01)
            if seen == expected:
                break
        chosen = self.router.ask({"call": "choose", "tokens": tokens.tolist()})["answer"]
        sent_to = {worker: name for name, worker in WORKERS.items()}[chosen["worker_id"]]
        self.rows.append(
            {
                "step": title,
                "expected": expected,
                "router": seen,
                "sent_to": sent_to,
                "right": seen == expected and goes_to in (sent_to, None),
            }
        )

    def close(self) -> None:
        """Ends everything that was started."""
        for engine in self.engines.values():
            engine.close()
        if self.relay is not None:
            self.relay.close()
        if hasattr(self, "router"):
            self.router.close()


def play(fleet: Fleet) -> None:
    """All steps; A has five blocks of a text, and B eight until something happens to them."""
    text, a, b = fleet.text(8), fleet.engines["A"], fleet.engines["B"]
    a.ask(text[: 5 * BLOCK + 1])
    b.ask(text)
    for name in WORKERS:
        fleet.register(name)
    fleet.step("router late", text, "B", nudges=NUDGES)
    b.command("evict", Tier.DEVICE)
    fleet.step("B: host only", text, "B")
    b.ask(text)
    fleet.step("B: loaded", text, "B")
    b.command("evict", Tier.HOST)
    b.command("evict", Tier.DEVICE)
    fleet.step("B: given up", text, "A")
    b.ask(text)
    fleet.step("B: computed", text, "B")
    other = fleet.lose(fleet.text(6))
    fleet.step("message lost", other, None, unseen="B")
    fleet.step("gap replayed", other, "B", nudges=NUDGES)
    b.command("announce")
    fleet.step("B: told anew", text, "B")
    fleet.restart("B")
    fleet.step("B: restarted", text, "A")
    fleet.engines["B"].ask(text)
    fleet.step("B: computed", text, "B", nudges=NUDGES)


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Runs everything."""
    fleet = Fleet(args)
    try:
        play(fleet)
        version = fleet.router.about["version"]
        return {"peer": f"ai-dynamo-runtime {version}", "shape": args.shape, "rows": fleet.rows}
    finally:
        fleet.close()


def main(argv: list[str] | None = None) -> int:
    """Runs the steps, and prints what the router had after each."""
    args = parse(argv)
    command_line.use_compilation_cache()
    result = check(args)

    def blocks(found: dict[str, dict[str, int]]) -> list[str]:
        return ["+".join(str(count) for count in tiers.values()) for tiers in found.values()]

    command_line.print_table(
        f"{result['peer']}, events as {result['shape']}s: blocks on device+host, by engine",
        [
            "step",
            *(f"true: {x}" for x in WORKERS),
            *(f"router: {x}" for x in WORKERS),
            "sent to",
            "",
        ],
        [
            (
                row["step"],
                *blocks(row["expected"]),
                *blocks(row["router"]),
                row["sent_to"],
                "right" if row["right"] else "WRONG",
            )
            for row in result["rows"]
        ],
    )
    command_line.write_json(args.json, result)
    return 0 if all(row["right"] for row in result["rows"]) else 1


if __name__ == "__main__":
    command_line.run(main)
