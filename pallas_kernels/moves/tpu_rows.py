"""Pallas TPU implementation of row writes: a pool is changed where rows go, and never copied.

    HBM  pool --unit--> VMEM  old, [new where a bit is set] --unit--> HBM  the same memory

No copy engine moves a row that shares its words with others, so whole units are read, mixed and
written back: of the rows of a block those that a TPU lays out together. Rows of a sequence that
fall into one unit are brought together first. XLA's scatter would lay a pool of bytes out anew,
before and after.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int, Shaped

from pallas_kernels.blocks import in_hbm, refuse_copied
from pallas_kernels.interpreting import interpret_params

Ref = Any
_LANES = 128
_UNIT = {1: 32, 2: 8, 4: 8}
"""Rows that lie together, by the bytes of a number."""
_TOGETHER = 16
"""Units on their way at once."""


class Units(NamedTuple):
    """What is written, a unit at a time."""

    place: Int[Array, " units"]
    """Which unit of the pool. Each is there once."""
    bits: Int[Array, " units"]
    """Bit ``r`` says that row ``r`` is new. A unit without any is left alone."""
    rows: Shaped[Array, "units unit stored"]


def write_rows(
    pool: Shaped[Array, "blocks rows stored"],
    table: Int[Array, "n blocks_per_sequence"],
    numbers: Int[Array, "n count"],
    whole: Bool[Array, "n count"],
    rows: Shaped[Array, "n count stored"],
) -> Shaped[Array, "blocks rows stored"]:
    """See ``api.write_rows``.

    Raises:
      NotImplementedError: rows that do not fill lanes, or blocks that do not fill words.
    """
    unit = _unit(pool)
    if 0 in (*pool.shape, *rows.shape):
        return pool
    blocks, per, stored = pool.shape
    found = units_of(table, numbers, whole, rows, shape=(blocks, per), unit=unit)
    # Of another rank than the pool: XLA 0.10 refuses to alias an argument that is kept in HBM.
    out = _call(pool.reshape(blocks * per // unit, 1, unit, stored), found)
    return out.reshape(pool.shape)


def _unit(pool: jax.Array) -> int:
    """Rows of a unit.

    Raises:
      NotImplementedError: see ``write_rows``.
    """
    refuse_copied(pool)
    _, per, stored = pool.shape
    size = pool.dtype.itemsize
    if size not in _UNIT or (stored % _LANES and not interpret_params()):
        raise NotImplementedError(
            f"rows of {stored} {pool.dtype}: write numbers of 8, 16 or 32 bits, a multiple of "
            f"{_LANES} a row"
        )
    unit = _UNIT[size]
    if per % unit == 0:
        return unit
    if per < unit and per % (4 // size) == 0 and unit % per == 0:
        return per
    raise NotImplementedError(
        f"blocks of {per} rows of {pool.dtype} do not fill 32-bit words and registers: rows a "
        f"block must be a multiple of {unit}, or a power of two that fills words"
    )


def units_of(
    table: Int[Array, "n blocks_per_sequence"],
    numbers: Int[Array, "n count"],
    whole: Bool[Array, "n count"],
    rows: Shaped[Array, "n count stored"],
    *,
    shape: tuple[int, int],
    unit: int,
) -> Units:
    """The units that rows fall into; ``shape`` is blocks and rows a block of the pool."""
    (blocks, per), (n, count) = shape, numbers.shape
    first = numbers[:, :1]
    many = (count - 2) // unit + 2  # the most that so many rows in a row can touch
    within = jnp.arange(unit, dtype=jnp.int32)[None, None]
    begin = (first // unit + jnp.arange(many, dtype=jnp.int32)[None]) * unit  # [n, many]
    row = begin[:, :, None] + within - first[:, :, None]
    inside = (row >= 0) & (row < count)
    row = jnp.clip(row, 0, count - 1).reshape(n, many * unit)
    new = jnp.take_along_axis(whole, row, axis=1).reshape(inside.shape) & inside
    block = jnp.take_along_axis(table, jnp.clip(begin // per, 0, table.shape[1] - 1), axis=1)
    new &= ((block >= 0) & (block < blocks))[:, :, None]
    bits = jnp.where(new, jnp.uint32(1) << within.astype(jnp.uint32), jnp.uint32(0))
    bits = lax.bitcast_convert_type(jnp.sum(bits, axis=2, dtype=jnp.uint32), jnp.int32)
    place = block * (per // unit) + begin % per // unit
    images = jnp.take_along_axis(rows, row[:, :, None], axis=1)
    return Units(place.reshape(-1), bits.reshape(-1), images.reshape(n * many, unit, -1))


def _call(pool: Shaped[Array, "places 1 unit stored"], units: Units) -> jax.Array:
    count, unit, stored = units.rows.shape
    together = min(count, _TOGETHER)
    spare = -count % together
    place, bits = (jnp.pad(x, (0, spare)) for x in units[:2])
    return pl.pallas_call(
        functools.partial(_kernel, together=together),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=((count + spare) // together,),
            in_specs=[
                pl.BlockSpec((together, unit, stored), lambda i, *_: (i, 0, 0)),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((together, unit, stored), pool.dtype),
                pltpu.SemaphoreType.DMA((together,)),
                pltpu.SemaphoreType.DMA(()),
            ],
        ),
        input_output_aliases={3: 0},  # operands are place, bits, rows, pool
        interpret=interpret_params(),
        name="write_rows",
    )(place, bits, units.rows, in_hbm(pool))


def _kernel(
    place: Ref,
    bits: Ref,
    rows: Ref,
    pool: Ref,
    out: Ref,
    old: Ref,
    arrived: Ref,
    written: Ref,
    *,
    together: int,
) -> None:
    del pool  # the same memory as out
    first = pl.program_id(0) * together

    def read(i: jax.Array) -> Any:
        """The copy of a unit out of the pool."""
        return pltpu.make_async_copy(out.at[place[first + i], 0], old.at[i], arrived.at[i])

    def write(i: jax.Array) -> Any:
        """The copy of a unit back into it."""
        return pltpu.make_async_copy(old.at[i], out.at[place[first + i], 0], written)

    def mix(i: jax.Array) -> None:
        """Puts the new rows into a unit that has arrived, and sends it back."""
        read(i).wait()
        old[i] = mixed(old[i], rows[i], bits[first + i])
        write(i).start()

    def each(what: Any) -> None:
        """Does something with every unit that has new rows."""

        def one(i: jax.Array, _: None) -> None:
            """One unit."""
            pl.when(bits[first + i] != 0)(lambda: what(i))

        lax.fori_loop(0, together, one, None)

    each(lambda i: read(i).start())
    each(mix)
    each(lambda i: write(i).wait())


def mixed(
    old: Shaped[Array, "unit stored"], new: Shaped[Array, "unit stored"], bits: jax.Array
) -> Shaped[Array, "unit stored"]:
    """Rows of ``new`` where a bit is set; a word holds as many rows as fit, the first lowest."""
    size = old.dtype.itemsize
    within = 4 // size
    before, after = (pltpu.bitcast(x, jnp.int32) for x in (old, new))
    word = lax.broadcasted_iota(jnp.int32, before.shape, 0)
    mask = jnp.zeros_like(before)
    for row in range(within):
        field = jnp.uint32((1 << 8 * size) - 1 << 8 * size * row).view(jnp.int32)
        wanted = lax.shift_right_logical(bits, word * within + row) & 1
        mask = mask | jnp.where(wanted != 0, field, 0)
    return pltpu.bitcast((before & ~mask) | (after & mask), old.dtype)
