"""What a store keeps, as values; nothing here touches a file.

tokens      [ block ][ block ][ block ]            Extension: what is added to a parent
digests         d0       d1       d2               a block is found by the digest of its end
snapshot                          ^ position       SnapshotAt: stands at the end of a block
words       [ COMPRESSED | INDEXER ]  [ WINDOW | TAIL ]      StoreLayout: spans by kind
"""

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt8, UInt32

from hybridkv.errors import UserError
from hybridkv.kinds import Kind

BLOCK_KINDS = (Kind.COMPRESSED, Kind.INDEXER)
SNAPSHOT_KINDS = (Kind.WINDOW, Kind.TAIL)
WORD_BYTES = 4


class StoreError(UserError):
    """A folder that can't be used as asked: the message says why and what to do."""


class StoreWriteError(StoreError):
    """Nothing of what was to be written can be found: no space, no permission, a failing disk."""


class StoreFullError(StoreWriteError):
    """The store's own capacity does not allow it: remove something first."""


class Damaged(RuntimeError):  # noqa: N818
    """Stored bytes are missing or not what was written. For a caller, a miss."""

    def __init__(
        self, where: str, kind: Kind | None, reason: str, *, may_pass: bool = False
    ) -> None:
        super().__init__(f"{where}: {reason}")
        self.may_pass = may_pass
        """Whether the bytes may be whole, and only could not be read now."""
        self.where = where
        """The folder inside the store."""
        self.kind = kind
        """The kind whose bytes are wrong; None when the whole of it can't be read."""
        self.reason = reason


class ProblemKind(enum.Enum):
    """Why something in a store is not used."""

    DAMAGED = "damaged"
    """The bytes of a file are not those that were written."""
    FOREIGN = "foreign"
    """Not written by this library for this store."""
    MISSING = "missing"
    """A file is gone or has another size."""
    NO_PARENT = "no_parent"
    """Whole, but what it goes on from is not there."""
    DUPLICATE = "duplicate"
    """Holds a block or a snapshot that another manifest holds too."""
    UNREFERENCED = "unreferenced"
    """No manifest refers to it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong with a store."""

    kind: ProblemKind
    file: str
    """Relative to the store's folder."""
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.kind.value}: {self.reason}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoreLayout:
    """How blocks and snapshots are words, and where in them each kind is."""

    block_tokens: int
    block_spans: Mapping[Kind, slice]
    """Words of a block by kind: COMPRESSED and INDEXER, one after the other from word 0. A kind
    that the model lacks is absent; one that it has without bytes is an empty slice."""
    snapshot_spans: Mapping[Kind, slice]
    """Words of a snapshot by kind: WINDOW and TAIL, likewise."""
    segment_blocks: int = 8
    """Blocks that are written as one array. More make fewer files and longer reads."""

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.segment_blocks < 1:
            raise UserError(
                f"block_tokens is {self.block_tokens} and segment_blocks {self.segment_blocks}: "
                "both are at least 1"
            )
        object.__setattr__(
            self, "block_spans", _ordered("block_spans", self.block_spans, BLOCK_KINDS)
        )
        object.__setattr__(
            self, "snapshot_spans", _ordered("snapshot_spans", self.snapshot_spans, SNAPSHOT_KINDS)
        )

    @property
    def block_words(self) -> int:
        """Words (uint32) of one block."""
        return _words(self.block_spans)

    @property
    def snapshot_words(self) -> int:
        """Words (uint32) of one snapshot."""
        return _words(self.snapshot_spans)

    def to_json(self) -> dict[str, Any]:
        """As plain values for a store's own record."""
        return {
            "block_tokens": self.block_tokens,
            "segment_blocks": self.segment_blocks,
            "block_spans": {k.value: [s.start, s.stop] for k, s in self.block_spans.items()},
            "snapshot_spans": {k.value: [s.start, s.stop] for k, s in self.snapshot_spans.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "StoreLayout":
        """The inverse of ``to_json``; anything else raises ValueError, TypeError or KeyError."""
        return cls(
            block_tokens=int(value["block_tokens"]),
            segment_blocks=int(value["segment_blocks"]),
            block_spans={
                Kind(k): slice(int(a), int(b)) for k, (a, b) in value["block_spans"].items()
            },
            snapshot_spans={
                Kind(k): slice(int(a), int(b)) for k, (a, b) in value["snapshot_spans"].items()
            },
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotAt:
    """Where a snapshot stands."""

    position: int
    """Tokens before it, a multiple of ``block_tokens`` and at least that."""
    digest: bytes
    """Of the block that ends there."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Extension:
    """Blocks that go on from a parent, and snapshots at the ends of blocks."""

    root: bytes
    """``Identity.root(namespace)``."""
    parent: bytes
    """Digest of the block before the first one; ``root`` when there is none."""
    first: int
    """Number of the first block: how many lie before it."""
    tokens: UInt32[np.ndarray, " n_block_tokens"] = dataclasses.field(repr=False)
    """Of the blocks here only."""
    digests: UInt8[np.ndarray, "n 32"] = dataclasses.field(repr=False)
    """Chained digest of each block."""
    snapshots: tuple[SnapshotAt, ...] = ()
    """On blocks here or on any before them."""

    @property
    def blocks(self) -> int:
        """Blocks here."""
        return len(self.digests)

    @property
    def end(self) -> int:
        """Number of the block after the last one."""
        return self.first + len(self.digests)

    def digest(self, number: int) -> bytes:
        """Digest of the block that is the ``number``-th here."""
        return self.digests[number].tobytes()


@dataclasses.dataclass(frozen=True)
class BlockPlace:
    """Where a block's words are: a row of a segment."""

    segment: str
    index: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StoredExtension:
    """An extension that was committed."""

    id: str
    extension: Extension
    blocks: tuple[BlockPlace, ...]
    """Place of each block."""
    snapshot_ids: tuple[str, ...]
    """Of each snapshot, what ``Store.read_snapshot`` takes."""
    written: float
    """Seconds since the epoch."""


def needed_kinds(geometry: str) -> frozenset[Kind] | None:
    """Kinds that a model of this geometry stores, from ``Identity.geometry``.

    None where the text is not one that ``Identity.of_geometry`` makes: then nothing is known.
    """
    try:
        layers = json.loads(geometry)["layers"]
        kinds = set()
        for layer in layers:
            stores = layer["ratio"] > 0 and layer["rows_of"] is None
            kinds |= {Kind.COMPRESSED} if stores else set()
            kinds |= {Kind.INDEXER} if stores and layer["indexed"] else set()
            kinds |= {Kind.WINDOW} if layer["window"] > 1 else set()
            # Open cells are empty where snapshots stand; overlaps are not.
            kinds |= {Kind.TAIL} if stores and layer["overlap"] else set()
    except (ValueError, TypeError, KeyError):
        return None
    return frozenset(kinds)


def _ordered(
    name: str, spans: Mapping[Kind, slice], allowed: tuple[Kind, ...]
) -> dict[Kind, slice]:
    """The spans from word 0 up, without gaps, so that every word has a digest."""
    at, ordered = 0, {}
    for kind, span in sorted(spans.items(), key=lambda x: (x[1].start, x[1].stop)):
        if kind not in allowed:
            raise UserError(f"{name} has {kind.name}: it may have {[k.name for k in allowed]}")
        if span.start != at or span.stop < at or span.step not in (None, 1):
            raise UserError(
                f"{name}[{kind.name}] is {span}: kinds follow each other without gaps, "
                f"so it starts at word {at}"
            )
        ordered[kind], at = slice(int(span.start), int(span.stop)), int(span.stop)
    return ordered


def _words(spans: Mapping[Kind, slice]) -> int:
    return max((span.stop for span in spans.values()), default=0)
