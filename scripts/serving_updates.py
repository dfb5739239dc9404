"""What the engine's thread tells of one choice: how it began, what is new, how it ended."""

import dataclasses

from hybridkv.engine.requests import Finish, Output, Piece


@dataclasses.dataclass(frozen=True, kw_only=True)
class Began:
    """How one choice began."""

    prompt_tokens: int
    reused: int
    outcome: str
    """See ``hybridkv.prefixes.plan.Outcome``."""
    scheme: str | None = None
    """Of a rollout, that which serves it."""

    @classmethod
    def of(cls, output: Output, scheme: str | None = None) -> "Began":
        """What is known once there is a token."""
        outcome = "cold" if output.plan is None else output.plan.outcome.value
        return cls(
            prompt_tokens=output.prompt_tokens,
            reused=output.reused,
            outcome=outcome,
            scheme=scheme,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """How one choice ended."""

    finish: Finish
    reason: str = ""
    last_text: str = ""
    new_tokens: int = 0
    exact: bool = True
    replayed: int = 0
    loaded: int = 0
    seed: int = 0
    queued_s: float = 0.0
    engine_s: float = 0.0
    """From submission to its last token."""
    logits_digest: str | None = None

    @classmethod
    def of(cls, output: Output, finish: Finish, seed: int) -> "Ended":
        """Of an output that has ended so, sampled with this seed."""
        return cls(
            finish=finish,
            reason=output.reason,
            last_text=output.last_text,
            new_tokens=len(output.pieces),
            exact=output.exact,
            replayed=output.replayed,
            loaded=output.loaded,
            seed=seed,
            queued_s=output.queued_s,
            engine_s=output.last_token_s,
            logits_digest=output.logits_digest,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """What is new of one choice."""

    choice: int
    pieces: tuple[Piece, ...] = ()
    began: Began
    ended: Ended | None = None
