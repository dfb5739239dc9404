"""Published blocks that hold generated tokens, and what became of them.

Decode steps are another executable than tile steps, so a generated token's rows are published only
after a tile step has made them again (``canonical``), or as they are, which is marked
(``as_decoded``): whoever reads such rows has other bits than a cold run, and is told so.
"""

import dataclasses
import enum

import numpy as np

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import Tier


class Publish(enum.Enum):
    """What happens to generated tokens when their request ends."""

    CANONICAL = "canonical"
    """Recomputed by tile steps in idle time, then published: exact for whoever goes on."""
    AS_DECODED = "as_decoded"
    """Published at once; a request that reads them says ``exact=False``."""
    NEVER = "never"
    """Forgotten: the next prompt computes them."""


@dataclasses.dataclass(kw_only=True)
class GeneratedUse:
    """Tokens, in whole blocks."""

    published: int = 0
    used: int = 0
    """Found by a later prompt, once each."""
    wasted: int = 0
    """Evicted before a prompt found them."""


class GeneratedBlocks:
    """Remembers which entries hold generated tokens. Costs nothing where there are none."""

    def __init__(self, allocator: Allocator, block_tokens: int) -> None:
        self.use = GeneratedUse()
        self._columns, self._block = allocator.entries, block_tokens
        self._unused: set[int] = set()
        self._inexact: set[int] = set()
        allocator.on_evict.append(self._evicted)

    def published(self, entries: np.ndarray) -> None:
        """Entries that were just published for their generated tokens."""
        self.use.published += len(entries) * self._block
        self._unused |= self._keys(entries)

    def mark_inexact(self, entries: np.ndarray) -> None:
        """Blocks whose rows, or snapshots whose state, are not those of a cold run."""
        self._inexact |= self._keys(entries)

    def found(self, entries: np.ndarray) -> None:
        """Notes that a prompt shares these."""
        if self._unused:
            now = self._unused & self._keys(entries)
            self._unused -= now
            self.use.used += len(now) * self._block

    def exact(self, entries: np.ndarray) -> bool:
        """Whether all of these, blocks or snapshots, are those of a cold run."""
        return not self._inexact or self._inexact.isdisjoint(self._keys(entries))

    def exact_each(self, entries: np.ndarray) -> np.ndarray:
        """Whether each of these is that of a cold run: bool ``[n]``."""
        if not self._inexact:
            return np.ones(len(entries), bool)
        return ~np.isin(self._each_key(entries), list(self._inexact))

    def _each_key(self, entries: np.ndarray) -> np.ndarray:
        """Entry and generation: what was withdrawn and taken again is another one."""
        return entries.astype(np.int64) << 32 | self._columns.generation[entries]

    def _keys(self, entries: np.ndarray) -> set[int]:
        return set(self._each_key(entries).tolist())

    def _evicted(self, entries: np.ndarray, tier: Tier, cause: str) -> None:
        del tier, cause
        if not self._unused and not self._inexact:
            return
        gone = self._keys(entries)
        self.use.wasted += len(self._unused & gone) * self._block
        self._unused -= gone
        self._inexact -= gone
