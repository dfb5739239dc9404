"""Prompts of a trace as the directory looks them up: hashes without the tokens behind them."""

import hashlib

import numpy as np
from jaxtyping import Int32

from hybridkv.prefixes.hashing import DIGEST_BYTES, TokenChain


class BlockHashes:
    """The digest and the fingerprint of every block of a trace.

    A trace's block number stands for all tokens up to its end, as a chained digest does, so that
    the digest of a block is one of its number.
    """

    def __init__(self, root: bytes, blocks: int) -> None:
        """Hashes ``blocks`` block numbers under ``root``, about a microsecond each."""
        parts = [hashlib.sha256(root + at.to_bytes(8, "little")).digest() for at in range(blocks)]
        self.root = root
        self.digests = np.frombuffer(b"".join(parts), np.uint8).reshape(blocks, DIGEST_BYTES)
        self.fingerprints = self.digests.view(np.uint64)[:, 2:].copy()


class BlockChain(TokenChain):
    """A prompt that is known by the numbers of its blocks alone; it has no tokens."""

    def __init__(
        self, hashes: BlockHashes, blocks: Int32[np.ndarray, " n"], *, tokens: int, block: int
    ) -> None:
        """A prompt of ``tokens`` tokens in these blocks, of ``block`` tokens but for the last."""
        super().__init__(hashes.root, block)
        self._length, self._blocks = tokens, tokens // block
        self._digests = hashes.digests[blocks]
        self._fingerprints = hashes.fingerprints[blocks]

    def complete(self) -> None:
        """The prompt's answer fills its last block."""
        self._blocks = len(self._digests)
        self._length = max(self._length, self._blocks * self.block_tokens)
