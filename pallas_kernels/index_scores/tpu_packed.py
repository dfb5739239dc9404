"""Packed index rows in the TPU kernel of index scores: what is multiplied, and what is scaled.

    mxfp4       bytes -> nibbles -> bfloat16 twice their value, in 32-bit words: exact.
                Lanes are channels 0, 2, 4 ... 1, 3, 5 ..., and so are the queries'. Of each 512
                rows the even ones come first: scores are put in order, not rows.
    fp8_index   codes -> bfloat16, exact. The bytes of the float32 scale are 128 more lanes; one
                product gives hits and scales, which then meet in float32.

Magnitudes below ``2 ** -126`` count as zero, as in all arithmetic of a TPU. UE8M0 scales of
``2 ** 125`` and more, which only numbers near the largest have, may count as NaN.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.packing.layout import RowLayout
from pallas_kernels.packing.tpu_rows import converts_e4m3fn

LANES = 128
LEAD = 16
"""Rows of queries that fetch the bytes of float32 scales."""
_FLAGS = LANES // 2
"""From this lane on: flags of codes that are NaN."""


def _int(bits: int) -> np.int32:
    return np.uint32(bits).view(np.int32)


_BYTE = _int(0x01010101)
_SIGNS = _int(0x80008000)
_EXPONENTS = _int(0x7F807F80)
_MAGNITUDES = _int(0x01C001C0)


def refusal(layout: RowLayout) -> str | None:
    """Why index rows of this layout are not scored here, or None."""
    if layout.name not in ("mxfp4", "fp8_index"):
        return f"index rows of format {layout.name!r}: use mxfp4 or fp8_index"
    if layout.width != LANES:
        return f"packed index rows of width {layout.width}: it must be {LANES}"
    return None


@dataclasses.dataclass(frozen=True)
class Packed:
    """How index rows of one layout are multiplied."""

    layout: RowLayout

    @property
    def fp4(self) -> bool:
        """Whether channels come in another order, or else rows with their scales beside them."""
        return self.layout.coding.bits == 4

    @property
    def lead(self) -> int:
        """Rows of queries before the first head."""
        return 0 if self.fp4 else LEAD

    @property
    def lanes(self) -> int:
        """Of a row that is multiplied."""
        return LANES if self.fp4 else 2 * LANES

    def queries(self, parts: Array) -> Array:
        """bfloat16 ``[n, t, heads, 128]`` queries as rows are multiplied with them."""
        if self.fp4:
            return jnp.concatenate([parts[..., 0::2], parts[..., 1::2]], axis=-1)
        wide = jnp.pad(parts, ((0, 0), (0, 0), (LEAD, 0), (0, LANES)))
        row = lax.broadcasted_iota(jnp.int32, (LEAD, 2 * LANES), 0)
        lane = lax.broadcasted_iota(jnp.int32, (LEAD, 2 * LANES), 1) - LANES
        byte = (row < 4) & (lane == row)
        flag = (row == 4) & (lane >= _FLAGS)
        fetch = (byte | flag).astype(wide.dtype)
        return wide.at[..., :LEAD, :].set(fetch)

    def decode(self, stored: UInt8[Array, "rows stored"]) -> Float[Array, "rows lanes"]:
        """bfloat16 rows to multiply."""
        words = pltpu.bitcast(stored, jnp.int32)
        missing = -words.shape[1] % LANES
        words = jnp.pad(words, ((0, 0), (0, missing)))
        return self._nibbles(words) if self.fp4 else self._bytes(words)

    def hits(self, products: Float[Array, "lines rows"], heads: int, parts: int) -> Any:
        """float32 ``[heads, rows]``: what each head gives for each row."""
        lead = self.lead
        total = products[lead : lead + heads]
        for part in range(1, parts):
            total = total + products[lead + part * heads : lead + (part + 1) * heads]
        return total if self.fp4 else total * _scales(products)

    def in_order(self, totals: list[Float[Array, "1 rows"]]) -> Float[Array, "8 128"]:
        """Scores of a tile's rows, from those of its parts."""
        lines = [
            [x[:, first : first + LANES] for first in range(0, x.shape[1], LANES)] for x in totals
        ]
        if not self.fp4:
            return jnp.concatenate([line for part in lines for line in part], axis=0)
        half = len(lines[0]) // 2
        even = [line for part in lines for line in part[:half] for _ in (0, 1)]
        odd = [line for part in lines for line in part[half:] for _ in (0, 1)]
        line = lax.broadcasted_iota(jnp.int32, (8, LANES), 0)
        lane = lax.broadcasted_iota(jnp.int32, (8, LANES), 1)
        source = (line & 1) * (LANES // 2) + (lane >> 1)
        first, second = (
            jnp.take_along_axis(jnp.concatenate(x, axis=0), source, axis=1) for x in (even, odd)
        )
        return jnp.where(lane & 1 == 0, first, second)

    def _nibbles(self, words: Int[Array, "words 128"]) -> Array:
        """Even rows, then odd ones: two of the four rows of a word fit into one as bfloat16."""
        lane = lax.broadcasted_iota(jnp.int32, words.shape, 1)
        upper = lane >= LANES // 2
        high = lax.shift_right_logical(pltpu.roll(words, LANES // 2, 1), 4)
        nibbles = jnp.where(upper, high, words)
        group = self.layout.coding.group // 2  # bytes that share a scale
        source = self.layout.scales.start + ((lane & (LANES // 2 - 1)) >> group.bit_length() - 1)
        codes = jnp.take_along_axis(words, source, axis=1)
        sides = []
        for magnitude, sign, exponent in (
            (nibbles << 6, nibbles << 12, codes << 7),
            (nibbles >> 2, nibbles << 4, codes >> 1),
        ):
            scale = exponent & _EXPONENTS
            # What a code and its scale are as a float: twice their product for codes from 1 on.
            # Codes of 0 and 1/2 have no hidden bit: they come out as 1 and 3/2 times the scale,
            # and are 0 and 1/2 above it.
            unit = pltpu.bitcast(scale, jnp.bfloat16)
            above = pltpu.bitcast((magnitude & _MAGNITUDES) + scale, jnp.bfloat16) - unit
            # The scale NaN is infinity here: above is then NaN or its negative, and the sum NaN.
            value = above + jnp.minimum(unit, jnp.abs(above))
            bits = pltpu.bitcast(value, jnp.int32) | (sign & _SIGNS)
            sides.append(pltpu.bitcast(bits, jnp.bfloat16))
        return jnp.concatenate(sides, axis=0)

    def _bytes(self, words: Int[Array, "words 256"]) -> Array:
        """Codes, then the bytes of the scale; flags of codes that are NaN in other lanes."""
        codes, rest = words[:, :LANES], words[:, LANES:]
        lane = lax.broadcasted_iota(jnp.int32, rest.shape, 1)
        flags = jnp.zeros_like(rest)
        if not converts_e4m3fn():
            # Without that instruction: e4m3b11fnuz is a sixteenth, but for minus zero and NaN.
            magnitude = codes & (127 * _BYTE)
            undefined = (magnitude + _BYTE) & _int(0x80808080)
            flags = jnp.where(lane >= _FLAGS, undefined | pltpu.roll(undefined, LANES // 2, 1), 0)
            codes = codes & ((magnitude + 127 * _BYTE) | (127 * _BYTE))
        value = lax.bitcast_convert_type(pltpu.bitcast(codes, jnp.uint8), _code())
        if not converts_e4m3fn():
            value = value.astype(jnp.float32)
        rest = jnp.where(lane < 4, rest, flags)
        # Of a flag any number but zero will do; bytes are exact.
        beside = pltpu.bitcast(rest, jnp.uint8).astype(jnp.int32).astype(jnp.float32)
        return jnp.concatenate([value.astype(jnp.bfloat16), beside.astype(jnp.bfloat16)], axis=1)


def _code() -> Any:
    """The type of codes that the chip converts."""
    return jnp.float8_e4m3fn if converts_e4m3fn() else jnp.float8_e4m3b11fnuz


def _scales(products: Float[Array, "lines rows"]) -> Float[Array, "1 rows"]:
    """Scales from their bytes, times what codes are short of; NaN where a flag is."""
    four = products[:LEAD].astype(jnp.int32)
    bits = sum((four[byte : byte + 1] << 8 * byte for byte in range(1, 4)), four[:1])
    scale = lax.bitcast_convert_type(bits, jnp.float32)
    scale = scale if converts_e4m3fn() else scale * 16.0
    return jnp.where(four[4:5] != 0, jnp.nan, scale)
