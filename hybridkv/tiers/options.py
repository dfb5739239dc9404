"""What is kept beside the device, and where."""

import dataclasses
import os
from typing import Any

from hybridkv.arithmetic import cdiv
from hybridkv.blocks.pools import PoolSizes
from hybridkv.errors import UserError
from hybridkv.geometry import Geometry
from hybridkv.tiers.faults import NO_FAULTS, Faults

NOTHING = PoolSizes(blocks=0, snapshots=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierOptions:
    """Sizes and limits of the host and disk tiers. None of them changes a logit.

    Raises:
      UserError: a value is out of its range, or a disk tier has no path or no places.
    """

    host: PoolSizes = NOTHING
    """Places in pinned host memory; a block costs ``geometry.block_bytes`` there."""
    disk: PoolSizes = NOTHING
    """Places in the store; what it holds beyond them is left alone."""
    path: str | os.PathLike[str] | None = None
    """Folder of the store; made where there is none."""
    writable: bool = True
    """Off: this process only reads the store, beside another one that writes it."""
    require_store: bool = False
    """Raise where the store can't be used when it is opened; otherwise this goes on without a disk
    tier, and ``Mover.unusable`` and the log say why."""
    disk_bytes: int | None = None
    """Bytes of all files of the store; None for no limit but ``disk``."""
    compact_share: float = 0.25
    """Segments of which most was removed are written anew when what is dead in them is more than
    this share of the store; 1 leaves it to ``scripts/prefix_store.py prune``."""
    digests: bool = True
    """Verify every kind's digest of what comes back before it is published."""
    staged: int = 4
    """Moves of blocks that one load may have on the device before they are written to the cache."""
    moves_a_turn: int = 4
    """Moves of blocks that a turn writes to the cache at most."""
    decode_share: float = 0.025
    """Share of the decode steps' time that writes may take: how much loads may slow the batch,
    beside what their workers take from it where it runs on the same cores."""
    queue: int = 256
    """Prefixes that wait to be stored; the oldest goes when there are more."""
    prefetch_bytes: int = 64 << 20
    """Host memory for segments that are read before their request is admitted."""
    faults: Faults = NO_FAULTS
    """Injection points, for tests."""

    @classmethod
    def for_tokens(
        cls,
        geometry: Geometry,
        *,
        host: int = 0,
        disk: int = 0,
        tokens_per_snapshot: int = 1024,
        **others: Any,
    ) -> "TierOptions":
        """Room for so many tokens on each tier, and for a snapshot every ``tokens_per_snapshot``.

        Raises:
          UserError: as the class; or a number is not positive.
        """
        if min(host, disk) < 0 or tokens_per_snapshot < 1:
            raise UserError(f"host={host}, disk={disk} and {tokens_per_snapshot=} can't be meant")

        def sizes(tokens: int) -> PoolSizes:
            return PoolSizes(
                blocks=cdiv(tokens, geometry.block_tokens),
                snapshots=cdiv(tokens, tokens_per_snapshot),
            )

        return cls(host=sizes(host), disk=sizes(disk), **others)

    def __post_init__(self) -> None:
        if min(self.staged, self.moves_a_turn, self.queue) < 1 or self.prefetch_bytes < 0:
            raise UserError(f"staged, moves_a_turn and queue must be at least 1, got {self}")
        if not self.decode_share > 0:
            raise UserError(f"decode_share is a share of a step's time, got {self.decode_share}")
        if not 0 < self.compact_share <= 1:
            raise UserError(f"compact_share is a share of the store, got {self.compact_share}")
        if (self.path is None) != (self.disk.blocks == 0):
            raise UserError("a disk tier has both a path and places: give path= and disk=")
