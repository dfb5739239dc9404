"""Values of small codes inside Triton programs, by way of float16: few instructions a value.

For products, where a code's value is all that counts. ``gpu_kernel`` decodes to the last bit.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def e4m3(code: Int[Array, "*n"]) -> Float[Array, "*n"]:
    """float32 values of e4m3 codes: those of float16 with the same fraction, 256 times as large."""
    code = code.astype(jnp.int32)
    value = _half(((code & 0x7F) << 7) | ((code & 0x80) << 8)) * 256.0
    return jnp.where((code & 0x7F) == 0x7F, jnp.nan, value)


def e2m1(code: Int[Array, "*n"]) -> Float[Array, "*n"]:
    """float32 values of e2m1 codes, the lower four bits of each number; the others are ignored."""
    code = code.astype(jnp.int32)
    return _half(((code & 7) << 9) | ((code & 8) << 12)) * 16384.0


def ue8m0(code: Int[Array, "*n"]) -> Float[Array, "*n"]:
    """float32 values of ue8m0 codes; 0 is a subnormal number, 0xFF is NaN."""
    code = code.astype(jnp.int32)
    bits = jnp.where(code == 0, 0x00400000, code << 23)
    bits = jnp.where(code == 0xFF, 0x7FC00000, bits)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _half(bits: Int[Array, "*n"]) -> Float[Array, "*n"]:
    half = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.float16)
    return half.astype(jnp.float32)
