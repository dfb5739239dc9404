"""What the HTTP server refuses, with which status, code and parameter."""

import asyncio
import json
import sys
import threading

from engines import VOCAB
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

from served import CONTEXT, ROOM, ask, chat, completion, error, key
from serving_app import ServerOptions
from serving_tenants import Keys

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
    "choices without end": ({"n": 10**4299, "prompt": ["a"] * 20}, 400, None, "n"),
    "many logprobs": ({"logprobs": 5}, 400, None, "logprobs"),
    "empty stop": ({"stop": ""}, 400, None, "stop"),
    "many stops": ({"stop": ["a"] * 5}, 400, None, "stop"),
    "penalty": ({"presence_penalty": 0.5}, 400, "unsupported_parameter", "presence_penalty"),
    "bias": ({"logit_bias": {"1": 5}}, 400, "unsupported_parameter", "logit_bias"),
    "echo": ({"echo": True}, 400, "unsupported_parameter", "echo"),
    "misspelt": ({"temprature": 1}, 400, "unknown_parameter", "temprature"),
    "of chats": ({"tools": []}, 400, "unknown_parameter", "tools"),
    "options": ({"stream_options": {}}, 400, None, "stream_options"),
    "half a name": ({"\ud800": 1}, 400, "unknown_parameter", "\\ud800"),
}


def test_each_bad_completion_is_refused_with_its_parameter(world):
    app = world.app()
    found = {name: error(ask(app, content=json.dumps(completion(**fields)), headers=JSON))
             for name, (fields, *_) in REFUSED.items()}  # fmt: skip
    assert found == {name: tuple(wanted) for name, (_, *wanted) in REFUSED.items()}
    assert world.engine.counters.submitted == 0


CHATS = "/v1/chat/completions"
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
    "half a field": (
        {"messages": [{"role": "user", "content": "a", "\ud800": 1}]},
        None,
        "messages[0]",
    ),
    "two limits": ({"max_completion_tokens": 9}, None, "max_tokens"),
    "of completions": ({"echo": False}, "unknown_parameter", "echo"),
}


def test_each_bad_chat_is_refused_with_its_parameter(world):
    app = world.app()
    found = {name: error(ask(app, CHATS, content=json.dumps(chat(**fields)), headers=JSON))
             for name, (fields, *_) in REFUSED_CHATS.items()}  # fmt: skip
    wanted = {name: (400, code, param) for name, (_, code, param) in REFUSED_CHATS.items()}
    assert found == wanted


def test_more_prompts_than_choices_are_refused_before_any_is_encoded(world, monkeypatch):
    encoded = []
    monkeypatch.setattr(world.text, "encode", encoded.append)
    for many in (["a"] * (ROOM + 1), ["a"] * 30_000):
        answer = ask(world.app(), json=completion(many))
        assert error(answer) == (400, None, "n")
    assert encoded == []


def test_many_prompts_and_messages_are_encoded_beside_the_event_loop(world, monkeypatch):
    """Also those without text: each takes its time."""
    app, threads = world.app(), []

    def note(how):
        def noting(given, **more):
            threads.append(threading.current_thread())
            return how(given, **more)

        return noting

    for name in ("encode", "encode_chat"):
        monkeypatch.setattr(world.text, name, note(getattr(world.text, name)))
    empty = [{"role": "user", "content": ""}] * 1000
    asked = chat() | {"messages": empty}
    answer = ask(app, "/v1/chat/completions", json=asked)
    assert error(answer)[:2] == (400, "context_length_exceeded")
    answer = ask(app, json=completion(["a" * 1000] * 25))
    assert error(answer)[:2] == (400, "context_length_exceeded")
    assert len(threads) == 1 + 1 + 25
    assert threading.main_thread() not in threads
    assert ask(app, json=completion()).status_code == 200
    assert threads[27:] == [threading.main_thread()], "a short one waits for no thread"


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
    hosts = {"proxy.example", "API.Example.com", "other.example:8443", "2001:DB8::1"}
    app = world.app(options=ServerOptions(hosts=frozenset(hosts)))
    taken = ["localhost:8000", "127.0.0.1", "[::1]:8000", "Proxy.example"]
    taken += ["api.example.com", "other.example:8443", "other.example", "[2001:db8::1]:8000"]
    refused = ["rebound.example", "example.com", "2001"]
    found = {
        host: ask(app, "/health", method="GET", headers={"host": host}).status_code
        for host in (*taken, *refused)
    }
    assert found == dict.fromkeys(taken, 200) | dict.fromkeys(refused, 403)
