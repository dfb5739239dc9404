import numpy as np
import pytest
from bookkeeping import DEVICE, DISK, HOST, Books, ids

from hybridkv.blocks.entries import FORM_BITS, NONE, EntryError, Form
from hybridkv.blocks.pools import NeverFits, NoRoom, ReservationError
from hybridkv.blocks.transitions import TierState, TransitionError
from hybridkv.errors import UserError

BLOCK_KINDS = FORM_BITS[Form.BLOCK]


@pytest.fixture
def books():
    return Books()


# Room.


def test_a_reservation_is_all_or_nothing(books):
    books.reserve(blocks=3)
    with pytest.raises(NoRoom) as refused:
        books.reserve(blocks=2, snapshots=1)
    assert (refused.value.needed, refused.value.free, refused.value.evictable) == (2, 1, 0)
    assert (books.available(Form.BLOCK), books.available(Form.SNAPSHOT)) == (1, 2)


def test_more_than_the_pool_never_fits_however_empty(books):
    with pytest.raises(NeverFits, match="5 blocks never fit DEVICE, which has 4"):
        books.reserve(blocks=5)
    with pytest.raises(NeverFits, match="1 blocks never fit DISK, which has 0"):
        books.reserve(blocks=1, tier=DISK)


@pytest.mark.parametrize("act", ["reserve", "evict"])
def test_negative_counts_are_refused(books, act):
    with pytest.raises(UserError, match="negative"):
        getattr(books, act)(blocks=-1)


def test_cancelling_gives_back_what_was_not_taken(books):
    reservation = books.reserve(blocks=3, snapshots=1)
    books.take(reservation, Form.BLOCK, 2)
    assert books.available(Form.BLOCK) == 1
    books.cancel(reservation)
    assert (books.available(Form.BLOCK), books.available(Form.SNAPSHOT)) == (2, 2)
    with pytest.raises(ReservationError, match="cancelled before"):
        books.cancel(reservation)
    with pytest.raises(ReservationError, match="cancelled before"):
        books.take(reservation, Form.BLOCK, 1)


def test_reserved_places_are_nobody_elses(books):
    books.chain(2)
    mine = books.reserve(blocks=2)
    theirs = books.reserve(blocks=1)
    assert len(books.evicted) == 1
    books.take(mine, Form.BLOCK, 2)
    books.take(theirs, Form.BLOCK, 1)


# From places to whole entries.


def test_taken_entries_fill_under_a_new_generation_and_one_lease(books):
    first = books.whole(2)
    assert first.entries.tolist() == [0, 1]
    books.attach(first.entries, ids(NONE, 0))
    books.touch(first.entries)
    books.detach(ids(1))
    books.release(first)
    books.evict(blocks=1)
    again = books.new(2)
    columns, taken = books.entries, again.entries
    assert sorted(taken.tolist()) == [0, 1]
    assert again.generations.tolist() == [2, 2]
    assert columns.state[DEVICE, taken].tolist() == [TierState.FILLING] * 2
    assert columns.leases[taken].tolist() == [1, 1]
    for column in (columns.kinds, columns.published, columns.children, columns.hits):
        assert not column[taken].any()
    for column in (columns.parent, columns.snapshot):
        assert (column[taken] == NONE).all()


def test_no_more_is_taken_than_is_left(books):
    reservation = books.reserve(blocks=2)
    for form, count in ((Form.BLOCK, 3), (Form.SNAPSHOT, 1), (Form.BLOCK, -1)):
        with pytest.raises(ReservationError, match="left"):
            books.take(reservation, form, count)
    books.take(reservation, Form.BLOCK, 2)
    with pytest.raises(ReservationError, match="has 0 blocks left"):
        books.take(reservation, Form.BLOCK, 1)


def test_a_commit_makes_entries_present_with_their_kinds(books):
    receipt = books.new(2)
    books.commit(receipt.entries, BLOCK_KINDS)
    assert books.entries.kinds[receipt.entries].tolist() == [BLOCK_KINDS] * 2
    with pytest.raises(TransitionError, match="PRESENT has no event COMMIT"):
        books.commit(receipt.entries, BLOCK_KINDS)


@pytest.mark.parametrize("kinds", [0, FORM_BITS[Form.SNAPSHOT], 16, 0x103, -1])
def test_kinds_of_no_block_are_refused_and_nothing_is_committed(books, kinds):
    receipt = books.new()
    with pytest.raises(EntryError, match="can't hold kinds"):
        books.commit(receipt.entries, kinds)
    assert books.entries.state[DEVICE, receipt.entries].tolist() == [TierState.FILLING]


def test_an_aborted_entry_is_freed_with_its_last_lease(books):
    receipt = books.new(2)
    books.abort(receipt.entries)
    assert books.live() == [0, 1]
    assert books.available(Form.BLOCK) == 2
    books.release(receipt)
    assert books.live() == []
    assert books.available(Form.BLOCK) == 4


def test_what_is_released_while_it_fills_is_freed(books):
    books.release(books.new(2))
    assert books.live() == []


def test_only_what_fills_is_aborted(books):
    with pytest.raises(TransitionError, match="PRESENT has no event ABORT"):
        books.abort(books.whole().entries)


# Other tiers.


def test_a_copy_fills_a_second_tier_under_its_own_lease():
    books = Books(host=(1, 0))
    (block,) = books.chain(1)
    reservation = books.reserve(blocks=1, tier=HOST)
    copy = books.fill(reservation, ids(block))
    assert books.entries.state[:, block].tolist() == [
        TierState.PRESENT,
        TierState.FILLING,
        TierState.ABSENT,
    ]
    with pytest.raises(NoRoom):
        books.evict(blocks=1)
    books.commit(copy.entries, BLOCK_KINDS, HOST)
    books.release(copy)
    books.evict(blocks=1)
    assert books.evicted == []
    assert books.live() == [block]
    assert books.entries.published[block]


def test_a_copy_needs_a_whole_source_a_place_and_no_copy_there():
    books = Books(host=(2, 0))
    filling, whole = books.new(), books.whole()
    reservation = books.reserve(blocks=1, tier=HOST)
    with pytest.raises(EntryError, match="whole on no tier"):
        books.fill(reservation, filling.entries)
    with pytest.raises(ReservationError, match="1 blocks left"):
        books.fill(reservation, np.concatenate([whole.entries, books.whole().entries]))
    books.fill(reservation, whole.entries)
    with pytest.raises(TransitionError, match="FILLING has no event FILL"):
        books.fill(books.reserve(blocks=1, tier=HOST), whole.entries)


def test_a_copy_holds_the_kinds_of_its_source():
    books = Books(host=(1, 0))
    whole = books.whole()
    copy = books.fill(books.reserve(blocks=1, tier=HOST), whole.entries)
    with pytest.raises(EntryError, match="has other kinds than 0x1"):
        books.commit(copy.entries, 1, HOST)


def test_a_failed_copy_gives_its_place_back_with_its_lease():
    books = Books(host=(1, 0))
    (block,) = books.chain(1)
    reservation = books.reserve(blocks=1, tier=HOST)
    copy = books.fill(reservation, ids(block))
    books.cancel(reservation)
    books.abort(copy.entries, HOST)
    assert books.available(Form.BLOCK, HOST) == 0
    books.release(copy)
    assert books.available(Form.BLOCK, HOST) == 1
    assert books.live() == [block]


def test_the_last_whole_copy_is_not_drained():
    books = Books(host=(1, 0))
    (block,) = books.chain(1)
    with pytest.raises(EntryError, match="whole on DEVICE only"):
        books.drain(ids(block), DEVICE)
    books.copy(block, HOST)
    books.drain(ids(block), DEVICE)
    assert books.available(Form.BLOCK) == 4
    with pytest.raises(TransitionError, match="ABSENT has no event DRAIN"):
        books.drain(ids(block), DEVICE)


def test_a_drained_copy_keeps_its_place_while_it_is_leased():
    books = Books(host=(1, 0))
    (block,) = books.chain(1)
    books.copy(block, HOST)
    reader = books.lease(ids(block))
    books.drain(ids(block), DEVICE)
    assert books.entries.state[DEVICE, block] == TierState.DRAINING
    assert books.available(Form.BLOCK) == 3
    books.release(reader)
    assert books.available(Form.BLOCK) == 4
    assert books.live() == [block]


# Publication.


def test_attached_blocks_are_linked_and_stay(books):
    receipt = books.whole(3)
    a, b, c = receipt.entries.tolist()
    books.attach(receipt.entries, ids(NONE, a, a))
    books.release(receipt)
    assert books.entries.parent[[a, b, c]].tolist() == [NONE, a, a]
    assert books.entries.children[[a, b, c]].tolist() == [2, 0, 0]
    assert books.live() == [a, b, c]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        (ids(1, NONE), "parent"),
        (ids(0, 1), "parent"),
        (ids(NONE, 3), "parent"),
        (ids(NONE, 99), r"parent"),
        (ids(NONE, -2), r"parent"),
        (ids(NONE), "2 .* need as many parents, not 1"),
    ],
    ids=["later", "itself", "unpublished", "none such", "negative", "too few"],
)
def test_a_parent_is_published_or_earlier_in_the_call(books, parents, message):
    receipt = books.whole(2)
    with pytest.raises(EntryError, match=message):
        books.attach(receipt.entries, parents)
    assert not books.entries.published.any()


def test_only_whole_unpublished_blocks_are_attached(books):
    snapshot, filling = books.whole(1, Form.SNAPSHOT), books.new()
    (block,) = books.chain(1)
    for wrong in (snapshot.entries, filling.entries, ids(block)):
        with pytest.raises(EntryError):
            books.attach(wrong, ids(NONE))
    with pytest.raises(EntryError, match="parent"):
        books.attach(books.whole().entries, snapshot.entries)


def test_a_parent_that_left_the_device_takes_a_child_while_it_is_whole_elsewhere():
    books = Books(host=(1, 0))
    (block,) = books.chain(1)
    books.copy(block, HOST)
    books.drain(ids(block), DEVICE)
    child = books.whole().entries
    books.attach(child, ids(block))
    assert books.entries.parent[child[0]] == block


def test_who_keeps_the_bytes_hears_of_every_place_that_is_freed():
    books, freed = Books(host=(2, 0)), []
    books.on_freed.append(lambda tier, form, places: freed.append((tier, form, places.tolist())))
    (block,) = books.chain(1)
    books.copy(block, HOST)
    place = int(books.entries.place[HOST, block])
    books.evict(blocks=1, tier=HOST)
    assert freed == [(HOST, Form.BLOCK, [place])]
    assert books.entries.published[block]
    books.evict(blocks=1)
    assert freed[1][:2] == (DEVICE, Form.BLOCK)


def test_a_block_carries_one_snapshot(books):
    (block,) = books.chain(1)
    first = books.snapshot_on(block)
    assert books.entries.snapshot[block] == first
    assert books.entries.parent[first] == block
    second = int(books.whole(1, Form.SNAPSHOT).entries[0])
    with pytest.raises(EntryError, match=r"has .*snapshot"):
        books.attach_snapshot(second, block)
    books.detach(ids(first))
    books.attach_snapshot(second, block)
    assert books.live() == [block, second]


def test_a_snapshot_stands_on_a_published_block_only(books):
    block, snapshot = books.whole(), books.whole(1, Form.SNAPSHOT)
    one, other = int(block.entries[0]), int(snapshot.entries[0])
    for wrong in ((other, one), (one, other), (other, other)):
        with pytest.raises(EntryError):
            books.attach_snapshot(*wrong)
    filling = int(books.new(1, Form.SNAPSHOT).entries[0])
    books.attach(block.entries, ids(NONE))
    with pytest.raises(EntryError, match="snapshot"):
        books.attach_snapshot(filling, one)
    books.attach_snapshot(other, one)


def test_detached_entries_are_freed_or_wait_for_their_leases(books):
    a, b = books.chain(2)
    reader = books.lease(ids(b))
    books.detach(ids(a, b))
    assert books.live() == [b]
    assert not books.entries.published.any()
    assert books.entries.children[a] == 0
    books.release(reader)
    assert books.live() == []
    assert books.evicted == []


def test_what_something_stands_on_is_not_detached(books):
    a, b = books.chain(2)
    snapshot = books.snapshot_on(b)
    for wrong, message in ((ids(a), "child"), (ids(b), "snapshot"), (ids(a, snapshot), "child")):
        with pytest.raises(EntryError, match=message):
            books.detach(wrong)
    assert books.live() == sorted([a, b, snapshot])
    books.detach(ids(b, snapshot, a))
    assert books.live() == []
    with pytest.raises(EntryError, match="not published"):
        books.detach(ids(a))


def test_a_touch_is_a_use_now_or_at_a_time(books):
    a, b = books.chain(2)
    before = books.entries.used[b]
    books.touch(ids(a), when=77.0)
    books.touch(ids(a, b))
    books.touch(ids(a), when=78.0)
    assert books.entries.hits[[a, b]].tolist() == [3, 1]
    assert books.entries.used[a] == 78.0
    assert books.entries.used[b] > before


def test_a_reset_forgets_everything_and_tells_what_was_published():
    books = Books(host=(1, 0))
    a, b = books.chain(2)
    snapshot = books.snapshot_on(a)
    books.copy(a, HOST)
    reader, writer = books.lease(ids(a, b)), books.new()
    reservation = books.reserve(snapshots=1)
    books.reset()
    assert books.live() == []
    assert books.evicted == [
        ([snapshot], DEVICE, "evicted:snapshot"),
        ([a, b], DEVICE, "evicted:compressed"),
    ]
    assert [books.available(form) for form in Form] == [4, 2]
    assert books.available(Form.BLOCK, HOST) == 1
    assert set(books.leases.lost) == {reader.serial, writer.serial}
    with pytest.raises(ReservationError):
        books.cancel(reservation)
    assert books.chain(4)
