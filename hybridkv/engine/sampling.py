"""Choosing the next token. One executable for every setting: they are data."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hybridkv.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How one request chooses tokens.

    Raises:
      UserError: a value is out of its range.
    """

    temperature: float = 0.0
    """0 takes the likeliest token; larger flattens the distribution."""
    top_k: int = 0
    """Only the k likeliest tokens; 0 for all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability."""
    seed: int = 0
    """Together with the position it fixes the choice, whatever the neighbours do."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k must be at least 0 (0 for all tokens), got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed must be between 0 and 2**32 - 1, got {self.seed}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """The options of each row, as arrays."""

    temperature: Float[Array, " n"]
    top_k: Int[Array, " n"]
    top_p: Float[Array, " n"]
    seed: Array

    @classmethod
    def of(cls, options: list[SamplingOptions]) -> "SamplingBatch":
        """One row per entry of ``options``."""
        return cls(
            temperature=jax.device_put(np.array([o.temperature for o in options], np.float32)),
            top_k=jax.device_put(np.array([o.top_k for o in options], np.int32)),
            top_p=jax.device_put(np.array([o.top_p for o in options], np.float32)),
            seed=jax.device_put(np.array([o.seed for o in options], np.uint32)),
        )


def sample(
    logits: Float[Array, "n vocab"], positions: Int[Array, " n"], options: SamplingBatch
) -> Int[Array, " n"]:
    """The token after each of ``positions``; a row's choice depends on that row alone."""
    return jax.vmap(_sample_one)(logits, positions, options)


def _sample_one(logits: jax.Array, position: jax.Array, options: SamplingBatch) -> jax.Array:
    order = jnp.argsort(-logits, stable=True)
    heat = jnp.maximum(options.temperature, jnp.finfo(jnp.float32).tiny)
    ranked = (logits[order] - logits[order[0]]) / heat
    rank = jnp.arange(logits.shape[0], dtype=jnp.int32)
    probability = jax.nn.softmax(ranked)
    before = jnp.cumsum(probability) - probability
    kept = (before < options.top_p) & ((options.top_k == 0) | (rank < options.top_k))
    kept = kept | (rank == 0)
    key = jax.random.fold_in(jax.random.key(options.seed), position)
    drawn = jax.random.categorical(key, jnp.where(kept, ranked, -jnp.inf))
    return order[jnp.where(options.temperature == 0.0, 0, drawn)].astype(jnp.int32)
