"""Pallas implementation of the row formats for NVIDIA GPUs, through Triton (see ``attention.gpu``).

One program codes one group of channels of a tile of rows, one more the bytes that have no scale.
All is the integer arithmetic of the reference: the same bits, whatever the tile and the device.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Shaped

from pallas_kernels.interpreting import interpret_params
from pallas_kernels.packing import reference
from pallas_kernels.packing.gpu_kernel import decode_program, encode_program
from pallas_kernels.packing.layout import Format, RowLayout, layout_of, layout_stored
from pallas_kernels.tuning.table import tuned


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What ``tuning.table`` may choose, key ``format``."""

    rows: int = 16
    """Most rows of one program, whose number is a power of two."""
    warps: int = 4


def encode(rows: Float[Array, "*n width"], format: Format) -> Shaped[Array, "*n stored"]:
    """See ``api.encode``. Plain floats are a cast, which XLA does where the rows come from.

    Raises:
      NotImplementedError: rows of more than 32 bits a channel, or that cannot be addressed.
      ValueError: as ``api.encode``.
    """
    layout = layout_of(format, rows.shape[-1])
    if not layout.packed:
        return reference.encode(rows, format)
    if rows.shape[-1] != layout.width:
        raise ValueError(f"rows of {rows.shape[-1]} channels for {layout}")
    if rows.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"the GPU kernel encodes no rows of {rows.dtype}")
    out = jax.ShapeDtypeStruct((*rows.shape[:-1], layout.row_bytes), jnp.uint8)
    return _call(encode_program, "encode", rows, layout, out)


def decode(stored: Shaped[Array, "*n stored"], format: Format) -> Float[Array, "*n width"]:
    """See ``api.decode``. Plain floats are a cast, which XLA does where the rows go.

    Raises:
      NotImplementedError: rows that cannot be addressed.
      ValueError: as ``api.decode``.
    """
    layout = layout_stored(format, stored.shape[-1])
    if not layout.packed:
        return reference.decode(stored, format)
    if stored.shape[-1] != layout.row_bytes or stored.dtype != jnp.uint8:
        raise ValueError(f"stored rows are {stored.dtype}{list(stored.shape)} for {layout}")
    out = jax.ShapeDtypeStruct((*stored.shape[:-1], layout.width), jnp.float32)
    return _call(decode_program, "decode", stored, layout, out)


def _call(
    program: Any, name: str, rows: jax.Array, layout: RowLayout, out: jax.ShapeDtypeStruct
) -> jax.Array:
    """Runs ``program`` over all rows, whatever axes they lie along."""
    count = math.prod(out.shape[:-1])
    # Triton counts bytes in signed 32 bits up to this size, which end half-way.
    if 2**31 <= count * layout.row_bytes <= 2**32:
        raise NotImplementedError("2 to 4 GiB of packed rows cannot be addressed: take fewer")
    if 0 in out.shape:
        return jnp.zeros(out.shape, out.dtype)
    values = tuned(f"packing/{name}/gpu", Tuning(), format=layout.name)
    tile = 1 << (values.rows.bit_length() - 1)
    of_groups = layout.data.stop + layout.scales.stop - layout.scales.start
    has_rest = layout.row_bytes > of_groups
    flat: jax.Array = pl.pallas_call(
        partial(program, layout=layout, tile=tile),
        grid=(pl.cdiv(count, tile), layout.groups + has_rest),
        out_shape=jax.ShapeDtypeStruct((count, out.shape[-1]), out.dtype),
        compiler_params=plt.CompilerParams(num_warps=values.warps, num_stages=1),
        interpret=bool(interpret_params()),
        name=f"{name}_rows",
    )(rows.reshape(count, rows.shape[-1]))
    return flat.reshape(out.shape)
