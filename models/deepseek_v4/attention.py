"""Projections around attention: everything but the sum over keys.

Source: paper section 2.3, release ``model.py`` (``Attention``). One key row serves all heads and is
key and value at once.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.common import Angles, Linear, RMSNorm, gathered, rms_normalize, rotate
from models.deepseek_v4.compressor import Compressor
from models.deepseek_v4.config import SLIDING, SPARSE, DeepseekV4Config
from models.deepseek_v4.indexer import Indexer


class Attention(nnx.Module):
    """Queries, window rows and output of one layer, with its compressor and indexer if any."""

    def __init__(self, config: DeepseekV4Config, layer: int, rngs: nnx.Rngs) -> None:
        kind, ratio = config.layer_kinds[layer], config.layer_ratios[layer]
        heads, width, dtype = config.heads, config.head_dim, config.dtype
        self.q_a = Linear(config.hidden_size, config.query_rank, dtype=dtype, rngs=rngs)
        self.q_norm = RMSNorm(config.query_rank, eps=config.norm_eps, dtype=dtype)
        # Each device attends for its own heads.
        self.q_b = Linear(config.query_rank, heads * width, dtype=dtype, rngs=rngs, gather=False)
        self.kv = Linear(config.hidden_size, width, dtype=dtype, rngs=rngs)
        self.kv_norm = RMSNorm(width, eps=config.norm_eps, dtype=dtype)
        group = heads * width // config.output_groups
        init = nnx.initializers.truncated_normal(stddev=group**-0.5)
        shape = (config.output_groups, config.output_rank, group)
        self.o_a = nnx.Param(init(rngs.params(), shape, jnp.dtype(dtype)))
        latent = config.output_groups * config.output_rank
        self.o_b = Linear(latent, config.hidden_size, dtype=dtype, rngs=rngs)
        self.sink = nnx.Param(jnp.zeros((heads,), jnp.float32))
        self.compressor = nnx.data(
            None
            if kind == SLIDING
            else Compressor(config, width=width, ratio=ratio, overlap=kind == SPARSE, rngs=rngs)
        )
        self.indexer = nnx.data(Indexer(config, ratio=ratio, rngs=rngs) if kind == SPARSE else None)
        self.heads, self.width, self.groups = heads, width, config.output_groups
        self.norm_eps = config.norm_eps
        self.topk = config.index_topk

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return self.width**-0.5

    def latent(self, x: Float[Array, "*n hidden"]) -> Float[Array, "*n rank"]:
        """The query latent, shared with the indexer."""
        return self.q_norm(self.q_a(x))

    def queries(
        self, latent: Float[Array, "*n rank"], angles: Angles
    ) -> Float[Array, "*n heads width"]:
        """Queries: weightless norm per head, then rotation."""
        q = self.q_b(latent).reshape(*latent.shape[:-1], self.heads, self.width)
        q = rms_normalize(q, self.norm_eps).astype(latent.dtype)
        return rotate(q, Angles(*(a[..., None, :] for a in angles)))

    def rows(self, x: Float[Array, "*n hidden"], angles: Angles) -> Float[Array, "*n width"]:
        """Window rows."""
        return rotate(self.kv_norm(self.kv(x)), angles)

    def output(
        self, o: Float[Array, "*n heads width"], angles: Angles
    ) -> Float[Array, "*n hidden"]:
        """Inverse rotation at the query's position, grouped low-rank output."""
        o = rotate(o, Angles(*(a[..., None, :] for a in angles)), inverse=True)
        grouped = o.reshape(*o.shape[:-2], self.groups, -1)
        kernel = self.o_a[...]
        grouped = grouped.astype(kernel.dtype)
        # One product a group: XLA's CPU compiler is twice as slow at the batched form.
        latent = [grouped[..., group, :] @ kernel[group].T for group in range(self.groups)]
        whole = gathered(jnp.stack(latent, axis=-2))
        return self.o_b(whole.reshape(*whole.shape[:-2], -1))
