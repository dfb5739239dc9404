"""Every lost token is blamed: ideal = reused + the losses, exactly."""

import dataclasses
import enum

from hybridkv.kinds import Kind


class Cause(enum.Enum):
    """Why tokens that were computed once are computed again."""

    NEVER_PUBLISHED = "never_published"
    EVICTED = "evicted"
    LAYOUT = "layout"
    NUMERICS = "numerics"
    ALIGNMENT = "alignment"
    NO_SNAPSHOT = "no_snapshot"
    LOAD_TOO_SLOW = "load_too_slow"
    POLICY = "policy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """Tokens lost to one cause."""

    cause: Cause
    kind: Kind | None
    """The kind to blame, where one is."""
    tokens: int

    def __str__(self) -> str:
        of = f" ({self.kind.value})" if self.kind else ""
        return f"{self.tokens} to {self.cause.value}{of}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A position that reuse falls back to, and why it does not reach further."""

    position: int
    cause: Cause
    kind: Kind | None = None


def blame(ideal: int, steps: tuple[Step, ...]) -> tuple[Loss, ...]:
    """The losses between ``ideal`` and the last step, each token once, one a cause and kind.

    Args:
      ideal: tokens that reuse could have spared.
      steps: falling positions; tokens between one and the one before are lost to its cause.
    """
    lost: dict[tuple[Cause, Kind | None], int] = {}
    above = ideal
    for step in steps:
        position = min(step.position, above)
        if position < above:
            key = (step.cause, step.kind)
            lost[key] = lost.get(key, 0) + above - position
        above = position
    return tuple(Loss(cause=cause, kind=kind, tokens=n) for (cause, kind), n in lost.items())
