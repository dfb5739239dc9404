"""The predicate: what of a prompt may be reused, from where to compute, and why not more.

    match (blocks found) --> block granularity --> kernel interface --> intersection --> plan

Nothing else in the library decides this; the engine, the tiers and the tests call ``plan_prefix``.
Planning reads the bookkeeping and changes nothing; the caller leases what the plan names before it
does anything else. Where loads are open, entries count wherever they are whole, and those that are
not on the device have to be brought there first; nothing is loaded that is cheaper to recompute.

    0 ........ start .................. shared .................. tokens
      reused   |  replayed: recomputed  |  computed, rows written
               |  against stored rows   |
               +-- state: from a snapshot, or from nothing (replay over the dependency cone)
"""

import dataclasses
import enum
import functools
from collections.abc import Mapping

import numpy as np

from hybridkv.arithmetic import cdiv, round_down, round_up
from hybridkv.blocks.entries import Entries, Form, Tier, kind_bits
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
from hybridkv.prefixes.found import NOTHING_FOUND, Found
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.losses import Cause, Loss, Step, blame
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds

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
    loads: bool = False
    """Whether entries of other tiers can be brought to the device."""
    load_snapshots: bool = True
    """Whether the device has places for snapshots that are brought."""
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
    loads: np.ndarray
    """int32: those of ``entries``, in order, that are not on the device; then the snapshot, where
    it is not."""
    needs: Mapping[Kind, Action]
    """How each kind of this model is restored."""
    seconds: float
    """Expected until the prompt's last token is computed."""
    ideal: int | None
    """Tokens of the longest common prefix with anything ever computed in the namespace, at most
    ``tokens - 1``; None where no ledger is kept."""
    losses: tuple[Loss, ...]
    """Ideal minus reused, by cause."""
    found: Found = NOTHING_FOUND
    """What there was of each kind for itself."""

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
        if len(self.loads):
            how += f", load {len(self.loads)} entries first"
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
    found: Found = NOTHING_FOUND

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


def has_loads(plan: Plan | Miss) -> bool:
    """Whether something has to be brought to the device before a plan can be carried out."""
    return isinstance(plan, Plan) and len(plan.loads) > 0


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
        self.match, self.tokens = match, chain.length
        self.digests = chain.digests
        self.block = geometry.block_tokens
        self.matched = len(match.entries) * self.block
        self.limit = block_granularity(geometry, self.tokens, options.tile)
        anywhere = options.loads
        self.whole = self.whole_up_to(anywhere)
        positions = np.arange(options.tile, self.limit + 1, options.tile)
        reachable = positions[positions <= self.matched]
        last_blocks = match.entries[reachable // self.block - 1]
        self.snapshots = directory.snapshot_at(last_blocks)
        self.conditions = Conditions(
            positions=reachable,
            blocks={kind: reachable <= whole for kind, whole in self.whole.items()},
            snapshots={
                kind: _held(
                    directory.entries, self.snapshots, kind, anywhere and options.load_snapshots
                )
                for kind in snapshot_kinds(geometry)
            },
        )

    def whole_up_to(self, anywhere: bool) -> Mapping[Kind, int]:
        """Position up to which all blocks hold each kind, on the device or anywhere."""
        entries, found = self.directory.entries, self.match.entries
        return {
            kind: self.block * _leading(holds(entries, found, kind, anywhere=anywhere))
            for kind in block_kinds(self.geometry)
        }

    def snapshot(self, position: int) -> int:
        """Entry of the snapshot at a position, -1 for none."""
        if position == 0 or not self.conditions.snapshots:
            return -1
        return int(self.snapshots[np.searchsorted(self.conditions.positions, position)])

    @functools.cached_property
    def reach(self) -> int:
        """Tokens of a replay that ends at a tile boundary."""
        far = round_up(self.geometry.longest_replay_tokens, self.options.tile)
        return self.geometry.replay_tokens(far)

    def load_seconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every block before each position: seconds to bring it to the device once its turn has
        come, float64 ``[n]``, and whether there is one to wait for, bool ``[n]``.
        """
        positions, cost = self.conditions.positions, self.options.cost
        if not self.options.loads:
            return np.zeros(len(positions)), np.zeros(len(positions), bool)
        tiers = fastest(self.directory.entries, self.match.entries)
        total, waits = np.zeros(len(tiers)), np.zeros(len(tiers), bool)
        for tier in (Tier.HOST, Tier.DISK):
            total += np.where(tiers == tier, cost.copy(tier, self.geometry.block_bytes), 0.0)
            waits |= tiers == tier
        last = positions // self.block - 1
        return np.cumsum(total)[last], (np.cumsum(waits) > 0)[last]


def _found(search: _Search) -> Found:
    """Each kind for itself; the counts of reports, on which no decision depends."""
    entries, last = search.directory.entries, search.tokens - 1
    whole, positions = search.whole, search.conditions.positions
    tokens = {kind: min(position, last) for kind, position in whole.items()}
    for kind, held in search.conditions.snapshots.items():
        tokens[kind] = int(max(positions[held], default=0))
    on_disk = entries.state[Tier.DISK, search.match.entries] == TierState.PRESENT
    tokens[Kind.DISK_PREFIX] = min(search.block * _leading(on_disk), last)
    index = whole.get(Kind.INDEXER, search.matched)
    refused = max(whole.get(Kind.COMPRESSED, index) - index, 0) // search.block
    return Found(looked_up=len(search.digests), refused=refused, tokens=tokens)


def holds(entries: Entries, ids: np.ndarray, kind: Kind, *, anywhere: bool = False) -> np.ndarray:
    """Whether each entry has ``kind``, whole, on the device or anywhere: bool ``[n]``."""
    states = entries.state[:, ids] if anywhere else entries.state[Tier.DEVICE, ids][None]
    present = (states == TierState.PRESENT).any(axis=0)
    return present & ((entries.kinds[ids] & kind_bits((kind,))) != 0)


def _held(entries: Entries, ids: np.ndarray, kind: Kind, anywhere: bool) -> np.ndarray:
    return (ids >= 0) & holds(entries, np.maximum(ids, 0), kind, anywhere=anywhere)


def fastest(entries: Entries, ids: np.ndarray) -> np.ndarray:
    """The first tier that has each entry whole, as int; one past the last where none has."""
    present = entries.state[:, ids] == TierState.PRESENT
    return np.where(present.any(axis=0), present.argmax(axis=0), len(Tier))


def _leading(flags: np.ndarray) -> int:
    """How many leading flags are set."""
    return len(flags) if flags.all() else int(np.argmin(flags))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Way:
    """One exact way to begin, and what it is expected to cost."""

    seconds: float
    start: int
    """First computed position."""
    needed: int
    """Blocks before it must be on the device."""
    copied: bool
    """Whether the state at ``start`` is a snapshot's; else it is rebuilt."""


def _plan(search: _Search, match: Match, found: Intersection, ideal: int | None) -> Plan:
    way = _cheapest(search, found)
    snapshot = search.snapshot(way.start) if way.copied else -1
    entries, block = search.directory.entries, search.block
    shared = _shared(search, found, way)
    count = shared // block
    loads = _off_device(entries, match.entries[: way.needed // block])
    if snapshot >= 0:
        loads = np.concatenate([loads, _off_device(entries, np.array([snapshot], np.int32))])
    outcome = Outcome.REUSE if way.start == shared else Outcome.REBUILD
    return Plan(
        outcome=Outcome.LOAD_THEN_REUSE if len(loads) else outcome,
        tokens=search.tokens,
        start=way.start,
        shared=shared,
        entries=match.entries[:count],
        generations=match.generations[:count],
        snapshot=snapshot,
        snapshot_generation=int(entries.generation[snapshot]) if snapshot >= 0 else 0,
        loads=loads,
        needs=_needs(search, way.copied, loads),
        seconds=way.seconds,
        ideal=ideal,
        losses=() if ideal is None else _losses(search, match, found, way.start, ideal),
        found=_found(search),
    )


def _off_device(entries: Entries, ids: np.ndarray) -> np.ndarray:
    return ids[entries.state[Tier.DEVICE, ids] != TierState.PRESENT]


def _shared(search: _Search, found: Intersection, way: _Way) -> int:
    """Blocks that the state does not need are shared too, as far as they are on the device.

    Not after a rebuilt state, which is exact from the end of its replay on.
    """
    if way.needed == found.shared or not (way.copied or way.start == 0):
        return way.needed
    blocks = search.match.entries[way.needed // search.block : found.shared // search.block]
    present = search.directory.entries.state[Tier.DEVICE, blocks] == TierState.PRESENT
    reach = way.needed + search.block * _leading(present)
    positions = search.conditions.positions
    return int(max(positions[positions <= reach], default=0))


def _cheapest(search: _Search, found: Intersection) -> _Way:
    """The least expected seconds; ties go to more reuse, then to what is rebuilt."""
    options, cost, conditions = search.options, search.options.cost, search.conditions
    positions = conditions.positions
    whole = positions <= found.shared
    load, waits = search.load_seconds()

    def tiles(starts: np.ndarray) -> np.ndarray:
        return -(-(search.tokens - starts) // options.tile) * cost.tile_seconds

    ways = [_Way(seconds=float(tiles(np.zeros(1, np.int64))[0]), start=0, needed=0, copied=False)]
    copied = whole.copy()
    for held in conditions.snapshots.values():
        copied &= held
    at = np.flatnonzero(copied)
    if len(at):
        state, away = _state_seconds(search, at)
        seconds = load[at] + tiles(positions[at]) + state
        seconds += np.where(waits[at] | away, cost.queue_seconds, 0.0)
        best = at[_last_least(seconds)]
        start = int(positions[best])
        ways.append(_Way(seconds=float(seconds.min()), start=start, needed=start, copied=True))
    if options.replay:
        at = np.flatnonzero(whole)
        starts = _replay_starts(search, positions[at])
        seconds = load[at] + tiles(starts) + np.where(waits[at], cost.queue_seconds, 0.0)
        best = _last_least(seconds)
        ways.append(
            _Way(
                seconds=float(seconds[best]),
                start=int(starts[best]),
                needed=int(positions[at[best]]),
                copied=False,
            )
        )
    return min(ways, key=lambda way: (way.seconds, -way.start, way.copied, -way.needed))


def _last_least(seconds: np.ndarray) -> int:
    return int(np.flatnonzero(seconds == seconds.min())[-1])


def _state_seconds(search: _Search, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Seconds to read the snapshot at each of these positions, once its turn has come; and whether
    it has to be brought first.
    """
    cost, size = search.options.cost, search.options.snapshot_bytes
    seconds = np.full(len(at), cost.copy(Tier.DEVICE, size))
    if not search.conditions.snapshots:
        return seconds, np.zeros(len(at), bool)
    tiers = fastest(search.directory.entries, search.snapshots[at])
    for tier in (Tier.HOST, Tier.DISK):
        seconds += np.where(tiers == tier, cost.copy(tier, size), 0.0)
    return seconds, tiers != Tier.DEVICE


def _replay_starts(search: _Search, positions: np.ndarray) -> np.ndarray:
    """``replay_start`` of each position; at tile boundaries a replay is as long everywhere."""
    tile = search.options.tile
    return np.maximum(positions - search.reach, 0) // tile * tile


def _needs(search: _Search, copied: bool, loads: np.ndarray) -> Mapping[Kind, Action]:
    geometry, entries = search.geometry, search.directory.entries
    needs = dict.fromkeys(block_kinds(geometry), Action.READY)
    state = Action.COPY if copied else Action.REPLAY
    needs |= dict.fromkeys(snapshot_kinds(geometry), state)
    forms = entries.form[loads]
    if (forms == Form.BLOCK).any():
        needs |= dict.fromkeys(block_kinds(geometry), Action.LOAD)
    if (forms == Form.SNAPSHOT).any():
        needs |= dict.fromkeys(snapshot_kinds(geometry), Action.LOAD)
    if (fastest(entries, loads) == Tier.DISK).any():
        needs[Kind.DISK_PREFIX] = Action.LOAD
    return needs


def _losses(
    search: _Search, match: Match, found: Intersection, start: int, ideal: int
) -> tuple[Loss, ...]:
    """From the ideal down: partial block, blocks not found, kinds missing, tile, state."""
    anywhere = search.whole_up_to(anywhere=True)
    whole_kind = min(anywhere, key=lambda kind: anywhere[kind], default=None)
    cause, kind = _why_unmatched(match)
    steps = [
        Step(position=round_down(ideal, search.block), cause=Cause.ALIGNMENT),
        Step(position=search.matched, cause=cause, kind=kind),
        Step(
            position=min(anywhere.values(), default=search.matched),
            cause=Cause.EVICTED,
            kind=whole_kind,
        ),
        # What is whole on another tier and not brought: too late, or not worth it.
        Step(
            position=min(search.whole.values(), default=search.matched), cause=Cause.LOAD_TOO_SLOW
        ),
        Step(position=found.shared, cause=Cause.ALIGNMENT),
    ]
    cause, kind = _why_no_state(search, found)
    reach = found.snapshot
    if search.options.replay and found.shared:
        reach = max(reach, int(_replay_starts(search, np.array([found.shared]))[0]))
    steps.append(Step(position=max(reach, start), cause=cause, kind=kind))
    return blame(ideal, (*steps, Step(position=start, cause=Cause.POLICY)))


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
        ids = np.array([entry])
        missing = [k for k in kinds if not holds(entries, ids, k, anywhere=True).all()]
        if not missing:
            return Cause.LOAD_TOO_SLOW, kinds[0]
        return Cause.EVICTED, missing[0]
    lost = search.directory.lost_cause(search.digests[found.shared // search.block - 1])
    if lost == Cause.POLICY.value:
        return Cause.POLICY, kinds[0]
    if lost:
        named = [kind for kind in Kind if lost.endswith(f":{kind.value}")]
        return Cause.EVICTED, (*named, kinds[0])[0]
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
        found=_found(search),
    )


def blocks_needed(geometry: Geometry, tokens: int) -> int:
    """Blocks of a sequence of ``tokens`` tokens."""
    return cdiv(tokens, geometry.block_tokens)
