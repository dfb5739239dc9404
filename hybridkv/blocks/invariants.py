"""The four constraints, checked by walking everything.

1. Admission cap: used + reserved places never exceed a pool, on any tier.
2. Routing: a place belongs to one entry or is free; an entry holds kinds of its form only.
3. No race: what is leased is filling or whole somewhere, and counts are those of the receipts.
4. Topology: columns keep the dtypes and shapes they were made with.

Around them: links between what is published. Calls on the allocator keep all of this with checks of
constant cost; ``check`` is for tests, exploration and ``Allocator(debug=True)``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from hybridkv.blocks.entries import FORM_BITS, NONE, Entries, Form, Tier
from hybridkv.blocks.transitions import TierState

if TYPE_CHECKING:
    from hybridkv.blocks.allocator import Allocator


class InvariantError(AssertionError):
    """The bookkeeping is wrong: a fault of this library."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Name, dtype and shape of every column."""

    columns: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, entries: Entries) -> Topology:
        """As they are now."""
        return cls(tuple((n, str(c.dtype), c.shape) for n, c in entries.columns()))


def check(allocator: Allocator) -> None:
    """Walks all entries, pools, reservations and receipts.

    Raises:
      InvariantError: one line that says what is wrong.
    """
    _check_topology(allocator)
    _check_places(allocator)
    _check_reservations(allocator)
    _check_leases(allocator)
    _check_ids(allocator)
    _check_published(allocator.entries)


def _demand(right: bool | np.bool_, wrong: str) -> None:
    if not right:
        raise InvariantError(wrong)


def _check_topology(allocator: Allocator) -> None:
    now = Topology.of(allocator.entries)
    _demand(now == allocator.topology, "a column changed its dtype or shape")


def _check_places(allocator: Allocator) -> None:
    entries = allocator.entries
    for tier in Tier:
        held = entries.state[tier] != TierState.ABSENT
        placed = entries.place[tier] != NONE
        _demand((held == placed).all(), f"{tier.name}: an entry has a state without its place")
        for form, pool in allocator.pools[tier].items():
            taken = entries.place[tier, held & (entries.form == form)]
            every = np.sort(np.concatenate([taken, pool.places.free]))
            whole = np.arange(pool.capacity)
            _demand(
                every.shape == whole.shape and (every == whole).all(),
                f"{tier.name} {form.name}: a place has no owner or two",
            )


def _check_reservations(allocator: Allocator) -> None:
    for tier in Tier:
        for form, pool in allocator.pools[tier].items():
            left = [
                counts[form]
                for serial, counts in allocator.reservations.left.items()
                if allocator.reservations.tiers[serial] == tier
            ]
            _demand(pool.reserved == sum(left), f"{tier.name} {form.name}: reserved miscounted")
            _demand(
                pool.used + pool.reserved <= pool.capacity,
                f"{tier.name} {form.name}: more promised than there is",
            )


def _check_leases(allocator: Allocator) -> None:
    entries = allocator.entries
    counts = np.zeros(len(entries), np.int64)
    for receipt in allocator.leases.open.values():
        np.add.at(counts, receipt.entries, 1)
        same = entries.generation[receipt.entries] == receipt.generations
        _demand(same.all(), f"receipt {receipt.serial} holds an entry that was taken again")
    _demand((counts == entries.leases).all(), "leases differ from the open receipts")
    states = entries.state
    alive = (states != TierState.ABSENT).any(axis=0)
    _demand(alive[counts > 0].all(), "a leased entry is nowhere")
    idle = alive & (counts == 0)
    _demand(entries.published[idle].all(), "an entry that nobody holds or sees is not free")
    settled = (states == TierState.ABSENT) | (states == TierState.PRESENT)
    _demand(settled[:, idle].all(), "an entry that nobody holds is filling or draining")


def _check_ids(allocator: Allocator) -> None:
    entries = allocator.entries
    alive = np.flatnonzero((entries.state != TierState.ABSENT).any(axis=0))
    every = np.sort(np.concatenate([alive, allocator.ids.free]))
    whole = np.arange(len(entries))
    _demand(every.shape == whole.shape and (every == whole).all(), "an id is lost or twice free")
    bits = np.asarray([FORM_BITS[form] for form in Form], np.uint8)[entries.form]
    _demand(((entries.kinds & ~bits) == 0).all(), "an entry holds a kind of the other form")
    whole = entries.state == TierState.PRESENT
    same = whole.any(axis=0)[alive] == (entries.kinds[alive] != 0)
    _demand(same.all(), "an entry has kinds without whole bytes, or whole bytes without kinds")


def _check_published(entries: Entries) -> None:
    shown = np.flatnonzero(entries.published)
    whole = (entries.state == TierState.PRESENT).any(axis=0)
    _demand(whole[shown].all(), "a published entry is whole nowhere")
    _demand((entries.parent[~entries.published] == NONE).all(), "an unpublished entry has a parent")
    blocks = shown[entries.form[shown] == Form.BLOCK]
    parents = entries.parent[blocks]
    parents = parents[parents != NONE]
    visible = entries.published[parents] & (entries.form[parents] == Form.BLOCK)
    _demand(visible.all(), "a published block stands behind one that is not")
    children = np.bincount(parents, minlength=len(entries))
    _demand((children == entries.children).all(), "children are miscounted")
    _demand(_parents_end(entries), "published entries stand on each other in a circle")
    snapshots = shown[entries.form[shown] == Form.SNAPSHOT]
    under = entries.parent[snapshots]
    _demand(
        (under != NONE).all() and (entries.snapshot[under] == snapshots).all(),
        "a snapshot and its block do not name each other",
    )
    standing = np.count_nonzero(entries.snapshot != NONE)
    _demand(standing == snapshots.size, "a block names a snapshot that is not published on it")


def _parents_end(entries: Entries) -> bool:
    """Whether following parents comes to an end everywhere; jumps twice as far each time."""
    above = np.append(entries.parent, NONE)
    for _ in range(len(entries).bit_length()):
        above = above[above]
    return bool((above == NONE).all())
