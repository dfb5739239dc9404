"""Packed rows as bfloat16, inside a TPU kernel: what attention multiplies, at few instructions.

    stored uint8 [32, stored]
      | data: codes, 1 for rotary channels --converted--> [32, width]
      | scales, and rotary channels themselves               * --> bfloat16
      |   as factors [32, 128] ------product, one-hot---> [32, width]
                                     (matrix unit)

No chip broadcasts a lane cheaply, so the matrix unit does it, exactly: each factor is a bfloat16
and meets a single number that is not zero. There, infinity times zero is NaN: a row with a scale,
a code or a rotary channel that is no number comes out with NaN in some channel or all, which is all
that a product with it can tell.

The product gives float32, eight rows a register; a chip that multiplies bfloat16 puts two of them
into one. Where even rows come first, those of rows 2i and 2i + 1 meet without another move.

Values are those of ``reference.decode``, but what bfloat16 arithmetic on a TPU takes for zero:
magnitudes below ``2 ** -126``, and minus zero, which is zero. Scales and rotary channels above
``2 ** 123``, which encoding never makes, count as NaN; the scale ``2 ** -127`` counts as zero.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, UInt8

from pallas_kernels.interpreting import interpret_params
from pallas_kernels.packing.layout import RowLayout
from pallas_kernels.tuning.table import device_kind

Ref = Any
LANES = 128
UNIT = 32
"""Rows that one register holds as bytes: what is decoded together."""
_TOGETHER = 256
"""Rows whose factors are one product."""
_ROPE = 64
"""Most rotary channels: their bytes fill one register's lanes."""


def _int(bits: int) -> np.int32:
    return np.uint32(bits).view(np.int32)


_BYTE, _SIGNS = _int(0x01010101), _int(0x80808080)
_LOW, _HIGH = _int(0x00FF00FF), _int(0xFF00FF00)
_EXPONENTS = _int(0x7F807F80)
_ONE = 0x38 * _BYTE
"""Codes of 1, or of a sixteenth."""
_FLOAT32_ONLY = ("TPU v2", "TPU v3", "TPU v4", "TPU v5")
"""Kinds of chips whose vector units have no bfloat16."""


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
    if wide and layout.scales.start // _ROPE != (layout.scales.stop - 1) // _ROPE:
        return f"{layout}: its scales leave no half of a register to rotary channels"
    return None


def converts_e4m3fn() -> bool:
    """Whether the chip that is traced for converts e4m3fn itself. The result is the same."""
    return device_kind() == "TPU7x"


class Chip(NamedTuple):
    """What decides how a chip decodes. The results are the same."""

    e4m3fn: bool
    """Whether it converts e4m3fn itself. Others convert e4m3b11fnuz, whose codes mean a sixteenth,
    but for minus zero and NaN."""
    halves: bool
    """Whether its vector units multiply bfloat16, two in a word."""


def chip() -> Chip:
    """The one that is traced for."""
    kind = device_kind()
    return Chip(e4m3fn=converts_e4m3fn(), halves=not kind.startswith(_FLOAT32_ONLY))


class Scratch(NamedTuple):
    """Fast memory of a decoder."""

    spread: Ref
    """bfloat16 ``[LANES, width]``: which lane of a row's factors is whose channel's."""
    factors: Ref
    """int32 ``[rows / 2, LANES]``: factors of two rows a word. Only where ``Chip.halves`` is not
    true: others have them in registers."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """How rows of one layout are decoded."""

    layout: RowLayout
    chip: Chip

    def scratch(self, rows: int) -> list[Any]:
        """Shapes of ``Scratch`` to decode so many rows at once."""
        words = UNIT // 2 if self.chip.halves else rows // 2
        return [
            pltpu.VMEM((LANES, self.layout.width), jnp.bfloat16),
            pltpu.VMEM((words, LANES), jnp.int32),
        ]

    def prepare(self, scratch: Scratch) -> None:
        """Fills ``spread``, once in a kernel."""
        layout = self.layout
        lane = lax.broadcasted_iota(jnp.int32, (LANES, layout.width), 0)
        channel = lax.broadcasted_iota(jnp.int32, (LANES, layout.width), 1)
        shift = layout.coding.group.bit_length() - 1
        source = self._first_scale + lax.shift_right_logical(channel, shift)
        rope = self._first_rope + channel - layout.coded
        here = lane == jnp.where(channel < layout.coded, source, rope)
        factor = 1.0 if self.chip.e4m3fn else 16.0
        scratch.spread[...] = jnp.where(here, factor, 0.0).astype(jnp.bfloat16)

    def decode(
        self,
        load: Callable[[int], UInt8[Array, "32 stored"]],
        rows: int,
        out: Ref,
        scratch: Scratch,
    ) -> None:
        """Writes bfloat16 rows, two a word, to ``out``.

        Args:
          load: reads rows ``32 * i ...``.
          rows: how many, a multiple of 32.
          out: int32 ``[rows / 2, width]``.
          scratch: see ``prepare``.
        """
        for first in range(0, rows, _TOGETHER):
            units = range(first // UNIT, min(first + _TOGETHER, rows) // UNIT)
            opened = [self._open(load(unit)) for unit in units]
            factors = self._spread([x.factors for x in opened], first // 2, scratch)
            for number in range(self.layout.width // LANES):
                lanes = slice(number * LANES, (number + 1) * LANES)
                for j, unit in enumerate(units):
                    mine = factors[j * UNIT : (j + 1) * UNIT, lanes]
                    value = self._product(opened[j].codes[number], mine)
                    out[unit * UNIT // 2 : (unit + 1) * UNIT // 2, lanes] = value

    @property
    def _first_scale(self) -> int:
        """Lane of the first scale, in its register."""
        return self.layout.scales.start % LANES

    @property
    def _first_rope(self) -> int:
        """Lane of the first rotary channel among the factors: in the half without scales."""
        return LANES - _ROPE if self._first_scale < LANES - _ROPE else 0

    def _open(self, stored: UInt8[Array, "32 stored"]) -> "_Opened":
        """Takes 32 stored rows apart. A rotary channel is its own factor, and its code is 1."""
        layout = self.layout
        tiles = _tiles(pltpu.bitcast(stored, jnp.int32))
        lane = lax.broadcasted_iota(jnp.int32, (8, LANES), 1)
        first, rest = self._first_scale, layout.coded % LANES
        codes = tiles[: layout.width // LANES]
        if layout.coded < layout.width:
            codes[-1] = jnp.where(lane < rest, codes[-1], _ONE) if rest else _filled(_ONE)
        scales = tiles[layout.scales.start // LANES]
        if not self.chip.e4m3fn:
            codes = _as_b11(codes)
        scales = jnp.where((lane >= first) & (lane < first + layout.groups), scales, 0)
        even = (scales << 7) & _EXPONENTS
        odd = lax.shift_right_logical(scales, 1) & _EXPONENTS
        if layout.coded < layout.width:
            low, high = self._rope_bytes(tiles, lane)
            start = self._first_rope
            here = (lane >= start) & (lane < start + layout.width - layout.coded)
            both = (low & _LOW) | ((high & _LOW) << 8)
            even = jnp.where(here, both, even)
            both = (lax.shift_right_logical(low, 8) & _LOW) | (high & _HIGH)
            odd = jnp.where(here, both, odd)
        return _Opened(codes, (even, odd))

    def _rope_bytes(
        self, tiles: list[Int[Array, "8 lanes"]], lane: Int[Array, "8 lanes"]
    ) -> tuple[Int[Array, "8 lanes"], Int[Array, "8 lanes"]]:
        """Lower and upper bytes of the rotary channels, at the lanes of their factors."""
        tile, begin = divmod(self.layout.wide.start, LANES)
        after = tiles[min(tile + 1, len(tiles) - 1)]
        together = jnp.where(lane >= begin, tiles[tile], after)
        # Upper bytes half a register away from the lower ones; one rotation then aligns both.
        half = LANES // 2
        channel = lane & (half - 1)
        upper = (lane < half) if self._first_rope else (lane >= half)
        source = (begin + 2 * channel + upper.astype(jnp.int32)) & (LANES - 1)
        low = jnp.take_along_axis(together, source, axis=1)
        return low, pltpu.roll(low, half, 1)

    def _spread(
        self, factors: list[tuple[Array, Array]], first: int, scratch: Scratch
    ) -> Float[Array, "rows width"]:
        """float32 factors of each channel. With ``halves`` the even rows of 32 stand first."""
        if self.chip.halves:
            words = jnp.concatenate([x for pair in factors for x in pair], axis=0)
        else:
            for unit, (even, odd) in enumerate(factors):
                _store_rows(scratch.factors, first + unit * UNIT // 2, even, odd)
            words = scratch.factors[first : first + len(factors) * UNIT // 2, :]
        return lax.dot_general(
            pltpu.bitcast(words, jnp.bfloat16),
            scratch.spread[...],
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )

    def _product(
        self, codes: Int[Array, "8 128"], factors: Float[Array, "32 128"]
    ) -> Int[Array, "16 128"]:
        """Codes of 32 rows times their factors, as bfloat16, two rows a word."""
        code = jnp.float8_e4m3fn if self.chip.e4m3fn else jnp.float8_e4m3b11fnuz
        value = lax.bitcast_convert_type(pltpu.bitcast(codes, jnp.uint8), code)
        if not self.chip.halves:
            product = value.astype(jnp.float32) * factors
        else:
            if not self.chip.e4m3fn:
                value = value.astype(jnp.float32)
            half = UNIT // 2
            words = [_paired(factors[i : i + 8], factors[half + i : half + i + 8]) for i in (0, 8)]
            pairs = pltpu.bitcast(jnp.concatenate(words, axis=0), jnp.bfloat16)
            product = value.astype(jnp.bfloat16) * pairs
        return pltpu.bitcast(product.astype(jnp.bfloat16), jnp.int32)


class _Opened(NamedTuple):
    """32 stored rows, taken apart."""

    codes: list[Int[Array, "8 128"]]
    """By register of channels, four rows a word."""
    factors: tuple[Int[Array, "8 128"], Int[Array, "8 128"]]
    """bfloat16, two rows a word: rows ``4s, 4s + 2`` and ``4s + 1, 4s + 3``."""


def _filled(word: Any) -> Int[Array, "8 128"]:
    return jnp.full((8, LANES), word, jnp.int32)


def _as_b11(tiles: list[Int[Array, "8 lanes"]]) -> list[Int[Array, "8 lanes"]]:
    """The codes with minus zero as zero.

    A row with NaN has it in the first of these registers, at the lane where it was found.
    """
    out, seen = [], jnp.zeros_like(tiles[0])
    for tile in tiles:
        magnitude = tile & (127 * _BYTE)
        seen = seen | (magnitude + _BYTE)
        out.append(tile & ((magnitude + 127 * _BYTE) | (127 * _BYTE)))
    nan = seen & _SIGNS
    out[0] = (out[0] & ~(nan - lax.shift_right_logical(nan, 7))) | nan
    return out


def _paired(low: Float[Array, "8 128"], high: Float[Array, "8 128"]) -> Int[Array, "8 128"]:
    """Two bfloat16 a word, of float32 that are bfloat16."""
    if not interpret_params():
        packed: Array = pltpu.pack_elementwise([low, high], packed_dtype=jnp.bfloat16)
        return lax.bitcast_convert_type(packed, jnp.int32)
    # What the interpreter has no word for.
    lower, upper = (lax.bitcast_convert_type(x, jnp.int32) for x in (low, high))
    return lax.shift_right_logical(lower, 16) | upper


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
    ref: Ref, start: int, even: Int[Array, "8 lanes"], odd: Int[Array, "8 lanes"]
) -> None:
    """Stores rows ``4s, 4s + 2`` of words ``even`` and ``4s + 1, 4s + 3`` of ``odd`` in order."""
    half = _int(0xFFFF)
    first = (even & half) | (odd << 16)
    second = lax.shift_right_logical(even, 16) | (odd & _int(0xFFFF0000))
    ref[pl.ds(start, 8, stride=2), :] = first
    ref[pl.ds(start + 1, 8, stride=2), :] = second
