r"""The whole device cache of one model: pools, sequence states, block tables and lengths.

    block table [slots, blocks_per_sequence] ----> COMPRESSED  [blocks, rows, width] a layer
        lengths [slots]                     \---> INDEXER     [blocks, rows, width] a routed layer
           |
           +--> slot --> WINDOW [slots, window, width], TAIL [slots, ratio, channels] a layer

Layers are a tuple, not a leading axis: as loop inputs and outputs they would be copied each step.
A step that takes a cache DONATES it: use the one it returns.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from hybridkv.geometry import Geometry
from hybridkv.kinds import Kind
from hybridkv.state import leaf
from hybridkv.state.capacity import Capacity
from hybridkv.state.compressed import CompressedRows
from hybridkv.state.indexer import IndexRows
from hybridkv.state.leaf import Leaf
from hybridkv.state.sequence import SequenceState
from hybridkv.state.tail import CompressorTail, Tails
from hybridkv.state.window import WindowRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerCache:
    """One layer's share of a cache; what it does not keep is None."""

    rows: jax.Array | None
    index: jax.Array | None
    window: jax.Array | None
    tail: CompressorTail | None
    index_tail: CompressorTail | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """Everything a step reads and writes beside parameters."""

    compressed: CompressedRows
    indexer: IndexRows
    sequence: SequenceState
    block_table: Int[Array, "slots blocks_per_sequence"]
    """Block of each ``block_tokens`` tokens; an unassigned entry is the number of blocks."""
    lengths: Int[Array, " slots"]
    """Tokens each sequence has consumed."""
    geometry: Geometry = dataclasses.field(metadata={"static": True})

    @classmethod
    def declare(cls, geometry: Geometry, capacity: Capacity) -> "Cache":
        """Declarations of all arrays."""
        table: Any = Leaf(
            shape=(capacity.slots, capacity.blocks_per_sequence),
            dtype=jnp.int32,
            axes=("slots", None),
            fill=capacity.blocks,
        )
        lengths: Any = Leaf(shape=(capacity.slots,), dtype=jnp.int32, axes=("slots",))
        return cls(
            compressed=CompressedRows.declare(geometry, capacity),
            indexer=IndexRows.declare(geometry, capacity),
            sequence=SequenceState.declare(geometry, capacity),
            block_table=table,
            lengths=lengths,
            geometry=geometry,
        )

    @classmethod
    def abstract(cls, geometry: Geometry, capacity: Capacity) -> "Cache":
        """The cache as ``ShapeDtypeStruct``; allocates nothing."""
        return leaf.abstract(cls.declare(geometry, capacity))

    @classmethod
    def shardings(
        cls,
        geometry: Geometry,
        capacity: Capacity,
        mesh: jax.sharding.Mesh,
        rules: Mapping[str, str] = leaf.DEFAULT_RULES,
    ) -> "Cache":
        """The cache as ``NamedSharding``; allocates nothing."""
        return leaf.shardings(cls.declare(geometry, capacity), mesh, rules)

    @classmethod
    def init(cls, geometry: Geometry, capacity: Capacity, placement: Any | None = None) -> "Cache":
        """An empty cache without assigned blocks; ``placement`` as in ``leaf.init``."""
        return leaf.init(cls.declare(geometry, capacity), placement)

    @property
    def slots(self) -> int:
        """Sequences that live at once."""
        return self.lengths.shape[0]

    def layer(self, number: int) -> LayerCache:
        """One layer's share; shared rows are its owner's."""
        owner = self.geometry.owner(number)
        return LayerCache(
            rows=self.compressed.layers[owner],
            index=self.indexer.layers[owner],
            window=self.sequence.window.layers[number],
            tail=self.sequence.tails.main[number],
            index_tail=self.sequence.tails.index[number],
        )

    def with_layers(self, layers: tuple[LayerCache, ...], lengths: jax.Array) -> "Cache":
        """The cache with every layer's share and the lengths replaced."""
        owns = [self.geometry.owner(number) == number for number in range(len(layers))]
        return dataclasses.replace(
            self,
            compressed=CompressedRows(
                layers=tuple(x.rows if o else None for x, o in zip(layers, owns, strict=True))
            ),
            indexer=IndexRows(
                layers=tuple(x.index if o else None for x, o in zip(layers, owns, strict=True))
            ),
            sequence=SequenceState(
                window=WindowRows(layers=tuple(x.window for x in layers)),
                tails=Tails(
                    main=tuple(x.tail for x in layers),
                    index=tuple(x.index_tail for x in layers),
                ),
            ),
            lengths=lengths,
        )


def assign_in_order(cache: Cache) -> Cache:
    """Gives slot ``s`` blocks ``s * n ... (s + 1) * n - 1``, ``n`` being the table's length.

    Raises:
      ValueError: the pools hold fewer blocks than all tables together.
    """
    slots, each = cache.block_table.shape
    blocks = next((pool.shape[0] for pool in cache.compressed.layers if pool is not None), None)
    if blocks is not None and blocks < slots * each:
        raise ValueError(f"{slots} sequences of {each} blocks do not fit {blocks} blocks")
    table = jnp.arange(slots * each, dtype=jnp.int32).reshape(slots, each)
    return dataclasses.replace(cache, block_table=table)


def cache_bytes(geometry: Geometry, capacity: Capacity) -> Mapping[Kind, int]:
    """Bytes of a cache's arrays by kind."""
    declared = Cache.declare(geometry, capacity)
    return {
        Kind.COMPRESSED: leaf.tree_bytes(declared.compressed),
        Kind.INDEXER: leaf.tree_bytes(declared.indexer),
        Kind.WINDOW: leaf.tree_bytes(declared.sequence.window),
        Kind.TAIL: leaf.tree_bytes(declared.sequence.tails),
    }
