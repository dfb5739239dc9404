"""The directory: from the hash chain of a sequence to the entries that hold it.

    chain   [ block 0 ][ block 1 ][ block 2 ][ open )
    find        e7    <-  e2    <-  e0                 published, each the child of the one before
                           |
    snapshot_at            e9                          the sequence state at the end of block 1

Publishing makes entries visible that are whole; nothing else does. A block is published only behind
the block before it and withdrawn only after the blocks behind it, so what is published of a
sequence is always a leading run. Digests, fingerprints and positions are columns of the allocator's
entries; the table here only finds them.

Ownership: the thread of the allocator, whose eviction callback withdraws what is about to be lost.
"""

import dataclasses
import weakref
from collections.abc import Callable

import numpy as np
from jaxtyping import Bool, Int, Int32, UInt8, UInt32

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import (
    FORM_BITS,
    NONE,
    Entries,
    EntryError,
    Form,
    Tier,
    kinds_of,
)
from hybridkv.blocks.transitions import TierState
from hybridkv.prefixes.digest_table import DigestTable
from hybridkv.prefixes.ghosts import Ghosts
from hybridkv.prefixes.hashing import HashBlock, TokenChain, block_hashes, sha256_block
from hybridkv.prefixes.identity import Identity

NEVER_PUBLISHED = "never_published"


class PublishError(EntryError):
    """Entries or blocks that may not be published as they are."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Match:
    """What the directory has of a chain. Arrays are read-only; nothing is leased yet."""

    entries: Int32[np.ndarray, " run"]
    """The entry of each block of the longest leading run that is published."""
    generations: UInt32[np.ndarray, " run"]
    """Of those entries; lease with them, so that an entry taken again since is refused."""
    collisions: int
    """Blocks whose digest is another block's of the directory: their tokens differ."""
    blame: str | None
    """Why the run ends: None when it has every complete block, ``"never_published"``, or the cause
    for which the first missing block was withdrawn, such as ``"evicted:compressed"``."""


OnPublish = Callable[[int, UInt32[np.ndarray, " n_block_tokens"], Int32[np.ndarray, " n"]], None]
"""Told of blocks that just became visible, behind one another: the number of the first in its
sequence, their tokens (read-only), their entries. The callback changes nothing here."""

_FIRST = np.array([NONE], np.int32)
"""The parent of a first block."""
NOTHING = Match(
    entries=np.empty(0, np.int32), generations=np.empty(0, np.uint32), collisions=0, blame=None
)


class Directory:
    """Which blocks and snapshots are published, by digest."""

    def __init__(
        self,
        allocator: Allocator,
        identity: Identity,
        *,
        block_tokens: int,
        required_kinds: int,
        ghosts: int = 2**16,
        hash_block: HashBlock = sha256_block,
        seed: int | None = None,
    ) -> None:
        """An empty directory; registers itself at ``allocator.on_evict``.

        Args:
          allocator: whose entries are published; of no other directory.
          identity: whose bytes they are.
          block_tokens: tokens of one block.
          required_kinds: bitmap (``kind_bits``) of the kinds that an entry must hold to be
            published, blocks and snapshots together.
          ghosts: blocks, and as many snapshots, whose loss is remembered, with its cause.
          hash_block: as in ``TokenChain``; for tests.
          seed: as in ``TokenChain``; for tests.
        """
        kinds_of(required_kinds)
        self.allocator = allocator
        self.identity = identity
        self.block_tokens = block_tokens
        self.required_kinds = required_kinds
        self._hash_block, self._seed = hash_block, seed
        self._table = DigestTable(max(1, len(self.entries)), self.entries.digest)
        self._ghosts = {form: Ghosts(ghosts) for form in Form}
        self._found: weakref.WeakKeyDictionary[TokenChain, Match] = weakref.WeakKeyDictionary()
        """The last match of every chain that was made here."""
        self.on_publish: list[OnPublish] = []
        allocator.on_evict.append(self._evicted)

    def __len__(self) -> int:
        """Blocks that are published."""
        return len(self._table)

    @property
    def entries(self) -> Entries:
        """The allocator's columns."""
        return self.allocator.entries

    @property
    def nbytes(self) -> int:
        """Bytes of the table; the entries' columns count for themselves."""
        return self._table.nbytes

    def chain(self, namespace: str = "", vocab_size: int | None = None) -> TokenChain:
        """An empty chain of this identity; only such chains can be looked up or published here.

        Raises:
          UserError: see ``Identity.root`` and ``TokenChain``.
        """
        chain = TokenChain(
            self.identity.root(namespace),
            self.block_tokens,
            vocab_size=vocab_size,
            hash_block=self._hash_block,
            seed=self._seed,
        )
        self._found[chain] = NOTHING
        return chain

    def register(self, chain: TokenChain, namespace: str = "") -> None:
        """Lets a chain that was made elsewhere be looked up and published here.

        For whoever has hashes of blocks and no tokens, such as a replay of a trace.

        Raises:
          ValueError: it starts from another root, or has other blocks.
        """
        if chain.root != self.identity.root(namespace) or chain.block_tokens != self.block_tokens:
            raise ValueError(f"the chain is not of namespace {namespace!r} of this directory")
        self._found[chain] = NOTHING

    # Looking up.

    def find(self, chain: TokenChain) -> Match:
        """The longest leading run of the chain's complete blocks that is published.

        A block counts when its digest and its tokens' fingerprint agree and its parent is the entry
        of the block before. Kinds and snapshots are not looked at: that is the planner's part.
        Entries of the chain's last match that are still published in the same generation are
        trusted, so that a chain that grew by one block costs one comparison.

        Raises:
          ValueError: the chain was not made by this directory.
        """
        known = self._still_published(chain)
        ids = self._table.find(chain.digests[known.size :])
        more, collisions = self._compare(chain, known, ids)
        entries = np.concatenate([known, more])
        match = Match(
            entries=_read_only(entries),
            generations=_read_only(self.entries.generation.take(entries)),
            collisions=collisions,
            blame=self._why_ended(chain, entries.size, ids[more.size :]),
        )
        self._found[chain] = match
        return match

    def last_match(self, chain: TokenChain) -> Match:
        """What ``find`` last returned for a chain: right until something is published or withdrawn.

        Raises:
          ValueError: the chain was not made by this directory.
        """
        if chain not in self._found:
            raise ValueError("the chain is not this directory's: make it with directory.chain()")
        return self._found[chain]

    def snapshot_at(self, entries: Int[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
        """The published snapshot that stands at the end of each block, or -1."""
        return self.entries.snapshot[entries]

    def lost_cause(self, digest: bytes | UInt8[np.ndarray, " 32"]) -> str | None:
        """Why what was once published under this digest is gone; None when nothing is known to be.

        Of a block that is not published, the block's cause; of one that is, its snapshot's.
        """
        key = np.frombuffer(digest, np.uint8) if isinstance(digest, bytes) else digest
        block = int(self._table.find(key[None])[0])
        if block == NONE:
            return self._ghosts[Form.BLOCK].cause(key)
        if self.entries.snapshot[block] != NONE:
            return None
        return self._ghosts[Form.SNAPSHOT].cause(key)

    def _still_published(self, chain: TokenChain) -> Int32[np.ndarray, " run"]:
        """The leading run of the chain's last match that needs no comparison."""
        last = self._found.get(chain)
        if last is None:
            raise ValueError("the chain is not this directory's: make it with directory.chain()")
        same = self.entries.generation.take(last.entries) == last.generations
        same &= self.entries.published.take(last.entries)
        return last.entries[: _leading(same)]

    def _compare(
        self,
        chain: TokenChain,
        known: Int32[np.ndarray, " run"],
        ids: Int32[np.ndarray, " rest"],
    ) -> tuple[Int32[np.ndarray, " more"], int]:
        """How the run goes on after ``known``, and how many digests were other blocks'.

        ``ids`` is what the table has for the chain's other blocks.
        """
        there = ids != NONE
        # Where nothing is there, entry 0 is read in its place and masked.
        fingerprints = self.entries.fingerprint.take(ids, axis=0, mode="clip")
        differ = fingerprints ^ chain.fingerprints[known.size :]
        same = there & ((differ[:, 0] | differ[:, 1]) == 0)
        before = np.concatenate([known[-1:] if known.size else _FIRST, ids[:-1]])[: ids.size]
        right = same & (self.entries.parent.take(ids, mode="clip") == before)
        return ids[: _leading(right)], int(np.count_nonzero(there & ~same))

    def _why_ended(
        self, chain: TokenChain, run: int, rest: Int32[np.ndarray, " rest"]
    ) -> str | None:
        """The blame for the block after the run; ``rest`` is what the table has from it on."""
        if not rest.size:
            return None
        collided = rest[0] != NONE
        cause = None if collided else self._ghosts[Form.BLOCK].cause(chain.digests[run])
        return cause or NEVER_PUBLISHED

    # Publishing.

    def publish(
        self, chain: TokenChain, first: int, entries: Int[np.ndarray, " n"]
    ) -> Int32[np.ndarray, " n"]:
        """Makes blocks ``first`` to ``first + n`` of the chain visible, as ``entries``.

        Returns the entry that stands for each block: the old one where the directory has the block
        already (the new one stays unpublished), else the new one. From a digest that collides with
        another block's on, it is -1: nothing stands for them.

        Raises:
          PublishError: the chain has no such complete blocks; the block before them is not
            published; an entry to publish stands twice, is published already, or is no block that
            is PRESENT on the device with every required kind. Nothing is published.
          ValueError: the chain was not made by this directory.
        """
        ids = _as_ids(entries)
        if not 0 <= first <= first + ids.size <= chain.blocks:
            raise PublishError(
                f"blocks {first} to {first + ids.size} of a chain of {chain.blocks} complete blocks"
            )
        run = self.find(chain).entries
        if run.size < first:
            raise PublishError(
                f"publish from block {run.size} on: it is not published, got {first}"
            )
        old = run[first : first + ids.size]
        new = ids[old.size :]
        if not new.size:
            return old.copy()
        self._require_whole(new, Form.BLOCK)
        at = first + old.size
        before = run[at - 1 : at] if at else _FIRST
        new = new[: self._enter(chain, at, new)]
        self.allocator.attach(new, np.concatenate([before, new[:-1]])[: new.size])
        size = self.block_tokens
        for tell in self.on_publish:
            tell(at, chain.tokens[at * size : (at + new.size) * size], new)
        nothing = np.full(ids.size - old.size - new.size, NONE, np.int32)
        return np.concatenate([old, new, nothing])

    def publish_snapshot(self, chain: TokenChain, position: int, entry: int) -> bool:
        """Makes a snapshot visible at ``position`` tokens, the end of a published block.

        Returns whether ``entry`` is what stands there now: False when the block has another
        snapshot, and ``entry`` stays unpublished.

        Raises:
          PublishError: no published block ends there, or the entry is not an unpublished snapshot,
            whole on the device, with every required kind.
          ValueError: the chain was not made by this directory.
        """
        return bool(self.publish_snapshots(chain, np.array([position]), np.array([entry]))[0])

    def publish_snapshots(
        self, chain: TokenChain, positions: Int[np.ndarray, " n"], entries: Int[np.ndarray, " n"]
    ) -> Bool[np.ndarray, " n"]:
        """Makes a snapshot visible at each of some distinct positions; see ``publish_snapshot``.

        Returns whether each entry is what stands there now.

        Raises:
          PublishError: as ``publish_snapshot``; none is published.
          ValueError: the chain was not made by this directory.
        """
        ids, run = _as_ids(entries), self.find(chain).entries
        at = np.asarray(positions, np.int64)
        blocks = at // self.block_tokens
        wrong = (at % self.block_tokens != 0) | (blocks < 1) | (blocks > run.size)
        if wrong.any():
            raise PublishError(
                f"no published block of the chain ends at {at[wrong][0]}: it has {run.size} "
                f"published blocks of {self.block_tokens} tokens"
            )
        under = run[blocks - 1]
        standing = self.entries.snapshot[under]
        free = standing == NONE
        new, below = ids[free], under[free]
        if new.size:
            self._require_whole(new, Form.SNAPSHOT)
            self.entries.digest[new] = self.entries.digest[below]
            self.entries.position[new] = at[free]
            self.allocator.attach_snapshots(new, below)
        return free | (standing == ids)

    def adopt(
        self,
        previous: bytes,
        first: int,
        tokens: UInt32[np.ndarray, " n_block_tokens"],
        entries: Int[np.ndarray, " n"],
    ) -> None:
        """Makes blocks visible whose bytes are whole on another tier than the device.

        Args:
          previous: chained digest of the block before the first of them, or a root.
          first: number of the first of them in its sequence.
          tokens: of these blocks.
          entries: committed blocks, of which the directory has none under their digests.

        Raises:
          PublishError: the block before them is not published, or one of these digests is.
        """
        ids, parent = _as_ids(entries), NONE
        if first:
            parent = int(self.entry_of(np.frombuffer(previous, np.uint8)[None])[0])
            if parent == NONE or int(self.entries.position[parent]) != first * self.block_tokens:
                raise PublishError(f"no published block ends at {first * self.block_tokens}")
        digests, fingerprints = block_hashes(
            previous, first, tokens, self.block_tokens, hash_block=self._hash_block, seed=self._seed
        )
        if (self.entry_of(digests) != NONE).any():
            raise PublishError("one of these blocks is published already: copy it instead")
        self._require_whole(ids, Form.BLOCK, anywhere=True)
        columns, end = self.entries, first + ids.size
        columns.digest[ids], columns.fingerprint[ids] = digests, fingerprints
        columns.position[ids] = np.arange(first + 1, end + 1) * self.block_tokens
        self._table.insert(ids)
        self.allocator.attach(ids, np.concatenate([[parent], ids[:-1]]).astype(np.int32))
        for tell in self.on_publish:
            tell(first, tokens, ids)

    def adopt_snapshot(self, block: int, entry: int) -> None:
        """Makes a snapshot visible that is whole on another tier, at a published block's end."""
        self._require_whole(np.array([entry], np.int32), Form.SNAPSHOT, anywhere=True)
        self.entries.digest[entry] = self.entries.digest[block]
        self.entries.position[entry] = self.entries.position[block]
        self.allocator.attach_snapshot(entry, block)

    def entry_of(self, digests: UInt8[np.ndarray, "n 32"]) -> Int32[np.ndarray, " n"]:
        """The published block under each digest, or -1. Tokens are not compared."""
        return self._table.find(np.ascontiguousarray(digests))

    def above(self, entries: Int[np.ndarray, " n"]) -> Int32[np.ndarray, " m"]:
        """These published entries and all that stands on them: what goes when they do."""
        columns = self.entries
        shown = np.flatnonzero(columns.published)
        order = shown[np.argsort(columns.parent[shown], kind="stable")]
        parents = columns.parent[order]
        found, front = [], np.unique(_as_ids(entries))
        while front.size:
            found.append(front)
            starts, ends = (np.searchsorted(parents, front, side) for side in ("left", "right"))
            front = np.concatenate([order[a:b] for a, b in zip(starts, ends, strict=True)])
        return np.unique(np.concatenate([*found, np.empty(0, np.int32)])).astype(np.int32)

    def withdraw(self, entries: Int[np.ndarray, " n"], cause: str) -> None:
        """Takes published entries out of sight and remembers the cause; leases stay valid.

        Raises:
          EntryError: one is not published, or something that stands on it would stay.
        """
        ids = _as_ids(entries)
        # Frees what nobody leases; its columns keep their values until the ids are taken again.
        self.allocator.detach(ids)
        self._forget(ids, cause)
        # An entry that is still leased may be published again in the same generation.
        for chain in list(self._found):
            self._found[chain] = NOTHING

    def _evicted(self, entries: Int32[np.ndarray, " n"], tier: Tier, cause: str) -> None:
        del tier  # only entries that are lost on every tier are announced
        self._forget(entries, cause)

    def _forget(self, ids: Int32[np.ndarray, " n"], cause: str) -> None:
        forms = self.entries.form[ids]
        for form in Form:
            of_form = ids[forms == form]
            self._ghosts[form].note(self.entries.digest[of_form], cause)
            if form == Form.BLOCK:
                self._table.remove(of_form)

    def _enter(self, chain: TokenChain, first: int, ids: Int32[np.ndarray, " n"]) -> int:
        """Writes the blocks' columns and enters them in the table; how many, up to a collision."""
        columns, end = self.entries, first + ids.size
        columns.digest[ids] = chain.digests[first:end]
        columns.fingerprint[ids] = chain.fingerprints[first:end]
        columns.position[ids] = np.arange(first + 1, end + 1) * self.block_tokens
        entered = self._table.insert(ids)
        run = _leading(entered)
        if run < ids.size:
            self._table.remove(ids[run:][entered[run:]])
        return run

    def _require_whole(
        self, ids: Int32[np.ndarray, " n"], form: Form, *, anywhere: bool = False
    ) -> None:
        """Checks that entries may be published, so that nothing fails half way."""
        if not 0 <= ids.min() <= ids.max() < len(self.entries):
            raise PublishError(f"entries must be in 0..{len(self.entries) - 1}, got {ids}")
        if np.unique(ids).size != ids.size:
            raise PublishError("an entry stands twice among those to publish")
        columns, kinds = self.entries, self.required_kinds & FORM_BITS[form]
        _require(columns.form[ids] == form, ids, f"is no {form.name.lower()}")
        states = columns.state[:, ids] if anywhere else columns.state[[Tier.DEVICE]][:, ids]
        where = "anywhere" if anywhere else "on the device"
        whole = (states == TierState.PRESENT).any(axis=0)
        _require(whole, ids, f"is not PRESENT {where}: commit it first")
        names = ", ".join(kind.name for kind in kinds_of(kinds))
        _require(columns.kinds[ids] & kinds == kinds, ids, f"lacks a required kind of {names}")
        _require(~columns.published[ids], ids, "is published already, as something else")


def _as_ids(entries: Int[np.ndarray, " n"]) -> Int32[np.ndarray, " n"]:
    ids = np.asarray(entries)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise PublishError(f"entries are {ids.dtype} of shape {ids.shape}: give one axis of ids")
    return ids.astype(np.int32, copy=False)


def _require(right: Bool[np.ndarray, " n"], ids: Int32[np.ndarray, " n"], wrong: str) -> None:
    if not right.all():
        raise PublishError(f"entry {ids[~right][0]} {wrong}")


def _leading(flags: Bool[np.ndarray, " n"]) -> int:
    """How many are true before the first that is not."""
    return flags.size if flags.all() else int(flags.argmin())


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
