"""The HTTP server over a toy engine: answers, reuse by tenant, faults, and clients that go."""

import asyncio
import json
import sys
import threading
import time

import httpx
import numpy as np
import openai
import pytest
from engines import VOCAB, ids_of, toy_lab
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import benchmark
import command_line
import decode_models
import serve
import serving_engine
import serving_tenants
from serving_app import ServerOptions, make_app
from serving_engine import MOST_FAILURES, EngineThread, State
from serving_prompts import Served
from serving_tenants import Keys

from hybridkv.engine.requests import Finish
from hybridkv.errors import UserError

LETTERS = "".join(map(chr, range(97, 123))) + "".join(map(chr, range(65, 91))) + "0123456789:\n"
END = LETTERS.index("9")
CONTEXT = 192
"""Tokens of a sequence of the toy engine."""
ROOM = 40


class Symbols:
    """A tokenizer of one of 64 symbols a token; a chat template; one id that ends a reply."""

    stop_tokens = frozenset({END})
    chats = True

    def encode(self, text):
        try:
            return np.array([LETTERS.index(x) for x in text], np.int32)
        except ValueError:
            raise UserError("the vocabulary has no token for a character") from None

    def encode_chat(self, messages, *, after=None):
        return self.encode("".join(f"{x['role']}:{x['content']}\n" for x in messages) + "a:")

    def stream(self):
        return Symbols()

    def feed(self, token):
        return "" if token == END else LETTERS[token]

    def finish(self):
        return ""


def spelled(ids) -> str:
    return "".join(LETTERS[i] for i in ids if i != END)


DOCUMENT = spelled(ids_of(100, 5))
SHORT = "abc:"


class World:
    """The toy engine, a thread for it, and applications over both."""

    def __init__(self, lab):
        self.lab, self.engine, self.text = lab, lab.engine, Symbols()
        self.slots = self.engine.runner.sizes.capacity.slots
        self.thread = EngineThread(lambda: self.engine, slots=self.slots, max_waiting=ROOM)
        self.turns = threading.Event()
        """Set while turns may end."""
        self.free: list[int] = []
        """Free slots at the end of each turn."""
        self.turns.set()

    def ended(self):
        self.turns.wait(30)
        self.free.append(self.engine.runner.free_slots)

    def start(self):
        self.thread.start()
        while self.thread.state is State.STARTING:
            time.sleep(0.001)

    def alone(self, text, new):
        """A cold run, before the thread owns the engine."""
        assert self.thread.state is State.STARTING
        return self.lab.alone(self.text.encode(text), new)

    def app(self, *, keys=Keys(), options=ServerOptions(), start=True, **changes):
        if start and self.thread.state is State.STARTING:
            self.start()
        served = {
            "name": "toy",
            "runtime": self.engine.runner.model,
            "text": self.text,
            "context": CONTEXT,
            "logprobs": 4,
            "choices": ROOM,
            "template": True,
        }
        return make_app(Served(**served | changes), keys, self.thread, options)


@pytest.fixture
def world():
    lab = toy_lab()
    lab.renew()
    world = World(lab)
    lab.change(text=world.text)
    lab.engine.on_turn.append(world.ended)
    yield world
    world.turns.set()
    lab.engine.on_turn.remove(world.ended)
    left = world.thread.open, lab.engine.waiting
    ready = world.thread.state is State.READY
    assert world.thread.close(timeout_s=10)
    lab.renew()
    assert not ready or left == (0, 0)


def ask(app, path="/v1/completions", *, method="POST", **arguments):
    """One request to an application in this process."""

    async def run():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **arguments)

    return asyncio.run(run())


def completion(prompt=SHORT, **more):
    return {"model": "toy", "prompt": prompt, "max_tokens": 6, "temperature": 0} | more


def chat(content="Who", **more):
    messages = [{"role": "user", "content": content}]
    return {"model": "toy", "messages": messages, "max_tokens": 6, "temperature": 0} | more


def key(name):
    return {"authorization": f"Bearer {name}"}


def events(response):
    """The JSON of each event of a stream, and whether it says that it is done."""
    lines = [x.removeprefix("data: ") for x in response.text.split("\n\n") if x]
    done = lines[-1] == "[DONE]"
    return [json.loads(x) for x in lines[: len(lines) - done]], done


def error(response):
    """Status, code and parameter of a refusal, whose shape is OpenAI's."""
    told = response.json()
    assert set(told) == {"error"}
    assert set(told["error"]) == {"message", "type", "param", "code"}
    assert told["error"]["message"]
    return response.status_code, told["error"]["code"], told["error"]["param"]


def test_a_completion_is_what_the_engine_gives(world):
    alone = world.alone(SHORT, 6)
    response = ask(world.app(), json=completion())
    told = response.json()
    assert response.status_code == 200
    assert told["object"] == "text_completion"
    (choice,) = told["choices"]
    assert choice["text"] == spelled(alone.tokens)
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert choice["hybridkv"]["logits_digest"] == alone.logits_digest
    assert told["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert response.headers["x-hybridkv-outcome"] == "cold"
    assert response.headers["x-hybridkv-exact"] == "true"


def test_a_second_request_on_a_document_is_cached_and_has_the_bits_of_a_cold_one(world):
    question = DOCUMENT + "Who"
    alone = world.alone(question, 6)
    app = world.app()
    first = ask(app, json=completion(DOCUMENT + "When")).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    second = ask(app, json=completion(question))
    told = second.json()
    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert 64 <= cached < len(question)
    assert int(second.headers["x-hybridkv-reused-tokens"]) == cached
    reuse = told["choices"][0]["hybridkv"]
    assert reuse["exact"]
    assert reuse["outcome"] in ("reuse", "rebuild")
    assert reuse["logits_digest"] == alone.logits_digest
    assert told["choices"][0]["text"] == spelled(alone.tokens)


def test_tenants_share_nothing(world):
    app, counters = world.app(), world.engine.counters
    body = completion(DOCUMENT)

    def cached(**more):
        told = ask(app, json=body, **more).json()
        return told["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(headers=key("a")) == 0
    assert cached(headers=key("a")) > 0
    assert cached(headers=key("b")) == 0
    assert cached() == 0
    assert cached(headers=key("key:" + serving_tenants.digest("a"))) == 0
    for name in ("user", "prompt_cache_key"):  # whatever a body says
        more = {name: f"key:{serving_tenants.digest('a')}"}
        told = ask(app, json=body | more, headers=key(f"c{name}")).json()
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert counters.followed == 0


def test_a_tenant_does_not_wait_for_what_another_is_computing(world):
    app, counters = world.app(), world.engine.counters

    async def together(*keys):
        world.turns.clear()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            send = [
                asyncio.ensure_future(
                    client.post("/v1/completions", json=completion(DOCUMENT), headers=key(x))
                )
                for x in keys
            ]
            await asyncio.sleep(0.1)
            world.turns.set()
            return [each.json() for each in await asyncio.gather(*send)]

    told = asyncio.run(together("a", "b"))
    assert [x["usage"]["prompt_tokens_details"]["cached_tokens"] for x in told] == [0, 0]
    assert counters.followed == 0
    told = asyncio.run(together("c", "c"))
    assert counters.followed == 1


def test_a_stream_says_what_the_whole_answer_says(world):
    app, more = world.app(), {"stream": True, "stream_options": {"include_usage": True}}
    whole = ask(app, "/v1/chat/completions", json=chat(logprobs=True, top_logprobs=2)).json()
    response = ask(app, "/v1/chat/completions", json=chat(logprobs=True, top_logprobs=2) | more)
    chunks, done = events(response)
    assert done
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-hybridkv-outcome"] == "cold"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    first, *middle, last, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    said = "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle)
    assert said == whole["choices"][0]["message"]["content"]
    content = [x for chunk in middle for x in chunk["choices"][0]["logprobs"]["content"]]
    assert content == whole["choices"][0]["logprobs"]["content"]
    assert [len(x["top_logprobs"]) for x in content] == [2] * 6
    assert content[0]["bytes"] == list(content[0]["token"].encode())
    assert last["choices"][0]["finish_reason"] == "length"
    digests = [x["choices"][0]["hybridkv"]["logits_digest"] for x in (last, whole)]
    assert digests[0] == digests[1]
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    chunks, _ = events(ask(app, json=completion(stream=True)))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) != ""
    assert all("usage" not in chunk for chunk in chunks)


def test_the_same_seed_gives_the_same_text_and_sample_i_is_that_of_seed_plus_i(world):
    app, body = world.app(), completion(temperature=1.0, max_tokens=20)

    def texts(**more):
        return [x["text"] for x in ask(app, json=body | more).json()["choices"]]

    two = texts(seed=7, n=2)
    assert texts(seed=7, n=2) == two
    assert texts(seed=8) == two[1:]
    assert two[0] != two[1]
    four = texts(seed=7, n=2, prompt=[SHORT, SHORT])
    assert four == texts(seed=7, n=4)
    assert four[:2] == two
    drawn = ask(app, json=body).json()["choices"][0]
    again = texts(seed=drawn["hybridkv"]["seed"])
    assert again == [drawn["text"]]


def test_completion_logprobs_name_tokens_and_places(world):
    told = ask(world.app(), json=completion(logprobs=3)).json()["choices"][0]
    logprobs = told["logprobs"]
    assert "".join(logprobs["tokens"]) == told["text"]
    assert logprobs["text_offset"] == list(range(6))
    for token, value, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == value == max(top.values())
        assert len(top) == 3


def test_an_output_ends_before_a_stop_and_says_so(world):
    app = world.app()
    text = ask(app, json=completion()).json()["choices"][0]["text"]
    stopped = ask(app, json=completion(stop=[text[2:4]])).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (text[: text.index(text[2:4])], "stop")


def test_token_ids_and_messages_in_parts_are_prompts(world):
    app = world.app()
    by_text = ask(app, json=completion()).json()["choices"][0]["text"]
    ids = world.text.encode(SHORT).tolist()
    assert ask(app, json=completion(ids)).json()["choices"][0]["text"] == by_text
    parts = [{"type": "text", "text": "Wh"}, {"type": "text", "text": "o"}]
    told = [ask(app, "/v1/chat/completions", json=chat(x)).json() for x in ("Who", parts)]
    texts = [x["choices"][0]["message"]["content"] for x in told]
    assert texts[0] == texts[1]


def test_without_a_template_a_chat_is_written_plainly(world):
    app = world.app(template=False)
    told = ask(app, "/v1/chat/completions", json=chat()).json()
    assert told["usage"]["prompt_tokens"] == len("user:\nWho\n\nassistant:\n")


REFUSED = {
    "no model": ({"model": None}, 400, None, "model"),
    "another model": ({"model": "gpt"}, 404, "model_not_found", "model"),
    "no prompt": ({"prompt": None}, 400, None, "prompt"),
    "empty prompt": ({"prompt": ""}, 400, None, "prompt"),
    "no such token": ({"prompt": [1, VOCAB]}, 400, None, "prompt"),
    "huge token": ({"prompt": [2**80]}, 400, None, "prompt"),
    "no such character": ({"prompt": "a b"}, 400, None, "prompt"),
    "half a character": ({"prompt": "\ud800"}, 400, None, "prompt"),
    "long prompt": ({"prompt": "a" * CONTEXT}, 400, "context_length_exceeded", "prompt"),
    "long answer": ({"max_tokens": 189}, 400, "context_length_exceeded", "prompt"),
    "no tokens": ({"max_tokens": 0}, 400, None, "max_tokens"),
    "a text for a number": ({"max_tokens": "6"}, 400, None, "max_tokens"),
    "temperature": ({"temperature": -1}, 400, None, "temperature"),
    "top_p": ({"top_p": 0}, 400, None, "top_p"),
    "seed": ({"seed": -1}, 400, None, "seed"),
    "n": ({"n": 0}, 400, None, "n"),
    "many choices": ({"n": ROOM + 1}, 400, None, "n"),
    "many logprobs": ({"logprobs": 5}, 400, None, "logprobs"),
    "empty stop": ({"stop": ""}, 400, None, "stop"),
    "many stops": ({"stop": ["a"] * 5}, 400, None, "stop"),
    "penalty": ({"presence_penalty": 0.5}, 400, "unsupported_parameter", "presence_penalty"),
    "bias": ({"logit_bias": {"1": 5}}, 400, "unsupported_parameter", "logit_bias"),
    "echo": ({"echo": True}, 400, "unsupported_parameter", "echo"),
    "misspelt": ({"temprature": 1}, 400, "unknown_parameter", "temprature"),
    "of chats": ({"tools": []}, 400, "unknown_parameter", "tools"),
    "options": ({"stream_options": {}}, 400, None, "stream_options"),
}


def test_each_bad_completion_is_refused_with_its_parameter(world):
    app = world.app()
    found = {name: error(ask(app, content=json.dumps(completion(**fields)), headers=JSON))
             for name, (fields, *_) in REFUSED.items()}  # fmt: skip
    assert found == {name: tuple(wanted) for name, (_, *wanted) in REFUSED.items()}
    assert world.engine.counters.submitted == 0


JSON = {"content-type": "application/json"}
TOOL_CALLS = [{"role": "assistant", "content": "a", "tool_calls": [{}]}]
REFUSED_CHATS = {
    "none": ({"messages": []}, None, "messages"),
    "role": ({"messages": [{"role": "tool", "content": "a"}]}, None, "messages[0]"),
    "no content": ({"messages": [{"role": "user"}]}, None, "messages[0].content"),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "unsupported_parameter",
        "messages[0].content",
    ),
    "tool calls": ({"messages": TOOL_CALLS}, "unsupported_parameter", "messages[0].tool_calls"),
    "tools": ({"tools": [{}]}, "unsupported_parameter", "tools"),
    "format": (
        {"response_format": {"type": "json_object"}},
        "unsupported_parameter",
        "response_format",
    ),
    "top": ({"top_logprobs": 2}, None, "top_logprobs"),
    "two limits": ({"max_completion_tokens": 9}, None, "max_tokens"),
    "of completions": ({"echo": False}, "unknown_parameter", "echo"),
}


def test_each_bad_chat_is_refused_with_its_parameter(world):
    app = world.app()
    found = {name: error(ask(app, "/v1/chat/completions", json=chat(**fields)))
             for name, (fields, *_) in REFUSED_CHATS.items()}  # fmt: skip
    wanted = {name: (400, code, param) for name, (_, code, param) in REFUSED_CHATS.items()}
    assert found == wanted


def test_what_asks_for_nothing_is_taken(world):
    neutral = {"presence_penalty": 0, "logit_bias": None, "user": "me", "echo": False, "best_of": 1}
    assert ask(world.app(), json=completion(**neutral)).status_code == 200
    neutral = {"response_format": {"type": "text"}, "tool_choice": "none", "store": False}
    reply = {"role": "assistant", "content": "a", "refusal": None, "annotations": []}
    asked = chat(**neutral)
    asked["messages"] = [reply, *asked["messages"]]
    assert ask(world.app(), "/v1/chat/completions", json=asked).status_code == 200


def test_bodies_and_urls_that_are_not_valid(world):
    app = world.app(options=ServerOptions(max_body_bytes=2000, body_s=0.2))

    def refused(content, headers=JSON):
        return error(ask(app, content=content, headers=headers))[:2]

    async def slow():
        yield b"{"
        await asyncio.sleep(5)

    async def parts():
        for _ in range(30):
            yield b" " * 100

    for content in (b"{", b"[1]", b"\xff", b'{"a": NaN}', b"[" * 1900, b""):
        assert refused(content) == (400, "invalid_json")
    assert refused(b" " * 3000) == (413, "request_too_large")
    assert refused(b" " * 30000) == (413, "request_too_large")
    assert refused(parts()) == (413, "request_too_large")
    assert refused(slow()) == (408, None)
    assert refused(b"{}", {"content-type": "text/plain"}) == (415, None)
    assert error(ask(app, "/v1/nothing"))[:2] == (404, "unknown_url")
    assert error(ask(app, method="GET"))[:2] == (405, "unknown_url")


def test_models_are_listed_and_looked_up(world):
    app = world.app()
    (only,) = ask(app, "/v1/models", method="GET").json()["data"]
    assert (only["id"], only["max_model_len"]) == ("toy", CONTEXT)
    assert ask(app, "/v1/models/toy", method="GET").json() == only
    assert error(ask(app, "/v1/models/a/b", method="GET"))[:2] == (404, "model_not_found")


def test_only_known_keys_may_ask_where_there_is_a_list(world, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\n\nsecret\n")
    app = world.app(keys=Keys.read(file))
    assert ask(app, json=completion(), headers=key("secret")).status_code == 200
    for headers in ({}, key("other"), {"authorization": "Basic secret"}):
        for path, method in (("/v1/completions", "POST"), ("/v1/models", "GET")):
            answer = ask(app, path, method=method, json=completion(), headers=headers)
            assert error(answer)[:2] == (401, "invalid_api_key")
    assert ask(app, "/health", method="GET").status_code == 200


def test_a_host_that_is_not_this_machine_is_refused(world):
    app = world.app(options=ServerOptions(hosts=frozenset({"proxy.example"})))
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000", "Proxy.example"):
        headers = {"host": host}
        assert ask(app, "/health", method="GET", headers=headers).status_code == 200
    assert error(ask(app, "/health", method="GET", headers={"host": "rebound.example"}))[0] == 403


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


def test_the_official_client_streams_over_a_socket_and_may_go_away(world):
    app = world.app(start=False)
    with serve.listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        server = serve.make_server(app, world.thread, host="127.0.0.1", port=port, grace_s=0.1)
        running = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        running.start()
        with openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="tenant", max_retries=0
        ) as client:
            while world.thread.state is not State.READY:
                time.sleep(0.005)
            try:
                check_client(client)
                check_going(world, client)
                last = client.completions.create(**completion(max_tokens=150), stream=True)
                world.turns.clear()
                server.should_exit = True
                while world.thread._commands.empty():  # the grace is over
                    time.sleep(0.001)
                assert world.thread.state is State.STOPPING
            finally:
                server.should_exit = True
                world.turns.set()
                running.join(20)
            with pytest.raises(openai.APIError, match="stopping"):
                list(last)
    assert not running.is_alive()
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


def test_the_benchmark_measures_both_sorts_of_answers(world, monkeypatch, capsys, tmp_path):
    runtime = world.engine.runner.model
    monkeypatch.setattr(decode_models, "load", lambda args: (runtime, world.text))
    monkeypatch.setattr(serve, "make_engine", lambda *_: world.engine)
    monkeypatch.setattr(command_line, "use_compilation_cache", lambda: None)
    monkeypatch.setattr(world.engine, "_clock", time.monotonic)
    told = tmp_path / "told.json"
    sizes = "--rounds 2 --clients 2 --prompt 20 --tokens 3 --tile 16"
    monkeypatch.setattr(sys, "argv", ["benchmark", "serve", *sizes.split(), "--json", str(told)])
    assert benchmark.main() == 0
    result = json.loads(told.read_text())
    assert result["compilations"] == 0
    for side in ("whole", "stream"):
        row = result[side]
        assert row["outside_engine_ms"] > 0
        assert row["overhead_ms"] == np.median(row["overhead_ms_of_rounds"])
        assert row["overhead_ms"] == pytest.approx(row["http_ms"] - row["straight_ms"])
    assert result["whole"]["outside_engine_ms"] < result["whole"]["http_ms"]
    assert "bar 5.0 ms" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["benchmark", "serve", "--clients", "0"])
    with pytest.raises(UserError, match="--clients must be at least 1"):
        benchmark.main()
