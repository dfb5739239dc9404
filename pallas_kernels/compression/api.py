"""Pooling of cells: the channelwise softmax of a compressor (paper section 2.3)."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float

from pallas_kernels.compression import reference


class Earlier(NamedTuple):
    """What the cell before the first one left for it."""

    kv: jax.Array
    """float32 ``[ratio, width]``"""
    gate: jax.Array
    """float32 ``[ratio, width]``"""
    exists: Bool[Array, ""]
    """False at the start of a sequence; then the other fields are not read."""


def pool_cells(
    kv: Float[Array, "cells ratio channels"],
    gate: Float[Array, "cells ratio channels"],
    earlier: Earlier | None,
) -> Float[Array, "cells width"]:
    """Rows before norm and rotation, float32: per channel ``sum(softmax(gate) * kv)``.

    With ``earlier`` (overlap), a cell also pools the cell before it: ``channels`` is twice the
    width, the first half being what a token gives to the next cell.
    """
    return reference.pool_cells(kv, gate, earlier)
