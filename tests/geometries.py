"""Published geometries, and the TOY one, for the tests of ``hybridkv``."""

import dataclasses

from hybridkv import formats
from hybridkv.geometry import Geometry, LayerGeometry


def v4_layer(ratio: int, window: int = 128, sparse: int = 4) -> LayerGeometry:
    """One layer of the V4 family: overlap and index where it is sparse."""
    return LayerGeometry(
        window=window, ratio=ratio, overlap=ratio == sparse, indexed=ratio == sparse
    )


def v4(ratios: list[int], *, packed: bool) -> Geometry:
    """Rows of 512 channels, index rows of 128."""
    return Geometry(
        layers=tuple(v4_layer(ratio) for ratio in ratios),
        row_width=512,
        rope_width=64,
        index_width=128,
        window_format=formats.FP8_ROPE16 if packed else formats.BFLOAT16,
        row_format=formats.FP8_ROPE16 if packed else formats.BFLOAT16,
        index_format=formats.MXFP4 if packed else formats.BFLOAT16,
    )


FLASH_RATIOS = [0, 0] + [4, 128] * 20 + [4]
PRO_RATIOS = [128, 128] + [4, 128] * 29 + [4]
FLASH, PRO = v4(FLASH_RATIOS, packed=True), v4(PRO_RATIOS, packed=True)


def _v41_layer(number: int, ratio: int) -> LayerGeometry:
    owner = max((n for n in (2, 8, 14, 20) if n <= number), default=number)
    return LayerGeometry(
        window=128,
        ratio=ratio,
        indexed=ratio > 0,
        rows_of=owner if ratio and owner != number else None,
    )


V41 = Geometry(
    layers=tuple(_v41_layer(n, ratio) for n, ratio in enumerate([0, 0] + [2] * 18 + [1] * 20)),
    row_width=512,
    rope_width=64,
    index_width=128,
    window_format=formats.FP8_BLOCK32,
    row_format=formats.FP4_E4M3,
    index_format=formats.MXFP4,
)


def toy_geometry(ratios: tuple[int, ...] = (0, 4, 16, 4), window: int = 8) -> Geometry:
    """Ratio 4 overlaps and is indexed, others are not; float32."""
    return Geometry(
        layers=tuple(v4_layer(ratio, window) for ratio in ratios), row_width=16, index_width=8
    )


ODD_BYTES = dataclasses.replace(
    toy_geometry(window=5),
    window_format=formats.FP8_BLOCK32,
    row_format=formats.FP4_E4M3,
    index_format=formats.MXFP4,
)
"""Packed rows of 17, 9 and 5 bytes; a ring and the block of ratio 16 are no whole words."""
HOMOGENEOUS = Geometry(layers=(LayerGeometry(ratio=1),) * 3, row_width=16)
SHARED = Geometry(
    layers=(
        LayerGeometry(window=4),
        LayerGeometry(window=4, ratio=2, indexed=True),
        LayerGeometry(window=4, ratio=2, indexed=True, rows_of=1),
        LayerGeometry(ratio=1),
        LayerGeometry(window=4, ratio=1, rows_of=3),
    ),
    row_width=6,
    index_width=4,
)
"""A small one in which layers read rows of others."""


def changed(geometry: Geometry, **changes: object) -> Geometry:
    return dataclasses.replace(geometry, **changes)
