"""Counts what XLA compiles after warm-up, because nothing may.

    jax.monitoring --one listener a process--> every live CompileGuard that is armed

A guard sees the compilations of all threads. JAX reports one in the thread that asked for it, also
when the executable comes from the compilation cache on disk.
"""

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Literal

import jax
import numpy as np

COMPILATION = "/jax/core/compile/backend_compile_duration"
"""The public event of one compilation; its ``fun_name`` names the function."""
NAMES_KEPT = 16
"""The latest names a guard keeps; it counts all."""


class CompiledAfterWarmUp(RuntimeError):  # noqa: N818 (what happened)
    """Something compiled where nothing may."""


class CompileGuard:
    """Counts compilations while it is armed.

    Any thread may call any method. ``paused`` holds for the calling thread alone.
    """

    def __init__(self, *, mode: Literal["raise", "count"] = "count") -> None:
        """A guard that is not armed yet.

        Args:
          mode: whether ``check`` raises, as in tests, or only counts, as in production.
        """
        if mode not in ("raise", "count"):
            raise ValueError(f"mode must be 'raise' or 'count', got {mode!r}")
        self.mode = mode
        self._lock = threading.Lock()
        self._count = self._checked = 0
        self._names: deque[str] = deque(maxlen=NAMES_KEPT)
        self._armed = False
        self._paused = threading.local()

    @property
    def count(self) -> int:
        """Compilations seen while armed."""
        return self._count

    @property
    def names(self) -> tuple[str, ...]:
        """The latest functions that were compiled, oldest first; '?' for one without a name."""
        with self._lock:
            return tuple(self._names)

    def arm(self) -> None:
        """Counts from now on.

        Raises:
          RuntimeError: this version of JAX does not report compilations, so that a guard would
            count none.
        """
        _listen()
        with _guards_lock:
            _guards.add(self)
        self._armed = True

    def disarm(self) -> None:
        """Counts no more; what was counted stays."""
        self._armed = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What this thread compiles inside is not counted. May be nested."""
        before = self._pauses
        self._paused.depth = before + 1
        try:
            yield
        finally:
            self._paused.depth = before

    def check(self) -> int:
        """Compilations since the last check.

        Raises:
          CompiledAfterWarmUp: there were some and the mode is "raise"; the message names them.
        """
        with self._lock:
            new = self._count - self._checked
            self._checked = self._count
            names = ", ".join(list(self._names)[-new:]) if new else ""
        if new and self.mode == "raise":
            latest = f"the latest {NAMES_KEPT} are " if new > NAMES_KEPT else ""
            raise CompiledAfterWarmUp(
                f"{new} compiled after warm-up: {latest}{names}; warm it up, or wrap what may "
                f"compile in `with guard.paused():`"
            )
        return new

    @property
    def _pauses(self) -> int:
        """How deep the calling thread is inside ``paused``."""
        depth: int = getattr(self._paused, "depth", 0)
        return depth

    def _compiled(self, name: str) -> None:
        if self._armed and not self._pauses:
            with self._lock:
                self._count += 1
                self._names.append(name)


_guards: weakref.WeakSet[CompileGuard] = weakref.WeakSet()
_guards_lock = threading.Lock()
_listening = threading.Lock()
_probing = threading.local()
_warming = threading.local()


@contextlib.contextmanager
def warming_up() -> Iterator[None]:
    """What this thread compiles inside is no guard's concern: another engine is being made."""
    before = getattr(_warming, "depth", 0)
    _warming.depth = before + 1
    try:
        yield
    finally:
        _warming.depth = before


def _on_event(event: str, duration_secs: float, **details: str | int) -> None:
    """The process's one listener."""
    del duration_secs
    if event != COMPILATION:
        return
    if getattr(_probing, "active", False):
        _probing.heard = True
        return
    if getattr(_warming, "depth", 0):
        return
    with _guards_lock:
        live = list(_guards)
    for guard in live:
        guard._compiled(str(details.get("fun_name", "?")))


def _listen() -> None:
    """Registers the listener where it is not heard: at first, or after JAX forgot all listeners."""
    with _listening:
        if _heard():
            return
        jax.monitoring.register_event_duration_secs_listener(_on_event)
        if not _heard():
            raise RuntimeError(
                f"JAX {jax.__version__} does not report {COMPILATION}, so that compilations "
                f"cannot be counted: use a version that hybridkv is tested with"
            )


def _heard() -> bool:
    """Whether a compilation in this thread reaches the listener; it costs some 20 ms."""
    _probing.active, _probing.heard = True, False
    try:
        # A new function each time, which no cache of the process knows.
        jax.jit(lambda x: x).lower(np.int32(0)).compile()
    finally:
        _probing.active = False
    heard: bool = _probing.heard
    return heard
