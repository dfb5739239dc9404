"""The Pallas-Triton programs of ``encode`` and ``decode``: one a (tile of rows, group of channels).

Program ``layout.groups`` of a tile, where there is one, takes what has no scale: bfloat16 channels
and the zeros at the end.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.packing import floats, scales
from pallas_kernels.packing.floats import Dyadic
from pallas_kernels.packing.layout import RowLayout


def encode_program(rows, out, *, layout: RowLayout, tile: int) -> None:  # type: ignore[no-untyped-def]
    """Encodes a group; refs: ``rows`` ``[count, width]``, ``out`` uint8 ``[count, row_bytes]``."""
    row = pl.program_id(0) * tile + jnp.arange(tile, dtype=jnp.int32)
    inside, group = row < rows.shape[0], pl.program_id(1)

    @pl.when(group < layout.groups)
    def _coded() -> None:
        _encode_group(rows, out, row, inside, group, layout)

    @pl.when(group == layout.groups)
    def _rest() -> None:
        _encode_wide(rows, out, row, inside, layout)
        _zero_end(out, row, inside, layout)


def decode_program(stored, out, *, layout: RowLayout, tile: int) -> None:  # type: ignore[no-untyped-def]
    """Decodes a group; refs: ``stored`` uint8 ``[count, row_bytes]``, ``out`` float32."""
    row = pl.program_id(0) * tile + jnp.arange(tile, dtype=jnp.int32)
    inside, group = row < stored.shape[0], pl.program_id(1)

    @pl.when(group < layout.groups)
    def _coded() -> None:
        _decode_group(stored, out, row, inside, group, layout)

    @pl.when(group == layout.groups)
    def _rest() -> None:
        _decode_wide(stored, out, row, inside, layout)


def _encode_group(
    rows: Any, out: Any, row: jax.Array, inside: jax.Array, group: jax.Array, layout: RowLayout
) -> None:
    coding = layout.coding
    parts = 8 // coding.bits  # channels of a byte
    place = jnp.arange(coding.group // parts, dtype=jnp.int32)
    bits = []
    for part in range(parts):
        channel = group * coding.group + place * parts + part
        value = _read(rows, row, channel, inside, channel < layout.coded)
        bits.append(floats.bits_of(value.astype(jnp.float32)))
    tops = [scales.largest_magnitude(x & 0x7FFFFFFF, coding) for x in bits]
    amax = tops[0] if parts == 1 else jnp.maximum(*tops)
    scale = _store_scale(out, row, inside, group, amax, layout)
    finite = (amax < floats.INFINITY)[:, None]
    byte = jnp.zeros((row.shape[0], place.shape[0]), jnp.int32)
    for part, x in enumerate(bits):
        sign = (x < 0).astype(jnp.int32) << (coding.bits - 1)
        code = jnp.where(finite, _codes(x & 0x7FFFFFFF, scale, layout) | sign, 0)
        byte = byte | (code << (part * coding.bits))
    at = group * (coding.group // parts) + place
    _write(out, row, at, byte.astype(jnp.uint8), inside, at < layout.data.stop)


def _store_scale(
    out: Any,
    row: jax.Array,
    inside: jax.Array,
    group: jax.Array,
    amax: jax.Array,
    layout: RowLayout,
) -> Any:
    """Stores the scales of the rows' groups; gives them back, ``[tile, 1]``, as bits or dyadic."""
    if layout.coding.scale == "float32":
        largest = scales.LARGEST[layout.coding.bits]
        shift = (largest & -largest).bit_length() - 1
        exact = floats.bits_of(floats.quotient(amax, largest >> shift, shift))
        bits = jnp.where(amax < floats.INFINITY, exact, floats.NAN)
        for number in range(4):
            at = jnp.broadcast_to(layout.scales.start + 4 * group + number, row.shape)
            plt.store(out.at[row, at], (bits >> (8 * number)).astype(jnp.uint8), mask=inside)
        return bits[:, None]
    stored = scales.choose(amax, layout.coding)
    at = jnp.broadcast_to(layout.scales.start + group, row.shape)
    plt.store(out.at[row, at], stored, mask=inside)
    scale, _ = scales.as_dyadic(stored, layout.coding.scale)
    return Dyadic(*(part[:, None] for part in scale))


def _codes(magnitudes: jax.Array, scale: Any, layout: RowLayout) -> jax.Array:
    """Codes without sign of float32 bits; see ``reference``."""
    if layout.coding.scale == "float32":
        return floats.to_e4m3(floats.divided(magnitudes, scale))
    if layout.coding.bits == 4:
        return floats.to_e2m1(magnitudes, scale)
    inverse = Dyadic(scale.factor, -scale.power).bits()
    return floats.to_e4m3(floats.from_bits(magnitudes) * floats.from_bits(inverse))


def _encode_wide(rows: Any, out: Any, row: jax.Array, inside: jax.Array, layout: RowLayout) -> None:
    """Bytes of the bfloat16 channels; each channel is read for both."""
    count = layout.wide.stop - layout.wide.start
    if count == 0:
        return
    byte = jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32)
    value = _read(rows, row, layout.coded + byte // 2, inside, byte < count)
    half = jax.lax.bitcast_convert_type(value.astype(jnp.bfloat16), jnp.uint16).astype(jnp.int32)
    high = jnp.broadcast_to((byte % 2 == 1)[None, :], half.shape)
    own = jnp.where(high, half >> 8, half & 0xFF)
    _write(out, row, layout.wide.start + byte, own.astype(jnp.uint8), inside, byte < count)


def _zero_end(out: Any, row: jax.Array, inside: jax.Array, layout: RowLayout) -> None:
    count = layout.row_bytes - layout.scales.stop
    if count == 0:
        return
    byte = jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32)
    zeros = jnp.zeros((row.shape[0], byte.shape[0]), jnp.uint8)
    _write(out, row, layout.scales.stop + byte, zeros, inside, byte < count)


def _decode_group(
    stored: Any, out: Any, row: jax.Array, inside: jax.Array, group: jax.Array, layout: RowLayout
) -> None:
    coding = layout.coding
    channel = group * coding.group + jnp.arange(coding.group, dtype=jnp.int32)
    wanted = channel < layout.coded
    byte = _read(stored, row, channel * coding.bits // 8, inside, wanted).astype(jnp.int32)
    if coding.bits == 4:
        byte = (byte >> jnp.broadcast_to((channel % 2 * 4)[None, :], byte.shape)) & 15
    magnitude, sign = floats.split_sign(byte, coding.bits)
    own = floats.e4m3_value(magnitude) if coding.bits == 8 else floats.e2m1_value(magnitude)

    def scale_byte(number: int) -> jax.Array:
        size = 4 if coding.scale == "float32" else 1
        at = jnp.broadcast_to(layout.scales.start + size * group + number, row.shape)
        zero = jnp.zeros((), jnp.uint8)
        return plt.load(stored.at[row, at], mask=inside, other=zero)

    if coding.scale == "float32":
        low, second, third, high = (scale_byte(i).astype(jnp.int32) for i in range(4))
        word = low | (second << 8) | (third << 16) | (high << 24)
        unit = floats.from_bits(word)[:, None]
        value = floats.bits_of(floats.from_bits(own.bits()) * unit)
    else:
        scale, undefined = scales.as_dyadic(scale_byte(0), coding.scale)
        factor, power = (part[:, None] for part in scale)
        value = Dyadic(own.factor * factor, own.power + power).bits()
        value = jnp.where(undefined[:, None], floats.NAN, value)
    if coding.bits == 8:
        value = jnp.where(magnitude == floats.E4M3_NAN, floats.NAN, value)
    _write(out, row, channel, floats.from_bits(value ^ sign), inside, wanted)


def _decode_wide(
    stored: Any, out: Any, row: jax.Array, inside: jax.Array, layout: RowLayout
) -> None:
    count = layout.width - layout.coded
    if count == 0:
        return
    number = jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32)
    at, wanted = layout.wide.start + 2 * number, number < count
    low, high = (_read(stored, row, at + i, inside, wanted).astype(jnp.int32) for i in (0, 1))
    value = floats.from_bits((low << 16) | (high << 24))
    _write(out, row, layout.coded + number, value, inside, wanted)


def _read(
    ref: Any, row: jax.Array, column: jax.Array, inside: jax.Array, wanted: jax.Array
) -> jax.Array:
    """Elements ``[rows, columns]``; zeros where not inside or not wanted."""
    mask = inside[:, None] & wanted[None, :]
    return plt.load(ref.at[_spread(row, column)], mask=mask, other=jnp.zeros((), ref.dtype))


def _write(
    ref: Any,
    row: jax.Array,
    column: jax.Array,
    value: jax.Array,
    inside: jax.Array,
    wanted: jax.Array,
) -> None:
    mask = inside[:, None] & wanted[None, :]
    plt.store(ref.at[_spread(row, column)], value, mask=mask)


def _spread(row: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Indices of all pairs: the interpreter takes no arrays beside slices."""
    form = (row.shape[0], column.shape[0])
    return jnp.broadcast_to(row[:, None], form), jnp.broadcast_to(column[None, :], form)
