"""Statistics of the last so many values, in memory that is taken once."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float


class RecentValues:
    """The last ``size`` numbers, 8 bytes each."""

    def __init__(self, size: int) -> None:
        self._values: Float[np.ndarray, " size"] = np.zeros(size)
        self.noted = 0
        """Numbers that came, those that are gone included."""

    def __len__(self) -> int:
        return min(self.noted, len(self._values))

    def note(self, value: float) -> None:
        """One more; the oldest goes where there is no place left."""
        self._values[self.noted % len(self._values)] = value
        self.noted += 1

    def clear(self) -> None:
        """Forgets all."""
        self.noted = 0

    def percentile(self, share: float) -> float:
        """The least value that at least ``share`` of the values do not exceed; 0 without any.

        Args:
          share: 0.99 for p99; above 0, at most 1.
        """
        count = len(self)
        if not count:
            return 0.0
        rank = max(int(np.ceil(share * count - 1e-9)) - 1, 0)
        return float(np.partition(self._values[:count], rank)[rank])


class RecentSums:
    """Sums over the last ``size`` rows of ``columns`` counts, kept as rows come and go."""

    def __init__(self, size: int, columns: int) -> None:
        self._rows = np.zeros((size, columns), np.int64)
        self.sums = np.zeros(columns, np.int64)
        """int64 ``[columns]``, of the rows that are there."""
        self.noted = 0
        """Rows that came, those that are gone included."""

    def __len__(self) -> int:
        return min(self.noted, len(self._rows))

    def note(self, row: Sequence[int]) -> None:
        """One more row; the oldest goes where there is no place left."""
        place = self.noted % len(self._rows)
        self.sums -= self._rows[place]
        self._rows[place] = row
        self.sums += self._rows[place]
        self.noted += 1

    def clear(self) -> None:
        """Forgets all."""
        self._rows[:] = 0
        self.sums[:] = 0
        self.noted = 0
