"""The four named checks that a hit passes: pure functions over data.

1. ``block_granularity``: which positions can be resumed from at all.
2. ``kernel_interface``: whether stored bytes mean here what they meant to their writer.
3. ``intersection``: at which of those positions every kind's condition holds together.
4. ``byte_alignment``: whether the device can address blocks of this layout.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Int

from hybridkv.arithmetic import round_down
from hybridkv.errors import UserError
from hybridkv.geometry import Geometry
from hybridkv.kinds import Kind
from hybridkv.prefixes.identity import Identity

ALIGNMENT: Mapping[str, int] = {"cpu": 4, "gpu": 4, "tpu": 4}
"""Bytes of which a block of one layer must be a multiple, by platform: whole 32-bit words, which
is what moves between memories are made of and what every published row format gives."""
MOST_ROWS = 2**31
"""Kernels address rows with int32."""


def block_granularity(geometry: Geometry, tokens: int, tile: int) -> int:
    """The last resume position of a prompt: a tile boundary before its last token.

    The last token is always computed, since its logits are what the request is for.
    """
    return round_down(max(tokens - 1, 0), tile)


def kernel_interface(ours: Identity, theirs: Identity) -> tuple[str, ...]:
    """Parts in which another identity differs; its bytes may be read only if there are none."""
    return ours.differences(theirs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conditions:
    """Where each kind's condition holds, over ``positions``."""

    positions: Int[np.ndarray, " n"]
    """Resume positions, ascending."""
    blocks: Mapping[Kind, Bool[np.ndarray, " n"]]
    """Whether every block before the position holds the kind."""
    snapshots: Mapping[Kind, Bool[np.ndarray, " n"]]
    """Whether a snapshot stands at the position and holds the kind."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Intersection:
    """The longest positions at which kinds hold together; 0 where none is."""

    shared: int
    """All blocks before it hold all their kinds."""
    snapshot: int
    """Not after ``shared``, and a snapshot there holds all its kinds."""


def intersection(conditions: Conditions) -> Intersection:
    """Searches, and never rounds a position that holds to one that nobody stored."""
    whole = np.ones(len(conditions.positions), bool)
    for holds in conditions.blocks.values():
        whole = whole & holds
    copied = whole
    for holds in conditions.snapshots.values():
        copied = copied & holds
    return Intersection(
        shared=_last(conditions.positions, whole), snapshot=_last(conditions.positions, copied)
    )


def _last(positions: Int[np.ndarray, " n"], holds: Bool[np.ndarray, " n"]) -> int:
    at = np.flatnonzero(holds)
    return int(positions[at[-1]]) if len(at) else 0


def byte_alignment(geometry: Geometry, blocks: int, platform: str) -> None:
    """Refuses a layout that the device cannot address.

    Args:
      geometry: whose layers are laid out.
      blocks: blocks of the pools.
      platform: of the device, as JAX names it.

    Raises:
      UserError: a layer's block is misaligned, or its rows outnumber int32.
    """
    if platform not in ALIGNMENT:
        raise UserError(f"no alignment is known for platform {platform!r}: add it to ALIGNMENT")
    unit = ALIGNMENT[platform]
    for number, layer in enumerate(geometry.layers):
        if not layer.stores_rows:
            continue
        rows = geometry.rows_per_block(layer.ratio)
        sizes = {"row": geometry.row_bytes}
        if layer.stores_index:
            sizes["index row"] = geometry.index_row_bytes
        for what, size in sizes.items():
            if rows * size % unit:
                raise UserError(
                    f"layer {number}: a block of {rows} {what}s of {size} bytes is no multiple of "
                    f"the {unit} bytes that {platform} needs: raise cells_per_block"
                )
        if blocks * rows >= MOST_ROWS:
            raise UserError(
                f"layer {number}: {blocks} blocks of {rows} rows exceed int32: use fewer blocks"
            )
