"""Receipts of counted claims on entries. A lease does not time out; each is given back once."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Int32, UInt32

from hybridkv.blocks.entries import EntryError


class LeaseError(RuntimeError):
    """A receipt is used in a way that would break the counts."""


class DoubleRelease(LeaseError):  # noqa: N818 - reads as what happened
    """The receipt was given back (or split) before."""


class StaleReceipt(LeaseError):  # noqa: N818
    """An entry of the receipt was taken again since: it is another one now."""


class ReleasedAfterEviction(LeaseError):  # noqa: N818
    """An entry of the receipt is in no tier any more: the cache was reset under the lease."""


class StaleEntry(LeaseError):  # noqa: N818
    """An entry to be leased is not the one expected: it was taken again since it was found."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Receipt:
    """One claim on each of some entries. Both arrays are read-only."""

    serial: int
    entries: Int32[np.ndarray, " n"]
    generations: UInt32[np.ndarray, " n"]


class Leases:
    """The open receipts."""

    def __init__(self) -> None:
        self.open: dict[int, Receipt] = {}
        """By serial."""
        self.lost: dict[int, Receipt] = {}
        """By serial: receipts that a reset made void and whose holders have not come yet."""
        self._next = 0

    def issue(
        self, entries: Int32[np.ndarray, " n"], generations: UInt32[np.ndarray, " n"]
    ) -> Receipt:
        """A new receipt, which owns both arrays; the entries have counted it."""
        entries.setflags(write=False)
        generations.setflags(write=False)
        serial, self._next = self._next, self._next + 1
        receipt = Receipt(serial=serial, entries=entries, generations=generations)
        self.open[serial] = receipt
        return receipt

    def require_open(self, receipt: Receipt) -> None:
        """Checks that the receipt counts.

        Raises:
          DoubleRelease: it was given back before.
          LeaseError: it was never issued, or is void, or names other entries than were leased.
        """
        held = self.open.get(receipt.serial)
        if held is None:
            if receipt.serial in self.lost:
                raise LeaseError(f"receipt {receipt.serial} is void: the cache was reset")
            if not 0 <= receipt.serial < self._next:
                raise LeaseError(f"receipt {receipt.serial} was never issued")
            raise DoubleRelease(f"receipt {receipt.serial} was given back before")
        if held is not receipt and not np.array_equal(held.entries, receipt.entries):
            raise LeaseError(f"receipt {receipt.serial} was issued for other entries")

    def close(self, receipt: Receipt) -> None:
        """Ends an open receipt."""
        del self.open[receipt.serial]

    def split(self, receipt: Receipt, mask: Bool[np.ndarray, " n"]) -> tuple[Receipt, Receipt]:
        """Two receipts instead of one: of the entries under the mask, and of the others.

        Raises:
          EntryError: the mask is not one bool an entry.
          LeaseError: as ``require_open``.
        """
        self.require_open(receipt)
        mask = np.asarray(mask)
        if mask.dtype != np.bool_ or mask.shape != receipt.entries.shape:
            raise EntryError(f"a mask of {receipt.entries.size} bools is needed, got {mask!r}")
        self.close(receipt)
        under, others = (
            self.issue(receipt.entries[part], receipt.generations[part]) for part in (mask, ~mask)
        )
        return under, others

    def lose(self) -> None:
        """Makes every open receipt void."""
        self.lost |= self.open
        self.open.clear()
