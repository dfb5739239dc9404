"""What a tile and a copy cost on this device, and what eviction makes of it."""

import dataclasses
import time
from collections.abc import Callable

import jax
import numpy as np

from hybridkv.arithmetic import cdiv
from hybridkv.blocks.entries import Tier
from hybridkv.blocks.eviction import EvictionPolicy, SecondsPerByte
from hybridkv.engine.steps import (
    MOVED_BLOCKS,
    NOWHERE,
    BlockWords,
    LaneTile,
    Steps,
    tile_batch,
    to_device,
)
from hybridkv.geometry import Geometry
from hybridkv.prefixes.cost import CostModel
from hybridkv.state.cache import Cache
from hybridkv.state.snapshot import Snapshots, snapshot_bytes


def measure_cost(
    steps: Steps, cache: Cache, snapshots: Snapshots, *, repeats: int
) -> tuple[CostModel, Cache]:
    """Times a tile step, the reading of a snapshot, and a move of blocks from host memory.

    Medians of ``repeats``. DONATES cache. Changes nothing: the tile's lane and the snapshot's
    reader sit past the last slot and the blocks' places past the pool, so that every write is
    dropped.
    """
    nowhere, tile = cache.slots, steps.options.tile
    lane = LaneTile(tokens=np.zeros(tile, np.int32), slot=nowhere, start=0, write_from=tile)
    batch = tile_batch((lane,), steps.options, nowhere)
    table = np.zeros(cache.block_table.shape[1], np.int32)

    def compute() -> None:
        nonlocal cache
        logits, cache = steps.tile(batch, cache)
        logits.block_until_ready()

    def read() -> None:
        nonlocal cache
        cache = steps.admit(cache, snapshots, slot=nowhere, table=table, length=0, place=0)
        cache.lengths.block_until_ready()

    places = np.full(MOVED_BLOCKS, NOWHERE, np.int32)
    pinned = _pinned(steps.read_blocks(cache, places))

    def load() -> None:
        nonlocal cache
        cache = steps.write_blocks(cache, to_device(pinned), places)
        jax.block_until_ready(cache)

    size = sum(snapshot_bytes(steps.model.geometry).values())
    moved = sum(words.nbytes for words in pinned)
    speeds = {
        Tier.DEVICE: max(size, 1) / _median_seconds(read, repeats),
        Tier.HOST: max(moved, 1) / _median_seconds(load, repeats),
    }
    seconds = _median_seconds(compute, repeats)
    return CostModel(tile_seconds=seconds, bytes_per_second=speeds), cache


def _pinned(blocks: BlockWords) -> BlockWords:
    """Copies in the memory that the host tier keeps its bytes in."""
    (device,) = blocks[0].devices()
    there = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    return tuple(jax.device_put(words, there) for words in blocks)


def _median_seconds(function: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


def eviction(geometry: Geometry, tile: int, cost: CostModel) -> dict[Tier, EvictionPolicy]:
    """The default policy of every tier: what a slower tier has too is worth its loading only."""
    policies: dict[Tier, EvictionPolicy] = {}
    plain = seconds_per_byte(geometry, tile, cost)
    for tier in Tier:
        slower = [t for t in Tier if t > tier]
        load = max((cost.copy(t, geometry.block_bytes) for t in slower), default=0.0)
        share = min(load / plain.block_seconds, 1.0) if plain.block_seconds else 1.0
        policies[tier] = dataclasses.replace(plain, tier=tier, copied_share=share)
    return policies


def seconds_per_byte(geometry: Geometry, tile: int, cost: CostModel) -> SecondsPerByte:
    """The default eviction policy: what a block or a snapshot saves when it is found again."""
    state = max(sum(snapshot_bytes(geometry).values()), 1)
    replay = cdiv(geometry.longest_replay_tokens, tile) * cost.tile_seconds
    return SecondsPerByte(
        block_seconds=cost.tile_seconds * geometry.block_tokens / tile,
        block_bytes=geometry.block_bytes,
        snapshot_seconds=replay,
        snapshot_bytes=state,
    )
