"""What a step is told: which tokens of which sequences. Shapes are fixed, lengths are data."""

import dataclasses

import jax
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TileBatch:
    """Prompt tokens of up to ``lanes`` sequences, one tile each; active lanes stand first."""

    tokens: Int[Array, "lanes tile"]
    """Token ids; those at or past ``end`` may hold anything."""
    slots: Int[Array, " lanes"]
    """Slot of each lane's sequence; no slot twice. An idle lane's is the number of slots."""
    starts: Int[Array, " lanes"]
    """First position, a multiple of the tile."""
    ends: Int[Array, " lanes"]
    """Position after the last token; ``starts`` for an idle lane."""
    known_from: Int[Array, " lanes"]
    """First position whose window rows the slot holds: 0, except in a replay, which starts from
    nothing. Older rows and, at this very position, the overlap count as absent."""
    write_from: Int[Array, " lanes"]
    """Rows of cells that end at or before this position are stored already, perhaps shared, and
    are read but never written."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeBatch:
    """The next token of every active slot."""

    tokens: Int[Array, " slots"]
    """Token ids; those of idle slots may hold anything."""
    active: Bool[Array, " slots"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Static choices of the executables. All but ``sequential`` are part of the results' bits."""

    tile: int = 128
    """Prompt tokens computed at once; a multiple of ``geometry.block_tokens``."""
    lanes: int = 1
    """Sequences of one tile step."""
    key_block: int = 128
    """Compressed rows that attention sums at once."""
    index_block: int = 1024
    """Index rows scored at once."""
    expert_rows: int = 32
    """Prompt tokens of one expert multiplied at once."""
    sequential: bool = False
    """Run active lanes and slots one after the other in a traced loop, so that idle ones cost
    nothing: right for CPUs. Off, all run at once."""
    kernels: str | None = None
    """Implementation of attention and index scores: ``"tpu"``, ``"gpu"`` or ``"reference"``; None
    takes the first that supports the model on the default backend. A named one fails loudly."""
    all_logits: bool = False
    """Tile steps return logits of every position rather than each lane's last."""
