"""Allocator, directory and leases against a model that knows which prefixes are published.

Prompts are over two tokens with blocks of two, so that most of them share beginnings. The model
maps (namespace, tokens of a prefix) to the entry that holds its last block.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import NONE, EntryError, Form, Tier, kind_bits
from hybridkv.blocks.eviction import LeastRecentlyUsed
from hybridkv.blocks.invariants import check
from hybridkv.blocks.leases import StaleEntry
from hybridkv.blocks.pools import NoRoom, PoolSizes
from hybridkv.kinds import Kind
from hybridkv.prefixes.directory import NEVER_PUBLISHED, Directory, PublishError
from hybridkv.prefixes.identity import Identity

SIZE = 2
"""Tokens of a block."""
BLOCK_KINDS = kind_bits((Kind.COMPRESSED, Kind.INDEXER))
SNAPSHOT_KINDS = kind_bits((Kind.WINDOW, Kind.TAIL))
CAUSES = {Form.BLOCK: "evicted:compressed", Form.SNAPSHOT: "evicted:snapshot"}
WITHDRAWN = "layout"
prompts = st.tuples(
    st.sampled_from(("", "other")), st.lists(st.integers(0, 1), max_size=7).map(tuple)
)
pick = st.integers(0, 63)


class Model(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.allocator = Allocator(
            {Tier.DEVICE: PoolSizes(blocks=7, snapshots=2)},
            policy=LeastRecentlyUsed(),
            clock=self.tick,
        )
        self.directory = Directory(
            self.allocator,
            Identity(geometry="g", weights="w", layout="l", numerics="n"),
            block_tokens=SIZE,
            required_kinds=BLOCK_KINDS | SNAPSHOT_KINDS,
        )
        self.allocator.on_evict.append(self.evicted)
        self.blocks: dict[tuple, int] = {}
        """(namespace, *tokens) of a published prefix -> entry of its last block."""
        self.snapshots: dict[tuple, int] = {}
        self.lost: dict[Form, dict[tuple, str]] = {form: {} for form in Form}
        self.receipts: list = []
        """Of readers and of writers that are not done."""
        self.matches: list = []
        """Of earlier lookups."""
        self.chains: dict[tuple, object] = {}
        """Chains that live on, as sequences do."""

    def tick(self):
        self.now += 1.0
        return self.now

    def evicted(self, entries, tier, cause):
        for entry in entries.tolist():
            self.forget(entry, cause)

    def forget(self, entry, cause):
        form = Form(self.allocator.entries.form[entry])
        assert cause in (CAUSES[form], WITHDRAWN)
        names = self.blocks if form == Form.BLOCK else self.snapshots
        (name,) = [name for name, e in names.items() if e == entry]
        del names[name]
        self.lost[form][name] = cause

    # The model's view.

    def run(self, prompt):
        """Entries of the longest leading run of the prompt's blocks that is published."""
        found = []
        for name in prefixes(prompt):
            if name not in self.blocks:
                break
            found.append(self.blocks[name])
        return found

    def chain(self, prompt, old):
        """A chain of the prompt: a new one, or one that lives on and has grown."""
        namespace, tokens = prompt
        if not old:
            chain = self.directory.chain(namespace)
            chain.extend(np.asarray(tokens, np.int32))
            return chain
        name = max(
            (n for n in self.chains if n[0] == namespace and n[1:] == tokens[: len(n) - 1]),
            key=len,
            default=None,
        )
        chain = self.directory.chain(namespace) if name is None else self.chains.pop(name)
        chain.extend(np.asarray(tokens[chain.length :], np.int32))
        self.chains[(namespace, *tokens)] = chain
        return chain

    def take(self, blocks, snapshots=0):
        """A receipt of new whole entries, or None when there is no room now."""
        try:
            reservation = self.allocator.reserve(blocks=blocks, snapshots=snapshots)
        except NoRoom:
            return None
        form = Form.SNAPSHOT if snapshots else Form.BLOCK
        receipt = self.allocator.take(reservation, form, blocks + snapshots)
        self.allocator.cancel(reservation)
        return receipt

    # Rules.

    @initialize(some=st.lists(prompts, max_size=3), at=pick)
    def begin(self, some, at):
        for prompt in some:
            self.compute(prompt, True, at, False)

    @rule(prompt=prompts, old=st.booleans(), at=pick, keep=st.booleans())
    def compute(self, prompt, old, at, keep):
        """A request reads what there is, computes the rest, publishes it and a snapshot."""
        chain = self.chain(prompt, old)
        reader = self.find_and_lease(prompt, chain)
        known = reader.entries.tolist()
        writer = self.take(chain.blocks - len(known)) if chain.blocks > len(known) else None
        if writer is not None:
            self.allocator.commit(writer.entries, BLOCK_KINDS)
            self.publish(prompt, chain, len(known), writer)
        if self.run(prompt):
            self.publish_snapshot(prompt, chain, at)
        for receipt in (reader, writer):
            if receipt is not None and keep:
                self.receipts.append(receipt)
            elif receipt is not None:
                self.allocator.release(receipt)

    def find_and_lease(self, prompt, chain):
        match = self.directory.find(chain)
        assert match.entries.tolist() == self.run(prompt)
        self.matches.append(match)
        receipt = self.allocator.lease(match.entries, match.generations)
        self.allocator.touch(match.entries)
        return receipt

    def publish(self, prompt, chain, first, receipt):
        before = self.run(prompt)
        names = prefixes(prompt)[first : first + receipt.entries.size]
        stands = self.directory.publish(chain, first, receipt.entries).tolist()
        for name, entry, stood in zip(names, receipt.entries.tolist(), stands, strict=True):
            if name in self.blocks:
                assert stood == self.blocks[name]
            else:
                assert stood == entry
                self.blocks[name] = entry
        assert self.run(prompt)[: len(before)] == before

    def publish_snapshot(self, prompt, chain, at):
        end = at % len(self.run(prompt))
        name = prefixes(prompt)[end]
        receipt = self.take(0, 1)
        if receipt is None:
            return
        # Making room may have evicted the block itself.
        if name not in self.blocks:
            self.allocator.commit(receipt.entries, SNAPSHOT_KINDS)
            with pytest.raises(PublishError):
                self.directory.publish_snapshot(chain, (end + 1) * SIZE, int(receipt.entries[0]))
            self.allocator.release(receipt)
            return
        self.allocator.commit(receipt.entries, SNAPSHOT_KINDS)
        entry = int(receipt.entries[0])
        shown = self.directory.publish_snapshot(chain, (end + 1) * SIZE, entry)
        assert shown == (name not in self.snapshots)
        self.snapshots.setdefault(name, entry)
        self.allocator.release(receipt)

    @rule(prompt=prompts, when=st.integers(0, 2))
    def cancelled(self, prompt, when):
        """A request ends half way: its blocks are aborted, lack a kind, or are never filled."""
        chain = self.chain(prompt, False)
        receipt = self.take(chain.blocks) if chain.blocks else None
        if receipt is None:
            return
        if when == 0:
            self.allocator.abort(receipt.entries)
        elif when == 1:
            self.allocator.commit(receipt.entries, kind_bits((Kind.COMPRESSED,)))
        run = self.run(prompt)
        if len(run) < chain.blocks:
            with pytest.raises(PublishError):
                self.directory.publish(chain, 0, receipt.entries)
        else:
            assert self.directory.publish(chain, 0, receipt.entries).tolist() == run
        self.allocator.release(receipt)

    @rule(prompt=prompts)
    def two_writers(self, prompt):
        """Two requests compute the same blocks at once; the first to publish wins."""
        chain = self.chain(prompt, False)
        if not chain.blocks:
            return
        receipts = [r for r in (self.take(chain.blocks), self.take(chain.blocks)) if r is not None]
        for receipt in receipts:
            self.allocator.commit(receipt.entries, BLOCK_KINDS)
            self.publish(prompt, chain, 0, receipt)
        for receipt in receipts:
            self.allocator.release(receipt)

    @rule(prompt=prompts, old=st.booleans())
    def find(self, prompt, old):
        chain = self.chain(prompt, old)
        match = self.directory.find(chain)
        run = self.run(prompt)
        assert match.entries.tolist() == run
        assert match.collisions == 0
        names = prefixes(prompt)
        if len(run) == len(names):
            assert match.blame is None
        else:
            lost = self.lost[Form.BLOCK].get(names[len(run)], NEVER_PUBLISHED)
            assert match.blame == lost
        standing = [self.snapshots.get(name, NONE) for name in names[: len(run)]]
        assert self.directory.snapshot_at(match.entries).tolist() == standing
        for name, entry, digest in zip(names, standing, chain.digests, strict=False):
            if entry == NONE:
                assert self.directory.lost_cause(digest) == self.lost[Form.SNAPSHOT].get(name)
        self.matches.append(match)

    @precondition(lambda self: self.matches)
    @rule(at=pick)
    def lease_an_old_match(self, at):
        match = self.matches[at % len(self.matches)]
        columns = self.allocator.entries
        if (columns.generation[match.entries] != match.generations).any():
            with pytest.raises(StaleEntry):
                self.allocator.lease(match.entries, match.generations)
        elif not columns.state[:, match.entries].any(axis=0).all():
            with pytest.raises(EntryError):
                self.allocator.lease(match.entries, match.generations)
        else:
            self.receipts.append(self.allocator.lease(match.entries, match.generations))

    @precondition(lambda self: self.receipts)
    @rule(at=pick)
    def release(self, at):
        self.allocator.release(self.receipts.pop(at % len(self.receipts)))

    @rule(blocks=st.integers(0, 3), snapshots=st.integers(0, 1))
    def evict(self, blocks, snapshots):
        had = (len(self.blocks), len(self.snapshots))
        room = [self.allocator.evictable(form) for form in Form]
        if blocks > room[Form.BLOCK] or snapshots > room[Form.SNAPSHOT]:
            with pytest.raises(NoRoom):
                self.allocator.evict(blocks=blocks, snapshots=snapshots)
            assert had == (len(self.blocks), len(self.snapshots))
            return
        self.allocator.evict(blocks=blocks, snapshots=snapshots)
        assert len(self.blocks) == had[0] - blocks
        assert len(self.snapshots) <= had[1] - snapshots

    @precondition(lambda self: self.blocks)
    @rule(at=pick, all_of_it=st.booleans())
    def withdraw(self, at, all_of_it):
        """Withdraws a prefix with everything that stands on it, or only its last block."""
        name = sorted(self.blocks)[at % len(self.blocks)]
        over = [n for n in self.blocks if n[: len(name)] == name]
        snapshots = [n for n in self.snapshots if n[: len(name)] == name]
        if not all_of_it and len(over) + len(snapshots) > 1:
            with pytest.raises(EntryError):
                self.directory.withdraw(np.asarray([self.blocks[name]]), WITHDRAWN)
            return
        entries = [self.blocks[n] for n in over] + [self.snapshots[n] for n in snapshots]
        self.directory.withdraw(np.asarray(entries), WITHDRAWN)
        for n in snapshots:
            del self.snapshots[n]
            self.lost[Form.SNAPSHOT][n] = WITHDRAWN
        for n in over:
            del self.blocks[n]
            self.lost[Form.BLOCK][n] = WITHDRAWN

    @precondition(lambda self: self.blocks)
    @rule(really=st.integers(0, 3))
    def reset(self, really):
        if really:
            return
        self.allocator.reset()
        assert not self.blocks
        assert not self.snapshots
        self.receipts.clear()

    # After every rule.

    @invariant()
    def agrees(self):
        check(self.allocator)
        columns = self.allocator.entries
        assert len(self.directory) == len(self.blocks)
        shown = sorted([*self.blocks.values(), *self.snapshots.values()])
        assert np.flatnonzero(columns.published).tolist() == shown
        for name, entry in self.blocks.items():
            before = self.blocks.get(name[:-SIZE], NONE)
            assert len(name) == 1 + SIZE or before != NONE
            assert columns.parent[entry] == before
            assert columns.position[entry] == len(name) - 1
            assert columns.snapshot[entry] == self.snapshots.get(name, NONE)
        for name, entry in self.snapshots.items():
            assert columns.parent[entry] == self.blocks[name]
            assert columns.position[entry] == len(name) - 1
        held = sum(receipt.entries.size for receipt in self.receipts)
        assert int(columns.leases.sum()) == held
        assert not self.allocator.reservations.left


def prefixes(prompt):
    """Names of the complete blocks of a prompt."""
    namespace, tokens = prompt
    whole = len(tokens) // SIZE
    return [(namespace, *tokens[: (i + 1) * SIZE]) for i in range(whole)]


TestDirectoryAgainstAModel = Model.TestCase
TestDirectoryAgainstAModel.settings = settings(
    max_examples=2000,
    stateful_step_count=20,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
