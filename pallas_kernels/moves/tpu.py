"""Pallas TPU implementation of moves: HBM to HBM, all blocks of a move in flight at once.

No block passes through VMEM, and the core only starts the copies and waits for them. A copy takes
whole blocks, so any shape and dtype of a block will do.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Shaped

from pallas_kernels.blocks import in_hbm, refuse_copied
from pallas_kernels.interpreting import interpret_params

Ref = Any


def gather_blocks(
    pool: Shaped[Array, "blocks rows stored"], places: Int[Array, " count"]
) -> Shaped[Array, "count rows stored"]:
    """See ``api.gather_blocks``.

    Raises:
      NotImplementedError: a pool of packed rows that would be copied whole.
    """
    refuse_copied(pool)
    if places.shape[0] == 0:
        return jnp.zeros((0, *pool.shape[1:]), pool.dtype)
    inside = jnp.clip(places.astype(jnp.int32), 0, pool.shape[0] - 1)
    return pl.pallas_call(
        _gather,
        out_shape=jax.ShapeDtypeStruct((places.shape[0], *pool.shape[1:]), pool.dtype),
        grid_spec=_grid_spec(arrays=1),
        interpret=interpret_params(),
        name="gather_blocks",
    )(inside, in_hbm(pool))


def scatter_blocks(
    pool: Shaped[Array, "blocks rows stored"],
    blocks: Shaped[Array, "count rows stored"],
    places: Int[Array, " count"],
) -> Shaped[Array, "blocks rows stored"]:
    """See ``api.scatter_blocks``.

    Raises:
      NotImplementedError: as ``gather_blocks``.
    """
    refuse_copied(pool)
    if places.shape[0] == 0:
        return pool
    return pl.pallas_call(
        _scatter,
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=_grid_spec(arrays=2),
        input_output_aliases={2: 0},  # operands are places, blocks, pool
        interpret=interpret_params(),
        name="scatter_blocks",
    )(places.astype(jnp.int32), in_hbm(blocks), in_hbm(pool))


def _grid_spec(arrays: int) -> pltpu.PrefetchScalarGridSpec:
    somewhere = pl.BlockSpec(memory_space=pltpu.HBM)
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(),
        in_specs=[somewhere] * arrays,
        out_specs=somewhere,
        scratch_shapes=[pltpu.SemaphoreType.DMA(())],
    )


def _gather(places: Ref, pool: Ref, out: Ref, done: Ref) -> None:
    def copy(number: jax.Array) -> Any:
        """One block out."""
        return pltpu.make_async_copy(pool.at[places[number]], out.at[number], done)

    _all_at_once(places.shape[0], lambda number: True, copy)


def _scatter(places: Ref, blocks: Ref, pool: Ref, out: Ref, done: Ref) -> None:
    del pool  # the same memory as out

    def inside(number: jax.Array) -> jax.Array:
        """Whether the pool has the place."""
        return (places[number] >= 0) & (places[number] < out.shape[0])

    def copy(number: jax.Array) -> Any:
        """One block in."""
        return pltpu.make_async_copy(blocks.at[number], out.at[places[number]], done)

    _all_at_once(places.shape[0], inside, copy)


def _all_at_once(
    count: int, wanted: Callable[[jax.Array], Any], copy: Callable[[jax.Array], Any]
) -> None:
    """Starts all wanted copies, then waits for as many."""

    def start(number: jax.Array, _: None) -> None:
        """Starts one copy."""
        pl.when(wanted(number))(lambda: copy(number).start())

    def wait(number: jax.Array, _: None) -> None:
        """Waits for one copy."""
        pl.when(wanted(number))(lambda: copy(number).wait())

    jax.lax.fori_loop(0, count, start, None)
    jax.lax.fori_loop(0, count, wait, None)
