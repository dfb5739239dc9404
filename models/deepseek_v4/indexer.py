"""The lightning indexer: index queries, head weights and its own compressor.

Source: paper section 2.3.1, release ``model.py`` (``Indexer``). Scoring and the streaming top-k are
in ``pallas_kernels/index_scores``.

Where index rows are packed, a Hadamard rotation first spreads each channel over all, so that none
is much larger than the others of its group, and queries are rounded like rows. The rotation is
orthonormal: without rounding it would change nothing, so it is left out for plain formats.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Shaped

from models.common import Angles, Linear, rotate
from models.deepseek_v4.compressor import Compressor
from models.deepseek_v4.config import DeepseekV4Config
from pallas_kernels.packing import api as packing
from pallas_kernels.packing.layout import RowLayout


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
        layout: RowLayout | None = None,
    ) -> IndexQuery:
        """Rotated queries, to be compared with rows of ``layout``, and the heads' weights.

        Weights are scaled by ``(width * heads) ** -0.5``. Without a layout rows are plain.
        """
        queries = self.q_b(latent).reshape(*x.shape[:-1], self.heads, self.width)
        weights = self.weights(x).astype(jnp.float32) * (self.width * self.heads) ** -0.5
        queries = rotate(queries, Angles(*(a[..., None, :] for a in angles)))
        if layout is not None and layout.packed:
            queries = packing.decode(encode_index_rows(queries, layout), layout)
        return IndexQuery(queries, weights)


def encode_index_rows(
    rows: Float[Array, "*n width"], layout: RowLayout
) -> Shaped[Array, "*n stored"]:
    """Stored form of rotated index rows: as they are, or spread and packed."""
    return packing.encode(hadamard(rows) if layout.packed else rows, layout)


def hadamard(x: Float[Array, "*n width"]) -> Float[Array, "*n width"]:
    """The product with Sylvester's Hadamard matrix and ``width ** -0.5``, its own inverse.

    Computed in float32, returned in the dtype of ``x``.

    Raises:
      ValueError: the width is not a power of two.
    """
    width = x.shape[-1]
    if width & (width - 1) or not width:
        raise ValueError(f"a Hadamard rotation needs a width that is a power of two, got {width}")
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < width:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    # A product rather than the transform's steps, because accelerators have units for products. Its
    # factors are 1 and -1, so that only sums are rounded.
    spread = jnp.matmul(x.astype(jnp.float32), jnp.asarray(matrix)) * width**-0.5
    return spread.astype(x.dtype)
