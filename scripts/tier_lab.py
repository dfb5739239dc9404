r"""A runner with tiers for ``verify.py restore --tiers``: prompts stored, placed and restored.

    prompt --a policy's snapshots--> stored on all tiers --drain--> device | host | disk | mixed
                                                                       |
    cold run of a prompt that leaves it at a tile boundary  == ? ==  restored run of the same

Nothing that a cell computes is published, so that every cell finds what the policy left. One
thread, that of the runner.
"""

import contextlib
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import verify_restore
from verify_restore import DECODED, LONGEST, TILE, digest

from hybridkv.blocks.entries import NONE, Tier
from hybridkv.blocks.pools import PoolSizes
from hybridkv.blocks.transitions import TierState
from hybridkv.engine.guard import CompileGuard
from hybridkv.engine.runner import Runner
from hybridkv.engine.sequence import Sequence as Running
from hybridkv.errors import UserError
from hybridkv.prefixes.cost import CostModel
from hybridkv.prefixes.needs import replay_start
from hybridkv.prefixes.plan import Miss, Outcome, Plan, has_loads
from hybridkv.prefixes.policy import NEVER, SnapshotPolicy
from hybridkv.tiers.options import NOTHING, TierOptions
from hybridkv.tiers.tickets import RestoreState

LOADS_PAY = CostModel(tile_seconds=1000.0)
"""However slow this machine's disk is, a tile costs more: every plan reuses all it can."""
PATIENCE_S = 60.0
"""What is stored or loaded in a moment takes no longer."""
_WATCHED = (LONGEST - 10, TILE + 3)
"""Prompt lengths of the neighbours: one in the middle of its prompt, one that decodes."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Fork:
    """A prompt that leaves the stored one at a tile boundary."""

    position: int
    ids: np.ndarray
    after: np.ndarray
    """Tokens that are decoded after it."""
    tiles: tuple[str, ...]
    """Of a cold run: a digest of the logits of each tile."""
    decoded: str
    """Of a cold run: of the logits of the decoded tokens."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stored:
    """A prompt as a policy left it in a namespace of its own."""

    policy: str
    namespace: str
    ids: np.ndarray
    blocks: np.ndarray
    """Entry of each block."""
    snapshots: Mapping[int, int]
    """Entry by position."""

    @property
    def entries(self) -> np.ndarray:
        """Of blocks and snapshots."""
        snapshots = np.asarray(list(self.snapshots.values()), np.int32)
        return np.concatenate([self.blocks, snapshots])

    def tiers(self, layout: Sequence[Tier]) -> np.ndarray:
        """Where each of ``entries`` is meant to be: as many equal parts as the layout names."""
        count = len(self.blocks)
        size = len(self.ids) // count
        numbers = [*range(count), *(at // size - 1 for at in self.snapshots)]
        return np.asarray([layout[n * len(layout) // count] for n in numbers])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """What is restored, and beside what."""

    fork: int
    state: bool
    """Whether the snapshots are there; else their window and tail count as lost."""
    neighbours: bool


class Neighbours:
    """Sequences at work beside a restore; ``step`` until they have nothing left to do."""

    def __init__(self, runner: Runner) -> None:
        self._runner, rng = runner, np.random.default_rng(0)
        vocab = runner.model.vocab_size
        self.seen: tuple[list[str], list[str]] = ([], [])
        """Digests of logits: of the tiles of the one, of the tokens of the other."""
        self.prompt, self.decoding = (
            runner.start(
                rng.integers(0, vocab, length).astype(np.int32),
                max_new_tokens=2 * TILE,
                namespace="neighbours",
                policy=NEVER,
            )
            for length in _WATCHED
        )
        self._tokens = rng.integers(0, vocab, TILE).tolist()
        self._tile()
        runner.prefill(self.decoding)

    def step(self) -> bool:
        """A tile of the one and a token of the other; whether there was anything to do."""
        tiles, tokens = self.prompt.tokens_left, self.next_token()
        if tiles:
            self._tile()
        if tokens:
            self.decoded(self._runner.decode(tokens)[self.decoding])
        return bool(tiles or tokens)

    def next_token(self) -> dict[Running, int]:
        """What the one that decodes consumes next, if anything."""
        done = len(self.decoding.generated)
        return {self.decoding: self._tokens[done]} if done < len(self._tokens) else {}

    def decoded(self, row: np.ndarray) -> None:
        """Its logits."""
        self.seen[1].append(digest(row))

    def end(self) -> None:
        """Publishes nothing."""
        self._runner.release(self.prompt)
        self._runner.release(self.decoding)

    def as_alone(self, alone: "Neighbours") -> bool:
        """Whether every logit so far has the bits that it has alone."""
        pairs = zip(self.seen, alone.seen, strict=True)
        return all(seen == whole[: len(seen)] for seen, whole in pairs)

    def _tile(self) -> None:
        before = self.prompt.computed
        logits = np.asarray(self._runner.tile(self.prompt))[0]
        self.seen[0].append(digest(logits[: self.prompt.computed - before]))


class Lab:
    """One runner with tiers, and what prompts give in it cold and restored."""

    def __init__(
        self, model: str, tiers: Sequence[Tier], path: pathlib.Path, *, prompts: int, seed: int
    ) -> None:
        """Compiles.

        Args:
          model: ``deepseek_v4`` or ``llama``.
          tiers: that it has.
          path: of the store, where disk is one of them.
          prompts: that are stored at once, at most.
          seed: of the prompts.
        """
        count = 24 * (prompts + 4)
        places = PoolSizes(blocks=count, snapshots=count)
        options = TierOptions(
            host=places if Tier.HOST in tiers else NOTHING,
            disk=places if Tier.DISK in tiers else NOTHING,
            path=path if Tier.DISK in tiers else None,
        )
        self.runner = verify_restore.make_runner(model, tiers=options, cost=LOADS_PAY)
        self.model, self.rng = model, np.random.default_rng(seed)
        self.guard = CompileGuard(mode="count")
        self.guard.arm()
        self._namespaces = itertools.count()
        self._alone = Neighbours(self.runner)
        while self._alone.step():
            pass
        self._alone.end()

    def ids(self, length: int) -> np.ndarray:
        """A random prompt."""
        return self.rng.integers(0, self.runner.model.vocab_size, length).astype(np.int32)

    # What is stored.

    def store(self, ids: np.ndarray, name: str, policy: SnapshotPolicy) -> Stored:
        """Computes a prompt as a conversation would, with a fork on the way, and stores it."""
        namespace = f"{name} {next(self._namespaces)}"
        half = LONGEST // 2 // TILE * TILE
        first, fork = ids[: half + 5], np.concatenate([ids[: half - TILE], self.ids(TILE + 3)])
        for part in (first, fork, ids):
            sequence = self.runner.start(part, namespace=namespace, policy=policy)
            self.runner.prefill(sequence)
            self.runner.finish(sequence)
        mover = self.runner.mover
        assert mover is not None
        if not mover.flush(timeout_s=PATIENCE_S):
            raise UserError(f"a prompt was not stored in {PATIENCE_S:g} s: try a quieter machine")
        return self.find(ids, namespace, name)

    def find(self, ids: np.ndarray, namespace: str, policy: str) -> Stored:
        """What is published of a prompt."""
        runner, block = self.runner, self.runner.model.geometry.block_tokens
        run = runner.directory.find(runner.chain(ids, namespace=namespace)).entries
        standing = runner.directory.snapshot_at(run)
        snapshots = {
            (number + 1) * block: int(standing[number])
            for number in np.flatnonzero(standing != NONE).tolist()
        }
        return Stored(
            policy=policy, namespace=namespace, ids=ids, blocks=run.copy(), snapshots=snapshots
        )

    def withdraw(self, stored: Stored) -> None:
        """Makes room for the next one."""
        directory = self.runner.directory
        directory.withdraw(directory.above(stored.blocks[:1]), "policy")
        self.runner.turn()

    def place(self, stored: Stored, layout: Sequence[Tier]) -> bool:
        """Takes what is stored from every tier that is faster than the one it is meant to be on.

        Returns whether all of it is where it is meant to be: not where it was lost or never stored.
        """
        allocator, entries, wanted = self.runner.allocator, stored.entries, stored.tiers(layout)
        state = allocator.entries.state
        for tier in (Tier.DEVICE, Tier.HOST):
            here = entries[(wanted > tier) & (state[tier, entries] == TierState.PRESENT)]
            copies = (state[:, here] == TierState.PRESENT).sum(axis=0)
            if (copies > 1).any():
                allocator.drain(here[copies > 1], tier)
        return bool((self.where(entries) == wanted).all())

    def where(self, entries: np.ndarray) -> np.ndarray:
        """The fastest tier that has each entry whole."""
        present = self.runner.allocator.entries.state[:, entries] == TierState.PRESENT
        return np.where(present.any(axis=0), present.argmax(axis=0), NONE)

    # What a run gives.

    def fork(self, ids: np.ndarray, position: int) -> Fork:
        """A prompt that shares so many tokens with ``ids``, and its cold run."""
        new = np.concatenate([ids[:position], self.ids(int(self.rng.integers(3, TILE + 6)))])
        if position < len(ids):
            new[position] = (ids[position] + 1) % self.runner.model.vocab_size
        after = self.ids(DECODED)
        sequence = self.runner.start(
            new, max_new_tokens=DECODED + 1, namespace="cold", policy=NEVER
        )
        assert isinstance(sequence.plan, Miss)
        tiles, decoded = self._compute(sequence, after, None)
        return Fork(position=position, ids=new, after=after, tiles=tiles, decoded=decoded)

    def _compute(
        self, sequence: Running, after: np.ndarray, others: Neighbours | None
    ) -> tuple[tuple[str, ...], str]:
        """Digests of a seated sequence; publishes nothing of it."""
        tiles, rows = [], []
        while sequence.tokens_left:
            before = sequence.computed
            logits = np.asarray(self.runner.tile(sequence))[0]
            tiles.append(digest(logits[: sequence.computed - before]))
            if others is not None:
                others.step()
        for token in after.tolist():
            beside = others.next_token() if others is not None else {}
            found = self.runner.decode({sequence: token, **beside})
            rows.append(found[sequence])
            for other in beside:
                assert others is not None
                others.decoded(found[other])
        self.runner.release(sequence)
        return tuple(tiles), digest(np.stack(rows))

    def restore(
        self, stored: Stored, layout: Sequence[Tier], fork: Fork, cell: Cell
    ) -> dict[str, Any]:
        """One cell, with what is stored on these tiers."""
        if not self.place(stored, layout):
            return not_there(stored, fork, cell)
        runner, mover = self.runner, self.runner.mover
        assert mover is not None
        others = Neighbours(runner) if cell.neighbours else None
        with self._lost_state(stored, cell):
            ways = self._ways(stored, fork.position, cell)
            before = {tier: mover.counters.loaded[tier] for tier in Tier}
            chain = runner.chain(fork.ids, namespace=stored.namespace)
            room = len(fork.ids) + DECODED + 1
            plan, expected = self._bring(chain, room, stored.namespace, others, ways)
            loaded = {tier: mover.counters.loaded[tier] - before[tier] for tier in Tier}
            hold = runner.hold(chain, tokens=room, namespace=stored.namespace)
            sequence = runner.seat(hold, policy=NEVER)
        tiles, decoded = self._compute(sequence, fork.after, others)
        if others is not None:
            others.end()
        seated, exact = sequence.plan, sequence.exact_from
        tiles = tiles[(exact - sequence.start) // TILE :]
        planned = isinstance(plan, Plan) and not has_loads(seated) and loaded == expected
        copied = isinstance(seated, Plan) and seated.snapshot >= 0
        return {
            "policy": stored.policy,
            "position": fork.position,
            "copied": copied,
            "replayed": isinstance(seated, Plan) and not copied and seated.replayed > 0,
            "neighbours": cell.neighbours,
            "planned": planned and (sequence.start, exact) == start_of(plan),
            "equal": bool(tiles)
            and (tiles, decoded) == (fork.tiles[exact // TILE :], fork.decoded)
            and (others is None or others.as_alone(self._alone)),
            "compilations": self.guard.check(),
        }

    @contextlib.contextmanager
    def _lost_state(self, stored: Stored, cell: Cell) -> Iterator[None]:
        """Snapshots that hold no kind, where the cell wants it so."""
        kinds = self.runner.allocator.entries.kinds
        ids = np.asarray(list(stored.snapshots.values()), np.int32)
        before = kinds[ids].copy()
        kinds[ids] = before if cell.state else 0
        try:
            yield
        finally:
            kinds[ids] = before

    def _ways(self, stored: Stored, position: int, cell: Cell) -> dict[bool, tuple[int, int]]:
        """By whether a state is copied: start, and the position up to which blocks are needed, of
        the exact ways that compute the fewest tiles.
        """
        at = [p for p in stored.snapshots if p <= position] if cell.state else []
        replay = replay_start(self.runner.model.geometry, position, TILE)
        ways = {False: (replay, position)} | ({True: (max(at), max(at))} if at else {})
        best = max(start for start, _ in ways.values())
        return {copied: way for copied, way in ways.items() if way[0] == best}

    def _bring(
        self,
        chain: Any,
        room: int,
        namespace: str,
        others: Neighbours | None,
        ways: Mapping[bool, tuple[int, int]],
    ) -> tuple[Plan | Miss, dict[Tier, int] | None]:
        """Loads what the plan wants while others work.

        Returns the plan, and how many entries are to come from each tier: None where the plan is
        not one of ``ways``.
        """
        runner, mover = self.runner, self.runner.mover
        assert mover is not None
        hold = runner.hold(chain, tokens=room, namespace=namespace, loads=True)
        expected = self._expected(chain, hold.plan, ways)
        ticket = mover.begin(hold)
        end = time.monotonic() + PATIENCE_S
        while ticket is not None and ticket.state() is RestoreState.PENDING:
            moved = runner.turn()
            worked = others is not None and others.step()
            if time.monotonic() > end:
                break
            if not moved and not worked:
                time.sleep(1e-4)
        if ticket is not None:
            ticket.cancel()
        runner.drop(hold)
        return hold.plan, expected

    def _expected(
        self, chain: Any, plan: Plan | Miss, ways: Mapping[bool, tuple[int, int]]
    ) -> dict[Tier, int] | None:
        if not isinstance(plan, Plan):
            return None
        copied = plan.snapshot >= 0
        start, end = ways.get(copied, (-1, 0))
        if plan.start != start:
            return None
        if start == 0 and not len(plan.loads):
            end = min(end, plan.shared)  # a replay of everything needs none of it
        run = self.runner.directory.find(chain).entries
        needed = run[: end // self.runner.model.geometry.block_tokens]
        if copied:
            needed = np.append(needed, plan.snapshot)
        away = needed[self.where(needed) != Tier.DEVICE]
        outcome = Outcome.REUSE if plan.start == plan.shared else Outcome.REBUILD
        if plan.outcome is not (Outcome.LOAD_THEN_REUSE if away.size else outcome):
            return None
        if sorted(plan.loads.tolist()) != sorted(away.tolist()):
            return None
        return {tier: int((self.where(away) == tier).sum()) for tier in Tier}


def start_of(plan: Plan | Miss) -> tuple[int, int]:
    """First computed position, and the first with the bits of a cold run."""
    return (plan.start, plan.exact_from) if isinstance(plan, Plan) else (0, 0)


def not_there(stored: Stored, fork: Fork, cell: Cell) -> dict[str, Any]:
    """The row of a cell of which nothing could be restored."""
    return {
        "policy": stored.policy,
        "position": fork.position,
        "neighbours": cell.neighbours,
        "compilations": 0,
    } | dict.fromkeys(("copied", "replayed", "planned", "equal"), False)
