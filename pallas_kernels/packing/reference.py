"""XLA implementation of the row formats: elementwise, so that no row's bytes depend on others."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped, UInt8

from pallas_kernels.packing import floats, scales
from pallas_kernels.packing.floats import Dyadic
from pallas_kernels.packing.layout import Format, RowLayout, layout_of, layout_stored


def encode(rows: Float[Array, "*n width"], format: Format) -> Shaped[Array, "*n stored"]:
    """See ``api.encode``."""
    layout = layout_of(format, rows.shape[-1])
    if layout.name == "float32":
        return rows.astype(jnp.float32)
    if layout.name == "bfloat16":
        return _bfloat16_bits(rows)
    if layout.name == "bfloat16_words":
        low, high = jnp.split(_bfloat16_bits(rows).astype(jnp.uint32), 2, axis=-1)
        return low | (high << 16)
    if rows.shape[-1] != layout.width:
        raise ValueError(f"rows of {rows.shape[-1]} channels for {layout}")
    bits = floats.bits_of(rows[..., : layout.coded].astype(jnp.float32))
    groups = _grouped(bits, layout)
    magnitudes = groups & 0x7FFFFFFF
    amax = scales.largest_magnitude(magnitudes, layout.coding)
    stored = scales.choose(amax, layout.coding)
    codes = _codes(magnitudes, stored, layout)
    sign = (groups < 0).astype(jnp.int32) << (layout.coding.bits - 1)
    codes = jnp.where((amax < floats.INFINITY)[..., None], codes | sign, 0).astype(jnp.uint8)
    wide = _bfloat16_bits(rows[..., layout.coded :])
    pad = jnp.zeros((*rows.shape[:-1], layout.row_bytes - layout.scales.stop), jnp.uint8)
    parts = [_joined(_ungrouped(codes, layout), layout), _bytes(wide), stored, pad]
    return jnp.concatenate(parts, axis=-1)


def decode(stored: Shaped[Array, "*n stored"], format: Format) -> Float[Array, "*n width"]:
    """See ``api.decode``."""
    layout = layout_stored(format, stored.shape[-1])
    if layout.name == "float32":
        return stored
    if layout.name == "bfloat16":
        return jax.lax.bitcast_convert_type(stored, jnp.bfloat16).astype(jnp.float32)
    if layout.name == "bfloat16_words":
        halves = jnp.concatenate([stored << 16, stored & jnp.uint32(0xFFFF0000)], axis=-1)
        return jax.lax.bitcast_convert_type(halves, jnp.float32)
    if stored.shape[-1] != layout.row_bytes or stored.dtype != jnp.uint8:
        raise ValueError(f"stored rows are {stored.dtype}{list(stored.shape)} for {layout}")
    codes = _grouped(_split(stored[..., layout.data], layout), layout)
    magnitude, sign = floats.split_sign(codes, layout.coding.bits)
    value = _values(magnitude, stored[..., layout.scales], layout)
    coded = floats.from_bits(_ungrouped(value ^ sign, layout))
    low, high = (stored[..., layout.wide][..., i::2].astype(jnp.int32) for i in (0, 1))
    return jnp.concatenate([coded, floats.from_bits((low << 16) | (high << 24))], axis=-1)


def _codes(
    magnitudes: Int[Array, "*n groups group"], stored: UInt8[Array, "*n _"], layout: RowLayout
) -> Int[Array, "*n groups group"]:
    """Codes without sign of float32 bits in units of the stored scales."""
    coding = layout.coding
    if coding.scale == "float32":
        unit = floats.bits_of(scales.as_float32(stored))[..., None]
        return floats.to_e4m3(floats.divided(magnitudes, unit))
    scale, _ = scales.as_dyadic(stored, coding.scale)
    scale = Dyadic(*(part[..., None] for part in scale))
    if coding.bits == 4:
        return floats.to_e2m1(magnitudes, scale)
    # A product with a power of two is exact; the floor of such formats keeps it a normal number.
    inverse = Dyadic(scale.factor, -scale.power).bits()
    return floats.to_e4m3(floats.from_bits(magnitudes) * floats.from_bits(inverse))


def _values(
    magnitude: Int[Array, "*n groups group"], stored: UInt8[Array, "*n _"], layout: RowLayout
) -> Int[Array, "*n groups group"]:
    """float32 bits, without sign, of codes times their scales."""
    coding = layout.coding
    own = floats.e4m3_value(magnitude) if coding.bits == 8 else floats.e2m1_value(magnitude)
    if coding.scale == "float32":
        unit = scales.as_float32(stored)[..., None]
        value = floats.bits_of(floats.from_bits(own.bits()) * unit)
    else:
        scale, undefined = scales.as_dyadic(stored, coding.scale)
        factor, power = (part[..., None] for part in scale)
        value = Dyadic(own.factor * factor, own.power + power).bits()
        value = jnp.where(undefined[..., None], floats.NAN, value)
    return value if coding.bits == 4 else jnp.where(magnitude == floats.E4M3_NAN, floats.NAN, value)


def _grouped(x: Shaped[Array, "*n coded"], layout: RowLayout) -> Shaped[Array, "*n groups group"]:
    """Channels by group; a short last group is filled up with zeros."""
    missing = layout.groups * layout.coding.group - layout.coded
    if missing:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-1], layout.groups, layout.coding.group)


def _ungrouped(x: Shaped[Array, "*n groups group"], layout: RowLayout) -> Shaped[Array, "*n coded"]:
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])[..., : layout.coded]


def _joined(codes: UInt8[Array, "*n coded"], layout: RowLayout) -> UInt8[Array, "*n bytes"]:
    if layout.coding.bits == 8:
        return codes
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _split(data: UInt8[Array, "*n bytes"], layout: RowLayout) -> UInt8[Array, "*n coded"]:
    if layout.coding.bits == 8:
        return data
    pairs = jnp.stack([data & 15, data >> 4], axis=-1)
    return pairs.reshape(*data.shape[:-1], 2 * data.shape[-1])


def _bfloat16_bits(x: Float[Array, "*n"]) -> Shaped[Array, "*n"]:
    return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def _bytes(halves: Shaped[Array, "*n width"]) -> UInt8[Array, "*n bytes"]:
    """Little-endian bytes of uint16."""
    pairs = jnp.stack([halves & 0xFF, halves >> 8], axis=-1).astype(jnp.uint8)
    return pairs.reshape(*halves.shape[:-1], 2 * halves.shape[-1])
