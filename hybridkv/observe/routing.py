r"""Where a request's prefix is, from the events of several engines.

    router's topic  --BlockStored--> tokens -> hash, by parent      which blocks match a prompt
    our topic       --EntriesStored--> hash -> what it costs        where one can resume on them
                                  \
    choose(tokens) --> the engine that computes the fewest tokens, not the one that matches most

The longest match is only an admission ticket: without a sequence state at its end, its last tokens
are computed again, and may be more than a shorter match with a state would take. Nothing here is
promised: what an engine then reuses is decided by its planner. One thread.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hybridkv.errors import UserError
from hybridkv.observe.events import (
    EntriesBatch,
    EntriesRemoved,
    EntriesStored,
    router_hash,
)

try:
    import msgspec
except ImportError as error:
    raise ImportError("events need msgspec and pyzmq: pip install -e '.[observe]'") from error

_ENTRIES = msgspec.msgpack.Decoder(EntriesBatch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """What one engine has of a prompt."""

    matched: int
    """Tokens of the longest run of blocks that match."""
    boundary: int
    """Position at which the prompt would go on with an exact state."""
    replayed: int
    """Tokens before it that are computed again for that."""

    @property
    def reused(self) -> int:
        """Tokens that are not computed."""
        return self.boundary - self.replayed


@dataclasses.dataclass(kw_only=True, eq=False)
class _Block:
    position: int = 0
    tiers: set[str] = dataclasses.field(default_factory=set)
    snapshots: set[str] = dataclasses.field(default_factory=set)
    """Tiers that have the state at its end."""
    cost: int | None = None
    """Tokens of a replay up to its end."""


class PrefixIndex:
    """What one engine has, as its events say."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, _Block] = {}
        self._digests: dict[int, bytes] = {}
        """From what the router's topic calls those blocks to what ours does."""
        self._behind: dict[tuple[int | None, bytes], int] = {}
        """From a block's hash and the next block's tokens to its hash."""
        self._edges: dict[int, tuple[int | None, bytes]] = {}
        self._mediums: dict[int, set[str | None]] = {}
        self._block_size = 0

    def forget(self) -> None:
        """After a gap: nothing is sure any more."""
        self.__init__()  # type: ignore[misc]

    # The router's topic.

    def take_router(self, payload: bytes) -> None:
        """One batch of the router's topic, of either shape."""
        _, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            self._take(_fields(event))

    def _take(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self._behind, self._edges, self._mediums = {}, {}, {}
        elif event["type"] == "BlockRemoved":
            for block in map(_short, event["block_hashes"]):
                mediums = self._mediums.get(block, set())
                mediums.discard(event["medium"])
                if not mediums:
                    self._mediums.pop(block, None)
                    self._behind.pop(self._edges.pop(block, (None, b"")), None)
        elif event["type"] == "BlockStored":
            self._stored(event)

    def _stored(self, event: Mapping[str, Any]) -> None:
        size = self._block_size = event["block_size"]
        tokens = np.asarray(event["token_ids"], np.uint32)
        parent = None if event["parent_block_hash"] is None else _short(event["parent_block_hash"])
        for number, block in enumerate(map(_short, event["block_hashes"])):
            self._mediums.setdefault(block, set()).add(event["medium"])
            if tokens.size:
                edge = (parent, tokens[number * size : (number + 1) * size].tobytes())
                self._behind[edge], self._edges[block] = block, edge
            parent = block

    # Our topic.

    def take_entries(self, payload: bytes) -> None:
        """One batch of our topic."""
        for event in _ENTRIES.decode(payload).events:
            if isinstance(event, EntriesStored):
                self._entries_stored(event)
            elif isinstance(event, EntriesRemoved):
                self._entries_removed(event)
            else:
                self._blocks, self._digests = {}, {}

    def _entries_stored(self, event: EntriesStored) -> None:
        fields = zip(event.block_hashes, event.positions, event.replay_tokens, strict=True)
        for block, position, cost in fields:
            known = self._blocks.setdefault(block, _Block(position=position))
            self._digests[router_hash(block)] = block
            if event.form == "snapshot":
                known.snapshots.add(event.tier)
            else:
                known.tiers.add(event.tier)
                known.position, known.cost = position, cost

    def _entries_removed(self, event: EntriesRemoved) -> None:
        for block in event.block_hashes:
            known = self._blocks.get(block)
            if known is None:
                continue
            (known.snapshots if event.form == "snapshot" else known.tiers).discard(event.tier)
            if not known.tiers and not known.snapshots:
                del self._blocks[block]
                self._digests.pop(router_hash(block), None)

    # Asking.

    def content(self) -> dict[bytes, tuple[frozenset[str], frozenset[str]]]:
        """By hash: tiers that have the block, and tiers that have the state at its end."""
        return {
            block: (frozenset(known.tiers), frozenset(known.snapshots))
            for block, known in self._blocks.items()
        }

    def score(self, tokens: Any, *, hashes: Sequence[bytes] | None = None) -> Score:
        """What is there of a prompt.

        Args:
          tokens: of the prompt, integers.
          hashes: of its complete blocks, where the caller knows them (``TokenChain.digests``):
            exact also where several namespaces have the same tokens.
        """
        run = list(self._match(np.asarray(tokens, np.uint32)) if hashes is None else hashes)
        best = Score(matched=0, boundary=0, replayed=0)
        matched = 0
        for block in run:
            known = self._blocks.get(block)
            if known is None or not known.tiers:
                break
            matched = known.position
            cost = 0 if known.snapshots else known.cost
            if cost is None or known.position >= len(tokens):
                continue  # at least the last token is computed
            if known.position - cost >= best.reused:
                best = Score(matched=0, boundary=known.position, replayed=cost)
        return dataclasses.replace(best, matched=matched)

    def _match(self, tokens: np.ndarray) -> Iterable[bytes]:
        size, parent = self._block_size, None
        for start in range(0, len(tokens) - size + 1, size) if size else ():
            parent = self._behind.get((parent, tokens[start : start + size].tobytes()))
            if parent not in self._digests:
                return
            yield self._digests[parent]


def _short(block: bytes | int) -> int:
    """A hash of the router's topic, whichever way it is written."""
    return block if isinstance(block, int) else router_hash(block)


def _fields(event: Any) -> Mapping[str, Any]:
    """An event of either shape, by name."""
    if isinstance(event, dict):
        return {"parent_block_hash": None, "medium": None, **event}
    name, *values = event
    names = {
        "BlockStored": (
            *("block_hashes", "parent_block_hash", "token_ids", "block_size"),
            *("lora_id", "medium"),
        ),
        "BlockRemoved": ("block_hashes", "medium"),
        "AllBlocksCleared": (),
    }.get(name, ())
    return {"type": name, "medium": None, **dict(zip(names, values, strict=False))}


class Router:
    """Chooses among engines."""

    def __init__(self, names: Iterable[str]) -> None:
        self.indexes = {name: PrefixIndex() for name in names}
        if not self.indexes:
            raise UserError("a router needs at least one engine")

    def scores(self, tokens: Any) -> dict[str, Score]:
        """By engine."""
        return {name: index.score(tokens) for name, index in self.indexes.items()}

    def choose(self, tokens: Any, load: Mapping[str, int] | None = None) -> tuple[str, Score]:
        """The engine that reuses most; of equals the one with the least load, then the first.

        Args:
          tokens: of the prompt.
          load: by engine, whatever is compared.
        """
        scores, load = self.scores(tokens), load or {}
        name = max(scores, key=lambda each: (scores[each].reused, -load.get(each, 0)))
        return name, scores[name]
