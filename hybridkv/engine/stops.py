"""Where an output ends: at a stop token, or before a stop string that tokens spell together.

    token id, text --> StopMatcher --> text that may be shown now
                            |
                            held: the longest end of the text that could begin a stop string

The output ends at the first character that completes a stop string. Of several that end there the
longest counts, which is the one that begins first. What precedes it is shown, the stop string and
what follows it is not. How the text is cut into tokens changes nothing in that.
"""

import dataclasses
import enum
from collections.abc import Iterable

from hybridkv.errors import UserError


class StopReason(enum.Enum):
    """What ended an output."""

    TOKEN = "token"
    STRING = "string"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emit:
    """What one token brings."""

    text: str
    """May be shown now; no stop string can take it back."""
    stopped: bool = False
    """The output has ended; nothing may follow."""
    reason: StopReason | None = None
    """Why, when it has."""
    matched: int | str | None = None
    """The stop token or the stop string that ended it."""


class StopMatcher:
    """Watches one output token by token."""

    def __init__(
        self, stop_tokens: Iterable[int] = frozenset(), stop_strings: Iterable[str] = ()
    ) -> None:
        """Watches from the first new token.

        Args:
          stop_tokens: ids that end the output; their own text is not shown.
          stop_strings: texts that end the output, none of them empty.

        Raises:
          UserError: a stop string is empty or no text, or a stop token is no token id.
        """
        self.stop_tokens = _checked_tokens(stop_tokens)
        self.stop_strings = _checked_strings(stop_strings)
        self._longest = max((len(stop) for stop in self.stop_strings), default=0)
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether the output has ended."""
        return self._stopped

    @property
    def held(self) -> str:
        """Text that is not shown yet, because it could begin a stop string."""
        return self._held

    def feed_token(self, token: int, text: str = "") -> Emit:
        """Takes the next token of the output.

        Args:
          token: its id.
          text: what it adds to the text; empty where only ids matter.

        Raises:
          RuntimeError: the output has ended already.
        """
        if self._stopped:
            raise RuntimeError(f"token {token} came after the output had stopped")
        if token in self.stop_tokens:
            return self._stop(self._held, StopReason.TOKEN, token)
        text = self._held + text
        match = _first_end(text, self.stop_strings)
        if match is not None:
            start, stop = match
            return self._stop(text[:start], StopReason.STRING, stop)
        shown = len(text) - self._could_begin(text)
        self._held = text[shown:]
        return Emit(text=text[:shown])

    def flush(self) -> str:
        """The held text, to be shown when the output ends for another reason; then it is empty."""
        held, self._held = self._held, ""
        return held

    def _stop(self, text: str, reason: StopReason, matched: int | str) -> Emit:
        self._held, self._stopped = "", True
        return Emit(text=text, stopped=True, reason=reason, matched=matched)

    def _could_begin(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins a stop string without being whole."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            end = text[-size:]
            if any(len(stop) > size and stop.startswith(end) for stop in self.stop_strings):
                return size
        return 0


def _first_end(text: str, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Start and text of the stop string that ends first; of those, the longest."""
    found = [(start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)


def _checked_tokens(tokens: Iterable[int]) -> frozenset[int]:
    checked = frozenset(tokens)
    for token in checked:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise UserError(f"a stop token must be a token id, at least 0, got {token!r}")
    return checked


def _checked_strings(strings: Iterable[str]) -> tuple[str, ...]:
    if isinstance(strings, str):
        raise UserError(f"stop strings must be a list of texts: pass ({strings!r},)")
    checked = tuple(strings)
    for stop in checked:
        if not isinstance(stop, str):
            raise UserError(f"a stop string must be a text, got {stop!r}")
        if not stop:
            raise UserError("a stop string must not be empty: it would end every output at once")
    return checked
