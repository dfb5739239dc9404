"""Running a tile step over its active lanes one after the other."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hybridkv.state.batch import TileBatch
from hybridkv.state.cache import Cache


def lanes_in_turn(
    step: Callable[[TileBatch, Cache], tuple[jax.Array, Cache]], batch: TileBatch, cache: Cache
) -> tuple[Float[Array, "lanes ..."], Cache]:
    """A tile step of one lane for each active lane of ``batch``; idle lanes give zeros.

    ``step`` returns logits that lead with its one lane.
    """
    lanes = batch.starts.shape[0]
    active = jnp.sum((batch.ends > batch.starts).astype(jnp.int32))

    def single(lane: jax.Array | int) -> TileBatch:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, lane, 1), batch)

    def body(lane: jax.Array, carry: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
        out, cache = carry
        logits, cache = step(single(lane), cache)
        return jax.lax.dynamic_update_slice_in_dim(out, logits, lane, 0), cache

    form, _ = jax.eval_shape(step, single(0), cache)
    out = jnp.zeros((lanes, *form.shape[1:]), form.dtype)
    return jax.lax.fori_loop(0, active, body, (out, cache))
