"""XLA implementation of moves."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped


def gather_blocks(
    pool: Shaped[Array, "blocks rows stored"], places: Int[Array, " count"]
) -> Shaped[Array, "count rows stored"]:
    """See ``api.gather_blocks``."""
    return pool.at[places].get(mode="clip")


def scatter_blocks(
    pool: Shaped[Array, "blocks rows stored"],
    blocks: Shaped[Array, "count rows stored"],
    places: Int[Array, " count"],
) -> Shaped[Array, "blocks rows stored"]:
    """See ``api.scatter_blocks``."""
    return pool.at[places].set(blocks, mode="drop")


def write_rows(
    pool: Shaped[Array, "blocks rows stored"],
    table: Int[Array, "n blocks_per_sequence"],
    numbers: Int[Array, "n count"],
    whole: Bool[Array, "n count"],
    rows: Shaped[Array, "n count stored"],
) -> Shaped[Array, "blocks rows stored"]:
    """See ``api.write_rows``."""
    blocks, per = pool.shape[:2]
    place = jnp.minimum(numbers // per, table.shape[-1] - 1)
    block = jnp.take_along_axis(table, place, axis=-1)
    block = jnp.where(whole, block, blocks)
    return pool.at[block, numbers % per].set(rows, mode="drop")
