"""Tile and decode steps over a GenericCache: raw rows in blocks, compressed again when read.

    token --> raw row --write--> blocks --read a group of cells--> pool, norm, rotate --> scratch
                                   |                                                         |
                                   +---- last W - 1 rows and own --> attention <--key blocks--+

Each layer of each step makes all compressed rows of the context anew, in groups of cells of one
size in absolute order whose number is data: a step costs O(context), a decode step too. The
scratch of a layer holds one sequence's compressed rows while that layer runs. What is attended is
found as in ``tile.py``, by the same functions, so the two differ only in where rows come from.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from hybridkv.arithmetic import cdiv
from hybridkv.geometry import Geometry
from hybridkv.state.batch import DecodeBatch, StepOptions, TileBatch
from hybridkv.state.cache import Cache, LayerCache
from hybridkv.state.compressed import write_rows
from hybridkv.state.generic import CellFields, RawFields, join_fields, raw_fields, read_tokens
from hybridkv.state.lanes import lanes_in_turn
from hybridkv.state.tokens import Tokens
from models.common import rotary_angles
from models.deepseek_v4.attention import Attention
from models.deepseek_v4.cached import Queries, layer_attention
from models.deepseek_v4.compressor import Compressor
from models.deepseek_v4.config import DeepseekV4Config
from models.deepseek_v4.indexer import IndexQuery
from models.deepseek_v4.model import AttendInput, DeepseekV4
from pallas_kernels.blocks import BlockRows
from pallas_kernels.compression import api as compression_kernel
from pallas_kernels.implementations import REFERENCE
from pallas_kernels.sequences import Active, map_sequences


@dataclasses.dataclass(frozen=True, kw_only=True)
class RawLayer:
    """What one layer's raw rows are made of."""

    fields: RawFields
    window: int
    overlap: bool
    """Whether a cell pools the one before it too."""
    frequencies: np.ndarray
    """float32 ``[rope / 2]`` radians a token, by which compressed rows are rotated."""

    @classmethod
    def of(cls, config: DeepseekV4Config, number: int) -> "RawLayer":
        """Layer ``number`` of a model."""
        hybrid = config.geometry()
        return cls(
            fields=raw_fields(hybrid, number),
            window=hybrid.layers[number].window,
            overlap=hybrid.layers[number].overlap,
            frequencies=config.layer_rope(number).frequencies(config.rope_dim),
        )


def tile_step(
    model: DeepseekV4, batch: TileBatch, cache: Cache, options: StepOptions
) -> tuple[Float[Array, "lanes vocab"], Cache]:
    """Consumes each lane's tokens ``starts ... ends - 1``; DONATES cache when jitted by a caller.

    Returns float32 logits of each lane's last token (``[lanes, tile, vocab]`` of all tokens with
    ``options.all_logits``), and the cache at ``ends``. Idle lanes give zeros or garbage. Rows of
    tokens before ``write_from`` are read but not written; ``known_from`` has no meaning, since
    there is no state that could be absent.
    """

    def step(batch: TileBatch, cache: Cache) -> tuple[jax.Array, Cache]:
        tokens = Tokens.of_tile(batch, cache)
        hidden, after = _forward(model, tokens, cache, options, rows=options.expert_rows)
        return model.logits(hidden if options.all_logits else tokens.last(hidden)), after

    if options.sequential and options.lanes > 1:
        return lanes_in_turn(step, batch, cache)
    return step(batch, cache)


def decode_step(
    model: DeepseekV4, batch: DecodeBatch, cache: Cache, options: StepOptions
) -> tuple[Float[Array, "slots vocab"], Cache]:
    """Consumes one token of every active slot; DONATES cache when jitted by a caller.

    Returns float32 logits (garbage for idle slots) and the cache one token later.
    """
    hidden, cache = _forward(model, Tokens.of_decode(batch, cache), cache, options, rows=1)
    return model.logits(hidden[:, 0]), cache


def _forward(
    model: DeepseekV4,
    tokens: Tokens,
    cache: Cache,
    options: StepOptions,
    *,
    rows: int,
) -> tuple[Float[Array, "n t hidden"], Cache]:
    config = model.config
    ends = jnp.where(tokens.ends > tokens.starts, tokens.ends, 0)  # rows there are; 0 when idle

    def attend(inputs: AttendInput, carry: tuple[int, LayerCache]) -> tuple[jax.Array, LayerCache]:
        number, layer = carry
        attention, x, positions, angles = inputs
        assert layer.rows is not None
        latent = attention.latent(x)
        own = RawLayer.of(config, number)
        raw = join_fields(own.fields, _raw_parts(inputs), cache.geometry.row_width)
        write = tokens.real & (positions >= tokens.write_from[:, None])
        pool = write_rows(layer.rows, tokens.table, positions, write, raw)
        longest = None if options.sequential else jnp.max(ends)
        function = _sequence_attention(attention, own, pool, cache.geometry, longest, options)
        arguments = [
            attention.queries(latent, angles).astype(jnp.float32),
            tokens.table,
            positions,
            ends,
        ]
        if attention.indexer is not None:
            arguments += list(attention.indexer.query(x, latent, angles))
        o = map_sequences(
            function,
            tuple(arguments),
            tokens.active,
            sequential=options.sequential,
        )
        return attention.output(o.astype(x.dtype), angles), dataclasses.replace(layer, rows=pool)

    layers = [cache.layer(number) for number in range(config.layers)]
    hidden, after = model(
        tokens.tokens,
        tokens.numbers,
        attend,
        tuple(enumerate(layers)),
        rows=rows,
        active=tokens.real,
    )
    return hidden, cache.with_layers(after, tokens.lengths(cache.lengths))


def _raw_parts(inputs: AttendInput) -> list[jax.Array]:
    """The fields of ``raw_fields`` that a layer gives each token, in its order."""
    attention, x, positions, angles = inputs
    parts = [attention.rows(x, angles)]
    for compressor in _compressors(attention):
        kv, gate = compressor.project(x, positions)
        parts += [kv, gate] if compressor.ratio > 1 else [kv]
    return parts


def _compressors(attention: Attention) -> list[Compressor]:
    """The main and the index compressor, as far as the layer has them."""
    found = [] if attention.compressor is None else [attention.compressor]
    return found if attention.indexer is None else [*found, attention.indexer.compressor]


def _sequence_attention(
    attention: Attention,
    own: RawLayer,
    pool: Float[Array, "blocks rows width"],
    geometry: Geometry,
    longest: Int[Array, ""] | None,
    options: StepOptions,
) -> Callable[..., jax.Array]:
    """Attention of one sequence's consecutive queries, for ``map_sequences``.

    Always by the reference: rows are in a scratch of this sequence's own.

    Where sequences run side by side, ``longest`` is the length of the longest: one trip count for
    all, without which every trip would copy the scratch. Rows past a sequence's end are not read.
    """

    def function(
        q: Float[Array, "t heads width"],
        table: Int[Array, " blocks"],
        positions: Int[Array, " t"],
        end: Int[Array, ""],
        *index_query: jax.Array,
    ) -> Float[Array, "t heads width"]:
        assert own.fields.window is not None
        raw, first, earlier = BlockRows(pool, table), positions[0], own.window - 1
        count = earlier + q.shape[0]
        buffer = jax.lax.cond(
            # A branch of its own: XLA would fuse the write of this step's rows into a plain read,
            # and copy the whole pool for it.
            end > 0,
            lambda: read_tokens(raw, first - earlier, count, end),
            lambda: jnp.zeros((count, pool.shape[-1]), pool.dtype),
        )
        made = LayerCache(rows=None, index=None, window=None, tail=None, index_tail=None)
        visible, place = None, table
        if attention.compressor is not None:
            ratio = attention.compressor.ratio
            until = end if longest is None else longest
            scratch = _read_cells(attention, own, raw, end, until, options)
            index = None if attention.indexer is None else scratch[1]
            made = dataclasses.replace(made, rows=scratch[0], index=index)
            place = jnp.arange(scratch[0].shape[0], dtype=jnp.int32)  # groups stand in order
            visible = jnp.minimum(positions + 1, end) // ratio
        asked = IndexQuery(*index_query) if index_query else None
        one = jax.tree.map(lambda x: x[None], Queries(q, first, place, visible, asked))
        local = own.fields.window.of(buffer)[None]
        return layer_attention(
            attention,
            made,
            geometry,
            one,
            local,
            window=own.window,
            active=Active.all(1),
            options=dataclasses.replace(options, kernels=REFERENCE),
        )[0]

    return function


def _read_cells(
    attention: Attention,
    own: RawLayer,
    raw: BlockRows,
    end: Int[Array, ""],
    until: Int[Array, ""],
    options: StepOptions,
) -> list[Float[Array, "groups cells width"]]:
    """Compressed rows (and index rows) of every whole cell before ``end``, float32.

    Groups are as many cells as a tile holds, one at least; those past ``until`` stay zero. Only
    rows of whole cells before ``end`` mean anything.
    """
    compressors = _compressors(attention)
    ratio = compressors[0].ratio
    group = max(options.tile // ratio, 1)
    groups = max(cdiv(raw.table.shape[0] * raw.rows_per_block // ratio, group), 1)
    before = ratio if own.overlap else 0
    places = [cell for cell in (own.fields.main, own.fields.index) if cell is not None]

    def body(number: jax.Array, scratch: list[jax.Array]) -> list[jax.Array]:
        cell = number * group
        rows = read_tokens(raw, cell * ratio - before, before + group * ratio, end)
        angles = rotary_angles((cell + jnp.arange(group, dtype=jnp.int32)) * ratio, own.frequencies)
        made = [
            compressor.finish(_pool(place, rows, ratio, group, cell > 0), angles)
            for compressor, place in zip(compressors, places, strict=True)
        ]
        return [
            jax.lax.dynamic_update_index_in_dim(all_, new.astype(jnp.float32), number, 0)
            for all_, new in zip(scratch, made, strict=True)
        ]

    widths = [compressor.norm.weight.shape[-1] for compressor in compressors]
    empty = [jnp.zeros((groups, group, width), jnp.float32) for width in widths]
    trips = (until // ratio + group - 1) // group
    return jax.lax.fori_loop(0, trips, body, empty)


def _pool(
    place: CellFields,
    rows: Float[Array, "tokens row_width"],
    ratio: int,
    group: int,
    exists: Bool[Array, ""],
) -> Float[Array, "cells width"]:
    """Pools the cells of a group; with overlap, ``rows`` begin with the cell before them."""
    kv = place.kv.of(rows)
    if place.gate is None:
        return kv
    gate = place.gate.of(rows)
    before = rows.shape[0] - group * ratio
    own_kv, own_gate = (x[before:].reshape(group, ratio, -1) for x in (kv, gate))
    earlier = None
    if before:
        half = kv.shape[-1] // 2
        earlier = compression_kernel.Earlier(kv[:before, :half], gate[:before, :half], exists)
    return compression_kernel.pool_cells(own_kv, own_gate, earlier, implementation=REFERENCE)
