"""Segments that were read before their request was admitted.

A bounded shelf between two workers' jobs: whoever reads ahead puts, the load takes. The oldest goes
when it is full. Any thread.
"""

import threading

import numpy as np


class Prefetched:
    """Segments by id, at most ``limit`` bytes of them."""

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes = limit, 0
        self._held: dict[str, np.ndarray] = {}
        self._mutex = threading.Lock()

    def __contains__(self, name: str) -> bool:
        with self._mutex:
            return name in self._held

    @property
    def bytes_used(self) -> int:
        """Bytes that wait to be taken."""
        with self._mutex:
            return self._bytes

    def put(self, name: str, array: np.ndarray) -> None:
        """Keeps a segment, if it fits at all."""
        with self._mutex:
            if array.nbytes > self._limit or name in self._held:
                return
            self._held[name] = array
            self._bytes += array.nbytes
            while self._bytes > self._limit:
                oldest = next(iter(self._held))
                self._bytes -= self._held.pop(oldest).nbytes

    def take(self, name: str) -> np.ndarray | None:
        """The segment, which is not kept any longer; None where it is not there."""
        with self._mutex:
            array = self._held.pop(name, None)
            self._bytes -= array.nbytes if array is not None else 0
            return array

    def clear(self) -> None:
        """Forgets all."""
        with self._mutex:
            self._held.clear()
            self._bytes = 0
