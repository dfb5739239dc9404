"""The formats in which a DeepSeek-V4's cache stores its rows, by name.

What is stored is what is attended, in the step that makes it too, so each choice is another model:
warm runs equal cold runs of the same choice, bit for bit.
"""

import dataclasses
from collections.abc import Mapping

from hybridkv import formats
from hybridkv.formats import RowFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheFormats:
    """One format for each sort of row."""

    window: RowFormat
    rows: RowFormat
    index: RowFormat
    """A packed one makes the indexer compare rotated rows and queries, both of them stored in it:
    see ``models.deepseek_v4.indexer``."""

    @classmethod
    def uniform(cls, format: RowFormat) -> "CacheFormats":
        """The same for all."""
        return cls(window=format, rows=format, index=format)


CACHE_FORMATS: Mapping[str, CacheFormats] = {
    "float32": CacheFormats.uniform(formats.FLOAT32),
    "bfloat16": CacheFormats.uniform(formats.BFLOAT16),
    "bfloat16_words": CacheFormats(
        window=formats.BFLOAT16, rows=formats.BFLOAT16_WORDS, index=formats.BFLOAT16
    ),
    "release": CacheFormats(
        window=formats.FP8_ROPE16, rows=formats.FP8_ROPE16, index=formats.MXFP4
    ),
    "fp8_index": CacheFormats(
        window=formats.FP8_ROPE16, rows=formats.FP8_ROPE16, index=formats.FP8_INDEX
    ),
    "release_lanes": CacheFormats(
        window=formats.FP8_ROPE16_LANES, rows=formats.FP8_ROPE16_LANES, index=formats.MXFP4_LANES
    ),
    "fp8_index_lanes": CacheFormats(
        window=formats.FP8_ROPE16_LANES,
        rows=formats.FP8_ROPE16_LANES,
        index=formats.FP8_INDEX_LANES,
    ),
    "v4.1": CacheFormats(window=formats.FP8_BLOCK32, rows=formats.FP4_E4M3, index=formats.MXFP4),
}
"""Unrounded, rounded, the same with compressed rows in words (the bits of ``bfloat16``; rows can be
picked fast on a TPU), as the release stores it, that with float8 index rows, these two with rows
that fill lanes (the bits of ``release`` and ``fp8_index``; TPU kernels take them), as V4.1 does. A
token of V4-Flash costs 13760, 6880, 6880, 3514.25, 3850.25, 4132, 4804 and 1914 bytes."""
