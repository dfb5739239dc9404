"""Pallas TPU implementation of the row formats: the reference's bits, a tile of rows at a time.

Vector units do not move single lanes about, so the matrix unit does: numbers up to 255 times a
matrix of zeros and ones are exact, whatever is moved where.

    decode   bytes [rows, stored] --one-hot--> codes, scales, rope, by channel --> float32
    encode   codes, scales, rope, by channel --one-hot--> bytes [rows, stored]

All else is integer arithmetic on channels, of ``floats``. Inside other kernels, where speed counts,
rows are decoded by ``tpu_rows``.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.interpreting import interpret_params
from pallas_kernels.packing import floats, reference, scales
from pallas_kernels.packing.floats import Dyadic
from pallas_kernels.packing.layout import SCALE_BYTES, Format, RowLayout, layout_of, layout_stored

Ref = Any
Moves = np.ndarray
"""A matrix ``[from, to]`` that says which number goes where, times how much."""

_ROWS = 32
"""Rows of a tile: as many as a register of bytes has."""
_VECTORS = 32 * 1024 * 1024
"""Bytes of fast memory for the matrices and a tile."""
_BYTE = 0xFF


def encode(rows: Float[Array, "*n width"], format: Format) -> Shaped[Array, "*n stored"]:
    """See ``api.encode``. Plain floats are a cast, which XLA does where the rows come from.

    Raises:
      NotImplementedError: rows of other floats than float32 and bfloat16, or too wide ones.
      ValueError: as ``api.encode``.
    """
    layout = layout_of(format, rows.shape[-1])
    if not layout.packed:
        return reference.encode(rows, format)
    if rows.shape[-1] != layout.width:
        raise ValueError(f"rows of {rows.shape[-1]} channels for {layout}")
    if rows.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"the TPU kernel encodes no rows of {rows.dtype}")
    moves = _to_bytes(layout)
    return _call(_encode, rows.astype(jnp.float32), moves, layout, layout.row_bytes, jnp.uint8)


def decode(stored: Shaped[Array, "*n stored"], format: Format) -> Float[Array, "*n width"]:
    """See ``api.decode``. Plain floats are a cast, which XLA does where the rows go.

    Raises:
      NotImplementedError: too wide rows.
      ValueError: as ``api.decode``.
    """
    layout = layout_stored(format, stored.shape[-1])
    if not layout.packed:
        return reference.decode(stored, format)
    if stored.shape[-1] != layout.row_bytes or stored.dtype != jnp.uint8:
        raise ValueError(f"stored rows are {stored.dtype}{list(stored.shape)} for {layout}")
    return _call(_decode, stored, _to_channels(layout), layout, layout.width, jnp.float32)


def _call(
    kernel: Callable[..., None],
    rows: jax.Array,
    moves: Sequence[Moves],
    layout: RowLayout,
    width: int,
    dtype: Any,
) -> jax.Array:
    """Runs ``kernel`` over tiles of all rows, whatever axes they lie along."""
    size = sum(2 * x.size for x in moves) + 64 * 4 * _ROWS * layout.width
    if size > _VECTORS:
        raise NotImplementedError(f"{layout}: {size} bytes of matrices do not fit in fast memory")
    leading, count = rows.shape[:-1], math.prod(rows.shape[:-1])
    if count == 0:
        return jnp.zeros((*leading, width), dtype)
    whole = [pl.BlockSpec(x.shape, lambda i: (0, 0)) for x in moves]
    out = pl.pallas_call(
        functools.partial(kernel, layout=layout),
        out_shape=jax.ShapeDtypeStruct((count, width), dtype),
        grid=(-(-count // _ROWS),),
        in_specs=[pl.BlockSpec((_ROWS, rows.shape[-1]), lambda i: (i, 0)), *whole],
        out_specs=pl.BlockSpec((_ROWS, width), lambda i: (i, 0)),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=_VECTORS + _VECTORS // 2),
        interpret=interpret_params(),
        name=kernel.__name__.strip("_") + "_rows",
    )(rows.reshape(count, -1), *(jnp.asarray(x, jnp.bfloat16) for x in moves))
    return out.reshape(*leading, width)


def _to_channels(layout: RowLayout) -> list[Moves]:
    """From bytes to channels: codes, each byte of scales, lower and upper bytes of the rope."""
    channel = np.arange(layout.width)
    coded, size = channel < layout.coded, SCALE_BYTES[layout.coding.scale]
    sources = [np.where(coded, channel * layout.coding.bits // 8, -1)]
    group = channel // layout.coding.group
    sources += [np.where(coded, layout.scales.start + group * size + i, -1) for i in range(size)]
    rope = layout.wide.start + 2 * (channel - layout.coded)
    sources += [np.where(coded, -1, rope + i) for i in range(2)]
    byte = np.arange(layout.row_bytes)
    return [(byte[:, None] == source[None]).astype(np.float32) for source in sources]


def _to_bytes(layout: RowLayout) -> list[Moves]:
    """From channels to bytes, as ``_to_channels``; the first of a group brings its scale."""
    codes, *rest = _to_channels(layout)
    channel = np.arange(layout.width)
    if layout.coding.bits == 4:
        codes = codes * np.where(channel % 2, 16, 1)
    first = channel % layout.coding.group == 0
    scale = [x * first for x in rest[:-2]]
    return [np.ascontiguousarray(x.T) for x in (codes, *scale, *rest[-2:])]


def _moved(numbers: Array, moves: Ref) -> Float[Array, "rows to"]:
    """float32 sums of whole numbers from 0 to 255, moved."""
    if numbers.dtype == jnp.uint8:
        numbers = numbers.astype(jnp.int32)
    exact = numbers.astype(jnp.float32).astype(jnp.bfloat16)
    return jnp.dot(exact, moves[...], preferred_element_type=jnp.float32)


def _decode(stored: Ref, *refs: Ref, layout: RowLayout) -> None:
    """Refs: uint8 ``[rows, row_bytes]``, matrices, float32 ``[rows, width]``."""
    *moves, out = refs
    codes, *scale, low, high = (_moved(stored[...], x).astype(jnp.int32) for x in moves)
    channel = lax.broadcasted_iota(jnp.int32, codes.shape, 1)
    if layout.coding.bits == 4:
        codes = jnp.where(channel & 1 == 0, codes, codes >> 4) & 15
    magnitude, sign = floats.split_sign(codes, layout.coding.bits)
    value = _values(magnitude, scale, layout) ^ sign
    rope = (low << 16) | (high << 24)
    out[...] = floats.from_bits(jnp.where(channel < layout.coded, value, rope))


def _values(
    magnitude: Int[Array, "rows width"], scale: list[Int[Array, "rows width"]], layout: RowLayout
) -> Int[Array, "rows width"]:
    """float32 bits, without sign, of codes times their scales; as in ``reference``."""
    fp8 = layout.coding.bits == 8
    own = floats.e4m3_value(magnitude) if fp8 else floats.e2m1_value(magnitude)
    if layout.coding.scale == "float32":
        value = floats.bits_of(floats.from_bits(own.bits()) * floats.from_bits(_joined(scale)))
    else:
        other, undefined = scales.as_dyadic(scale[0], layout.coding.scale)
        value = Dyadic(own.factor * other.factor, own.power + other.power).bits()
        value = jnp.where(undefined, floats.NAN, value)
    return jnp.where(magnitude == floats.E4M3_NAN, floats.NAN, value) if fp8 else value


def _joined(parts: list[Int[Array, "rows width"]]) -> Int[Array, "rows width"]:
    """Numbers of 32 bits from their bytes."""
    bits = parts[0]
    for number, part in enumerate(parts[1:], 1):
        bits = bits | (part << 8 * number)
    return bits


def _encode(rows: Ref, *refs: Ref, layout: RowLayout) -> None:
    """Refs: float32 ``[rows, width]``, matrices, uint8 ``[rows, row_bytes]``."""
    *moves, out = refs
    coding = layout.coding
    bits = floats.bits_of(rows[...])
    channel = lax.broadcasted_iota(jnp.int32, bits.shape, 1)
    magnitude = bits & 0x7FFFFFFF
    amax = _largest(jnp.where(channel < layout.coded, magnitude, 0), channel, layout)
    finite = amax < floats.INFINITY
    stored = _scale_bits(amax, layout)
    sign = lax.shift_right_logical(bits, 31) << (coding.bits - 1)
    codes = jnp.where(finite, _codes(magnitude, stored, layout) | sign, 0)
    rope = _rounded(bits)
    parts = [stored >> 8 * i & _BYTE for i in range(SCALE_BYTES[coding.scale])]
    numbers = [codes, *parts, rope & _BYTE, rope >> 8]
    total = sum(_moved(number, move) for number, move in zip(numbers, moves, strict=True))
    out[...] = jnp.asarray(total).astype(jnp.int32).astype(jnp.uint8)


def _largest(
    magnitude: Int[Array, "rows width"], channel: Int[Array, "rows width"], layout: RowLayout
) -> Int[Array, "rows width"]:
    """Of each channel's group, see ``scales.largest_magnitude``."""
    size = layout.coding.group
    floor = int(np.float32(layout.coding.floor).view(np.int32))
    out = jnp.full_like(magnitude, floor)
    for group in range(layout.groups):
        inside = (channel >= group * size) & (channel < (group + 1) * size)
        top = jnp.max(jnp.where(inside, magnitude, 0), axis=1, keepdims=True)
        out = jnp.where(inside, jnp.maximum(top, floor), out)
    return out


def _scale_bits(amax: Int[Array, "rows width"], layout: RowLayout) -> Int[Array, "rows width"]:
    """Codes of scales, or float32 bits, by the rules of ``scales.choose``."""
    largest, finite = scales.LARGEST[layout.coding.bits], amax < floats.INFINITY
    if layout.coding.scale == "ue8m0":
        return jnp.where(finite, floats.ceil_power(amax, largest) + 127, floats.UE8M0_NAN)
    exact = floats.divided(amax, jnp.full_like(amax, int(np.float32(largest).view(np.int32))))
    if layout.coding.scale == "e4m3":
        return jnp.where(finite, floats.to_e4m3(exact), floats.E4M3_NAN)
    return jnp.where(finite, floats.bits_of(exact), floats.NAN)


def _codes(
    magnitude: Int[Array, "rows width"], stored: Int[Array, "rows width"], layout: RowLayout
) -> Int[Array, "rows width"]:
    """Codes without sign of float32 bits in units of the stored scales; as in ``reference``."""
    coding = layout.coding
    if coding.scale == "float32":
        return floats.to_e4m3(floats.divided(magnitude, stored))
    scale, _ = scales.as_dyadic(stored, coding.scale)
    if coding.bits == 4:
        return floats.to_e2m1(magnitude, scale)
    inverse = Dyadic(scale.factor, -scale.power).bits()
    return floats.to_e4m3(floats.from_bits(magnitude) * floats.from_bits(inverse))


def _rounded(bits: Int[Array, "*n"]) -> Int[Array, "*n"]:
    """bfloat16 bits of float32 bits: the nearest, ties to even; NaN stays NaN."""
    nearest = lax.shift_right_logical(bits + 0x7FFF + (lax.shift_right_logical(bits, 16) & 1), 16)
    quiet = lax.shift_right_logical(bits, 16) | 0x40
    return jnp.where(bits & 0x7FFFFFFF > floats.INFINITY, quiet, nearest)
