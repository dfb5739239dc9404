"""The schemes that a trace is replayed under: what is stored, in which unit, and what may follow.

    homogeneous   [ rows + state ][ rows + state ][ ...     one page a block, a hit means reuse
    generic       [ raw rows     ][ raw rows     ][ ...     150 times the rows, a hit means reuse
    hybrid        [ rows ][ rows ][ rows ][ rows ] ...      a hit needs a state too:
                                 ^ state         ^ state    where a policy wrote one, or a replay

Each is a geometry, so that the directory, the planner and eviction are the same for all. The unit
of hashing and movement is a trace's block.
"""

import dataclasses
import enum
import functools

from hybridkv import formats
from hybridkv.errors import UserError
from hybridkv.formats import RowFormat
from hybridkv.geometry import Geometry, LayerGeometry
from hybridkv.kinds import Kind
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds
from hybridkv.replay.trace import BLOCK
from hybridkv.state.generic import generic_geometry
from hybridkv.state.snapshot import snapshot_bytes


class _Remembering(Geometry):
    """A geometry that computes the length of a replay once a position."""

    def replay_tokens(self, position: int) -> int:
        """See ``Geometry.replay_tokens``."""
        known = self._replays.get(position)
        if known is None:
            known = self._replays[position] = super().replay_tokens(position)
        return known

    @functools.cached_property
    def _replays(self) -> dict[int, int]:
        return {}


class SchemeName(enum.StrEnum):
    """How command lines call the schemes."""

    HOMOGENEOUS = "homogeneous"
    """The classical cache: one kind of page whose presence is enough. For a hybrid model to be
    exact, each page then carries the whole sequence state at its end."""
    GENERIC = "generic"
    """Uniform raw rows in every layer, compressed when they are read: no state beside them."""
    HYBRID = "hybrid"
    """Five kinds: rows in blocks, states as snapshots where a policy keeps them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scheme:
    """What one scheme stores of a model."""

    name: SchemeName
    geometry: Geometry
    """Of its blocks, one of which is a trace's block."""
    model: Geometry
    """Of the model itself."""

    def __post_init__(self) -> None:
        if self.geometry.block_tokens != BLOCK:
            raise UserError(
                f"{self.name}: a block is {self.geometry.block_tokens} tokens, a trace's {BLOCK}"
            )

    @functools.cached_property
    def block_bytes(self) -> int:
        """Bytes of one block of ``BLOCK`` tokens."""
        return self.geometry.block_bytes

    @functools.cached_property
    def snapshot_bytes(self) -> int:
        """Bytes of one snapshot; 0 where the scheme has none."""
        return state_bytes(self.geometry) if self.has_snapshots else 0

    @property
    def has_snapshots(self) -> bool:
        """Whether a hit needs a sequence state beside the blocks."""
        return bool(snapshot_kinds(self.geometry))

    @functools.cached_property
    def planned(self) -> Geometry:
        """What the planner is given: the same to it, in as few steps as can be.

        Where a hit is reuse, all that it asks of a geometry are the bytes of a block; else it asks
        for the same replay at every prompt.
        """
        if block_kinds(self.geometry) == (Kind.COMPRESSED,) and not self.has_snapshots:
            return _pages(self.block_bytes)
        return _Remembering(
            **{
                each.name: getattr(self.geometry, each.name)
                for each in dataclasses.fields(Geometry)
            }
        )

    def running_bytes(self, tokens: int) -> int:
        """Bytes that a sequence of ``tokens`` tokens takes while it runs, in whole blocks."""
        state = 0 if self.name is SchemeName.GENERIC else sequence_bytes(self.model)
        return -(-tokens // BLOCK) * self._running_block_bytes + state

    @functools.cached_property
    def _running_block_bytes(self) -> int:
        if self.name is SchemeName.HOMOGENEOUS:
            return in_trace_blocks(self.model).block_bytes
        return self.block_bytes


def state_bytes(geometry: Geometry) -> int:
    """Bytes of a snapshot."""
    return sum(snapshot_bytes(geometry).values())


def sequence_bytes(geometry: Geometry) -> int:
    """Bytes of the state of a running sequence."""
    return sum(geometry.sequence_bytes.values())


def in_trace_blocks(geometry: Geometry) -> Geometry:
    """The same cache with blocks as long as a trace's.

    Raises:
      UserError: a trace's block is no multiple of the model's.
    """
    tokens = geometry.block_tokens
    if BLOCK % tokens:
        raise UserError(f"a block of the model is {tokens} tokens, of which {BLOCK} is no multiple")
    cells = geometry.cells_per_block * BLOCK // tokens
    return dataclasses.replace(geometry, cells_per_block=cells)


def scheme_of(name: SchemeName | str, model: Geometry) -> Scheme:
    """A scheme for a model.

    Raises:
      UserError: no such scheme, or the model's blocks don't fit a trace's.
    """
    try:
        name = SchemeName(name)
    except ValueError as error:
        known = ", ".join(SchemeName)
        raise UserError(f"no scheme {name!r}: give one of {known}") from error
    blocks = in_trace_blocks(model)
    match name:
        case SchemeName.HYBRID:
            geometry = blocks
        case SchemeName.GENERIC:
            geometry = generic_geometry(model, block_tokens=BLOCK)
        case SchemeName.HOMOGENEOUS:
            geometry = _pages(blocks.block_bytes + state_bytes(model))
    return Scheme(name=name, geometry=geometry, model=model)


def _pages(size: int) -> Geometry:
    """The degenerate geometry whose blocks are single rows of ``size`` bytes."""
    page = RowFormat(name="page", bits=formats.FP8_INDEX.bits, rope_bits=formats.FP8_INDEX.bits)
    return Geometry(layers=(LayerGeometry(ratio=BLOCK),), row_width=size, row_format=page)
