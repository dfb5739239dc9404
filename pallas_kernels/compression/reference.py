"""XLA implementation of ``pool_cells``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Float

if TYPE_CHECKING:
    from pallas_kernels.compression.api import Earlier


def pool_cells(
    kv: Float[Array, "cells ratio channels"],
    gate: Float[Array, "cells ratio channels"],
    earlier: Earlier | None,
) -> Float[Array, "cells width"]:
    """See ``api.pool_cells``."""
    if earlier is not None:
        width = kv.shape[-1] // 2
        first_kv = jnp.where(earlier.exists, earlier.kv, 0.0)[None]
        first_gate = jnp.where(earlier.exists, earlier.gate, -jnp.inf)[None]
        before_kv = jnp.concatenate([first_kv, kv[:-1, :, :width]])
        before_gate = jnp.concatenate([first_gate, gate[:-1, :, :width]])
        kv = jnp.concatenate([before_kv, kv[..., width:]], axis=1)
        gate = jnp.concatenate([before_gate, gate[..., width:]], axis=1)
    weights = jnp.exp(gate - jnp.max(gate, axis=1, keepdims=True))  # own gates are finite
    return jnp.sum(weights * kv, axis=1) / jnp.sum(weights, axis=1)
