r"""From a valid body to requests of the engine.

    Body, namespace --tokens--> fits the context --> Request ... --> EngineThread.submit

A chat goes through the model's template. Where the model has none (or the server is told not to use
it) a conversation is written plainly, and a reply ends where the next turn would begin:

    user:
    Who is there?

    assistant:
    ...

Nothing in plain text can tell a turn from a message that spells one.
"""

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from serving_errors import ApiError, invalid, too_long
from serving_schema import Body, ChatBody, CompletionBody

from hybridkv.engine.generate import check_prompt
from hybridkv.engine.requests import Request, prompt_ids
from hybridkv.engine.sampling import SamplingOptions
from hybridkv.errors import UserError
from models.text import Message, Text

PLAIN_STOP = "\n\nuser:\n"
SHORT = 20_000
"""Bytes of a body whose prompts are encoded on the event loop; those of longer ones on another
thread. Not characters: each of many prompts or messages takes its time, even one without text."""
SEEDS = 2**32
_DRAWN = random.Random()
"""Not the system's, which would let go of the interpreter for each request."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """The model that is served, as far as requests depend on it."""

    name: str
    runtime: Any
    """As an engine takes it: its vocabulary counts here."""
    text: Text
    context: int
    """Tokens of a prompt and what follows it."""
    logprobs: int
    """The most likeliest tokens that may be asked for."""
    choices: int
    """The most choices of one HTTP request."""
    template: bool
    """Whether chats go through the model's template."""
    default_tokens: int | None = None
    """New tokens of a chat that does not say; None for what the context leaves."""
    timeout_s: float | None = None
    """Seconds that a request may take."""


async def requests(served: Served, body: Body, namespace: str, *, size: int) -> list[Request]:
    """The engine's requests of one HTTP request, one a prompt.

    Args:
      served: the model.
      body: what is asked.
      namespace: of whoever asks; see ``serving_tenants``.
      size: bytes of the body.

    Raises:
      ApiError: 400.
    """
    if size <= SHORT:
        prompts = _prompts(served, body)
    else:
        prompts = await asyncio.to_thread(_prompts, served, body)
    top, sampling = body.top(), _sampling(body)
    if top is not None and top > served.logprobs:
        param = "logprobs" if isinstance(body, CompletionBody) else "top_logprobs"
        raise invalid(f"{param} is {top}: this server reports {served.logprobs}", param=param)
    plain = isinstance(body, ChatBody) and not served.template
    return [
        Request(
            prompt=ids,
            max_new_tokens=_new_tokens(served, body, len(ids)),
            sampling=dataclasses.replace(sampling, seed=(sampling.seed + i * body.n) % SEEDS),
            samples=body.n,
            stop=body.stops() + ((PLAIN_STOP,) if plain else ()),
            stop_tokens=tuple(served.text.stop_tokens),
            logprobs=top,
            timeout_s=served.timeout_s,
            namespace=namespace,
        )
        for i, ids in enumerate(prompts)
    ]


def plain_chat(messages: Sequence[Message]) -> str:
    """A conversation without a template, up to where the next reply begins."""
    turns = [f"{message['role']}:\n{message['content']}\n\n" for message in messages]
    return "".join(turns) + "assistant:\n"


def _prompts(served: Served, body: Body) -> list[np.ndarray]:
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    try:
        given: list[np.ndarray]
        if isinstance(body, ChatBody):
            _check_choices(served, 1, body.n)
            given = [_chat_ids(served, body.turns())]
        else:
            assert isinstance(body, CompletionBody)
            prompts = body.prompts()
            _check_choices(served, len(prompts), body.n)
            given = [_ids(served, prompt) for prompt in prompts]
        for ids in given:
            new = body.most_tokens() or 1
            if len(ids) + new > served.context:
                raise too_long(len(ids), new, served.context, param)
        return [
            check_prompt(served.runtime, ids, max_new_tokens=1, capacity_tokens=served.context)
            for ids in given
        ]
    except ApiError:
        raise
    except (UserError, OverflowError) as error:
        raise invalid(str(error), param=param) from error


def _check_choices(served: Served, prompts: int, n: int) -> None:
    """Before anything is encoded, which takes longest."""
    if prompts * n > served.choices:
        raise invalid(
            f"{prompts} prompts with n={n} are {prompts * n} choices: at most {served.choices} at "
            "once",
            param="n",
        )


def _ids(served: Served, prompt: str | list[int]) -> np.ndarray:
    return served.text.encode(prompt) if isinstance(prompt, str) else prompt_ids(prompt)


def _chat_ids(served: Served, messages: list[dict[str, str]]) -> np.ndarray:
    if served.template:
        return served.text.encode_chat(messages)
    return served.text.encode(plain_chat(messages))


def _new_tokens(served: Served, body: Body, prompt: int) -> int:
    wanted, left = body.most_tokens(), served.context - prompt
    if wanted is not None:
        return wanted
    return left if served.default_tokens is None else min(served.default_tokens, left)


def _sampling(body: Body) -> SamplingOptions:
    """A seed is drawn where none is given, and told with the answer."""
    fields = {name: getattr(body, name) for name in SAMPLING}
    fields["seed"] = _DRAWN.getrandbits(32) if body.seed is None else body.seed
    try:
        return SamplingOptions(**fields)
    except UserError as error:
        words = str(error)
        param = next((name for name in SAMPLING if words.startswith(name)), None)
        raise invalid(words, param=param) from error
