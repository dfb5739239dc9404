"""What HTTP adds to a request: the same requests over the server and straight through its engine.

    client process --8 connections--> uvicorn --> EngineThread --> engine      (over HTTP)
                                                  EngineThread.call --> engine (straight)

Both sides run on the engine's own thread, with an empty cache, in turn; their order changes every
round. Requests of a round start together. The overhead is the difference of the two sides' medians
over the requests of a round, and its median over the rounds. The shipped model is small, so that
the time of its steps does not drown what is measured. ``outside_engine_ms`` is another view of the
same requests: a client's seconds minus those that the engine had the request, which its answer
tells; waiting for the end of a turn counts in it. ``cpu_ms`` is a request's share of what the
server's process computed more than on the straight side, which other processes hardly disturb.
"""

import argparse
import asyncio
import contextlib
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import command_line
import decode_models
import numpy as np
import serve
from peer_process import PeerProcess
from serving_app import make_app
from serving_engine import EngineThread, State
from serving_prompts import Served, requests
from serving_schema import CompletionBody
from serving_tenants import Keys

from hybridkv.engine.engine import Engine
from hybridkv.engine.requests import Request
from hybridkv.errors import UserError

BAR_MS = 5.0
CLIENT = pathlib.Path(__file__).parent / "serving_client.py"
PATH, NAME = "/v1/completions", "model"


def _check(args: argparse.Namespace) -> None:
    for name in ("clients", "prompt", "tokens", "rounds"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1")


class Bench:
    """A server of the shipped model, its clients, and the same engine without them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rng = args, np.random.default_rng(args.seed)
        context = args.prompt + args.tokens
        sizes = {"context": context, "tile": args.tile, "slots": args.clients}
        words = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
        options = serve.parse([*words, "--served-name", NAME])
        self.runtime, text = decode_models.load(options)
        assert text is not None
        self.served: Served = serve.served(options, self.runtime, text)
        self.thread = EngineThread(
            lambda: serve.make_engine(options, self.runtime, text),
            slots=args.clients,
            max_waiting=args.clients,
        )

    def bodies(self, *, stream: bool) -> list[dict[str, Any]]:
        """New prompts."""
        shape = (self.args.clients, self.args.prompt)
        prompts = self.rng.integers(0, self.runtime.vocab_size, shape).tolist()
        common = {"model": NAME, "temperature": 0.0, "max_tokens": self.args.tokens}
        return [common | {"prompt": prompt, "stream": stream} for prompt in prompts]

    @contextlib.contextmanager
    def serving(self) -> Iterator[int]:
        """The port, while the server runs and is ready."""
        app = make_app(self.served, Keys(), self.thread)
        with serve.listen("127.0.0.1", 0) as sock:
            port = int(sock.getsockname()[1])
            server = serve.make_server(app, self.thread, host="127.0.0.1", port=port, grace_s=1.0)
            running = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
            running.start()
            try:
                while self.thread.state is State.STARTING:
                    time.sleep(0.01)
                yield port
            finally:
                server.should_exit = True
                running.join()

    def empty(self) -> None:
        """Nothing runs, nothing is stored."""

        def renew(engine: Engine) -> None:
            engine.drain()
            engine.reset()

        self.thread.call(renew).result()

    def straight(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
        """Seconds to the first and to the last token of each request, without HTTP."""
        asked = [request for body in bodies for request in self._requests(body)]
        return self.thread.call(lambda engine: _run(engine, asked)).result()

    def _requests(self, body: dict[str, Any]) -> list[Request]:
        return asyncio.run(requests(self.served, CompletionBody.parse(body), ""))


def _run(engine: Engine, asked: Sequence[Request]) -> list[dict[str, float]]:
    began = time.perf_counter()
    handles = [engine.submit(request) for request in asked]
    seconds: list[dict[str, float]] = [{} for _ in handles]
    while any("last_s" not in each for each in seconds):
        engine.step()
        now = time.perf_counter() - began
        for handle, each in zip(handles, seconds, strict=True):
            if handle.output.pieces:
                each.setdefault("first_s", now)
            if handle.done:
                each.setdefault("last_s", now)
    return seconds


def _ask(client: PeerProcess, port: int, bodies: Sequence[dict[str, Any]]) -> Any:
    """Seconds to the first and to the last byte of each answer."""
    told = client.ask({"port": port, "path": PATH, "bodies": bodies})["requests"]
    wrong = [each["status"] for each in told if each["status"] != 200]
    if wrong:
        raise RuntimeError(f"a measured request was refused: {wrong}")
    return told


def _median(told: Sequence[dict[str, float]], field: str) -> float:
    return 1e3 * statistics.median(each[field] for each in told)


def measure_side(bench: Bench, client: PeerProcess, port: int, *, stream: bool) -> dict[str, Any]:
    """Overhead of whole answers, or of streams; milliseconds."""
    field, sides = "first_s" if stream else "last_s", ("straight", "http")
    rounds: list[dict[str, Any]] = []
    for number in range(bench.args.rounds + 1):
        bodies, told, cpu = bench.bodies(stream=stream), {}, {}
        for side in sides if number % 2 else sides[::-1]:
            bench.empty()
            began = time.process_time()
            told[side] = _ask(client, port, bodies) if side == "http" else bench.straight(bodies)
            cpu[side] = time.process_time() - began
        outside = [1e3 * (each["last_s"] - each["engine_s"]) for each in told["http"]]
        rounds.append(
            {side: _median(told[side], field) for side in sides}
            | {"end": _median(told["http"], "last_s") - _median(told["straight"], "last_s")}
            | {"outside": statistics.median(outside)}
            | {"cpu": 1e3 * (cpu["http"] - cpu["straight"]) / len(bodies)}
        )
    del rounds[0]  # it warmed up
    differences = [each["http"] - each["straight"] for each in rounds]
    return {
        "what": "first token" if stream else "whole answer",
        "http_ms": statistics.median(each["http"] for each in rounds),
        "straight_ms": statistics.median(each["straight"] for each in rounds),
        "overhead_ms": statistics.median(differences),
        "overhead_ms_of_rounds": differences,
        "overhead_to_the_end_ms": statistics.median(each["end"] for each in rounds),
        "outside_engine_ms": statistics.median(each["outside"] for each in rounds),
        "cpu_ms": statistics.median(each["cpu"] for each in rounds),
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Both sorts of answers.

    Raises:
      UserError: a size is below 1.
    """
    _check(args)
    bench = Bench(args)
    client = PeerProcess(sys.executable, str(CLIENT), {"call": "start"}, "it is a part of this")
    try:
        with bench.serving() as port:
            sides = {
                "whole": measure_side(bench, client, port, stream=False),
                "stream": measure_side(bench, client, port, stream=True),
            }
            assert bench.thread.engine is not None
            compilations = bench.thread.engine.counters.compilations
    finally:
        client.close()
    sizes = {name: getattr(args, name) for name in ("clients", "prompt", "tokens", "rounds")}
    return {
        **sizes,
        "bar_ms": BAR_MS,
        "within_bar": sides["whole"]["overhead_ms"] <= BAR_MS,
        "compilations": compilations,
        **sides,
    }


COLUMNS = ["http_ms", "straight_ms", "overhead_ms", "overhead_to_the_end_ms", "outside_engine_ms"]
COLUMNS += ["cpu_ms"]


def report(result: dict[str, Any]) -> None:
    """A table for people."""
    rows = [result["whole"], result["stream"]]
    command_line.print_table(
        f"{result['clients']} clients at once, {result['prompt']} prompt and {result['tokens']} "
        f"new tokens, {result['rounds']} rounds; bar {result['bar_ms']} ms, "
        f"{'kept' if result['within_bar'] else 'NOT kept'}",
        ["median, ms", "over HTTP", "straight", "overhead", "to the end", "outside engine", "CPU"],
        [
            (
                row["what"],
                *(f"{row[name]:.2f}" for name in COLUMNS),
            )
            for row in rows
        ],
    )
