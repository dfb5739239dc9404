"""The five kinds of state a prefix needs before decoding may go on."""

import enum


class Kind(enum.Enum):
    """One of the five things that must each be restorable; see ``docs/architecture.md``."""

    COMPRESSED = "compressed"
    """Immutable rows, one a cell, of every complete block. Shared between sequences."""

    TAIL = "tail"
    """Per sequence: raw (kv, gate) of each open cell, and the overlap of the last complete one."""

    WINDOW = "window"
    """Per sequence: the last ``window - 1`` raw rows of every windowed layer."""

    INDEXER = "indexer"
    """Index rows of every complete block of the routed layers; one block with COMPRESSED."""

    DISK_PREFIX = "disk_prefix"
    """The committed record of a prefix in a store: manifest, identity, digests."""
