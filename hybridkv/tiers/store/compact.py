r"""Compaction: rows that are alive move from segments that are mostly dead to new ones.

[a . . .]  [. b . .]  [c d e .]      dots are blocks that were removed
 \__________/            stays: at least half of it is alive
   [a b]                 new segment -> manifests that refer to it -> old ones deleted
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import UInt32

from hybridkv.tiers.store.index import Index
from hybridkv.tiers.store.manifest import Manifest
from hybridkv.tiers.store.records import BlockPlace, Damaged
from hybridkv.tiers.store.writing import Writer


def rewrite(
    index: Index,
    writer: Writer,
    read: Callable[[str], UInt32[np.ndarray, "n block_words"]],
    size: int,
) -> tuple[list[tuple[Manifest, Manifest]], list[Damaged]]:
    """Writes new segments for sparse ones; returns manifests as they are and as they become.

    At most two segments are in memory. One that can't be read stays as it is; the second list has
    the reason of each.
    """
    unread: list[Damaged] = []
    moved: dict[bytes, BlockPlace] = {}
    waiting: list[tuple[bytes, UInt32[np.ndarray, " block_words"]]] = []

    def write(count: int) -> None:
        places = writer.segments([row for _, row in waiting[:count]])
        moved.update(zip((digest for digest, _ in waiting[:count]), places, strict=True))
        del waiting[:count]

    for segment in index.sparse():
        try:
            rows = read(segment)
        except Damaged as error:
            unread.append(error)
            continue
        waiting += [(digest, rows[row]) for row, digest in sorted(index.rows[segment].items())]
        if len(waiting) >= size:
            write(size)
    if waiting:
        write(len(waiting))
    changes = [
        (manifest, _with_places(manifest, index.block_tokens, moved, writer))
        for manifest in index.ordered()
        if any(manifest.extension.digest(i) in moved for i in range(manifest.extension.blocks))
    ]
    return changes, unread


def _with_places(
    manifest: Manifest, block_tokens: int, moved: dict[bytes, BlockPlace], writer: Writer
) -> Manifest:
    places = tuple(
        moved.get(manifest.extension.digest(number), place)
        for number, place in enumerate(manifest.places)
    )
    changed = manifest.changed(block_tokens, places=places, folders=writer.records)
    assert changed is not None  # it keeps all of its blocks
    return changed
