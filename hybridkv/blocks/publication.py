"""Making entries visible and taking them out of sight: links between blocks and snapshots.

Callers own the columns and have checked that ids are distinct and in range.
"""

from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int32

from hybridkv.blocks.entries import NONE, Entries, EntryError, Form
from hybridkv.blocks.transitions import TierState

Ranks = Callable[[Int32[np.ndarray, " n"], Int32[np.ndarray, " m"]], Int32[np.ndarray, " m"]]
"""(ids, others) to the place of each of ``others`` among ``ids``, -1 where it is not there."""


def attach(
    entries: Entries,
    ids: Int32[np.ndarray, " n"],
    parents: Int32[np.ndarray, " n"],
    ranks: Ranks,
) -> None:
    """Publishes blocks behind their parents; see ``Allocator.attach``."""
    if parents.shape != ids.shape:
        raise EntryError(f"{ids.size} blocks need as many parents, not {parents.size}")
    _require(~entries.published[ids], ids, "is published already")
    _require(_whole(entries, ids, Form.BLOCK), ids, "is no block that is PRESENT on a tier")
    behind = parents != NONE
    shown = np.zeros(ids.size, np.bool_)
    linked = parents[behind]
    if linked.size and not 0 <= linked.min() <= linked.max() < len(entries):
        raise EntryError(f"parents must be -1 or in 0..{len(entries) - 1}, got {parents}")
    shown[behind] = entries.published[linked] & _whole(entries, linked, Form.BLOCK)
    own = np.full(ids.size, NONE, np.int32)
    own[behind] = ranks(ids, linked)
    earlier = (own != NONE) & (own < np.arange(ids.size))
    _require(~behind | shown | earlier, ids, "has a parent that is not published before it")
    entries.published[ids] = True
    entries.parent[ids] = parents
    np.add.at(entries.children, linked, 1)


def attach_snapshots(
    entries: Entries, ids: Int32[np.ndarray, " n"], under: Int32[np.ndarray, " n"]
) -> None:
    """Publishes snapshots at the ends of published blocks; see ``Allocator.attach_snapshots``."""
    _require(~entries.published[ids], ids, "is published already")
    _require(_whole(entries, ids, Form.SNAPSHOT), ids, "is no snapshot PRESENT on a tier")
    shown = entries.published[under] & (entries.form[under] == Form.BLOCK)
    _require(shown, under, "is no published block for a snapshot to stand on")
    _require(entries.snapshot[under] == NONE, under, "has a snapshot already")
    entries.published[ids] = True
    entries.parent[ids] = under
    entries.snapshot[under] = ids


def require_detachable(entries: Entries, ids: Int32[np.ndarray, " n"], ranks: Ranks) -> None:
    """Checks that nothing published would stand on what goes.

    Raises:
      EntryError: an entry is not published; a child or snapshot of one is not among ``ids``.
    """
    _require(entries.published[ids], ids, "is not published")
    blocks = ids[entries.form[ids] == Form.BLOCK]
    parents = entries.parent[blocks]
    going = ranks(ids, parents[parents != NONE])
    leaving = np.bincount(going[going != NONE], minlength=ids.size)
    _require(entries.children[ids] == leaving, ids, "has a published child that would stay")
    over = np.flatnonzero(entries.snapshot[ids] != NONE)
    stays = np.zeros(ids.size, np.bool_)
    stays[over] = ranks(ids, entries.snapshot[ids[over]]) == NONE
    _require(~stays, ids, "has a published snapshot that would stay")


def detach(entries: Entries, ids: Int32[np.ndarray, " n"]) -> None:
    """Takes published entries out of sight, links on both sides included."""
    blocks = entries.form[ids] == Form.BLOCK
    parents = entries.parent[ids[blocks]]
    np.subtract.at(entries.children, parents[parents != NONE], 1)
    entries.snapshot[entries.parent[ids[~blocks]]] = NONE
    entries.published[ids] = False
    entries.parent[ids] = NONE


def _whole(entries: Entries, ids: Int32[np.ndarray, " n"], form: Form) -> Bool[np.ndarray, " n"]:
    present = (entries.state[:, ids] == TierState.PRESENT).any(axis=0)
    return present & (entries.form[ids] == form)


def _require(right: Bool[np.ndarray, " n"], ids: Int32[np.ndarray, " n"], wrong: str) -> None:
    if not right.all():
        raise EntryError(f"entry {int(ids[~right][0])} {wrong}")
