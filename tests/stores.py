"""Small stores of random words, for tests: 4 tokens a block, 3 blocks a segment."""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from hybridkv.kinds import Kind
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.identity import Identity
from hybridkv.tiers.store import Store
from hybridkv.tiers.store.records import (
    BlockPlace,
    Extension,
    SnapshotAt,
    StoredExtension,
    StoreLayout,
)

BLOCK = 4
IDENTITY = Identity(geometry="g", weights="w", layout="l", numerics="n")
LAYOUT = StoreLayout(
    block_tokens=BLOCK,
    block_spans={Kind.COMPRESSED: slice(0, 6), Kind.INDEXER: slice(6, 8)},
    snapshot_spans={Kind.WINDOW: slice(0, 5), Kind.TAIL: slice(5, 7)},
    segment_blocks=3,
)


class Crash(BaseException):
    """A crash inside one process: nothing catches it, nothing is cleaned up."""


def crash() -> None:
    raise Crash


def tokens(blocks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, blocks * BLOCK).astype(np.uint32)


def block_words(digest: bytes, words: int = LAYOUT.block_words) -> np.ndarray:
    """The words of a block follow from its digest, so that any block can be checked."""
    return np.random.default_rng(list(digest)).integers(0, 2**32, words, dtype=np.uint32)


def snapshot_words(digest: bytes, words: int = LAYOUT.snapshot_words) -> np.ndarray:
    return np.random.default_rng([1, *digest]).integers(0, 2**32, words, dtype=np.uint32)


def extension(
    ids: np.ndarray, first: int = 0, snapshots: Sequence[int] = (), namespace: str = ""
) -> Extension:
    """Blocks ``first`` and on of these tokens; snapshots at the ends of so many blocks."""
    chain = TokenChain(IDENTITY.root(namespace), BLOCK)
    chain.extend(ids)
    digests = chain.digests
    return Extension(
        root=chain.root,
        parent=digests[first - 1].tobytes() if first else chain.root,
        first=first,
        tokens=chain.tokens[first * BLOCK : chain.blocks * BLOCK].copy(),
        digests=digests[first:].copy(),
        snapshots=tuple(
            SnapshotAt(position=n * BLOCK, digest=digests[n - 1].tobytes()) for n in snapshots
        ),
    )


def open_store(path: pathlib.Path, **options: object) -> Store:
    return Store.open(path, **({"identity": IDENTITY, "layout": LAYOUT} | options))


def commit(store: Store, what: Extension) -> StoredExtension:
    return store.commit(
        what,
        [block_words(what.digest(i), store.layout.block_words) for i in range(what.blocks)],
        [snapshot_words(at.digest, store.layout.snapshot_words) for at in what.snapshots],
    )


def read(store: Store) -> tuple[set[bytes], set[bytes]]:
    """Digests of all blocks and snapshots, after comparing every word of them."""
    blocks: dict[BlockPlace, bytes] = {}
    snapshots: dict[str, bytes] = {}
    for stored in store.extensions():
        inner = stored.extension
        blocks |= {place: inner.digest(i) for i, place in enumerate(stored.blocks)}
        snapshots |= {
            id_: at.digest for id_, at in zip(stored.snapshot_ids, inner.snapshots, strict=True)
        }
    for segment, rows in store.read_segments(sorted({place.segment for place in blocks})):
        for place, digest in blocks.items():
            if place.segment == segment:
                np.testing.assert_array_equal(rows[place.index], block_words(digest, rows.shape[1]))
    for id_, digest in snapshots.items():
        words = store.read_snapshot(id_)
        np.testing.assert_array_equal(words, snapshot_words(digest, len(words)))
    return set(blocks.values()), set(snapshots.values())


def files(path: pathlib.Path) -> dict[str, int]:
    """Size of every file of a store but its lock."""
    return {
        x.relative_to(path).as_posix(): x.stat().st_size
        for x in sorted(path.rglob("*"))
        if x.is_file() and x.name != "writer.lock"
    }


def with_identity(**parts: object) -> Identity:
    return dataclasses.replace(IDENTITY, **parts)
