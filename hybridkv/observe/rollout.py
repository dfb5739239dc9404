r"""How far reuse is trusted, as a value with explicit transitions.

                forward: a person, by name, one stage at a time
    OFF ----------> SHADOW ----------> PERCENT ----------> FULL
     ^                |                 |  ^  |              |
     |                |                 |  +--+ more percent |
     +----------------+-----------------+--------------------+
                back: by itself (a threshold), or a person

    stage     served by                        run beside it, for a sampled share
    OFF       the safe path                    nothing
    SHADOW    the safe path                    the reuse path, compared with a cold run
    PERCENT   reuse for a share, safe else     a cold run of what reuse served
    FULL      reuse                            a cold run

Pure functions of values: who goes forward is named, who goes back by itself says why, and what was
rolled back stays back until a person goes forward again. ``rollout_file`` keeps the value over
restarts, ``rollout_schemes`` acts on it.
"""

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any

from hybridkv.errors import UserError

VERSION = 1
"""Of the state's JSON."""
LONGEST_HISTORY = 32
"""Changes that a state remembers; older ones go."""
AUTOMATIC = "hybridkv"
"""Who changed a stage by itself."""


class RolloutError(UserError):
    """A change that no table allows, or a state that cannot be read."""


class RolloutStage(enum.Enum):
    """How far reuse is trusted; see above."""

    OFF = "off"
    SHADOW = "shadow"
    PERCENT = "percent"
    FULL = "full"


class RollbackCause(enum.Enum):
    """Why a stage went back by itself."""

    MISMATCH = "mismatch"
    """A shadow run had other tokens or other bits of a logit than a cold run."""
    FIRST_TOKEN = "first_token"
    """Reuse is slower to its first token than the safe path."""
    BETWEEN_TOKENS = "between_tokens"
    """Reuse is slower from token to token than the safe path."""
    MISSES = "misses"
    """Too many tokens that were computed before could not be restored."""
    FAULT = "fault"
    """The engine of the reuse path, or of cold runs, raised where it should compute."""
    STATE_FILE = "state_file"
    """The state cannot be read: nothing says that reuse may be trusted."""


ORDER = tuple(RolloutStage)
"""From least to most trust."""
FORWARD: Mapping[RolloutStage, tuple[RolloutStage, ...]] = {
    RolloutStage.OFF: (RolloutStage.SHADOW,),
    RolloutStage.SHADOW: (RolloutStage.PERCENT,),
    RolloutStage.PERCENT: (RolloutStage.PERCENT, RolloutStage.FULL),
    RolloutStage.FULL: (),
}
"""Where a person may go from each stage; from PERCENT to PERCENT with a larger share only."""
BACK: Mapping[RolloutStage, tuple[RolloutStage, ...]] = {
    RolloutStage.OFF: (),
    RolloutStage.SHADOW: (RolloutStage.OFF,),
    RolloutStage.PERCENT: (RolloutStage.OFF, RolloutStage.SHADOW, RolloutStage.PERCENT),
    RolloutStage.FULL: (RolloutStage.OFF, RolloutStage.SHADOW, RolloutStage.PERCENT),
}
"""Where each stage may go back to; from PERCENT to PERCENT with a smaller share only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """One change of stage."""

    at: float
    """Seconds since 1970."""
    before: RolloutStage
    after: RolloutStage
    percent: float
    """Of the state after it."""
    by: str
    """A person's name, or ``AUTOMATIC``."""
    cause: RollbackCause | None
    """None where a person did it."""
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutState:
    """Where a rollout stands, and how it came there.

    Raises:
      RolloutError: the percentage is not one of the stage.
    """

    stage: RolloutStage = RolloutStage.OFF
    percent: float = 0.0
    """Of requests that reuse serves: above 0 and below 100 in PERCENT, else 0 or 100."""
    revision: int = 0
    """Counts changes."""
    rolled_back: bool = False
    """It went back by itself, and no person has gone forward since."""
    rollbacks: int = 0
    """Times that it went back by itself."""
    history: tuple[Change, ...] = ()
    """The last changes, the oldest first."""

    def __post_init__(self) -> None:
        fixed = {RolloutStage.OFF: 0.0, RolloutStage.SHADOW: 0.0, RolloutStage.FULL: 100.0}
        wanted = fixed.get(self.stage)
        if wanted is None and not 0 < self.percent < 100:
            raise RolloutError(
                f"stage percent needs a percentage above 0 and below 100, got {self.percent:g}"
            )
        if wanted is not None and self.percent != wanted:
            raise RolloutError(f"stage {self.stage.value} has no percentage of {self.percent:g}")

    @property
    def reason(self) -> str:
        """Of the last change."""
        return self.history[-1].reason if self.history else "never changed"

    def to_json(self) -> dict[str, Any]:
        """What ``from_json`` reads."""
        return {
            "version": VERSION,
            "stage": self.stage.value,
            "percent": self.percent,
            "revision": self.revision,
            "rolled_back": self.rolled_back,
            "rollbacks": self.rollbacks,
            "history": [_change_to_json(change) for change in self.history],
        }

    @classmethod
    def from_json(cls, read: Any) -> "RolloutState":
        """A state from parsed JSON.

        Raises:
          RolloutError: it is not one; the message says which field.
        """
        if not isinstance(read, dict):
            raise RolloutError("it holds no JSON object")
        if read.get("version") != VERSION:
            raise RolloutError(f"its version is {read.get('version')!r}, this reads {VERSION}")
        history = _field(read, "history", list)
        return cls(
            stage=_choice(read, "stage", RolloutStage),
            percent=_number(read, "percent"),
            revision=_field(read, "revision", int),
            rolled_back=_field(read, "rolled_back", bool),
            rollbacks=_field(read, "rollbacks", int),
            history=tuple(_change_from_json(each) for each in history),
        )


def forward(
    state: RolloutState,
    to: RolloutStage,
    *,
    by: str,
    reason: str,
    now: float,
    percent: float | None = None,
) -> RolloutState:
    """One stage on, which a person decides.

    Args:
      state: before.
      to: the stage after; naming it keeps a rollback that came between from being stepped over.
      by: who decides.
      reason: why.
      now: seconds since 1970.
      percent: of requests that reuse is to serve; only for PERCENT.

    Raises:
      RolloutError: no such transition, or nobody is named.
    """
    _require_person(by, reason)
    if to not in FORWARD[state.stage]:
        allowed = " or ".join(stage.value for stage in FORWARD[state.stage])
        raise RolloutError(
            f"from {state.stage.value} a rollout does not go forward to {to.value}: "
            + (f"the next stage is {allowed}" if allowed else "there is no further stage")
        )
    share = _percent(to, percent)
    if to is state.stage and share <= state.percent:
        raise RolloutError(
            f"{share:g} percent is not more than {state.percent:g}: go back to it instead"
        )
    after = _changed(state, to, share, by=by, cause=None, reason=reason, now=now)
    return dataclasses.replace(after, rolled_back=False)


def back(
    state: RolloutState,
    to: RolloutStage,
    *,
    by: str,
    reason: str,
    now: float,
    percent: float | None = None,
) -> RolloutState:
    """Any number of stages back, which a person decides; arguments as of ``forward``.

    Raises:
      RolloutError: no such transition, or nobody is named.
    """
    _require_person(by, reason)
    share = _percent(to, percent)
    if to not in BACK[state.stage] or (to is state.stage and share >= state.percent):
        raise RolloutError(
            f"{_described(to, share)} is not back from {_described(state.stage, state.percent)}"
        )
    return _changed(state, to, share, by=by, cause=None, reason=reason, now=now)


def roll_back(
    state: RolloutState, cause: RollbackCause, *, reason: str, now: float, to: RolloutStage
) -> RolloutState:
    """Back by itself: to ``to`` where that is less than now, else to OFF; from OFF it stays.

    Args:
      state: before.
      cause: which threshold.
      reason: with numbers.
      now: seconds since 1970.
      to: OFF or SHADOW.
    """
    if state.stage is RolloutStage.OFF:
        return state
    if ORDER.index(to) >= ORDER.index(state.stage):
        to = RolloutStage.OFF
    after = _changed(state, to, 0.0, by=AUTOMATIC, cause=cause, reason=reason, now=now)
    return dataclasses.replace(after, rolled_back=True, rollbacks=state.rollbacks + 1)


def _changed(
    state: RolloutState,
    to: RolloutStage,
    percent: float,
    *,
    by: str,
    cause: RollbackCause | None,
    reason: str,
    now: float,
) -> RolloutState:
    change = Change(
        at=now, before=state.stage, after=to, percent=percent, by=by, cause=cause, reason=reason
    )
    return dataclasses.replace(
        state,
        stage=to,
        percent=percent,
        revision=state.revision + 1,
        history=(*state.history, change)[-LONGEST_HISTORY:],
    )


def _require_person(by: str, reason: str) -> None:
    if not by.strip() or by == AUTOMATIC:
        raise RolloutError("who decides this? give a person's name")
    if not reason.strip():
        raise RolloutError("why? give a reason")


def _percent(to: RolloutStage, percent: float | None) -> float:
    if to is not RolloutStage.PERCENT:
        if percent is not None:
            raise RolloutError(f"stage {to.value} takes no percentage")
        return 100.0 if to is RolloutStage.FULL else 0.0
    if percent is None or not 0 < percent < 100:
        given = "none" if percent is None else f"{percent:g}"
        raise RolloutError(f"stage percent needs a percentage above 0 and below 100, got {given}")
    return float(percent)


def _described(stage: RolloutStage, percent: float) -> str:
    return f"{stage.value} {percent:g}" if stage is RolloutStage.PERCENT else stage.value


# JSON.


def _change_to_json(change: Change) -> dict[str, Any]:
    return {
        "at": change.at,
        "before": change.before.value,
        "after": change.after.value,
        "percent": change.percent,
        "by": change.by,
        "cause": change.cause.value if change.cause else None,
        "reason": change.reason,
    }


def _change_from_json(read: Any) -> Change:
    if not isinstance(read, dict):
        raise RolloutError("its history holds something that is no change")
    cause = read.get("cause")
    return Change(
        at=_number(read, "at"),
        before=_choice(read, "before", RolloutStage),
        after=_choice(read, "after", RolloutStage),
        percent=_number(read, "percent"),
        by=_field(read, "by", str),
        cause=None if cause is None else _choice(read, "cause", RollbackCause),
        reason=_field(read, "reason", str),
    )


def _field(read: Mapping[str, Any], name: str, type_: type) -> Any:
    value = read.get(name)
    if type(value) is not type_:  # a bool is not a count here
        raise RolloutError(f"its {name} is {value!r}, no {type_.__name__}")
    return value


def _number(read: Mapping[str, Any], name: str) -> float:
    value: Any = read.get(name)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise RolloutError(f"its {name} is {value!r}, no number")
    return float(value)


def _choice(read: Mapping[str, Any], name: str, choices: type[enum.Enum]) -> Any:
    value = read.get(name)
    for choice in choices:
        if choice.value == value:
            return choice
    raise RolloutError(f"its {name} is {value!r}: no {choices.__name__}")
