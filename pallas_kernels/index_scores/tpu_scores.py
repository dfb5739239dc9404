"""Index scores of one (sequence, query group) on a TPU core, as its rows stream in from HBM.

A stream of buffers runs through all items of the work list: while one item is ranked, the rows of
the next are already on their way.

    table row of an item (HBM) --one item ahead--> SMEM
    cache blocks (HBM) --``depth`` chunks ahead--> buffers [depth, blocks, rows, width]
    buffers --product, relu, weighted sum over heads--> scores [queries, tiles, 8, 128]
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.index_scores.tpu_packed import Packed
from pallas_kernels.index_scores.tpu_topk import LANES, TILE, cdiv, divide

Ref = Any
_ISSUED_TOGETHER = 8
PRODUCT_ROWS = 512
_TILES_TOGETHER = 4


@dataclasses.dataclass(frozen=True)
class Item:
    """One entry of the work list, in scalars."""

    slot: jax.Array
    """Which of the table rows in SMEM is its own."""
    rows: jax.Array
    """Rows to be read; 0 where nothing needs a score."""


@dataclasses.dataclass(frozen=True)
class Target:
    """One chunk that is copied: its table row, its number there, its blocks and its buffer."""

    slot: jax.Array
    chunk: jax.Array
    count: jax.Array
    buffer: jax.Array


@dataclasses.dataclass(frozen=True)
class RowStream:
    """The buffers, and the copies that fill them."""

    pool: Ref
    """``[blocks, rows, width]`` in HBM"""
    table: Ref
    """int32 ``[slots, chunks, 1, blocks of a chunk]`` in SMEM"""
    buffers: Ref
    """``[depth, blocks of a chunk, rows, width]``"""
    arrived: Ref
    """A DMA semaphore a buffer."""

    @property
    def depth(self) -> int:
        """Chunks in flight."""
        return self.buffers.shape[0]

    @property
    def chunk_rows(self) -> int:
        """Rows of a buffer."""
        return self.buffers.shape[1] * self.buffers.shape[2]

    def chunks(self, item: Item) -> jax.Array:
        """Chunks of an item."""
        return cdiv(item.rows, self.chunk_rows)

    def blocks(self, item: Item, chunk: jax.Array) -> jax.Array:
        """Cache blocks that a chunk reads; none past the item's rows."""
        _, each, per, _ = self.buffers.shape
        return jnp.clip(cdiv(item.rows, per) - chunk * each, 0, each)

    def start(self, target: "Target") -> None:
        """Starts the copies of a chunk."""

        def several(step: jax.Array, _: None) -> None:
            """Some copies at once."""
            self.copy_blocks(target, step * _ISSUED_TOGETHER, _ISSUED_TOGETHER)

        def rest(number: jax.Array, _: None) -> None:
            """One copy."""
            self.copy_blocks(target, number, 1)

        whole, _ = divide(target.count, _ISSUED_TOGETHER)
        jax.lax.fori_loop(0, whole, several, None)
        jax.lax.fori_loop(whole * _ISSUED_TOGETHER, target.count, rest, None)

    def target(self, item: Item, after: Item, base: jax.Array, position: jax.Array) -> "Target":
        """Which blocks of which item stand ``position`` chunks past the item's first, and where.

        That may be a chunk of the item ``after`` it; later items have no blocks here. ``base`` is
        the number of the item's first chunk in the whole stream.
        """
        own = position < self.chunks(item)
        chunk = jnp.where(own, position, position - self.chunks(item))
        count = jnp.where(own, self.blocks(item, chunk), self.blocks(after, chunk))
        slot = jnp.where(own, item.slot, after.slot)
        return Target(slot, chunk, count, divide(base + position, self.depth)[1])

    def copy_blocks(self, target: "Target", first: Any, count: int) -> None:
        """Starts the copies of some blocks of a chunk."""
        for number in range(count):
            block = self.table[target.slot, target.chunk, 0, first + number]
            pltpu.make_async_copy(
                self.pool.at[block],
                self.buffers.at[target.buffer, first + number],
                self.arrived.at[target.buffer],
            ).start()

    def wait(self, item: Item, chunk: jax.Array, buffer: jax.Array) -> None:
        """Until a chunk is whole."""
        count = self.blocks(item, chunk)
        each = self.buffers.shape[1]

        @pl.when(count == each)
        def _() -> None:
            pltpu.make_async_copy(
                self.buffers.at[buffer], self.buffers.at[buffer], self.arrived.at[buffer]
            ).wait()

        @pl.when(count < each)
        def _() -> None:
            def one(number: jax.Array, _: None) -> None:
                """Waits for one block."""
                landed = self.buffers.at[buffer, number]
                pltpu.make_async_copy(landed, landed, self.arrived.at[buffer]).wait()

            jax.lax.fori_loop(0, count, one, None)


def down_sublanes(values: jax.Array, heads: int) -> jax.Array:
    """``[1, 128 or more]`` across lanes to ``[heads, PRODUCT_ROWS]`` down sublanes, exactly."""
    shape = (heads, values.shape[1])
    diagonal = jax.lax.broadcasted_iota(jnp.int32, shape, 0) == jax.lax.broadcasted_iota(
        jnp.int32, shape, 1
    )
    one = jnp.sum(jnp.where(diagonal, values, 0.0), axis=1, keepdims=True)
    return jnp.broadcast_to(one, (heads, PRODUCT_ROWS))


def score_chunk(
    read: Callable[[Any, int], jax.Array],
    shape: tuple[int, int],
    queries: jax.Array,
    weights: Ref,
    scores: Ref,
    first_tile: jax.Array,
    copy_blocks: Callable[[Any, int], None] | None = None,
    packed: Packed | None = None,
) -> None:
    """Scores of a buffer's rows for one query.

    Args:
      read: ``PRODUCT_ROWS`` rows of a tile, by tile and part, as they are multiplied.
      shape: blocks of the buffer, and rows of a block.
      queries: ``[parts * heads, width]`` in the dtype of the products; parts are summed.
      weights: float32 ``[heads, PRODUCT_ROWS]``, the same in all lanes.
      scores: float32 ``[tiles, 8, 128]``, written from ``first_tile`` on.
      first_tile: of the chunk.
      copy_blocks: starts the copies of (first, count) blocks of another chunk as large; these
        scalar instructions run beside the vector instructions of the scores.
      packed: how rows are packed, if they are; queries are then such as it makes.
    """
    blocks, per = shape
    heads = weights.shape[0]
    tiles = blocks * per // TILE
    together = min(_TILES_TOGETHER, tiles)
    parts = TILE // PRODUCT_ROWS
    copies = TILE // per

    def several(step: jax.Array, _: None) -> None:
        """Some tiles, whose steps run beside each other."""
        totals = []
        for number in range(together * parts):
            tile, part = step * together + number // parts, number % parts
            some = read(tile, part)
            if copy_blocks is not None:
                # After the loads of a part, because a copy is not moved past a load.
                before = -(-part * copies // parts)
                copy_blocks(tile * copies + before, -(-(part + 1) * copies // parts) - before)
            hits = _products(queries, some, heads, packed)
            total = jnp.sum(jnp.maximum(hits, 0.0) * weights[...], axis=0, keepdims=True)
            if packed is not None:
                totals.append(total)
                if part == parts - 1:
                    scores[first_tile + tile] = packed.in_order(totals)
                    totals = []
                continue
            for half in range(PRODUCT_ROWS // LANES):
                line = part * (PRODUCT_ROWS // LANES) + half
                lanes = total[:, half * LANES : (half + 1) * LANES]
                scores[first_tile + tile, pl.ds(line, 1), :] = lanes

    jax.lax.fori_loop(0, tiles // together, several, None)


def part_of(rows: Ref, tile: jax.Array, part: int) -> jax.Array:
    """``PRODUCT_ROWS`` rows of a tile, as they are stored in ``rows [blocks, per, stored]``."""
    _, per, stored = rows.shape
    each = TILE // per
    if per <= PRODUCT_ROWS:
        count = PRODUCT_ROWS // per
        some = rows[pl.ds(tile * each + part * count, count)]
    else:
        block, first = divmod(part * PRODUCT_ROWS, per)
        some = rows[tile * each + block, first : first + PRODUCT_ROWS]
    return some.reshape(PRODUCT_ROWS, stored)


def as_floats(stored: jax.Array) -> jax.Array:
    """Plain stored rows as they are multiplied."""
    if stored.dtype == jnp.float32:
        return stored
    return pltpu.bitcast(stored, jnp.bfloat16)


def _products(queries: jax.Array, keys: jax.Array, heads: int, packed: Packed | None) -> jax.Array:
    """float32 ``[heads, rows]``: the sum over the parts of the queries."""
    precision = jax.lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None
    every = jax.lax.dot_general(
        queries,
        keys,
        (((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    if packed is not None:
        return packed.hits(every, heads, (every.shape[0] - packed.lead) // heads)
    total = every[:heads]
    for first in range(heads, every.shape[0], heads):
        total = total + every[first : first + heads]
    return total
