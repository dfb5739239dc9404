"""XLA implementation of moves."""

from jaxtyping import Array, Int, Shaped


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
