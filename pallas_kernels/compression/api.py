"""Pooling of cells: the channelwise softmax of a compressor (paper section 2.3)."""

from typing import NamedTuple

import jax
from jaxtyping import Array, Bool, Float

from pallas_kernels.compression import reference
from pallas_kernels.implementations import REFERENCE, first_supported


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
    *,
    implementation: str | None = None,
) -> Float[Array, "cells width"]:
    """Rows before norm and rotation, float32: per channel ``sum(softmax(gate) * kv)``.

    Args:
      kv: float32, of one sequence's consecutive cells.
      gate: float32 logits of each channel.
      earlier: with overlap, a cell also pools the cell before it, and this is the one before the
        first: ``channels`` is twice the width, the first half being what a token gives to the next
        cell. None without overlap.
      implementation: see ``pallas_kernels.implementations``.

    Raises:
      NotImplementedError: the named implementation does not support these shapes.
    """

    def by_tpu() -> jax.Array:
        from pallas_kernels.compression import tpu

        return tpu.pool_cells(kv, gate, earlier)

    def by_gpu() -> jax.Array:
        from pallas_kernels.compression import gpu

        return gpu.pool_cells(kv, gate, earlier)

    def by_reference() -> jax.Array:
        return reference.pool_cells(kv, gate, earlier)

    candidates = {"tpu": by_tpu, "gpu": by_gpu, REFERENCE: by_reference}
    return first_supported("compression", candidates, implementation)
