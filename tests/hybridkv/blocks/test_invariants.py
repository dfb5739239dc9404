"""Every kind of corruption that is planted is found."""

import numpy as np
import pytest
from bookkeeping import DEVICE, HOST, Books, ids

from hybridkv.blocks.entries import FORM_BITS, NONE, Form
from hybridkv.blocks.invariants import InvariantError, check
from hybridkv.blocks.transitions import TierState


class Full(Books):
    """Two published blocks, a snapshot, a copy, a reader, a writer and a reservation."""

    def __init__(self):
        super().__init__(blocks=5, host=(1, 0))
        self.a, self.b = self.chain(2)
        self.s = self.snapshot_on(self.b)
        self.copy(self.a, HOST)
        self.reader = self.lease(ids(self.a))
        self.writer = self.new()
        self.w = int(self.writer.entries[0])
        self.reservation = self.reserve(blocks=1)


def put(name, entry, value):
    def plant(books):
        getattr(books.entries, name)[..., getattr(books, entry)] = value(books)

    return plant


def state(tier, entry, value):
    def plant(books):
        books.entries.state[tier, getattr(books, entry)] = value

    return plant


def place_of_another(books):
    books.entries.place[DEVICE, books.a] = books.entries.place[DEVICE, books.b]


def place_lost(books):
    books.pools[DEVICE][Form.BLOCK].places.pop(1)


def place_free_twice(books):
    books.pools[DEVICE][Form.BLOCK].places.push(books.entries.place[DEVICE, [books.a]])


def id_lost(books):
    books.ids.pop(1)


def id_free_and_alive(books):
    books.ids.push(ids(books.a))


def reserved_without_a_reservation(books):
    books.pools[DEVICE][Form.BLOCK].reserved += 1


def reservation_without_places(books):
    books.reservations.left[books.reservation.serial][Form.BLOCK] = 2


def promised_beyond_the_pool(books):
    books.pools[DEVICE][Form.BLOCK].reserved += 9
    books.reservations.left[books.reservation.serial][Form.BLOCK] += 9


def receipt_lost(books):
    books.leases.close(books.reader)


def column_of_another_dtype(books):
    books.entries.leases = books.entries.leases.astype(np.int64)


def column_of_another_size(books):
    books.entries.hits = books.entries.hits[:-1]


def column_more(books):
    books.entries.extra = np.zeros(3)


def released_and_forgotten(books):
    books.entries.leases[books.w] = 0
    books.leases.close(books.writer)


def drained_and_forgotten(books):
    books.entries.state[DEVICE, books.b] = TierState.DRAINING


def leased_and_nowhere(books):
    entry = int(books.ids.free[0])
    books.leases.issue(ids(entry), books.entries.generation[[entry]])
    books.entries.leases[entry] += 1


def snapshot_behind_a_block(books):
    books.entries.form[books.a] = Form.SNAPSHOT


PLANTED = {
    "a place has two owners": place_of_another,
    "a place is lost": place_lost,
    "a used place is free": place_free_twice,
    "a place without a state": state(HOST, "a", TierState.ABSENT),
    "a state without a place": state(HOST, "b", TierState.PRESENT),
    "an id is lost": id_lost,
    "an id is free and alive": id_free_and_alive,
    "reserved places of nobody": reserved_without_a_reservation,
    "a reservation of nothing": reservation_without_places,
    "promises beyond the pool": promised_beyond_the_pool,
    "a block with kinds of a snapshot": put("kinds", "a", lambda _: FORM_BITS[Form.SNAPSHOT]),
    "a lease that no receipt holds": put("leases", "b", lambda _: 1),
    "a receipt that is not counted": put("leases", "a", lambda _: 0),
    "a receipt that got lost": receipt_lost,
    "a generation under a receipt": put("generation", "a", lambda _: 9),
    "leased and nowhere": leased_and_nowhere,
    "filling without a lease": released_and_forgotten,
    "draining without a lease": drained_and_forgotten,
    "hidden without a lease": put("published", "s", lambda _: False),
    "another dtype": column_of_another_dtype,
    "another size": column_of_another_size,
    "another column": column_more,
    "another parent": put("parent", "b", lambda _: NONE),
    "an unpublished parent": put("parent", "b", lambda books: books.w),
    "a snapshot as parent": put("parent", "b", lambda books: books.s),
    "an unpublished entry with a parent": put("parent", "w", lambda books: books.a),
    "an unpublished entry in sight": put("published", "w", lambda _: True),
    "too many children": put("children", "b", lambda _: 1),
    "too few children": put("children", "a", lambda _: 0),
    "a snapshot on another block": put("parent", "s", lambda books: books.a),
    "a snapshot on no block": put("parent", "s", lambda _: NONE),
    "a block without its snapshot": put("snapshot", "b", lambda _: NONE),
    "a snapshot on two blocks": put("snapshot", "a", lambda books: books.s),
    "a block as snapshot": put("snapshot", "a", lambda books: books.b),
    "another form": snapshot_behind_a_block,
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED.keys())
def test_planted_corruption_is_found(plant):
    books = Full()
    check(books)
    plant(books)
    with pytest.raises(InvariantError) as found:
        check(books)
    assert "\n" not in str(found.value)


def test_a_circle_of_blocks_is_found():
    books = Full()
    books.entries.parent[books.a] = books.b
    books.entries.children[books.b] = 1
    with pytest.raises(InvariantError, match="circle"):
        check(books)


def test_whole_bytes_without_kinds_are_found():
    books = Full()
    books.entries.kinds[books.b] = 0
    with pytest.raises(InvariantError, match="kinds"):
        check(books)


def test_debug_finds_it_at_the_next_call():
    books = Full()
    books.entries.children[books.b] = 1
    with pytest.raises(InvariantError):
        books.touch(ids(books.a))


def test_an_empty_allocator_is_right():
    check(Books(blocks=0, snapshots=0))
