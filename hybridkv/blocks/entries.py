"""The record of every entry, one numpy column a field: no Python object an entry."""

import enum
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, UInt8, UInt32, UInt64

from hybridkv.kinds import Kind


class Tier(enum.IntEnum):
    """Where bytes are."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Form(enum.IntEnum):
    """What an entry stands for."""

    BLOCK = 0
    """Compressed and index rows of ``block_tokens`` tokens."""
    SNAPSHOT = 1
    """The sequence state (window and tail) at one position."""


NONE = -1
"""No entry, no place."""

KIND_BITS: Mapping[Kind, int] = MappingProxyType(
    {Kind.COMPRESSED: 1, Kind.INDEXER: 2, Kind.WINDOW: 4, Kind.TAIL: 8}
)
"""The bit of each kind that an entry can hold."""


def kind_bits(kinds: Iterable[Kind]) -> int:
    """The kinds as a bitmap.

    Raises:
      ValueError: an entry can't hold one of the kinds.
    """
    bits = 0
    for kind in kinds:
        if kind not in KIND_BITS:
            raise ValueError(f"no entry holds {kind.name}: give {[k.name for k in KIND_BITS]}")
        bits |= KIND_BITS[kind]
    return bits


def kinds_of(bits: int) -> tuple[Kind, ...]:
    """The kinds of a bitmap, in the order of their bits.

    Raises:
      ValueError: a bit stands for no kind.
    """
    if not 0 <= bits <= sum(KIND_BITS.values()):
        raise ValueError(f"{bits:#x} has bits that stand for no kind")
    return tuple(kind for kind, bit in KIND_BITS.items() if bits & bit)


FORM_BITS: Mapping[Form, int] = MappingProxyType(
    {
        Form.BLOCK: kind_bits((Kind.COMPRESSED, Kind.INDEXER)),
        Form.SNAPSHOT: kind_bits((Kind.WINDOW, Kind.TAIL)),
    }
)
"""The kinds that an entry of each form can hold, as a bitmap."""


class EntryError(ValueError):
    """Entries that do not exist, stand twice, or are not in the condition a call needs."""


class Entries:
    """The columns over ``count`` entry ids; every id starts absent in every tier."""

    form: UInt8[np.ndarray, " n"]
    """``Form``; of an absent entry, the one it had last."""
    kinds: UInt8[np.ndarray, " n"]
    """Bitmap of the kinds whose bytes are whole; see ``kind_bits``."""
    state: UInt8[np.ndarray, "tiers n"]
    """``TierState``."""
    place: Int32[np.ndarray, "tiers n"]
    """Index into the tier's pool of the entry's form; -1 where absent."""
    generation: UInt32[np.ndarray, " n"]
    """Counts up each time the id is taken."""
    leases: Int32[np.ndarray, " n"]
    """Open receipts that name the entry."""
    published: Bool[np.ndarray, " n"]
    """Whether the directory shows it."""
    parent: Int32[np.ndarray, " n"]
    """Of a published block, the block before it, -1 for a first one; of a published snapshot, the
    block at whose end it stands. -1 while unpublished."""
    children: Int32[np.ndarray, " n"]
    """Published blocks whose parent this is."""
    snapshot: Int32[np.ndarray, " n"]
    """The published snapshot at the end of this block, or -1."""
    position: Int32[np.ndarray, " n"]
    """Tokens from the start of the sequence to the block's end, or to the snapshot."""
    digest: UInt8[np.ndarray, "n 32"]
    """Chained digest up to the block's end; of meaning while published."""
    fingerprint: UInt64[np.ndarray, "n 2"]
    """Stands for the block's tokens when a hit is compared; of meaning while published."""
    used: Float64[np.ndarray, " n"]
    """Clock of the last use, seconds."""
    hits: Float32[np.ndarray, " n"]
    """Uses since the entry was taken."""
    floor: Float64[np.ndarray, " n"]
    """What the last evicted entry of the form was worth when this one was last used."""
    picks: Float32[np.ndarray, " n"]
    """How often the indexer picks rows of a block, uses a second; nobody measures it yet: 0."""

    def __init__(self, count: int) -> None:
        tiers = len(Tier)
        self.form = np.zeros(count, np.uint8)
        self.kinds = np.zeros(count, np.uint8)
        self.state = np.zeros((tiers, count), np.uint8)
        self.place = np.full((tiers, count), NONE, np.int32)
        self.generation = np.zeros(count, np.uint32)
        self.leases = np.zeros(count, np.int32)
        self.published = np.zeros(count, np.bool_)
        self.parent = np.full(count, NONE, np.int32)
        self.children = np.zeros(count, np.int32)
        self.snapshot = np.full(count, NONE, np.int32)
        self.position = np.zeros(count, np.int32)
        self.digest = np.zeros((count, 32), np.uint8)
        self.fingerprint = np.zeros((count, 2), np.uint64)
        self.used = np.zeros(count, np.float64)
        self.hits = np.zeros(count, np.float32)
        self.floor = np.zeros(count, np.float64)
        self.picks = np.zeros(count, np.float32)

    def __len__(self) -> int:
        return self.form.shape[0]

    def columns(self) -> Iterator[tuple[str, np.ndarray]]:
        """Name and array of every column; the last axis but of the digests is the entry."""
        return iter(vars(self).items())

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(column.nbytes for _, column in self.columns())

    @property
    def bytes_per_entry(self) -> float:
        """Bytes that one more entry costs."""
        return self.nbytes / len(self) if len(self) else 0.0
