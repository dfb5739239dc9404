"""One sample of one request inside an engine: the mutable record behind its output."""

import dataclasses
import hashlib
from typing import Any, Protocol

import numpy as np

from hybridkv.engine.accounts import NOTHING_BROUGHT, Brought
from hybridkv.engine.parking import Parked
from hybridkv.engine.requests import Output, Request
from hybridkv.engine.restores import RestoreTicket
from hybridkv.engine.sampling import SamplingOptions
from hybridkv.engine.scheduler import FOREVER, Job, Stage
from hybridkv.engine.sequence import Hold, Sequence
from hybridkv.engine.stops import StopMatcher
from hybridkv.prefixes.hashing import TokenChain


class Text(Protocol):
    """A tokenizer as an engine uses it; ``stream`` gives one decoder an output."""

    def encode(self, text: str) -> np.ndarray:
        """int32 ``[tokens]``."""
        ...

    def stream(self) -> "TextStream":
        """A new decoder."""
        ...


class TextStream(Protocol):
    """Turns the tokens of one output into text."""

    def feed(self, token: int) -> str:
        """The text that one more token completes; may be empty."""
        ...

    def finish(self) -> str:
        """What was held back, when no token follows."""
        ...


@dataclasses.dataclass(kw_only=True, eq=False)
class Task:
    """Only its engine changes it.

    Exactly one of ``hold``, ``sequence`` and ``parked`` is set while it is restoring, seated or
    parked; all are None while it waits.
    """

    id: int
    request: Request
    output: Output
    prompt: np.ndarray
    sampling: SamplingOptions
    chain: TokenChain
    arrived: float
    stops: StopMatcher
    text: TextStream | None
    stage: Stage = Stage.WAITING
    hold: Hold | None = None
    ticket: RestoreTicket | None = None
    restore_by: float = FOREVER
    restored: bool = False
    """A restore was tried: it is not tried again."""
    restores: int = 0
    """Restores that were begun."""
    restore_began: float = 0.0
    """When the last one was."""
    brought: Brought = NOTHING_BROUGHT
    """What they brought."""
    coming: Brought = NOTHING_BROUGHT
    """The same, with what the restore under way is to bring."""
    sequence: Sequence | None = None
    parked: Parked | None = None
    leader: "Task | None" = None
    """Publishes a prefix that this one waits for."""
    leader_at: int = 0
    """Position from which the leader is not waited for any more."""
    refused_at: int = -1
    last: int = -1
    """The token that is chosen and not yet consumed."""
    digest: Any = None

    @property
    def room(self) -> int:
        """Tokens that it reserves."""
        return len(self.prompt) + self.request.max_new_tokens

    @property
    def ended(self) -> bool:
        """Whether its output is complete."""
        return self.output.finish is not None

    @property
    def follows(self) -> bool:
        """Whether its leader has yet to publish what it waits for."""
        leader = self.leader
        if leader is None or leader.ended:
            return False
        if leader.stage is Stage.PREFILLING and leader.sequence is not None:
            return leader.sequence.computed < self.leader_at
        # Samples of one request wait for the first; others only for what is being computed.
        return leader.request is self.request and leader.stage in (Stage.WAITING, Stage.RESTORING)

    def note_logits(self, row: np.ndarray) -> None:
        """Adds the logits that the next token is chosen from to the digest."""
        if self.digest is None:
            self.digest = hashlib.sha256()
        self.digest.update(np.ascontiguousarray(row).data)

    def job(self, *, block_tokens: int, tile: int, park_bytes: int) -> Job:
        """The task as the scheduler sees it."""
        sequence, request = self.sequence, self.request
        blocks = -(-self.room // block_tokens)
        if sequence is not None:
            blocks = len(sequence.own.entries)
        return Job(
            id=self.id,
            stage=self.stage,
            arrived=self.arrived,
            priority=request.priority,
            expires=FOREVER if request.timeout_s is None else self.arrived + request.timeout_s,
            restore_by=self.restore_by,
            blocks=blocks,
            tiles=-(-sequence.tokens_left // tile) if sequence is not None else 0,
            follows=self.follows,
            refused_at=self.refused_at,
            park_bytes=park_bytes,
        )
