"""Pieces that every model here is built from."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Shaped

from hybridkv.state.per_device import on_mesh


class Linear(nnx.Module):
    """``x @ weight.T`` without bias.

    The weight is ``[outputs, inputs]``, as checkpoints have it: a product with one row then reads
    it along its rows, which on CPUs makes a decode step a fifth faster.
    """

    def __init__(
        self, inputs: int, outputs: int, *, dtype: str, rngs: nnx.Rngs, gather: bool = True
    ) -> None:
        """Without ``gather`` the outputs stay as a mesh has split them."""
        init = nnx.initializers.truncated_normal(stddev=inputs**-0.5)
        self.weight = nnx.Param(init(rngs.params(), (outputs, inputs), jnp.dtype(dtype)))
        self.gather = gather

    def __call__(self, x: Float[Array, "*n inputs"]) -> Float[Array, "*n outputs"]:
        """The product, in the dtype of the weight."""
        weight = self.weight[...]
        product = jnp.matmul(x.astype(weight.dtype), weight.T)
        return gathered(product) if self.gather else product


def gathered(x: Float[Array, "*n width"]) -> Float[Array, "*n width"]:
    """``x`` with whole channels on every device of the mesh.

    Matrices are split along their outputs. What follows a product (a norm, a rotation, halves, the
    next product) needs all channels of a token: gathered once, here, it is computed on every device
    without another word between them, and no sum is split.
    """
    if not on_mesh():
        return x
    free = jax.sharding.PartitionSpec.UNCONSTRAINED
    spec = jax.sharding.PartitionSpec(*(free,) * (x.ndim - 1), None)
    return jax.lax.with_sharding_constraint(x, spec)


def everywhere(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """``x`` whole on every device of the mesh, for loops over its parts."""
    if not on_mesh():
        return x
    return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec())


class RMSNorm(nnx.Module):
    """Root-mean-square normalisation with a weight, computed in float32."""

    def __init__(self, width: int, *, eps: float, dtype: str) -> None:
        self.eps = eps
        self.weight = nnx.Param(jnp.ones((width,), jnp.dtype(dtype)))

    def __call__(self, x: Float[Array, "*n width"]) -> Float[Array, "*n width"]:
        """``x / rms(x) * weight`` in the dtype of ``x``."""
        normal = rms_normalize(x, self.eps)
        scaled = normal * self.weight[...].astype(jnp.float32).reshape((1,) * (x.ndim - 1) + (-1,))
        return scaled.astype(x.dtype)


def rms_normalize(x: Float[Array, "*n width"], eps: float) -> Float[Array, "*n width"]:
    """``x / rms(x)`` over the last axis, in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)


class Angles(NamedTuple):
    """cos and sin of every rotary pair: float32 ``[*n, rope / 2]``."""

    cos: jax.Array
    sin: jax.Array


def rotary_angles(positions: Int[Array, "*n"], frequencies: np.ndarray) -> Angles:
    """Angles at ``positions`` (tokens) for ``frequencies`` (radians a token)."""
    shape = (1,) * positions.ndim + (-1,)
    angle = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequencies).reshape(shape)
    return Angles(jnp.cos(angle), jnp.sin(angle))


def rotate(
    x: Float[Array, "*n width"], angles: Angles, *, inverse: bool = False
) -> Float[Array, "*n width"]:
    """Rotates the last channels of ``x``, pairwise interleaved; the others pass through.

    ``angles`` must broadcast against ``x`` without its last axis.
    """
    cos, sin = angles
    if inverse:
        sin = -sin
    rope = 2 * cos.shape[-1]
    pairs = x[..., -rope:].astype(jnp.float32).reshape(*x.shape[:-1], rope // 2, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    turned = turned.reshape(*x.shape[:-1], rope).astype(x.dtype)
    return jnp.concatenate([x[..., :-rope], turned], axis=-1)


def matmul_precision(dtype: str) -> Any:
    """A context in which a float32 model has float32 products, on TPU too, where the default is
    bfloat16.
    """
    return jax.default_matmul_precision("highest" if dtype == "float32" else "default")
