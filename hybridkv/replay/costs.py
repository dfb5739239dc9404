"""Seconds and bytes of the modelled server: from numbers of the catalog, by arithmetic alone.

    tile step      max(operations / rate, weights / bandwidth) + context bytes / bandwidth
    decode step    (weights of the experts that are hit + context bytes of all slots) / bandwidth
    both           and a fixed time more
    a move         bytes / bandwidth of the tier

Operations of a token are twice the active parameters, and those of attention and indexing over its
context. The generic scheme reads every raw row of the context in each step; compressing them again
is taken to be free, which flatters it.
"""

import dataclasses
import functools

import numpy as np
from jaxtyping import Float64, Int32

from hybridkv.arithmetic import cdiv
from hybridkv.blocks.entries import Entries, Tier
from hybridkv.blocks.eviction import EvictionPolicy, LeastRecentlyUsed, SecondsPerByte
from hybridkv.blocks.transitions import TierState
from hybridkv.errors import UserError
from hybridkv.prefixes.cost import CostModel
from hybridkv.replay.catalog import HardwareData, ModelData
from hybridkv.replay.schemes import Scheme, SchemeName, state_bytes

SLOWER = (Tier.HOST, Tier.DISK)
_PRESENT = TierState.PRESENT


class _BlocksOnly(SecondsPerByte):
    """The same values where there are no snapshots and nobody counts picks, in fewer steps."""

    def value(
        self, entries: Entries, ids: Int32[np.ndarray, " n"], now: float
    ) -> Float64[np.ndarray, " n"]:
        """See ``SecondsPerByte.value``."""
        del now
        each: float | np.ndarray = self.block_seconds / self.block_bytes
        slower = [entries.state[tier].take(ids) == _PRESENT for tier in SLOWER if tier > self.tier]
        if slower:
            each = np.where(np.logical_or.reduce(slower), self.copied_share * each, each)
        uses = entries.hits.take(ids).astype(np.float64)
        return entries.floor.take(ids) + (1.0 + np.log2(1.0 + uses)) * each


def value_policy(scheme: Scheme) -> type[SecondsPerByte]:
    """What values entries of a scheme."""
    return SecondsPerByte if scheme.has_snapshots else _BlocksOnly


@dataclasses.dataclass(frozen=True, kw_only=True)
class Server:
    """One model on one server under one scheme."""

    model: ModelData
    hardware: HardwareData
    scheme: Scheme
    tile: int
    """Tokens of a tile step."""

    # What a step costs.

    @functools.cached_property
    def flops(self) -> float:
        """Operations a second of all chips, as far as they are reached."""
        return self.hardware.chips * self.hardware.flops * self.hardware.compute_efficiency

    @functools.cached_property
    def bandwidth(self) -> float:
        """Bytes a second of all chips' memory, as far as they are reached."""
        rate = self.hardware.chips * self.hardware.hbm_bytes_per_second
        return rate * self.hardware.memory_efficiency

    @functools.cached_property
    def token_operations(self) -> float:
        """Of one token, without what grows with the context."""
        model, width = self.model, self.model.head_width
        rows = sum(
            layer.window + (model.picks if layer.indexed else 0) for layer in model.geometry.layers
        )
        return 2 * model.active_parameters + 4 * model.heads * width * rows

    @functools.cached_property
    def context_operations(self) -> float:
        """Of one token for each token before it: index scores, and attention to all rows."""
        model, geometry = self.model, self.model.geometry
        total = 0.0
        for layer in geometry.layers:
            if layer.ratio and layer.indexed:
                total += 2 * model.index_heads * geometry.index_width / layer.ratio
            elif layer.ratio:
                total += 4 * model.heads * model.head_width / layer.ratio
        return total

    @functools.cached_property
    def context_bytes(self) -> float:
        """Bytes that a step reads for each token of a sequence's context."""
        if self.scheme.name is SchemeName.GENERIC:
            return self.scheme.block_bytes / self.scheme.geometry.block_tokens
        geometry, total = self.model.geometry, 0.0
        for layer in geometry.layers:
            if layer.ratio and layer.indexed:
                total += geometry.index_row_bytes / layer.ratio
            elif layer.ratio:
                total += geometry.row_bytes / layer.ratio
        return total

    @functools.cached_property
    def sequence_read_bytes(self) -> float:
        """Bytes that a step reads of a sequence whatever its context: windows and picked rows."""
        if self.scheme.name is SchemeName.GENERIC:
            return 0.0
        geometry = self.model.geometry
        rows = sum(self.model.picks for layer in geometry.layers if layer.indexed)
        return rows * geometry.row_bytes + sum(
            layer.window * geometry.window_row_bytes for layer in geometry.layers
        )

    def weights_read(self, tokens: float) -> float:
        """Bytes of weights that a step of so many tokens reads; experts are picked evenly."""
        model = self.model
        rest = model.weight_bytes - model.expert_bytes
        if not model.experts:
            return rest
        missed = (1 - model.active_experts / model.experts) ** tokens
        return rest + model.expert_bytes * (1 - missed)

    @functools.cached_property
    def tile_first(self) -> float:
        """Seconds of a tile step at the beginning of a prompt."""
        compute = self.tile * self.token_operations / self.flops
        weights = self.weights_read(self.tile) / self.bandwidth
        return max(compute, weights) + self.hardware.step_seconds

    @functools.cached_property
    def tile_slope(self) -> float:
        """Seconds more of a tile step for each token before it."""
        return (
            self.tile * self.context_operations / self.flops + self.context_bytes / self.bandwidth
        )

    def tiles_seconds(self, start: float, count: float) -> float:
        """Seconds of ``count`` tile steps on end, the first at position ``start``."""
        middle = start + self.tile * count / 2  # attention within a tile counts by its half
        return count * (self.tile_first + self.tile_slope * middle)

    def prompt_seconds(self, start: int, tokens: int) -> float:
        """Seconds to compute a prompt from ``start`` on."""
        return self.tiles_seconds(start, cdiv(tokens - start, self.tile))

    def decode_seconds(self, sequences: float, context: float) -> float:
        """Seconds of a decode step.

        Args:
          sequences: slots in use.
          context: tokens of all of them together.
        """
        if not sequences:
            return 0.0
        read = self.weights_read(sequences) + sequences * self.sequence_read_bytes
        read += context * self.context_bytes
        operations = sequences * self.token_operations + context * self.context_operations
        seconds = max(read / self.bandwidth, operations / self.flops)
        return seconds + self.hardware.step_seconds

    def move_seconds(self, tier: Tier, size: float) -> float:
        """Seconds to bring bytes of a tier to the device."""
        return size / self.rate(tier)

    def rate(self, tier: Tier) -> float:
        """Bytes a second from a tier to the device."""
        rates = {
            Tier.DEVICE: self.bandwidth / 2,  # read and written
            Tier.HOST: self.hardware.host_bytes_per_second,
            Tier.DISK: self.hardware.disk_bytes_per_second,
        }
        return max(rates[tier], 1e-9)

    @functools.cached_property
    def cost(self) -> CostModel:
        """What the planner is told."""
        return CostModel(
            tile_seconds=self.tile_first, bytes_per_second={tier: self.rate(tier) for tier in Tier}
        )

    def eviction(self, name: str) -> dict[Tier, EvictionPolicy]:
        """What goes first on each tier: ``lru``, or the least ``value`` in seconds saved a byte.

        Raises:
          UserError: no such order.
        """
        if name == "lru":
            return dict.fromkeys(Tier, LeastRecentlyUsed())
        if name != "value":
            raise UserError(f"no order of eviction {name!r}: give lru or value")
        blocks = self.scheme.geometry.block_tokens / self.tile * self.tile_first
        replay = cdiv(self.scheme.geometry.longest_replay_tokens, self.tile) * self.tile_first
        policies: dict[Tier, EvictionPolicy] = {}
        kind = value_policy(self.scheme)
        for tier in Tier:
            slower = [t for t in SLOWER if t > tier]
            load = max((self.cost.copy(t, self.scheme.block_bytes) for t in slower), default=0.0)
            policies[tier] = kind(
                block_seconds=blocks,
                block_bytes=self.scheme.block_bytes,
                snapshot_seconds=replay,
                snapshot_bytes=max(self.scheme.snapshot_bytes, 1),
                tier=tier,
                copied_share=min(load / blocks, 1.0),
            )
        return policies

    # What fits.

    @functools.cached_property
    def room(self) -> dict[Tier, float]:
        """Bytes that the cache may take on each tier.

        Raises:
          UserError: the model does not fit the devices.
        """
        hardware = self.hardware
        device = hardware.chips * hardware.hbm_bytes * (1 - hardware.work_share)
        device -= self.model.weight_bytes
        if device <= 0:
            raise UserError(
                f"{self.model.name} has {self.model.weight_bytes / 1e9:.0f} GB of weights, which "
                f"do not fit {hardware.name}: {hardware.chips * hardware.hbm_bytes / 1e9:.0f} GB"
            )
        return {
            Tier.DEVICE: device,
            Tier.HOST: hardware.host_bytes * hardware.host_share,
            Tier.DISK: hardware.disk_bytes,
        }

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes of a stored sequence state of the model, whatever the scheme."""
        return state_bytes(self.model.geometry)
