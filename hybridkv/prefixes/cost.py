"""What a plan costs: bytes over bandwidth, tiles times tile time, and the queue."""

import dataclasses
from collections.abc import Mapping

from hybridkv.arithmetic import cdiv
from hybridkv.blocks.entries import Tier


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Measured on the engine's own device; the defaults only rank plans by computed tiles."""

    tile_seconds: float = 1.0
    """One tile step."""
    bytes_per_second: Mapping[Tier, float] = dataclasses.field(default_factory=dict)
    """Bandwidth of moving a tier's bytes to their place on the device; a tier that is not named
    moves for free."""
    queue_seconds: float = 0.0
    """Wait before a load begins."""

    def compute(self, *, start: int, tokens: int, tile: int) -> float:
        """Seconds for the tiles from ``start`` (a tile boundary) to the end of the prompt."""
        return cdiv(tokens - start, tile) * self.tile_seconds

    def copy(self, tier: Tier, size: int) -> float:
        """Seconds for ``size`` bytes of a tier, once their turn has come."""
        rate = self.bytes_per_second.get(tier)
        return size / rate if rate else 0.0

    def move(self, tier: Tier, size: int) -> float:
        """Seconds for ``size`` bytes of a tier, with the wait for their turn."""
        queue = 0.0 if tier is Tier.DEVICE else self.queue_seconds
        return queue + self.copy(tier, size)


BY_TILES = CostModel()
"""Ranks plans by the tiles they compute."""
