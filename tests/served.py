"""The HTTP server in the tests' hands: a toy engine on its thread, and requests to it."""

import asyncio
import json
import sys
import threading
import time

import httpx
import numpy as np
from engines import ids_of
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

from serving_app import ServerOptions, make_app
from serving_engine import EngineThread, State
from serving_prompts import Served
from serving_tenants import Keys

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
        return make_app(self.served(**changes), keys, self.thread, options)

    def served(self, **changes):
        served = {
            "name": "toy",
            "runtime": self.engine.runner.model,
            "text": self.text,
            "context": CONTEXT,
            "logprobs": 4,
            "choices": ROOM,
            "template": True,
        }
        return Served(**served | changes)


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
