"""A block is the child of one block: equal digests and tokens behind another one are no hit."""

import hashlib

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import Form, Tier, kind_bits
from hybridkv.blocks.eviction import LeastRecentlyUsed
from hybridkv.blocks.pools import PoolSizes
from hybridkv.kinds import Kind
from hybridkv.prefixes.directory import Directory
from hybridkv.prefixes.identity import Identity

KINDS = kind_bits((Kind.COMPRESSED,))


def forgetful(previous, tokens):
    """A hash that is broken where chaining matters: what came before is left out."""
    del previous
    return hashlib.sha256(tokens).digest()


def test_an_equal_block_behind_another_parent_is_no_hit_even_under_equal_digests():
    allocator = Allocator(
        {Tier.DEVICE: PoolSizes(blocks=8, snapshots=0)},
        policy=LeastRecentlyUsed(),
        clock=lambda: 0.0,
        debug=True,
    )
    directory = Directory(
        allocator,
        Identity(geometry="g", weights="w", layout="l", numerics="n"),
        block_tokens=4,
        required_kinds=KINDS,
        hash_block=forgetful,
    )

    def chain(*tokens):
        made = directory.chain()
        made.extend(tokens)
        return made

    def publish(made):
        reservation = allocator.reserve(blocks=made.blocks)
        receipt = allocator.take(reservation, Form.BLOCK, made.blocks)
        allocator.cancel(reservation)
        allocator.commit(receipt.entries, KINDS)
        directory.publish(made, 0, receipt.entries)
        allocator.release(receipt)
        return receipt.entries.tolist()

    first = publish(chain(1, 2, 3, 4, 5, 6, 7, 8))
    (other,) = publish(chain(9, 9, 9, 9))
    mixed = chain(9, 9, 9, 9, 5, 6, 7, 8)
    # Digest, tokens and number of the second block are those of the first chain's second block.
    assert mixed.digests[1].tobytes() == allocator.entries.digest[first[1]].tobytes()
    assert (mixed.fingerprints[1] == allocator.entries.fingerprint[first[1]]).all()
    assert directory.find(mixed).entries.tolist() == [other]
    assert directory.find(chain(1, 2, 3, 4, 5, 6, 7, 8)).entries.tolist() == first
