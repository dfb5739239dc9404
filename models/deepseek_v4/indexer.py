"""The lightning indexer: index queries, head weights and its own compressor.

Source: paper section 2.3.1, release ``model.py`` (``Indexer``). Scoring and the streaming top-k are
in ``pallas_kernels/index_scores``.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.common import Angles, Linear, rotate
from models.deepseek_v4.compressor import Compressor
from models.deepseek_v4.config import DeepseekV4Config


class IndexQuery(NamedTuple):
    """``queries`` ``[*n, index_heads, index_dim]``; ``weights`` float32 ``[*n, index_heads]``."""

    queries: jax.Array
    weights: jax.Array


class Indexer(nnx.Module):
    """Makes index queries from the attention's query latent."""

    def __init__(self, config: DeepseekV4Config, *, ratio: int, rngs: nnx.Rngs) -> None:
        heads, width = config.index_heads, config.index_dim
        self.compressor = Compressor(config, width=width, ratio=ratio, overlap=True, rngs=rngs)
        self.q_b = Linear(config.query_rank, heads * width, dtype=config.dtype, rngs=rngs)
        self.weights = Linear(config.hidden_size, heads, dtype=config.dtype, rngs=rngs)
        self.heads, self.width = heads, width

    def query(
        self,
        x: Float[Array, "*n hidden"],
        latent: Float[Array, "*n rank"],
        angles: Angles,
    ) -> IndexQuery:
        """Rotated queries and head weights scaled by ``(width * heads) ** -0.5``."""
        queries = self.q_b(latent).reshape(*x.shape[:-1], self.heads, self.width)
        weights = self.weights(x).astype(jnp.float32) * (self.width * self.heads) ** -0.5
        return IndexQuery(rotate(queries, Angles(*(a[..., None, :] for a in angles))), weights)
