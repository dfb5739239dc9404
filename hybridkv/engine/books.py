"""The bookkeeping of a runner, new and empty."""

from collections.abc import Callable

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import Tier, kind_bits
from hybridkv.blocks.pools import PoolSizes
from hybridkv.engine import calibration
from hybridkv.engine.options import RunnerOptions
from hybridkv.geometry import Geometry
from hybridkv.prefixes.directory import Directory
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds
from hybridkv.prefixes.plan import PlanOptions


def empty_books(
    geometry: Geometry,
    sizes: RunnerOptions,
    plans: PlanOptions,
    identity: Identity,
    *,
    clock: Callable[[], float],
) -> tuple[Allocator, Directory]:
    """An allocator of all tiers in which nothing is used, and a directory of it.

    Args:
      geometry: of the model.
      sizes: of the pools of all tiers, and how they evict.
      plans: their tile and cost, which say what goes first where ``sizes`` does not.
      identity: of what is published.
      clock: seconds, for eviction; never goes back.
    """
    pools = {Tier.DEVICE: PoolSizes(blocks=sizes.capacity.blocks, snapshots=sizes.snapshots)}
    if sizes.tiers is not None:
        pools |= {Tier.HOST: sizes.tiers.host, Tier.DISK: sizes.tiers.disk}
    allocator = Allocator(
        pools,
        policy=sizes.eviction or calibration.eviction(geometry, plans.tile, plans.cost),
        clock=clock,
        debug=sizes.debug,
    )
    directory = Directory(
        allocator,
        identity,
        block_tokens=geometry.block_tokens,
        required_kinds=kind_bits((*block_kinds(geometry), *snapshot_kinds(geometry))),
    )
    return allocator, directory
