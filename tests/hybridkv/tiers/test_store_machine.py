"""Random commits, removals, compactions and openings, against a model that is a tree of tuples."""

import pathlib
import tempfile

import numpy as np
import stores
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stores import BLOCK, extension, open_store

PATHS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
"""A prefix: the kind of each of its blocks. Few kinds, so that prefixes share beginnings."""


def ids(path: tuple[int, ...]) -> np.ndarray:
    return np.repeat(np.asarray(path, np.uint32), BLOCK)


def deepest_first(paths: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return sorted(paths, key=lambda path: (-len(path), path))


class StoreMachine(RuleBasedStateMachine):
    """What the store should hold is a set of prefixes that is closed under prefixes."""

    @initialize()
    def make(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name) / "store"
        self.store = open_store(self.path)
        self.reader = open_store(self.path, writable=False)
        self.blocks: set[tuple[int, ...]] = set()
        self.snapshots: set[tuple[int, ...]] = set()

    def digest(self, path):
        return extension(ids(path)).digest(len(path) - 1)

    @rule(path=PATHS, snapshots=st.sets(st.integers(1, 5), max_size=4), data=st.data())
    def commit(self, path, snapshots, data):
        known = max(n for n in range(len(path) + 1) if not n or path[:n] in self.blocks)
        first = data.draw(st.integers(0, known))
        at = sorted(n for n in snapshots if n <= len(path))
        what = extension(ids(path), first=first, snapshots=at)
        if not what.blocks and not at:
            return
        self.put(path, what, at)

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def commit_snapshots_alone(self, data):
        path = data.draw(st.sampled_from(deepest_first(self.blocks)))
        least, ends = min(2, len(path)), st.integers(1, len(path))
        at = sorted(data.draw(st.sets(ends, min_size=least, max_size=4)))
        self.put(path, extension(ids(path), first=len(path), snapshots=at), at)

    def put(self, path, what, at):
        stored = stores.commit(self.store, what)
        assert [self.store.find(what.digest(i)) for i in range(what.blocks)] == list(stored.blocks)
        self.blocks |= {path[:n] for n in range(1, len(path) + 1)} if what.blocks else set()
        self.snapshots |= {path[:n] for n in at}

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def remove_a_subtree(self, data):
        top = data.draw(st.sampled_from(sorted(self.blocks)))
        gone = {x for x in self.blocks if x[: len(top)] == top}
        bare = {x for x in self.snapshots if x in gone}
        self.store.remove(
            [self.store.find(self.digest(x)) for x in gone],
            [self.store.find_snapshot(self.digest(x)) for x in bare],
        )
        self.blocks -= gone
        self.snapshots -= bare

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def remove_a_snapshot(self, data):
        path = data.draw(st.sampled_from(deepest_first(self.snapshots)))
        self.store.remove([], [self.store.find_snapshot(self.digest(path))])
        self.snapshots.remove(path)

    @rule()
    def compact(self):
        self.store.compact()

    @rule()
    def open_again(self):
        self.store.close()
        self.store = open_store(self.path)
        assert self.store.problems == ()

    @invariant()
    def holds_exactly_what_it_should(self):
        if not hasattr(self, "store"):
            return
        want = {self.digest(x) for x in self.blocks}, {self.digest(x) for x in self.snapshots}
        assert stores.read(self.store) == want
        self.reader.refresh()
        assert stores.read(self.reader) == want
        assert self.store.bytes_used == self.reader.bytes_used
        seen = set()
        for stored in self.store.extensions():
            assert stored.extension.first == 0 or stored.extension.parent in seen
            seen |= {stored.extension.digest(i) for i in range(stored.extension.blocks)}

    def teardown(self):
        if hasattr(self, "store"):
            assert self.store.verify() == []
            self.store.close()
            self.folder.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=12,
    stateful_step_count=12,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
