"""The engines of a rollout: every change under their locks, and what they raise contained.

An engine that raises while nobody waits for it is emptied and goes on; one that does so
``MOST_FAULTS`` times in a row, or that cannot be emptied, is left alone until the process is
started again. Where somebody waits for it, what it raises is counted and raised.
"""

import logging
import time
from collections.abc import Callable, Mapping

from hybridkv.engine.engine import Engine
from hybridkv.engine.handle import Handle
from hybridkv.engine.requests import Request
from hybridkv.observe.rollout_counters import RolloutCounters

_LOG = logging.getLogger(__name__)
MOST_FAULTS = 3
"""Times in a row that an engine which serves nobody may raise before it is left alone."""


class RolloutEngines:
    """Engines by name of scheme. One thread calls this; others may look at the engines' books."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        counters: RolloutCounters,
        told: Callable[[str, Exception], None],
    ) -> None:
        """Takes engines that are made already.

        Args:
          engines: by name of scheme.
          counters: whose ``faults`` it counts.
          told: hears of each fault: which scheme, and what it raised.
        """
        self._engines, self._counters, self._told = engines, counters, told
        self._in_a_row = dict.fromkeys(engines, 0)
        self._broken: set[str] = set()
        counters.faults = dict.fromkeys(engines, 0)

    def left_alone(self, name: str) -> bool:
        """Whether it raised so often that it is not run beside others any more."""
        return name in self._broken or self._in_a_row[name] >= MOST_FAULTS

    def submit(self, name: str, request: Request, driver: Callable[[], bool]) -> Handle:
        """See ``Engine.submit``."""
        with self._engines[name].turn_lock:
            return self._engines[name].submit(request, driver=driver)

    def cancel(self, name: str, handle: Handle) -> bool:
        """See ``Engine.cancel``; False of an engine that could not be emptied."""
        if name in self._broken:
            return False
        with self._engines[name].turn_lock:
            return self._engines[name].cancel(handle)

    def empty(self, name: str) -> None:
        """See ``Engine.reset``."""
        with self._engines[name].turn_lock:
            self._engines[name].reset()

    def close(self, *, timeout_s: float) -> bool:
        """Closes all; whether everything that was published is stored."""
        end, stored = time.monotonic() + timeout_s, True
        for engine in self._engines.values():
            with engine.turn_lock:
                stored &= engine.close(timeout_s=max(end - time.monotonic(), 0.0))
        return stored

    def turn(self, name: str) -> bool:
        """One turn, for somebody who waits; whether there was anything to compute."""
        try:
            busy = self._engines[name].step()
        except Exception as error:
            self.note(name, error)
            raise
        self._in_a_row[name] = 0
        return busy

    def turn_beside(self, name: str) -> bool | None:
        """One turn of an engine that nobody waits for; None where it raised and was emptied."""
        if self.left_alone(name):
            return False
        try:
            return self.turn(name)
        except Exception:  # noted
            pass
        try:
            self.empty(name)
        except Exception:
            _LOG.exception("the engine of scheme %s cannot be emptied: it is left alone", name)
            self._broken.add(name)
        return None

    def note(self, name: str, error: Exception) -> None:
        """Counts a fault and tells it."""
        self._counters.faults[name] += 1
        self._in_a_row[name] += 1
        _LOG.error("the engine of scheme %s raised", name, exc_info=error)
        self._told(name, error)
