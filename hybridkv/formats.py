"""How one row is laid out in memory, as data.

A format only counts bytes here; the functions that turn numbers into those bytes and back are in
``pallas_kernels/packing``.
"""

import dataclasses

from hybridkv.arithmetic import cdiv, round_up


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowFormat:
    """The layout of one stored row of ``width`` channels, the last ``rope`` of them rotary."""

    name: str
    bits: int
    """Bits of one channel that carries no position."""
    rope_bits: int
    """Bits of one rotary channel."""
    scale_block: int = 0
    """Channels that share one scale, 0 for none. Rotary channels have a scale only when they are
    stored in ``bits`` too."""
    scale_bytes: int = 0
    """Bytes of one scale."""
    align: int = 1
    """A row's bytes are padded to a multiple of this."""

    def row_bytes(self, width: int, rope: int = 0) -> int:
        """Bytes of one row of ``width`` channels."""
        plain = width - rope
        scaled = width if self.rope_bits == self.bits else plain
        scales = cdiv(scaled, self.scale_block) * self.scale_bytes if self.scale_block else 0
        return round_up((plain * self.bits + rope * self.rope_bits) // 8 + scales, self.align)


FLOAT32 = RowFormat(name="float32", bits=32, rope_bits=32)
"""Full precision: 4 bytes a channel."""
BFLOAT16 = RowFormat(name="bfloat16", bits=16, rope_bits=16)
"""Half the bytes; rows are rounded once, when they are made."""
BFLOAT16_WORDS = RowFormat(name="bfloat16_words", bits=16, rope_bits=16)
"""The same numbers, two to a 32-bit word: for TPUs, where only words can be copied row by row."""
FP8_ROPE16 = RowFormat(
    name="fp8_rope16", bits=8, rope_bits=16, scale_block=64, scale_bytes=1, align=8
)
"""The release's KV row: e4m3, UE8M0 scales, rotary channels in bfloat16 (584 bytes at 512/64)."""
FP8_BLOCK32 = RowFormat(name="fp8_block32", bits=8, rope_bits=8, scale_block=32, scale_bytes=1)
"""V4.1's window row: e4m3 everywhere, UE8M0 scales (528 bytes at 512)."""
FP4_E4M3 = RowFormat(name="fp4_e4m3", bits=4, rope_bits=4, scale_block=16, scale_bytes=1)
"""V4.1's compressed row: e2m1 with e4m3 scales (288 bytes at 512)."""
MXFP4 = RowFormat(name="mxfp4", bits=4, rope_bits=4, scale_block=32, scale_bytes=1)
"""Index row: e2m1 with UE8M0 scales (68 bytes at 128)."""
FP8_INDEX = RowFormat(name="fp8_index", bits=8, rope_bits=8, scale_block=128, scale_bytes=4)
"""Index row as some engines keep it: e4m3 with one float32 scale (132 bytes at 128)."""

LANES = 128
"""Bytes of a TPU register's line."""
FP8_ROPE16_LANES = dataclasses.replace(FP8_ROPE16, name="fp8_rope16_lanes", align=LANES)
"""The same bytes, then zeros: for TPUs, where rows of bytes have to fill lines of registers, or
XLA lays a pool out with its blocks along the lines (640 bytes at 512/64)."""
MXFP4_LANES = dataclasses.replace(MXFP4, name="mxfp4_lanes", align=LANES)
"""The same (128 bytes at 128)."""
FP8_INDEX_LANES = dataclasses.replace(FP8_INDEX, name="fp8_index_lanes", align=LANES)
"""The same (256 bytes at 128)."""


def plain(dtype: str) -> RowFormat:
    """The unpacked format for a model of this dtype."""
    return BFLOAT16 if dtype == "bfloat16" else FLOAT32
