"""Blocks on their way out of a pool and back, a fixed number at a time, and new rows into one."""

import jax
from jaxtyping import Array, Bool, Int, Shaped

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


def write_rows(
    pool: Shaped[Array, "blocks rows stored"],
    table: Int[Array, "n blocks_per_sequence"],
    numbers: Int[Array, "n count"],
    whole: Bool[Array, "n count"],
    rows: Shaped[Array, "n count stored"],
    *,
    implementation: str | None = None,
) -> Shaped[Array, "blocks rows stored"]:
    """The pool with ``rows`` in it; in place where the caller donates the pool.

    Args:
      pool: blocks of one layer, any dtype.
      table: int32, the blocks of each sequence. No two sequences write to the same block; what is
        past the pool is written nowhere.
      numbers: int32, which rows of its sequence they are: ascending, one after the other.
      whole: rows that are written; the number of another row may be anything, as long as none of
        its sequence is written.
      rows: what to write, of the pool's dtype.
      implementation: see ``pallas_kernels.implementations``. XLA's is in place on a CPU and a GPU;
        for a TPU it copies pools of 8-bit numbers whole, and others where a block has few rows.

    Raises:
      NotImplementedError: the named implementation does not support such a pool.
      ValueError: no implementation has this name.
    """

    def by_tpu() -> jax.Array:
        from pallas_kernels.moves import tpu_rows

        return tpu_rows.write_rows(pool, table, numbers, whole, rows)

    def by_reference() -> jax.Array:
        return reference.write_rows(pool, table, numbers, whole, rows)

    candidates = {"tpu": by_tpu, "gpu": by_reference, REFERENCE: by_reference}
    return first_supported("writing of rows", candidates, implementation)
