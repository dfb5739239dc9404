"""Token chains: the tokens of one sequence and what its complete blocks are found by.

    tokens        [ block 0 ][ block 1 ][ open block )
    digests  root -> SHA-256 -> SHA-256                  say which prefix ends here
    fingerprints      f(0)       f(1)                    stand for the block's tokens on a hit

A chain belongs to one thread. It only ever grows, so views of it that were handed out stay right.
"""

import functools
import hashlib
import secrets
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import UInt8, UInt32, UInt64

from hybridkv.errors import UserError

DIGEST_BYTES = 32
HashBlock = Callable[[bytes, bytes], bytes]
"""(digest of the block before, little-endian uint32 tokens of the block) -> digest, 32 bytes."""

_LARGEST = 2**32 - 1
_SECRET = secrets.token_bytes(32)
_FINGERPRINTED_AT_ONCE = 4096
"""Blocks whose tokens are widened to 64 bits at a time: bounds the scratch memory."""


def sha256_block(previous: bytes, tokens: bytes) -> bytes:
    """SHA-256 over both: the chained digest of one block."""
    return hashlib.sha256(previous + tokens).digest()


def as_tokens(tokens: Any, vocab_size: int | None = None) -> UInt32[np.ndarray, " n"]:
    """Token ids as uint32; a view where they already are.

    Raises:
      UserError: not one axis of integers from 0 to 2**32 - 1, or one outside the vocabulary.
    """
    array = np.asarray(tokens)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.uint32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise UserError(
            f"tokens are {array.dtype} of shape {array.shape}: give one axis of integers, as in "
            "chain.extend(np.asarray([17, 4], np.int32))"
        )
    if array.dtype != np.uint32 or vocab_size is not None:
        least, most = int(array.min()), int(array.max())
        limit = _LARGEST if vocab_size is None else vocab_size - 1
        if least < 0 or most > limit:
            raise UserError(
                f"token {least if least < 0 else most} is not in 0..{limit}: give ids of the "
                "model's own tokenizer, without padding, as in chain.extend(ids[:length])"
            )
    return array.astype(np.uint32, copy=False)


class TokenChain:
    """The tokens of one sequence with the digests and fingerprints of its complete blocks."""

    def __init__(
        self,
        root: bytes,
        block_tokens: int,
        *,
        vocab_size: int | None = None,
        hash_block: HashBlock = sha256_block,
        seed: int | None = None,
    ) -> None:
        """Starts an empty chain.

        Args:
          root: 32 bytes; ``Identity.root``.
          block_tokens: tokens of one block, at least 1.
          vocab_size: refuses token ids from here on; None accepts all of uint32.
          hash_block: digest of a block; another one is for tests, which force collisions with it.
          seed: of the fingerprints' coefficients; None, the default, is the secret of this process.
        """
        if len(root) != DIGEST_BYTES:
            raise UserError(f"root has {len(root)} bytes, not 32: give Identity.root(namespace)")
        if block_tokens < 1:
            raise UserError(f"block_tokens is {block_tokens}: give Geometry.block_tokens")
        if vocab_size is not None and not 1 <= vocab_size <= _LARGEST + 1:
            raise UserError(f"vocab_size is {vocab_size}: give 1..2**32, or None to check nothing")
        self.root = bytes(root)
        self.block_tokens = block_tokens
        self.vocab_size = vocab_size
        self._hash_block = hash_block
        self._seed = seed
        self._length = 0
        self._blocks = 0
        self._last = self.root
        self._tokens = np.empty(0, np.uint32)
        self._digests = np.empty((0, DIGEST_BYTES), np.uint8)
        self._fingerprints = np.empty((0, 2), np.uint64)

    def __len__(self) -> int:
        return self._length

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self._length

    @property
    def blocks(self) -> int:
        """Complete blocks so far."""
        return self._blocks

    @property
    def tokens(self) -> UInt32[np.ndarray, " length"]:
        """All tokens; read-only."""
        return _view(self._tokens, self._length)

    @property
    def digests(self) -> UInt8[np.ndarray, "blocks 32"]:
        """Chained digests of the complete blocks; read-only."""
        return _view(self._digests, self._blocks)

    @property
    def fingerprints(self) -> UInt64[np.ndarray, "blocks 2"]:
        """Two sums modulo 2**64 over each block's tokens and number; read-only.

        The coefficients are a secret of the process, so blocks of other tokens or another
        number agree in both sums with probability at most 2**-66, even for someone who can make
        digests collide. Of no meaning in another process.
        """
        return _view(self._fingerprints, self._blocks)

    def extend(self, tokens: Any) -> None:
        """Appends tokens (one axis of integers); hashes only the blocks that become complete.

        Raises:
          UserError: see ``as_tokens``; the chain stays as it was.
        """
        new = as_tokens(tokens, self.vocab_size)
        length = self._length + new.size
        self._tokens = _grown(self._tokens, self._length, length)
        self._tokens[self._length : length] = new
        blocks = length // self.block_tokens
        # Lengths last: a hash that raises leaves the chain as it was.
        if blocks > self._blocks:
            self._complete(self._blocks, blocks)
        self._length, self._blocks = length, blocks

    def _complete(self, first: int, end: int) -> None:
        """Digests and fingerprints of blocks ``first`` to ``end``, whose tokens are there."""
        size = self.block_tokens
        self._digests = _grown(self._digests, first, end)
        self._fingerprints = _grown(self._fingerprints, first, end)
        self._digests[first:end], self._fingerprints[first:end] = block_hashes(
            self._last,
            first,
            self._tokens[first * size : end * size],
            size,
            hash_block=self._hash_block,
            seed=self._seed,
        )
        self._last = self._digests[end - 1].tobytes()


def block_hashes(
    previous: bytes,
    first: int,
    tokens: UInt32[np.ndarray, " n_block_tokens"],
    block_tokens: int,
    *,
    hash_block: HashBlock = sha256_block,
    seed: int | None = None,
) -> tuple[UInt8[np.ndarray, "n 32"], UInt64[np.ndarray, "n 2"]]:
    """Chained digests and fingerprints of blocks ``first`` on; see ``TokenChain``.

    Args:
      previous: digest of the block before them, or the root.
      first: number of the first of them.
      tokens: of these blocks, whole ones.
      block_tokens: tokens of a block.
      hash_block: as in ``TokenChain``.
      seed: as in ``TokenChain``.
    """
    count = tokens.size // block_tokens
    data, stride = tokens.astype("<u4", copy=False).tobytes(), 4 * block_tokens
    digests = []
    for start in range(0, count * stride, stride):
        previous = hash_block(previous, data[start : start + stride])
        digests.append(previous)
    joined = np.frombuffer(b"".join(digests), np.uint8).reshape(count, DIGEST_BYTES)
    coefficients = _coefficients(block_tokens, seed)
    fingerprints = np.empty((count, 2), np.uint64)
    for start in range(0, count, _FINGERPRINTED_AT_ONCE):
        stop = min(start + _FINGERPRINTED_AT_ONCE, count)
        part = tokens[start * block_tokens : stop * block_tokens].reshape(-1, block_tokens)
        fingerprints[start:stop] = _fingerprints(coefficients, first + start, part)
    return joined, fingerprints


def common_prefix(a: TokenChain, b: TokenChain) -> int:
    """Tokens that both chains start with; 0 when their roots differ, as nothing is shared then."""
    return equal_tokens(a.tokens, b.tokens) if a.root == b.root else 0


def equal_tokens(a: UInt32[np.ndarray, " n"], b: UInt32[np.ndarray, " m"]) -> int:
    """Length of the longest common prefix of two token arrays."""
    n = min(a.size, b.size)
    differ = a[:n] != b[:n]
    at = int(differ.argmax()) if n else 0
    return at if n and differ[at] else n


@functools.cache
def _coefficients(block_tokens: int, seed: int | None) -> UInt64[np.ndarray, "2 terms"]:
    """For both sums, one coefficient a token and one for the block's number.

    Drawn from the secret by a hash, so that a race to fill the cache can't make two of them.
    """
    secret = _SECRET if seed is None else str(seed).encode()
    terms = block_tokens + 1
    drawn = hashlib.shake_256(secret + b"/%d" % block_tokens).digest(8 * 2 * terms)
    return np.frombuffer(drawn, np.uint64).reshape(2, terms)


def _fingerprints(
    coefficients: UInt64[np.ndarray, "2 terms"],
    first: int,
    tokens: UInt32[np.ndarray, "blocks block_tokens"],
) -> UInt64[np.ndarray, "blocks 2"]:
    """Multilinear hashing (Lemire and Kaser, 2014, section 2): sums wrap modulo 2**64."""
    count, size = tokens.shape
    sums = np.einsum("bt,st->bs", tokens.astype(np.uint64), coefficients[:, :size])
    numbers = np.arange(first, first + count, dtype=np.uint64)
    return sums + numbers[:, None] * coefficients[None, :, size]


def _grown(array: np.ndarray, used: int, needed: int) -> np.ndarray:
    """The array, or a larger copy (at least twice as large) with room for ``needed`` rows."""
    if needed <= len(array):
        return array
    larger = np.empty((max(needed, 2 * len(array)), *array.shape[1:]), array.dtype)
    larger[:used] = array[:used]
    return larger


def _view(array: np.ndarray, count: int) -> np.ndarray:
    view = array[:count]
    view.flags.writeable = False
    return view
