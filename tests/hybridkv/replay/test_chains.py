"""Chains without tokens in a real directory, and several snapshots published at once."""

import numpy as np
import pytest
from bookkeeping import Books

from hybridkv.blocks.entries import FORM_BITS, Form
from hybridkv.prefixes.directory import Directory, PublishError
from hybridkv.prefixes.identity import Identity
from hybridkv.replay.chains import BlockChain, BlockHashes

IDENTITY = Identity(geometry="g", weights="w", layout="l", numerics="n")
BLOCK = 4


class World:
    def __init__(self):
        self.books = Books(blocks=6, snapshots=4)
        self.directory = Directory(
            self.books, IDENTITY, block_tokens=BLOCK, required_kinds=sum(FORM_BITS.values())
        )
        self.hashes = BlockHashes(IDENTITY.root(), 10)

    def chain(self, *blocks, tokens=None):
        tokens = BLOCK * len(blocks) if tokens is None else tokens
        chain = BlockChain(self.hashes, np.asarray(blocks, np.int32), tokens=tokens, block=BLOCK)
        self.directory.register(chain)
        return chain

    def published(self, *blocks):
        chain = self.chain(*blocks)
        self.directory.publish(chain, 0, self.books.whole(len(blocks)).entries)
        return chain


def test_chains_of_the_same_numbers_find_each_other():
    world = World()
    world.published(1, 2, 3)
    assert len(world.directory.find(world.chain(1, 2, 4)).entries) == 2
    assert len(world.directory.find(world.chain(2, 3)).entries) == 0


def test_a_partial_block_is_looked_up_only_when_it_is_complete():
    world = World()
    world.published(1, 2)
    chain = world.chain(1, 2, tokens=BLOCK + 1)
    assert (chain.length, chain.blocks) == (BLOCK + 1, 1)
    assert len(world.directory.find(chain).entries) == 1
    chain.complete()
    assert (chain.length, chain.blocks) == (2 * BLOCK, 2)
    assert len(world.directory.find(chain).entries) == 2


def test_a_chain_of_another_root_or_block_is_not_registered():
    world = World()
    foreign = BlockHashes(IDENTITY.root("elsewhere"), 3)
    for hashes, block in ((foreign, BLOCK), (world.hashes, 2 * BLOCK)):
        chain = BlockChain(hashes, np.array([1], np.int32), tokens=block, block=block)
        with pytest.raises(ValueError, match="not of namespace"):
            world.directory.register(chain)


def test_snapshots_published_together_stand_as_if_one_by_one():
    world = World()
    chain = world.published(1, 2, 3)
    first, second, third, spare = world.books.whole(4, Form.SNAPSHOT).entries
    assert world.directory.publish_snapshot(chain, 2 * BLOCK, int(second))
    positions = np.array([1, 2, 3]) * BLOCK
    shown = world.directory.publish_snapshots(chain, positions, np.array([first, spare, third]))
    assert shown.tolist() == [True, False, True]
    run = world.directory.find(chain).entries
    assert world.directory.snapshot_at(run).tolist() == [first, second, third]
    again = world.directory.publish_snapshots(chain, positions[1:2], np.array([second]))
    assert again.tolist() == [True]


def test_of_snapshots_together_none_is_published_where_one_may_not_be():
    world = World()
    chain = world.published(1, 2)
    entries = world.books.whole(2, Form.SNAPSHOT).entries
    with pytest.raises(PublishError, match="no published block of the chain ends at 12"):
        world.directory.publish_snapshots(chain, np.array([BLOCK, 3 * BLOCK]), entries)
    with pytest.raises(PublishError, match="stands twice"):
        world.directory.publish_snapshots(
            chain, np.array([1, 2]) * BLOCK, np.array([entries[0], entries[0]])
        )
    run = world.directory.find(chain).entries
    assert (world.directory.snapshot_at(run) == -1).all()
