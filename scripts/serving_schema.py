r"""Bodies of requests: what is taken, what is taken at one value only, and what is refused.

    JSON --strictly--> Body --> what ``serving_prompts`` makes requests of

A parameter that would change the answer and is not supported is refused, never ignored. One that
changes no answer (``NO_EFFECT``) is taken. A parameter that nobody knows is refused: it may be a
known one, misspelt. ``null`` stands for a parameter that is absent.
"""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, Self

import pydantic
from serving_errors import invalid, unsupported

MOST_SAMPLES = 2**31 - 1
"""More than any server takes; a product with it can still be printed."""
MOST_STOPS = 4
NO_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)
"""Taken and not looked at: they change no answer, and not whose prefixes are reused."""
_NO_TOOLS = "this server calls no tools"
_TEXT_ONLY = "this server reads and writes text"
ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "audio": ((), _TEXT_ONLY),
    "best_of": ((1,), "choices are not ranked: use n"),
    "echo": ((False,), "the prompt is not given back"),
    "frequency_penalty": ((0, 0.0), "use repetition_penalty"),
    "function_call": (("none",), _NO_TOOLS),
    "functions": (([],), _NO_TOOLS),
    "logit_bias": (({},), "logits are sampled from as the model gives them"),
    "modalities": ((["text"],), _TEXT_ONLY),
    "parallel_tool_calls": ((True, False), _NO_TOOLS),
    "prediction": ((), "outputs are not predicted"),
    "presence_penalty": ((0, 0.0), "use repetition_penalty"),
    "reasoning_effort": ((), "models here have no levels of effort"),
    "response_format": (({"type": "text"},), "outputs are not constrained"),
    "store": ((False,), "completions are not stored"),
    "suffix": (("",), "text is not inserted"),
    "tool_choice": (("none",), _NO_TOOLS),
    "tools": (([],), _NO_TOOLS),
    "verbosity": ((), "models here have no levels of verbosity"),
    "web_search_options": ((), "this server searches nothing"),
}
"""Values that ask for nothing, and why there are no others."""
COMPLETION_ONLY = frozenset({"best_of", "echo", "suffix"})
CHAT_ONLY = (
    frozenset(ONLY)
    - COMPLETION_ONLY
    - {
        "frequency_penalty",
        "logit_bias",
        "presence_penalty",
    }
)


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Strict):
    """Of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Body(_Strict):
    """What both kinds of requests take."""

    refused: ClassVar[frozenset[str]] = frozenset()
    """Parameters of ``ONLY`` that this kind of request does not know at all."""

    model: str
    max_tokens: int | None = pydantic.Field(None, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = pydantic.Field(1, ge=1, le=MOST_SAMPLES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: Any = None
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """A body that is valid.

        Raises:
          ApiError: 400, with the parameter's name.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        for name in [name for name in given if name not in cls.model_fields]:
            _check_other(name, given.pop(name), cls.refused)
        try:
            body = cls.model_validate(given)
        except pydantic.ValidationError as error:
            _refuse(error)
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options is for streams: set stream", param="stream_options")
        if body.stream_options is not None and body.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation", "chunks are not padded")
        body.stops()
        return body

    @property
    def usage_chunk(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def stops(self) -> tuple[str, ...]:
        """Texts that end the output.

        Raises:
          ApiError: 400.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if stops is None:
            return ()
        if not isinstance(stops, list) or not all(isinstance(x, str) and x for x in stops):
            raise invalid("stop must be a text or a list of texts, none empty", param="stop")
        if len(stops) > MOST_STOPS:
            raise invalid(f"stop has {len(stops)} texts, at most {MOST_STOPS}", param="stop")
        return tuple(check_text(stop, "stop") for stop in stops)

    def most_tokens(self) -> int | None:
        """Tokens that may be generated, where the request says."""
        return self.max_tokens

    def top(self) -> int | None:
        """Likeliest tokens to report; None for no log-probabilities at all."""
        raise NotImplementedError


class CompletionBody(Body):
    """``POST /v1/completions``."""

    refused: ClassVar[frozenset[str]] = CHAT_ONLY
    prompt: Any
    logprobs: int | None = pydantic.Field(None, ge=0)

    def most_tokens(self) -> int:
        """As OpenAI's: 16 where nothing is said."""
        return self.max_tokens or 16

    def top(self) -> int | None:
        """See ``Body.top``."""
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Texts or token ids.

        Raises:
          ApiError: 400.
        """
        given = self.prompt
        if isinstance(given, str):
            return [check_text(given, "prompt")]
        if isinstance(given, list) and given:
            if _are_ids(given):
                return [given]
            if all(isinstance(x, str) for x in given):
                return [check_text(x, "prompt") for x in given]
            if all(isinstance(x, list) and x and _are_ids(x) for x in given):
                return given
        raise invalid(
            "prompt must be a text, a list of token ids, or a list of either, not empty",
            param="prompt",
        )


class ChatBody(Body):
    """``POST /v1/chat/completions``."""

    refused: ClassVar[frozenset[str]] = COMPLETION_ONLY
    messages: list[Any] = pydantic.Field(min_length=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=20)

    def most_tokens(self) -> int | None:
        """Of both names.

        Raises:
          ApiError: 400, they contradict each other.
        """
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise invalid(
                f"max_tokens is {old} and max_completion_tokens {new}: give one",
                param="max_tokens",
            )
        return old if new is None else new

    def top(self) -> int | None:
        """See ``Body.top``.

        Raises:
          ApiError: 400, likeliest tokens without log-probabilities.
        """
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs needs logprobs: set it", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def turns(self) -> list[dict[str, str]]:
        """The messages as templates know them: ``role`` and ``content``.

        Raises:
          ApiError: 400.
        """
        return [_turn(message, f"messages[{i}]") for i, message in enumerate(self.messages)]


ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_EMPTY_IN_MESSAGES = ("annotations", "audio", "function_call", "refusal", "tool_calls")
"""What clients send back of a reply, with nothing in it."""


def _turn(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise invalid(f"{where} must be an object", param=where)
    role, rest = message.get("role"), set(message) - {"role", "content"}
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role is {role!r}: give one of {', '.join(ROLES)}", param=where)
    for name in sorted(rest):
        if message[name] and name in (*_EMPTY_IN_MESSAGES, "name"):
            raise unsupported(f"{where}.{name}", "templates see role and content only")
        if name not in (*_EMPTY_IN_MESSAGES, "name"):
            raise invalid(f"{where} has an unknown field {name}", param=where)
    return {"role": ROLES[role], "content": _content(message.get("content"), f"{where}.content")}


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return check_text(content, where)
    if not isinstance(content, list) or not content:
        raise invalid(f"{where} must be a text or a list of parts", param=where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise unsupported(where, f"a part of type {kind!r}; parts are texts")
        if not isinstance(part.get("text"), str) or set(part) != {"type", "text"}:
            raise invalid(f"{where} has a part that is not {{type, text}}", param=where)
        texts.append(check_text(part["text"], where))
    return "".join(texts)


def check_text(text: str, param: str) -> str:
    """The text, if it is one: JSON may spell halves of characters.

    Raises:
      ApiError: 400.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(
            f"{param} holds a lone surrogate, which is no character", param=param
        ) from None
    return text


def read_json(body: bytes) -> dict[str, Any]:
    """The object that a body holds.

    Raises:
      ApiError: 400.
    """

    def no_number(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON number")

    try:
        fields = json.loads(body, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise invalid("the body must be a JSON object", code="invalid_json")
    return fields


def _are_ids(values: list[Any]) -> bool:
    return set(map(type, values)) <= {int}


def _check_other(name: str, value: Any, refused: frozenset[str]) -> None:
    """Refuses a parameter that is not one of the body's own, unless it asks for nothing."""
    if name in NO_EFFECT:
        return
    if name not in ONLY or name in refused:
        raise invalid(f"unknown parameter: {name}", param=name, code="unknown_parameter")
    values, why = ONLY[name]
    if not any(type(value) is type(x) and value == x for x in values):
        raise unsupported(name, why)


def _refuse(error: pydantic.ValidationError) -> NoReturn:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    raise invalid(f"{param}: {first['msg']}", param=param) from None
