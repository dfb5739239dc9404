"""How many entries were used since another one was, without looking at all of them.

    request    0    1    2    3         one counter a request and form: the published entries
    counter  [ 2 ][ 0 ][ 5 ][ 3 ]       whose last use it was; since request 2 there were 8

An order by last use with so many places would just have kept what was used at request 2.
"""

import numpy as np
from jaxtyping import Float64, Int

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import NONE, Form, Tier


class Uses:
    """The last use of every published entry. Hears of evictions, and is told of all else."""

    def __init__(self, allocator: Allocator, clock: Float64[np.ndarray, " n"]) -> None:
        """None yet; ``clock`` has the time of each request, never falling."""
        self._entries = allocator.entries
        # Requests of one time are used at once: they share the counter of the first.
        self._counter = np.searchsorted(clock, clock).astype(np.int32)
        self._clock = clock
        self._last = np.full(len(allocator.entries), NONE, np.int32)
        """By entry: the counter that it is in."""
        self._counts = {form: np.zeros(len(clock), np.int64) for form in Form}
        allocator.on_evict.append(self._evicted)

    def since(self, form: Form, entries: Int[np.ndarray, " n"]) -> int:
        """Entries of a form used no earlier than one of these, themselves too; 0 of none."""
        if not len(entries):
            return 0
        return int(self._counts[form][self._last[entries].min() :].sum())

    def note(self, entries: Int[np.ndarray, " n"], request: int) -> None:
        """A request has used these, all of one time; those that are not published don't count."""
        published = self._entries.published.take(entries)
        shown = entries if published.all() else entries[published]
        self.forget(shown)
        counter = self._counter[request]
        self._last[shown] = counter
        snapshots = np.count_nonzero(self._entries.form.take(shown))
        self._counts[Form.SNAPSHOT][counter] += snapshots
        self._counts[Form.BLOCK][counter] += len(shown) - snapshots

    def forget(self, entries: Int[np.ndarray, " n"]) -> None:
        """These are about to be lost, or used again."""
        last = self._last.take(entries)
        known = last != NONE
        if not known.any():
            return
        snapshots = self._entries.form.take(entries) == Form.SNAPSHOT
        for form, of_form in ((Form.BLOCK, ~snapshots), (Form.SNAPSHOT, snapshots)):
            np.subtract.at(self._counts[form], last[of_form & known], 1)
        self._last[entries] = NONE

    def check(self) -> None:
        """Counts all entries anew, and compares; slow."""
        shown = self._entries.published
        for form, counts in self._counts.items():
            used = self._entries.used[shown & (self._entries.form == form)]
            at = np.searchsorted(self._clock, used)
            assert (np.bincount(at, minlength=len(counts)) == counts).all(), "uses were lost"

    def _evicted(self, entries: Int[np.ndarray, " n"], tier: Tier, cause: str) -> None:
        del tier, cause
        self.forget(entries)
