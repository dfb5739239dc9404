"""Running a per-sequence function over the active sequences of a step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


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
