r"""A rollout's state in a small file, shared by a server and a person's command line.

    server:   read at the start --> refresh (stat; read where it changed) --> roll_back: lock, read,
                                                                              change, write, unlock
    person:   scripts/rollout.py ----------- lock, read, change, write, unlock

A write is a new file that replaces the old one, after its bytes are on the disk; the lock makes
read-change-write one step, so that a rollback and a person's change cannot undo each other. A file
that cannot be read means OFF and is left as it is, for a person to look at. What cannot be written
holds in this process at once and is written later.
"""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import tempfile
import time
from collections.abc import Callable

import filelock

from hybridkv.observe.rollout import (
    RollbackCause,
    RolloutError,
    RolloutStage,
    RolloutState,
    back,
    forward,
    roll_back,
)

_LOG = logging.getLogger(__name__)
_LOCK_S = 10.0
"""Seconds that a person's change waits for the lock; a server never waits."""
Signature = tuple[int, int, int] | None


class RolloutFile:
    """Reads and writes the state; knows no process' own idea of it."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._lock = filelock.FileLock(f"{path}.lock")

    def signature(self) -> Signature:
        """What differs after every write; None where there is no file."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self) -> RolloutState:
        """The state; one that never changed where there is no file.

        Raises:
          RolloutError: the file cannot be read, or is not a state.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return RolloutState()
        except (OSError, UnicodeDecodeError) as error:
            raise RolloutError(f"cannot read {self.path}: {error}") from error
        try:
            return RolloutState.from_json(json.loads(text))
        except (json.JSONDecodeError, RecursionError, RolloutError) as error:
            raise RolloutError(f"{self.path} is not the state of a rollout: {error}") from error

    def change(
        self, change: Callable[[RolloutState], RolloutState], *, wait_s: float = _LOCK_S
    ) -> RolloutState:
        """Reads, changes and writes as one step; the state after it.

        Args:
          change: what it becomes; what it raises leaves the file as it was.
          wait_s: for the lock.

        Raises:
          RolloutError: as ``read``, or it cannot be written or locked now.
        """
        if not self.path.parent.is_dir():  # which the lock would make
            raise RolloutError(f"cannot write {self.path}: there is no folder {self.path.parent}")
        try:
            with self._lock.acquire(timeout=wait_s):
                before = self.read()
                after = change(before)
                if after != before:
                    self._write(after)
                return after
        except filelock.Timeout as error:
            raise RolloutError(f"{self.path} is being changed by somebody else") from error
        except OSError as error:
            raise RolloutError(f"cannot write {self.path}: {error}") from error

    def _write(self, state: RolloutState) -> None:
        folder = self.path.parent
        handle, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=folder)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(state.to_json(), indent=2) + "\n")
                file.flush()
                os.fsync(file.fileno())
            pathlib.Path(name).replace(self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
        with contextlib.suppress(OSError):  # the rename itself; not every system can
            folder_handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(folder_handle)
            finally:
                os.close(folder_handle)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pending:
    """A rollback that holds here and is not written yet."""

    cause: RollbackCause
    reason: str
    to: RolloutStage


class Rollout:
    """One process' view of a rollout. Called on the thread that steps its engines."""

    def __init__(
        self,
        path: pathlib.Path | None = None,
        *,
        to: RolloutStage = RolloutStage.OFF,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Takes up where the file left off.

        Args:
          path: of the state file; None keeps the state in this process alone.
          to: where rollbacks go: OFF, or SHADOW, which serves by the safe path and keeps comparing.
          clock: seconds since 1970.

        Raises:
          RolloutError: rollbacks cannot go there.
        """
        if to not in (RolloutStage.OFF, RolloutStage.SHADOW):
            raise RolloutError(f"rollbacks go to off or shadow, not to {to.value}")
        self._file = RolloutFile(path) if path is not None else None
        self._to, self._clock = to, clock
        self._pending: _Pending | None = None
        self._signature: Signature = None
        self._told = False
        self.unwritten = 0
        """Times that a rollback could not be written to the file."""
        self.state = RolloutState()
        self.refresh()

    def forward(
        self, to: RolloutStage, *, by: str, reason: str, percent: float | None = None
    ) -> RolloutState:
        """One stage on, which a person decides; see ``rollout.forward``.

        Raises:
          RolloutError: no such transition, nobody is named, or the file says otherwise.
        """
        return self._person(
            lambda state: forward(
                state, to, by=by, reason=reason, now=self._clock(), percent=percent
            )
        )

    def back(
        self, to: RolloutStage, *, by: str, reason: str, percent: float | None = None
    ) -> RolloutState:
        """Back, which a person decides; see ``rollout.back``.

        Raises:
          RolloutError: as ``forward``.
        """
        return self._person(
            lambda state: back(state, to, by=by, reason=reason, now=self._clock(), percent=percent)
        )

    def roll_back(self, cause: RollbackCause, reason: str) -> RolloutState:
        """Back by itself: at once here, and in the file as soon as that can be written."""
        before, pending = self.state, _Pending(cause=cause, reason=reason, to=self._to)
        self._take(self._rolled_back(before, pending))
        if self._file is not None and self.state is not before:
            self._pending = self._pending or pending
            self._write_pending()
        return self.state

    def refresh(self) -> bool:
        """Looks whether the file has changed; whether the state here has.

        A file that cannot be read, or is gone after it was there, is a rollback to OFF.
        """
        file, before = self._file, self.state
        if file is None:
            return False
        if self._pending is not None:
            self._write_pending()
            return self.state is not before
        signature = file.signature()
        if signature == self._signature:
            return False
        self._signature = signature
        try:
            if signature is None:
                raise RolloutError(f"{file.path} is gone")
            self._take(file.read())
        except RolloutError as error:
            self._close(str(error))
        return self.state is not before

    def _person(self, change: Callable[[RolloutState], RolloutState]) -> RolloutState:
        if self._file is None:
            self._take(change(self.state))
            return self.state
        if self._pending is not None:
            self._write_pending()
            if self._pending is not None:
                raise RolloutError("the last rollback is not written yet: mend the state file")
        self._take(self._file.change(change))
        self._signature = self._file.signature()
        return self.state

    def _write_pending(self) -> None:
        """The file may say more than this process knew; the rollback is of whatever it says."""
        file, pending = self._file, self._pending
        assert file is not None
        assert pending is not None

        def change(state: RolloutState) -> RolloutState:
            return self._rolled_back(state, pending) if state.history else self.state

        try:
            after = file.change(change, wait_s=0)
        except RolloutError as error:
            if not self._told:
                _LOG.error("the rollback holds in this process and is not written: %s", error)
            self._told = True
            self.unwritten += 1
            return
        self._pending, self._told, self._signature = None, False, file.signature()
        self._take(after)

    def _rolled_back(self, state: RolloutState, pending: _Pending) -> RolloutState:
        return roll_back(
            state, pending.cause, reason=pending.reason, now=self._clock(), to=pending.to
        )

    def _close(self, reason: str) -> None:
        """OFF, whatever was before. What cannot be read stays for a person to look at."""
        self._pending = _Pending(cause=RollbackCause.STATE_FILE, reason=reason, to=RolloutStage.OFF)
        closed = self._rolled_back(self.state, self._pending)
        if closed is self.state:
            _LOG.error("reuse stays off: %s", reason)
        self._take(dataclasses.replace(closed, rolled_back=True))

    def _take(self, state: RolloutState) -> None:
        before = self.state
        if state == before:
            return
        self.state = state
        if (state.stage, state.percent) == (before.stage, before.percent) or not state.history:
            return
        last = state.history[-1]
        _LOG.log(
            logging.INFO if last.cause is None else logging.WARNING,
            "rollout: %s -> %s (%g percent of requests), by %s%s: %s",
            before.stage.value,
            state.stage.value,
            state.percent,
            last.by,
            f" for {last.cause.value}" if last.cause else "",
            last.reason,
        )
