"""Which published entries a tier gives up, and in which order.

Leaf first: a block goes only after every block that stands on it, whatever a policy says, because a
prefix without its beginning is of no use. A snapshot stands on a block and nothing stands on a
snapshot; it goes with its block, or alone when snapshots are short. Leased entries stay, and with
them everything that leads to them.
"""

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Bool, Float64, Int32, Integer

from hybridkv.blocks.entries import NONE, Entries, Form, Tier
from hybridkv.blocks.transitions import TierState
from hybridkv.errors import UserError

EVICTED_BLOCKS = "evicted:compressed"
EVICTED_SNAPSHOTS = "evicted:snapshot"
"""Causes that an entry is lost for (design, law 7)."""

_STEPS = 64
"""Ancestors followed one by one, which is all of them where leases cover whole prefixes."""
_RUN = 64
"""Ancestors valued at once: a call of a policy costs as much as some dozens of values."""


class EvictionPolicy(Protocol):
    """What an entry is worth."""

    def value(
        self, entries: Entries, ids: Int32[np.ndarray, " n"], now: float
    ) -> Float64[np.ndarray, " n"]:
        """The lowest goes first; of equals the one used least recently, then the lowest id.

        Depends on nothing that an eviction changes.
        """
        ...


class LeastRecentlyUsed:
    """What was not used for longest goes first."""

    def value(
        self, entries: Entries, ids: Int32[np.ndarray, " n"], now: float
    ) -> Float64[np.ndarray, " n"]:
        """Seconds: the clock of the last use."""
        del now
        return entries.used[ids]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SecondsPerByte:
    """What is expected to save the fewest seconds a byte goes first."""

    block_seconds: float
    """Seconds to compute a block again."""
    block_bytes: int
    snapshot_seconds: float
    """Seconds of the replay that a snapshot saves."""
    snapshot_bytes: int
    tier: Tier = Tier.DEVICE
    """Whose entries are judged."""
    copied_share: float = 1.0
    """Share of the seconds that are lost where a slower tier has the entry too: loading it takes so
    much of computing it."""

    def __post_init__(self) -> None:
        if min(self.block_seconds, self.snapshot_seconds) < 0:
            raise UserError(f"seconds saved can't be negative, got {self}")
        if min(self.block_bytes, self.snapshot_bytes) <= 0:
            raise UserError(f"bytes must be positive, got {self}")

    def value(
        self, entries: Entries, ids: Int32[np.ndarray, " n"], now: float
    ) -> Float64[np.ndarray, " n"]:
        """Seconds a byte, weighed by uses, on top of ``floor``.

        The floor is what the last evicted entry of the form was worth when this one was last used,
        so that old uses lose their weight as fast as the pool turns over, and a new entry is worth
        more than what went before it (greedy dual size with frequency; Cherkasova, 1998). Hits of a
        block weigh by their logarithm, and picks of its rows add to them. Those of a snapshot do
        not: a conversation resumes from each of its snapshots once and then from a later one.
        """
        del now
        block = entries.form[ids] == Form.BLOCK
        hits = np.where(block, entries.hits[ids] + entries.picks[ids], np.float32(0))
        each = np.where(
            block,
            self.block_seconds / self.block_bytes,
            self.snapshot_seconds / self.snapshot_bytes,
        )
        copied = (entries.state[self.tier + 1 :, ids] == TierState.PRESENT).any(axis=0)
        each = np.where(copied, self.copied_share * each, each)
        return entries.floor[ids] + (1.0 + np.log2(1.0 + hits.astype(np.float64))) * each


def evictable_snapshots(entries: Entries, tier: Tier) -> Bool[np.ndarray, " n"]:
    """Which snapshots a tier can give up: published, whole there, without a lease."""
    return _idle(entries, tier, Form.SNAPSHOT)


def evictable_blocks(entries: Entries, tier: Tier) -> Bool[np.ndarray, " n"]:
    """Which blocks a tier can give up, one after the other, leaves first.

    A block is kept by its own lease or its snapshot's; by a child on this tier that is kept; and,
    where this is its last copy, by any child that lives on, since a published block always has a
    published parent.
    """
    can_go = _idle(entries, tier, Form.BLOCK)
    under_snapshot = np.flatnonzero(entries.snapshot != NONE)
    leased = entries.leases[entries.snapshot[under_snapshot]] > 0
    can_go[under_snapshot[leased]] = False

    published = entries.published & (entries.form == Form.BLOCK)
    here = entries.state[tier] != TierState.ABSENT
    elsewhere = copied_elsewhere(entries, tier)
    lives_on = entries.parent[published & (~here | (can_go & elsewhere))]
    lives_on = lives_on[lives_on != NONE]
    kept = np.concatenate(
        [entries.parent[published & here & ~can_go], lives_on[~elsewhere[lives_on]]]
    )
    _keep_with_ancestors(entries, can_go, kept[kept != NONE])
    return can_go


def _keep_with_ancestors(
    entries: Entries, can_go: Bool[np.ndarray, " n"], kept: Int32[np.ndarray, " k"]
) -> None:
    """Clears ``can_go`` of blocks and of the unbroken run of ancestors above each that could go."""
    for _ in range(_STEPS):
        kept = np.unique(kept[can_go[kept]])
        if not kept.size:
            return
        can_go[kept] = False
        above = entries.parent[kept]
        kept = above[above != NONE]
    # A long chain: every round doubles the distance that is looked ahead.
    stop = len(entries)
    above = np.full(stop + 1, stop, np.int32)
    ids = np.flatnonzero(can_go)
    parents = entries.parent[ids]
    goes_on = (parents != NONE) & can_go[parents]
    above[ids[goes_on]] = parents[goes_on]
    reached = np.zeros(stop + 1, np.bool_)
    reached[kept[can_go[kept]]] = True
    while (above != stop).any():
        reached[above[reached]] = True
        above = above[above]
    can_go[reached[:stop]] = False


def copied_elsewhere(entries: Entries, tier: Tier) -> Bool[np.ndarray, " n"]:
    """Which entries are whole on a tier other than this one."""
    others = [entries.state[t] == TierState.PRESENT for t in Tier if t != tier]
    return np.logical_or.reduce(others)


def _idle(entries: Entries, tier: Tier, form: Form) -> Bool[np.ndarray, " n"]:
    idle = entries.published & (entries.state[tier] == TierState.PRESENT)
    idle &= entries.leases == 0
    idle &= entries.form == form
    return idle


def choose_snapshots(
    entries: Entries,
    can_go: Bool[np.ndarray, " n"],
    count: int,
    policy: EvictionPolicy,
    now: float,
) -> Int32[np.ndarray, " count"]:
    """The ``count`` snapshots of ``can_go`` that are worth least."""
    ids = np.flatnonzero(can_go).astype(np.int32)
    return ids[_smallest(count, [policy.value(entries, ids, now), entries.used[ids]])]


def choose_blocks(
    entries: Entries,
    can_go: Bool[np.ndarray, " n"],
    count: int,
    policy: EvictionPolicy,
    now: float,
) -> Int32[np.ndarray, " count"]:
    """The ``count`` blocks to give up, in order: always the least worth one that is a leaf by then.

    ``can_go`` is what ``evictable_blocks`` returned and holds at least ``count`` blocks. Only the
    ``count`` least worth of the first leaves can ever be reached, so the heap is no larger.
    """
    ids = np.flatnonzero(can_go).astype(np.int32)
    parents = entries.parent[ids]
    standing = np.bincount(parents[parents != NONE], minlength=len(entries))
    leaves = ids[standing[ids] == 0]
    values = policy.value(entries, leaves, now)
    first = _smallest(count, [values, entries.used[leaves]])
    heap = list(
        zip(
            values[first].tolist(),
            entries.used[leaves[first]].tolist(),
            leaves[first].tolist(),
            strict=True,
        )
    )
    heapq.heapify(heap)
    worth = _Worth(entries, can_go, policy, now)
    chosen: list[int] = []
    while len(chosen) < count:
        block = heapq.heappop(heap)[2]
        chosen.append(block)
        above = int(entries.parent[block])
        if above != NONE and can_go[above]:
            standing[above] -= 1
            if not standing[above]:
                heapq.heappush(heap, worth.key(above))
    return np.asarray(chosen, np.int32)


class _Worth:
    """Values of blocks that become leaves, computed for a run of ancestors at a time."""

    def __init__(
        self,
        entries: Entries,
        can_go: Bool[np.ndarray, " n"],
        policy: EvictionPolicy,
        now: float,
    ) -> None:
        self._entries, self._can_go, self._policy, self._now = entries, can_go, policy, now
        self._keys: dict[int, tuple[float, float, int]] = {}

    def key(self, block: int) -> tuple[float, float, int]:
        """What the heap orders blocks by."""
        if block not in self._keys:
            self._value_run(block)
        return self._keys[block]

    def _value_run(self, block: int) -> None:
        run: list[int] = []
        while len(run) < _RUN and block != NONE and self._can_go[block]:
            if block in self._keys:
                break
            run.append(block)
            block = int(self._entries.parent[block])
        ids = np.asarray(run, np.int32)
        values = self._policy.value(self._entries, ids, self._now).tolist()
        used = self._entries.used[ids].tolist()
        self._keys |= zip(run, zip(values, used, run, strict=True), strict=True)


def _smallest(count: int, keys: Sequence[np.ndarray]) -> Integer[np.ndarray, " smallest"]:
    """Indices of the ``count`` smallest rows of the keys, earlier keys first, then by index."""
    first, *rest = keys
    if count >= first.shape[0]:
        return np.arange(first.shape[0])
    if count == 0:
        return np.arange(0)
    bound = np.partition(first, count - 1)[count - 1]
    below = np.flatnonzero(first < bound)
    equal = np.flatnonzero(first == bound)
    missing = count - below.shape[0]
    chosen = equal[_smallest(missing, [key[equal] for key in rest])] if rest else equal[:missing]
    return np.concatenate([below, chosen])
