"""What the tile step and the decode step share: one layer's compressors and one sequence's keys."""

import dataclasses
from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int

from hybridkv.geometry import Geometry
from hybridkv.state.batch import StepOptions
from hybridkv.state.cache import LayerCache
from hybridkv.state.tail import CompressorTail
from models.deepseek_v4.attention import Attention
from models.deepseek_v4.compressor import CellInput, Compressor
from pallas_kernels.attention import api as attention_kernel
from pallas_kernels.blocks import BlockRows
from pallas_kernels.compression import api as compression_kernel
from pallas_kernels.index_scores import api as index_kernel

CompressOne = Callable[
    [Compressor, jax.Array, CompressorTail, str], tuple[jax.Array, CompressorTail]
]
"""(compressor, pool, tail, stored format) to the pool and tail after a step's tokens."""


def compress_layer(
    attention: Attention, layer: LayerCache, geometry: Geometry, compress: CompressOne
) -> LayerCache:
    """Runs the main and, in routed layers, the index compressor of one layer."""
    if attention.compressor is None:
        return layer
    assert layer.rows is not None
    assert layer.tail is not None
    rows, tail = compress(attention.compressor, layer.rows, layer.tail, geometry.row_format.name)
    layer = dataclasses.replace(layer, rows=rows, tail=tail)
    if attention.indexer is None:
        return layer
    assert layer.index is not None
    assert layer.index_tail is not None
    index, index_tail = compress(
        attention.indexer.compressor, layer.index, layer.index_tail, geometry.index_format.name
    )
    return dataclasses.replace(layer, index=index, index_tail=index_tail)


def pool_after(
    cells: CellInput, tail: CompressorTail, exists: jax.Array
) -> Float[Array, "n cells width"]:
    """Pools each sequence's cells; the first overlaps with what its tail kept, if it ``exists``."""
    if tail.earlier_kv is None or tail.earlier_gate is None:
        return jax.vmap(lambda c: compression_kernel.pool_cells(c.kv, c.gate, None))(cells)
    earlier = compression_kernel.Earlier(tail.earlier_kv, tail.earlier_gate, exists)
    return jax.vmap(lambda c, e: compression_kernel.pool_cells(c.kv, c.gate, e))(cells, earlier)


def sequence_attention(
    attention: Attention,
    layer: LayerCache,
    geometry: Geometry,
    window: int,
    options: StepOptions,
) -> Callable[..., jax.Array]:
    """Attention of one sequence's consecutive queries, for ``map_sequences``."""

    def function(
        q: Float[Array, "t heads width"],
        local: Float[Array, "buffer width"],
        first: Int[Array, ""],
        table: Int[Array, " blocks"] | None = None,
        visible: Int[Array, " t"] | None = None,
        index_queries: Float[Array, "t index_heads index_width"] | None = None,
        index_weights: Float[Array, "t index_heads"] | None = None,
    ) -> Float[Array, "t heads width"]:
        rows = picks = None
        if layer.rows is not None and table is not None:
            rows = BlockRows(layer.rows, table)
        if index_queries is not None:
            assert index_weights is not None
            assert visible is not None
            assert layer.index is not None
            assert table is not None
            picks = index_kernel.pick_rows(
                index_queries,
                index_weights,
                BlockRows(layer.index, table),
                visible,
                topk=attention.topk,
                key_block=options.index_block,
                format=geometry.index_format.name,
            )
        return attention_kernel.attend(
            q,
            local,
            first,
            attention.sink[...],
            window=window,
            scale=attention.scale,
            rows=rows,
            visible=visible,
            picks=picks,
            key_block=options.key_block,
            format=geometry.row_format.name,
        )

    return function
