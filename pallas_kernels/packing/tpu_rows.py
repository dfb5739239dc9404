"""Packed rows as bfloat16, inside a TPU kernel: what attention multiplies, at few instructions.

    stored uint8 [32, stored]
      | data: converted to floats by the hardware         v
      | rope: bytes brought together lane by lane          [32, width] * scales --> bfloat16
      | scales: exponents [32, 128] --product, one-hot--> [32, width]
                                     (matrix unit)

No chip broadcasts a lane cheaply, so the matrix unit does it, exactly: each scale is a power of two
and meets a single number that is not zero. There, infinity times zero is NaN: a row with a scale
or a code that is NaN comes out with NaN in some channel or all, which is all that a product with it
can tell.

Values are those of ``reference.decode``, but what bfloat16 arithmetic on a TPU takes for zero:
magnitudes below ``2 ** -126``, and minus zero, which is zero. Scales above ``2 ** 123``, which
encoding never makes, count as NaN; the scale ``2 ** -127`` counts as zero.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, UInt8

from pallas_kernels.packing.layout import RowLayout
from pallas_kernels.tuning.table import device_kind

Ref = Any
LANES = 128
UNIT = 32
"""Rows that one register holds as bytes: what is decoded together."""
_TOGETHER = 128
"""Rows whose scales are one product."""
_ROPE = 64
"""Most rotary channels: their bytes fill one register's lanes."""


def _int(bits: int) -> np.int32:
    return np.uint32(bits).view(np.int32)


_BYTE, _SIGNS = _int(0x01010101), _int(0x80808080)
_LOW, _HIGH = _int(0x00FF00FF), _int(0xFF00FF00)
_EXPONENTS = _int(0x7F807F80)


def refusal(layout: RowLayout) -> str | None:
    """Why rows of this layout are not decoded here, or None."""
    coding = layout.coding
    if coding.bits != 8 or coding.scale != "ue8m0":
        return f"rows of format {layout.name!r}: use fp8_rope16 or fp8_block32"
    if layout.width % LANES:
        return f"packed rows of width {layout.width}: it must be a multiple of {LANES}"
    wide = layout.width - layout.coded
    if wide and (wide > _ROPE or wide % 2 or layout.wide.start % 2):
        return f"{wide} rotary channels in packed rows: at most {_ROPE}, and an even number"
    if layout.scales.start // LANES != (layout.scales.stop - 1) // LANES:
        return f"{layout}: its scales are not in one register of bytes"
    return None


def converts_e4m3fn() -> bool:
    """Whether the chip that is traced for converts e4m3fn itself. The result is the same."""
    return device_kind() == "TPU7x"


class Scratch(NamedTuple):
    """Fast memory of a decoder."""

    spread: Ref
    """bfloat16 ``[LANES, width]``: which lane of a scale register scales which channel."""
    exponents: Ref
    """int32 ``[rows / 2, LANES]``: scales as bfloat16, two rows a word."""
    rope: Ref
    """int32 ``[rows / 2, LANES]``: rotary channels as bfloat16, two rows a word."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """How rows of one layout are decoded."""

    layout: RowLayout
    e4m3fn: bool
    """Whether the chip converts e4m3fn itself. Others convert e4m3b11fnuz, whose codes mean a
    sixteenth, but for minus zero and NaN."""

    def scratch(self, rows: int) -> list[Any]:
        """Shapes of ``Scratch`` to decode so many rows at once."""
        words = pltpu.VMEM((rows // 2, LANES), jnp.int32)
        return [pltpu.VMEM((LANES, self.layout.width), jnp.bfloat16), words, words]

    def prepare(self, scratch: Scratch) -> None:
        """Fills ``spread``, once in a kernel."""
        layout = self.layout
        lane = lax.broadcasted_iota(jnp.int32, (LANES, layout.width), 0)
        channel = lax.broadcasted_iota(jnp.int32, (LANES, layout.width), 1)
        shift = layout.coding.group.bit_length() - 1
        coded = channel < layout.coded
        source = self._first_scale + lax.shift_right_logical(channel, shift)
        here = lane == jnp.where(coded, source, self._one)
        factor = jnp.where(coded, 1.0 if self.e4m3fn else 16.0, 1.0)
        scratch.spread[...] = jnp.where(here, factor, 0.0).astype(jnp.bfloat16)

    def decode(
        self,
        load: Callable[[int], UInt8[Array, "32 stored"]],
        rows: int,
        out: Ref,
        scratch: Scratch,
    ) -> None:
        """Writes bfloat16 rows to ``out [rows, width]``; ``load(i)`` reads rows ``32 * i ...``."""
        for first in range(0, rows, _TOGETHER):
            units = range(first // UNIT, min(first + _TOGETHER, rows) // UNIT)
            coded = [self._open(load(unit), unit, scratch) for unit in units]
            words = scratch.exponents[units.start * UNIT // 2 : units.stop * UNIT // 2, :]
            scales = lax.dot_general(
                pltpu.bitcast(words, jnp.bfloat16),
                scratch.spread[...],
                (((1,), (0,)), ((), ())),
                preferred_element_type=jnp.float32,
            ).astype(self._product)
            for j, unit in enumerate(units):
                mine = scales[j * UNIT : (j + 1) * UNIT]
                self._close(coded[j], mine, unit, out, scratch)

    @property
    def _product(self) -> Any:
        """What codes are converted to: straight to bfloat16 where that is one instruction."""
        return jnp.bfloat16 if self.e4m3fn else jnp.float32

    @property
    def _first_scale(self) -> int:
        """Lane of the first scale, in its register."""
        return self.layout.scales.start % LANES

    @property
    def _one(self) -> int:
        """A lane without a scale, which holds the scale 1 of the rotary channels."""
        return (self._first_scale + self.layout.groups) % LANES

    def _open(
        self, stored: UInt8[Array, "32 stored"], unit: int, scratch: Scratch
    ) -> list[Int[Array, "8 lanes"]]:
        """Words of the coded channels, by register; leaves scales and rope in ``scratch``."""
        layout = self.layout
        tiles = _tiles(pltpu.bitcast(stored, jnp.int32))
        lane = lax.broadcasted_iota(jnp.int32, (8, LANES), 1)
        first = self._first_scale
        scales = jnp.where(
            (lane >= first) & (lane < first + layout.groups),
            tiles[layout.scales.start // LANES],
            jnp.where(lane == self._one, 127 * _BYTE, 0),
        )
        if layout.coded < layout.width:
            low, high = self._rope_bytes(tiles, lane)
            even = (low & _LOW) | ((high & _LOW) << 8)
            odd = (lax.shift_right_logical(low, 8) & _LOW) | (high & _HIGH)
            _store_rows(scratch.rope, unit, even, odd)
        coded = tiles[: -(-layout.coded // LANES)]
        if not self.e4m3fn:
            coded, undefined = self._as_b11(coded, lane)
            scales = scales | undefined
        even = (scales << 7) & _EXPONENTS
        odd = lax.shift_right_logical(scales, 1) & _EXPONENTS
        _store_rows(scratch.exponents, unit, even, odd)
        return coded

    def _rope_bytes(
        self, tiles: list[Int[Array, "8 lanes"]], lane: Int[Array, "8 lanes"]
    ) -> tuple[Int[Array, "8 lanes"], Int[Array, "8 lanes"]]:
        """Lower and upper bytes of the rotary channels, at the lanes of their channels."""
        start, channels = self.layout.wide.start, self.layout.width - self.layout.coded
        tile, begin = divmod(start, LANES)
        after = tiles[min(tile + 1, len(tiles) - 1)]
        together = jnp.where(lane >= begin, tiles[tile], after)
        # Upper bytes half a register before the lower ones; one rotation then aligns both.
        channel = (lane & (LANES // 2 - 1)) - (LANES // 2 - channels)
        upper = (lane < LANES // 2).astype(jnp.int32)
        source = (begin + 2 * channel + upper) & (LANES - 1)
        low = jnp.take_along_axis(together, source, axis=1)
        return low, pltpu.roll(low, LANES // 2, 1)

    def _as_b11(
        self, tiles: list[Int[Array, "8 lanes"]], lane: Int[Array, "8 lanes"]
    ) -> tuple[list[Int[Array, "8 lanes"]], Int[Array, "8 lanes"]]:
        """The codes with 0x80 as 0, and 0xFF in a byte for NaN codes in its row, in some lane."""
        out, seen = [], jnp.zeros_like(tiles[0])
        rest = self.layout.coded % LANES
        for number, tile in enumerate(tiles):
            magnitude = tile & (127 * _BYTE)
            reached = magnitude + _BYTE
            if rest and number == len(tiles) - 1:
                reached = jnp.where(lane < rest, reached, 0)
            seen = seen | reached
            out.append(tile & ((magnitude + 127 * _BYTE) | (127 * _BYTE)))
        top = seen & (_SIGNS)
        return out, top | (top - lax.shift_right_logical(top, 7))

    def _close(
        self,
        coded: list[Int[Array, "8 lanes"]],
        scales: Any,
        unit: int,
        out: Ref,
        scratch: Scratch,
    ) -> None:
        """Converts a unit's codes and multiplies them with their scales."""
        code = jnp.float8_e4m3fn if self.e4m3fn else jnp.float8_e4m3b11fnuz
        layout = self.layout
        rows = pl.ds(unit * UNIT, UNIT)
        for number in range(layout.width // LANES):
            lanes = slice(number * LANES, (number + 1) * LANES)
            inside = layout.coded - number * LANES
            value = None
            if inside > 0:
                data = pltpu.bitcast(coded[number], jnp.uint8)
                value = lax.bitcast_convert_type(data, code).astype(self._product)
            if inside < LANES:
                words = scratch.rope[unit * UNIT // 2 : (unit + 1) * UNIT // 2, :]
                rope = pltpu.bitcast(words, jnp.bfloat16).astype(self._product)
                lane = lax.broadcasted_iota(jnp.int32, rope.shape, 1)
                value = rope if value is None else jnp.where(lane < inside, value, rope)
            out[rows, lanes] = (value * scales[:, lanes]).astype(jnp.bfloat16)


def clear(stored: UInt8[Array, "32 stored"], length: Any) -> UInt8[Array, "32 stored"]:
    """Zero bytes, which are zeros, in rows from ``length`` on."""
    words = pltpu.bitcast(stored, jnp.int32)
    left = length - 4 * lax.broadcasted_iota(jnp.int32, words.shape, 0)
    keep = jnp.zeros_like(words)
    for row in range(4):
        keep = keep | jnp.where(left > row, _int(0xFF << 8 * row), 0)
    return pltpu.bitcast(words & keep, jnp.uint8)


def _tiles(words: Int[Array, "8 stored"]) -> list[Int[Array, "8 lanes"]]:
    """By register; the last one is filled up."""
    missing = -words.shape[1] % LANES
    if missing:
        words = jnp.pad(words, ((0, 0), (0, missing)))
    return [words[:, first : first + LANES] for first in range(0, words.shape[1], LANES)]


def _store_rows(
    ref: Ref, unit: int, even: Int[Array, "8 lanes"], odd: Int[Array, "8 lanes"]
) -> None:
    """Stores rows ``4s, 4s + 2`` of words ``even`` and ``4s + 1, 4s + 3`` of ``odd`` in order."""
    half = _int(0xFFFF)
    start = unit * UNIT // 2
    first = (even & half) | (odd << 16)
    second = lax.shift_right_logical(even, 16) | (odd & _int(0xFFFF0000))
    ref[pl.ds(start, 8, stride=2), :] = first
    ref[pl.ds(start + 1, 8, stride=2), :] = second
