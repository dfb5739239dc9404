"""Where the bytes of one stored row are, as data.

    packed row   [ data: channels in order | rope: bfloat16 | scales: groups in order | zeros ]
    words        [ channels 0 and w/2 | channels 1 and w/2 + 1 | ... ], the first in the lower half
    two e2m1 a byte, the lower channel in the lower nibble; bfloat16 and float32 little-endian

Sizes agree with ``hybridkv.formats``, which counts the same bytes for those who only size a cache.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class Coding:
    """How the channels of one format are coded."""

    bits: int
    """Of one coded channel: 32 and 16 are plain floats, 8 is e4m3, 4 is e2m1."""
    scale: str = ""
    """What a group's scale is: ``ue8m0``, ``e4m3``, ``float32``, or nothing for plain floats."""
    group: int = 0
    """Channels that share one scale; the last group of a row may be shorter."""
    floor: float = 0.0
    """A group whose largest magnitude is below this has the scale of one that reaches it."""
    wide_rope: bool = False
    """Whether rotary channels are not coded but kept in bfloat16, without a scale."""
    align: int = 1
    """A row's bytes are padded to a multiple of this."""
    words: bool = False
    """Whether a number of 32 bits has two channels of 16: below i, above it i + width / 2."""


CODINGS: Mapping[str, Coding] = {
    "float32": Coding(bits=32),
    "bfloat16": Coding(bits=16),
    # For TPUs: rows of 32-bit words can be copied one by one.
    "bfloat16_words": Coding(bits=16, words=True),
    # Release kernel.py, act_quant of the KV rows.
    "fp8_rope16": Coding(bits=8, scale="ue8m0", group=64, floor=1e-4, wide_rope=True, align=8),
    # V4.1 modelling notes name element and scale types only; the floor is the release's.
    "fp8_block32": Coding(bits=8, scale="ue8m0", group=32, floor=1e-4),
    # As above; the floor is what the smallest e4m3 scale, 2 ** -9, reaches.
    "fp4_e4m3": Coding(bits=4, scale="e4m3", group=16, floor=6 * 2.0**-9),
    # Release kernel.py, fp4_act_quant of the index rows.
    "mxfp4": Coding(bits=4, scale="ue8m0", group=32, floor=6 * 2.0**-126),
    "fp8_index": Coding(bits=8, scale="float32", group=128, floor=1e-4),
}
"""How rows can be coded."""

PADDED: Mapping[str, str] = {
    "fp8_rope16_lanes": "fp8_rope16",
    "mxfp4_lanes": "mxfp4",
    "fp8_index_lanes": "fp8_index",
}
"""Formats whose rows are those of a coding and zeros up to whole lines of a TPU's registers."""
LANES = 128
"""Bytes of such a line."""

SCALE_BYTES: Mapping[str, int] = {"": 0, "ue8m0": 1, "e4m3": 1, "float32": 4}


@dataclasses.dataclass(frozen=True)
class RowLayout:
    """One row of ``width`` channels, the last ``rope`` of them rotary.

    Raises:
      NotImplementedError: no format has this name.
      ValueError: more rotary channels than there are, or half a byte at the end of the data.
    """

    name: str
    """Of its coding."""
    width: int
    rope: int = 0
    align: int = 1
    """A row's bytes are padded to a multiple of this too, whatever its coding asks for."""

    def __post_init__(self) -> None:
        if self.name not in CODINGS:
            raise NotImplementedError(
                f"no rows are stored as {self.name!r}: use one of {', '.join(CODINGS)}"
            )
        if not 0 <= self.rope <= self.width:
            raise ValueError(f"{self.rope} rotary channels in a row of {self.width}")
        if self.coded * self.coding.bits % 8:
            raise ValueError(f"{self.name} stores two channels a byte: {self.coded} is odd")
        if self.coding.words and self.width % 2:
            raise ValueError(f"{self.name} stores two channels a word: {self.width} is odd")
        if self.align != 1 and not self.packed:
            raise ValueError(f"rows of {self.name} are numbers, not bytes: they are not padded")

    @property
    def coding(self) -> Coding:
        """How its channels are coded."""
        return CODINGS[self.name]

    @property
    def packed(self) -> bool:
        """Whether a stored row is bytes, rather than one number a channel."""
        return bool(self.coding.group)

    @property
    def format(self) -> "Format":
        """What kernels are told: a name where that says it all, so that they can look it up."""
        return self if self.packed else self.name

    @property
    def coded(self) -> int:
        """Channels that are coded: all, or those that are not kept as bfloat16."""
        return self.width - self.rope if self.coding.wide_rope else self.width

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return -(-self.coded // self.coding.group) if self.packed else 0

    @functools.cached_property
    def data(self) -> slice:
        """Bytes of the coded channels."""
        return slice(0, self.coded * self.coding.bits // 8)

    @functools.cached_property
    def wide(self) -> slice:
        """Bytes of the channels kept in bfloat16."""
        return slice(self.data.stop, self.data.stop + 2 * (self.width - self.coded))

    @functools.cached_property
    def scales(self) -> slice:
        """Bytes of the scales."""
        return slice(self.wide.stop, self.wide.stop + self.groups * SCALE_BYTES[self.coding.scale])

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row, padding included."""
        align = math.lcm(self.coding.align, self.align)
        return -(-self.scales.stop // align) * align


Format = RowLayout | str
"""What encode and decode take: a layout, or for plain floats just their name, which says it all."""


def layout_named(name: str, width: int, rope: int = 0) -> RowLayout:
    """The layout of a format of ``CODINGS`` or ``PADDED``: kernels know codings, and how wide.

    Raises:
      NotImplementedError: no format has this name.
    """
    if name in PADDED:
        return RowLayout(PADDED[name], width, rope, align=LANES)
    return RowLayout(name, width, rope)


def layout_stored(format: Format, stored: int) -> RowLayout:
    """As ``layout_of``, of stored rows of so many numbers."""
    words = not isinstance(format, RowLayout) and format in CODINGS and CODINGS[format].words
    return layout_of(format, 2 * stored if words else stored)


def layout_of(format: Format, width: int) -> RowLayout:
    """The layout that is meant, of rows of ``width`` channels where only a name is given.

    Raises:
      NotImplementedError: no format has this name.
      ValueError: a packed format is named without its layout.
    """
    layout = format if isinstance(format, RowLayout) else RowLayout(format, width)
    if layout.packed and layout is not format:
        raise ValueError(
            f"rows of format {format!r} are bytes, which the name alone does not explain: "
            f"pass RowLayout({format!r}, width, rope)"
        )
    return layout
