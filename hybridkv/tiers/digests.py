"""Digests of words, a kind at a time: the one place that says what is computed over what.

    row  [ COMPRESSED | INDEXER ]  --digest of each span-->  {kind: 16 bytes}

xxh3_128 finds damage, at memory speed; it is no protection from somebody who can write to a store,
who could write digests as well. Words are little-endian on every machine we know. Any thread.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import xxhash
from jaxtyping import UInt8, UInt32

from hybridkv.kinds import Kind

CHECK_BYTES = 16
"""Of one digest."""


def digest(words: UInt32[np.ndarray, " words"]) -> bytes:
    """xxh3_128 of some words, 16 bytes."""
    return xxhash.xxh3_128_digest(words.data)


def kind_digests(
    words: UInt32[np.ndarray, " words"], spans: Mapping[Kind, slice]
) -> dict[Kind, bytes]:
    """The digest of each kind's words."""
    return {kind: digest(words[span]) for kind, span in spans.items()}


def row_digests(
    rows: Sequence[UInt32[np.ndarray, " words"]], spans: Mapping[Kind, slice]
) -> dict[Kind, UInt8[np.ndarray, "n 16"]]:
    """The digest of each kind's words, for each row."""
    result = {}
    for kind, span in spans.items():
        joined = b"".join(digest(row[span]) for row in rows)
        result[kind] = np.frombuffer(joined, np.uint8).reshape(len(rows), CHECK_BYTES)
    return result
