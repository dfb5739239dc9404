"""Running a step, or a function of one sequence, over the active sequences one after the other."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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


def map_sequences(
    function: Callable[..., jax.Array],
    arguments: tuple[Any, ...],
    order: Int[Array, " n"],
    active: Int[Array, ""],
    *,
    sequential: bool,
) -> jax.Array:
    """``function`` of each sequence's slice of ``arguments`` (trees that lead with sequences).

    Sequential: a traced loop over the first ``active`` entries of ``order``; others give zeros.
    Otherwise all at once. The results agree where the function's bits do not depend on batching,
    which each engine probes for its own executable.
    """
    count = order.shape[0]
    if count == 1:
        return function(*jax.tree.map(lambda x: x[0], arguments))[None]
    if not sequential:
        return jax.vmap(function)(*arguments)
    one = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], arguments))

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        which = order[i]
        result = function(*jax.tree.map(lambda x: x[which], arguments))
        return jax.lax.dynamic_update_index_in_dim(out, result, which, 0)

    return jax.lax.fori_loop(0, active, body, jnp.zeros((count, *one.shape), one.dtype))
