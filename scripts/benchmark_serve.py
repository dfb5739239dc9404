r"""What HTTP adds to a request: the same requests over the server and straight to its engine.

    client process --8 connections--> uvicorn --> EngineThread --> engine      (over HTTP)
    a thread of this process -----------------> EngineThread.call --> engine   (straight)

The same prompts come at the same moments on both sides: eight, at offsets drawn anew every round
within ``--spread`` seconds, so that most arrive while the engine computes for their neighbours.
**Overhead** is, of a round, the mean over its requests of a client's seconds (from sending the
request to the first or last byte of its answer's body) less the mean of the straight seconds (from
asking the engine's thread to the end of the turn that gave the first or last token); then the
median over rounds. Rounds alternate which side goes first, with an empty cache each.

Both sides include: waiting for the turn that the engine is in, its steps, and the neighbours. Only
HTTP's includes: the client's socket calls, parsing, checking, the event loop and its competition
with the engine for the interpreter and the cores, and all that the answer takes. What the client
process computes counts against the server where they share cores; it is told (``client_cpu_ms``).

``path`` is where the time of a request over HTTP is, by moments along its way (medians over all
requests, ms): ``in`` from sending to asking the engine's thread, ``turn`` until that takes it
(straight requests wait as well: ``turn_straight``), ``engine`` until the end of the turn that gave
the token (the first of a stream, else the last), ``out`` until the client has it. ``in`` plus
``out`` is HTTP's own time, which hardly depends on how long steps take. Model and prompts are
small, so that the noise of the steps does not drown the rest.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import json
import math
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
from serving_backend import Backend
from serving_engine import EngineThread, State, Ticket
from serving_prompts import Served, requests
from serving_schema import CompletionBody
from serving_tenants import Keys

from hybridkv.engine.engine import Engine
from hybridkv.engine.handle import Handle
from hybridkv.engine.requests import Request
from hybridkv.errors import UserError

BAR_MS = 5.0
CLIENT = pathlib.Path(__file__).parent / "serving_client.py"
PATH, NAME = "/v1/completions", "model"
LEAD_S, CONFIDENCE = 0.01, 0.95
now = time.perf_counter


def _check(args: argparse.Namespace) -> None:
    for name in ("clients", "prompt", "tokens", "rounds"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name} must be at least 1")
    if args.spread < 0:
        raise UserError("--spread must be at least 0")


@dataclasses.dataclass(kw_only=True, eq=False)
class Moments:
    """Of one request, by ``time.perf_counter``; 0 where it did not come to it yet."""

    asked: float = 0.0
    """The engine's thread was asked."""
    taken: float = 0.0
    first: float = 0.0
    """End of the turn that gave the first token."""
    last: float = 0.0
    handle: Handle | None = None


class Watch:
    """Moments of requests by their seeds; looks after every turn, on the engine's thread."""

    def __init__(self) -> None:
        self.seen: dict[int, Moments] = {}
        self.left = threading.Semaphore(0)
        """Released by each request that ends."""

    def of(self, request: Request) -> Moments:
        """The same for the same seed."""
        return self.seen.setdefault(request.sampling.seed, Moments())

    def look(self) -> None:
        """After a turn."""
        at = now()
        for each in self.seen.values():
            if each.handle is None or each.last:
                continue
            if each.handle.output.pieces:
                each.first = each.first or at
            if each.handle.done:
                each.last = at
                self.left.release()


class WatchedThread(EngineThread):
    """Notes when a request is asked for and taken."""

    watch: Watch

    def submit(self, requests: Sequence[Request], *, every_piece: bool) -> Ticket:
        """See ``EngineThread``."""
        self.watch.of(requests[0]).asked = now()
        return super().submit(requests, every_piece=every_piece)

    def _submit(self, backend: Backend, ticket: Ticket, requests: Sequence[Request]) -> None:
        at = now()
        super()._submit(backend, ticket, requests)
        moments = self.watch.of(requests[0])
        moments.taken, moments.handle = at, self._running[ticket].handles[0]


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
        self.thread = WatchedThread(
            lambda: serve.settled(serve.make_engine(options, self.runtime, text)),
            slots=args.clients,
            max_waiting=args.clients,
        )

    def bodies(self, *, stream: bool) -> list[dict[str, Any]]:
        """New prompts; their seeds name them."""
        shape = (self.args.clients, self.args.prompt)
        prompts = self.rng.integers(0, self.runtime.vocab_size, shape).tolist()
        common = {"model": NAME, "temperature": 0.0, "max_tokens": self.args.tokens}
        return [
            common | {"prompt": prompt, "stream": stream, "seed": number}
            for number, prompt in enumerate(prompts)
        ]

    def offsets(self) -> list[float]:
        """When each comes, in seconds; the first at 0."""
        drawn = self.rng.uniform(0, self.args.spread, self.args.clients)
        return (drawn - drawn.min()).tolist()

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

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watch]:
        """Looks after every turn, of an engine in which nothing runs and nothing is stored."""
        watch = self.thread.watch = Watch()

        def begin(engine: Engine) -> None:
            engine.drain()
            engine.reset()
            engine.on_turn.append(watch.look)

        self.thread.call(begin).result()
        try:
            yield watch
        finally:
            self.thread.call(lambda engine: engine.on_turn.remove(watch.look)).result()

    def straight(
        self, bodies: Sequence[dict[str, Any]], offsets: Sequence[float]
    ) -> list[dict[str, float]]:
        """Each request without HTTP, at its moment."""
        asked = [request for body in bodies for request in self._requests(body)]
        with self.watching() as watch:
            began = now() + LEAD_S
            for offset, request in sorted(zip(offsets, asked, strict=True), key=lambda x: x[0]):
                time.sleep(max(began + offset - now(), 0.0))
                watch.of(request).asked = now()
                self.thread.call(functools.partial(_take, watch, request))
            for _ in asked:
                watch.left.acquire()
        moments = [watch.of(request) for request in asked]
        return [
            {
                "first": each.first - each.asked,
                "last": each.last - each.asked,
                "turn": each.taken - each.asked,
            }
            for each in moments
        ]

    def over_http(
        self, client: PeerProcess, port: int, bodies: Any, offsets: Sequence[float], end: str
    ) -> tuple[list[dict[str, float]], float]:
        """Each request over HTTP, at its moment, its path up to its ``end``; and the client's
        processor seconds.
        """
        with self.watching() as watch:
            told = client.ask({"port": port, "path": PATH, "bodies": bodies, "offsets": offsets})
        wrong = [each["status"] for each in told["requests"] if each["status"] != 200]
        if wrong:
            raise RuntimeError(f"a measured request was refused: {wrong}")
        found = []
        for body, each in zip(bodies, told["requests"], strict=True):
            moments = watch.seen[body["seed"]]
            ends = {name: each[name] - each["sent"] for name in ("first", "last")}
            path = {
                "in": moments.asked - each["sent"],
                "turn": moments.taken - moments.asked,
                "engine": (moments.first if end == "first" else moments.last) - moments.taken,
                "out": each[end] - (moments.first if end == "first" else moments.last),
            }
            found.append(ends | path)
        return found, told["cpu_s"]

    def _requests(self, body: dict[str, Any]) -> list[Request]:
        size = len(json.dumps(body))
        return asyncio.run(requests(self.served, CompletionBody.parse(body), "", size=size))


def _take(watch: Watch, request: Request, engine: Engine) -> None:
    moments = watch.of(request)
    moments.taken, moments.handle = now(), engine.submit(request)


def median_between(values: Sequence[float]) -> tuple[float, float]:
    """An interval that has the median of what the values are drawn from, with ``CONFIDENCE``.

    From the ranks of a binomial distribution, whatever the values' own is; all of them where they
    are too few.
    """
    ordered, count = sorted(values), len(values)
    rank, below = 0, 0.5**count
    while below <= (1 - CONFIDENCE) / 2 and rank < count // 2:
        rank += 1
        below += math.comb(count, rank) * 0.5**count
    return ordered[max(rank - 1, 0)], ordered[min(count - rank, count - 1)]


def _mean(told: Sequence[dict[str, float]], field: str) -> float:
    return 1e3 * statistics.fmean(each[field] for each in told)


def measure_side(bench: Bench, client: PeerProcess, port: int, *, stream: bool) -> dict[str, Any]:
    """Overhead of whole answers, or of streams; milliseconds."""
    field, sides = "first" if stream else "last", ("straight", "http")
    rounds: list[dict[str, float]] = []
    every: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(bench.args.rounds + 1):
        bodies, offsets = bench.bodies(stream=stream), bench.offsets()
        told, cpu, client_s = {}, {}, 0.0
        for side in sides if number % 2 else sides[::-1]:
            began = time.process_time()
            if side == "http":
                told[side], client_s = bench.over_http(client, port, bodies, offsets, field)
            else:
                told[side] = bench.straight(bodies, offsets)
            cpu[side] = time.process_time() - began
        if not number:
            continue  # it warmed up
        for side in sides:
            every[side] += told[side]
        rounds.append(
            {side: _mean(told[side], field) for side in sides}
            | {"end": _mean(told["http"], "last") - _mean(told["straight"], "last")}
            | {"cpu": 1e3 * (cpu["http"] - cpu["straight"]) / len(bodies)}
            | {"client": 1e3 * client_s / len(bodies)}
        )
    return _summary("first token" if stream else "whole answer", rounds, every)


def _summary(
    what: str, rounds: Sequence[dict[str, float]], every: dict[str, list[dict[str, float]]]
) -> dict[str, Any]:
    differences = [each["http"] - each["straight"] for each in rounds]

    def of_rounds(name: str) -> float:
        return statistics.median(each[name] for each in rounds)

    def of_requests(side: str, name: str) -> float:
        return 1e3 * statistics.median(each[name] for each in every[side])

    path = {name: of_requests("http", name) for name in every["http"][0] if name not in MOMENTS}
    path["turn_straight"] = of_requests("straight", "turn")
    own = [each["in"] + each["out"] for each in every["http"]]
    return {
        "what": what,
        "http_ms": of_rounds("http"),
        "straight_ms": of_rounds("straight"),
        "overhead_ms": statistics.median(differences),
        "overhead_between_ms": list(median_between(differences)),
        "overhead_ms_of_rounds": differences,
        "overhead_to_the_end_ms": of_rounds("end"),
        "outside_engine_ms": 1e3 * statistics.median(own),
        "path": path,
        "cpu_ms": of_rounds("cpu"),
        "client_cpu_ms": of_rounds("client"),
    }


MOMENTS = ("first", "last")


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
    names = ("clients", "prompt", "tokens", "rounds", "spread")
    return {
        **{name: getattr(args, name) for name in names},
        "bar_ms": BAR_MS,
        "within_bar": all(side["overhead_ms"] <= BAR_MS for side in sides.values()),
        "compilations": compilations,
        **sides,
    }


COLUMNS = ["http_ms", "straight_ms", "overhead_ms", "overhead_to_the_end_ms", "outside_engine_ms"]
COLUMNS += ["cpu_ms", "client_cpu_ms"]
TITLES = ["median, ms", "over HTTP", "straight", "overhead", "95 %", "to the end", "in + out"]
TITLES += ["CPU", "client's CPU"]


def report(result: dict[str, Any]) -> None:
    """Tables for people."""
    rows = [result["whole"], result["stream"]]
    cells = [[f"{row[name]:.2f}" for name in COLUMNS] for row in rows]
    between = ["{:.1f} to {:.1f}".format(*row["overhead_between_ms"]) for row in rows]
    command_line.print_table(
        f"{result['clients']} clients within {result['spread']:g} s, {result['prompt']} prompt and "
        f"{result['tokens']} new tokens, {result['rounds']} rounds; bar {result['bar_ms']} ms, "
        f"{'kept' if result['within_bar'] else 'NOT kept'}",
        TITLES,
        [
            (row["what"], *cell[:3], inner, *cell[3:])
            for row, cell, inner in zip(rows, cells, between, strict=True)
        ],
    )
    stages = list(rows[0]["path"])
    command_line.print_table(
        "where the time of a request over HTTP is",
        ["median, ms", *stages],
        [(row["what"], *(f"{row['path'][name]:.2f}" for name in stages)) for row in rows],
    )
