"""The tile step and the decode step: pure functions over the cache.

Both write their tokens' rows to the blocks first and read every key back through the block table,
so a row is attended as it was stored by whoever made it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from hybridkv.geometry import Geometry
from hybridkv.state.batch import DecodeBatch, StepOptions, TileBatch
from hybridkv.state.cache import Cache, LayerCache
from hybridkv.state.compressed import write_rows
from hybridkv.state.lanes import lanes_in_turn, map_sequences
from models.llama.attention import Attention
from models.llama.model import AttendInput, Llama
from pallas_kernels.attention import api as attention_kernel
from pallas_kernels.blocks import BlockRows
from pallas_kernels.packing import api as packing


class Sequences(NamedTuple):
    """Consecutive tokens of several sequences, as every layer sees them.

    A tile step has one sequence a lane and ``t = tile``; a decode step one a slot and ``t = 1``.
    """

    positions: Int[Array, "n t"]
    write: Bool[Array, "n t"]
    """Whether this step stores the token's row."""
    visible: Int[Array, "n t"]
    """Rows each token attends, its own included."""
    table: Int[Array, "n blocks_per_sequence"]
    order: Int[Array, " n"]
    """Active sequences first."""
    active: Int[Array, ""]
    """How many are active."""


def tile_step(
    model: Llama, batch: TileBatch, cache: Cache, options: StepOptions
) -> tuple[Float[Array, "lanes vocab"], Cache]:
    """Consumes each lane's tokens ``starts ... ends - 1``; DONATES cache when jitted by a caller.

    Returns float32 logits of each lane's last token (``[lanes, tile, vocab]`` of all tokens with
    ``options.all_logits``), and the cache at ``ends``. Idle lanes give zeros or garbage. Rows of
    tokens before ``write_from`` are read but not written; ``known_from`` has no meaning without a
    window.
    """
    step = functools.partial(_all_lanes, model, options=options)
    if options.sequential and options.lanes > 1:
        return lanes_in_turn(step, batch, cache)
    return step(batch, cache)


def _all_lanes(
    model: Llama, batch: TileBatch, cache: Cache, options: StepOptions
) -> tuple[jax.Array, Cache]:
    lanes, tile = batch.tokens.shape
    positions = batch.starts[:, None] + jnp.arange(tile, dtype=jnp.int32)[None, :]
    ends = batch.ends[:, None]
    inside = positions < ends
    sequences = Sequences(
        positions=positions,
        write=inside & (positions + 1 > batch.write_from[:, None]),
        visible=jnp.minimum(positions + 1, ends),
        table=cache.block_table[jnp.minimum(batch.slots, cache.slots - 1)],
        order=jnp.arange(lanes, dtype=jnp.int32),
        active=jnp.sum((batch.ends > batch.starts).astype(jnp.int32)),
    )
    tokens = jnp.where(inside, batch.tokens, 0)
    lengths = cache.lengths.at[batch.slots].set(batch.ends, mode="drop")
    hidden, cache = _forward(model, tokens, sequences, cache, lengths, options)
    if not options.all_logits:
        last = jnp.maximum(batch.ends - batch.starts - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
    return model.logits(hidden), cache


def decode_step(
    model: Llama, batch: DecodeBatch, cache: Cache, options: StepOptions
) -> tuple[Float[Array, "slots vocab"], Cache]:
    """Consumes one token of every active slot; DONATES cache when jitted by a caller.

    Returns float32 logits (garbage for idle slots) and the cache one token later.
    """
    positions = cache.lengths[:, None]
    sequences = Sequences(
        positions=positions,
        write=batch.active[:, None],
        visible=jnp.where(batch.active[:, None], positions + 1, 0),
        table=cache.block_table,
        order=jnp.argsort(jnp.logical_not(batch.active), stable=True).astype(jnp.int32),
        active=jnp.sum(batch.active.astype(jnp.int32)),
    )
    tokens = jnp.where(batch.active, batch.tokens, 0)[:, None]
    lengths = cache.lengths + batch.active.astype(jnp.int32)
    hidden, cache = _forward(model, tokens, sequences, cache, lengths, options)
    return model.logits(hidden[:, 0]), cache


def _forward(
    model: Llama,
    tokens: Int[Array, "n t"],
    sequences: Sequences,
    cache: Cache,
    lengths: Int[Array, " slots"],
    options: StepOptions,
) -> tuple[Float[Array, "n t hidden"], Cache]:
    geometry = cache.geometry

    def attend(inputs: AttendInput, layer: LayerCache) -> tuple[jax.Array, LayerCache]:
        attention, x, angles = inputs
        assert layer.rows is not None
        stored = packing.encode(attention.rows(x, angles), geometry.row_format.name)
        pool = write_rows(layer.rows, sequences.table, sequences.positions, sequences.write, stored)
        o = map_sequences(
            _sequence_attention(attention, pool, geometry, options),
            (
                attention.queries(x, angles).astype(jnp.float32),
                sequences.table,
                sequences.visible,
            ),
            sequences.order,
            sequences.active,
            sequential=options.sequential,
        )
        return attention.output(o.astype(x.dtype)), dataclasses.replace(layer, rows=pool)

    layers = [cache.layer(number) for number in range(model.config.layers)]
    hidden, after = model(tokens, sequences.positions, attend, layers)
    return hidden, cache.with_layers(after, lengths)


def _sequence_attention(
    attention: Attention, pool: jax.Array, geometry: Geometry, options: StepOptions
) -> Callable[..., jax.Array]:
    """Attention of one sequence's consecutive queries, for ``map_sequences``."""

    def function(
        q: Float[Array, "t heads width"],
        table: Int[Array, " blocks"],
        visible: Int[Array, " t"],
    ) -> Float[Array, "t heads width"]:
        return attention_kernel.attend_pairs(
            q,
            BlockRows(pool, table),
            visible,
            kv_heads=attention.kv_heads,
            scale=attention.scale,
            key_block=options.key_block,
            format=geometry.row_format.name,
        )

    return function
