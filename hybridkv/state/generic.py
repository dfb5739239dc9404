"""GenericCache: a hybrid model on uniform raw rows, one a token and layer.

    hybrid geometry --generic_geometry--> every layer ratio 1, without window, tail and index
    one raw row     [ window | main kv, gate | index kv, gate | not there: never read ]
                    0                                         RawFields.width         row_width

It is an ordinary ``Cache`` of that geometry. Nothing of a sequence lives outside its blocks, so a
hit means reuse by itself, no snapshot is ever needed, and a sequence can go back to any token by
setting its length. Compressed rows are made again from raw ones whenever they are read. It is
the baseline to compare the five kinds with, and the fallback for rollback.

Rows are float32 whatever the model's dtype, because compressors pool float32: nothing is rounded,
and a token costs ``row_width * 4`` bytes in every layer, the narrow ones too.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hybridkv import formats
from hybridkv.errors import UserError
from hybridkv.geometry import Geometry, LayerGeometry
from pallas_kernels.blocks import BlockRows


class Field(NamedTuple):
    """Channels ``start ... stop - 1`` of a raw row."""

    start: int
    stop: int

    def of(self, rows: Float[Array, "*n row_width"]) -> Float[Array, "*n width"]:
        """This field of ``rows``."""
        return rows[..., self.start : self.stop]

    @property
    def width(self) -> int:
        """Channels."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellFields:
    """What a token gives to one compressor: ``state_halves`` rows each."""

    kv: Field
    gate: Field | None
    """None at ratio 1, where a row is one token's and nothing is weighed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RawFields:
    """The fields of one layer's raw row, side by side from channel 0; None for what it lacks."""

    window: Field | None
    main: CellFields | None
    index: CellFields | None

    def __iter__(self) -> Iterator[Field]:
        """The fields that are there, in order."""
        cells = [(x.kv, x.gate) for x in (self.main, self.index) if x is not None]
        every = (self.window, *(field for pair in cells for field in pair))
        return (field for field in every if field is not None)

    @property
    def width(self) -> int:
        """Channels that this layer uses."""
        return sum(field.width for field in self)


def raw_fields(geometry: Geometry, layer: int) -> RawFields:
    """Where the raw row of ``layer`` of a hybrid ``geometry`` holds what.

    A layer that reads the rows of another has no compressor and so only its window.
    """
    own, at = geometry.layers[layer], 0

    def take(width: int) -> Field:
        nonlocal at
        at += width
        return Field(at - width, at)

    def cell(width: int) -> CellFields:
        channels = own.state_halves * width
        return CellFields(kv=take(channels), gate=take(channels) if own.compresses else None)

    return RawFields(
        window=take(geometry.row_width) if own.window else None,
        main=cell(geometry.row_width) if own.stores_rows else None,
        index=cell(geometry.index_width) if own.stores_index else None,
    )


def generic_geometry(geometry: Geometry, *, block_tokens: int = 16) -> Geometry:
    """The degenerate geometry of raw rows, as wide as those of the widest layer.

    Args:
      geometry: of the hybrid model.
      block_tokens: tokens of one block; no multiple of anything. Tiles are multiples of it.

    Raises:
      UserError: ``block_tokens`` is not positive.
    """
    if block_tokens < 1:
        raise UserError(f"block_tokens is {block_tokens}: give at least 1 token a block")
    count = len(geometry.layers)
    return Geometry(
        layers=(LayerGeometry(ratio=1),) * count,
        row_width=max(raw_fields(geometry, layer).width for layer in range(count)),
        row_format=formats.FLOAT32,
        cells_per_block=block_tokens,
    )


def join_fields(
    fields: RawFields, parts: Sequence[Float[Array, "*n _"]], row_width: int
) -> Float[Array, "*n row_width"]:
    """float32 raw rows from their fields in order; channels that the layer lacks are zero.

    Raises:
      ValueError: ``parts`` are not as wide as ``fields``.
    """
    given = [part.shape[-1] for part in parts]
    wanted = [field.width for field in fields]
    if given != wanted:
        raise ValueError(f"parts of {given} channels for fields of {wanted}")
    rows = jnp.concatenate([part.astype(jnp.float32) for part in parts], axis=-1)
    return jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, row_width - fields.width)])


def read_tokens(
    rows: BlockRows, first: Int[Array, ""], count: int, end: Int[Array, ""]
) -> Float[Array, "count row_width"]:
    """Raw rows of positions ``first ... first + count - 1`` of one sequence, through its table.

    ``first`` may be negative. Rows before position 0 and from ``end`` on are zero, by selection.
    """
    position = first + jnp.arange(count, dtype=jnp.int32)
    place, per = jnp.maximum(position, 0), rows.rows_per_block
    block = rows.table.at[place // per].get(mode="clip")
    stored = rows.pool.at[block, place % per].get(mode="clip")
    exists = (position >= 0) & (position < end)
    return jnp.where(exists[:, None], stored, 0.0)
