r"""Named injection points, and what may go wrong at each.

    code that waits --reach(point, data, path)--> NO_FAULTS: nothing, at the price of a call
                                              \-> Schedule: the nth time, one fault

A point is reached once for each thing that is read or written there, after the bytes moved and
before anyone relies on them, so that a fault meets what a disk would really have left behind.
A Schedule may be shared by threads; what it has counted says which points a run passed.
"""

import collections
import dataclasses
import enum
import errno
import os
import pathlib
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from hybridkv.errors import UserError

_Data = TypeVar("_Data")


class Point(enum.Enum):
    """Where a tier waits for something that may fail."""

    OPEN = "open"
    """A store's own record was read."""
    LIST = "list"
    """The manifests of a store were listed."""
    READ_MANIFEST = "read_manifest"
    READ_SEGMENT = "read_segment"
    READ_SNAPSHOT = "read_snapshot"
    WRITE_SEGMENT = "write_segment"
    WRITE_SNAPSHOT = "write_snapshot"
    WRITE_MANIFEST = "write_manifest"
    """Everything a manifest refers to is written, it itself is about to be."""
    COMMITTED = "committed"
    """A manifest was written: its prefix can be found."""
    DELETE = "delete"
    """Something that no manifest refers to any more is about to be deleted."""
    COMPACT = "compact"
    """A segment was written in the place of others, no manifest refers to it yet."""
    LOCK = "lock"
    """The writer's lock is about to be taken."""
    HOST_STORE = "host_store"
    HOST_LOAD = "host_load"
    DEVICE_WRITE = "device_write"
    DISK_STORE = "disk_store"
    DISK_LOAD = "disk_load"
    PREFETCH = "prefetch"
    HANDOFF_EXPORT = "handoff_export"
    HANDOFF_IMPORT = "handoff_import"


class Fault(enum.Enum):
    """What may go wrong."""

    SHORT_READ = "short_read"
    """Half of the bytes arrive."""
    SHORT_WRITE = "short_write"
    """Half of the bytes reach the file, and nobody is told."""
    FLIPPED_BIT = "flipped_bit"
    """One bit is another, and nobody is told."""
    DELAY = "delay"
    NO_SPACE = "no_space"
    LOST_FILE = "lost_file"
    """The file is gone: a read is told so, a write is not."""
    PERMISSION = "permission"
    CRASH = "crash"
    """The process is killed: nothing is cleaned up."""


_READ = frozenset(
    {
        Fault.SHORT_READ,
        Fault.FLIPPED_BIT,
        Fault.DELAY,
        Fault.LOST_FILE,
        Fault.PERMISSION,
        Fault.CRASH,
    }
)
_WRITE = frozenset(
    {
        Fault.SHORT_WRITE,
        Fault.FLIPPED_BIT,
        Fault.DELAY,
        Fault.NO_SPACE,
        Fault.LOST_FILE,
        Fault.PERMISSION,
        Fault.CRASH,
    }
)
_CALL = frozenset({Fault.DELAY, Fault.PERMISSION, Fault.CRASH})
_MEMORY = frozenset({Fault.FLIPPED_BIT, Fault.DELAY, Fault.CRASH})

SENSIBLE: Mapping[Point, frozenset[Fault]] = {
    Point.OPEN: _READ,
    Point.LIST: _CALL,
    Point.READ_MANIFEST: _READ,
    Point.READ_SEGMENT: _READ,
    Point.READ_SNAPSHOT: _READ,
    Point.WRITE_SEGMENT: _WRITE,
    Point.WRITE_SNAPSHOT: _WRITE,
    Point.WRITE_MANIFEST: _WRITE,
    Point.COMMITTED: frozenset({Fault.FLIPPED_BIT, Fault.DELAY, Fault.LOST_FILE, Fault.CRASH}),
    Point.DELETE: _CALL,
    Point.COMPACT: _CALL | {Fault.NO_SPACE},
    Point.LOCK: _CALL | {Fault.NO_SPACE},
    Point.HOST_STORE: _MEMORY | {Fault.NO_SPACE},
    Point.HOST_LOAD: _MEMORY,
    Point.DEVICE_WRITE: frozenset({Fault.DELAY, Fault.CRASH}),
    Point.DISK_STORE: _CALL | {Fault.NO_SPACE},
    Point.DISK_LOAD: _CALL | {Fault.LOST_FILE},
    Point.PREFETCH: frozenset({Fault.DELAY, Fault.CRASH}),
    Point.HANDOFF_EXPORT: _WRITE,
    Point.HANDOFF_IMPORT: _READ,
}
"""The faults that make sense at each point; a schedule takes no others."""

_ERRNO = {
    Fault.NO_SPACE: errno.ENOSPC,
    Fault.PERMISSION: errno.EACCES,
}


class Faults:
    """No faults. The base of what a store or a mover is given."""

    def reach(self, point: Point, data: _Data = None, path: pathlib.Path | None = None) -> _Data:  # type: ignore[assignment]
        """Called at a point; returns ``data``, which a schedule may have changed.

        Args:
          point: which one.
          data: bytes or a numpy array that was read, or None.
          path: the file or folder that was read or written, or None.
        """
        return data


NO_FAULTS = Faults()
"""The default everywhere."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """One fault of a schedule."""

    point: Point
    fault: Fault
    nth: int = 1
    """Which time the point is reached, from 1."""

    def __post_init__(self) -> None:
        if self.fault not in SENSIBLE[self.point]:
            sensible = ", ".join(sorted(f.name for f in SENSIBLE[self.point]))
            raise UserError(
                f"{self.fault.name} makes no sense at {self.point.name}: take one of {sensible}"
            )
        if self.nth < 1:
            raise UserError(f"nth is {self.nth}: the first time a point is reached is 1")


def kill_process() -> None:
    """SIGKILL to this process: no handler runs, nothing is flushed."""
    os.kill(os.getpid(), signal.SIGKILL)


class Schedule(Faults):
    """Faults at given times, the same in every run of the same calls."""

    def __init__(
        self,
        planned: Iterable[Planned] = (),
        *,
        delay_s: float = 0.05,
        crash: Callable[[], None] = kill_process,
    ) -> None:
        """Takes the plan.

        Args:
          planned: the faults; at most one for each time a point is reached.
          delay_s: how long DELAY sleeps, in seconds.
          crash: what CRASH does; a test inside one process raises instead.
        """
        self._planned: dict[tuple[Point, int], Fault] = {}
        for item in planned:
            if (item.point, item.nth) in self._planned:
                raise UserError(f"two faults at {item.point.name} number {item.nth}: plan one")
            self._planned[item.point, item.nth] = item.fault
        self._delay_s = delay_s
        self._crash = crash
        self._mutex = threading.Lock()
        self.reached: collections.Counter[Point] = collections.Counter()
        """How often each point was reached."""
        self.done: list[Planned] = []
        """The faults that happened, in order."""

    def reach(self, point: Point, data: _Data = None, path: pathlib.Path | None = None) -> _Data:  # type: ignore[assignment]
        """Counts, and does what is planned for this time."""
        with self._mutex:
            self.reached[point] += 1
            nth = self.reached[point]
            fault = self._planned.get((point, nth))
            if fault is None:
                return data
            self.done.append(Planned(point=point, fault=fault, nth=nth))
        return self._do(fault, data, path)

    @property
    def missed(self) -> tuple[Planned, ...]:
        """Planned faults whose time has not come."""
        with self._mutex:
            done = {(x.point, x.nth) for x in self.done}
            return tuple(
                Planned(point=point, fault=fault, nth=nth)
                for (point, nth), fault in self._planned.items()
                if (point, nth) not in done
            )

    def _do(self, fault: Fault, data: Any, path: pathlib.Path | None) -> Any:
        if fault is Fault.CRASH:
            self._crash()
        elif fault is Fault.DELAY:
            time.sleep(self._delay_s)
        elif fault in _ERRNO:
            code = _ERRNO[fault]
            raise OSError(code, os.strerror(code), str(path) if path else None)
        elif fault is Fault.LOST_FILE:
            _lose(path)
            if data is not None or path is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        elif data is not None:
            return _changed(fault, data)
        elif path is not None:
            _change_file(fault, _largest(path))
        else:
            raise UserError(f"{fault.name} needs bytes or a file: give reach() data or a path")
        return data


def _changed(fault: Fault, data: Any) -> Any:
    """A copy of bytes or of an array, half as long or with its middle bit turned.

    Of an array of any library the copy is numpy's.
    """
    if hasattr(data, "dtype"):
        flat = np.array(data).reshape(-1)
        if fault is not Fault.FLIPPED_BIT:
            return flat[: flat.size // 2]
        octets = flat.view(np.uint8)
        octets[octets.size // 2] ^= 1
        return flat.reshape(data.shape)
    if fault is not Fault.FLIPPED_BIT:
        return data[: len(data) // 2]
    changed = bytearray(data)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


def _change_file(fault: Fault, path: pathlib.Path) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        if fault is not Fault.FLIPPED_BIT:
            file.truncate(size // 2)
            return
        file.seek(size // 2)
        octet = file.read(1)
        file.seek(size // 2)
        file.write(bytes([octet[0] ^ 1]))


def _lose(path: pathlib.Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _largest(path: pathlib.Path) -> pathlib.Path:
    """The largest file below a folder, which is the one with the rows; a file is itself."""
    if not path.is_dir():
        return path
    files = [x for x in path.rglob("*") if x.is_file()]
    return max(files, key=lambda x: (x.stat().st_size, str(x)))
