"""What records of sequences and prefixes have in common: words by kind, and who they belong to.

    words [ COMPRESSED | INDEXER ] or [ WINDOW | TAIL ]  <--> {"compressed": 120, "indexer": 30}

Only values; any thread.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from hybridkv.kinds import Kind
from hybridkv.prefixes.identity import Identity

MOST_NUMBER = 2**48


class Belonging(Protocol):
    """What every record says of whose it is."""

    @property
    def identity(self) -> Identity:
        """What its bytes depend on besides tokens and namespace."""
        ...

    @property
    def root(self) -> bytes:
        """``identity.root(namespace)``."""
        ...

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        ...


_PARTS = ("geometry", "weights", "layout", "numerics")


def sizes_of(spans: Mapping[Kind, slice]) -> dict[str, int]:
    """Words of each kind, in their order."""
    ordered = sorted(spans.items(), key=lambda item: item[1].start)
    return {kind.value: span.stop - span.start for kind, span in ordered}


def spans_of(sizes: Any, name: str) -> dict[Kind, slice]:
    """The inverse of ``sizes_of``; ``name`` is for the ValueError."""
    if not isinstance(sizes, dict):
        raise ValueError(f"{name} is not an object")
    spans, start = {}, 0
    for value, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= MOST_NUMBER:
            raise ValueError(f"{name} has {size!r} words of {value}")
        spans[Kind(value)] = slice(start, start + size)
        start += size
    return spans


def span_difference(
    found: Mapping[Kind, slice], needed: Mapping[Kind, slice]
) -> tuple[Kind, str] | None:
    """The first kind that is not as it is needed, and what is wrong with it; None for nothing."""
    for kind, span in needed.items():
        if kind not in found:
            return kind, f"it has no {kind.name}"
        if (found[kind].start, found[kind].stop) != (span.start, span.stop):
            return kind, f"its {kind.name} has another size or place"
    for kind in found:
        if kind not in needed:
            return kind, f"it has {kind.name}, which this model lacks"
    return None


def why_foreign(
    record: Belonging,
    identity: Identity,
    namespace: str,
    block_tokens: int,
    spans: Iterable[tuple[Mapping[Kind, slice], Mapping[Kind, slice]]],
) -> tuple[str, Kind | None] | None:
    """Why a record can't be read by whoever has this identity, and the kind to blame for it.

    Args:
      record: whose bytes are to be used.
      identity: of the reader.
      namespace: that the reader asks for.
      block_tokens: tokens of the reader's blocks.
      spans: pairs of what the record has and what the reader needs.
    """
    differences = identity.differences(record.identity)
    if differences:
        return f"of another identity ({', '.join(differences)} differ)", None
    if record.root != identity.root(namespace):
        return f"not of namespace {namespace!r}", None
    for found, needed in spans:
        wrong = span_difference(found, needed)
        if wrong is not None:
            return f"not whole, {wrong[1]}", wrong[0]
    if record.block_tokens != block_tokens:
        return f"of blocks of {record.block_tokens} tokens, not {block_tokens}", None
    return None


def identity_json(identity: Identity) -> dict[str, Any]:
    """As plain values."""
    return dataclasses.asdict(identity)


def identity_of(value: Any) -> Identity:
    """The inverse of ``identity_json``; anything else is a ValueError."""
    if not isinstance(value, dict) or set(value) != {*_PARTS, "extra"}:
        raise ValueError("its identity has other parts")
    try:
        extra = tuple((name, part) for name, part in value["extra"])
        return Identity(extra=extra, **{name: value[name] for name in _PARTS})
    except TypeError:
        raise ValueError("its identity has parts of another form") from None
