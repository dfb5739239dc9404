"""Places of each tier: from bytes of the hardware, or from tokens and snapshots that are asked for.

A slower tier also holds what a faster one has, so that the last tier in use says how many different
blocks there can be: those are "the blocks on all tiers together". A tier is in use when all faster
ones together are too small.
"""

import dataclasses
import enum
from collections.abc import Mapping

from hybridkv.blocks.entries import Tier
from hybridkv.blocks.pools import PoolSizes
from hybridkv.errors import UserError
from hybridkv.replay.costs import Server
from hybridkv.replay.trace import BLOCK, Trace


class Limit(enum.Enum):
    """What bounds the cache where no number of tokens does."""

    HARDWARE = "hardware"
    """What fits the tiers."""
    NONE = "unlimited"
    """Nothing: as large as the trace."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """How much is kept."""

    tokens: int | Limit = Limit.HARDWARE
    """In blocks of all tiers together."""
    snapshots: int | None = None
    """On all tiers together; None for as many as fit."""
    tokens_per_snapshot: int = 8192
    """How a tier's bytes are split: so many tokens of blocks for each snapshot."""

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Limit) and self.tokens < BLOCK:
            raise UserError(f"a capacity of {self.tokens} tokens: give a block of {BLOCK} or more")
        if self.snapshots is not None and self.snapshots < 0:
            raise UserError(f"{self.snapshots} snapshots: give 0 or more")
        if self.tokens_per_snapshot < BLOCK:
            raise UserError(
                f"a snapshot each {self.tokens_per_snapshot} tokens: give {BLOCK} or more"
            )


def places(server: Server, budget: Budget, trace: Trace) -> Mapping[Tier, PoolSizes]:
    """Places of the tiers in use, the device first."""
    most, scheme = max(trace.distinct, 1), server.scheme
    per_block = BLOCK / budget.tokens_per_snapshot if scheme.has_snapshots else 0.0
    fit = {
        tier: int(room / (scheme.block_bytes + per_block * scheme.snapshot_bytes))
        for tier, room in server.room.items()
    }
    if isinstance(budget.tokens, Limit):
        total = min(max(fit.values()), most) if budget.tokens is Limit.HARDWARE else most
    else:
        total = min(budget.tokens // BLOCK, most)
    in_use = _in_use(fit, max(total, 1))
    last = next(reversed(in_use))
    pools = {}
    for tier, blocks in in_use.items():
        # Where tokens were asked for, blocks alone are counted; their bytes are reported.
        free = tier is last and budget.tokens is not Limit.HARDWARE
        states = blocks if free else max(int(blocks * per_block), min(blocks, 1))
        if budget.snapshots is not None:
            states = budget.snapshots if tier is last else min(states, budget.snapshots)
        pools[tier] = PoolSizes(blocks=blocks, snapshots=states if scheme.has_snapshots else 0)
    return pools


def _in_use(fit: Mapping[Tier, int], total: int) -> dict[Tier, int]:
    """Blocks of each tier in use, such that the last one has ``total``."""
    tiers = [tier for tier in Tier if fit[tier]]
    if not tiers or tiers[0] is not Tier.DEVICE:
        raise UserError("not one block fits the devices beside the weights")
    chosen: dict[Tier, int] = {}
    for tier in tiers:
        if tier is Tier.DEVICE or fit[tier] > max(chosen.values()):
            chosen[tier] = min(fit[tier], total)
        if fit[tier] >= total:
            return chosen
    # More than the hardware has: the slowest tier is taken to be larger than it is.
    slowest = next(reversed(chosen))
    if slowest is Tier.DEVICE:
        slowest = tiers[-1]
    chosen[slowest] = total
    return chosen
