"""The on-disk prefix store: blocks and snapshots of token sequences that outlive the process.

    <path>/store.json          identity, layout, capacity              store_header
    <path>/writer.lock         one writer, many readers, enforced
    <path>/segments/<id>/      Orbax: uint32 [blocks, block_words]     segments
    <path>/snapshots/<id>/     Orbax: uint32 [snapshot_words]
    <path>/manifests/<id>.json what is committed; written last         manifest, store_loading

A prefix is found through a manifest or not at all, so a reader sees all of its kinds or none. Words
are opaque here: numpy in, numpy out, no device.

Threads: ``commit``, ``remove``, ``compact`` and ``close`` belong to one thread, that of the writer.
Everything else may be called by any thread at any time. Reading never deletes anything.
"""

import os
import pathlib
import time
from collections.abc import Iterable, Sequence
from typing import NoReturn

import filelock
import numpy as np
from jaxtyping import UInt32

from hybridkv.prefixes.identity import Identity
from hybridkv.tiers.digests import kind_digests, row_digests
from hybridkv.tiers.faults import NO_FAULTS, Faults, Point
from hybridkv.tiers.store import compact as compaction
from hybridkv.tiers.store import header as store_header
from hybridkv.tiers.store import manifest as manifests
from hybridkv.tiers.store.folder import Folder, one_line
from hybridkv.tiers.store.header import Header
from hybridkv.tiers.store.index import Index
from hybridkv.tiers.store.manifest import MANIFESTS, SEGMENTS, SNAPSHOTS, Manifest
from hybridkv.tiers.store.reading import StoreReader
from hybridkv.tiers.store.records import (
    WORD_BYTES,
    BlockPlace,
    Damaged,
    Extension,
    Problem,
    ProblemKind,
    StoredExtension,
    StoreError,
    StoreFullError,
    StoreLayout,
    StoreWriteError,
)
from hybridkv.tiers.store.verify import Progress
from hybridkv.tiers.store.writing import Writer, delete, orphans

_IN_FLIGHT = 4


class Store(StoreReader):
    """A folder of prefixes of one identity. ``Store.open`` makes one; use it in a ``with``."""

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        identity: Identity,
        layout: StoreLayout,
        writable: bool = True,
        create: bool = True,
        capacity_bytes: int | None = None,
        digests: bool = True,
        faults: Faults = NO_FAULTS,
    ) -> "Store":
        """Opens a store for one identity, or makes it.

        Args:
          path: the folder; missing or empty, a store is made there.
          identity: what the bytes depend on besides tokens and namespace.
          layout: how blocks and snapshots are words. A store that exists keeps its own
            ``segment_blocks``; see ``Store.layout``.
          writable: takes the writer's lock; other processes may still read.
          create: whether a missing store is made; only when writable.
          capacity_bytes: bytes of all of the store's files; None for what the store was made with.
          digests: verifies xxh3_128 of every kind on every read.
          faults: injection points, for tests.

        Raises:
          StoreError: it is no store, of another version, identity or layout, damaged, locked by
            another writer, or can't be read or written; or a kind is missing in ``layout``.
        """
        store_header.check_kinds(identity, layout)
        store_header.check_capacity(capacity_bytes)
        wanted = Header(identity=identity, layout=layout, capacity_bytes=capacity_bytes)
        make = wanted if create and writable else None
        return cls._open(path, wanted, make, writable, capacity_bytes, digests, faults)

    @classmethod
    def open_as_is(
        cls,
        path: str | os.PathLike[str],
        *,
        writable: bool = False,
        digests: bool = True,
        faults: Faults = NO_FAULTS,
    ) -> "Store":
        """Opens a store that exists for whatever identity it has: for tools without the model.

        Raises:
          StoreError: as ``open``.
        """
        return cls._open(path, None, None, writable, None, digests, faults)

    @classmethod
    def _open(
        cls,
        path: str | os.PathLike[str],
        wanted: Header | None,
        make: Header | None,
        writable: bool,
        capacity_bytes: int | None,
        digests: bool,
        faults: Faults,
    ) -> "Store":
        folder = Folder(pathlib.Path(os.path.abspath(path)))
        header = store_header.read(folder)  # before a lock is left in what is no store
        if header is None and make is None:
            raise StoreError(f"there is no store at {folder.path}: give the folder of one")
        lock = _locked(folder.path, faults) if writable else None
        try:
            header = _read_or_make(folder, make, faults)
            if wanted is not None:
                store_header.accept(header, wanted.identity, wanted.layout, folder.path)
            return cls(
                folder,
                header,
                lock=lock,
                capacity_bytes=header.capacity_bytes if capacity_bytes is None else capacity_bytes,
                digests=digests,
                faults=faults,
            )
        except BaseException as error:
            if lock is not None:
                lock.release()
            if isinstance(error, OSError | ValueError) and not isinstance(error, StoreError):
                raise StoreError(
                    f"can't open the store {folder.path} ({one_line(error)}): mend that"
                ) from error
            raise

    # ---- writing

    def commit(
        self,
        extension: Extension,
        blocks: Sequence[UInt32[np.ndarray, " block_words"]],
        snapshots: Sequence[UInt32[np.ndarray, " snapshot_words"]],
    ) -> StoredExtension:
        """Writes an extension and makes it visible as a whole.

        Blocks and snapshots that are committed already are not written again. Returns the whole
        extension with the place of each block, wherever it is.

        Args:
          extension: what is added; its parent is committed, or it is a first one.
          blocks: words of each block.
          snapshots: words of each snapshot.

        Raises:
          StoreFullError: the capacity does not allow it.
          StoreWriteError: it could not be written; nothing of it can be found.
          StoreError: it contradicts itself, its parent is not there, or this is no writer.
        """
        self._check_writer()
        extension = manifests.normal(extension, self.layout.block_tokens)
        self._check_commit(extension, blocks, snapshots)
        known = self._known(extension)
        new = [
            i for i, at in enumerate(extension.snapshots) if at.digest not in self._index.snapshots
        ]
        self._check_parents(extension, known, new)
        if known == extension.blocks and not new:
            return self._located(extension)
        part = _part(extension, known, new, self.layout.block_tokens)
        words = [*blocks[known:], *(snapshots[i] for i in new)]
        self._check_space(sum(x.nbytes for x in words))
        writer = Writer(self._folder, self.layout, self._faults)
        try:
            manifest = self._written(writer, part, words)
        except Exception as error:
            self._fail(writer, error)
        except BaseException:
            self._stale = True
            raise
        with self._mutex:
            self._index.add(manifest)
        self._faults.reach(Point.COMMITTED, path=self.path / manifest.key)
        return self._located(extension)

    def remove(
        self,
        blocks: Iterable[BlockPlace],
        snapshots: Iterable[str] = (),
        *,
        with_children: bool = False,
    ) -> None:
        """Removes blocks and snapshots: first from manifests, then from the disk.

        A segment goes with its last block. What is not there is passed over.

        Args:
          blocks: where they are.
          snapshots: their ids.
          with_children: removes all that goes on from the blocks too.

        Raises:
          StoreError: a child or a snapshot of a block would stay; nothing is removed.
          StoreWriteError: a file could not be changed; what is left is whole.
        """
        self._check_writer()
        changes = self._index.reduced(blocks, snapshots, with_children=with_children)
        self._apply(changes, Writer(self._folder, self.layout, self._faults))

    def compact(self, *, beyond_capacity: bool = False) -> int:
        """Writes segments anew of which less than half is alive; returns the bytes freed.

        Places of their blocks change, when nobody is ``reading``: ``find`` and ``extensions`` tell
        the new ones. A segment that can't be read stays as it is, and stands in ``problems``; one
        for whose rows the capacity has no room stays too, for another time.

        Args:
          beyond_capacity: goes on where it has none, and takes a segment's bytes more meanwhile.

        Raises:
          StoreWriteError: a file could not be changed; what is left is whole, and segments that
            were written anew before stay so.
        """
        self._check_writer()
        before, row_bytes = self._bytes, self.layout.block_words * WORD_BYTES
        for group in compaction.groups(self._index, self.layout.segment_blocks):
            needed = compaction.needed_bytes(self._index, group, row_bytes)
            if beyond_capacity or self._has_room(needed):
                self._compact(group)
        return before - self._bytes

    def _compact(self, group: Sequence[str]) -> None:
        """Writes one segment in the place of several."""
        writer = Writer(self._folder, self.layout, self._faults)
        try:
            changes, unread = compaction.rewrite(self._index, writer, self._read_one, group)
            self._bytes += sum(record.bytes for record in writer.records.values())
            if changes:
                self._faults.reach(Point.COMPACT)
        except Exception as error:
            self._fail(writer, error)
        except BaseException:
            self._stale = True
            raise
        with self._gate.moving():
            self._apply(changes, writer)
        self._remember_unread(unread)

    def discard_problems(self, progress: Progress | None = None) -> int:
        """Removes what can't be used; returns the bytes freed.

        Every byte is read. Manifests that are not used go, with what only they refer to. So do
        segments and snapshots of which a file is damaged or can't be read, with all blocks that
        stand in them and what goes on from those.

        Args:
          progress: is told how far the reading is.

        Raises:
          StoreWriteError: a file could not be changed; what is left is whole.
        """
        self._check_writer()
        before = self._bytes
        self._load()  # what could only not be read when it was opened stays
        for problem in self.problems:
            if problem.file.startswith(f"{MANIFESTS}/"):
                delete(self._folder, problem.file, self._faults)
        self._load()
        # Only now: a manifest that lies would blame the files of others.
        found = self.verify(progress)
        wrong = [x.file for x in found if x.kind is not ProblemKind.UNREFERENCED]
        folders = {"/".join(file.split("/", 2)[:2]) for file in wrong}
        segments = [x for x in self._index.rows if f"{SEGMENTS}/{x}" in folders]
        snapshots = [x for x in self._index.snapshot_ids if f"{SNAPSHOTS}/{x}" in folders]
        blocks = [BlockPlace(x, row) for x in segments for row in self._index.rows[x]]
        self.remove(blocks, snapshots, with_children=True)
        return before - self._bytes

    def _tidy(self, index: Index, problems: list[Problem]) -> list[Problem]:
        """A writer deletes what nobody refers to or needs, and counts what is left."""
        self._stale = False
        if not self.writable:
            return problems
        spare = [x for x in problems if self._loader.is_spare(x, index)]
        left = [x for x in spare if delete(self._folder, x.file, self._faults)]
        for problem in spare:
            if problem not in left:
                self._loader.forget(problem.file)
        problems = [x for x in problems if x not in spare or x in left]
        problems += self._delete(orphans(self._folder, self._loader))
        self._bytes = sum(self._folder.sizes().values())
        return problems

    def _check_writer(self) -> None:
        self._check_open()
        if not self.writable:
            raise StoreError(f"the store {self.path} is open for reading: open it writable=True")
        if not self._is_there():  # what is written there would be found by nobody
            raise StoreWriteError(
                f"the store {self.path} was deleted or replaced: make a new engine to open it again"
            )
        if self._stale:  # something failed half-way: believe the disk
            self._load()

    def _check_commit(
        self, extension: Extension, blocks: Sequence[np.ndarray], snapshots: Sequence[np.ndarray]
    ) -> None:
        try:
            manifests.check_extension(extension, self.layout.block_tokens)
        except ValueError as error:
            raise StoreError(f"the extension can't be committed: {error}") from None
        for name, arrays, count, words in (
            ("block", blocks, extension.blocks, self.layout.block_words),
            ("snapshot", snapshots, len(extension.snapshots), self.layout.snapshot_words),
        ):
            if len(arrays) != count:
                raise StoreError(f"the extension has {count} {name}s, not {len(arrays)}: give each")
            for array in arrays:
                if array.dtype != np.uint32 or array.shape != (words,):
                    raise StoreError(
                        f"a {name} is {array.dtype} {list(array.shape)}: give uint32 [{words}]"
                    )

    def _known(self, extension: Extension) -> int:
        """How many of its blocks, from the first, are committed: those of any are its leading."""
        for number in range(extension.blocks):
            if extension.digest(number) not in self._index.blocks:
                return number
        return extension.blocks

    def _check_parents(self, extension: Extension, known: int, new: Sequence[int]) -> None:
        own = {extension.digest(number) for number in range(known, extension.blocks)}
        below = [extension.snapshots[i].digest for i in new]
        below += [extension.parent] if extension.first else []
        if any(x not in own and x not in self._index.blocks for x in below):
            raise StoreError("the extension goes on from what is not committed: commit that first")

    def _has_room(self, needed: int) -> bool:
        return self._capacity is None or self._bytes + needed <= self._capacity

    def _check_space(self, needed: int) -> None:
        if not self._has_room(needed):
            raise StoreFullError(
                f"the store {self.path} has {self._bytes:,} of {self._capacity:,} bytes and "
                f"{needed:,} more were to be written: remove prefixes first"
            )

    def _written(self, writer: Writer, part: Extension, words: Sequence[np.ndarray]) -> Manifest:
        """Writes folders and then the manifest."""
        layout, count = self.layout, part.blocks
        places = writer.segments(words[:count])
        ids = tuple(writer.snapshot(array) for array in words[count:])
        manifest = Manifest(
            id=manifests.new_id(),
            identity=self._header.digest,
            extension=part,
            places=tuple(places),
            block_checks=row_digests(words[:count], layout.block_spans),
            snapshot_ids=ids,
            snapshot_checks=tuple(kind_digests(x, layout.snapshot_spans) for x in words[count:]),
            folders=dict(writer.records),
            written=time.time(),
        )
        size = writer.manifest(manifest, new=True)
        self._bytes += size + sum(record.bytes for record in writer.records.values())
        return manifest

    def _located(self, extension: Extension) -> StoredExtension:
        """A committed extension with its places, which may be in several manifests."""
        index = self._index
        blocks = [index.blocks[extension.digest(i)] for i in range(extension.blocks)]
        snapshots = [index.snapshots[at.digest] for at in extension.snapshots]
        last = index.manifests[([*snapshots, *blocks][-1])[0]]
        return StoredExtension(
            id=last.id,
            extension=extension,
            blocks=tuple(index.manifests[id_].places[i] for id_, i in blocks),
            snapshot_ids=tuple(index.manifests[id_].snapshot_ids[i] for id_, i in snapshots),
            written=last.written,
        )

    def _apply(self, changes: Sequence[tuple[Manifest, Manifest | None]], writer: Writer) -> None:
        """Writes manifests anew, in order, then deletes folders that nobody refers to."""
        dead: set[str] = set()
        try:
            for old, new in changes:
                before = self._folder.version(old.key)[2]
                after = 0
                if new is None:
                    self._faults.reach(Point.DELETE, path=self.path / old.key)
                    self._folder.delete(old.key)
                else:
                    after = writer.manifest(new, new=False)
                with self._mutex:
                    self._index.replace(old, new)
                self._bytes += after - before
                dead |= old.folders.keys() - self._index.folders.keys()
        except Exception as error:
            self._fail(writer, error)
        except BaseException:
            self._stale = True
            raise
        finally:
            if not self._stale:
                self._remember(self._delete(sorted(dead)))

    def _delete(self, names: Iterable[str]) -> list[Problem]:
        """Deletes what nobody refers to; a problem for each that stays."""
        problems = []
        for name in names:
            size = sum(self._folder.sizes(name).values())
            if delete(self._folder, name, self._faults):
                reason = "no manifest refers to it, and it can't be deleted"
                problems.append(Problem(kind=ProblemKind.UNREFERENCED, file=name, reason=reason))
            else:
                self._bytes -= size
        return problems

    def _remember(self, problems: list[Problem]) -> None:
        with self._mutex:
            self._problems += problems

    def _remember_unread(self, unread: Sequence[Damaged]) -> None:
        """Once each, however often they are tried."""
        for error in unread:
            problem = Problem(kind=ProblemKind.DAMAGED, file=error.where, reason=error.reason)
            if problem not in self.problems:
                self._remember([problem])

    def _read_one(self, segment: str) -> UInt32[np.ndarray, "n block_words"]:
        return next(self.read_segments([segment]))[1]

    def _fail(self, writer: Writer, error: Exception) -> NoReturn:
        """Undoes what was made, and says why in one line."""
        self._stale = True
        writer.undo(self._index.folders)
        raise StoreWriteError(
            f"can't change the store {self.path} ({one_line(error)}): make room or mend the "
            "folder; what was committed before is whole"
        ) from error


def _part(extension: Extension, known: int, new: Sequence[int], block_tokens: int) -> Extension:
    """What of an extension is not committed yet."""
    part = Extension(
        root=extension.root,
        parent=extension.digest(known - 1) if known else extension.parent,
        first=extension.first + known,
        tokens=extension.tokens[known * block_tokens :],
        digests=extension.digests[known:],
        snapshots=tuple(extension.snapshots[i] for i in new),
    )
    return manifests.normal(part, block_tokens)


def _locked(path: pathlib.Path, faults: Faults) -> filelock.BaseFileLock:
    """Takes the writer's lock, which the operating system gives back when the process ends."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        faults.reach(Point.LOCK, path=path / store_header.LOCK)
        lock = filelock.FileLock(path / store_header.LOCK, timeout=0, thread_local=False)
        lock.acquire()
    except filelock.Timeout:
        raise StoreError(
            f"another writer has the store {path} open: close it there, or open it here with "
            "writable=False"
        ) from None
    except OSError as error:
        raise StoreError(
            f"can't write to the store {path} ({one_line(error)}): open it with writable=False"
        ) from error
    return lock


def _read_or_make(folder: Folder, make: Header | None, faults: Faults) -> Header:
    try:
        data = store_header.read_bytes(folder)
        if data is None and make is not None:
            folder.write(store_header.FILE, make.encode())
            data = store_header.read_bytes(folder)
        data = faults.reach(Point.OPEN, data, folder.path / store_header.FILE)
    except StoreError:
        raise
    except Exception as error:
        raise StoreError(
            f"can't open the store {folder.path} ({one_line(error)}): mend that"
        ) from error
    header = store_header.parse(data, folder.path)
    if header is None:
        raise StoreError(f"there is no store at {folder.path}: give the folder of one")
    return header
