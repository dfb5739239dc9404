"""The compressor: what a token gives to its cell, and what a pooled cell becomes.

Source: paper section 2.3, release ``model.py`` (``Compressor``). Pooling itself is in
``pallas_kernels/compression``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from models.common import Angles, Linear, RMSNorm, rotate
from models.deepseek_v4.config import DeepseekV4Config


class CellInput(NamedTuple):
    """float32 ``[*n, halves * width]`` each: value and channelwise gate logit of a token.

    With overlap the first half of the channels is for the next cell, the second for the own one.
    """

    kv: jax.Array
    gate: jax.Array


class Compressor(nnx.Module):
    """Projects tokens for pooling and finishes pooled cells into rows."""

    def __init__(
        self, config: DeepseekV4Config, *, width: int, ratio: int, overlap: bool, rngs: nnx.Rngs
    ) -> None:
        channels = width * (2 if overlap else 1)
        # float32 whatever the model's dtype: the release pools in float32.
        self.kv = Linear(config.hidden_size, channels, dtype="float32", rngs=rngs)
        self.gate = Linear(config.hidden_size, channels, dtype="float32", rngs=rngs)
        self.position_bias = nnx.Param(jnp.zeros((ratio, channels), jnp.float32))
        self.norm = RMSNorm(width, eps=config.norm_eps, dtype=config.dtype)
        self.ratio = ratio
        self.dtype = config.dtype

    def project(self, x: Float[Array, "*n hidden"], positions: Int[Array, "*n"]) -> CellInput:
        """What each token gives; gates carry the position bias of their place in the cell."""
        wide = x.astype(jnp.float32)
        bias = self.position_bias[...][positions % self.ratio]
        return CellInput(self.kv(wide), self.gate(wide) + bias)

    def finish(self, pooled: Float[Array, "*n width"], angles: Angles) -> Float[Array, "*n width"]:
        """Rows from pooled cells: norm, then rotation at the cell's first position."""
        return rotate(self.norm(pooled.astype(self.dtype)), angles)
