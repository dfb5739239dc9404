"""Answers in OpenAI's shape, whole and in chunks.

Beyond it every choice has a field ``hybridkv`` when it ends: ``outcome`` and ``reused_tokens``
(what was done with stored prefixes), ``replayed_tokens``, ``loaded_tokens``, ``exact`` (whether its
logits are bit for bit those of a cold run), ``seed``, ``logits_digest`` where the engine keeps
digests, ``scheme`` (which serves it, in a rollout), and the seconds that it waited for a slot and
that the engine had it (``queued_s``, ``engine_s``).
"""

import dataclasses
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import serving_errors
from serving_errors import ApiError
from serving_updates import Began, Ended, Update

from hybridkv.engine.requests import Finish, Piece
from models.text import UNFINISHED, ByteText, Text

LOWEST = -9999.0
"""Stands for a log-probability that JSON has no number for."""
_NAMES = random.Random()
REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length"}


class TokenNames:
    """How single tokens are written where log-probabilities are reported."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def of(self, token: int) -> tuple[str, list[int] | None]:
        r"""A token's text and bytes.

        One that is only part of a character is ``bytes:\xNN`` where tokens are bytes; elsewhere it
        is ``token_id:N`` and its bytes are not known, as for a token that has no text.
        """
        if token not in self._known:
            self._known[token] = self._look(token)
        return self._known[token]

    def _look(self, token: int) -> tuple[str, list[int] | None]:
        if isinstance(self._text, ByteText):
            return (chr(token) if token < 128 else f"bytes:\\x{token:02x}"), [token]
        stream = self._text.stream()
        text = stream.feed(token) + stream.finish()
        if not text or UNFINISHED in text:
            return f"token_id:{token}", None
        return text, list(text.encode())


@dataclasses.dataclass(kw_only=True)
class _Choice:
    """What came of one choice so far."""

    began: Began | None = None
    ended: Ended | None = None
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    offset: int = 0
    """Characters of the tokens that were reported with log-probabilities."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Head:
    """What all chunks of an answer share."""

    chat: bool
    model: str
    fingerprint: str
    id: str = dataclasses.field(default_factory=lambda: f"{_NAMES.getrandbits(128):032x}")
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    def fields(self, *, chunk: bool) -> dict[str, Any]:
        """Of a whole answer, or of a chunk."""
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{self.id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class Reply:
    """One answer as it comes."""

    def __init__(
        self, head: Head, names: TokenNames, *, choices: int, samples: int, logprobs: bool
    ) -> None:
        """Of nothing yet.

        Args:
          head: of the answer.
          names: of tokens.
          choices: how many come; those of one prompt are next to each other.
          samples: choices of one prompt.
          logprobs: whether log-probabilities are reported.
        """
        self.head = head
        self._names, self._samples, self._logprobs = names, samples, logprobs
        self._choices = [_Choice() for _ in range(choices)]

    # Whole.

    def take(self, updates: Iterable[Update]) -> None:
        """Adds what is new.

        Raises:
          ApiError: a choice ended without an answer.
        """
        for update in updates:
            choice = self._choices[update.choice]
            choice.began = update.began
            choice.pieces.extend(update.pieces)
            if update.ended is not None:
                choice.ended = update.ended
                require_answer(update.ended)

    def whole(self) -> dict[str, Any]:
        """The answer in one piece, once all choices have ended."""
        choices = [self._whole(number) for number in range(len(self._choices))]
        return self.head.fields(chunk=False) | {"choices": choices, "usage": self.usage()}

    def _whole(self, number: int) -> dict[str, Any]:
        choice = self._choices[number]
        assert choice.ended is not None
        text = _text(choice.pieces, choice.ended)
        logprobs = self._logprob_fields(choice, choice.pieces)
        fields = {
            "index": number,
            "logprobs": logprobs,
            "finish_reason": REASONS[choice.ended.finish],
            "hybridkv": self.outcome(number),
        }
        if self.head.chat:
            return fields | {"message": {"role": "assistant", "content": text, "refusal": None}}
        return fields | {"text": text}

    def usage(self) -> dict[str, Any]:
        """Tokens of all choices that have begun; a prompt counts once, whatever its samples."""
        prompts = [x.began for x in self._choices[:: self._samples] if x.began is not None]
        prompt = sum(began.prompt_tokens for began in prompts)
        new = sum(len(choice.pieces) for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(began.reused for began in prompts)},
        }

    def outcome(self, number: int) -> dict[str, Any]:
        """The field ``hybridkv`` of a choice that has ended."""
        began, ended = self._choices[number].began, self._choices[number].ended
        assert began is not None
        assert ended is not None
        fields: dict[str, Any] = {
            "outcome": began.outcome,
            "reused_tokens": began.reused,
            "replayed_tokens": ended.replayed,
            "loaded_tokens": ended.loaded,
            "exact": ended.exact,
            "seed": ended.seed,
        }
        if began.scheme is not None:
            fields["scheme"] = began.scheme
        if ended.logits_digest is not None:
            fields["logits_digest"] = ended.logits_digest
        return fields | {
            "queued_s": round(ended.queued_s, 6),
            "engine_s": round(ended.engine_s, 6),
        }

    def headers(self) -> dict[str, str]:
        """``x-hybridkv-*``, of the first choice, once it has begun; ``exact`` once all ended."""
        began = self._choices[0].began
        if began is None:
            return {}
        headers = {
            "x-hybridkv-outcome": began.outcome,
            "x-hybridkv-reused-tokens": str(began.reused),
        }
        ends = [choice.ended for choice in self._choices]
        if all(ends):
            exact = all(end.exact for end in ends if end is not None)
            headers["x-hybridkv-exact"] = str(exact).lower()
        return headers

    # In chunks.

    def opening(self, *, usage: bool) -> list[dict[str, Any]]:
        """Chunks that come first: of a chat, who speaks."""
        if not self.head.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk(number, {"delta": delta}, usage=usage)
            for number in range(len(self._choices))
        ]

    def chunks(self, updates: Sequence[Update], *, usage: bool) -> list[dict[str, Any]]:
        """Chunks of what is new; ``take`` was called with it before."""
        chunks = []
        for update in updates:
            choice, ended = self._choices[update.choice], update.ended
            text = _text(update.pieces, ended)
            logprobs = self._logprob_fields(choice, update.pieces)
            if text or (logprobs is not None and update.pieces):
                said: dict[str, Any] = {"logprobs": logprobs}
                said |= {"delta": {"content": text}} if self.head.chat else {"text": text}
                chunks.append(self._chunk(update.choice, said, usage=usage))
            if ended is not None:
                last: dict[str, Any] = {"delta": {}} if self.head.chat else {"text": ""}
                last |= {"finish_reason": REASONS[ended.finish]}
                last |= {"hybridkv": self.outcome(update.choice)}
                chunks.append(self._chunk(update.choice, last, usage=usage))
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        """The chunk that comes last where usage is wanted."""
        return self.head.fields(chunk=True) | {"choices": [], "usage": self.usage()}

    def _chunk(self, number: int, said: Mapping[str, Any], *, usage: bool) -> dict[str, Any]:
        choice = {"index": number, "logprobs": None, "finish_reason": None, **said}
        chunk = self.head.fields(chunk=True) | {"choices": [choice]}
        return chunk | {"usage": None} if usage else chunk

    def _logprob_fields(self, choice: _Choice, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        if self.head.chat:
            return {"content": [self._chat_logprob(piece) for piece in pieces], "refusal": None}
        names = [self._names.of(piece.token)[0] for piece in pieces]
        offsets = []
        for piece in pieces:
            offsets.append(choice.offset)
            choice.offset += len(piece.text)
        return {
            "tokens": names,
            "token_logprobs": [_number(piece.logprob) for piece in pieces],
            "top_logprobs": [
                {self._names.of(token)[0]: _number(value) for token, value in reversed(piece.top)}
                | {name: _number(piece.logprob)}
                for piece, name in zip(pieces, names, strict=True)
            ],
            "text_offset": offsets,
        }

    def _chat_logprob(self, piece: Piece) -> dict[str, Any]:
        return self._named(piece.token, piece.logprob) | {
            "top_logprobs": [self._named(token, value) for token, value in piece.top]
        }

    def _named(self, token: int, value: float | None) -> dict[str, Any]:
        name, spelled = self._names.of(token)
        return {"token": name, "logprob": _number(value), "bytes": spelled}


def require_answer(ended: Ended) -> None:
    """Refuses to call something an answer that is none.

    Raises:
      ApiError: it was cancelled, took too long, or failed.
    """
    if ended.finish in REASONS:
        return
    raise _END_ERRORS.get(ended.finish, _failed)(ended)


def _failed(ended: Ended) -> ApiError:
    return serving_errors.internal(f"the request failed: {ended.reason or ended.finish.value}")


def _cancelled(ended: Ended) -> ApiError:
    return serving_errors.unavailable("the server is stopping", "unavailable")


def _timed_out(ended: Ended) -> ApiError:
    return ApiError(
        504,
        f"the request took longer than this server allows; it had {ended.new_tokens} new tokens",
        code="timeout",
        type=serving_errors.SERVER,
    )


_END_ERRORS = {Finish.CANCELLED: _cancelled, Finish.TIMED_OUT: _timed_out}


def _text(pieces: Sequence[Piece], ended: Ended | None) -> str:
    return "".join(piece.text for piece in pieces) + (ended.last_text if ended else "")


def _number(value: float | None) -> float:
    return LOWEST if value is None else max(value, LOWEST)
