"""Warm-up, stable, decay: the learning rate as a function of how much of the run is done.

Driven by a fraction rather than a step count, so that a run can be bounded by wall-clock time on a
machine whose speed nobody knows beforehand.
"""

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Phases of one run; fractions of the whole."""

    warmup_steps: int = 50
    """Steps, not a fraction: what warms up are the optimizer's averages."""
    dense: float = 0.4
    """Attend all rows until here (the indexer's warm-up), the indexer's picks after."""
    decay: float = 0.75
    """Where the decay begins; it ends at zero."""

    def rate(self, step: int, fraction: float) -> float:
        """Factor in ``[0, 1]`` of the peak learning rate: ``1 - sqrt`` decay (WSD)."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        if fraction <= self.decay:
            return warm
        done = min(1.0, (fraction - self.decay) / (1.0 - self.decay))
        return warm * (1.0 - math.sqrt(done))

    def sparse(self, fraction: float) -> bool:
        """Whether routed layers attend only the indexer's picks."""
        return fraction >= self.dense
