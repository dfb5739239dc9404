r"""The half of a store that only reads: what is committed, where it is, and its bytes.

    index (under the mutex, for moments)     find, extensions, refresh
    folders --store_rows, several in flight--> rows, digests --compared--> caller
                                                               \-> Damaged: a miss

Threads: any, at any time. Nothing is written or deleted here, whatever is found.
"""

import contextlib
import pathlib
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Self

import filelock
import numpy as np
from jaxtyping import UInt32

from hybridkv.kinds import Kind
from hybridkv.prefixes.identity import Identity
from hybridkv.tiers.faults import Faults, Point
from hybridkv.tiers.store import verify as store_verify
from hybridkv.tiers.store.folder import Folder, may_pass, one_line
from hybridkv.tiers.store.gate import Gate
from hybridkv.tiers.store.header import FILE, Header
from hybridkv.tiers.store.index import Index
from hybridkv.tiers.store.loading import Loader
from hybridkv.tiers.store.manifest import SEGMENTS, SNAPSHOTS, FolderRecord
from hybridkv.tiers.store.records import (
    BlockPlace,
    Damaged,
    Problem,
    StoredExtension,
    StoreError,
    StoreLayout,
)
from hybridkv.tiers.store.rows import Reading, RowReader, Rows

_IN_FLIGHT = 4


class StoreReader:
    """What every process may do with a store; see ``Store``."""

    def __init__(
        self,
        folder: Folder,
        header: Header,
        *,
        lock: filelock.BaseFileLock | None,
        capacity_bytes: int | None,
        digests: bool,
        faults: Faults,
    ) -> None:
        """Use ``Store.open`` or ``Store.open_as_is``, which check what this takes as given."""
        self._folder = folder
        self._header = header
        self._lock = lock
        self._capacity = capacity_bytes
        self._digests = digests
        self._faults = faults
        self._mutex = threading.Lock()  # the index, held for moments
        self._looking = threading.Lock()  # the loader, held while a folder is read
        self._gate = Gate()  # places of blocks
        self._loader = Loader(folder, header, faults)
        self._rows = RowReader(folder, header.layout)
        self._made = folder.version(FILE)
        self._closed = False
        self._stale = False
        self._bytes = 0
        self._index = Index(header.layout.block_tokens)
        self._problems: list[Problem] = []
        self._load()

    # ---- what is there

    @property
    def path(self) -> pathlib.Path:
        """The folder."""
        return self._folder.path

    @property
    def identity(self) -> Identity:
        """Of everything in the store."""
        return self._header.identity

    @property
    def layout(self) -> StoreLayout:
        """The store's own."""
        return self._header.layout

    @property
    def writable(self) -> bool:
        """Whether this is the writer."""
        return self._lock is not None

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes that ``bytes_used`` may reach; None for no limit."""
        return self._capacity

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is in the folder and not used, and why; as of ``open`` or the last ``refresh``."""
        with self._mutex:
            return tuple(self._problems)

    @property
    def bytes_used(self) -> int:
        """Bytes of all files of the store; a reader counts them anew each time."""
        return self._bytes if self.writable else sum(self._folder.sizes().values())

    @property
    def blocks(self) -> int:
        """Blocks that can be found."""
        with self._mutex:
            return len(self._index.blocks)

    @property
    def snapshots(self) -> int:
        """Snapshots that can be found."""
        with self._mutex:
            return len(self._index.snapshots)

    def extensions(self) -> tuple[StoredExtension, ...]:
        """All that is committed and whole, parents before children."""
        with self._mutex:
            return tuple(manifest.stored for manifest in self._index.ordered())

    @property
    def dead_bytes(self) -> int:
        """Bytes that compaction would free, about: of rows that were removed, in its segments."""
        with self._mutex:
            index = self._index
            found = [(index.folders[f"{SEGMENTS}/{x}"], len(index.rows[x])) for x in index.sparse()]
        return sum(folder.bytes * (folder.rows - alive) // folder.rows for folder, alive in found)

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """While it is held no block changes its place: what ``find`` says can be read.

        Of this process. Another one that compacts is found out by reading: ``Damaged``.
        """
        return self._gate.reading()

    def extension_bytes(self, extension_id: str) -> int:
        """Bytes of the folders that an extension uses; shared segments count in full. KeyError."""
        with self._mutex:
            folders = self._index.manifests[extension_id].folders
            return sum(record.bytes for record in folders.values())

    def owner(self, digest: bytes) -> str | None:
        """Id of the extension that holds the block with this chained digest."""
        with self._mutex:
            found = self._index.blocks.get(digest)
            return found[0] if found else None

    def leaf_first(self) -> tuple[StoredExtension, ...]:
        """All extensions in an order in which each may be removed: of the leaves, the oldest."""
        with self._mutex:
            return tuple(manifest.stored for manifest in self._index.leaf_first())

    def find(self, digest: bytes) -> BlockPlace | None:
        """Where the block with this chained digest is now."""
        with self._mutex:
            found = self._index.blocks.get(digest)
            return self._index.manifests[found[0]].places[found[1]] if found else None

    def find_snapshot(self, digest: bytes) -> str | None:
        """Id of the snapshot that stands on the block with this chained digest."""
        with self._mutex:
            found = self._index.snapshots.get(digest)
            return self._index.manifests[found[0]].snapshot_ids[found[1]] if found else None

    def refresh(self) -> tuple[tuple[StoredExtension, ...], tuple[StoredExtension, ...]]:
        """Looks again at what another process writes.

        Returns:
          What is there now and was not, parents first; and what was there and is not. One that
          became shorter is in both. Always nothing for the writer, who knows.

        Raises:
          StoreError: the folder can't be listed.
        """
        self._check_open()
        if self.writable:
            return (), ()
        with self._mutex:
            before = dict(self._index.manifests)
        self._load()
        with self._mutex:
            after = self._index.manifests
            added = [m.stored for m in self._index.ordered() if before.get(m.id) is not m]
            vanished = [m.stored for m in before.values() if after.get(m.id) is not m]
        return tuple(added), tuple(vanished)

    # ---- reading

    def read_segments(
        self, ids: Iterable[str], *, in_flight: int = _IN_FLIGHT
    ) -> Iterator[tuple[str, UInt32[np.ndarray, "n block_words"]]]:
        """Segments with their ids, in order, while the next ones are on their way.

        Every block that this object ever told the place of is verified; rows of others are what
        the disk has. Each row is contiguous and not to be written to. Memory: ``in_flight + 1``
        segments, which is used again when nobody holds a row of them any more.

        Raises:
          Damaged: a segment is gone, short, or not what was written. A miss; the iteration ends.
        """
        waiting: deque[tuple[str, Reading | None]] = deque()
        try:
            for id_ in ids:
                waiting.append((id_, self._start(f"{SEGMENTS}/{id_}")))
                if len(waiting) > in_flight:
                    yield self._segment(*waiting.popleft())
            while waiting:
                yield self._segment(*waiting.popleft())
        finally:
            for _, reading in waiting:
                if reading is not None:
                    reading.cancel()

    def read_snapshot(self, snapshot_id: str) -> UInt32[np.ndarray, " snapshot_words"]:
        """The words of one snapshot. Not to be written to.

        Raises:
          Damaged: it is gone, short, or not what was written. A miss.
        """
        name = f"{SNAPSHOTS}/{snapshot_id}"
        record = self._record(name)
        if record is None:
            raise _gone(name)
        rows = self._reached(
            name,
            Point.READ_SNAPSHOT,
            lambda: self._rows.read(name, record, digests=self._digests),
        )
        if self._digests:
            with self._mutex:
                found = self._index.snapshot_ids.get(snapshot_id)
                checks = found and self._index.manifests[found[0]].snapshot_checks[found[1]]
            if not checks and self.layout.snapshot_spans:
                raise _gone(name)
            _compare(name, rows.digests[0], checks or {})
        words: UInt32[np.ndarray, " snapshot_words"] = rows.words[0]
        return words

    def _record(self, name: str) -> FolderRecord | None:
        with self._mutex:
            return self._index.folders.get(name)

    def _start(self, name: str) -> Reading | None:
        """A segment that is on its way; None when it is not in the store any more."""
        record = self._record(name)
        if record is None:
            return None
        return self._rows.start(name, record, digests=self._digests)

    def _segment(
        self, id_: str, reading: Reading | None
    ) -> tuple[str, UInt32[np.ndarray, "n block_words"]]:
        name = f"{SEGMENTS}/{id_}"
        with self._mutex:
            there = name in self._index.folders
            checks = dict(self._index.checks.get(id_, {}))
        if reading is None or not there:
            raise _gone(name)
        rows = self._reached(name, Point.READ_SEGMENT, reading.result)
        if self._digests:
            for row, check in checks.items():
                _compare(name, rows.digests[row], check)
        return id_, rows.words

    def _reached(self, name: str, point: Point, result: Callable[[], Rows]) -> Rows:
        """Waits for rows; a fault may change them on the way."""
        try:
            rows = result()
            words = self._faults.reach(point, rows.words, self.path / name)
        except Exception as error:  # TensorStore's are of many types
            raise Damaged(name, None, one_line(error), may_pass=may_pass(error)) from error
        if words is rows.words:
            return rows
        if words.shape != rows.words.shape:
            raise Damaged(name, None, f"it has {words.size} words, not {rows.words.size}")
        return self._rows.of(name, words, digests=self._digests)

    def verify(self, progress: store_verify.Progress | None = None) -> list[Problem]:
        """Reads every byte of every file and says what is wrong; see ``store_verify``."""
        return store_verify.verify(self._folder, progress)

    def close(self) -> None:
        """Gives the writer's lock back; closing twice is fine."""
        self._closed = True
        self._rows.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()

    def _load(self) -> None:
        """Reads all that is committed."""
        with self._looking:
            index, problems = self._loader.look()
            problems = self._tidy(index, problems)
            with self._mutex:
                index.adopt_checks(self._index)
                self._index, self._problems = index, problems

    def _tidy(self, index: Index, problems: list[Problem]) -> list[Problem]:
        """What a writer does after a look; the problems that are left. A reader changes nothing."""
        del index
        return problems

    def _is_there(self) -> bool:
        """Whether the folder still holds the store that was opened."""
        try:
            return self._folder.version(FILE) == self._made
        except OSError:
            return False

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(f"the store {self.path} is closed: open it again")


def _gone(name: str) -> Damaged:
    return Damaged(name, None, "it is not in the store any more")


def _compare(name: str, found: Mapping[Kind, bytes], checks: Mapping[Kind, bytes]) -> None:
    for kind, digest in found.items():
        if digest != checks[kind]:
            raise Damaged(name, kind, f"its {kind.name} bytes are not those that were written")
