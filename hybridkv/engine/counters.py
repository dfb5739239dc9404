"""What an engine did, counted."""

import dataclasses

from hybridkv.engine.requests import Finish


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

    def note_failed_restore(self, error: Exception) -> None:
        """A restore raised instead of saying that it failed."""
        self.failed_restores += 1
        self.last_restore_error = f"{type(error).__name__}: {error}"
