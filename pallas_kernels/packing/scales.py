"""The scale that a group of channels shares: chosen from its largest magnitude, stored, read.

    ue8m0     2 ** ceil(log2(amax / largest))     release kernel.py: act_quant, fp4_act_quant
    e4m3      amax / largest, rounded to e4m3     V4.1's compressed rows
    float32   amax / largest                      index rows in float8, as serving engines keep them

A group with a channel that is not finite has NaN for its scale: all of it is read as NaN, as OCP MX
1.0 has it, and no other group is touched.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.packing import floats
from pallas_kernels.packing.floats import Dyadic
from pallas_kernels.packing.layout import Coding

LARGEST = {8: 448, 4: 6}
"""Largest value of a code, by its bits."""


def largest_magnitude(
    magnitudes: Int[Array, "*n groups group"], coding: Coding
) -> Int[Array, "*n groups"]:
    """float32 bits of each group's ``amax``, at least the floor; from infinity on if not finite."""
    floor = int(np.float32(coding.floor).view(np.int32))
    return jnp.maximum(jnp.max(magnitudes, axis=-1), floor)


def choose(amax: Int[Array, "*n groups"], coding: Coding) -> UInt8[Array, "*n scale_bytes"]:
    """Stored scales of groups whose largest magnitudes are ``amax`` (float32 bits)."""
    largest, finite = LARGEST[coding.bits], amax < floats.INFINITY
    if coding.scale == "ue8m0":
        codes = floats.ceil_power(amax, largest) + 127
        return jnp.where(finite, codes, floats.UE8M0_NAN).astype(jnp.uint8)
    shift = (largest & -largest).bit_length() - 1
    exact = floats.quotient(amax, largest >> shift, shift)
    if coding.scale == "e4m3":
        return jnp.where(finite, floats.to_e4m3(exact), floats.E4M3_NAN).astype(jnp.uint8)
    bits = jnp.where(finite, floats.bits_of(exact), floats.NAN)
    octets = jax.lax.bitcast_convert_type(bits, jnp.uint8)
    return octets.reshape(*amax.shape[:-1], 4 * amax.shape[-1])


def as_dyadic(stored: UInt8[Array, "*n groups"], scale: str) -> tuple[Dyadic, Array]:
    """ue8m0 or e4m3 scales, and where they are NaN (and the value something finite)."""
    codes = stored.astype(jnp.int32)
    if scale == "ue8m0":
        return Dyadic(jnp.ones_like(codes), codes - 127), codes == floats.UE8M0_NAN
    magnitude = codes & floats.E4M3_NAN  # a scale has no sign
    return floats.e4m3_value(magnitude), magnitude == floats.E4M3_NAN


def as_float32(stored: UInt8[Array, "*n scale_bytes"]) -> Float[Array, "*n groups"]:
    """float32 scales."""
    words = stored.reshape(*stored.shape[:-1], stored.shape[-1] // 4, 4)
    return jax.lax.bitcast_convert_type(words, jnp.float32)
