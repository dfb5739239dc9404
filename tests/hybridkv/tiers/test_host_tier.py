"""Bytes on the host are those that were put there, one array an entry, or found to be others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.pools import PoolSizes
from hybridkv.kinds import Kind
from hybridkv.tiers.host import DamagedHostBytes, HostTier, HostWords

SPANS = {
    Form.BLOCK: {Kind.COMPRESSED: slice(0, 6), Kind.INDEXER: slice(6, 8)},
    Form.SNAPSHOT: {Kind.WINDOW: slice(0, 4), Kind.TAIL: slice(4, 5)},
}
WORDS = {Form.BLOCK: 8, Form.SNAPSHOT: 5}


@pytest.fixture
def host():
    return HostTier(PoolSizes(blocks=3, snapshots=2), SPANS, jax.devices()[0])


def words(form, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.integers(0, 2**32, WORDS[form], dtype=np.uint32))


@pytest.mark.parametrize("form", Form)
def test_what_was_pinned_is_the_same_and_lies_in_pinned_memory(host, form):
    held = host.pin(form, words(form))
    assert held.words.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(np.asarray(held.words), np.asarray(words(form)))
    assert set(held.digests) == set(SPANS[form])
    host.verify(held)


@pytest.mark.parametrize(("form", "kind"), [(f, k) for f in Form for k in SPANS[f]])
def test_every_bit_is_under_the_digest_of_its_kind(host, form, kind):
    held = host.pin(form, words(form))
    for word in range(WORDS[form])[SPANS[form][kind]]:
        for bit in (0, 31):
            changed = np.array(held.words)
            changed[word] ^= np.uint32(1 << bit)
            with pytest.raises(DamagedHostBytes, match=f"{kind.value} of a {form.name.lower()}"):
                host.verify(HostWords(form=form, words=changed, digests=held.digests))


def test_a_place_holds_what_was_put_there_until_it_is_freed(host):
    for form in Form:
        host.keep(1, host.pin(form, words(form)))
    assert host.bytes_used == 4 * (8 + 5)
    host.dropped(Tier.DEVICE, Form.BLOCK, np.array([1], np.int32))
    host.dropped(Tier.DISK, Form.BLOCK, np.array([1], np.int32))
    assert host.at(Form.BLOCK, 1).form is Form.BLOCK
    host.dropped(Tier.HOST, Form.BLOCK, np.array([1], np.int32))
    with pytest.raises(AssertionError, match="nothing at BLOCK 1"):
        host.at(Form.BLOCK, 1)
    assert host.at(Form.SNAPSHOT, 1).form is Form.SNAPSHOT
    assert host.bytes_used == 4 * 5


def test_words_that_are_on_their_way_are_not_changed_by_a_new_owner_of_their_place(host):
    first = host.pin(Form.BLOCK, words(Form.BLOCK, 1))
    host.keep(0, first)
    taken = host.at(Form.BLOCK, 0)
    host.dropped(Tier.HOST, Form.BLOCK, np.array([0], np.int32))
    host.keep(0, host.pin(Form.BLOCK, words(Form.BLOCK, 2)))
    np.testing.assert_array_equal(np.asarray(taken.words), np.asarray(words(Form.BLOCK, 1)))
