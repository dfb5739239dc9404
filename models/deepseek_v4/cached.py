"""What the tile step and the decode step share: one layer's compressors and its attention."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Int, Shaped

from hybridkv.geometry import Geometry
from hybridkv.state import per_device
from hybridkv.state.batch import StepOptions
from hybridkv.state.cache import LayerCache
from hybridkv.state.layouts import index_layout, row_layout, window_layout
from hybridkv.state.tail import CompressorTail
from models.deepseek_v4.attention import Attention
from models.deepseek_v4.compressor import CellInput, Compressor
from models.deepseek_v4.indexer import IndexQuery, encode_index_rows
from pallas_kernels.blocks import BlockRows
from pallas_kernels.compression import api as compression_kernel
from pallas_kernels.implementations import REFERENCE
from pallas_kernels.packing import api as packing
from pallas_kernels.sequences import Active

Encode = Callable[[jax.Array], jax.Array]
"""float rows to stored ones."""
CompressOne = Callable[
    [Compressor, jax.Array, CompressorTail, Encode], tuple[jax.Array, CompressorTail]
]
"""(compressor, pool, tail, encode) to the pool and tail after a step's tokens."""


def compress_layer(
    attention: Attention, layer: LayerCache, geometry: Geometry, compress: CompressOne
) -> LayerCache:
    """Runs the main and, in routed layers, the index compressor of one layer."""
    if attention.compressor is None:
        return layer
    assert layer.rows is not None
    assert layer.tail is not None
    encode = functools.partial(packing.encode, format=row_layout(geometry))
    rows, tail = compress(attention.compressor, layer.rows, layer.tail, encode)
    layer = dataclasses.replace(layer, rows=rows, tail=tail)
    if attention.indexer is None:
        return layer
    assert layer.index is not None
    assert layer.index_tail is not None
    encode = functools.partial(encode_index_rows, layout=index_layout(geometry))
    index, index_tail = compress(
        attention.indexer.compressor, layer.index, layer.index_tail, encode
    )
    return dataclasses.replace(layer, index=index, index_tail=index_tail)


def pool_after(
    cells: CellInput, tail: CompressorTail, exists: jax.Array, *, kernels: str | None
) -> Float[Array, "n cells width"]:
    """Pools each sequence's cells; the first overlaps with what its tail kept, if it ``exists``.

    ``kernels`` is that of ``StepOptions``. A step's few cells are not worth a kernel of their own
    everywhere: any name but the reference's takes the first implementation that supports them, and
    on a mesh they are left to XLA.
    """
    name = REFERENCE if kernels == REFERENCE or per_device.on_mesh() else None
    pool = functools.partial(compression_kernel.pool_cells, implementation=name)
    if tail.earlier_kv is None or tail.earlier_gate is None:
        return jax.vmap(lambda c: pool(c.kv, c.gate, None))(cells)
    earlier = compression_kernel.Earlier(tail.earlier_kv, tail.earlier_gate, exists)
    return jax.vmap(lambda c, e: pool(c.kv, c.gate, e))(cells, earlier)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Queries:
    """What a step's tokens ask of one layer: ``n`` sequences, ``t`` consecutive tokens each."""

    q: Float[Array, "n t heads width"]
    first: Int[Array, " n"]
    """Position of the first, counted from the first window row that exists."""
    table: Int[Array, "n blocks"]
    visible: Int[Array, "n t"] | None
    """Compressed rows that each sees; None in a layer that has none."""
    index: IndexQuery | None
    """Of a routed layer."""


def layer_attention(
    attention: Attention,
    layer: LayerCache,
    geometry: Geometry,
    queries: Queries,
    local: Shaped[Array, "n buffer stored"],
    *,
    window: int,
    active: Active,
    options: StepOptions,
) -> Float[Array, "n t heads width"]:
    """Attention of each sequence over its window and the rows it sees, all or the picked ones.

    Args:
      attention: the layer's weights.
      layer: its share of the cache, with this step's rows.
      geometry: of the cache.
      queries: of this step's tokens.
      local: stored window rows, linear in position, up to each sequence's last token.
      window: rows that a query sees, itself included.
      active: sequences that have tokens.
      options: of the step.

    Returns:
      float32; of sequences that are not active, anything finite.
    """
    rows = picks = None
    if queries.visible is not None:
        assert layer.rows is not None
        rows = BlockRows(layer.rows, queries.table)
    if queries.index is not None:
        assert queries.visible is not None
        assert layer.index is not None
        picks = per_device.pick_rows(
            queries.index.queries,
            queries.index.weights,
            BlockRows(layer.index, queries.table),
            queries.visible,
            active=active,
            topk=attention.topk,
            key_block=options.index_block,
            format=index_layout(geometry).format,
            sequential=options.sequential,
            implementation=options.kernels,
        )
    return per_device.attend(
        queries.q,
        local,
        queries.first,
        attention.sink[...],
        active=active,
        window=window,
        scale=attention.scale,
        rows=rows,
        visible=queries.visible,
        picks=picks,
        key_block=options.key_block,
        format=row_layout(geometry).format,
        local_format=window_layout(geometry).format,
        sequential=options.sequential,
        implementation=options.kernels,
    )
