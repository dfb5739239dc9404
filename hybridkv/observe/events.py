"""Events as prefix-aware routers read them, and ours beside them.

**The router's topic.** Blocks only, in the shape of vLLM's KV events: a batch ``[ts, events,
data_parallel_rank]`` in msgpack, each event a map with its class name under ``type``, or an array
that begins with that name, as releases up to 0.22 write it (``Shape``). Fields and their order are
those of ``vllm/distributed/kv_events.py``; nothing is added. A field at the end of an array would
be read by a router whose own release has another field there, and snapshots must not be in this
stream at all: they have the hash of the block that they stand on, so that a router would take the
removal of a snapshot for that of the block. Every copy of a block comes with its parent and tokens:
routers that index by tokens drop what has none.

**Our topic** therefore is a second stream, with its own endpoint, sequence numbers and replay
socket: subscribers of everything (an empty topic, which is usual) do not see it, and gaps in one
say nothing about the other. The batch has the same shape; the events are ``EntriesStored``,
``EntriesRemoved`` and ``EntriesCleared``: blocks and snapshots with kinds, tier, positions and what
it costs to resume there.

A hash is the chained digest of the tokens up to the block's end, 32 bytes; it differs by model,
layout, numerics and namespace. The router's topic has its last 64 bits as an integer, as vLLM has
by default (``maybe_convert_block_hash`` in ``vllm/v1/core/kv_cache_utils.py``): there are routers
that read no other. Two blocks that agree in them would only send a request to the wrong engine.
"""

import dataclasses
import enum
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hybridkv.blocks.entries import Form, Tier, kinds_of
from hybridkv.geometry import Geometry
from hybridkv.observe.changes import Change, Cleared, Removed, Stored, Told
from hybridkv.observe.metric import form_name, tier_name
from hybridkv.prefixes.needs import replay_start, snapshot_kinds

try:
    import msgspec
except ImportError as error:
    raise ImportError("events need msgspec and pyzmq: pip install -e '.[observe]'") from error

MEDIUMS = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.DISK: "DISK"}
"""The router's words for tiers; an accelerator's memory is ``GPU`` there, whatever it is. SGLang
says ``DISK`` too; vLLM says ``STORAGE``, which older routers take for the accelerator."""


class Shape(enum.Enum):
    """How events stand in a batch of the router's topic."""

    MAP = "map"
    """``{"type": "BlockStored", ...}``: fields by name, as vLLM 0.33 and SGLang 0.5.23 do."""
    ARRAY = "array"
    """``["BlockStored", ...]``: fields by place, as vLLM 0.22 does."""


_FIELDS: dict[str, list[Any]] = {
    "BlockStored": [
        ("block_hashes", list[bytes | int]),
        ("parent_block_hash", bytes | int | None),
        ("token_ids", list[int]),
        ("block_size", int),
        ("lora_id", int | None),
        ("medium", str | None),
        ("lora_name", str | None),
    ],
    "BlockRemoved": [("block_hashes", list[bytes | int]), ("medium", str | None)],
    "AllBlocksCleared": [],
}
_STRUCTS: dict[Shape, dict[str, Any]] = {
    shape: {
        name: msgspec.defstruct(
            name, fields, tag=True, array_like=shape is Shape.ARRAY, omit_defaults=True
        )
        for name, fields in _FIELDS.items()
    }
    for shape in Shape
}


class EntriesStored(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """A run of blocks, each behind the one before, or a snapshot, that can be used on a tier."""

    form: str
    """``block`` or ``snapshot``."""
    block_hashes: list[bytes]
    """Of a snapshot, that of the block at whose end it stands."""
    parent_block_hash: bytes | None
    """Of the block before the first; None of a first block and of a snapshot."""
    tier: str
    """``device``, ``host`` or ``disk``."""
    kinds: list[str]
    """What the entries hold."""
    positions: list[int]
    """Tokens up to each."""
    replay_tokens: list[int | None]
    """Tokens before each position that a request computes again to go on from there with these
    entries alone, 0 at a snapshot and where no state is needed; None where none can go on."""
    restorable: int
    """The last of ``positions`` that has a replay cost; 0 where none has."""


class EntriesRemoved(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Entries that can't be used on a tier any more; for a snapshot, its replay comes back."""

    form: str
    block_hashes: list[bytes]
    tier: str
    kinds: list[str]
    positions: list[int]


class EntriesCleared(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Everything is gone, on all tiers."""


class EntriesBatch(msgspec.Struct, array_like=True, frozen=True):
    """One message of our topic."""

    ts: float
    """Seconds since the epoch."""
    events: list[EntriesStored | EntriesRemoved | EntriesCleared]
    data_parallel_rank: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resuming:
    """What it costs to go on from the end of a block; from the rules of ``plan_prefix``."""

    geometry: Geometry
    tile: int
    replay: bool
    """Whether a state may be rebuilt by recomputation."""

    def cost(self, position: int) -> int | None:
        """Tokens that are computed again to resume at a position without a snapshot."""
        if position % self.tile:
            return None
        if not snapshot_kinds(self.geometry):
            return 0
        return position - replay_start(self.geometry, position, self.tile) if self.replay else None


def router_hash(digest: bytes) -> int:
    """What the router's topic calls a block: the last 64 bits of its digest, big-endian."""
    return int.from_bytes(digest[-8:], "big")


def router_batch(
    changes: Sequence[Change],
    *,
    block_tokens: int,
    shape: Shape = Shape.MAP,
    whole_hashes: bool = False,
    rank: int | None = None,
    ts: float | None = None,
) -> bytes | None:
    """The router's message; None where nothing of it is for routers.

    ``token_ids`` is empty where nobody knows the tokens, see ``Changes``. With ``whole_hashes``
    hashes are the 32 bytes.
    """
    structs, events = _STRUCTS[shape], []
    name: Callable[[bytes], bytes | int] = bytes if whole_hashes else router_hash
    for run in _runs(changes):
        first = run[0]
        if isinstance(first, Cleared):
            events.append(structs["AllBlocksCleared"]())
        elif first.entry.form == Form.SNAPSHOT:
            continue
        elif isinstance(first, Removed):
            hashes = [name(change.entry.digest) for change in run]
            medium = MEDIUMS[first.tier]
            events.append(structs["BlockRemoved"](block_hashes=hashes, medium=medium))
        else:
            events.append(
                structs["BlockStored"](
                    block_hashes=[name(change.entry.digest) for change in run],
                    parent_block_hash=None
                    if first.entry.parent is None
                    else name(first.entry.parent),
                    token_ids=_tokens(run),
                    block_size=block_tokens,
                    lora_id=None,
                    medium=MEDIUMS[first.tier],
                    lora_name=None,
                )
            )
    if not events:
        return None
    return msgspec.msgpack.encode([time.time() if ts is None else ts, events, rank])


def _tokens(run: Sequence[Any]) -> list[int]:
    rows = [change.tokens for change in run]
    return [] if rows[0] is None else np.concatenate(rows).tolist()


def entries_batch(
    changes: Sequence[Change],
    resuming: Resuming,
    *,
    rank: int | None = None,
    ts: float | None = None,
) -> bytes:
    """Our message."""
    events = [_entries_event(run, resuming) for run in _runs(changes)]
    batch = EntriesBatch(
        ts=time.time() if ts is None else ts, events=events, data_parallel_rank=rank
    )
    return msgspec.msgpack.encode(batch)


def _entries_event(
    run: Sequence[Any], resuming: Resuming
) -> EntriesStored | EntriesRemoved | EntriesCleared:
    first = run[0]
    if isinstance(first, Cleared):
        return EntriesCleared()
    entries: list[Told] = [change.entry for change in run]
    names = [kind.value for kind in kinds_of(entries[0].kinds)]
    hashes, positions = [each.digest for each in entries], [each.position for each in entries]
    form, tier = entries[0].form, tier_name(first.tier)
    if isinstance(first, Removed):
        return EntriesRemoved(
            form=form_name(form), block_hashes=hashes, tier=tier, kinds=names, positions=positions
        )
    costs = [0 if form == Form.SNAPSHOT else resuming.cost(at) for at in positions]
    return EntriesStored(
        form=form_name(form),
        block_hashes=hashes,
        parent_block_hash=entries[0].parent,
        tier=tier,
        kinds=names,
        positions=positions,
        replay_tokens=costs,
        restorable=max(
            (at for at, cost in zip(positions, costs, strict=True) if cost is not None), default=0
        ),
    )


def _runs(changes: Sequence[Change]) -> list[list[Any]]:
    """Changes that one event can tell: of one class, form, tier and kinds; stored blocks must
    stand behind one another, and all know their tokens or none does.
    """
    runs: list[list[Any]] = []
    last: dict[Any, list[Any]] = {}
    for change in changes:
        key: Any = type(change)
        if not isinstance(change, Cleared):
            entry = change.entry
            key = (type(change), entry.form, change.tier, entry.kinds)
            if isinstance(change, Stored):
                behind = entry.form == Form.BLOCK and entry.parent
                key = (*key, change.tokens is None, behind)
        run = last.pop(key, None)
        if run is None:
            runs.append(run := [])
        run.append(change)
        if isinstance(change, Stored):
            if change.entry.form == Form.BLOCK:
                last[(*key[:-1], change.entry.digest)] = run
        elif isinstance(change, Removed):
            last[key] = run
    return runs
