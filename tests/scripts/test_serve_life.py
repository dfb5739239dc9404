"""The HTTP server over time: back-pressure, clients that go, faults, and its beginning and end."""

import asyncio
import contextlib
import json
import socket
import sys
import threading
import time

import httpx
import openai
import pytest
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import serve
import serving_engine
from served import CONTEXT, DOCUMENT, Symbols, ask, completion, error, events
from serving_engine import MOST_FAILURES, State
from serving_prompts import requests
from serving_schema import CompletionBody

from hybridkv.engine.requests import Finish


def test_more_than_may_wait_is_sent_away_and_told_when_to_come_again(world, monkeypatch):
    monkeypatch.setattr(world.thread, "places", 3)
    app = world.app()

    async def run():
        world.turns.clear()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            held = asyncio.ensure_future(client.post("/v1/completions", json=completion(n=2)))
            while world.thread.open < 2:
                await asyncio.sleep(0.001)
            refused = await asyncio.wait_for(
                client.post("/v1/completions", json=completion(n=2)), 10
            )
            taken = asyncio.ensure_future(client.post("/v1/completions", json=completion()))
            while world.thread.open < 3:
                await asyncio.sleep(0.001)
            world.turns.set()
            return refused, (await held).status_code, (await taken).status_code

    refused, *others = asyncio.run(run())
    assert error(refused)[:2] == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert others == [200, 200]
    assert ask(app, json=completion(n=2)).status_code == 200


async def call(app, body, receive, sent):
    """One request through the bare interface, so that a test decides when the client goes."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"host", b"localhost")],
    }
    given = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive_all():
        for message in given:
            return message
        return await receive()

    async def send(message):
        sent.append(message)

    await app(scope, receive_all, send)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_has_freed_its_slot_when_the_next_turn_ends(world, stream):
    app, sent = world.app(), []
    body = completion(max_tokens=150, stream=stream)

    async def run():
        gone = asyncio.Event()

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        asked = asyncio.ensure_future(call(app, body, receive, sent))
        while not world.engine.counters.new_tokens:
            await asyncio.sleep(0.001)
        world.turns.clear()
        await asyncio.sleep(0.02)  # the turn of now waits for its end
        gone.set()
        await asked

    asyncio.run(run())
    assert not world.thread._commands.empty()
    seen = len(world.free)
    world.turns.set()
    while len(world.free) < seen + 2:
        time.sleep(0.001)
    assert world.free[seen] == world.slots - 1  # the turn that had begun
    assert world.free[seen + 1] == world.slots
    assert world.engine.counters.new_tokens < 150


def test_a_failed_turn_ends_its_requests_and_not_the_engine(world, monkeypatch):
    app, step, broken = world.app(), world.engine.step, threading.Event()

    def fail():
        if broken.is_set() and world.engine.waiting:
            broken.clear()
            raise RuntimeError("planted")
        return step()

    monkeypatch.setattr(world.engine, "step", fail)
    for stream in (False, True):
        broken.set()
        assert error(ask(app, json=completion(stream=stream)))[:2] == (500, "internal_error")
        assert ask(app, json=completion(stream=stream)).status_code == 200
    assert world.engine.counters.ended[Finish.CANCELLED] == 2  # nothing of them went on


@pytest.mark.parametrize("resets", [True, False])
def test_a_failed_cancellation_leaves_nobody_waiting(world, monkeypatch, caplog, resets):
    app, cancel, sent = world.app(), world.engine.cancel, []
    thread, reset, broken = world.thread, world.engine.reset, [True]

    def fail(handle):
        if broken and broken.pop():
            raise RuntimeError("planted")
        cancel(handle)

    async def run():
        gone = asyncio.Event()

        async def receive(of):
            await of.wait()
            return {"type": "http.disconnect"}

        def begin(of, sent):
            body = completion(max_tokens=150)
            return asyncio.ensure_future(call(app, body, lambda: receive(of), sent))

        first, other = begin(gone, []), begin(asyncio.Event(), sent)
        while thread.open < 2 or not world.engine.counters.new_tokens:
            await asyncio.sleep(0.001)
        world.turns.clear()  # neither ends meanwhile
        gone.set()
        await first
        world.turns.set()
        await asyncio.wait_for(other, 20)

    monkeypatch.setattr(world.engine, "cancel", fail)
    if not resets:
        monkeypatch.setattr(world.engine, "reset", lambda: 1 / 0)
    asyncio.run(run())
    assert sent[0]["status"] == 500
    assert "planted" in caplog.text
    if resets:
        assert ask(app, json=completion()).status_code == 200
        return
    thread._thread.join(10)
    assert (thread.state, thread._thread.is_alive()) == (State.FAILED, False)
    assert error(ask(app, json=completion()))[:2] == (503, "unavailable")
    reset()


def test_what_cannot_be_told_ends_with_an_error_whole_or_streamed(world, monkeypatch):
    app, new, seen = world.app(), serving_engine._new, []

    def fail(ticket, running):
        updates = new(ticket, running)
        if ticket.every_piece:
            return updates
        seen.append(ticket)
        raise RuntimeError("planted")

    async def together():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            send = [
                client.post("/v1/completions", json=completion(stream=stream, max_tokens=1))
                for stream in (True, False)
            ]
            return [x.status_code for x in await asyncio.wait_for(asyncio.gather(*send), 20)]

    with monkeypatch.context() as patch:
        patch.setattr(serving_engine, "_new", fail)
        assert asyncio.run(together()) == [500, 500]
    assert seen
    assert ask(app, json=completion()).status_code == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_in_any_other_way_says_so(world, monkeypatch):
    app = world.app()

    def fail(*_):
        raise SystemError("planted")

    monkeypatch.setattr(world.thread, "_obey", fail)
    world.thread._thread.join(10)
    assert world.thread.state is State.FAILED
    assert error(ask(app, json=completion()))[:2] == (503, "unavailable")


def test_a_fault_of_the_tokenizer_fails_one_request_with_its_reason(world, monkeypatch):
    def feed(self, token):
        raise KeyError(token)

    with monkeypatch.context() as patch:
        patch.setattr(Symbols, "feed", feed)
        assert error(ask(world.app(), json=completion()))[:2] == (500, "internal_error")
    assert ask(world.app(), json=completion()).status_code == 200


def test_what_takes_too_long_is_an_error_and_mid_way_an_event(world):
    app = world.app(timeout_s=10)

    def later():
        world.lab.time.now += 1.0  # a second a turn

    world.engine.on_turn.append(later)
    try:
        answer = ask(app, json=completion(max_tokens=50))
        assert error(answer)[:2] == (504, "timeout")
        told, done = events(ask(app, json=completion(max_tokens=50, stream=True)))
    finally:
        world.engine.on_turn.remove(later)
    assert not done
    assert told[0]["choices"][0]["text"]
    assert told[-1]["error"]["code"] == "timeout"


def test_health_and_requests_before_and_after_there_is_an_engine(world):
    go, thread = threading.Event(), world.thread
    thread._make = lambda: go.wait(30) and world.engine
    app = world.app(start=False)

    def health():
        answer = ask(app, "/health", method="GET")
        return answer.status_code, answer.json()["status"]

    thread.start()
    assert health() == (503, "starting")
    assert error(ask(app, json=completion()))[:2] == (503, "not_ready")
    assert error(ask(app, "/metrics", method="GET"))[:2] == (503, "not_ready")
    go.set()
    while thread.state is State.STARTING:
        time.sleep(0.001)
    assert health() == (200, "ok")
    thread.stop_taking()
    assert health() == (503, "stopping")
    assert error(ask(app, json=completion()))[:2] == (503, "unavailable")
    assert thread.close(timeout_s=5)
    assert health() == (503, "stopped")


def test_an_engine_that_cannot_be_made_is_told(world, caplog):
    world.thread._make = lambda: 1 / 0
    world.start()
    app = world.app()
    assert ask(app, "/health", method="GET").json() == {"status": "failed"}
    assert error(ask(app, "/metrics", method="GET"))[:2] == (503, "unavailable")
    assert "ZeroDivisionError" in caplog.text


def test_an_engine_that_fails_turn_after_turn_is_given_up(world, monkeypatch):
    turns = []

    def fail():
        turns.append(len(turns))
        raise RuntimeError("planted")

    monkeypatch.setattr(world.engine, "step", fail)
    monkeypatch.setattr(serving_engine, "IDLE_S", 0.01)
    app = world.app()
    world.thread._thread.join(10)
    assert len(turns) == MOST_FAILURES
    assert world.thread.state is State.FAILED
    assert error(ask(app, json=completion()))[:2] == (503, "unavailable")


def test_metrics_tell_what_was_reused(world):
    pytest.importorskip("prometheus_client")
    app = world.app()
    for _ in range(2):
        told = ask(app, json=completion(DOCUMENT)).json()
    page = ask(app, "/metrics", method="GET")
    assert page.headers["content-type"].startswith("text/plain")
    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    lines = [x for x in page.text.splitlines() if x.startswith("hybridkv_")]
    assert any(line.endswith(f" {float(cached)}") for line in lines)
    assert "Bearer" not in page.text


@contextlib.contextmanager
def listening(world):
    """A server in a thread of its own, and its port; it ends with the block."""
    app = world.app(start=False)
    with serve.listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        server = serve.make_server(app, world.thread, host="127.0.0.1", port=port, grace_s=0.1)
        running = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        running.start()
        try:
            yield server, port
        finally:
            server.should_exit = True
            world.turns.set()
            running.join(20)
    assert not running.is_alive()


def test_the_official_client_streams_over_a_socket_and_may_go_away(world):
    with contextlib.ExitStack() as stack:
        server, port = stack.enter_context(listening(world))
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="tenant", max_retries=0
        )
        stack.callback(client.close)
        while world.thread.state is not State.READY:
            time.sleep(0.005)
        check_client(client)
        check_going(world, client)
        last = client.completions.create(**completion(max_tokens=150), stream=True)
        world.turns.clear()
        server.should_exit = True
        while world.thread._commands.empty():  # the grace is over
            time.sleep(0.001)
        assert world.thread.state is State.STOPPING
        world.turns.set()
        with pytest.raises(openai.APIError, match="stopping"):
            list(last)
    assert world.thread.state is State.STOPPED


def check_going(world, client):
    """Half a stream is read; then its slot is free long before its end."""
    stream = client.completions.create(**completion(max_tokens=150), stream=True)
    next(iter(stream))
    world.turns.clear()
    stream.close()
    while world.thread._commands.empty():
        time.sleep(0.001)
    world.turns.set()
    while world.thread.open:
        time.sleep(0.001)
    assert world.engine.counters.ended[Finish.CANCELLED] == 1


def check_client(client):
    messages = [{"role": "user", "content": DOCUMENT}]
    common = {"model": "toy", "temperature": 0, "max_tokens": 8}
    cold = client.chat.completions.create(messages=messages, **common)
    stream = client.chat.completions.create(
        messages=messages, stream=True, stream_options={"include_usage": True}, **common
    )
    chunks = list(stream)
    said = "".join(x.choices[0].delta.content or "" for x in chunks if x.choices)
    assert said == cold.choices[0].message.content
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0
    last = chunks[-2].choices[0]
    digests = [x.model_extra["hybridkv"]["logits_digest"] for x in (last, cold.choices[0])]
    assert digests[0] == digests[1]
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="toy", prompt="a" * CONTEXT)
    assert refused.value.code == "context_length_exceeded"
    assert [model.id for model in client.models.list()] == ["toy"]


def answer(sock):
    """Up to the end of its JSON."""
    data = b""
    while b"}" not in data:
        data += sock.recv(10_000)
    return data


def test_a_head_that_does_not_end_ends_its_connection(world):
    with listening(world) as (_, port):
        head = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: "
        with socket.create_connection(("127.0.0.1", port)) as whole:
            whole.sendall(head + b"a" * 30_000 + b"\r\n\r\n")
            assert answer(whole).startswith(b"HTTP/1.1 ")
            whole.sendall(b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\n")
            whole.sendall(b"Content-Length: 200000\r\n\r\n" + b" " * 200_000)
            assert answer(whole).startswith(b"HTTP/1.1 404"), "bodies have another limit"
        with socket.create_connection(("127.0.0.1", port)) as endless:
            endless.sendall(head)
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    endless.sendall(b"a" * 10_000)
                    time.sleep(0.001)
                endless.settimeout(10)
                assert endless.recv(100).startswith(b"HTTP/1.1 400")
                while endless.recv(10_000):
                    pass


def test_what_arrives_together_is_given_to_the_engine_together(world, monkeypatch):
    app, thread, given = world.app(), world.thread, []
    hand_over = thread._hand_over

    def note(loop):
        given.append(len(thread._arrived[loop]))
        hand_over(loop)

    monkeypatch.setattr(thread, "_hand_over", note)

    async def together():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            ask_one = [client.post("/v1/completions", json=completion()) for _ in range(5)]
            return [each.status_code for each in await asyncio.gather(*ask_one)]

    assert asyncio.run(together()) == [200] * 5
    assert given == [5]


def test_a_cancellation_does_not_overtake_its_request(world):
    app, thread = world.app(), world.thread
    world.turns.clear()

    async def run():
        body = CompletionBody.parse(completion(max_tokens=50))
        ticket = thread.submit(await requests(world.served(), body, "", size=0), every_piece=False)
        ticket.cancel()  # before the loop has handed it over
        world.turns.set()
        return [update.ended.finish for update in await ticket.news()]

    assert asyncio.run(run()) == [Finish.CANCELLED]
    assert ask(app, json=completion()).status_code == 200
