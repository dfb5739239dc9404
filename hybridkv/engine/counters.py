"""What an engine did, counted."""

import dataclasses

from hybridkv.engine.accounts import PromptTotals
from hybridkv.engine.requests import Finish, Output
from hybridkv.tiers.durations import Durations

RESTORE_ENDS = ("ready", "failed", "late")
"""How a restore may end for the request that waits: all there, less, or not in time."""


@dataclasses.dataclass(kw_only=True)
class EngineCounters:
    """Totals since construction. Tokens are those of prompts unless said otherwise."""

    submitted: int = 0
    ended: dict[Finish, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(Finish, 0))
    turns: int = 0
    tile_steps: int = 0
    decode_steps: int = 0
    reused_tokens: int = 0
    replayed_tokens: int = 0
    computed_tokens: int = 0
    """Tokens that went through tile steps for requests, replayed ones included."""
    new_tokens: int = 0
    preemptions: int = 0
    lost_states: int = 0
    """Parked sequences whose bytes were damaged: their outputs are not exact."""
    followed: int = 0
    """Times a request waited for another one to publish what both need."""
    restores: int = 0
    late_restores: int = 0
    failed_restores: int = 0
    last_restore_error: str = ""
    """What the last restore raised that failed by an exception; it is a fault of the tier."""
    compilations: int = 0
    """Since warm-up; anything but 0 is a fault."""
    prompts: PromptTotals = dataclasses.field(default_factory=PromptTotals)
    """What became of the tokens of all prompts; replaced, never changed."""
    first_token: Durations = dataclasses.field(default_factory=Durations)
    """From submission to the first token, of each output."""
    between_tokens: Durations = dataclasses.field(default_factory=Durations)
    """Between two tokens of one output."""
    restore_seconds: dict[str, Durations] = dataclasses.field(
        default_factory=lambda: {end: Durations() for end in RESTORE_ENDS}
    )
    """How long requests waited for restores, by how those ended; one of ``RESTORE_ENDS``."""

    def note_token(self, output: Output, before: float) -> None:
        """An output grew by a token; ``before`` is when its last one came, as ``last_token_s``."""
        if len(output.pieces) == 1:
            self.first_token.note(output.first_token_s)
        elif len(output.pieces) - 1 > output.taken_over:  # the token before was not another's
            self.between_tokens.note(output.last_token_s - before)

    def note_failed_restore(self, error: Exception) -> None:
        """A restore raised instead of saying that it failed."""
        self.failed_restores += 1
        self.last_restore_error = f"{type(error).__name__}: {error}"
