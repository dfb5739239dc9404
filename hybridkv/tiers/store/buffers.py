r"""Memory that reads reuse: fresh pages cost more than the bytes that are read into them.

    idle buffers --take--> owner <--base-- array <--base-- rows, memoryviews, aliasing device arrays
         ^                   |
         +-- the owner dies: nobody holds the array or any view of it any more

A buffer comes back by the same rule by which Python would have freed it, so whoever holds a view,
as JAX does for an array that it aliases on a CPU, keeps it from being written again. Any thread.
"""

import collections
from typing import Any

import numpy as np
from jaxtyping import UInt32

from hybridkv.tiers.store.records import WORD_BYTES

ALIGNMENT = 64
"""Bytes. Of every row's start, so that JAX on a CPU takes a row as it is."""
_MOST_IDLE = 8
_MOST_IDLE_BYTES = 64 * 2**20


class Buffers:
    """Arrays of at most ``rows`` x ``words``; idle memory is at most 64 MiB or two buffers."""

    def __init__(self, rows: int, words: int) -> None:
        self._words = words
        self._stride = -(-words * WORD_BYTES // ALIGNMENT) * ALIGNMENT
        self._size = rows * self._stride
        most = max(2, min(_MOST_IDLE, _MOST_IDLE_BYTES // max(self._size, 1)))
        # Appending and popping are atomic: an owner may die in any thread, inside any call.
        self._idle: collections.deque[np.ndarray] = collections.deque(maxlen=most)

    @property
    def idle(self) -> int:
        """Buffers that nobody holds."""
        return len(self._idle)

    def take(self, rows: int) -> UInt32[np.ndarray, "rows words"]:
        """An array with anything in it; each row is contiguous and aligned, all of it need not be.

        The one that came back last is taken first: its bytes may still be in the processor's cache.
        """
        try:
            memory = self._idle.pop()
        except IndexError:
            memory = _aligned(self._size)
        owner: Any = _Owner(memory, self._idle)
        octets: np.ndarray = np.asarray(owner)[: rows * self._stride]
        return octets.view(np.uint32).reshape(rows, -1)[:, : self._words]

    def clear(self) -> None:
        """Frees what is idle."""
        self._idle.clear()


class _Owner:
    """What an array and its views refer to in the end; gives the memory back when they are gone."""

    def __init__(self, memory: np.ndarray, idle: "collections.deque[np.ndarray]") -> None:
        self._memory, self._idle = memory, idle
        self.__array_interface__ = memory.__array_interface__

    def __del__(self) -> None:
        self._idle.append(self._memory)


def _aligned(size: int) -> np.ndarray:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size]
