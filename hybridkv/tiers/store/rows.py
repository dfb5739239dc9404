r"""Rows of a segment or a snapshot, and their digests, by the shortest way there is.

    raw range in the manifest  -- plain reads, row by row --> reused buffer --\
    none (another layout)      -- TensorStore ------------------------------->  Rows
                                                       digest of each kind --/

A row is digested when it was just read, while it is in the processor's cache. A few threads read
at a time, without Python's lock for most of it. Any thread may ask.
"""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Mapping

import numpy as np
from jaxtyping import UInt32

from hybridkv.kinds import Kind
from hybridkv.tiers.digests import kind_digests
from hybridkv.tiers.store import segments
from hybridkv.tiers.store.buffers import Buffers
from hybridkv.tiers.store.folder import Folder
from hybridkv.tiers.store.manifest import SEGMENTS, SNAPSHOTS, FolderRecord, RawRange
from hybridkv.tiers.store.records import StoreLayout

_THREADS = 4


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """What was read."""

    words: UInt32[np.ndarray, "rows words"]
    """Not to be written to. Each row is contiguous."""
    digests: tuple[Mapping[Kind, bytes], ...] = ()
    """Of each row; none when they were not asked for."""


Reading = concurrent.futures.Future[Rows]


class RowReader:
    """Reads folders of one store. It compares nothing: that is for whoever knows the digests."""

    def __init__(self, folder: Folder, layout: StoreLayout) -> None:
        self._folder = folder
        self._spans = {SEGMENTS: layout.block_spans, SNAPSHOTS: layout.snapshot_spans}
        self._words = {SEGMENTS: layout.block_words, SNAPSHOTS: layout.snapshot_words}
        self._buffers = {
            SEGMENTS: Buffers(layout.segment_blocks, layout.block_words),
            SNAPSHOTS: Buffers(1, layout.snapshot_words),
        }
        self._mutex = threading.Lock()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None

    def start(self, name: str, record: FolderRecord, *, digests: bool) -> Reading:
        """As ``read``, on its way in another thread."""
        with self._mutex:
            if self._pool is None:
                self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "hybridkv-store")
            return self._pool.submit(self.read, name, record, digests=digests)

    def read(self, name: str, record: FolderRecord, *, digests: bool) -> Rows:
        """The rows of ``segments/<id>`` or ``snapshots/<id>``.

        Raises whatever the file system or TensorStore raises. Bytes may be wrong all the same.
        """
        group = name.partition("/")[0]
        if record.raw is not None:
            return self._raw(name, record, record.raw, digests=digests)
        words = np.zeros((record.rows, self._words[group]), np.uint32)
        if record.files:
            shape = words.shape if group == SEGMENTS else words.shape[1:]
            leaf = segments.LEAF[group]
            array = segments.start_read(self._folder.path / name, leaf, shape).result()
            words = array.reshape(words.shape)
        return self.of(name, words, digests=digests)

    def of(self, name: str, words: UInt32[np.ndarray, "rows words"], *, digests: bool) -> Rows:
        """Rows that are in memory."""
        spans = self._spans[name.partition("/")[0]]
        found = tuple(kind_digests(row, spans) for row in words) if digests else ()
        return Rows(words=words, digests=found)

    def close(self) -> None:
        """Frees threads and memory that nobody needs; whoever reads again gets new ones."""
        with self._mutex:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)
        for buffers in self._buffers.values():
            buffers.clear()

    def _raw(self, name: str, record: FolderRecord, raw: RawRange, *, digests: bool) -> Rows:
        group = name.partition("/")[0]
        spans, words = self._spans[group], self._buffers[group].take(record.rows)
        size = record.files[raw.path].size
        found = []
        for row in self._folder.fill(f"{name}/{raw.path}", size, raw.offset, words):
            if digests:
                found.append(kind_digests(row, spans))
        words.flags.writeable = False
        return Rows(words=words, digests=tuple(found))
