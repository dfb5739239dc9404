"""Small allocators whose invariants are walked after every call."""

import numpy as np

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import FORM_BITS, NONE, Form, Tier
from hybridkv.blocks.eviction import LeastRecentlyUsed
from hybridkv.blocks.pools import PoolSizes

DEVICE, HOST, DISK = Tier


def ids(*entries):
    return np.asarray(entries, np.int32)


class Clock:
    """Counts its readings, in seconds."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


class Books(Allocator):
    """An allocator with shorthands: ``whole`` takes and commits, ``chain`` publishes."""

    def __init__(self, blocks=4, snapshots=2, *, host=(0, 0), disk=(0, 0), policy=None):
        sizes = {DEVICE: (blocks, snapshots), HOST: host, DISK: disk}
        super().__init__(
            {t: PoolSizes(blocks=b, snapshots=s) for t, (b, s) in sizes.items()},
            policy=policy or LeastRecentlyUsed(),
            clock=Clock(),
            debug=True,
        )
        self.evicted = []
        self.on_evict.append(lambda e, tier, cause: self.evicted.append((e.tolist(), tier, cause)))

    def new(self, count=1, form=Form.BLOCK):
        """A receipt of entries that are FILLING on the device."""
        counts = {"blocks": count} if form == Form.BLOCK else {"snapshots": count}
        reservation = self.reserve(**counts)
        receipt = self.take(reservation, form, count)
        self.cancel(reservation)
        return receipt

    def whole(self, count=1, form=Form.BLOCK):
        receipt = self.new(count, form)
        self.commit(receipt.entries, FORM_BITS[form])
        return receipt

    def chain(self, count, under=NONE):
        """Published blocks, one behind the other, that nobody leases."""
        receipt = self.whole(count)
        self.attach(receipt.entries, ids(under, *receipt.entries[:-1]))
        self.release(receipt)
        return receipt.entries.tolist()

    def snapshot_on(self, block):
        """A published snapshot that nobody leases."""
        receipt = self.whole(1, Form.SNAPSHOT)
        self.attach_snapshot(int(receipt.entries[0]), block)
        self.release(receipt)
        return int(receipt.entries[0])

    def copy(self, entry, tier):
        """Makes an entry whole on another tier too."""
        block = self.entries.form[entry] == Form.BLOCK
        reservation = self.reserve(blocks=int(block), snapshots=int(not block), tier=tier)
        receipt = self.fill(reservation, ids(entry))
        self.cancel(reservation)
        self.commit(receipt.entries, int(self.entries.kinds[entry]), tier)
        self.release(receipt)

    def live(self):
        """Entries with a place somewhere."""
        return np.flatnonzero(self.entries.state.any(axis=0)).tolist()


def give_up(allocator: Allocator, *tiers: Tier) -> None:
    """Takes everything that is idle from these tiers, snapshots before their blocks."""
    for tier in tiers:
        for form, many in ((Form.SNAPSHOT, "snapshots"), (Form.BLOCK, "blocks")):
            can_go = allocator.evictable(form, tier)
            allocator.evict(tier=tier, **{many: can_go})
