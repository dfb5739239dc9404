"""What is asked of an engine, and what comes back."""

import dataclasses
import enum
from collections.abc import Callable
from types import NoneType
from typing import Any

import numpy as np

from hybridkv.engine.generated import Publish
from hybridkv.engine.sampling import SamplingOptions, number, whole
from hybridkv.errors import UserError
from hybridkv.prefixes.plan import Miss, Plan
from hybridkv.prefixes.policy import SnapshotPolicy


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One prompt and how to go on from it.

    Raises:
      UserError: a value is of another type, or out of its range.
    """

    prompt: Any
    """Token ids, integer ``[tokens]``, or text where the engine has a tokenizer."""
    max_new_tokens: int = 256
    """Room for so many is reserved when the request is admitted."""
    sampling: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
    samples: int = 1
    """Outputs, which share the prompt. Sample ``i`` has the seed of ``sampling`` plus ``i``, and so
    is what a request of its own with that seed gives."""
    stop: tuple[str, ...] = ()
    """Text that ends the output, and is not part of it. Needs a tokenizer."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end the output; the token is in ``Output.tokens``, its text is not shown."""
    logprobs: int | None = None
    """Report the log-probability of each token, and of so many of the likeliest; None for neither.
    At most ``EngineOptions.logprobs``."""
    priority: int = 0
    """Larger goes first and preempts smaller; see ``SchedulerOptions``."""
    timeout_s: float | None = None
    """Seconds from submission after which it ends with what it has."""
    namespace: str = ""
    """Requests of different namespaces never share anything."""
    policy: SnapshotPolicy | None = None
    """Where its prompt writes snapshots, instead of the runner's."""
    publish: Publish | None = None
    """What becomes of its generated tokens, instead of the engine's choice."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            raise UserError(f"stop is a tuple of strings: write stop=({self.stop!r},)")
        self._check_types()
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if self.samples < 1:
            raise UserError(f"samples must be at least 1, got {self.samples}")
        if self.logprobs is not None and self.logprobs < 0:
            raise UserError(f"logprobs must be at least 0, or None, got {self.logprobs}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise UserError(f"timeout_s must be above 0, or None, got {self.timeout_s}")
        if any(not text for text in self.stop):
            raise UserError("a stop string is empty: it would end every output at once")

    def _check_types(self) -> None:
        """A wrong type is told here: within a turn it would stop the other requests too."""
        for name, known, wanted in _TYPES:
            value = getattr(self, name)
            if not known(value):
                raise UserError(f"{name} must be {wanted}, got {value!r}")


def _instance(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def _all_of(known: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (tuple, list)) and all(map(known, value))


_TYPES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("max_new_tokens", whole, "a whole number"),
    ("samples", whole, "a whole number"),
    ("priority", whole, "a whole number"),
    ("logprobs", lambda value: value is None or whole(value), "a whole number, or None"),
    ("timeout_s", lambda value: value is None or number(value), "a number, or None"),
    ("stop", _all_of(_instance(str)), "a tuple of strings"),
    ("stop_tokens", _all_of(whole), "a tuple of token ids"),
    ("namespace", _instance(str), "a string"),
    ("sampling", _instance(SamplingOptions), "SamplingOptions"),
    ("policy", _instance(SnapshotPolicy, NoneType), "a SnapshotPolicy, or None"),
    ("publish", _instance(Publish, NoneType), "a Publish, or None"),
)


class Finish(enum.Enum):
    """Why an output ended."""

    LENGTH = "length"
    STOP = "stop"
    """A stop token or a stop string."""
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    HANDED_OFF = "handed off"
    """Another engine goes on with it; see ``Engine.hand_off``."""
    FAILED = "failed"
    """See ``Output.reason``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """One more token of an output."""

    token: int
    text: str
    """What can be shown now: empty while a character or a stop string may still be coming."""
    logprob: float | None = None
    """Of the model's own distribution, before penalty and temperature."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Output:
    """What one request, or one sample of it, gave. Grows until ``finish`` is set."""

    prompt_tokens: int
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    last_text: str = ""
    """Text that was held back when the output ended."""
    finish: Finish | None = None
    reason: str = ""
    """One line, where something went wrong."""
    plan: Plan | Miss | None = None
    """How it began."""
    computed: int = 0
    """Prompt tokens that went through tile steps, replayed ones and repeated attempts included."""
    loaded: int = 0
    """Prompt tokens whose blocks were brought from other tiers for it."""
    exact: bool = True
    """Whether its logits are bit for bit those of a cold run."""
    preemptions: int = 0
    publish: Publish = Publish.CANONICAL
    """What becomes of its generated tokens."""
    taken_over: int = 0
    """Leading tokens that another engine chose before it handed the request off."""
    queued_s: float = 0.0
    """From submission to its seat."""
    first_token_s: float = 0.0
    """From submission to its first token."""
    last_token_s: float = 0.0
    """From submission to its last token."""
    logits_digest: str | None = None
    """SHA-256 of all logits that tokens were chosen from, where the engine keeps them."""

    @property
    def tokens(self) -> list[int]:
        """The new tokens."""
        return [piece.token for piece in self.pieces]

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(piece.text for piece in self.pieces) + self.last_text

    @property
    def reused(self) -> int:
        """Prompt tokens that were not computed."""
        return self.plan.reused if isinstance(self.plan, Plan) else 0

    @property
    def replayed(self) -> int:
        """Prompt tokens that were computed although their rows were stored."""
        return self.plan.replayed if isinstance(self.plan, Plan) else 0

    @property
    def decode_tokens_per_second(self) -> float:
        """New tokens after the first, over the time they took; 0 where there are none."""
        seconds = self.last_token_s - self.first_token_s
        new = len(self.pieces) - max(self.taken_over, 1)
        return new / seconds if new > 0 and seconds > 0 else 0.0


def prompt_ids(prompt: Any) -> np.ndarray:
    """Token ids as an array, whatever kind of integers came; refused by ``check_prompt`` if not."""
    ids = np.asarray(prompt if isinstance(prompt, np.ndarray) else list(prompt))
    return ids if ids.size else ids.astype(np.int32)  # nothing has no dtype of its own
