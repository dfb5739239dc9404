"""The predicate: what of a prompt may be reused, from where to compute, and why not more.

    match (blocks found) --> block granularity --> kernel interface --> intersection --> plan

Nothing else in the library decides this; the engine, the tiers and the tests call ``plan_prefix``.
Planning reads the bookkeeping and changes nothing; the caller leases what the plan names before it
does anything else.

    0 ........ start .................. shared .................. tokens
      reused   |  replayed: recomputed  |  computed, rows written
               |  against stored rows   |
               +-- state: from a snapshot, or from nothing (replay over the dependency cone)
"""

import dataclasses
import enum
from collections.abc import Mapping

import numpy as np

from hybridkv.arithmetic import cdiv, round_down
from hybridkv.blocks.entries import Entries, Tier, kind_bits
from hybridkv.blocks.transitions import TierState
from hybridkv.geometry import Geometry
from hybridkv.kinds import Kind
from hybridkv.prefixes.checks import (
    Conditions,
    Intersection,
    block_granularity,
    intersection,
    kernel_interface,
)
from hybridkv.prefixes.cost import BY_TILES, CostModel
from hybridkv.prefixes.directory import Directory, Match
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.losses import Cause, Loss, Step, blame
from hybridkv.prefixes.needs import block_kinds, replay_start, snapshot_kinds

NO_ENTRIES = np.empty(0, np.int32)
NO_GENERATIONS = np.empty(0, np.uint32)


class Outcome(enum.Enum):
    """What a request will do."""

    REUSE = "reuse"
    LOAD_THEN_REUSE = "load, then reuse"
    REBUILD = "rebuild"
    COLD = "cold"


class Action(enum.Enum):
    """How a kind gets to where decoding needs it."""

    READY = "ready"
    COPY = "copy"
    LOAD = "load"
    REPLAY = "replay"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What the planner is told about the engine. All but ``tile`` only choose among exact ways."""

    tile: int
    """Tokens of a tile."""
    snapshot_bytes: int = 0
    """Bytes that reading a snapshot copies."""
    cost: CostModel = BY_TILES
    replay: bool = True
    """Whether the sequence state may be rebuilt by recomputation."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """How to begin one prompt. Everything from ``start`` on is computed."""

    outcome: Outcome
    tokens: int
    """Length of the prompt."""
    start: int
    """First computed position: a tile boundary. Tokens before it are reused."""
    shared: int
    """Blocks before it are shared; their rows are read and never written."""
    entries: np.ndarray
    """int32: the shared blocks' entries, in order."""
    generations: np.ndarray
    """uint32, of ``entries``: the lease must find the same ones."""
    snapshot: int
    """Entry of the snapshot at ``start``, -1 for none."""
    snapshot_generation: int
    needs: Mapping[Kind, Action]
    """How each kind of this model is restored."""
    seconds: float
    """Expected until the prompt's last token is computed."""
    ideal: int | None
    """Tokens of the longest common prefix with anything ever computed in the namespace, at most
    ``tokens - 1``; None where no ledger is kept."""
    losses: tuple[Loss, ...]
    """Ideal minus reused, by cause."""

    @property
    def reused(self) -> int:
        """Tokens that are not computed."""
        return self.start

    @property
    def replayed(self) -> int:
        """Tokens that are recomputed although their rows are stored."""
        return max(self.shared - self.start, 0)

    @property
    def known_from(self) -> int:
        """First position whose window rows exist at the start; see ``TileBatch.known_from``."""
        return self.start if self.snapshot < 0 and Action.REPLAY in self.needs.values() else 0

    @property
    def exact_from(self) -> int:
        """First position at which the sequence state is that of a cold run, as logits are from
        there on: a replay gets there only at its end, and nothing may be kept of what is between.
        """
        return self.shared if self.known_from else self.start

    def explain(self) -> str:
        """One line."""
        how = f"reuse {self.start} of {self.tokens} tokens"
        if self.snapshot >= 0:
            how += f", copy the snapshot at {self.start}"
        if self.replayed:
            how += f", replay {self.replayed} tokens up to {self.shared}"
        return how + _reasons(self.ideal, self.losses)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Miss:
    """Nothing can be reused; the prompt is computed from its first token."""

    tokens: int
    reason: str
    kind: Kind | None
    """The kind to blame, where one is."""
    seconds: float
    ideal: int | None
    losses: tuple[Loss, ...]
    outcome: Outcome = Outcome.COLD

    def explain(self) -> str:
        """One line."""
        return f"compute all {self.tokens} tokens: {self.reason}" + _reasons(
            self.ideal, self.losses
        )


def _reasons(ideal: int | None, losses: tuple[Loss, ...]) -> str:
    if ideal is None or not losses:
        return ""
    return f" (ideal {ideal}; lost {', '.join(str(loss) for loss in losses)})"


def plan_prefix(
    directory: Directory,
    chain: TokenChain,
    geometry: Geometry,
    options: PlanOptions,
    *,
    identity: Identity | None = None,
    ideal: int | None = None,
) -> Plan | Miss:
    """Decides what of a prompt is reused, in one place.

    Args:
      directory: what is published.
      chain: the prompt's tokens with their hashes, made by ``directory.chain``.
      geometry: of the model.
      options: tile, costs, and which ways are open.
      identity: who asks; without it the directory's own owner. A foreign one is a miss.
      ideal: from the ledger, at most ``chain.length - 1``.

    Returns:
      A plan, or a miss with its reason and the kind to blame.
    """
    foreign = kernel_interface(directory.identity, identity or directory.identity)
    if foreign:
        return _foreign(chain.length, foreign, options, ideal)
    match = directory.find(chain)
    search = _Search(directory, chain, match, geometry, options)
    found = intersection(search.conditions)
    if not found.shared:
        return _miss(search, match, ideal)
    return _plan(search, match, found, ideal)


def reuse_is_off(tokens: int, options: PlanOptions, ideal: int | None) -> Miss:
    """The answer where nothing is ever published."""
    return Miss(
        tokens=tokens,
        reason="reuse is off",
        kind=None,
        seconds=options.cost.compute(start=0, tokens=tokens, tile=options.tile),
        ideal=ideal,
        losses=blame(ideal or 0, (Step(position=0, cause=Cause.POLICY),)),
    )


def _foreign(tokens: int, parts: tuple[str, ...], options: PlanOptions, ideal: int | None) -> Miss:
    """Bytes of another geometry, weights, layout or numerics are never read."""
    cause = Cause.NUMERICS if parts == ("numerics",) else Cause.LAYOUT
    return Miss(
        tokens=tokens,
        reason=f"stored under another identity ({', '.join(parts)} differ)",
        kind=None,
        seconds=options.cost.compute(start=0, tokens=tokens, tile=options.tile),
        ideal=ideal,
        losses=blame(ideal or 0, (Step(position=0, cause=cause),)),
    )


class _Search:
    """The conditions of one prompt, and what is behind them."""

    def __init__(
        self,
        directory: Directory,
        chain: TokenChain,
        match: Match,
        geometry: Geometry,
        options: PlanOptions,
    ) -> None:
        self.directory, self.geometry, self.options = directory, geometry, options
        self.tokens = tokens = chain.length
        self.digests = chain.digests
        self.block = geometry.block_tokens
        self.matched = len(match.entries) * self.block
        self.limit = block_granularity(geometry, tokens, options.tile)
        self.whole = {
            kind: self.block * _leading(holds(directory.entries, match.entries, kind))
            for kind in block_kinds(geometry)
        }
        positions = np.arange(options.tile, self.limit + 1, options.tile)
        reachable = positions[positions <= self.matched]
        last_blocks = match.entries[reachable // self.block - 1]
        self.snapshots = directory.snapshot_at(last_blocks)
        self.conditions = Conditions(
            positions=reachable,
            blocks={kind: reachable <= whole for kind, whole in self.whole.items()},
            snapshots={
                kind: _held(directory.entries, self.snapshots, kind)
                for kind in snapshot_kinds(geometry)
            },
        )

    def snapshot(self, position: int) -> int:
        """Entry of the snapshot at a position, -1 for none."""
        if position == 0 or not self.conditions.snapshots:
            return -1
        return int(self.snapshots[np.searchsorted(self.conditions.positions, position)])


def holds(entries: Entries, ids: np.ndarray, kind: Kind) -> np.ndarray:
    """Whether each entry has ``kind`` on the device, whole: bool ``[n]``."""
    present = entries.state[Tier.DEVICE, ids] == TierState.PRESENT
    return present & ((entries.kinds[ids] & kind_bits((kind,))) != 0)


def _held(entries: Entries, ids: np.ndarray, kind: Kind) -> np.ndarray:
    return (ids >= 0) & holds(entries, np.maximum(ids, 0), kind)


def _leading(flags: np.ndarray) -> int:
    """How many leading flags are set."""
    return len(flags) if flags.all() else int(np.argmin(flags))


def _plan(search: _Search, match: Match, found: Intersection, ideal: int | None) -> Plan:
    start, copied, seconds = _cheapest(search, found)
    snapshot = search.snapshot(start) if copied else -1
    entries = search.directory.entries
    count = found.shared // search.block
    return Plan(
        outcome=Outcome.REUSE if start == found.shared else Outcome.REBUILD,
        tokens=search.tokens,
        start=start,
        shared=found.shared,
        entries=match.entries[:count],
        generations=match.generations[:count],
        snapshot=snapshot,
        snapshot_generation=int(entries.generation[snapshot]) if snapshot >= 0 else 0,
        needs=_needs(search.geometry, copied),
        seconds=seconds,
        ideal=ideal,
        losses=() if ideal is None else _losses(search, match, found, start, ideal),
    )


def _cheapest(search: _Search, found: Intersection) -> tuple[int, bool, float]:
    """(first computed position, whether its state is copied, seconds); ties go to more reuse."""
    options, cost = search.options, search.options.cost

    def tiles(start: int) -> float:
        return cost.compute(start=start, tokens=search.tokens, tile=options.tile)

    ways = [(tiles(0), 0, False)]
    if found.snapshot:
        moved = cost.move(Tier.DEVICE, options.snapshot_bytes)
        ways.append((tiles(found.snapshot) + moved, -found.snapshot, True))
    if options.replay:
        start = replay_start(search.geometry, found.shared, options.tile)
        ways.append((tiles(start), -start, False))
    seconds, start, copied = min(ways)
    return -start, copied, seconds


def _needs(geometry: Geometry, copied: bool) -> Mapping[Kind, Action]:
    needs = dict.fromkeys(block_kinds(geometry), Action.READY)
    state = Action.COPY if copied else Action.REPLAY
    return needs | dict.fromkeys(snapshot_kinds(geometry), state)


def _losses(
    search: _Search, match: Match, found: Intersection, start: int, ideal: int
) -> tuple[Loss, ...]:
    """From the ideal down: partial block, blocks not found, kinds missing, tile, state."""
    whole_kind = min(search.whole, key=lambda kind: search.whole[kind], default=None)
    whole = min(search.whole.values(), default=search.matched)
    cause, kind = _why_unmatched(match)
    steps = [
        Step(position=round_down(ideal, search.block), cause=Cause.ALIGNMENT),
        Step(position=search.matched, cause=cause, kind=kind),
        Step(position=whole, cause=Cause.EVICTED, kind=whole_kind),
        Step(position=found.shared, cause=Cause.ALIGNMENT),
    ]
    cause, kind = _why_no_state(search, found)
    return blame(ideal, (*steps, Step(position=start, cause=cause, kind=kind)))


def _why_unmatched(match: Match) -> tuple[Cause, Kind | None]:
    """Why the run of blocks ends where it does."""
    if match.blame is None:
        return Cause.NEVER_PUBLISHED, None
    cause, _, kind = match.blame.partition(":")
    known = cause in {each.value for each in Cause}
    named = kind in {each.value for each in Kind}
    # Whoever withdraws may give any reason; one that is none of the causes is a decision.
    return Cause(cause) if known else Cause.POLICY, Kind(kind) if named else None


def _why_no_state(search: _Search, found: Intersection) -> tuple[Cause, Kind | None]:
    """Why the sequence state could not be copied at the last shared position."""
    kinds = snapshot_kinds(search.geometry)
    if not kinds or found.snapshot == found.shared:  # also where nothing is shared
        return Cause.POLICY, None
    entry = search.snapshot(found.shared)
    if entry >= 0:
        entries = search.directory.entries
        missing = [k for k in kinds if not holds(entries, np.array([entry]), k).all()]
        return Cause.EVICTED, missing[0]
    if search.directory.lost_cause(search.digests[found.shared // search.block - 1]):
        return Cause.EVICTED, kinds[0]
    return Cause.NO_SNAPSHOT, kinds[0]


def _miss(search: _Search, match: Match, ideal: int | None) -> Miss:
    options, tokens = search.options, search.tokens
    kind: Kind | None = None
    if search.limit == 0:
        reason = (
            f"a resume position is a multiple of {options.tile} tokens before the last one, and "
            f"there is none in {tokens}"
        )
    elif search.matched < options.tile:
        cause, kind = _why_unmatched(match)
        reason = f"of its first tile {search.matched} tokens are stored ({cause.value})"
    else:
        kind = min(search.whole, key=lambda kind: search.whole[kind])
        reason = f"{kind.value} is missing from position {search.whole[kind]} on"
    losses: tuple[Loss, ...] = ()
    if ideal is not None:
        losses = _losses(search, match, Intersection(shared=0, snapshot=0), 0, ideal)
    return Miss(
        tokens=tokens,
        reason=reason,
        kind=kind,
        seconds=options.cost.compute(start=0, tokens=tokens, tile=options.tile),
        ideal=ideal,
        losses=losses,
    )


def blocks_needed(geometry: Geometry, tokens: int) -> int:
    """Blocks of a sequence of ``tokens`` tokens."""
    return cdiv(tokens, geometry.block_tokens)
