"""How a store's writer changes files, in an order that a crash at any point can't hurt.

    commit   folders -> read back and compare -> checksums of files -> manifest        visible now
    remove   manifests without it, leaves first -> folders that nobody refers to       gone before
    compact  new segments -> manifests that refer to them -> old segments

Orbax forces only some of its files to the disk, so all are forced there before the manifest, which
demands them at their sizes: a power cut could leave it without them.

One thread, which holds the store's lock. Raises whatever the file system raises: the store turns it
into one line and undoes what was made.
"""

import pathlib
from collections.abc import Container, Mapping, Sequence

import numpy as np
from jaxtyping import UInt32

from hybridkv.tiers.faults import Faults, Point
from hybridkv.tiers.store import header as store_header
from hybridkv.tiers.store import manifest as manifests
from hybridkv.tiers.store import segments
from hybridkv.tiers.store.folder import Folder
from hybridkv.tiers.store.loading import Loader
from hybridkv.tiers.store.manifest import (
    MANIFESTS,
    SEGMENTS,
    SNAPSHOTS,
    FileRecord,
    FolderRecord,
    Manifest,
    RawRange,
)
from hybridkv.tiers.store.records import BlockPlace, StoreLayout

_POINTS = {SEGMENTS: Point.WRITE_SEGMENT, SNAPSHOTS: Point.WRITE_SNAPSHOT}


class Writer:
    """Writes folders and manifests, and remembers what an undo has to delete."""

    def __init__(self, folder: Folder, layout: StoreLayout, faults: Faults) -> None:
        self._folder = folder
        self._layout = layout
        self._faults = faults
        self.made: list[str] = []
        """Names that are written or half written, in order."""
        self.records: dict[str, FolderRecord] = {}
        """Of folders that were written whole."""
        self._unsynced: list[str] = []
        """Files of theirs that a power cut could still take away."""

    def segments(self, blocks: Sequence[UInt32[np.ndarray, " block_words"]]) -> list[BlockPlace]:
        """Writes blocks, some of them a segment, and says where each is."""
        places, size = [], self._layout.segment_blocks
        for first in range(0, len(blocks), size):
            rows = np.stack(blocks[first : first + size])
            id_ = self.folder(SEGMENTS, rows, len(rows))
            places += [BlockPlace(id_, index) for index in range(len(rows))]
        return places

    def snapshot(self, words: UInt32[np.ndarray, " snapshot_words"]) -> str:
        """Writes one snapshot; returns its id."""
        return self.folder(SNAPSHOTS, np.ascontiguousarray(words), 1)

    def folder(self, group: str, array: UInt32[np.ndarray, "..."], rows: int) -> str:
        """Writes one folder, reads it back, and returns its id."""
        id_ = manifests.new_id()
        name = f"{group}/{id_}"
        if not array.size:  # nothing to write, and zarr has no arrays without bytes
            self.records[name] = FolderRecord(rows=rows, files={})
            return id_
        self.made.append(name)
        path, leaf = self._folder.path / name, segments.LEAF[group]
        segments.save(path, leaf, array)
        self._faults.reach(_POINTS[group], path=path)
        if not np.array_equal(segments.start_read(path, leaf, array.shape).result(), array):
            raise OSError(f"{name} does not hold what was written")
        files = self._folder.records(name)
        raw = self._raw(name, files, array)
        self.records[name] = FolderRecord(rows=rows, files=files, raw=raw)
        self._unsynced += [f"{name}/{file}" for file in files]
        return id_

    def _raw(
        self, name: str, files: Mapping[str, FileRecord], array: UInt32[np.ndarray, "..."]
    ) -> RawRange | None:
        """Where the array's bytes lie as they are: looked for, not taken from how Orbax does it."""
        found = np.empty(array.nbytes, np.uint8)
        for path, file in files.items():
            for offset in sorted({0, max(file.size - array.nbytes, 0)}):
                if offset + array.nbytes > file.size:
                    continue
                for _ in self._folder.fill(f"{name}/{path}", file.size, offset, [found]):
                    if np.array_equal(found, array.reshape(-1).view(np.uint8)):
                        return RawRange(path=path, offset=offset, bytes=array.nbytes)
        return None

    def manifest(self, manifest: Manifest, *, new: bool) -> int:
        """Writes a manifest, which makes its extension visible; returns its bytes.

        Args:
          manifest: what to write.
          new: whether ``undo`` may delete it; another version of one that exists stays.
        """
        data = manifest.encode()
        if len(data) > manifests.MOST_BYTES:
            raise ValueError("the extension has too many tokens: commit it in parts")
        manifests.decode(manifest.id, data, self._layout)  # a reader must accept it
        path = self._folder.path / manifest.key
        before = None if new else self._folder.read(manifest.key, manifests.MOST_BYTES)
        self._folder.sync(self._unsynced)
        self._unsynced.clear()
        written = self._faults.reach(Point.WRITE_MANIFEST, data, path)
        if new:
            self.made.append(manifest.key)
        self._folder.write(manifest.key, written)
        if self._folder.read(manifest.key, manifests.MOST_BYTES) != data:
            if before is not None:  # what was committed stays found
                self._folder.write(manifest.key, before)
            raise OSError(f"{manifest.key} does not hold what was written")
        return len(data)

    def undo(self, used: Container[str] = ()) -> list[str]:
        """Deletes what was made and is not used, last first; returns what could not be deleted."""
        left = []
        for name in reversed(self.made):
            if name in used:
                continue
            for each in (name, *leftovers(self._folder, name)):
                left += delete(self._folder, each, self._faults)
        self.made.clear()
        return left


def delete(folder: Folder, name: str, faults: Faults) -> list[str]:
    """Deletes a file or folder; returns its name in a list when that failed."""
    try:
        faults.reach(Point.DELETE, path=folder.path / name)
        folder.remove(name)
    except OSError:
        return [name]
    return []


def leftovers(folder: Folder, name: str) -> list[str]:
    """What Orbax and TensorStore leave beside a name when they are interrupted."""
    parent = str(pathlib.PurePosixPath(name).parent)
    return [x for x in folder.subfolders(parent) if x.startswith(f"{name}.")]


def orphans(folder: Folder, loader: Loader) -> list[str]:
    """What an interrupted writer left behind, and nothing else.

    While some manifest can't be read, only what never was whole: the rest may be that manifest's.
    """
    used = {name for manifest in loader.decoded.values() for name in manifest.folders}
    found = [name for name in folder.subfolders(MANIFESTS) if name.endswith(".__lock")]
    found += [name for name in [store_header.UNFINISHED] if (folder.path / name).is_file()]
    for group in (SEGMENTS, SNAPSHOTS):
        for name in folder.subfolders(group):
            if name not in used and ("." in name or not loader.unreadable):
                found.append(name)
    return found
