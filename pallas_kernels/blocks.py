"""Rows in blocks, as kernels see them: a pool and one sequence's block table."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.interpreting import interpret_params
from pallas_kernels.packing import api as packing
from pallas_kernels.packing.layout import Format

_LANES = 128
"""Of a TPU's register."""


class BlockRows(NamedTuple):
    """One sequence's rows of one layer."""

    pool: jax.Array
    """``[blocks, rows_per_block, stored]``, shared by all sequences."""
    table: jax.Array
    """int32 ``[blocks_per_sequence]``; entries past the sequence's length may hold anything."""

    @property
    def rows_per_block(self) -> int:
        """Rows of one block."""
        return self.pool.shape[1]


def key_block_rows(rows_per_block: int, key_block: int) -> int:
    """Rows of a key block: whole cache blocks, at least ``key_block`` rows where possible."""
    return max(key_block // rows_per_block, 1) * rows_per_block


def read_key_block(
    rows: BlockRows, number: jax.Array, size: int, length: jax.Array, format: Format
) -> Float[Array, "size width"]:
    """float32 rows ``number * size ...``; rows from ``length`` on are zero, by selection."""
    per = rows.rows_per_block
    place = number * (size // per) + jnp.arange(size // per, dtype=jnp.int32)
    blocks = rows.table[jnp.minimum(place, rows.table.shape[0] - 1)]
    stored = rows.pool.at[blocks].get(mode="clip").reshape(size, -1)
    keys = packing.decode(stored, format)
    inside = number * size + jnp.arange(size, dtype=jnp.int32) < length
    return jnp.where(inside[:, None], keys, 0.0)


def read_picked(
    rows: BlockRows, picks: Int[Array, "t k"], valid: Array, format: Format
) -> Float[Array, "t k width"]:
    """float32 rows at ``picks``; those not ``valid`` are zero, by selection."""
    per = rows.rows_per_block
    block = rows.table.at[picks // per].get(mode="clip")
    stored = rows.pool.at[block, picks % per].get(mode="clip")
    return jnp.where(valid[..., None], packing.decode(stored, format), 0.0)


def in_hbm(pool: jax.Array) -> jax.Array:
    """For TPU kernels that copy from a pool by hand: it stays in HBM. XLA would bring one that fits
    into fast memory there whole, at every call. Outside of a trace there is no XLA to tell.
    """
    if interpret_params() or not isinstance(pool, jax.core.Tracer):
        return pool
    from jax.experimental.pallas import tpu as pltpu

    held: jax.Array = pltpu.with_memory_space_constraint(pool, pltpu.HBM)
    return held


def refuse_copied(pool: Shaped[Array, "blocks rows stored"]) -> None:
    """For TPU kernels: where a row of bytes does not fill the lanes, XLA lays a pool out with its
    blocks along them, and every call of a kernel would copy all of it first.

    Raises:
      NotImplementedError: it is such a pool; says how wide rows would have to be.
    """
    stored = pool.shape[-1]
    if pool.dtype == jnp.uint8 and stored % _LANES and not interpret_params():
        wide = -(-stored // _LANES) * _LANES
        raise NotImplementedError(
            f"a pool of {stored}-byte rows would be copied whole: pad its rows to {wide} bytes"
        )
