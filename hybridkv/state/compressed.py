"""COMPRESSED: immutable rows of complete cells, in blocks that all sequences share."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Bool, Int, Shaped

from hybridkv.geometry import Geometry
from hybridkv.state import per_device
from hybridkv.state.capacity import Capacity
from hybridkv.state.layouts import row_layout
from hybridkv.state.leaf import Leaf
from pallas_kernels.implementations import REFERENCE
from pallas_kernels.packing import api as packing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedRows:
    """One pool a layer, ``[blocks, rows_per_block, stored]``; none where a layer stores none."""

    layers: tuple[Shaped[Array, "blocks rows stored"] | None, ...]

    @classmethod
    def declare(cls, geometry: Geometry, capacity: Capacity) -> "CompressedRows":
        """The pools' declarations."""
        form = packing.stored_form(row_layout(geometry))
        return cls(
            layers=tuple(
                declare_pool(geometry.rows_per_block(layer.ratio), form, capacity)
                if layer.stores_rows
                else None
                for layer in geometry.layers
            )
        )


def declare_pool(rows_per_block: int, form: jax.ShapeDtypeStruct, capacity: Capacity) -> Any:
    """One layer's pool, a ``Leaf``."""
    return Leaf(
        shape=(capacity.blocks, rows_per_block, *form.shape),
        dtype=form.dtype,
        axes=("blocks", "rows", "width"),
    )


def write_rows(
    pool: Shaped[Array, "blocks rows stored"],
    table: Int[Array, "*n blocks_per_sequence"],
    numbers: Int[Array, "*n count"],
    whole: Bool[Array, "*n count"],
    rows: Shaped[Array, "*n count stored"],
    *,
    kernels: str | None = REFERENCE,
) -> Shaped[Array, "blocks rows stored"]:
    """Writes stored ``rows`` as row ``numbers`` of sequences with block tables ``table``.

    Rows that are not ``whole`` go nowhere: their index is past the pool and the write is dropped.
    Numbers count up along a sequence. ``kernels`` is that of ``StepOptions``.
    """
    if table.ndim == 1:
        table, numbers, whole, rows = (x[None] for x in (table, numbers, whole, rows))
    return per_device.write_rows(pool, table, numbers, whole, rows, implementation=kernels)
