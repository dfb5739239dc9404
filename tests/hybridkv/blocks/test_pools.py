import numpy as np
import pytest

from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.pools import (
    FreeList,
    NeverFits,
    NoRoom,
    Pool,
    PoolSizes,
    ReservationError,
    Reservations,
)
from hybridkv.errors import UserError

WANTED = {Form.BLOCK: 3, Form.SNAPSHOT: 1}


def test_fresh_numbers_come_out_ascending_and_the_last_given_back_first():
    free = FreeList(5)
    assert free.pop(3).tolist() == [0, 1, 2]
    free.push(np.asarray([1, 0], np.int32))
    assert free.pop(3).tolist() == [1, 0, 3]
    assert sorted(free.free.tolist()) == [4]
    assert (len(free), free.size) == (1, 5)


def test_taken_numbers_are_a_copy():
    free = FreeList(3)
    taken = free.pop(2)
    free.push(taken)
    free.free[:] = 7
    assert taken.tolist() == [0, 1]


@pytest.mark.parametrize("wrong", ["too many out", "too many back"])
def test_a_free_list_never_overflows(wrong):
    free = FreeList(2)
    with pytest.raises(AssertionError):
        free.pop(3) if wrong == "too many out" else free.push(np.zeros(1, np.int32))
    assert len(free) == 2


def test_a_pool_is_used_reserved_and_available_places():
    pool = Pool(4)
    pool.reserved = 3
    assert pool.take(2).tolist() == [0, 1]
    assert (pool.capacity, pool.used, pool.reserved, pool.available) == (4, 2, 1, 1)
    with pytest.raises(AssertionError, match="2 taken of 1 reserved"):
        pool.take(2)


@pytest.mark.parametrize("sizes", [(-1, 0), (0, -1)])
def test_negative_sizes_are_refused(sizes):
    with pytest.raises(UserError, match="fewer than 0"):
        PoolSizes(blocks=sizes[0], snapshots=sizes[1])


def test_a_reservation_is_spent_in_parts_and_closed_once():
    reservations = Reservations()
    first = reservations.open(Tier.HOST, WANTED)
    assert (first.serial, first.tier, first.blocks, first.snapshots) == (0, Tier.HOST, 3, 1)
    reservations.spend(first, {Form.BLOCK: 2})
    assert reservations.remaining(first) == {Form.BLOCK: 1, Form.SNAPSHOT: 1}
    assert reservations.close(first) == {Form.BLOCK: 1, Form.SNAPSHOT: 1}
    with pytest.raises(ReservationError, match="reservation 0 was cancelled before"):
        reservations.close(first)
    with pytest.raises(ReservationError, match="was cancelled"):
        reservations.spend(first, {Form.BLOCK: 0})
    assert reservations.open(Tier.HOST, WANTED).serial == 1


@pytest.mark.parametrize(
    "wanted",
    [{Form.BLOCK: 4}, {Form.BLOCK: -1}, {Form.BLOCK: 1, Form.SNAPSHOT: 2}],
)
def test_more_than_is_left_takes_nothing(wanted):
    reservations = Reservations()
    one = reservations.open(Tier.DEVICE, WANTED)
    with pytest.raises(ReservationError, match="left"):
        reservations.spend(one, wanted)
    assert reservations.remaining(one) == WANTED


def test_what_does_not_fit_says_the_numbers():
    now = NoRoom(tier=Tier.DEVICE, form=Form.BLOCK, needed=5, free=1, evictable=2)
    assert str(now) == "5 blocks do not fit DEVICE now: 1 free, 2 can go"
    assert not isinstance(now, UserError)
    never = NeverFits(tier=Tier.HOST, form=Form.SNAPSHOT, needed=5, capacity=4)
    assert str(never).startswith("5 snapshots never fit HOST, which has 4: ")
    assert isinstance(never, UserError)
