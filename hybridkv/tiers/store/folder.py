"""The store's folder: the one module that knows it lies in a local file system.

Small files go through TensorStore's key-value store, whose writes are atomic: a reader sees the
file before or the file after. Any thread may use a folder; it keeps no state but for the handle.
"""

import contextlib
import errno
import os
import pathlib
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any

import numpy as np
import xxhash

from hybridkv.tiers.store.manifest import FileRecord

_AT_ONCE = 4 * 2**20
_FORCED_AT_ONCE = 16
"""Files and folders that wait for the disk, each in a thread."""
_PASSING = (
    "Permission denied",
    "Operation not permitted",
    "Input/output error",
    "Too many open files",
    "Cannot allocate memory",
    "Stale file handle",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
)
"""In messages of TensorStore, whose errors have no codes."""
_CAUSES = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    "Permission denied",
    "Read-only file system",
    "Input/output error",
    "Too many open files",
)
"""What the operating system says, wherever in a message."""
_CODES = re.compile(r"\[[^\]]*='[^']*'[^\]]*\]")


class Folder:
    """Reads, writes, lists and deletes below one path; names are relative, with slashes."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._kvstore: Any = None

    @property
    def kvstore(self) -> Any:
        """A ``tensorstore.KvStore`` of the folder."""
        if self._kvstore is None:
            import tensorstore as ts

            spec = {"driver": "file", "path": f"{self.path}/"}
            self._kvstore = ts.KvStore.open(spec).result()
        return self._kvstore

    def read(self, key: str, most: int) -> bytes:
        """A small file.

        Raises:
          OSError: it is not there, can't be read, or is no file.
          ValueError: it has more than ``most`` bytes.
        """
        status = os.lstat(self.path / key)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_size > most:
            raise ValueError(f"it has {status.st_size} bytes, more than {most}")
        result = self.kvstore.read(key).result()
        if result.state != "value":
            raise FileNotFoundError(key)
        return bytes(result.value)

    def version(self, key: str) -> tuple[int, int, int]:
        """Changes whenever the file is written. OSError when it is not there."""
        status = os.lstat(self.path / key)
        return status.st_ino, status.st_mtime_ns, status.st_size

    def write(self, key: str, data: bytes) -> None:
        """Writes a file at once and durably, or raises and leaves what was there."""
        self.kvstore.write(key, data).result()

    def sync(self, names: Iterable[str]) -> None:
        """Forces files and every folder on the way to them to the disk; returns when they are.

        Several at once: a file system writes its journal for all that wait for it together.

        Raises:
          OSError: one is not there or can't be forced.
        """
        files = [pathlib.PurePosixPath(name) for name in names]
        folders = {parent for file in files for parent in file.parents}
        with futures.ThreadPoolExecutor(_FORCED_AT_ONCE) as pool:
            list(pool.map(lambda path: _force(self.path / path), [*files, *folders]))

    def delete(self, key: str) -> None:
        """Deletes a file, if it is there."""
        self.kvstore.write(key, None).result()

    def keys(self, prefix: str) -> list[str]:
        """Names of all files below a folder inside the store, sorted."""
        import tensorstore as ts

        names = self.kvstore.list(ts.KvStore.KeyRange(f"{prefix}/", f"{prefix}0")).result()
        return sorted(name.decode("utf-8", "surrogateescape") for name in names)

    def subfolders(self, name: str) -> list[str]:
        """What lies directly in a folder, files too; empty when it is not there."""
        try:
            return sorted(f"{name}/{entry}" for entry in os.listdir(self.path / name))
        except FileNotFoundError:
            return []

    def sizes(self, name: str = "") -> dict[str, int]:
        """Size of every file below a folder, by path relative to it; links are not followed."""
        base = self.path / name if name else self.path
        found = {}
        for folder, _, files in os.walk(base):
            for file in files:
                path = pathlib.Path(folder, file)
                with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                    found[path.relative_to(base).as_posix()] = path.lstat().st_size
        return found

    def is_file(self, name: str, size: int) -> bool:
        """Whether a regular file of this size is there, reached without a link."""
        try:
            status = os.lstat(self.path / name)
        except OSError:
            return False
        return stat.S_ISREG(status.st_mode) and status.st_size == size

    def is_real(self, name: str) -> bool:
        """Whether a folder is there and neither it nor a folder in it is a link."""
        base = self.path / name
        if base.is_symlink() or not base.is_dir():
            return False
        return not any(
            pathlib.Path(folder, sub).is_symlink()
            for folder, subs, _ in os.walk(base)
            for sub in subs
        )

    def records(self, name: str) -> dict[str, FileRecord]:
        """Size and checksum of every file below a folder."""
        return {
            path: FileRecord(size, self.checksum(f"{name}/{path}"))
            for path, size in sorted(self.sizes(name).items())
        }

    def checksum(self, name: str, progress: Callable[[int], None] | None = None) -> str:
        """xxh3_128 of a file in hexadecimal; ``progress`` is told the bytes of each part."""
        state = xxhash.xxh3_128()
        with open(self.path / name, "rb", buffering=0) as file:
            while part := file.read(_AT_ONCE):
                state.update(part)
                if progress is not None:
                    progress(len(part))
        return state.hexdigest()

    def fill(
        self, name: str, size: int, offset: int, parts: Iterable[np.ndarray]
    ) -> Iterator[np.ndarray]:
        """Reads a file's bytes from ``offset`` on into one contiguous array after the other.

        Each is given back as soon as it is full. Other threads run while bytes are copied.

        Raises:
          OSError: the file is not there, can't be read, or has not ``size`` bytes.
        """
        with open(f"{self.path}/{name}", "rb", buffering=0) as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:
                raise OSError(f"it has {found} bytes, not {size}")
            file.seek(offset)
            for part in parts:
                rest = part.data.cast("B")
                while rest:
                    count = file.readinto(rest)
                    if not count:  # it became shorter since
                        raise OSError(f"it has less than {size} bytes")
                    rest = rest[count:]
                yield part

    def remove(self, name: str) -> None:
        """Deletes a folder or a file, whatever is in it, if it is there."""
        path = self.path / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _force(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def may_pass(error: BaseException) -> bool:
    """Whether what could not be read may be whole: another time, or as another user, it is read."""
    if isinstance(error, OSError):
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, None)
    return any(words in str(error) for words in _PASSING)


def one_line(error: BaseException) -> str:
    """The cause of a failure in a few words, also of TensorStore's long messages."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = " ".join(_CODES.sub("", str(error)).split())
    for words in _CAUSES:
        if words in text:
            return words
    return (text or type(error).__name__)[:200]
