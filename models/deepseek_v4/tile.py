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
from hybridkv.state.lanes import lanes_in_turn
from hybridkv.state.layouts import index_layout, window_layout
from hybridkv.state.tail import CompressorTail, tail_after
from hybridkv.state.window import read_window, ring_after
from models.common import rotary_angles
from models.deepseek_v4.cached import Encode, Queries, compress_layer, layer_attention, pool_after
from models.deepseek_v4.compressor import CellInput, Compressor
from models.deepseek_v4.model import AttendInput, DeepseekV4
from pallas_kernels.packing import api as packing
from pallas_kernels.sequences import Active


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lanes:
    """The sequences of one tile step, as every layer sees them."""

    slots: Int[Array, " lanes"]
    starts: Int[Array, " lanes"]
    ends: Int[Array, " lanes"]
    known_from: Int[Array, " lanes"]
    write_from: Int[Array, " lanes"]
    table: Int[Array, "lanes blocks_per_sequence"]
    active: Active


def tile_step(
    model: DeepseekV4, batch: TileBatch, cache: Cache, options: StepOptions
) -> tuple[Float[Array, "lanes vocab"], Cache]:
    """Consumes each lane's tokens ``starts ... ends - 1``; DONATES cache when jitted by a caller.

    Returns float32 logits of each lane's last token (``[lanes, tile, vocab]`` of all tokens with
    ``options.all_logits``), and the cache at ``ends``. Idle lanes give zeros or garbage.
    """
    step = functools.partial(_all_lanes, model, options=options)
    if options.sequential and options.lanes > 1:
        return lanes_in_turn(step, batch, cache)
    return step(batch, cache)


def _all_lanes(
    model: DeepseekV4, batch: TileBatch, cache: Cache, options: StepOptions
) -> tuple[jax.Array, Cache]:
    lanes, tile = batch.tokens.shape
    positions = batch.starts[:, None] + jnp.arange(tile, dtype=jnp.int32)[None, :]
    real = positions < batch.ends[:, None]
    tokens = jnp.where(real, batch.tokens, 0)
    slot = jnp.minimum(batch.slots, cache.slots - 1)  # reads of idle lanes stay in range
    context = Lanes(
        slots=batch.slots,
        starts=batch.starts,
        ends=batch.ends,
        known_from=batch.known_from,
        write_from=batch.write_from,
        table=cache.block_table[slot],
        active=Active(
            jnp.arange(lanes, dtype=jnp.int32),
            jnp.sum((batch.ends > batch.starts).astype(jnp.int32)),
        ),
    )
    attend = _attention(model, cache.geometry, context, options)
    layers = [cache.layer(number) for number in range(model.config.layers)]
    hidden, after = model(
        tokens,
        positions,
        attend,
        tuple(enumerate(layers)),
        rows=options.expert_rows,
        active=real,
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
        rows = packing.encode(attention.rows(x, angles), window_layout(geometry))
        buffer, window = _roll_window(layer, rows, lanes)
        new = dataclasses.replace(layer, window=window)
        ratio = config.layer_ratios[number]
        compress = functools.partial(_compress, inputs, lanes, frequencies, options.kernels)
        new = compress_layer(attention, new, geometry, compress)
        visible = index = None
        if attention.compressor is not None:
            visible = jnp.minimum((positions + 1) // ratio, (lanes.ends // ratio)[:, None])
        if attention.indexer is not None:
            index = attention.indexer.query(x, latent, angles, index_layout(geometry))
        q = attention.queries(latent, angles).astype(jnp.float32)
        o = layer_attention(
            attention,
            new,
            geometry,
            Queries(q, lanes.starts - lanes.known_from, lanes.table, visible, index),
            buffer,
            window=config.window,
            active=lanes.active,
            options=options,
        )
        return attention.output(o.astype(x.dtype), angles), new

    return attend


def _roll_window(layer: LayerCache, rows: jax.Array, lanes: Lanes) -> tuple[jax.Array, jax.Array]:
    """The linear buffer that attention reads, and the rings after this tile."""
    assert layer.window is not None
    slot = jnp.minimum(lanes.slots, layer.window.shape[0] - 1)
    ring = layer.window[slot]
    before = read_window(ring, lanes.starts, ring.shape[1] - 1, lanes.known_from)
    buffer = jnp.concatenate([before, rows], axis=1)
    ring = ring_after(buffer, ring, lanes.starts, lanes.ends)
    return buffer, layer.window.at[lanes.slots].set(ring, mode="drop")


def _compress(
    inputs: AttendInput,
    lanes: Lanes,
    frequencies: np.ndarray,
    kernels: str | None,
    compressor: Compressor,
    pool: jax.Array,
    tails: CompressorTail,
    encode: Encode,
) -> tuple[jax.Array, CompressorTail]:
    ratio = compressor.ratio
    count, tile = inputs.positions.shape
    slot = jnp.minimum(lanes.slots, tails.kv.shape[0] - 1)
    tail = jax.tree.map(lambda x: x[slot], tails)
    kv, gate = compressor.project(inputs.x, inputs.positions)
    shape = (count, tile // ratio, ratio, kv.shape[-1])
    cells = CellInput(kv.reshape(shape), gate.reshape(shape))
    pooled = pool_after(cells, tail, lanes.starts > lanes.known_from, kernels=kernels)
    number = (lanes.starts // ratio)[:, None] + jnp.arange(tile // ratio, dtype=jnp.int32)[None, :]
    rows = compressor.finish(pooled, rotary_angles(number * ratio, frequencies))
    end = (number + 1) * ratio
    whole = (end <= lanes.ends[:, None]) & (end > lanes.write_from[:, None])
    pool = write_rows(pool, lanes.table, number, whole, encode(rows), kernels=kernels)
    tail = tail_after(kv, gate, tail, lanes.starts, lanes.ends)
    return pool, jax.tree.map(
        lambda all_, new: all_.at[lanes.slots].set(new, mode="drop"), tails, tail
    )
