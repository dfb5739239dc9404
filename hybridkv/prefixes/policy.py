"""Where snapshots are written and which may go again, as values.

    full        | . . . . . . . . . . . . . . . . |   every tile
    periodic    |         .         .         .   |   every p tokens
    geometric   |       .               .     . . |   gaps grow with the distance from the end
    default     |             .                 . |   ends, and where prompts were seen to part
    thinned     |   the same, without the ends that longer prompts have passed
    none        |                                 |   every hit replays
    0                                        tokens

Pure functions of numbers: nothing here is owned or locked, and any thread may call it. A policy
never decides what may be reused (``plan_prefix`` does), only what a hit costs and what is stored.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from hybridkv.arithmetic import round_down, round_up
from hybridkv.errors import UserError


class PolicyError(UserError):
    """A policy that cannot be meant."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotPolicy:
    """Which tile boundaries of a prompt get a snapshot, of those its computation passes."""

    ends: bool = True
    """The last boundary of the prompt, for whatever goes on from it, and where the prompt itself
    ends there also the one before, for an exact repetition, which must compute a token."""
    forks: bool = True
    """The boundary to which blocks were found without a snapshot: two prompts part near it, and a
    third is likely to."""
    every: int = 0
    """Every so many tiles; 0 for none. Each costs ``snapshot_bytes`` and nothing else."""
    period: int = 0
    """Every so many tokens, counted from the first and rounded up to tiles; 0 for none."""
    share: float = 0.0
    """With gaps that grow with the distance from the end, so that a prompt that leaves this one
    at a tile boundary recomputes at most ``share`` times the tokens of this one behind that point;
    0 for none. Costs about ``log(tokens / tile) / log(1 + share)`` snapshots a prompt."""
    thin: float = 0.0
    """Snapshots that this share can spare go again when a longer prompt has been computed, see
    ``superseded``; 0 keeps all."""

    def __post_init__(self) -> None:
        for name in ("every", "period", "share", "thin"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise PolicyError(f"{name} of a snapshot policy is {value}: give 0 or more")

    @classmethod
    def periodic(cls, tokens: int) -> "SnapshotPolicy":
        """A snapshot every so many tokens and nowhere else.

        Raises:
          PolicyError: ``tokens`` is less than 1.
        """
        if tokens < 1:
            raise PolicyError(f"a period of {tokens} tokens: give at least 1")
        return cls(ends=False, forks=False, period=tokens)

    @classmethod
    def geometric(cls, share: float) -> "SnapshotPolicy":
        """The bound of ``share``, kept while a conversation grows by dropping what it can spare.

        Ends and forks are written too: without them the bound breaks where a prompt was replayed.

        Raises:
          PolicyError: ``share`` is not above 0.
        """
        if not share > 0:
            raise PolicyError(f"a share of {share}: give a number above 0")
        return cls(share=share, thin=share)

    def positions(
        self, *, tokens: int, start: int, exact_from: int, shared: int, tile: int
    ) -> tuple[int, ...]:
        """Positions to write, ascending, of a prompt computed from ``start``.

        Args:
          tokens: length of the prompt.
          start: first computed position.
          exact_from: first position at which its state is exact: the end of a replay.
          shared: position up to which its blocks were found.
          tile: tokens of a tile.
        """
        wanted = self._known(tokens, shared, tile)
        for interval in (self.every * tile, round_up(self.period, tile)):
            if interval:
                wanted |= set(range(interval, tokens + 1, interval))
        if self.share:
            wanted |= set(_geometric(tokens, self.share, tile))
        return tuple(sorted(p for p in wanted if p > start and p >= exact_from))

    def _known(self, tokens: int, shared: int, tile: int) -> set[int]:
        """Positions at which a prompt is known to end or to part from another."""
        known = set()
        if self.ends:
            known |= {round_down(tokens, tile), round_down(tokens - 1, tile)}
        if self.forks:
            known.add(round_down(shared, tile))
        return known

    def guesses(
        self, positions: Iterable[int], *, tokens: int, shared: int, tile: int
    ) -> tuple[int, ...]:
        """Of ``positions``, those at which nothing is known to end or part: the first to go.

        A tier whose snapshots have a budget gives these up before any other that was not hit.
        """
        known = self._known(tokens, shared, tile)
        return tuple(p for p in positions if p not in known)

    def superseded(self, positions: Sequence[int], *, tokens: int, tile: int) -> tuple[int, ...]:
        """Snapshots that may go, now that a prompt of ``tokens`` tokens has been computed.

        What stays keeps the bound of ``thin`` for a prompt that leaves this one at any tile
        boundary, wherever ``positions`` kept it; the last one always stays. Where it shares a
        beginning with others, that holds for the longest of them.

        Args:
          positions: ascending boundaries of this prompt that have a snapshot; not those at which
            another prompt went on differently, which belong to that one too.
          tokens: length of the prompt.
          tile: tokens of a tile.
        """
        if not self.thin or not positions:
            return ()
        kept = {positions[-1]}
        at = len(positions) - 1
        while at and (lowest := _next_below(positions[at], tokens, self.thin, tile)) > 0:
            below = at - 1
            while below and positions[below - 1] >= lowest:
                below -= 1
            kept.add(positions[below])
            at = below
        return tuple(p for p in positions if p not in kept)


def _next_below(position: int, tokens: int, share: float, tile: int) -> int:
    """The lowest boundary that may be the next snapshot before ``position``; 0 or less for none.

    A fork in between costs most at the boundary just before ``position``: it recomputes all tokens
    of the gap but one tile's, and has one tile more behind it than ``position`` has.
    """
    farthest = position - tile
    return farthest - round_down(int(min(share * (tokens - farthest), tokens)), tile)


def _geometric(tokens: int, share: float, tile: int) -> list[int]:
    """Boundaries from the end down, each as far below the last as ``share`` allows."""
    positions, at = [], round_down(tokens, tile)
    while at > 0:
        positions.append(at)
        at = _next_below(at, tokens, share, tile)
    return positions


DEFAULT = SnapshotPolicy()
"""Ends and forks: few bytes, and the third of several prompts that share a beginning hits it."""
DENSE = SnapshotPolicy(every=1)
"""Every tile: the second of them hits too, at a snapshot a tile."""
ENDS = SnapshotPolicy(forks=False)
"""Conversations that only grow."""
NEVER = SnapshotPolicy(ends=False, forks=False)
"""No snapshots: every hit replays."""
PERIODIC = SnapshotPolicy.periodic(16384)
"""The interval that is usual where windows are kept on disk."""
GEOMETRIC = SnapshotPolicy.geometric(1.0)
"""A first fork recomputes at most as many tokens as the earlier prompt had behind it."""
THINNED = SnapshotPolicy(thin=1.0)
"""``DEFAULT``, and of a growing conversation's ends only those that keep the bound of 1."""
POLICIES: Mapping[str, SnapshotPolicy] = {
    "full": DENSE,
    "periodic": PERIODIC,
    "geometric": GEOMETRIC,
    "default": DEFAULT,
    "thinned": THINNED,
    "ends": ENDS,
    "none": NEVER,
}
"""By the names that command lines use."""
