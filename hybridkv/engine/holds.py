"""Holds: what a planned prompt leases and reserves before it has a slot, all of it or nothing.

And the one place that a running sequence takes later: for a snapshot, if there is room.
"""

import numpy as np

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import Form
from hybridkv.blocks.leases import LeaseError, Receipt
from hybridkv.blocks.pools import NoRoom
from hybridkv.engine.sequence import Hold
from hybridkv.errors import UserError
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.plan import NO_ENTRIES, Miss, Plan


def take_hold(
    allocator: Allocator,
    chain: TokenChain,
    plan: Plan | Miss,
    *,
    namespace: str,
    tokens: int,
    blocks: int,
) -> Hold:
    """Leases what the plan shares and reads, and reserves the rest.

    Args:
      allocator: the bookkeeping of all tiers.
      chain: the prompt.
      plan: of it, made now; room for what it loads is reserved too.
      namespace: of the chain.
      tokens: room that was asked for.
      blocks: of that room, shared ones included.

    Raises:
      NoRoom: too little room now; nothing is held.
      LeaseError: the plan is not of now; nothing is held.
    """
    shared = snapshot = None
    brought = brought_blocks(allocator, plan)
    try:
        if isinstance(plan, Plan):
            shared = allocator.lease(plan.entries, plan.generations)
            snapshot = _lease_snapshot(allocator, plan)
        else:
            shared = allocator.lease(NO_ENTRIES)
        own = blocks - len(shared.entries)
        reservation = allocator.reserve(blocks=own + brought, snapshots=len(_loads(plan)) - brought)
    except (LeaseError, NoRoom, UserError):
        for receipt in (shared, snapshot):
            if receipt is not None:
                allocator.release(receipt)
        raise
    return Hold(
        chain=chain,
        namespace=namespace,
        plan=plan,
        tokens=tokens,
        shared=shared,
        snapshot=snapshot,
        reservation=reservation,
        blocks=own,
    )


def drop_hold(allocator: Allocator, hold: Hold) -> None:
    """Gives back what a hold took."""
    allocator.cancel(hold.reservation)
    allocator.release(hold.shared)
    if hold.snapshot is not None:
        allocator.release(hold.snapshot)


def take_snapshot(allocator: Allocator) -> Receipt | None:
    """A place for a snapshot that is to be written; None where there is no room."""
    try:
        reservation = allocator.reserve(snapshots=1)
    except (NoRoom, UserError):
        return None
    receipt = allocator.take(reservation, Form.SNAPSHOT, 1)
    allocator.cancel(reservation)
    return receipt


def brought_blocks(allocator: Allocator, plan: Plan | Miss) -> int:
    """Blocks among what a plan loads."""
    return int((allocator.entries.form[_loads(plan)] == Form.BLOCK).sum())


def _loads(plan: Plan | Miss) -> np.ndarray:
    return plan.loads if isinstance(plan, Plan) else NO_ENTRIES


def _lease_snapshot(allocator: Allocator, plan: Plan) -> Receipt | None:
    if plan.snapshot < 0:
        return None
    entry = np.array([plan.snapshot], np.int32)
    return allocator.lease(entry, np.array([plan.snapshot_generation], np.uint32))
