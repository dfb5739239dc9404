r"""What became visible and what went, entry by entry: differences between looks at the books.

    allocator.on_touched --ids--> dirty     directory.on_publish --tokens--> kept while it is there
                                    |
    flush(), between turns:  columns of dirty ids now  -  what was told of them  =  changes

Looking at differences instead of at events, a reader of all changes has exactly what the directory
has: nothing can be told twice, in the wrong order or not at all, whatever path the bookkeeping
took. What comes and goes between two looks is not told. Where changes can't be taken yet they stay
dirty, so that memory is bounded by the number of entries. Tokens stay too, four bytes each: a block
that moves to another tier, or comes back from one, is told with them like a new one.

The thread that owns the engine calls everything here.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from hybridkv.blocks.entries import NONE, Entries, Form, Tier
from hybridkv.blocks.transitions import TierState
from hybridkv.engine.runner import Runner


class Told(NamedTuple):
    """One entry as it was told last. It stays so until it is gone everywhere."""

    form: Form
    generation: int
    digest: bytes
    """Chained, of the tokens up to it."""
    parent: bytes | None
    """Of a block, the digest of the block before it; None of a first one."""
    position: int
    """Tokens up to it."""
    kinds: int
    """Bitmap, see ``kind_bits``."""
    tiers: frozenset[Tier]
    """Where it is whole."""


class Stored(NamedTuple):
    """An entry can be used on a tier from now on."""

    entry: Told
    tier: Tier
    tokens: np.ndarray | None
    """uint32, of a block; None of a snapshot, and where nobody knows."""


class Removed(NamedTuple):
    """An entry can't be used on a tier any more."""

    entry: Told
    tier: Tier


@dataclasses.dataclass(frozen=True, eq=False)
class Cleared:
    """Everything is gone."""


Change = Stored | Removed | Cleared
_NOWHERE: frozenset[Tier] = frozenset()
_UNKNOWN: tuple[int, np.ndarray | None] = (-1, None)


class Changes:
    """Collects the changes of one runner's directory."""

    def __init__(self, runner: Runner) -> None:
        """Registers itself at the runner; what is published already is told by the first flush.

        Of such blocks the tokens are known as far as a store has them: make it before the first
        request.
        """
        self._runner = runner
        self._told: dict[int, Told] = {}
        """By entry."""
        self._cleared = False
        self._dirty: set[int] = set()
        self._tokens: dict[int, tuple[int, np.ndarray]] = {}
        """By entry: its generation, and its tokens until it is gone everywhere."""
        runner.on_reset.append(self._reset)
        self._attach()
        self._look_at_all()

    def _attach(self) -> None:
        self._runner.allocator.on_touched.append(self._touched)
        self._runner.directory.on_publish.append(self._published)

    def _reset(self) -> None:
        """The runner has new books: what was told is gone with the old ones."""
        self._cleared = self._cleared or bool(self._told)
        self._told, self._tokens = {}, {}
        self._dirty = set()
        self._attach()

    def forget(self) -> None:
        """As if nothing had been told yet: the next flush begins with ``Cleared``."""
        self._cleared, self._told = True, {}
        self._look_at_all()

    def close(self) -> None:
        """Looks no more."""
        runner = self._runner
        runner.on_reset.remove(self._reset)
        runner.allocator.on_touched.remove(self._touched)
        runner.directory.on_publish.remove(self._published)

    def _look_at_all(self) -> None:
        shown = np.flatnonzero(self._runner.allocator.entries.published)
        self._dirty |= set(shown.tolist())
        self._learn_from_store()

    def _touched(self, ids: np.ndarray) -> None:
        self._dirty.update(ids.tolist())

    def _published(self, first: int, tokens: np.ndarray, ids: np.ndarray) -> None:
        del first
        generations = self._runner.allocator.entries.generation[ids].tolist()
        rows = tokens.reshape(len(ids), -1).copy()  # not the whole prompt that they are a part of
        for entry, generation, row in zip(ids.tolist(), generations, rows, strict=True):
            self._tokens[entry] = (generation, row)

    def _learn_from_store(self) -> None:
        """Tokens of blocks that were adopted before this was made."""
        mover = self._runner.mover
        if mover is None or mover.store is None:
            return
        columns = self._runner.allocator.entries
        for stored in mover.store.extensions():
            inner = stored.extension
            if not len(inner.digests):
                continue
            ids = self._runner.directory.entry_of(inner.digests)
            rows = np.asarray(inner.tokens, np.uint32).reshape(len(inner.digests), -1)
            for entry, row in zip(ids.tolist(), rows, strict=True):
                if entry != NONE:
                    self._tokens[entry] = (int(columns.generation[entry]), row)

    @property
    def pending(self) -> bool:
        """Whether something may have changed since the last flush."""
        return bool(self._dirty) or self._cleared

    def flush(self) -> list[Change]:
        """What changed since the last one: first what went, children first; then what came,
        parents first.
        """
        if not self.pending:
            return []
        cleared: list[Change] = [Cleared()] if self._cleared else []
        ids = np.fromiter(self._dirty, np.int64, len(self._dirty))
        self._dirty, self._cleared = set(), False
        removed: list[Removed] = []
        stored: list[Stored] = []
        for entry, now in zip(ids.tolist(), look(self._runner.allocator.entries, ids), strict=True):
            self._compare(entry, now, removed, stored)
        removed.sort(key=lambda change: _depth(change.entry), reverse=True)
        stored.sort(key=lambda change: _depth(change.entry))
        return [*cleared, *removed, *stored]

    def _compare(
        self, entry: int, now: Told | None, removed: list[Removed], stored: list[Stored]
    ) -> None:
        before = self._told.get(entry)
        had = before.tiers if before is not None else _NOWHERE
        has = now.tiers if now is not None else _NOWHERE
        same = (
            before is not None
            and now is not None
            and (before.generation, before.digest) == (now.generation, now.digest)
        )
        if before is not None:
            gone = had - has if same else had
            removed += [Removed(before, tier) for tier in sorted(gone)]
        if now is None:
            self._told.pop(entry, None)
            self._tokens.pop(entry, None)
            return
        self._told[entry] = now
        generation, tokens = self._tokens.get(entry, _UNKNOWN)
        known = tokens if generation == now.generation else None
        new = has - had if same else has
        stored += [Stored(now, tier, known) for tier in sorted(new)]

    @property
    def told(self) -> dict[int, Told]:
        """What a reader of all changes has now, by entry."""
        return dict(self._told)


def _depth(entry: Told) -> tuple[int, int]:
    return entry.position, entry.form


_DIGEST = 32
_TIERS = [frozenset(tier for tier in Tier if mask >> tier & 1) for mask in range(1 << len(Tier))]
"""By bitmap."""
_FORMS = {int(form): form for form in Form}


def look(entries: Entries, ids: np.ndarray) -> list[Told | None]:
    """Some entries as they can be used now; None for those that can't."""
    present = entries.state[:, ids] == TierState.PRESENT
    masks = (present << np.arange(len(Tier))[:, None]).sum(axis=0) * entries.published[ids]
    parents = entries.parent[ids]
    linked = (entries.form[ids] == Form.BLOCK) & (parents != NONE)
    own, before = entries.digest[ids].tobytes(), entries.digest[parents].tobytes()
    columns = [masks, entries.form[ids], entries.generation[ids], linked]
    columns += [entries.position[ids], entries.kinds[ids]]
    return [
        Told(
            _FORMS[form],
            generation,
            own[at * _DIGEST : (at + 1) * _DIGEST],
            before[at * _DIGEST : (at + 1) * _DIGEST] if behind else None,
            position,
            kinds,
            _TIERS[mask],
        )
        if mask
        else None
        for at, (mask, form, generation, behind, position, kinds) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        )
    ]
