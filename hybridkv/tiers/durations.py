"""Durations as they come, counted in ranges: cheap to note, and safe to copy from another thread.

bounds   0.001   0.0025   0.005  ...  60     (seconds; the last range has no end)
counts   [  3  ][   0    ][  7  ] ... [ 0 ][ 0 ]
"""

import bisect

BOUNDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
"""Upper ends of the ranges, seconds: from a decode step to what a user gives up on."""


class Durations:
    """A histogram. One thread notes; another may copy it, and is then at most one note behind."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        """Notes in each range, not cumulative."""
        self.seconds = 0.0
        """Of all notes."""

    def note(self, seconds: float) -> None:
        """Counts one."""
        self.counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds

    def copy(self) -> "Durations":
        """As it is now."""
        new = Durations()
        new.counts, new.seconds = list(self.counts), self.seconds
        return new

    @property
    def count(self) -> int:
        """Notes."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Seconds of one on average; 0 where there is none."""
        return self.seconds / self.count if self.count else 0.0
