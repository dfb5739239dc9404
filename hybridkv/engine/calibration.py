"""What a tile and a copy cost on this device, and what eviction makes of it."""

import time
from collections.abc import Callable

import numpy as np

from hybridkv.arithmetic import cdiv
from hybridkv.blocks.entries import Tier
from hybridkv.blocks.eviction import SecondsPerByte
from hybridkv.engine.steps import LaneTile, Steps, tile_batch
from hybridkv.geometry import Geometry
from hybridkv.prefixes.cost import CostModel
from hybridkv.state.cache import Cache
from hybridkv.state.snapshot import Snapshots, snapshot_bytes


def measure_cost(
    steps: Steps, cache: Cache, snapshots: Snapshots, *, repeats: int
) -> tuple[CostModel, Cache]:
    """Times a tile step and the reading of a snapshot, medians of ``repeats``. DONATES cache.

    Changes nothing: the tile's lane and the snapshot's reader sit past the last slot, so that every
    write is dropped.
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

    size = sum(snapshot_bytes(steps.model.geometry).values())
    seconds = _median_seconds(compute, repeats)
    speed = max(size, 1) / _median_seconds(read, repeats)
    return CostModel(tile_seconds=seconds, bytes_per_second={Tier.DEVICE: speed}), cache


def _median_seconds(function: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


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
