"""Where snapshots are written, as values."""

import dataclasses

from hybridkv.arithmetic import round_down


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
        wanted = set()
        if self.ends:
            wanted |= {round_down(tokens, tile), round_down(tokens - 1, tile)}
        if self.forks:
            wanted.add(round_down(shared, tile))
        if self.every:
            wanted |= set(range(self.every * tile, tokens + 1, self.every * tile))
        return tuple(sorted(p for p in wanted if p > start and p >= exact_from))


DEFAULT = SnapshotPolicy()
"""Ends and forks: few bytes, and the third of several prompts that share a beginning hits it."""
DENSE = SnapshotPolicy(every=1)
"""Every tile: the second of them hits too, at a snapshot a tile."""
ENDS = SnapshotPolicy(forks=False)
"""Conversations that only grow."""
NEVER = SnapshotPolicy(ends=False, forks=False)
"""No snapshots: every hit replays."""
