"""Making what a sequence computed visible to others: blocks first, then the snapshots on them."""

import numpy as np

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import Tier, kind_bits
from hybridkv.blocks.transitions import TierState
from hybridkv.engine.generated import GeneratedBlocks
from hybridkv.engine.sequence import Sequence
from hybridkv.geometry import Geometry
from hybridkv.prefixes.directory import Directory
from hybridkv.prefixes.losses import Cause
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds


class Publisher:
    """Publishes for one runner.

    Device order makes the bytes final: whoever reads them is dispatched later. Blocks that another
    sequence published meanwhile stay private to the one that made them again.
    """

    def __init__(self, allocator: Allocator, directory: Directory, geometry: Geometry) -> None:
        self.generated = GeneratedBlocks(allocator, geometry.block_tokens)
        self._allocator, self._directory = allocator, directory
        self._block = geometry.block_tokens
        self._block_kinds = kind_bits(block_kinds(geometry))
        self._snapshot_kinds = kind_bits(snapshot_kinds(geometry))

    def prompt(self, sequence: Sequence, *, tile: int) -> None:
        """Every complete block of the prompt so far."""
        computed = min(sequence.computed, sequence.prompt_tokens)
        whole, new = self._blocks(sequence, computed)
        if not sequence.exact:
            self.generated.mark_inexact(whole[new])
        if sequence.generated_from is not None:
            new[: self._own_before(sequence, sequence.generated_from)] = False
            self.generated.published(whole[new])
        self._snapshots(sequence)
        if sequence.policy.thin and not sequence.tokens_left:
            self._thin(sequence, tile)

    def as_decoded(self, sequence: Sequence) -> None:
        """Complete blocks of generated tokens too, marked as not those of a cold run."""
        sequence.chain.extend(np.asarray(sequence.generated, np.int64))
        whole, new = self._blocks(sequence, sequence.computed)
        if not sequence.exact:  # one that was parked may publish its prompt only now
            self.generated.mark_inexact(whole[new])
        new[: self._own_before(sequence, sequence.prompt_tokens)] = False
        self.generated.mark_inexact(whole[new])
        self.generated.published(whole[new])
        self._snapshots(sequence)

    def _thin(self, sequence: Sequence, tile: int) -> None:
        """Withdraws snapshots that the sequence's policy can spare, now that it is computed.

        Those at which another prompt goes on differently stay, and so do leased ones.
        """
        columns = self._allocator.entries
        run = self._directory.find(sequence.chain).entries
        snapshots = self._directory.snapshot_at(run)
        spare = (snapshots >= 0) & (columns.children[run] < 2)
        spare &= columns.leases[np.maximum(snapshots, 0)] == 0
        snapshots = snapshots[spare]
        positions = columns.position[snapshots].tolist()
        gone = set(
            sequence.policy.superseded(positions, tokens=sequence.prompt_tokens, tile=tile)
        ) - set(sequence.forks)
        going = np.isin(positions, list(gone))
        if going.any():
            self._directory.withdraw(snapshots[going], Cause.POLICY.value)

    def _own_before(self, sequence: Sequence, position: int) -> int:
        """Own blocks that end at or before a position."""
        return max(position // self._block - len(sequence.shared.entries), 0)

    def _blocks(self, sequence: Sequence, computed: int) -> tuple[np.ndarray, np.ndarray]:
        """The sequence's own complete blocks, and which of them became visible just now."""
        shared, done = len(sequence.shared.entries), computed // self._block
        whole = sequence.own.entries[: max(done - shared, 0)]
        columns = self._allocator.entries
        filling = columns.state[Tier.DEVICE, whole] == TierState.FILLING
        self._allocator.commit(whole[filling], self._block_kinds)
        before = columns.published[whole]
        if len(self._directory.find(sequence.chain).entries) >= shared:
            self._directory.publish(sequence.chain, shared, whole)
        return whole, columns.published[whole] & ~before

    def _snapshots(self, sequence: Sequence) -> None:
        shown = len(self._directory.find(sequence.chain).entries) * self._block
        for position, receipt in sequence.stored:
            self._allocator.commit(receipt.entries, self._snapshot_kinds)
            if position <= shown:  # past a collision, or behind what was withdrawn, is nothing
                entry = int(receipt.entries[0])
                stands = self._directory.publish_snapshot(sequence.chain, position, entry)
                # The blocks under it may be those of a tile step; the state is not.
                if stands and (position > sequence.prompt_tokens or not sequence.exact):
                    self.generated.mark_inexact(receipt.entries)
            self._allocator.release(receipt)
        sequence.stored = []
