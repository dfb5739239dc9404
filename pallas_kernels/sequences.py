"""Which sequences of a batch have work, and a function of one sequence run over those."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Active:
    """The sequences that are computed; what others give is finite and means nothing."""

    order: Int[Array, " n"]
    """All sequences, the active ones first."""
    count: Int[Array, ""]
    """How many are active."""

    @classmethod
    def all(cls, n: int) -> "Active":
        """Every one of ``n`` sequences."""
        return cls(jnp.arange(n, dtype=jnp.int32), jnp.asarray(n, jnp.int32))

    @classmethod
    def of(cls, mask: Bool[Array, " n"]) -> "Active":
        """Those where ``mask`` is true, in order."""
        order = jnp.argsort(jnp.logical_not(mask), stable=True).astype(jnp.int32)
        return cls(order, jnp.sum(mask.astype(jnp.int32)))

    @property
    def mask(self) -> Bool[Array, " n"]:
        """Which ones that is."""
        n = self.order.shape[0]
        at = jnp.where(jnp.arange(n, dtype=jnp.int32) < self.count, self.order, n)
        return jnp.zeros((n,), bool).at[at].set(True, mode="drop")


def map_sequences(
    function: Callable[..., jax.Array],
    arguments: tuple[Any, ...],
    active: Active,
    *,
    sequential: bool,
) -> jax.Array:
    """``function`` of each sequence's slice of ``arguments`` (trees that lead with sequences).

    Sequential: a traced loop over the active sequences; others give zeros. Otherwise all at once.
    The results agree where the function's bits do not depend on batching, which each engine probes
    for its own executable.
    """
    count = active.order.shape[0]
    if count == 1:
        return function(*jax.tree.map(lambda x: x[0], arguments))[None]
    if not sequential:
        return jax.vmap(function)(*arguments)
    one = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], arguments))

    def body(i: jax.Array, out: jax.Array) -> jax.Array:
        which = active.order[i]
        result = function(*jax.tree.map(lambda x: x[which], arguments))
        return jax.lax.dynamic_update_index_in_dim(out, result, which, 0)

    return jax.lax.fori_loop(0, active.count, body, jnp.zeros((count, *one.shape), one.dtype))
