"""Manifold-constrained hyper-connections: several residual streams, mixed around every sublayer.

Source: the release's ``model.py`` (``hc_pre``, ``hc_post``, ``hc_head``) and paper section 2.2.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from models.deepseek_v4.config import DeepseekV4Config


class Mix(NamedTuple):
    """How one sublayer leaves the streams; see ``HyperConnection.__call__``."""

    post: jax.Array
    """float32 ``[*n, streams]``: weight of the sublayer's output in each stream."""
    comb: jax.Array
    """float32 ``[*n, streams, streams]``: old stream (first axis) to new stream (second)."""


class HyperConnection(nnx.Module):
    """Collapses the streams into one input for a sublayer and spreads its output again."""

    def __init__(self, config: DeepseekV4Config, rngs: nnx.Rngs) -> None:
        streams, width = config.streams, config.streams * config.hidden_size
        mixes = 2 * streams + streams * streams
        init = nnx.initializers.truncated_normal(stddev=width**-0.5)
        self.fn = nnx.Param(init(rngs.params(), (width, mixes), jnp.float32))
        self.base = nnx.Param(jnp.zeros((mixes,), jnp.float32))
        self.scale = nnx.Param(jnp.full((3,), 0.1, jnp.float32))
        self.streams = streams
        self.steps = config.sinkhorn_steps
        self.eps = config.stream_eps
        self.norm_eps = config.norm_eps

    def __call__(self, x: Float[Array, "*n streams width"]) -> tuple[Float[Array, "*n width"], Mix]:
        """The sublayer's input and the mix to leave with."""
        k = self.streams
        z = stream_mixes(x, self.fn[...], self.norm_eps)
        base = self.base[...].reshape((1,) * (z.ndim - 1) + (-1,))
        scale = self.scale[...]
        pre = jax.nn.sigmoid(z[..., :k] * scale[0] + base[..., :k]) + self.eps
        post = 2 * jax.nn.sigmoid(z[..., k : 2 * k] * scale[1] + base[..., k : 2 * k])
        comb = z[..., 2 * k :] * scale[2] + base[..., 2 * k :]
        comb = sinkhorn(comb.reshape(*z.shape[:-1], k, k), self.steps, self.eps)
        return collapse(x, pre), Mix(post, comb)

    def leave(
        self,
        x: Float[Array, "*n streams width"],
        y: Float[Array, "*n width"],
        mix: Mix,
    ) -> Float[Array, "*n streams width"]:
        """``out[k] = post[k] * y + sum_j comb[j, k] * x[j]``."""
        wide = x.astype(jnp.float32)
        new = []
        for k in range(self.streams):
            out = mix.post[..., k, None] * y.astype(jnp.float32)
            for j in range(self.streams):
                out = out + mix.comb[..., j, k, None] * wide[..., j, :]
            new.append(out)
        return jnp.stack(new, axis=-2).astype(x.dtype)


class StreamHead(nnx.Module):
    """Collapses the streams for the final norm."""

    def __init__(self, config: DeepseekV4Config, rngs: nnx.Rngs) -> None:
        width = config.streams * config.hidden_size
        init = nnx.initializers.truncated_normal(stddev=width**-0.5)
        self.fn = nnx.Param(init(rngs.params(), (width, config.streams), jnp.float32))
        self.base = nnx.Param(jnp.zeros((config.streams,), jnp.float32))
        self.scale = nnx.Param(jnp.full((1,), 0.1, jnp.float32))
        self.eps = config.stream_eps
        self.norm_eps = config.norm_eps

    def __call__(self, x: Float[Array, "*n streams width"]) -> Float[Array, "*n width"]:
        """The streams' weighted sum."""
        z = stream_mixes(x, self.fn[...], self.norm_eps)
        base = self.base[...].reshape((1,) * (z.ndim - 1) + (-1,))
        return collapse(x, jax.nn.sigmoid(z * self.scale[...][0] + base) + self.eps)


def stream_mixes(
    x: Float[Array, "*n streams width"], fn: Float[Array, "inputs mixes"], eps: float
) -> Float[Array, "*n mixes"]:
    """Projection of all streams at once, divided by their common rms; float32."""
    flat = x.astype(jnp.float32).reshape(*x.shape[:-2], -1)
    return jnp.matmul(flat, fn) * jax.lax.rsqrt(jnp.mean(flat * flat, -1, keepdims=True) + eps)


def collapse(
    x: Float[Array, "*n streams width"], weights: Float[Array, "*n streams"]
) -> Float[Array, "*n width"]:
    """``sum_k weights[k] * x[k]`` in float32, in stream order."""
    out = weights[..., 0, None] * x[..., 0, :].astype(jnp.float32)
    for k in range(1, x.shape[-2]):
        out = out + weights[..., k, None] * x[..., k, :].astype(jnp.float32)
    return out.astype(x.dtype)


def sinkhorn(
    logits: Float[Array, "*n streams streams"], steps: int, eps: float
) -> Float[Array, "*n streams streams"]:
    """Makes ``logits`` nearly doubly stochastic: row softmax, columns, then rows and columns.

    A loop, not an unrolled chain: XLA's CPU compiler runs it ten times faster at one token.
    """

    def over(c: jax.Array, axis: int) -> jax.Array:
        # Slices, not a reduction: all of one step then fuses into one kernel.
        parts = jnp.split(c, c.shape[axis], axis)
        return c / (functools.reduce(jnp.add, parts) + eps)

    def columns(c: jax.Array) -> jax.Array:
        return over(c, -2)

    def step(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return columns(over(c, -1)), None

    start = columns(jax.nn.softmax(logits, axis=-1) + eps)
    return jax.lax.scan(step, start, None, length=steps - 1)[0]
