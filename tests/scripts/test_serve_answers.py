"""Answers of the HTTP server: what they say, whole and streamed, and what they reuse."""

import asyncio
import sys

import httpx
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import serving_tenants
from served import DOCUMENT, SHORT, ask, chat, completion, events, key, spelled


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
