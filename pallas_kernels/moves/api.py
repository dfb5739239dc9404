"""Blocks on their way out of a pool and back, a fixed number at a time."""

import jax
from jaxtyping import Array, Int, Shaped

from pallas_kernels.implementations import REFERENCE, first_supported
from pallas_kernels.moves import reference


def gather_blocks(
    pool: Shaped[Array, "blocks rows stored"],
    places: Int[Array, " count"],
    *,
    implementation: str | None = None,
) -> Shaped[Array, "count rows stored"]:
    """Copies of the blocks at ``places``, in their order; a place may come more than once.

    Args:
      pool: blocks of one layer, any dtype.
      places: int32, not negative. A place past the pool gives some block of it.
      implementation: see ``pallas_kernels.implementations``.

    Raises:
      ValueError: no implementation has this name.
    """

    def by_tpu() -> jax.Array:
        from pallas_kernels.moves import tpu

        return tpu.gather_blocks(pool, places)

    def by_gpu() -> jax.Array:
        from pallas_kernels.moves import gpu

        return gpu.gather_blocks(pool, places)

    def by_reference() -> jax.Array:
        return reference.gather_blocks(pool, places)

    candidates = {"tpu": by_tpu, "gpu": by_gpu, REFERENCE: by_reference}
    return first_supported("gather of blocks", candidates, implementation)


def scatter_blocks(
    pool: Shaped[Array, "blocks rows stored"],
    blocks: Shaped[Array, "count rows stored"],
    places: Int[Array, " count"],
    *,
    implementation: str | None = None,
) -> Shaped[Array, "blocks rows stored"]:
    """The pool with ``blocks`` at ``places``; in place where the caller donates the pool.

    Args:
      pool: blocks of one layer, any dtype.
      blocks: what to write, of the same dtype.
      places: int32, not negative. A place past the pool is written nowhere. No place inside the
        pool may come twice.
      implementation: see ``pallas_kernels.implementations``.

    Raises:
      ValueError: no implementation has this name.
    """

    def by_tpu() -> jax.Array:
        from pallas_kernels.moves import tpu

        return tpu.scatter_blocks(pool, blocks, places)

    def by_gpu() -> jax.Array:
        from pallas_kernels.moves import gpu

        return gpu.scatter_blocks(pool, blocks, places)

    def by_reference() -> jax.Array:
        return reference.scatter_blocks(pool, blocks, places)

    candidates = {"tpu": by_tpu, "gpu": by_gpu, REFERENCE: by_reference}
    return first_supported("scatter of blocks", candidates, implementation)
