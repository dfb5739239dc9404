"""Sequence state: window and tail as one, the fixed-size state of a sequence at one position."""

import dataclasses

import jax

from hybridkv.geometry import Geometry
from hybridkv.state.capacity import Capacity
from hybridkv.state.tail import Tails
from hybridkv.state.window import WindowRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceState:
    """Two kinds inside one pytree, copied and digested as one. Every leaf leads with slots."""

    window: WindowRows
    tails: Tails

    @classmethod
    def declare(cls, geometry: Geometry, capacity: Capacity) -> "SequenceState":
        """The state's declarations."""
        return cls(
            window=WindowRows.declare(geometry, capacity),
            tails=Tails.declare(geometry, capacity),
        )
