"""Each change of the books is noticed by itself, however long after the one before."""

from types import SimpleNamespace

import numpy as np
import pytest
from bookkeeping import DEVICE, HOST, Books, ids

from hybridkv.blocks.entries import FORM_BITS, Form
from hybridkv.observe.changes import Changes, Cleared, Removed, Stored


class World:
    """Books with one chain of blocks, and who looks at them."""

    def __init__(self):
        self.books = Books(blocks=8, snapshots=4, host=(8, 4))
        self.runner = SimpleNamespace(
            allocator=self.books,
            directory=SimpleNamespace(on_publish=[]),
            mover=None,
            on_reset=[],
        )
        self.changes = Changes(self.runner)

    def told(self):
        """What a look finds: class, form, tier and entry's position of each change."""
        return [
            "cleared"
            if isinstance(change, Cleared)
            else (type(change).__name__, change.entry.form.name, change.tier.name)
            for change in self.changes.flush()
        ]

    def copy(self, entries):
        """One more copy of blocks, on the host."""
        reservation = self.books.reserve(blocks=len(entries), tier=HOST)
        receipt = self.books.fill(reservation, ids(*entries))
        self.books.cancel(reservation)
        return receipt


@pytest.fixture
def world():
    return World()


BLOCK = ("Stored", "BLOCK", "DEVICE")


def test_a_block_is_told_when_it_is_published_and_not_when_it_is_whole(world):
    receipt = world.books.whole(1)
    assert world.told() == []
    world.books.attach(receipt.entries, ids(-1))
    assert world.told() == [BLOCK]
    world.books.release(receipt)
    world.books.touch(receipt.entries)
    assert world.told() == []


def test_a_snapshot_is_told_when_it_is_published(world):
    (block,) = world.books.chain(1)
    world.told()
    receipt = world.books.whole(1, Form.SNAPSHOT)
    assert world.told() == []
    world.books.attach_snapshot(int(receipt.entries[0]), block)
    assert world.told() == [("Stored", "SNAPSHOT", "DEVICE")]
    world.books.release(receipt)
    world.books.evict(snapshots=1)
    assert world.told() == [("Removed", "SNAPSHOT", "DEVICE")]


def test_a_copy_is_told_when_it_is_whole_and_when_it_is_given_up(world):
    blocks = world.books.chain(2)
    world.told()
    receipt = world.copy(blocks)
    assert world.told() == []
    world.books.commit(receipt.entries, FORM_BITS[Form.BLOCK], HOST)
    assert world.told() == [("Stored", "BLOCK", "HOST")] * 2
    world.books.drain(ids(blocks[1]), DEVICE)  # leased: it is not free, but nobody may plan with it
    assert world.told() == [("Removed", "BLOCK", "DEVICE")]
    world.books.release(receipt)
    assert world.told() == []
    world.books.evict(blocks=1)
    assert world.told() == [("Removed", "BLOCK", "DEVICE")]
    world.books.evict(blocks=2, tier=HOST)
    assert world.told() == [("Removed", "BLOCK", "HOST")] * 2


def test_what_is_withdrawn_is_told_though_it_is_leased(world):
    blocks = world.books.chain(2)
    world.told()
    receipt = world.books.lease(ids(*blocks))
    world.books.detach(ids(*blocks))
    assert world.told() == [("Removed", "BLOCK", "DEVICE")] * 2
    world.books.release(receipt)
    assert world.told() == []


def test_an_id_that_is_another_entry_now_goes_and_comes(world):
    (block,) = world.books.chain(1)
    world.books.entries.digest[block] = 1
    world.told()
    world.books.evict(blocks=1)
    (again,) = world.books.chain(1)
    assert again == block
    world.books.entries.digest[block] = 2
    gone, come = world.changes.flush()
    assert isinstance(gone, Removed)
    assert gone.entry.digest == b"\1" * 32
    assert isinstance(come, Stored)
    assert come.entry.digest == b"\2" * 32


def test_what_comes_and_goes_between_two_looks_is_not_told(world):
    world.books.chain(3)
    world.books.evict(blocks=3)
    assert world.told() == []
    assert world.changes.told == {}


def test_parents_come_before_and_go_after_their_children(world):
    blocks = world.books.chain(4)
    world.books.entries.position[blocks] = [16, 32, 48, 64]
    assert [change.entry.position for change in world.changes.flush()] == [16, 32, 48, 64]
    world.books.evict(blocks=4)
    assert [change.entry.position for change in world.changes.flush()] == [64, 48, 32, 16]


def test_a_reset_of_the_books_tells_all_and_new_books_are_told_as_cleared(world):
    world.books.chain(2)
    world.told()
    world.books.reset()
    assert world.told() == [("Removed", "BLOCK", "DEVICE")] * 2
    world.books.chain(1)
    world.told()
    world.runner.allocator = world.books = Books(blocks=8, snapshots=4, host=(8, 4))
    for tell in world.runner.on_reset:
        tell()
    world.books.chain(1)
    assert world.told() == ["cleared", BLOCK]


def test_forgetting_tells_everything_again(world):
    world.books.chain(2)
    assert world.told() == [BLOCK] * 2
    world.changes.forget()
    assert world.told() == ["cleared", BLOCK, BLOCK]


def test_tokens_are_told_with_every_copy_and_only_of_the_entry_they_are_of(world):
    publish, tokens = world.runner.directory.on_publish[0], np.arange(32, dtype=np.uint32)
    (block,) = world.books.chain(1)
    publish(0, tokens[:16], ids(block))
    tokens[:] = 0  # what is kept is no part of the prompt, which would stay as long
    (change,) = world.changes.flush()
    assert change.tokens.tolist() == list(range(16))
    receipt = world.copy([block])
    world.books.commit(receipt.entries, FORM_BITS[Form.BLOCK], HOST)
    (copied,) = world.changes.flush()
    assert copied.tokens.tolist() == list(range(16))
    world.changes.forget()
    assert [c.tokens.tolist() for c in world.changes.flush()[1:]] == [list(range(16))] * 2
    world.books.release(receipt)
    world.books.evict(blocks=1, tier=HOST)
    world.books.evict(blocks=1)
    world.changes.flush()
    assert not world.changes._tokens
    publish(0, tokens[:16], ids(block))  # of the generation that is gone
    (again,) = world.books.chain(1)
    assert again == block
    (change,) = world.changes.flush()
    assert change.tokens is None
