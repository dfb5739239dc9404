"""Small floating-point codes and back, by way of the bit patterns of float32.

    e4m3    s eeee mmm   bias 7, largest 448, magnitude 0x7F is NaN, no infinity   (OCP OFP8 1.0)
    e2m1    s ee m       0, 0.5, 1, 1.5, 2, 3, 4, 6                                (OCP MX 1.0)
    ue8m0   eeeeeeee     2 ** (code - 127), 0xFF is NaN                            (OCP MX 1.0)

Magnitudes are int32 bit patterns of non-negative float32 values: they compare as those do. Nearly
all is integer arithmetic, because XLA's CPU compiler takes subnormal operands for zeros and turns a
division by a constant into a product with its rounded inverse.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

INFINITY = 0x7F800000
NAN = 0x7FC00000
FRACTION = 0x7FFFFF
"""Bits of a float32 fraction; the exponent's begin above it."""
E4M3_NAN, UE8M0_NAN = 0x7F, 0xFF

_E2M1_TWICE = 0xC8643210
"""Twice the value of each e2m1 magnitude, four bits each."""
_E2M1_MIDDLES = (1, 3, 5, 7, 10, 14, 20)
"""Four times the middle between each two neighbouring e2m1 magnitudes."""

_QUOTIENT_BITS = 27
"""Bits of a quotient, the first of which may be zero: two more than a float32 keeps."""


class Dyadic(NamedTuple):
    """Numbers ``factor * 2 ** power``, which small codes and their products are."""

    factor: Int[Array, "*n"]
    """int32, at least 0 and below ``2 ** 24``."""
    power: Int[Array, "*n"]
    """int32."""

    def bits(self) -> Int[Array, "*n"]:
        """float32 bits, exact where the value is subnormal too; infinity past the largest."""
        own = bits_of(self.factor.astype(jnp.float32))
        exponent = (own >> 23) + self.power
        subnormal = ((own & FRACTION) | (FRACTION + 1)) >> jnp.clip(1 - exponent, 0, 31)
        value = jnp.where(exponent > 0, own + (self.power << 23), subnormal)
        value = jnp.where(exponent >= 255, INFINITY, value)
        return jnp.where(self.factor == 0, 0, value)


def bits_of(x: Float[Array, "*n"]) -> Int[Array, "*n"]:
    """int32 bit patterns of float32 values."""
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def from_bits(bits: Int[Array, "*n"]) -> Float[Array, "*n"]:
    """float32 values of int32 bit patterns."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def e4m3_value(magnitude: Int[Array, "*n"]) -> Dyadic:
    """Values of e4m3 codes without their sign; of NaN, something finite."""
    exponent = magnitude >> 3
    factor = jnp.where(exponent > 0, (magnitude & 7) | 8, magnitude & 7)
    return Dyadic(factor, jnp.maximum(exponent, 1) - 10)


def e2m1_value(magnitude: Int[Array, "*n"]) -> Dyadic:
    """Values of e2m1 codes without their sign."""
    table = jnp.full(magnitude.shape, _E2M1_TWICE, jnp.uint32)
    twice = (table >> (magnitude << 2).astype(jnp.uint32)) & 15
    return Dyadic(twice.astype(jnp.int32), jnp.full_like(magnitude, -1))


def to_e4m3(x: Float[Array, "*n"]) -> Int[Array, "*n"]:
    """The nearest e4m3 magnitudes of values from 0 on; ties go to the even code, 448 is the end.

    A value below the smallest normal float32 counts as zero or as itself, which both give code 0.
    """
    bits = bits_of(jnp.minimum(x, 448.0))
    nearest = (bits + (0x7FFFF + ((bits >> 20) & 1))) >> 20
    # Multiples of 2 ** -9, which is what float32 values near 2 ** 14 are spaced by.
    multiples = bits_of(x + 2.0**14) - ((127 + 14) << 23)
    return jnp.where(bits < (127 - 6) << 23, multiples, nearest - (120 << 3))


def to_e2m1(magnitude: Int[Array, "*n"], unit: Dyadic) -> Int[Array, "*n"]:
    """The nearest e2m1 magnitudes of float32 bits in units; ties go to the even code, 6 is the end.

    Compares with the middles between codes, each exact in float32, so that nothing is divided.
    """
    code = jnp.zeros_like(magnitude)
    for number, middle in enumerate(_E2M1_MIDDLES):
        limit = Dyadic(unit.factor * middle, unit.power - 2).bits()
        upper_is_even = number % 2 == 1
        code += (magnitude >= limit if upper_is_even else magnitude > limit).astype(jnp.int32)
    return code


def ceil_power(magnitude: Int[Array, "*n"], largest: int) -> Int[Array, "*n"]:
    """``ceil(log2(magnitude / largest))`` exactly, of normal float32 bits."""
    power = largest.bit_length() - 1
    fraction = (largest << 23 >> power) - (FRACTION + 1)
    above = ((magnitude & FRACTION) > fraction).astype(jnp.int32)
    return (magnitude >> 23) - 127 - power + above


def quotient(magnitude: Int[Array, "*n"], odd: int, shift: int) -> Float[Array, "*n"]:
    """``magnitude / (odd * 2 ** shift)`` rounded once, to the even neighbour in a tie.

    Args:
      magnitude: normal float32 bits, whose quotient must be normal too.
      odd: from 1 to 15.
      shift: of the divisor.
    """
    scaled = ((magnitude & FRACTION) | (FRACTION + 1)) << 7
    whole = scaled // odd
    rest = (scaled - whole * odd > 0).astype(jnp.int32)
    # At least 28 bits, the lowest of which says whether there was more: conversion rounds once.
    digits = bits_of((whole * 2 + rest).astype(jnp.float32))
    return from_bits(digits + (((magnitude >> 23) - 150 - 8 - shift) << 23))


def split_sign(codes: UInt8[Array, "*n"], bits: int) -> tuple[Int[Array, "*n"], Int[Array, "*n"]]:
    """Magnitude and float32 sign bit of codes of so many bits."""
    wide = codes.astype(jnp.int32)
    return wide & ((1 << bits - 1) - 1), (wide >> bits - 1) << 31


def divided(top: Int[Array, "*n"], unit: Int[Array, "*#n"]) -> Float[Array, "*n"]:
    """The float32 quotient of positive float32 bits, ``unit`` normal, rounded once.

    Bit by bit: no compiler here divides exactly. XLA's makes a product with a rounded inverse of a
    division by what is the same for many, Mosaic's and Triton's divide by an approximate one. What
    is below the smallest normal number, before or after, gives zero.
    """
    one = FRACTION + 1
    rest = (top & FRACTION) | one
    low = jnp.broadcast_to((unit & FRACTION) | one, rest.shape)
    digits = jnp.zeros_like(rest)
    for _ in range(_QUOTIENT_BITS):
        fits = rest >= low
        digits = (digits << 1) | fits.astype(jnp.int32)
        rest = jnp.where(fits, rest - low, rest) << 1
    # The lowest bit says whether there was more, so that conversion rounds once.
    whole = (digits << 1) | (rest > 0).astype(jnp.int32)
    bits = bits_of(whole.astype(jnp.float32))
    power = (top >> 23) - (unit >> 23) - _QUOTIENT_BITS
    normal = (top >= one) & ((bits >> 23) + power > 0)
    return from_bits(jnp.where(normal, bits + (power << 23), 0))
