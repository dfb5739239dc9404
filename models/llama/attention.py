"""Projections around attention: everything but the sum over keys.

Source: Llama (arXiv 2302.13971) with grouped queries (arXiv 2305.13245). A stored row is the
rotated keys of all key heads, then their values.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.common import Angles, Linear
from models.llama.config import LlamaConfig


class Attention(nnx.Module):
    """Queries, stored rows and output of one layer."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, dtype=config.dtype, rngs=rngs)

        self.heads, self.kv_heads, self.width = config.heads, config.kv_heads, config.head_dim
        self.q = linear(config.hidden_size, self.heads * self.width)
        self.k = linear(config.hidden_size, self.kv_heads * self.width)
        self.v = linear(config.hidden_size, self.kv_heads * self.width)
        self.o = linear(self.heads * self.width, config.hidden_size)

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return self.width**-0.5

    def queries(
        self, x: Float[Array, "*n hidden"], angles: Angles
    ) -> Float[Array, "*n heads width"]:
        """Rotated queries."""
        return rotate_halves(self.q(x).reshape(*x.shape[:-1], self.heads, self.width), angles)

    def rows(self, x: Float[Array, "*n hidden"], angles: Angles) -> Float[Array, "*n stored"]:
        """What the cache keeps of each token: ``[2 * kv_heads * width]``, keys before values."""
        keys = self.k(x).reshape(*x.shape[:-1], self.kv_heads, self.width)
        keys = rotate_halves(keys, angles).reshape(*x.shape[:-1], -1)
        return jnp.concatenate([keys, self.v(x)], axis=-1)

    def output(self, o: Float[Array, "*n heads width"]) -> Float[Array, "*n hidden"]:
        """The heads' outputs, joined and projected."""
        return self.o(o.reshape(*o.shape[:-2], self.heads * self.width))


def rotate_halves(
    x: Float[Array, "*n heads width"], angles: Angles
) -> Float[Array, "*n heads width"]:
    """Rotates channel ``i`` with channel ``i + width / 2``, as Hugging Face's checkpoints want it.

    ``angles`` (``[*n, width / 2]``) are those of the token, the same for every head. Computed in
    float32, returned in the dtype of ``x``.
    """
    cos, sin = (part[..., None, :] for part in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
