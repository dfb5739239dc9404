"""The tile step: up to one tile of prompt tokens of each lane, the only way prompts are computed.

Every token stands at its absolute place in its tile, so its bits depend neither on where the prompt
was cut nor on what ran before. Attention reads the window as a linear buffer and compressed rows
through the block table, after this tile's rows are written; the ring is written last.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hybridkv.geometry import Geometry
from hybridkv.state.batch import StepOptions, TileBatch
from hybridkv.state.cache import Cache, LayerCache
from hybridkv.state.compressed import write_rows
from hybridkv.state.tail import CompressorTail, tail_after
from hybridkv.state.window import read_window, ring_after
from models.common import rotary_angles
from models.deepseek_v4.cached import compress_layer, pool_after, sequence_attention
from models.deepseek_v4.compressor import CellInput, Compressor
from models.deepseek_v4.lanes import map_sequences
from models.deepseek_v4.model import AttendInput, DeepseekV4
from pallas_kernels.packing import api as packing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lanes:
    """The sequences of one tile step, as every layer sees them."""

    slots: Int[Array, " lanes"]
    starts: Int[Array, " lanes"]
    ends: Int[Array, " lanes"]
    table: Int[Array, "lanes blocks_per_sequence"]
    order: Int[Array, " lanes"]
    active: Int[Array, ""]


def tile_step(
    model: DeepseekV4, batch: TileBatch, cache: Cache, options: StepOptions
) -> tuple[Float[Array, "lanes vocab"], Cache]:
    """Consumes each lane's tokens ``starts ... ends - 1``; DONATES cache when jitted by a caller.

    Returns float32 logits of each lane's last token (``[lanes, tile, vocab]`` of all tokens with
    ``options.all_logits``), and the cache at ``ends``. Idle lanes give zeros or garbage.
    """
    if options.sequential and options.lanes > 1:
        return _one_lane_at_a_time(model, batch, cache, options)
    return _all_lanes(model, batch, cache, options)


def _one_lane_at_a_time(
    model: DeepseekV4, batch: TileBatch, cache: Cache, options: StepOptions
) -> tuple[jax.Array, Cache]:
    active = jnp.sum((batch.ends > batch.starts).astype(jnp.int32))
    one = dataclasses.replace(options, lanes=1)
    vocab = model.config.vocab_size
    shape = (options.lanes, options.tile, vocab) if options.all_logits else (options.lanes, vocab)

    def body(lane: jax.Array, carry: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
        out, cache = carry
        single = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, lane, 1), batch)
        logits, cache = _all_lanes(model, single, cache, one)
        return jax.lax.dynamic_update_slice_in_dim(out, logits, lane, 0), cache

    return jax.lax.fori_loop(0, active, body, (jnp.zeros(shape, jnp.float32), cache))


def _all_lanes(
    model: DeepseekV4, batch: TileBatch, cache: Cache, options: StepOptions
) -> tuple[jax.Array, Cache]:
    lanes, tile = batch.tokens.shape
    positions = batch.starts[:, None] + jnp.arange(tile, dtype=jnp.int32)[None, :]
    tokens = jnp.where(positions < batch.ends[:, None], batch.tokens, 0)
    slot = jnp.minimum(batch.slots, cache.slots - 1)  # reads of idle lanes stay in range
    context = Lanes(
        slots=batch.slots,
        starts=batch.starts,
        ends=batch.ends,
        table=cache.block_table[slot],
        order=jnp.arange(lanes, dtype=jnp.int32),
        active=jnp.sum((batch.ends > batch.starts).astype(jnp.int32)),
    )
    attend = _attention(model, cache.geometry, context, options)
    layers = [cache.layer(number) for number in range(model.config.layers)]
    hidden, after = model(
        tokens, positions, attend, tuple(enumerate(layers)), rows=options.expert_rows
    )
    if not options.all_logits:
        last = jnp.maximum(batch.ends - batch.starts - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
    lengths = cache.lengths.at[batch.slots].set(batch.ends, mode="drop")
    return model.logits(hidden), cache.with_layers(after, lengths)


def _attention(
    model: DeepseekV4, geometry: Geometry, lanes: Lanes, options: StepOptions
) -> Callable[[AttendInput, tuple[int, LayerCache]], tuple[jax.Array, LayerCache]]:
    config = model.config

    def attend(inputs: AttendInput, carry: tuple[int, LayerCache]) -> tuple[jax.Array, LayerCache]:
        number, layer = carry
        attention, x, positions, angles = inputs
        frequencies = config.layer_rope(number).frequencies(config.rope_dim)
        latent = attention.latent(x)
        rows = packing.encode(attention.rows(x, angles), geometry.window_format.name)
        buffer, window = _roll_window(layer, rows, lanes)
        new = dataclasses.replace(layer, window=window)
        arguments = [
            attention.queries(latent, angles).astype(jnp.float32),
            packing.decode(buffer, geometry.window_format.name),
            lanes.starts,
        ]
        ratio = config.layer_ratios[number]
        compress = functools.partial(_compress, inputs, lanes, frequencies)
        new = compress_layer(attention, new, geometry, compress)
        if attention.compressor is not None:
            visible = jnp.minimum((positions + 1) // ratio, (lanes.ends // ratio)[:, None])
            arguments += [lanes.table, visible]
        if attention.indexer is not None:
            arguments += list(attention.indexer.query(x, latent, angles))
        function = sequence_attention(attention, new, geometry, config.window, options)
        o = map_sequences(
            function,
            tuple(arguments),
            lanes.order,
            lanes.active,
            sequential=options.sequential,
        )
        return attention.output(o.astype(x.dtype), angles), new

    return attend


def _roll_window(layer: LayerCache, rows: jax.Array, lanes: Lanes) -> tuple[jax.Array, jax.Array]:
    """The linear buffer that attention reads, and the rings after this tile."""
    assert layer.window is not None
    slot = jnp.minimum(lanes.slots, layer.window.shape[0] - 1)
    ring = layer.window[slot]
    buffer = jnp.concatenate([read_window(ring, lanes.starts, ring.shape[1] - 1), rows], axis=1)
    ring = ring_after(buffer, ring, lanes.starts, lanes.ends)
    return buffer, layer.window.at[lanes.slots].set(ring, mode="drop")


def _compress(
    inputs: AttendInput,
    lanes: Lanes,
    frequencies: np.ndarray,
    compressor: Compressor,
    pool: jax.Array,
    tails: CompressorTail,
    format: str,
) -> tuple[jax.Array, CompressorTail]:
    ratio = compressor.ratio
    count, tile = inputs.positions.shape
    slot = jnp.minimum(lanes.slots, tails.kv.shape[0] - 1)
    tail = jax.tree.map(lambda x: x[slot], tails)
    kv, gate = compressor.project(inputs.x, inputs.positions)
    shape = (count, tile // ratio, ratio, kv.shape[-1])
    cells = CellInput(kv.reshape(shape), gate.reshape(shape))
    pooled = pool_after(cells, tail, lanes.starts > 0)
    number = (lanes.starts // ratio)[:, None] + jnp.arange(tile // ratio, dtype=jnp.int32)[None, :]
    rows = compressor.finish(pooled, rotary_angles(number * ratio, frequencies))
    whole = (number + 1) * ratio <= lanes.ends[:, None]
    pool = write_rows(pool, lanes.table, number, whole, packing.encode(rows, format))
    tail = tail_after(kv, gate, tail, lanes.starts, lanes.ends)
    return pool, jax.tree.map(
        lambda all_, new: all_.at[lanes.slots].set(new, mode="drop"), tails, tail
    )
