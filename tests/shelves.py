"""A directory with published blocks and snapshots, without a device: bookkeeping only."""

import numpy as np

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import Form, Tier, kind_bits
from hybridkv.blocks.eviction import LeastRecentlyUsed
from hybridkv.blocks.pools import PoolSizes
from hybridkv.geometry import Geometry
from hybridkv.prefixes.directory import Directory
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds


class Shelf:
    """What a prompt's computation leaves behind, entered by hand."""

    def __init__(self, geometry: Geometry, *, blocks: int = 64, snapshots: int = 16) -> None:
        self.geometry = geometry
        self.now = 0.0
        self.allocator = Allocator(
            {Tier.DEVICE: PoolSizes(blocks=blocks, snapshots=snapshots)},
            policy=LeastRecentlyUsed(),
            clock=lambda: self.now,
            debug=True,
        )
        kinds = (*block_kinds(geometry), *snapshot_kinds(geometry))
        self.identity = Identity.of_geometry(geometry, weights="w", numerics="n")
        self.directory = Directory(
            self.allocator,
            self.identity,
            block_tokens=geometry.block_tokens,
            required_kinds=kind_bits(kinds),
        )

    def chain(self, ids: np.ndarray, namespace: str = "") -> TokenChain:
        chain = self.directory.chain(namespace)
        chain.extend(ids)
        return chain

    def store(self, ids: np.ndarray, *, snapshots: tuple[int, ...] = (), namespace: str = ""):
        """Publishes all complete blocks of ``ids``, and snapshots at the positions."""
        self.now += 1
        chain = self.chain(ids, namespace)
        reservation = self.allocator.reserve(blocks=chain.blocks, snapshots=len(snapshots))
        receipt = self.allocator.take(reservation, Form.BLOCK, chain.blocks)
        self.allocator.commit(receipt.entries, kind_bits(block_kinds(self.geometry)))
        self.directory.publish(chain, 0, receipt.entries)
        for position in snapshots:
            one = self.allocator.take(reservation, Form.SNAPSHOT, 1)
            self.allocator.commit(one.entries, kind_bits(snapshot_kinds(self.geometry)))
            self.directory.publish_snapshot(chain, position, int(one.entries[0]))
            self.allocator.release(one)
        self.allocator.cancel(reservation)
        self.allocator.release(receipt)
        return chain
