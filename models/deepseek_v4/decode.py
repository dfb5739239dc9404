"""The decode step: one more token of every active slot."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from hybridkv.geometry import Geometry
from hybridkv.state.batch import DecodeBatch, StepOptions
from hybridkv.state.cache import Cache, LayerCache
from hybridkv.state.compressed import write_rows
from hybridkv.state.layouts import index_layout, window_layout
from hybridkv.state.tail import CompressorTail
from hybridkv.state.window import read_window, write_token
from models.common import rotary_angles
from models.deepseek_v4.cached import Encode, Queries, compress_layer, layer_attention, pool_after
from models.deepseek_v4.compressor import CellInput, Compressor
from models.deepseek_v4.indexer import IndexQuery
from models.deepseek_v4.model import AttendInput, DeepseekV4
from pallas_kernels.packing import api as packing
from pallas_kernels.sequences import Active


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """The sequences of one decode step, as every layer sees them."""

    positions: Int[Array, " slots"]
    write: Int[Array, " slots"]
    """Slot to write to: past the end, and so nowhere, for idle ones."""
    active: Bool[Array, " slots"]
    sequences: Active
    """The active slots."""
    table: Int[Array, "slots blocks_per_sequence"]


def decode_step(
    model: DeepseekV4, batch: DecodeBatch, cache: Cache, options: StepOptions
) -> tuple[Float[Array, "slots vocab"], Cache]:
    """Consumes one token of every active slot; DONATES cache when jitted by a caller.

    Returns float32 logits (garbage for idle slots) and the cache one token later.
    """
    numbers = jnp.arange(cache.slots, dtype=jnp.int32)
    context = Slots(
        positions=cache.lengths,
        write=jnp.where(batch.active, numbers, cache.slots),
        active=batch.active,
        sequences=Active.of(batch.active),
        table=cache.block_table,
    )
    tokens = jnp.where(batch.active, batch.tokens, 0)
    attend = _attention(model, cache.geometry, context, options)
    layers = [cache.layer(number) for number in range(model.config.layers)]
    hidden, after = model(
        tokens,
        context.positions,
        attend,
        tuple(enumerate(layers)),
        rows=1,  # grouping by expert saves reading weights and costs as much in slower products
        active=None if cache.slots == 1 else batch.active,
    )
    lengths = cache.lengths + batch.active.astype(jnp.int32)
    return model.logits(hidden), cache.with_layers(after, lengths)


def _attention(
    model: DeepseekV4, geometry: Geometry, slots: Slots, options: StepOptions
) -> Callable[[AttendInput, tuple[int, LayerCache]], tuple[jax.Array, LayerCache]]:
    config = model.config

    def attend(inputs: AttendInput, carry: tuple[int, LayerCache]) -> tuple[jax.Array, LayerCache]:
        number, layer = carry
        attention, x, positions, angles = inputs
        frequencies = config.layer_rope(number).frequencies(config.rope_dim)
        latent = attention.latent(x)
        row = packing.encode(attention.rows(x, angles), window_layout(geometry))
        assert layer.window is not None
        # Written before it is read: the other order makes XLA copy the ring.
        window = write_token(layer.window, slots.write, positions, row, kernels=options.kernels)
        new = dataclasses.replace(layer, window=window)
        buffer = read_window(window, positions + 1, config.window)
        compress = functools.partial(_compress, inputs, slots, frequencies, options.kernels)
        new = compress_layer(attention, new, geometry, compress)
        visible = index = None
        if attention.compressor is not None:
            visible = ((positions + 1) // config.layer_ratios[number])[:, None]
        if attention.indexer is not None:
            asked = attention.indexer.query(x, latent, angles, index_layout(geometry))
            index = IndexQuery(*(part[:, None] for part in asked))
        q = attention.queries(latent, angles).astype(jnp.float32)[:, None]
        o = layer_attention(
            attention,
            new,
            geometry,
            Queries(q, positions, slots.table, visible, index),
            buffer,
            window=config.window,
            active=slots.sequences,
            options=options,
        )
        return attention.output(o[:, 0].astype(x.dtype), angles), new

    return attend


def _compress(
    inputs: AttendInput,
    slots: Slots,
    frequencies: np.ndarray,
    kernels: str | None,
    compressor: Compressor,
    pool: jax.Array,
    tail: CompressorTail,
    encode: Encode,
) -> tuple[jax.Array, CompressorTail]:
    """Adds the token to its open cell; where that completes the cell, writes its row."""
    ratio, positions = compressor.ratio, inputs.positions
    kv, gate = compressor.project(inputs.x, positions)
    place = positions % ratio
    tail = dataclasses.replace(
        tail,
        kv=tail.kv.at[slots.write, place].set(kv, mode="drop"),
        gate=tail.gate.at[slots.write, place].set(gate, mode="drop"),
    )
    closes = slots.active & (place == ratio - 1)
    number = positions // ratio

    def row() -> jax.Array:
        cells = CellInput(tail.kv[:, None], tail.gate[:, None])
        pooled = pool_after(cells, tail, number > 0, kernels=kernels)[:, 0]
        rows = compressor.finish(pooled, rotary_angles(number * ratio, frequencies))
        return encode(rows)

    form = jax.eval_shape(row)
    # Most steps complete no cell: they skip the pooling, which at ratio 128 is half the layer.
    rows = jax.lax.cond(jnp.any(closes), row, lambda: jnp.zeros(form.shape, form.dtype))
    new = number[:, None], closes[:, None], rows[:, None]
    pool = write_rows(pool, slots.table, *new, kernels=kernels)
    return pool, _close(tail, closes, slots.write)


def _close(tail: CompressorTail, closes: jax.Array, write: jax.Array) -> CompressorTail:
    """Keeps the completed cell's half for the next one."""
    if tail.earlier_kv is None or tail.earlier_gate is None:
        return tail
    width = tail.earlier_kv.shape[-1]
    at = jnp.where(closes, write, write.shape[0])
    return dataclasses.replace(
        tail,
        earlier_kv=tail.earlier_kv.at[at].set(tail.kv[..., :width], mode="drop"),
        earlier_gate=tail.earlier_gate.at[at].set(tail.gate[..., :width], mode="drop"),
    )
