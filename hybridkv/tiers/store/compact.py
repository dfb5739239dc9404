r"""Compaction: rows that are alive move from segments that are mostly dead to new ones.

[a . . .]  [. b . .]  [c d e .]      dots are blocks that were removed
 \__________/            stays: at least half of it is alive
   [a b]                 new segment -> manifests that refer to it -> old ones deleted

One new segment after the other, so that no more room is needed than one takes.
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import UInt32

from hybridkv.tiers.store.index import Index
from hybridkv.tiers.store.manifest import SEGMENTS, Manifest
from hybridkv.tiers.store.records import BlockPlace, Damaged
from hybridkv.tiers.store.writing import Writer


def groups(index: Index, size: int) -> list[list[str]]:
    """Sparse segments in order, as many together as have rows for a new one of ``size``.

    Each goes as a whole, so that it can be deleted as soon as the new one is there.
    """
    found: list[list[str]] = []
    rows = 0
    for segment in index.sparse():
        alive = len(index.rows[segment])
        if not found or rows + alive > size:
            found.append([])
            rows = 0
        found[-1].append(segment)
        rows += alive
    return found


def needed_bytes(index: Index, group: Sequence[str], row_bytes: int) -> int:
    """What a group's new segment takes: its rows, and files beside them as the old ones have."""
    beside = 0
    for segment in group:
        folder = index.folders[f"{SEGMENTS}/{segment}"]
        beside = max(beside, folder.bytes - folder.rows * row_bytes)
    return beside + row_bytes * sum(len(index.rows[segment]) for segment in group)


def rewrite(
    index: Index,
    writer: Writer,
    read: Callable[[str], UInt32[np.ndarray, "n block_words"]],
    group: Sequence[str],
) -> tuple[list[tuple[Manifest, Manifest]], list[Damaged]]:
    """Writes one segment for a group; returns manifests as they are and as they become.

    An old segment and the rows of the new one are in memory. One that can't be read stays as it
    is; the second list has the reason of each.
    """
    unread: list[Damaged] = []
    digests: list[bytes] = []
    alive: list[UInt32[np.ndarray, " block_words"]] = []
    for segment in group:
        try:
            rows = read(segment)
        except Damaged as error:
            unread.append(error)
            continue
        for row, digest in sorted(index.rows[segment].items()):
            digests.append(digest)
            alive.append(rows[row].copy())
    moved = dict(zip(digests, writer.segments(alive), strict=True))
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
