"""What a directory had of each kind for a prompt, whatever became of it: a hit is only a ticket."""

import dataclasses
from collections.abc import Mapping

from hybridkv.kinds import Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """Of one prompt, each kind for itself; what is reused is where all of them hold together."""

    looked_up: int = 0
    """Complete blocks of the prompt, which were asked for."""
    refused: int = 0
    """Blocks whose compressed rows are whole and whose index rows are not."""
    tokens: Mapping[Kind, int] = dataclasses.field(default_factory=dict)
    """Last position that each kind would let decoding go on from, at most the prompt's tokens
    minus 1. Of DISK_PREFIX, tokens that a store has."""


NOTHING_FOUND = Found()
"""Nobody looked."""
