"""INDEXER: an index row beside every compressed row of the routed layers, in the same blocks."""

import dataclasses

import jax
from jaxtyping import Array, Shaped

from hybridkv.geometry import Geometry
from hybridkv.state.capacity import Capacity
from hybridkv.state.compressed import declare_pool
from hybridkv.state.layouts import index_layout
from pallas_kernels.packing import api as packing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexRows:
    """One pool a routed layer, ``[blocks, rows_per_block, stored]``; none elsewhere."""

    layers: tuple[Shaped[Array, "blocks rows stored"] | None, ...]

    @classmethod
    def declare(cls, geometry: Geometry, capacity: Capacity) -> "IndexRows":
        """The pools' declarations."""
        form = packing.stored_form(index_layout(geometry))
        return cls(
            layers=tuple(
                declare_pool(geometry.rows_per_block(layer.ratio), form, capacity)
                if layer.stores_index
                else None
                for layer in geometry.layers
            )
        )
