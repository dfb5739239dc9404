"""When a rollout goes back by itself: thresholds over windows of what was just seen.

    shadow runs --equal?--------------> mismatches in the last ``window`` comparisons
    engines     --raised?-------------> faults since the last change of stage
    served requests --seconds---------> p99 of reuse against p99 of the safe path
    plans of the reuse path --losses--> lost tokens of a cause / ideal tokens

Memory is fixed: two windows of counts and four of seconds, ``window`` long.
"""

import dataclasses
import enum
import types
from collections.abc import Mapping

from hybridkv.errors import UserError
from hybridkv.observe.rollout import RollbackCause
from hybridkv.observe.windows import RecentSums, RecentValues
from hybridkv.prefixes.losses import Cause
from hybridkv.prefixes.plan import Miss, Plan

P99 = 0.99
RESTORABLE = (
    Cause.EVICTED,
    Cause.LAYOUT,
    Cause.NUMERICS,
    Cause.NO_SNAPSHOT,
    Cause.LOAD_TOO_SLOW,
)
"""Causes of which one may expect that they could be spared: what was published and could not be
restored. Not ALIGNMENT and NEVER_PUBLISHED, which traffic decides, nor POLICY, a choice."""
_LOOKED_AT_EVERY = 32
"""New seconds between two looks at percentiles, which cost a partition of the window."""


class Side(enum.Enum):
    """Which path served."""

    REUSE = "reuse"
    SAFE = "safe"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thresholds:
    """What is too much. None switches one off.

    Raises:
      UserError: a value is out of its range.
    """

    window: int = 1000
    """Values that each window remembers: 8 bytes each for seconds, 72 for misses."""
    mismatches: int = 1
    """So many unequal comparisons in the window roll back."""
    faults: int | None = 1
    """So many times that the reuse path's engine raised, since the last change of stage, roll back.
    No comparison says that its bits are wrong, and none says that they are right."""
    cold_faults: int | None = None
    """The same of the engine of cold runs. Off by default: its fault says nothing of reuse, and
    where it is the safe path too, a rollback would send all requests to the engine that raised."""
    first_token_factor: float | None = 2.0
    """p99 of seconds to the first token, of reuse over the safe path."""
    between_tokens_factor: float | None = 1.5
    """p99 of seconds between two tokens, of reuse over the safe path."""
    slack_s: float = 0.005
    """Seconds that reuse may be slower beyond the factor, so that nothing is decided by noise."""
    first_token_s: float | None = None
    """p99 of seconds to the first token of reuse, whatever the safe path takes."""
    between_tokens_s: float | None = None
    """The same between two tokens."""
    least_seconds: int = 200
    """Values of each side before percentiles count; at least 100, of which p99 leaves one out."""
    misses: Mapping[Cause, float] = dataclasses.field(
        default_factory=lambda: types.MappingProxyType({Cause.LAYOUT: 0.01, Cause.NUMERICS: 0.01})
    )
    """Tokens lost to a cause over ideal tokens. By default only what should never happen: stored
    bytes that this process cannot read."""
    miss_share: float | None = None
    """Tokens lost to all of ``RESTORABLE`` together over ideal tokens."""
    least_prompts: int = 100
    """Prompts with an ideal hit before misses count."""

    def __post_init__(self) -> None:
        least = {"window": 100, "mismatches": 1, "least_seconds": 100, "least_prompts": 1}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise UserError(f"{name} is {getattr(self, name)}: give at least {bound}")
        for name in ("faults", "cold_faults"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise UserError(f"{name} is {count}: give at least 1, or None")
        for name in ("least_seconds", "least_prompts", "mismatches"):
            if getattr(self, name) > self.window:
                raise UserError(f"{name} is more than the window of {self.window} holds")
        factors = (self.first_token_factor, self.between_tokens_factor)
        limits = (self.first_token_s, self.between_tokens_s, self.miss_share, *self.misses.values())
        if any(x is not None and not x >= 1 for x in factors):
            raise UserError("a factor below 1 rolls back what is no slower: give 1 or more")
        if any(x is not None and not x > 0 for x in limits) or not self.slack_s >= 0:
            raise UserError("a limit of 0 or less rolls back everything: give more, or None")


@dataclasses.dataclass(kw_only=True)
class _Seconds:
    """One measure, of both sides."""

    cause: RollbackCause
    name: str
    windows: Mapping[Side, RecentValues]
    factor: float | None
    limit: float | None
    looked_at: int = 0

    def verdict(self, thresholds: Thresholds) -> str | None:
        """Why it is too much."""
        reuse, safe = self.windows[Side.REUSE], self.windows[Side.SAFE]
        if reuse.noted - self.looked_at < _LOOKED_AT_EVERY or len(reuse) < thresholds.least_seconds:
            return None
        self.looked_at = reuse.noted
        p99 = reuse.percentile(P99)
        of = f"p99 of seconds {self.name} is {p99:.4g} in {len(reuse)} of reuse"
        if self.limit is not None and p99 > self.limit:
            return f"{of}, more than {self.limit:g}"
        if self.factor is None or len(safe) < thresholds.least_seconds:
            return None
        baseline = safe.percentile(P99)
        if p99 <= self.factor * baseline + thresholds.slack_s:
            return None
        return (
            f"{of}, more than {self.factor:g} times {baseline:.4g} in {len(safe)} of the safe path"
        )


class Judge:
    """Remembers what was seen of late, and says when it is too much. Called by one thread."""

    def __init__(self, thresholds: Thresholds) -> None:
        self.thresholds, size = thresholds, thresholds.window
        self._compared = RecentSums(size, 1)
        self._misses = RecentSums(size, 1 + len(Cause))
        self._faults, self._last_fault = dict.fromkeys(Side, 0), ""

        def windows() -> dict[Side, RecentValues]:
            return {side: RecentValues(size) for side in Side}

        self._first = _Seconds(
            cause=RollbackCause.FIRST_TOKEN,
            name="to the first token",
            windows=windows(),
            factor=thresholds.first_token_factor,
            limit=thresholds.first_token_s,
        )
        self._between = _Seconds(
            cause=RollbackCause.BETWEEN_TOKENS,
            name="between tokens",
            windows=windows(),
            factor=thresholds.between_tokens_factor,
            limit=thresholds.between_tokens_s,
        )

    def note_first(self, side: Side, seconds: float) -> None:
        """A served request got its first token."""
        self._first.windows[side].note(seconds)

    def note_between(self, side: Side, seconds: float) -> None:
        """A served request got another token, so long after the one before."""
        self._between.windows[side].note(seconds)

    def note_plan(self, plan: Plan | Miss | None) -> None:
        """A prompt began on the reuse path. Only those with an ideal hit count."""
        if plan is None or not plan.ideal:
            return
        lost = dict.fromkeys(Cause, 0)
        for loss in plan.losses:
            lost[loss.cause] += loss.tokens
        self._misses.note((plan.ideal, *lost.values()))

    def note_comparison(self, equal: bool) -> None:
        """A shadow run and a cold run ended."""
        self._compared.note((int(not equal),))

    def note_fault(self, side: Side, why: str) -> None:
        """An engine raised: that of the reuse path, or of cold runs."""
        self._faults[side] += 1
        self._last_fault = why

    def verdict(self) -> tuple[RollbackCause, str] | None:
        """The threshold that is passed now and why, or None."""
        mismatches, limit = int(self._compared.sums[0]), self.thresholds.mismatches
        if mismatches >= limit:
            said = f"{mismatches} of the last {len(self._compared)} comparisons are unequal"
            return RollbackCause.MISMATCH, said
        why = self._too_many_faults()
        if why is not None:
            return RollbackCause.FAULT, why
        for seconds in (self._first, self._between):
            why = seconds.verdict(self.thresholds)
            if why is not None:
                return seconds.cause, why
        why = self._too_many_misses()
        return (RollbackCause.MISSES, why) if why is not None else None

    def _too_many_faults(self) -> str | None:
        limits = (
            (Side.REUSE, self.thresholds.faults, "the engine of the reuse path"),
            (Side.SAFE, self.thresholds.cold_faults, "the engine of cold runs"),
        )
        for side, most, which in limits:
            if most is not None and self._faults[side] >= most:
                return f"{which} raised {self._faults[side]} times, {self._last_fault} the last"
        return None

    def _too_many_misses(self) -> str | None:
        if len(self._misses) < self.thresholds.least_prompts:
            return None
        shares = self.miss_shares()
        for cause, limit in self.thresholds.misses.items():
            if shares[cause] > limit:
                return f"{shares[cause]:.1%} of ideal tokens are lost to {cause.value}"
        total, most = sum(shares[cause] for cause in RESTORABLE), self.thresholds.miss_share
        if most is not None and total > most:
            parts = ", ".join(f"{c.value} {shares[c]:.1%}" for c in RESTORABLE if shares[c])
            return f"{total:.1%} of ideal tokens could not be restored: {parts}"
        return None

    def miss_shares(self) -> dict[Cause, float]:
        """Tokens lost to each cause / ideal tokens, in the window; 0 where nothing was ideal."""
        ideal, *lost = self._misses.sums.tolist()
        return {c: n / ideal if ideal else 0.0 for c, n in zip(Cause, lost, strict=True)}

    def p99(self) -> dict[tuple[RollbackCause, Side], float]:
        """Seconds by measure and side, in the window; 0 where there are none."""
        return {
            (each.cause, side): window.percentile(P99)
            for each in (self._first, self._between)
            for side, window in each.windows.items()
        }

    def clear(self) -> None:
        """After a change of stage: only what the safe path takes is remembered."""
        self._faults = dict.fromkeys(Side, 0)
        self._compared.clear()
        self._misses.clear()
        for each in (self._first, self._between):
            each.windows[Side.REUSE].clear()
            each.looked_at = 0
