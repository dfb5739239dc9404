import dataclasses

import numpy as np
import pytest
from bookkeeping import Books, ids

from hybridkv.blocks.entries import EntryError, Form
from hybridkv.blocks.leases import (
    DoubleRelease,
    LeaseError,
    ReleasedAfterEviction,
    StaleEntry,
    StaleReceipt,
)


@pytest.fixture
def books():
    return Books()


def test_leases_are_counted_and_the_last_one_frees_what_is_unpublished(books):
    writer = books.whole(2)
    reader = books.lease(writer.entries[:1])
    assert books.entries.leases[writer.entries].tolist() == [2, 1]
    books.release(writer)
    assert books.live() == reader.entries.tolist()
    books.release(reader)
    assert books.live() == []
    assert books.available(Form.BLOCK) == 4


def test_what_is_published_stays_without_a_lease(books):
    chain = books.chain(3)
    assert books.live() == chain
    assert not books.entries.leases.any()


def test_a_receipt_is_given_back_once(books):
    receipt = books.whole()
    books.release(receipt)
    with pytest.raises(DoubleRelease, match="receipt 0 was given back before"):
        books.release(receipt)
    assert books.available(Form.BLOCK) == 4


def test_a_receipt_that_was_given_back_does_not_count_for_who_has_the_entry_now(books):
    old = books.whole()
    books.release(old)
    new = books.whole()
    assert new.entries.tolist() == old.entries.tolist()
    with pytest.raises(DoubleRelease):
        books.release(old)
    assert books.entries.leases[new.entries].tolist() == [1]


def test_an_entry_that_was_taken_again_is_not_leased_and_neither_are_the_others(books):
    kept, gone = books.whole(), books.whole()
    books.release(gone)
    again = books.whole()
    both = ids(*kept.entries, *gone.entries)
    with pytest.raises(StaleEntry, match="taken again"):
        books.lease(both, np.concatenate([kept.generations, gone.generations]))
    assert books.entries.leases[both].tolist() == [1, 1]
    books.lease(both, np.concatenate([kept.generations, again.generations]))


def test_an_entry_that_is_gone_is_not_leased(books):
    gone = books.whole()
    books.release(gone)
    with pytest.raises(EntryError, match="neither filling nor whole"):
        books.lease(gone.entries, gone.generations)


def test_a_filling_entry_can_be_leased_and_a_draining_one_not(books):
    writer = books.new()
    reader = books.lease(writer.entries)
    books.abort(writer.entries)
    with pytest.raises(EntryError, match="neither filling nor whole"):
        books.lease(writer.entries)
    books.release(writer)
    assert books.live() == reader.entries.tolist()
    books.release(reader)
    assert books.live() == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (ids(0, 0), "stands twice"),
        (ids(-1), r"must be in 0\.\."),
        (ids(6), r"must be in 0\.\."),
        (np.zeros(1), "integer array"),
        (np.zeros((1, 1), np.int32), "one-dimensional"),
    ],
)
def test_wrong_ids_are_refused(books, wrong, message):
    books.whole()
    with pytest.raises(EntryError, match=message):
        books.lease(wrong)


def test_as_many_generations_as_entries_are_needed(books):
    receipt = books.whole(2)
    with pytest.raises(EntryError, match="2 entries need as many generations, not 1"):
        books.lease(receipt.entries, receipt.generations[:1])


def test_split_receipts_are_given_back_each_on_its_own(books):
    receipt = books.whole(3)
    some, others = books.split(receipt, np.asarray([True, False, True]))
    assert some.entries.tolist() == receipt.entries[[0, 2]].tolist()
    assert others.entries.tolist() == receipt.entries[[1]].tolist()
    with pytest.raises(DoubleRelease):
        books.release(receipt)
    books.release(some)
    assert books.live() == others.entries.tolist()
    books.release(others)
    assert books.live() == []


@pytest.mark.parametrize("mask", [np.ones(2, bool), np.ones(3, int)])
def test_a_mask_is_one_bool_an_entry(books, mask):
    receipt = books.whole(3)
    with pytest.raises(EntryError, match="mask of 3 bools"):
        books.split(receipt, mask)
    books.release(receipt)


def test_a_receipt_of_an_entry_lost_in_a_reset_is_told_apart_once(books):
    receipt = books.whole()
    books.reset()
    with pytest.raises(LeaseError, match="void"):
        books.split(receipt, np.ones(1, bool))
    with pytest.raises(ReleasedAfterEviction):
        books.release(receipt)
    with pytest.raises(DoubleRelease):
        books.release(receipt)


def test_a_receipt_of_an_entry_taken_again_after_a_reset_is_stale(books):
    receipt = books.whole()
    books.reset()
    new = books.whole()
    assert new.entries.tolist() == receipt.entries.tolist()
    with pytest.raises(StaleReceipt):
        books.release(receipt)
    assert books.entries.leases[new.entries].tolist() == [1]
    books.release(new)


def test_a_void_receipt_without_entries_is_given_back(books):
    receipt = books.lease(ids())
    books.reset()
    books.release(receipt)
    with pytest.raises(DoubleRelease):
        books.release(receipt)


def test_a_receipt_that_was_never_issued_is_refused(books):
    receipt = books.whole()
    for serial in (-1, 7):
        with pytest.raises(LeaseError, match="never issued"):
            books.release(dataclasses.replace(receipt, serial=serial))
    with pytest.raises(LeaseError, match="other entries"):
        books.release(dataclasses.replace(receipt, entries=ids(3)))
    with pytest.raises(StaleReceipt):
        books.release(dataclasses.replace(receipt, generations=receipt.generations + 1))
    books.release(receipt)


def test_receipts_are_read_only(books):
    receipt = books.whole()
    with pytest.raises(ValueError, match="read-only"):
        receipt.entries[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        receipt.generations[0] = 1
