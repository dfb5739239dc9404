import hashlib
import itertools

import numpy as np
import pytest

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import EntryError, Form, Tier, kind_bits
from hybridkv.blocks.eviction import LeastRecentlyUsed
from hybridkv.blocks.leases import StaleEntry
from hybridkv.blocks.pools import PoolSizes
from hybridkv.errors import UserError
from hybridkv.kinds import Kind
from hybridkv.prefixes.directory import Directory, PublishError
from hybridkv.prefixes.ghosts import Ghosts
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.identity import Identity

BLOCK_KINDS = kind_bits((Kind.COMPRESSED, Kind.INDEXER))
SNAPSHOT_KINDS = kind_bits((Kind.WINDOW, Kind.TAIL))
IDENTITY = Identity(geometry="g", weights="w", layout="l", numerics="n")
SIZE = 4
"""Tokens of a block."""


class World:
    """A small allocator whose invariants are walked after every call, and its directory."""

    def __init__(self, blocks=12, snapshots=3, *, debug=True, block_tokens=SIZE, **options):
        ticks = itertools.count()
        self.allocator = Allocator(
            {
                Tier.DEVICE: PoolSizes(blocks=blocks, snapshots=snapshots),
                Tier.HOST: PoolSizes(blocks=1, snapshots=0),
            },
            policy=LeastRecentlyUsed(),
            clock=lambda: float(next(ticks)),
            debug=debug,
        )
        options = {"required_kinds": BLOCK_KINDS | SNAPSHOT_KINDS} | options
        self.directory = Directory(self.allocator, IDENTITY, block_tokens=block_tokens, **options)

    def take(self, count, form=Form.BLOCK):
        counts = {"blocks": count} if form == Form.BLOCK else {"snapshots": count}
        return self.allocator.take(self.allocator.reserve(**counts), form, count)

    def whole(self, count, kinds=BLOCK_KINDS):
        """The receipt of ``count`` blocks whose bytes are there."""
        receipt = self.take(count)
        self.allocator.commit(receipt.entries, kinds)
        return receipt

    def whole_snapshot(self, kinds=SNAPSHOT_KINDS):
        receipt = self.take(1, Form.SNAPSHOT)
        self.allocator.commit(receipt.entries, kinds)
        return receipt

    def chain(self, tokens, namespace=""):
        chain = self.directory.chain(namespace)
        chain.extend(tokens)
        return chain

    def publish(self, tokens, namespace=""):
        """A chain of which every complete block is published and nothing is leased."""
        chain = self.chain(tokens, namespace)
        if chain.blocks:
            receipt = self.whole(chain.blocks)
            self.directory.publish(chain, 0, receipt.entries)
            self.allocator.release(receipt)
        return chain

    def find(self, tokens, namespace=""):
        return self.directory.find(self.chain(tokens, namespace))


@pytest.fixture
def world():
    return World()


A = np.arange(1, 17)
"""Four blocks."""


# Finding.


def test_an_empty_directory_has_nothing(world):
    match = world.find(A)
    assert match.entries.tolist() == match.generations.tolist() == []
    assert (match.blame, match.collisions) == ("never_published", 0)


def test_a_chain_without_a_complete_block_lacks_nothing(world):
    match = world.find(A[:3])
    assert (match.entries.tolist(), match.blame) == ([], None)


def test_published_blocks_are_found_in_order(world):
    receipt = world.whole(4)
    assert world.directory.publish(world.chain(A), 0, receipt.entries).tolist() == (
        receipt.entries.tolist()
    )
    match = world.find([*A, 99])
    assert match.entries.tolist() == receipt.entries.tolist()
    assert match.generations.tolist() == receipt.generations.tolist()
    assert match.blame is None
    assert match.entries.dtype == np.int32
    assert len(world.directory) == 4
    columns = world.directory.entries
    assert columns.position[match.entries].tolist() == [4, 8, 12, 16]
    assert columns.parent[match.entries].tolist() == [-1, *match.entries[:-1].tolist()]


def test_the_run_ends_where_tokens_differ(world):
    chain = world.publish(A)
    stored = world.directory.find(chain).entries
    for same in range(len(A)):
        other = A.copy()
        other[same] = 77
        match = world.find(other)
        assert match.entries.tolist() == stored[: same // SIZE].tolist()
        assert match.blame == "never_published"


def test_equal_blocks_behind_another_prefix_are_not_found(world):
    world.publish(A)
    assert world.find([*A[4:8], *A[4:]]).entries.size == 0


def test_a_match_leases_what_it_found(world):
    world.publish(A)
    match = world.find(A)
    receipt = world.allocator.lease(match.entries, match.generations)
    assert receipt.entries.tolist() == match.entries.tolist()


def test_namespaces_are_isolated(world):
    world.publish(A, "tenant-a")
    world.publish(A[:4], "")
    assert world.find(A, "tenant-a").entries.size == 4
    assert world.find(A, "tenant-b").entries.size == 0
    assert world.find(A, "").entries.size == 1


def test_other_identities_share_no_digest(world):
    other = Identity(geometry="g", weights="v", layout="l", numerics="n")
    elsewhere = Directory(
        World().allocator, other, block_tokens=SIZE, required_kinds=BLOCK_KINDS
    ).chain()
    elsewhere.extend(A)
    assert not np.isin(elsewhere.digests[:, 0], world.chain(A).digests[:, 0]).all()


def test_chains_from_elsewhere_are_refused(world):
    chain = TokenChain(IDENTITY.root(), SIZE)
    for call in (
        lambda: world.directory.find(chain),
        lambda: world.directory.publish(chain, 0, np.empty(0, np.int32)),
    ):
        with pytest.raises(ValueError, match=r"make it with directory\.chain\(\)"):
            call()


def test_the_vocabulary_is_checked_by_the_chain(world):
    with pytest.raises(UserError, match="token 10 is not in"):
        world.directory.chain(vocab_size=10).extend([10])


# Incremental.


def test_a_chain_that_grows_finds_what_a_new_one_finds(world):
    world.publish(A)
    chain = world.directory.chain()
    for token in [*A.tolist(), 50, 51, 52, 53]:
        chain.extend([token])
        grown, fresh = world.directory.find(chain), world.find(chain.tokens)
        assert grown.entries.tolist() == fresh.entries.tolist()
        assert grown.generations.tolist() == fresh.generations.tolist()
        assert grown.blame == fresh.blame


def test_only_blocks_after_the_trusted_ones_are_looked_up(world, monkeypatch):
    chain = world.publish(A)
    looked_up = []
    find = world.directory._table.find
    monkeypatch.setattr(
        world.directory._table, "find", lambda d: looked_up.append(len(d)) or find(d)
    )
    world.directory.find(chain)
    world.directory.find(chain)
    assert looked_up == [4, 0]


def test_entries_evicted_since_the_last_match_are_not_trusted(world):
    chain = world.publish(A)
    assert world.directory.find(chain).entries.size == 4
    world.allocator.evict(blocks=2)
    match = world.directory.find(chain)
    assert (match.entries.size, match.blame) == (2, "evicted:compressed")


def test_entries_taken_again_since_the_last_match_are_not_trusted():
    world = World(blocks=4)
    chain = world.publish(A)
    old = world.directory.find(chain)
    other = world.publish(A + 100)
    assert sorted(world.directory.find(other).entries) == sorted(old.entries)
    match = world.directory.find(chain)
    assert (match.entries.size, match.blame) == (0, "evicted:compressed")
    with pytest.raises(StaleEntry):
        world.allocator.lease(old.entries, old.generations)


def test_entries_published_again_for_other_tokens_are_not_trusted(world):
    chain, other = world.chain(A[:4]), world.chain(A[4:8])
    receipt = world.whole(1)
    world.directory.publish(chain, 0, receipt.entries)
    assert world.directory.find(chain).entries.size == 1
    world.directory.withdraw(receipt.entries, "layout")
    world.directory.publish(other, 0, receipt.entries)
    assert world.directory.find(chain).entries.size == 0
    assert world.directory.find(other).entries.size == 1


def test_a_lost_cache_is_an_empty_directory(world):
    chain = world.publish(A)
    world.allocator.reset()
    assert len(world.directory) == 0
    assert world.directory.find(chain).entries.size == 0
    world.publish(A)
    assert world.directory.find(chain).entries.size == 4


# Publishing.


def test_a_sequence_is_published_block_by_block(world):
    chain = world.directory.chain()
    receipts = []
    for first in range(4):
        chain.extend(A[first * SIZE : (first + 1) * SIZE])
        receipts.append(world.whole(1))
        world.directory.publish(chain, first, receipts[-1].entries)
    assert world.find(A).entries.tolist() == [int(r.entries[0]) for r in receipts]


def test_blocks_that_are_there_keep_their_entries(world):
    old = world.directory.find(world.publish(A[:8])).entries
    receipt = world.whole(4)
    stands = world.directory.publish(world.chain(A), 0, receipt.entries)
    assert stands.tolist() == [*old.tolist(), *receipt.entries[2:].tolist()]
    columns = world.directory.entries
    assert columns.published[receipt.entries].tolist() == [False, False, True, True]
    free = world.allocator.available(Form.BLOCK)
    world.allocator.release(receipt)
    assert world.allocator.available(Form.BLOCK) == free + 2


def test_publishing_again_changes_nothing(world):
    receipt = world.whole(4)
    chain = world.chain(A)
    world.directory.publish(chain, 0, receipt.entries)
    again = world.directory.publish(chain, 1, receipt.entries[1:])
    assert again.tolist() == receipt.entries[1:].tolist()
    assert len(world.directory) == 4


def test_publishing_no_blocks_is_fine(world):
    assert world.directory.publish(world.chain(A), 0, np.empty(0, np.int32)).size == 0


def test_branches_share_their_beginning(world):
    a = world.directory.find(world.publish(A)).entries
    b = world.directory.find(world.publish([*A[:8], 91, 92, 93, 94])).entries
    assert b[:2].tolist() == a[:2].tolist()
    assert world.directory.entries.children[a].tolist() == [1, 2, 1, 0]


def refused(world, message, chain, first, entries):
    before = len(world.directory)
    with pytest.raises(PublishError, match=message):
        world.directory.publish(chain, first, entries)
    assert len(world.directory) == before
    assert world.find(A[:4]).entries.size == 0


def test_blocks_behind_unpublished_ones_are_refused(world):
    refused(world, "publish from block 0 on", world.chain(A), 1, world.whole(3).entries)


def test_blocks_behind_one_that_is_only_on_the_host_are_published(world):
    allocator, directory = world.allocator, world.directory
    moved = directory.find(world.publish(A[:4])).entries
    receipt = allocator.fill(allocator.reserve(blocks=1, tier=Tier.HOST), moved)
    allocator.commit(moved, BLOCK_KINDS, Tier.HOST)
    allocator.release(receipt)
    allocator.drain(moved, Tier.DEVICE)
    chain, new = world.chain(A), world.whole(3).entries
    assert directory.find(chain).entries.tolist() == moved.tolist()
    assert directory.publish(chain, 1, new).tolist() == new.tolist()
    assert directory.find(chain).entries.tolist() == [*moved.tolist(), *new.tolist()]


def test_blocks_that_the_chain_does_not_have_are_refused(world):
    refused(world, "chain of 1 complete", world.chain(A[:7]), 0, world.whole(2).entries)
    refused(world, "chain of 1 complete", world.chain(A[:7]), -1, world.whole(1).entries)


def test_blocks_that_are_not_whole_are_refused(world):
    entries = np.concatenate([world.whole(1).entries, world.take(1).entries])
    refused(world, f"entry {entries[1]} is not PRESENT", world.chain(A), 0, entries)


def test_blocks_that_lack_a_kind_are_refused(world):
    entries = world.whole(1, kind_bits((Kind.COMPRESSED,))).entries
    refused(world, "lacks a required kind of COMPRESSED, INDEXER", world.chain(A), 0, entries)


def test_kinds_that_the_geometry_lacks_are_not_required():
    compressed = kind_bits((Kind.COMPRESSED,))
    world = World(required_kinds=compressed)
    chain = world.chain(A[:4])
    world.directory.publish(chain, 0, world.whole(1, compressed).entries)
    assert world.find(A[:4]).entries.size == 1


def test_kinds_that_do_not_exist_can_not_be_required():
    with pytest.raises(ValueError, match="no kind"):
        World(required_kinds=16)


def test_snapshots_are_no_blocks(world):
    refused(world, "is no block", world.chain(A), 0, world.whole_snapshot().entries)


def test_entries_that_stand_twice_or_elsewhere_are_refused(world):
    entries = world.whole(1).entries
    refused(world, "stands twice", world.chain(A), 0, np.concatenate([entries, entries]))
    world.directory.publish(world.chain(A + 100), 0, entries)
    refused(world, "is published already", world.chain(A), 0, entries)


@pytest.mark.parametrize("entries", [np.array([-1]), np.array([999]), np.array([0.0])])
def test_what_are_no_entries_is_refused(world, entries):
    refused(world, "entries ", world.chain(A), 0, entries)


# Collisions.


def colliding(previous, tokens):
    """All blocks whose first tokens agree have one digest."""
    return hashlib.sha256(previous + tokens[:4]).digest()


def constant(previous, tokens):
    del previous, tokens
    return bytes(range(32))


def test_a_digest_that_collides_is_no_hit():
    world = World(hash_block=colliding)
    world.publish([1, 2, 3, 4, 5, 6, 7, 8])
    match = world.find([1, 2, 3, 4, 5, 6, 7, 9])
    assert (match.entries.size, match.collisions, match.blame) == (1, 1, "never_published")
    match = world.find([1, 2, 3, 9, 5, 6, 7, 8])
    assert match.entries.size == 0
    assert match.collisions == 1


def test_blocks_from_a_collision_on_stay_unpublished():
    world = World(hash_block=colliding)
    stored = world.directory.find(world.publish([1, 2, 3, 4, 5, 6, 7, 8])).entries
    chain = world.chain([1, 2, 3, 4, 5, 6, 7, 9, 5, 5, 5, 5])
    receipt = world.whole(3)
    assert world.directory.publish(chain, 0, receipt.entries).tolist() == [stored[0], -1, -1]
    assert not world.directory.entries.published[receipt.entries].any()
    assert len(world.directory) == 2
    world.allocator.release(receipt)


def test_a_digest_that_collides_within_a_chain_is_published_once():
    world = World(hash_block=constant)
    chain = world.chain(A)
    receipt = world.whole(4)
    entry = int(receipt.entries[0])
    assert world.directory.publish(chain, 0, receipt.entries).tolist() == [entry, -1, -1, -1]
    match = world.directory.find(chain)
    assert (match.entries.tolist(), match.collisions) == ([entry], 3)
    world.directory.withdraw(match.entries, "layout")
    assert len(world.directory) == 0


# Snapshots.


def test_a_snapshot_stands_on_the_block_that_ends_at_its_position(world):
    chain = world.publish(A)
    snapshot = world.whole_snapshot().entries[0]
    assert world.directory.publish_snapshot(chain, 8, snapshot)
    blocks = world.directory.find(chain).entries
    assert world.directory.snapshot_at(blocks).tolist() == [-1, snapshot, -1, -1]
    assert world.directory.snapshot_at(blocks).dtype == np.int32
    assert world.directory.entries.position[snapshot] == 8


def test_a_second_snapshot_stays_unpublished(world):
    chain = world.publish(A)
    first, second = world.whole_snapshot(), world.whole_snapshot()
    assert world.directory.publish_snapshot(chain, 16, first.entries[0])
    assert world.directory.publish_snapshot(chain, 16, first.entries[0])
    assert not world.directory.publish_snapshot(chain, 16, second.entries[0])
    assert not world.directory.entries.published[second.entries[0]]
    world.allocator.release(second)


@pytest.mark.parametrize("position", [0, 7, 12, -4])
def test_a_snapshot_needs_a_published_block_that_ends_there(world, position):
    chain = world.publish(A[:8])
    chain.extend(A[8:])
    snapshot = world.whole_snapshot().entries[0]
    with pytest.raises(PublishError, match=f"ends at {position}: it has 2 published"):
        world.directory.publish_snapshot(chain, position, snapshot)


def test_a_snapshot_that_is_not_whole_or_lacks_a_kind_is_refused(world):
    chain = world.publish(A)
    for entry, message in (
        (world.take(1, Form.SNAPSHOT).entries[0], "is not PRESENT"),
        (world.whole_snapshot(kind_bits((Kind.WINDOW,))).entries[0], "kind of WINDOW, TAIL"),
        (world.whole(1).entries[0], "is no snapshot"),
        (-1, "entries must be in"),
    ):
        with pytest.raises(PublishError, match=message):
            world.directory.publish_snapshot(chain, 16, entry)
    assert (world.directory.snapshot_at(world.directory.find(chain).entries) == -1).all()


# What is gone.


def test_withdrawn_blocks_are_not_found_and_their_cause_is_known(world):
    chain = world.publish(A)
    match = world.directory.find(chain)
    world.directory.withdraw(match.entries[2:], "layout")
    after = world.directory.find(chain)
    assert (after.entries.tolist(), after.blame) == (match.entries[:2].tolist(), "layout")
    assert world.directory.lost_cause(chain.digests[2]) == "layout"
    assert world.directory.lost_cause(chain.digests[1].tobytes()) is None
    assert world.directory.lost_cause(bytes(32)) is None


def test_withdrawing_under_what_stays_is_refused_whole(world):
    chain = world.publish(A)
    match = world.directory.find(chain)
    with pytest.raises(EntryError):
        world.directory.withdraw(match.entries[1:3], "layout")
    assert world.directory.find(chain).blame is None
    world.directory.withdraw(match.entries, "layout")
    with pytest.raises(EntryError):
        world.directory.withdraw(match.entries, "layout")


def test_leases_outlive_a_withdrawal(world):
    chain = world.publish(A)
    match = world.directory.find(chain)
    receipt = world.allocator.lease(match.entries, match.generations)
    world.directory.withdraw(match.entries, "layout")
    assert world.find(A).entries.size == 0
    assert world.allocator.available(Form.BLOCK) == 8
    world.allocator.release(receipt)
    assert world.allocator.available(Form.BLOCK) == 12


def test_what_was_withdrawn_can_be_published_again(world):
    chain = world.publish(A)
    world.directory.withdraw(world.directory.find(chain).entries, "layout")
    world.publish(A)
    match = world.directory.find(chain)
    assert (match.entries.size, match.blame) == (4, None)
    assert world.directory.lost_cause(chain.digests[0]) is None


def test_an_evicted_snapshot_is_blamed_while_its_block_stays(world):
    chain = world.publish(A)
    receipt = world.whole_snapshot()
    world.directory.publish_snapshot(chain, 16, receipt.entries[0])
    world.allocator.release(receipt)
    assert world.directory.lost_cause(chain.digests[3]) is None
    world.allocator.evict(snapshots=1)
    assert world.directory.find(chain).blame is None
    assert world.directory.lost_cause(chain.digests[3]) == "evicted:snapshot"
    assert world.directory.lost_cause(chain.digests[2]) is None
    again = world.whole_snapshot()
    assert world.directory.publish_snapshot(chain, 16, again.entries[0])
    assert world.directory.lost_cause(chain.digests[3]) is None


def test_a_block_evicted_with_its_snapshot_is_blamed_itself(world):
    chain = world.publish(A)
    receipt = world.whole_snapshot()
    world.directory.publish_snapshot(chain, 16, receipt.entries[0])
    world.allocator.release(receipt)
    world.allocator.evict(blocks=1)
    assert world.directory.find(chain).blame == "evicted:compressed"
    assert world.directory.lost_cause(chain.digests[3]) == "evicted:compressed"


def test_the_oldest_losses_are_forgotten():
    ghosts = Ghosts(20)
    digests = np.random.default_rng(0).integers(0, 256, (64, 32), dtype=np.uint8)
    for number, digest in enumerate(digests):
        ghosts.note(digest[None], f"cause {number}")
        assert len(ghosts) <= 20
    assert [ghosts.cause(digest) for digest in digests[-10:]] == [
        f"cause {number}" for number in range(54, 64)
    ]
    assert [ghosts.cause(digest) for digest in digests[:44]] == [None] * 44
    ghosts.note(digests, "all at once")
    assert len(ghosts) <= 20
    assert ghosts.cause(digests[-1]) == "all at once"


def test_a_later_cause_replaces_an_earlier_one():
    ghosts = Ghosts(4)
    digests = np.arange(64, dtype=np.uint8).reshape(2, 32)
    ghosts.note(digests[:1], "evicted:compressed")
    ghosts.note(digests[1:], "evicted:compressed")
    ghosts.note(digests[:1], "layout")
    assert ghosts.cause(digests[0]) == "layout"
    assert ghosts.cause(digests[1]) == "evicted:compressed"


def test_ghosts_need_room():
    with pytest.raises(ValueError, match="at least 2"):
        World(ghosts=1)


# Turnover.


def test_long_turnover_against_a_plain_model():
    """Random prompts over few tokens; what is found is what the columns say is published."""
    world, rng = World(blocks=10, snapshots=2), np.random.default_rng(5)
    chains = {}
    for _ in range(300):
        tokens = tuple(rng.integers(0, 2, rng.integers(1, 5)).repeat(SIZE).tolist())
        namespace = str(rng.integers(2))
        chain = chains.setdefault((namespace, tokens), None) or world.chain(tokens, namespace)
        chains[namespace, tokens] = chain
        match = world.directory.find(chain)
        held = world.allocator.lease(match.entries, match.generations)
        receipt = world.whole(chain.blocks - match.entries.size)
        world.directory.publish(chain, match.entries.size, receipt.entries)
        found = world.directory.find(chain)
        assert found.blame is None
        columns = world.directory.entries
        assert columns.published[found.entries].all()
        assert (columns.digest[found.entries] == chain.digests).all()
        world.allocator.release(held)
        world.allocator.release(receipt)
        blocks = columns.published & (columns.form == Form.BLOCK)
        assert len(world.directory) == np.count_nonzero(blocks)


def test_a_block_behind_another_one_is_not_found_although_digest_and_tokens_agree():
    """Under a hash that forgets what came before, only the parent tells two prefixes apart."""

    def forgetful(previous, tokens):
        del previous
        return hashlib.sha256(tokens).digest()

    world = World(hash_block=forgetful)
    world.publish([1, 1, 1, 1, 5, 6, 7, 8])
    world.publish([2, 2, 2, 2])
    found = world.directory.find(world.chain([2, 2, 2, 2, 5, 6, 7, 8]))
    assert found.entries.size == 1
