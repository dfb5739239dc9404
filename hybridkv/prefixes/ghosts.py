"""What was published once and is gone, and why: so that a lost token can be blamed."""

import itertools

import numpy as np
from jaxtyping import UInt8


class Ghosts:
    """Causes by the first 8 bytes of a digest. Bounded: the oldest are forgotten.

    Notes go into the younger of two generations; when it would exceed half of the capacity, the
    older one is dropped. So at least the last half of the capacity is remembered, at about 100
    bytes a note. Digests that share 8 bytes may take each other's cause: it ends in a report and
    never makes a hit.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 2:
            raise ValueError(f"capacity must be at least 2, got {capacity}")
        self._half = capacity // 2
        self._young: dict[int, str] = {}
        self._old: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def note(self, digests: UInt8[np.ndarray, "n 32"], cause: str) -> None:
        """Remembers why these are gone; a later cause replaces an earlier one."""
        keys = _prefixes(digests[-self._half :])
        if len(self._young) + len(keys) > self._half:
            self._old, self._young = self._young, {}
        self._young.update(zip(keys, itertools.repeat(cause)))

    def cause(self, digest: UInt8[np.ndarray, " 32"]) -> str | None:
        """Why it is gone; None when it never was here, or that is forgotten."""
        (key,) = _prefixes(digest[None])
        return self._young.get(key, self._old.get(key))


def _prefixes(digests: UInt8[np.ndarray, "n 32"]) -> list[int]:
    return np.ascontiguousarray(digests).view(np.uint64)[:, 0].tolist()
