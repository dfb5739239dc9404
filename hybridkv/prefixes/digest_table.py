"""From digests to entries: an open-addressing hash table whose slots are one numpy array.

    slots    [ 17 | EMPTY | GONE | 4 | ... ]     int32: an entry id, or why there is none
    digests  column of the entries, not ours: a slot is right when digests[id] has the same 32 bytes

A batch probes in rounds: every digest that is not settled looks at its next slot. The first slot
comes from one word of the digest and the stride from another; the stride is odd and the slots are a
power of two, so a probe sequence visits every slot. At least a quarter of them is EMPTY at all
times, which ends it early. Digests that agree in both words only make for more rounds.
"""

import numpy as np
from jaxtyping import Bool, Int, Int32, UInt8

ABSENT = -1
"""What ``find`` says of a digest that is not in the table."""

_EMPTY = -1
_GONE = -2
"""Was taken; probe sequences go on past it."""


class DigestTable:
    """Which entry has a digest. Not thread-safe: one owner.

    Costs 8 to 16 bytes for each entry of the capacity.
    """

    def __init__(self, capacity: int, digests: UInt8[np.ndarray, "n 32"]) -> None:
        """An empty table of up to ``capacity`` entries.

        Args:
          capacity: entries that are in the table at most.
          digests: the digest of each entry id, contiguous, kept by reference. The digest of an
            entry must not change while the entry is in the table.
        """
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if digests.dtype != np.uint8 or digests.ndim != 2 or digests.shape[1] != 32:
            raise ValueError(f"digests must be uint8 [n, 32], got {digests.dtype} {digests.shape}")
        self.capacity = capacity
        self._words = digests.view(np.uint64)
        # Twice the capacity, rounded up to a power of two: at most half of the slots are taken.
        self._slots = np.full(1 << (2 * capacity - 1).bit_length(), _EMPTY, np.int32)
        self._mask = np.int64(self._slots.size - 1)
        self._live = 0
        self._gone = 0

    def __len__(self) -> int:
        return self._live

    @property
    def nbytes(self) -> int:
        """Bytes of the slots; the digests belong to the entries."""
        return self._slots.nbytes

    def find(self, digests: UInt8[np.ndarray, "n 32"]) -> Int32[np.ndarray, " n"]:
        """The entry of each digest, or ``ABSENT``; all 32 bytes are compared."""
        wanted = np.ascontiguousarray(digests).view(np.uint64)
        found = np.full(len(wanted), ABSENT, np.int32)
        open_ = np.arange(len(wanted))
        at, stride = self._probe(wanted)
        while open_.size:
            ids = _rows(self._slots, at)
            hit = (ids >= 0) & _equal(_rows(self._words, ids), wanted)
            found[open_.compress(hit)] = ids.compress(hit)
            more = np.flatnonzero((ids != _EMPTY) & ~hit)
            open_, wanted, at, stride = _narrowed(more, open_, wanted, at, stride)
            at = (at + stride) & self._mask
        return found

    def insert(self, ids: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Enters the entries under their digests; says which were.

        False where an entry of the same digest is in the table, or comes earlier in ``ids``: that
        one stays. An id that is in the table already is such a one too.

        Raises:
          ValueError: more than ``capacity`` entries, or an id without a digest; nothing is entered.
        """
        ids = self._checked(ids)
        entered = self.find(self._digests_of(ids)) == ABSENT
        if self._live + int(entered.sum()) > self.capacity:
            raise ValueError(f"the table has room for {self.capacity - self._live} more entries")
        new = np.flatnonzero(entered)
        entered[new] = self._place(ids[new])
        self._live += int(entered.sum())
        return entered

    def remove(self, ids: Int[np.ndarray, " n"]) -> None:
        """Takes the entries out; their digests must still be those they were entered under.

        Raises:
          KeyError: one is not in the table, or stands twice; nothing is removed.
        """
        ids = self._checked(ids)
        slots = self._slots_of(ids)
        if np.unique(slots).size != slots.size:
            raise KeyError("an entry stands twice among those to remove")
        self._slots[slots] = _GONE
        self._live -= ids.size
        self._gone += ids.size
        if self._gone > self._slots.size // 4:
            self._rebuild()

    def _slots_of(self, ids: Int32[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """The slot that each entry is in; ``KeyError`` when one is in none."""
        slots = np.empty(ids.size, np.int64)
        open_ = np.arange(ids.size)
        at, stride = self._probe(_rows(self._words, ids))
        while open_.size:
            there = _rows(self._slots, at)
            missing = there == _EMPTY
            if missing.any():
                raise KeyError(f"entry {ids[open_[missing]][0]} is not in the table")
            hit = there == ids[open_]
            slots[open_[hit]] = at[hit]
            open_, at, stride = _narrowed(np.flatnonzero(~hit), open_, at, stride)
            at = (at + stride) & self._mask
        return slots

    def _place(self, ids: Int32[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """Puts entries whose digests are not in the table into free slots; False for repeats.

        Equal digests walk the same slots in step, so a repeat always meets the one that won.
        """
        placed = np.ones(ids.size, np.bool_)
        open_ = np.arange(ids.size)
        words = _rows(self._words, ids)
        at, stride = self._probe(words)
        while open_.size:
            before = _rows(self._slots, at)
            free = np.flatnonzero(before < 0)
            # Of several that claim one slot the last write stays: backwards, that is the first.
            claims = _GONE - 1 - open_.astype(np.int32)
            self._slots[at[free[::-1]]] = claims[free[::-1]]
            won = _rows(self._slots, at) == claims
            self._slots[at.compress(won)] = ids[open_.compress(won)]
            self._gone -= int(np.count_nonzero(before.compress(won) == _GONE))
            rest = np.flatnonzero(~won)
            open_, words, at, stride = _narrowed(rest, open_, words, at, stride)
            repeat = _equal(_rows(self._words, _rows(self._slots, at)), words)
            placed[open_.compress(repeat)] = False
            more = np.flatnonzero(~repeat)
            open_, words, at, stride = _narrowed(more, open_, words, at, stride)
            at = (at + stride) & self._mask
        return placed

    def _rebuild(self) -> None:
        """Forgets what is gone; once for each quarter of the slots that was removed."""
        ids = self._slots[self._slots >= 0]
        self._slots.fill(_EMPTY)
        self._gone = 0
        self._place(ids)

    def _probe(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First slot and odd stride of each digest, from its first two words."""
        at = words[:, 0].astype(np.int64) & self._mask
        stride = (words[:, 1].astype(np.int64) & self._mask) | 1
        return at, stride

    def _checked(self, ids: Int[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
        ids = np.asarray(ids)
        if ids.size and not 0 <= ids.min() <= ids.max() < len(self._words):
            raise ValueError(f"entry ids must be in 0..{len(self._words) - 1}")
        return ids.astype(np.int32, copy=False)

    def _digests_of(self, ids: Int32[np.ndarray, " n"]) -> np.ndarray:
        return _rows(self._words, ids).view(np.uint8)


def _rows(array: np.ndarray, at: np.ndarray) -> np.ndarray:
    """``array[at]``, several times faster; a negative index reads row 0, to be masked out."""
    return array.take(at, axis=0, mode="clip")


def _narrowed(keep: np.ndarray, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
    """The rows ``keep`` of each array."""
    return tuple(array.take(keep, axis=0, mode="clip") for array in arrays)


def _equal(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Whether the four words of each row agree."""
    differ = a ^ b
    return (differ[:, 0] | differ[:, 1] | differ[:, 2] | differ[:, 3]) == 0
