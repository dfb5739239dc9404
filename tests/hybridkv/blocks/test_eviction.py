import itertools
import time

import numpy as np
import pytest
from bookkeeping import DEVICE, HOST, Books, ids

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import NONE, Form
from hybridkv.blocks.eviction import LeastRecentlyUsed, SecondsPerByte
from hybridkv.blocks.pools import NoRoom, PoolSizes
from hybridkv.errors import UserError

BLOCKS, SNAPSHOTS = "evicted:compressed", "evicted:snapshot"


class Order:
    """A policy that gives up entries in a given order."""

    def __init__(self, *entries):
        self.entries = list(entries)

    def value(self, entries, some, now):
        return np.asarray([self.entries.index(i) for i in some.tolist()], np.float64)


def gone(books):
    return [entry for entries, _, _ in books.evicted for entry in entries]


# Leaves first.


def test_a_chain_goes_from_its_end_whatever_the_policy_says():
    books = Books(policy=Order(0, 1, 2, 3))
    assert books.chain(4) == [0, 1, 2, 3]
    books.evict(blocks=3)
    assert gone(books) == [3, 2, 1]
    assert books.live() == [0]


def test_a_shared_ancestor_outlives_its_leaves():
    books = Books(blocks=5, policy=Order(0, 1, 2, 3, 4))
    (root,) = books.chain(1)
    left, right = books.chain(2, root), books.chain(2, root)
    books.evict(blocks=4)
    assert gone(books) == [left[1], left[0], right[1], right[0]]
    assert books.live() == [root]


def test_the_least_worth_leaf_goes_first_and_its_parent_competes_then():
    books = Books(policy=Order(1, 3, 0, 2))
    assert books.chain(2) + books.chain(2) == [0, 1, 2, 3]
    for expected in (1, 3, 0, 2):
        books.evict(blocks=1)
        assert gone(books)[-1] == expected


def test_one_call_gives_up_the_same_as_many():
    together, single = (Books(blocks=6, policy=Order(5, 0, 3, 1, 4, 2)) for _ in range(2))
    for books in (together, single):
        root = books.chain(2)[1]
        books.chain(2, root)
        books.chain(2, root)
    together.evict(blocks=5)
    for _ in range(5):
        single.evict(blocks=1)
    assert gone(together) == gone(single)


def test_only_as_much_goes_as_a_reservation_lacks():
    books = Books()
    a, b = books.chain(2)
    books.reserve(blocks=3)
    assert gone(books) == [b]
    assert books.live() == [a]


def test_nothing_goes_when_it_would_not_suffice():
    books = Books()
    a, b = books.chain(2)
    books.new()
    with pytest.raises(NoRoom) as refused:
        books.reserve(blocks=4)
    assert (refused.value.free, refused.value.evictable) == (1, 2)
    assert books.evicted == []
    assert set(books.live()) >= {a, b}


def test_equals_go_by_last_use_and_then_by_number():
    books = Books(policy=SecondsPerByte(**FLAT))
    for _ in range(3):
        books.chain(1)
    books.entries.used[[0, 1, 2]] = [5.0, 4.0, 4.0]
    books.evict(blocks=3)
    assert gone(books) == [1, 2, 0]


# Leases.


def test_what_is_leased_and_what_leads_to_it_stays():
    books = Books(blocks=5)
    a, b, c = books.chain(3)
    (d,) = books.chain(1, a)
    reader = books.lease(ids(b))
    assert books.evictable(Form.BLOCK) == 2
    with pytest.raises(NoRoom):
        books.evict(blocks=3)
    books.evict(blocks=2)
    assert sorted(gone(books)) == sorted([c, d])
    books.release(reader)
    assert books.evictable(Form.BLOCK) == 2


def test_a_leased_leaf_alone_keeps_a_long_chain():
    books = Books(blocks=300)
    chain = books.chain(300)
    reader = books.lease(ids(chain[-1]))
    assert books.evictable(Form.BLOCK) == 0
    books.release(reader)
    reader = books.lease(ids(chain[200]))
    assert books.evictable(Form.BLOCK) == 99
    books.release(reader)


def test_a_leased_snapshot_keeps_its_block_and_not_what_stands_on_it():
    books = Books()
    a, b, _ = books.chain(3)
    snapshot = books.snapshot_on(b)
    books.lease(ids(snapshot))
    assert (books.evictable(Form.BLOCK), books.evictable(Form.SNAPSHOT)) == (1, 0)
    books.evict(blocks=1)
    assert books.live() == sorted([a, b, snapshot])


@pytest.mark.parametrize("leased", [*itertools.combinations(range(7), 1), (1, 5), (3, 4), (0, 6)])
def test_what_can_go_is_exact(leased):
    parents = [NONE, 0, 1, 1, 3, 0, 5]
    books = Books(blocks=7)
    receipt = books.whole(7)
    books.attach(receipt.entries, ids(*parents))
    books.release(receipt)
    if leased:
        books.lease(ids(*leased))
    kept = set()
    for entry in leased:
        while entry != NONE:
            kept.add(entry)
            entry = parents[entry]
    assert books.evictable(Form.BLOCK) == 7 - len(kept)
    books.evict(blocks=7 - len(kept))
    assert books.live() == sorted(kept)


def test_unpublished_entries_are_nothing_to_give_up():
    books = Books()
    books.whole(2)
    books.new()
    assert books.evictable(Form.BLOCK) == 0


# Snapshots and budgets.


def test_a_snapshot_goes_before_the_block_under_it():
    books = Books()
    a, b = books.chain(2)
    snapshot = books.snapshot_on(b)
    books.evict(blocks=1)
    assert books.evicted == [([snapshot], DEVICE, SNAPSHOTS), ([b], DEVICE, BLOCKS)]
    assert books.entries.snapshot[b] == NONE
    assert books.live() == [a]


def test_snapshots_are_given_up_for_snapshots_only():
    books = Books()
    a, b = books.chain(2)
    first, second = books.snapshot_on(a), books.snapshot_on(b)
    books.reserve(snapshots=1)
    assert books.evicted == [([first], DEVICE, SNAPSHOTS)]
    assert books.live() == sorted([a, b, second])


def test_a_snapshot_that_goes_with_its_block_counts_for_the_snapshots_asked_for():
    books = Books()
    a, b = books.chain(2)
    first, second = books.snapshot_on(a), books.snapshot_on(b)
    books.touch(ids(second))
    books.reserve(blocks=3, snapshots=1)
    assert gone(books) == [second, b]
    assert books.live() == sorted([a, first])


def test_both_pools_fit_or_neither_gives_anything_up():
    books = Books()
    books.chain(4)
    books.new(2, Form.SNAPSHOT)
    with pytest.raises(NoRoom) as refused:
        books.reserve(blocks=1, snapshots=1)
    assert refused.value.form == Form.SNAPSHOT
    assert books.evicted == []


# Tiers.


def test_the_first_copy_that_goes_is_not_the_entrys_end():
    books = Books(host=(1, 0))
    (block,) = books.chain(1)
    books.copy(block, HOST)
    books.evict(blocks=1)
    assert books.evicted == []
    books.evict(blocks=1, tier=HOST)
    assert books.evicted == [([block], HOST, BLOCKS)]
    assert books.live() == []


def test_the_last_copy_of_a_parent_stays_while_a_child_lives_elsewhere():
    books = Books(host=(1, 0))
    a, b = books.chain(2)
    books.copy(b, HOST)
    assert books.evictable(Form.BLOCK) == 1
    books.evict(blocks=1)
    assert books.evictable(Form.BLOCK) == 0
    books.evict(blocks=1, tier=HOST)
    assert books.evictable(Form.BLOCK) == 1
    assert books.live() == [a]


def test_a_snapshot_is_lost_with_its_block_even_where_only_it_has_a_copy():
    books = Books(host=(0, 1))
    (block,) = books.chain(1)
    snapshot = books.snapshot_on(block)
    books.copy(snapshot, HOST)
    books.evict(blocks=1)
    assert gone(books) == [snapshot, block]
    assert books.live() == []


# Policies.

FLAT = {"block_seconds": 0.0, "block_bytes": 1, "snapshot_seconds": 0.0, "snapshot_bytes": 1}


def test_least_recently_used_goes_by_last_use():
    books = Books(policy=LeastRecentlyUsed())
    (a,), (b,), (c,) = (books.chain(1) for _ in range(3))
    books.touch(ids(a))
    books.evict(blocks=3)
    assert gone(books) == [b, c, a]


def test_seconds_per_byte_keeps_what_saves_most_a_byte():
    policy = SecondsPerByte(
        block_seconds=3.0, block_bytes=2, snapshot_seconds=8.0, snapshot_bytes=4
    )
    books = Books(policy=policy)
    (block,) = books.chain(1)
    snapshot = books.snapshot_on(block)
    worth = policy.value(books.entries, ids(block, snapshot), 0.0)
    assert worth.dtype == np.float64
    assert worth.tolist() == [1.5, 2.0]


def test_seconds_per_byte_keeps_blocks_that_are_used_or_picked():
    policy = SecondsPerByte(**FLAT | {"block_seconds": 1.0})
    books = Books(policy=policy)
    (a,), (b,), (c,) = (books.chain(1) for _ in range(3))
    books.touch(ids(a), when=0.0)
    books.entries.picks[b] = 3
    books.evict(blocks=3)
    assert gone(books) == [c, a, b]


def test_what_a_slower_tier_has_too_is_worth_its_loading_only():
    """Used most, and yet the first to go: it need not be computed again."""
    policy = SecondsPerByte(**FLAT | {"block_seconds": 1.0}, copied_share=0.1)
    books = Books(policy=policy, host=(1, 0))
    (a,), (b,) = (books.chain(1) for _ in range(2))
    books.copy(b, HOST)
    books.touch(ids(b))
    assert policy.value(books.entries, ids(a, b), 0.0).tolist() == [1.0, 0.2]
    books.evict(blocks=1)
    assert books.entries.place[:, b].tolist()[0] == NONE
    assert books.entries.published[b]


@pytest.mark.parametrize(
    "wrong", [{"block_bytes": 0}, {"snapshot_bytes": -1}, {"block_seconds": -1.0}]
)
def test_costs_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UserError):
        SecondsPerByte(**FLAT | wrong)


# Speed: bounds are wide, they catch a walk an entry.


@pytest.fixture(scope="module")
def long_chain():
    count = 200_000
    allocator = Allocator(
        {DEVICE: PoolSizes(blocks=count, snapshots=0)},
        policy=LeastRecentlyUsed(),
        clock=lambda: 0.0,
    )
    reservation = allocator.reserve(blocks=count)
    receipt = allocator.take(reservation, Form.BLOCK, count)
    allocator.cancel(reservation)
    allocator.commit(receipt.entries, 1)
    allocator.attach(receipt.entries, np.arange(-1, count - 1))
    allocator.release(receipt)
    return allocator


def test_many_blocks_of_one_chain_go_in_one_walk(long_chain):
    start = time.perf_counter()
    long_chain.evict(blocks=8192)
    assert time.perf_counter() - start < 1.0
    assert long_chain.evictable(Form.BLOCK) == 200_000 - 8192


def test_one_lease_at_the_end_of_a_long_chain_is_found_without_a_step_a_block(long_chain):
    last = int(np.flatnonzero(long_chain.entries.published)[-1])
    reader = long_chain.lease(ids(last))
    start = time.perf_counter()
    assert long_chain.evictable(Form.BLOCK) == 0
    assert time.perf_counter() - start < 0.5
    long_chain.release(reader)


def test_leases_that_meet_in_a_long_chain_keep_all_above_them_and_nothing_else():
    books = Books(blocks=400)
    trunk = books.chain(150)
    left, right = books.chain(100, trunk[-1]), books.chain(100, trunk[99])
    books.lease(ids(left[89]))
    books.lease(ids(right[79]))
    assert books.evictable(Form.BLOCK) == 10 + 20
    books.evict(blocks=30)
    assert books.live() == sorted([*trunk, *left[:90], *right[:80]])
