"""How large a cache is: the sizes that are not the model's."""

import dataclasses

from hybridkv.arithmetic import cdiv
from hybridkv.geometry import Geometry


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """Sizes of the pools. None of them ever changes a result."""

    blocks: int
    """Blocks in the pools, shared by all sequences. One costs ``geometry.block_bytes``."""
    slots: int
    """Sequences that live at once. One costs ``geometry.sequence_bytes``."""
    blocks_per_sequence: int
    """Length of a block table: the longest sequence."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be at least 1, got {self}")

    @classmethod
    def for_tokens(cls, geometry: Geometry, *, tokens: int, slots: int = 1) -> "Capacity":
        """Room for ``slots`` sequences of ``tokens`` tokens each."""
        each = cdiv(tokens, geometry.block_tokens)
        return cls(blocks=slots * each, slots=slots, blocks_per_sequence=each)

    def tokens(self, geometry: Geometry) -> int:
        """Tokens of the longest sequence."""
        return self.blocks_per_sequence * geometry.block_tokens
