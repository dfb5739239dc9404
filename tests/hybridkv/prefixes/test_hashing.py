import hashlib
import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv.errors import UserError
from hybridkv.prefixes.hashing import TokenChain, common_prefix

ROOT = bytes(range(32))


def chain(tokens=(), root=ROOT, block_tokens=4, **options):
    made = TokenChain(root, block_tokens, **options)
    made.extend(tokens)
    return made


def state(x):
    return x.length, x.blocks, x.tokens.tolist(), x.digests.tobytes(), x.fingerprints.tobytes()


def test_a_digest_is_of_the_one_before_and_little_endian_tokens():
    made = chain([1, 2, 3, 2**32 - 1, 258])
    data = bytes.fromhex("01000000 02000000 03000000 ffffffff")
    assert made.digests.tolist() == [list(hashlib.sha256(ROOT + data).digest())]
    assert (len(made), made.length, made.blocks) == (5, 5, 1)
    assert made.tokens.tolist() == [1, 2, 3, 2**32 - 1, 258]


def test_the_second_block_depends_on_the_first():
    a, b = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([1, 2, 3, 9, 5, 6, 7, 8])
    assert not (a.digests == b.digests).all(axis=1).any()


def test_arrays_have_the_documented_shapes_and_are_read_only():
    made = chain(range(9))
    for array, shape, dtype in (
        (made.tokens, (9,), np.uint32),
        (made.digests, (2, 32), np.uint8),
        (made.fingerprints, (2, 2), np.uint64),
    ):
        assert (array.shape, array.dtype) == (shape, dtype)
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    empty = chain()
    assert empty.tokens.shape == (0,)
    assert empty.digests.shape == (0, 32)
    assert empty.fingerprints.shape == (0, 2)


@given(
    st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=11), max_size=8),
    st.integers(1, 5),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_in_parts_is_as_at_once(parts, block_tokens):
    grown = chain(block_tokens=block_tokens)
    for part in parts:
        grown.extend(part)
    at_once = chain(list(itertools.chain(*parts)), block_tokens=block_tokens)
    assert state(grown) == state(at_once)


def test_only_new_blocks_are_hashed():
    seen = []

    def hash_block(previous, tokens):
        seen.append((previous, tokens))
        return hashlib.sha256(previous + tokens).digest()

    made = chain(range(9), hash_block=hash_block)
    assert len(seen) == 2
    made.extend([9, 10])
    assert len(seen) == 2
    made.extend([11])
    assert len(seen) == 3
    assert seen[2] == (made.digests[1].tobytes(), made.tokens[8:].tobytes())


def test_views_stay_right_when_the_chain_grows():
    made = chain(range(8))
    tokens, digests = made.tokens, made.digests
    before = digests.copy()
    made.extend(range(1000))
    assert tokens.tolist() == list(range(8))
    assert np.array_equal(digests, before)
    assert np.array_equal(made.digests[:2], before)


def test_another_root_is_another_digest():
    a, b = chain(range(4)), chain(range(4), root=bytes(32))
    assert a.digests.tolist() != b.digests.tolist()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64])
def test_every_integer_dtype_is_the_same_tokens(dtype):
    assert state(chain(np.arange(8, dtype=dtype))) == state(chain(list(range(8))))
    assert state(chain(jnp.arange(8))) == state(chain(list(range(8))))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1.0, 2.0], r"tokens are float64 of shape \(2,\): .*chain.extend\("),
        (np.zeros((2, 2), np.int32), r"shape \(2, 2\): give one axis of integers"),
        (np.int32(3), r"shape \(\)"),
        ([True, False], "tokens are bool"),
        (["a"], "tokens are <U1"),
        ([3, -1], r"token -1 is not in 0..4294967295: .*chain.extend\("),
        ([2**32], "token 4294967296 is not in"),
        (np.array([2**32], np.uint64), "token 4294967296 is not in"),
    ],
)
def test_what_are_no_tokens_is_refused_and_the_chain_stays(tokens, message):
    made = chain(range(6))
    before = state(made)
    with pytest.raises(UserError, match=message):
        made.extend(tokens)
    assert state(made) == before


def test_tokens_outside_the_vocabulary_are_refused():
    made = chain([9], vocab_size=10)
    for dtype in (np.int64, np.uint32):
        with pytest.raises(UserError, match=r"token 10 is not in 0\.\.9"):
            made.extend(np.array([3, 10], dtype))
    assert made.length == 1


def test_a_hash_that_fails_leaves_the_chain_as_it_was():
    def hash_block(previous, tokens):
        if previous != ROOT:
            raise RuntimeError("broken")
        return bytes(32)

    made = chain(range(6), hash_block=hash_block)
    before = state(made)
    with pytest.raises(RuntimeError, match="broken"):
        made.extend(range(6))
    assert state(made) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"root": b"short"}, "root has 5 bytes, not 32"),
        ({"block_tokens": 0}, "block_tokens is 0"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
)
def test_chains_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        chain(**arguments)


def test_fingerprints_are_sums_modulo_two_to_the_64():
    """With one token changed by one, both sums change by that token's coefficients."""
    tokens = np.array([7, 2**32 - 1, 0, 5] * 2, np.uint32)
    base = chain(tokens, seed=1).fingerprints
    ones = chain(np.array([0, 0, 1, 0, 0, 0, 0, 0]), seed=1).fingerprints
    zeros = chain(np.zeros(8, np.int64), seed=1).fingerprints
    tokens[2] += 1
    after = chain(tokens, seed=1).fingerprints
    assert np.array_equal(after[0] - base[0], ones[0] - zeros[0])
    assert np.array_equal(after[1], base[1])


def test_fingerprints_differ_by_tokens_their_order_and_the_block_number():
    a = chain([1, 2, 3, 4, 1, 2, 3, 4, 2, 1, 3, 4, 1, 2, 3, 5]).fingerprints
    assert np.unique(a[:, 0]).size == np.unique(a[:, 1]).size == 4


def test_fingerprints_do_not_depend_on_the_root():
    assert np.array_equal(
        chain(range(8)).fingerprints, chain(range(8), root=bytes(32)).fingerprints
    )


def test_fingerprints_are_the_same_across_the_parts_they_are_computed_in():
    tokens = np.random.default_rng(0).integers(0, 2**32, 10_000, dtype=np.uint32)
    at_once, grown = chain(tokens, block_tokens=1), chain(block_tokens=1)
    for part in np.array_split(tokens, 7):
        grown.extend(part)
    assert np.array_equal(at_once.fingerprints, grown.fingerprints)


def test_fingerprints_are_a_secret_unless_seeded():
    assert np.array_equal(
        chain(range(8), seed=3).fingerprints, chain(range(8), seed=3).fingerprints
    )
    seeds = {chain(range(8), seed=seed).fingerprints.tobytes() for seed in (None, 0, 1)}
    assert len(seeds) == 3


@given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_common_prefix_is_counted_in_tokens(a, b):
    expected = sum(1 for _ in itertools.takewhile(lambda x: x[0] == x[1], zip(a, b, strict=False)))
    assert common_prefix(chain(a), chain(b)) == expected


def test_chains_of_different_roots_share_nothing():
    assert common_prefix(chain(range(8)), chain(range(8), root=bytes(32))) == 0
