"""Pallas implementation of moves for NVIDIA GPUs, through Triton (see ``attention.gpu``).

One program copies one part of one block. A block's elements lie side by side, so any shape and
dtype of a block will do; a scatter touches nothing else of the pool.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Int, Shaped

from pallas_kernels.interpreting import interpret_params
from pallas_kernels.tuning.table import tuned


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What ``tuning.table`` may choose, key ``block_bytes``."""

    part_bytes: int = 8192
    """Most bytes of one program, whose number is a power of two: 64 a thread."""
    warps: int = 4


def gather_blocks(
    pool: Shaped[Array, "blocks rows stored"], places: Int[Array, " count"]
) -> Shaped[Array, "count rows stored"]:
    """See ``api.gather_blocks``.

    Raises:
      NotImplementedError: a pool that cannot be addressed.
    """
    flat = _flat(pool)
    count = places.shape[0]
    if 0 in (count, flat.shape[1]):
        return jnp.zeros((count, *pool.shape[1:]), pool.dtype)
    inside = jnp.clip(places.astype(jnp.int32), 0, pool.shape[0] - 1)
    out = pl.pallas_call(
        partial(_gather, part=_part(flat)),
        out_shape=jax.ShapeDtypeStruct((count, flat.shape[1]), pool.dtype),
        **_options(count, flat, "gather_blocks"),
    )(inside, flat)
    return out.reshape(count, *pool.shape[1:])


def scatter_blocks(
    pool: Shaped[Array, "blocks rows stored"],
    blocks: Shaped[Array, "count rows stored"],
    places: Int[Array, " count"],
) -> Shaped[Array, "blocks rows stored"]:
    """See ``api.scatter_blocks``.

    Raises:
      NotImplementedError: a pool that cannot be addressed.
    """
    flat = _flat(pool)
    count = places.shape[0]
    if 0 in (count, flat.shape[1]):
        return pool
    out = pl.pallas_call(
        partial(_scatter, part=_part(flat)),
        out_shape=jax.ShapeDtypeStruct(flat.shape, pool.dtype),
        input_output_aliases={2: 0},  # operands are places, blocks, pool
        **_options(count, flat, "scatter_blocks"),
    )(places.astype(jnp.int32), blocks.reshape(count, flat.shape[1]), flat)
    return out.reshape(pool.shape)


def _flat(pool: jax.Array) -> jax.Array:
    """The pool as ``[blocks, elements]``, the same memory."""
    if pool.shape[0] == 0:
        raise NotImplementedError("a pool without blocks")
    # Triton counts bytes in signed 32 bits up to this size, which end half-way.
    if pool.dtype.itemsize == 1 and 2**31 <= pool.size <= 2**32:
        raise NotImplementedError("a pool of 2 to 4 GiB of bytes cannot be addressed")
    return pool.reshape(pool.shape[0], math.prod(pool.shape[1:]))


def _tuning(flat: jax.Array) -> Tuning:
    return tuned("moves/gpu", Tuning(), block_bytes=flat.shape[1] * flat.dtype.itemsize)


def _part(flat: jax.Array) -> int:
    """Elements of one program, a power of two."""
    elements = max(_tuning(flat).part_bytes // flat.dtype.itemsize, 1)
    return 1 << (elements.bit_length() - 1)


def _options(count: int, flat: jax.Array, name: str) -> dict[str, Any]:
    return {
        "grid": (count, pl.cdiv(flat.shape[1], _part(flat))),
        "compiler_params": plt.CompilerParams(num_warps=_tuning(flat).warps, num_stages=1),
        "interpret": bool(interpret_params()),
        "name": name,
    }


def _gather(places, pool, out, *, part: int) -> None:  # type: ignore[no-untyped-def]
    """Refs: ``places`` int32 ``[count]``; ``pool`` and ``out`` ``[blocks, size]``."""
    number = pl.program_id(0)
    _copy(pool, places[number], out, number, _elements(part))


def _scatter(places, blocks, pool, out, *, part: int) -> None:  # type: ignore[no-untyped-def]
    """As ``_gather``, the other way; ``out`` is the memory of ``pool``."""
    del pool
    number, elements = pl.program_id(0), _elements(part)
    place = places[number]

    @pl.when((place >= 0) & (place < out.shape[0]))
    def _inside() -> None:
        _copy(blocks, number, out, place, elements)


def _elements(part: int) -> jax.Array:
    """Elements of a block that this program copies."""
    return pl.program_id(1) * part + jnp.arange(part, dtype=jnp.int32)


def _copy(source: Any, at: jax.Array, to: Any, place: jax.Array, elements: jax.Array) -> None:
    inside = elements < to.shape[1]
    block, into = (jnp.broadcast_to(x, elements.shape) for x in (at, place))
    other = jnp.zeros((), source.dtype)
    value = plt.load(source.at[block, elements], mask=inside, other=other)
    plt.store(to.at[into, elements], value, mask=inside)
